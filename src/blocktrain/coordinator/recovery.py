"""What a run knows again after a restart: its state from records, its history from the ledger.

Also the way there: a change of state as records. Only here do moments become seconds left.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from blocktrain.coordinator.state import (
    BlockState,
    Lease,
    RoundState,
    RunState,
    WaitingUpdate,
    WorkerState,
    remaining,
    until,
)
from blocktrain.protocol import messages as m
from blocktrain.protocol.ledger import LedgerEntry
from blocktrain.store.contract import (
    Changes,
    LeaseRecord,
    LeaseTimes,
    RoundRecord,
    StoredRun,
    UpdateRecord,
    VersionRecord,
    WorkerRecord,
)

K = TypeVar("K")
V = TypeVar("V")
Body = dict[str, Any]  # of a ledger entry


def recover_state(stored: StoredRun, now: float, fusion: int | None) -> RunState:
    """The state as of the last commit. What was left of every deadline counts from now."""
    rounds = {record.block: record for record in stored.rounds}
    blocks = {}
    for version in stored.versions:
        index = version.block
        waiting = (waiting_update(u) for u in stored.pending if u.block == index)
        current = replace(_round(now, version, rounds.get(index)), updates=tuple(waiting))
        blocks[index] = BlockState(
            version=version.version,
            steps=version.steps,
            tokens=version.tokens,
            loss=version.loss,
            fusion=index == fusion,
            task_seconds=tuple(stored.task_seconds.get(index, ())),
            next_number=stored.next_numbers.get(index, 0),
            round=current,
        )
    return RunState(
        blocks=blocks,
        leases={record.task: _lease(now, record) for record in stored.leases},
        # Everyone counts as seen just now, so that a restart loses nobody.
        workers={w.id: worker_state(w, now) for w in stored.workers},
        next_task=stored.next_task,
    )


def changes_between(
    now: float, before: RunState, after: RunState, known: Mapping[str, WorkerRecord]
) -> Changes:
    """The records that differ. Progress and last signs of life are not stored.

    Workers report them again after a restart.
    """
    leases = [
        lease_record(now, new)
        for _, old, new in _touched(before.leases, after.leases)
        if old is None or _stored_lease(old) != _stored_lease(new)
    ]
    lost = [t for t in _ended(before, after) if not _answered(before, after, t)]
    rounds = [
        round_record(now, index, new)
        for index, old, new in _touched(before.blocks, after.blocks)
        if old is not None
        and new.version == old.version
        and replace(new.round, updates=()) != replace(old.round, updates=())
    ]
    workers = [
        worker_record(known[name], new)
        for name, old, new in _touched(before.workers, after.workers)
        if old is None or replace(old, seen=0.0) != replace(new, seen=0.0)
    ]
    return Changes(leases=leases, lost=sorted(lost), rounds=rounds, workers=workers)


def abandoned_uploads(before: RunState, after: RunState) -> list[tuple[int, int]]:
    """(task, fence) of leases that ended without an update: lost, or given to another worker."""
    gone = [t for t in _ended(before, after) if not _answered(before, after, t)]
    passed_on = [
        task
        for task, old, new in _touched(before.leases, after.leases)
        if old is not None and old.fence != new.fence
    ]
    return [(task, before.leases[task].fence) for task in (*gone, *passed_on)]


def _touched(before: Mapping[K, V], after: Mapping[K, V]) -> list[tuple[K, V | None, V]]:
    """What may differ: all else is the same object. A call touches one or two of a thousand."""
    if after is before:
        return []
    return [(key, before.get(key), new) for key, new in after.items() if before.get(key) is not new]


def _ended(before: RunState, after: RunState) -> set[int]:
    if before.leases is after.leases:
        return set()
    return before.leases.keys() - after.leases.keys()


def _answered(before: RunState, after: RunState, task: int) -> bool:
    """Whether a lease ended with an update. Then the update's own transaction marks its task."""
    index = before.leases[task].block
    return len(after.blocks[index].round.updates) > len(before.blocks[index].round.updates)


def _stored_lease(lease: Lease) -> Lease:
    return replace(lease, done_steps=0)


def lease_record(now: float, lease: Lease) -> LeaseRecord:
    return LeaseRecord(
        task=lease.task,
        number=lease.number,
        block=lease.block,
        base=lease.base,
        fence=lease.fence,
        worker=lease.worker,
        steps=lease.steps,
        start_step=lease.start_step,
        age=now - lease.granted,
        remaining=remaining(now, lease.expires) or 0.0,
        expected=lease.expected,
        trained=lease.trained,
        expired=lease.expired,
    )


def lease_times(now: float, leases: Iterable[Lease]) -> list[LeaseTimes]:
    return [
        LeaseTimes(x.task, x.fence, now - x.granted, remaining(now, x.expires) or 0.0)
        for x in leases
    ]


