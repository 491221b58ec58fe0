"""Records to rows and back, inside a transaction that `store` has opened."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite import Insert, insert
from sqlalchemy.engine import Connection, Row

from blocktrain.coordinator.state import (
    KEPT_TIMES,
    Arrived,
    BlockState,
    Lease,
    RoundState,
    RunState,
    WorkerState,
    remaining,
    until,
)
from blocktrain.errors import Conflict
from blocktrain.store import tables
from blocktrain.store.contract import Answer, Changes, UpdateRecord, VersionRecord, WorkerRecord
from blocktrain.store.ledger import Entry, Note, link
from blocktrain.store.statements import Statement


def _upsert(table: sa.Table, *added: str) -> Insert:
    """Insert a row, or overwrite all of it but its key; `added` columns are added to what is there."""
    made, keys = insert(table), [column.name for column in table.primary_key]
    new = {
        c.name: c + made.excluded[c.name] if c.name in added else made.excluded[c.name]
        for c in table.c
        if c.name not in keys
    }
    return made.on_conflict_do_update(index_elements=keys, set_=new)


_t, _u, _v = tables.tasks.c, tables.updates.c, tables.versions.c
_HEAD = Statement(sa.select(tables.ledger).order_by(tables.ledger.c.seq.desc()).limit(1))
_APPEND = Statement(tables.ledger.insert())
_TASK = Statement(sa.select(_t.status, _t.fence, _t.worker).where(_t.task == sa.bindparam("task")))
_PUT_TASK = Statement(_upsert(tables.tasks))
_OPEN = (_t.task == sa.bindparam("of"), _t.fence == sa.bindparam("with_fence"), _t.status == "open")
_PUT_TIMES = Statement(
    tables.tasks.update()
    .where(*_OPEN)
    .values(age=sa.bindparam("passed"), remaining=sa.bindparam("left"))
)
_LOSE = Statement(
    tables.tasks.update()
    .where(_t.task == sa.bindparam("of"), _t.status != "done")
    .values(status="lost")
)
_PUT_ROUND = Statement(_upsert(tables.rounds))
_PUT_WORKER = Statement(_upsert(tables.workers))
_COUNT = Statement(_upsert(tables.counters, "bytes_in", "bytes_out"))
_NONCE = Statement(tables.nonces.insert())
_FINISH = Statement(
    tables.tasks.update()
    .where(
        *(
            _t[name] == sa.bindparam(f"its_{name}")
            for name in ("task", "fence", "worker", "block", "base")
        )
    )
    .where((_t.status == "open") | (_t.status == "expired"))
    .values(status="done")
)
_UPDATE = [_u[name] for name in UpdateRecord.__dataclass_fields__]
_ANSWER = Statement(
    sa.select(*_UPDATE, tables.receipts.c.content)
    .select_from(tables.updates.join(tables.receipts, tables.receipts.c.update == _u.id))
    .where(_u.task == sa.bindparam("task"), _u.payload == sa.bindparam("payload"))
)
_PUT_UPDATE = Statement(tables.updates.insert())
_PUT_RECEIPT = Statement(tables.receipts.insert())
_WAITS = (_u.accepted == 1, _u.applied.is_(None), _u.dropped.is_(None))
_PENDING = Statement(
    sa.select(*_UPDATE).where(_u.block == sa.bindparam("block"), *_WAITS).order_by(_u.id)
)
_APPLY = Statement(
    tables.updates.update()
    .where(_u.id == sa.bindparam("name"))
    .values(applied=sa.bindparam("version"))
)
_DROP = Statement(
    tables.updates.update()
    .where(_u.id == sa.bindparam("name"), *_WAITS)
    .values(dropped=sa.bindparam("reason"))
)
_OF_BLOCK = sa.select(*(_v[name] for name in VersionRecord.__dataclass_fields__)).where(
    _v.block == sa.bindparam("block")
)
_NEWEST = Statement(_OF_BLOCK.order_by(_v.version.desc()).limit(1))
_VERSION = Statement(_OF_BLOCK.where(_v.version == sa.bindparam("version")))
_PUT_VERSION = Statement(tables.versions.insert())
_END_ROUND = Statement(tables.rounds.delete().where(tables.rounds.c.block == sa.bindparam("block")))


def entry(row: Row[Any]) -> Entry:
    """A row of the ledger."""
    return Entry(row.seq, row.kind, row.body, row.previous, row.hash)


def head(db: Connection) -> Entry | None:
    """The newest entry."""
    row = _HEAD.run(db, {}).fetchone()
    return Entry(*row) if row else None


def append(db: Connection, note: Note) -> Entry:
    """Link a note to the head of the ledger."""
    new = link(head(db), note)
    _APPEND.run(db, vars(new))
    return new


def write_changes(db: Connection, now: float, changes: Changes) -> tuple[Entry, ...]:
    """Everything that accompanies a transaction."""
    for lease in changes.leases:
        _write_lease(db, now, lease)
    _write_times(db, now, changes.times)
    for task in changes.lost:
        _LOSE.run(db, {"of": task})
    for name, reason in changes.dropped.items():
        _drop(db, name, reason)
    for block, (version, current) in changes.rounds.items():
        _PUT_ROUND.run(db, _round_row(now, block, version, current))
    for worker in changes.workers:
        _PUT_WORKER.run(db, _worker_row(worker))
    _COUNT.run_each(db, map(vars, changes.traffic))
    for name, nonce, stamp in changes.nonces:
        _NONCE.run(db, {"worker": name, "nonce": nonce, "stamp": stamp})
    return tuple(append(db, note) for note in changes.notes)


def _write_lease(db: Connection, now: float, lease: Lease) -> None:
    """A fence never goes down, and belongs to one worker; a finished task stays finished."""
    stored = _TASK.run(db, {"task": lease.task}).fetchone()
    if stored is not None:
        status, fence, worker = stored
        if status in ("done", "lost"):
            raise Conflict(f"task {lease.task} is over")
        if lease.fence < fence or (lease.fence == fence and lease.worker != worker):
            raise Conflict(
                f"task {lease.task} has the fence {fence} of {worker}, not {lease.fence} of {lease.worker}"
            )
    values = {
        "task": lease.task,
        "number": lease.number,
        "block": lease.block,
        "base": lease.base,
        "fence": lease.fence,
        "worker": lease.worker,
        "steps": lease.steps,
        "start_step": lease.start_step,
        "age": now - lease.granted,
        "remaining": remaining(now, lease.expires),
        "expected": lease.expected,
        "trained": int(lease.trained),
        "status": "expired" if lease.expired else "open",
    }
    _PUT_TASK.run(db, values)


def _write_times(db: Connection, now: float, leases: Sequence[Lease]) -> None:
    """One statement for all, as it is done every few seconds for every task that is out."""
    times = (
        {
            "of": x.task,
            "with_fence": x.fence,
            "passed": now - x.granted,
            "left": remaining(now, x.expires),
        }
        for x in leases
    )
    _PUT_TIMES.run_each(db, times)


def _round_row(now: float, block: int, version: int, current: RoundState) -> dict[str, Any]:
    return {
        "block": block,
        "version": version,
        "attempt": current.attempt,
        "length": current.length,
        "remaining": remaining(now, current.deadline),
        "extended": int(current.extended),
        "grace_remaining": remaining(now, current.grace_until),
    }


def _worker_row(worker: WorkerRecord) -> dict[str, Any]:
    s = worker.state
    return {
        "id": s.id,
        "key": worker.key,
        "name": worker.name,
        "block": s.block,
        "seconds_per_step": s.seconds_per_step,
        "overhead": s.overhead,
        "kicked": int(s.kicked),
    }


def finish_task(db: Connection, update: UpdateRecord) -> None:
    """The fence is checked where it counts: in the transaction that accepts."""
    its = {
        f"its_{name}": getattr(update, name)
        for name in ("task", "fence", "worker", "block", "base")
    }
    if _FINISH.run(db, its).rowcount != 1:
        raise Conflict(
            f"task {update.task} is not out with fence {update.fence} for {update.worker}: ask for a new task"
        )


def put_update(db: Connection, update: UpdateRecord, entry: int, receipt: bytes) -> None:
    """An update, the entry that tells of it, and its receipt."""
    _PUT_UPDATE.run(
        db,
        {
            **update_body(update),
            "accepted": int(update.accepted),
            "applied": None,
            "dropped": None,
            "entry": entry,
        },
    )
    _PUT_RECEIPT.run(db, {"update": update.id, "content": receipt})


def update_body(update: UpdateRecord) -> dict[str, Any]:
    """An update as the ledger tells it."""
    return {**vars(update), "id": update.id}


def _update(row: Sequence[Any]) -> UpdateRecord:
    found = UpdateRecord(*row)
    return replace(found, accepted=bool(found.accepted))


def read_answer(db: Connection, task: int, payload: str) -> Answer | None:
    """The stored answer to a key."""
    row = _ANSWER.run(db, {"task": task, "payload": payload}).fetchone()
    return Answer(_update(row[:-1]), row[-1], repeated=True) if row else None


def read_pending(db: Connection, block: int) -> list[UpdateRecord]:
    """Accepted updates of a block that no version has taken up."""
    return [_update(row) for row in _PENDING.run(db, {"block": block})]


def settle_updates(
    db: Connection, version: VersionRecord, applied: Sequence[str], dropped: Mapping[str, str]
) -> None:
    """Every pending update of the block becomes part of the version or is dropped with a reason; none twice, none forgotten."""
    named = [*applied, *dropped]
    waiting = {u.id for u in read_pending(db, version.block)}
    if len(set(named)) != len(named) or set(named) != waiting:
        raise Conflict(
            f"version {version.version} of block {version.block} must settle exactly the updates that wait for it"
        )
    _APPLY.run_each(db, ({"name": name, "version": version.version} for name in applied))
    for name, reason in dropped.items():
        _drop(db, name, reason)


def _drop(db: Connection, name: str, reason: str) -> None:
    if _DROP.run(db, {"name": name, "reason": reason}).rowcount != 1:
        raise Conflict(f"the update {name} does not wait for a merge and cannot be dropped")


def put_version(db: Connection, version: VersionRecord, entry: int) -> None:
    """A version and the entry that tells of it; the round that led to it is over."""
    _PUT_VERSION.run(db, {**vars(version), "norms": json.dumps(version.norms), "entry": entry})
    _END_ROUND.run(db, {"block": version.block})


def version_body(version: VersionRecord) -> dict[str, Any]:
    """A version as the ledger tells it."""
    return {**vars(version), "norms": list(version.norms)}


def read_version(db: Connection, block: int, version: int | None) -> VersionRecord | None:
    """One version, or the newest."""
    found = (
        _NEWEST.run(db, {"block": block})
        if version is None
        else _VERSION.run(db, {"block": block, "version": version})
    )
    if (row := found.fetchone()) is None:
        return None
    stored = dict(zip(VersionRecord.__dataclass_fields__, row, strict=True))
    return VersionRecord(**{**stored, "norms": tuple(json.loads(stored["norms"]))})


def read_workers(db: Connection, now: float) -> list[WorkerRecord]:
    """All workers; each is taken to have been seen just now, so that a restart loses nobody."""
    found = []
    for row in db.execute(sa.select(tables.workers).order_by(tables.workers.c.id)):
        state = WorkerState(
            row.id, row.block, now, row.seconds_per_step, row.overhead, bool(row.kicked)
        )
        found.append(WorkerRecord(state, row.key, row.name))
    return found


def read_state(db: Connection, now: float, fusion: int | None) -> RunState:
    """Everything that `rounds` needs to go on."""
    t = tables.tasks.c
    numbers = {
        row[0]: row[1]
        for row in db.execute(sa.select(t.block, sa.func.max(t.number)).group_by(t.block))
    }
    newest = db.execute(
        sa.select(tables.versions.c.block).distinct().order_by(tables.versions.c.block)
    ).scalars()
    blocks = {}
    for index in list(newest):
        version = read_version(db, index, None)
        if version is not None:
            block = _read_block(db, now, version)
            blocks[index] = replace(
                block, fusion=index == fusion, next_number=numbers.get(index, -1) + 1
            )
    leases = [
        _lease(row, now)
        for row in db.execute(sa.select(tables.tasks).where(t.status.in_(("open", "expired"))))
    ]
    last = db.execute(sa.select(sa.func.max(t.task))).scalar_one() or 0
    return RunState(
        blocks=blocks,
        leases={lease.task: lease for lease in leases},
        workers={w.state.id: w.state for w in read_workers(db, now)},
        next_task=last + 1,
    )


def _read_block(db: Connection, now: float, version: VersionRecord) -> BlockState:
    u = tables.updates.c
    timed = (u.block == version.block, u.accepted == 1, u.seconds.is_not(None))
    times = list(
        db.execute(
            sa.select(u.seconds).where(*timed).order_by(u.entry.desc()).limit(KEPT_TIMES)
        ).scalars()
    )
    row = db.execute(
        sa.select(tables.rounds).where(tables.rounds.c.block == version.block)
    ).one_or_none()
    current = RoundState()
    if row is not None and row.version == version.version:
        grace = until(now, row.grace_remaining)
        current = RoundState(
            until(now, row.remaining), row.length, bool(row.extended), grace, row.attempt
        )
    pending = read_pending(db, version.block)
    waiting = tuple(
        Arrived(x.id, x.worker, x.tokens, x.steps, x.staleness, x.weight) for x in pending
    )
    return BlockState(
        version=version.version,
        steps=version.steps,
        tokens=version.tokens,
        loss=version.loss,
        task_seconds=tuple(reversed(times)),
        round=replace(current, updates=waiting),
    )


def _lease(row: Row[Any], now: float) -> Lease:
    return Lease(
        task=row.task,
        number=row.number,
        block=row.block,
        base=row.base,
        fence=row.fence,
        worker=row.worker,
        steps=row.steps,
        start_step=row.start_step,
        granted=now - row.age,
        expires=now + row.remaining,
        expected=row.expected,
        trained=bool(row.trained),
        expired=row.status == "expired",
    )