def _lease(now: float, record: LeaseRecord) -> Lease:
    return Lease(
        task=record.task,
        number=record.number,
        block=record.block,
        base=record.base,
        fence=record.fence,
        worker=record.worker,
        steps=record.steps,
        start_step=record.start_step,
        granted=now - record.age,
        expires=now + record.remaining,
        expected=record.expected,
        trained=record.trained,
        expired=record.expired,
    )


def round_record(now: float, index: int, block: BlockState) -> RoundRecord:
    current = block.round
    return RoundRecord(
        block=index,
        version=block.version,
        attempt=current.attempt,
        length=current.length,
        remaining=remaining(now, current.deadline),
        extended=current.extended,
        grace_remaining=remaining(now, current.grace_until),
    )


def _round(now: float, version: VersionRecord, record: RoundRecord | None) -> RoundState:
    if record is None or record.version != version.version:
        return RoundState()
    return RoundState(
        deadline=until(now, record.remaining),
        length=record.length,
        extended=record.extended,
        grace_until=until(now, record.grace_remaining),
        attempt=record.attempt,
    )


def waiting_update(record: UpdateRecord) -> WaitingUpdate:
    return WaitingUpdate(
        record.id, record.worker, record.tokens, record.steps, record.staleness, record.weight
    )


def worker_record(known: WorkerRecord, worker: WorkerState) -> WorkerRecord:
    return replace(
        known,
        block=worker.block,
        seconds_per_step=worker.seconds_per_step,
        overhead=worker.overhead,
        kicked=worker.kicked,
    )


def worker_state(record: WorkerRecord, now: float) -> WorkerState:
    return WorkerState(
        record.id, record.block, now, record.seconds_per_step, record.overhead, record.kicked
    )


@dataclass
class UpdateCounts:
    """Of a block or of a worker."""

    accepted: int = 0
    refused: int = 0
    late: int = 0  # started from an older version
    late_by_one: int = 0
    tokens: int = 0


@dataclass
class RunHistory:
    """What the run keeps at hand of its ledger. A restart reads the ledger and knows the same."""

    orders: dict[int, m.Order] = field(default_factory=dict)  # by task that may still be answered
    waiting: dict[str, tuple[m.Submission, m.Order]] = field(default_factory=dict)  # by update
    public: dict[str, int] = field(default_factory=dict)  # blob that members may read -> its block
    features: dict[int, tuple[m.BlockVersion, ...]] = field(default_factory=dict)
    """By block: the versions that its newest version was trained on."""
    devices: dict[str, str] = field(default_factory=dict)  # by worker
    blocks: dict[int, UpdateCounts] = field(default_factory=dict)
    workers: dict[str, UpdateCounts] = field(default_factory=dict)
    versions: int = 0  # made by merging
    finished: bool = False
    head: LedgerEntry | None = None

    def follow(self, entry: LedgerEntry) -> Body:
        """Take one more entry into account; its body."""
        self.head = entry
        body: Body = json.loads(entry.body)
        if (take := getattr(self, f"_{entry.kind}", None)) is not None:
            take(body)
        return body

    def _run(self, body: Body) -> None:
        for part in ("train", "valid"):
            self.public[body["corpus"][part]["sha256"]] = 0

    def _join(self, body: Body) -> None:
        self.devices[body["worker"]] = body["device"]

    def _lease(self, body: Body) -> None:
        order = m.Order.model_validate_json(json.dumps(body["order"]))
        self.orders[order.task] = order

    def _update(self, body: Body) -> None:
        submission = m.Submission.model_validate_json(json.dumps(body["submission"]))
        order = self.orders.pop(submission.task, None)
        if order is None:
            order = m.Order.model_validate_json(json.dumps(body["order"]))
        self.waiting[submission.update] = (submission, order)
        for counts in (
            self.blocks.setdefault(submission.block, UpdateCounts()),
            self.workers.setdefault(submission.worker, UpdateCounts()),
        ):
            counts.accepted += 1
            counts.late += body["staleness"] > 0
            counts.late_by_one += body["staleness"] == 1
            counts.tokens += submission.tokens

    def _version(self, body: Body) -> None:
        block = body["block"]
        self.versions += body["version"] > 0
        self.public[body["weights"]["sha256"]] = block
        if body["momentum"] is not None:
            self.public[body["momentum"]["sha256"]] = block
        self.features[block] = tuple(
            m.BlockVersion.model_validate_json(json.dumps(pin)) for pin in body["features"]
        )
        self._settle(block, [*(part["update"] for part in body["parts"]), *body["dropped"]])

    def _round(self, body: Body) -> None:
        self._settle(body["block"], body.get("dropped", ()))

    def _finish(self, _: Body) -> None:
        self.finished = True

    def _settle(self, block: int, updates: Iterable[str]) -> None:
        """Payloads can be read once their round is closed, when nobody can copy them any more."""
        for name in updates:
            submission, _ = self.waiting.pop(name)
            self.public[submission.payload_sha256] = block

    def forget_orders(self, open_tasks: Mapping[int, Any]) -> None:
        for task in [t for t in self.orders if t not in open_tasks]:
            del self.orders[task]
