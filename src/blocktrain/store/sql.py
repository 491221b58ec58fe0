"""The embedded store: SQLite for the records, a folder for the blobs.

One process and one connection at a time. Order of durability: blob, then one transaction, then the
acknowledgement. After the first write that fails, nothing is written any more.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import IO, Any

import sqlalchemy as sa
from pydantic import ValidationError
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, IntegrityError

from blocktrain.errors import Conflict, Damaged, FolderInUse, RunError, StorageFailed
from blocktrain.files import sync_folder, write_atomic
from blocktrain.protocol.identity import canonical_json
from blocktrain.protocol.ledger import LedgerEntry
from blocktrain.store import schema
from blocktrain.store.blobs import FolderBlobReader, FolderBlobs
from blocktrain.store.contract import (
    NOTHING,
    ByteCount,
    Changes,
    LeaseRecord,
    RoundRecord,
    StoredAnswer,
    StoredRun,
    UpdateRecord,
    VersionRecord,
    WorkerRecord,
    join_spans,
    link_entry,
    require_link,
    require_settled,
    require_successor,
)

DATABASE = "run.sqlite"
_LEDGER = "SELECT seq, kind, body, previous, hash FROM ledger WHERE seq > ? ORDER BY seq LIMIT ?"
_CONTRIBUTIONS = (
    "SELECT worker, count(*), sum(tokens) FROM updates WHERE applied IS NOT NULL GROUP BY worker"
)


def lock_folder(folder: Path) -> IO[str]:
    """Make the folder this process's own, as long as the file is open.

    A forked child would hold the lock too: start children by spawn.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("a+", encoding="ascii")
    except OSError as error:
        raise RunError(f"cannot use the folder {folder}: {error.strerror or error}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read(20).strip() or "unknown"
        file.close()
        raise FolderInUse(
            f"another coordinator (process {holder}) is using {folder}: "
            "stop it, or choose another folder with --out",
            holder,
        ) from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


@cache
def _compile(clause: sa.sql.ClauseElement) -> tuple[str, dict[str, Any]]:
    """Text and fixed values of a statement of `schema`.

    SQLAlchemy writes each statement once, and the driver executes its text. Going through
    SQLAlchemy every time takes ten times as long as SQLite's own work.
    """
    compiled: Any = clause.compile(dialect=sqlite.dialect(paramstyle="named"))
    return str(compiled), {k: v for k, v in compiled.params.items() if v is not None}


def _run(db: Connection, clause: sa.sql.ClauseElement, values: Mapping[str, Any]) -> sqlite3.Cursor:
    """Execute one statement. Its errors are the driver's."""
    text, fixed = _compile(clause)
    return _driver(db).execute(text, {**fixed, **values})


def _run_each(
    db: Connection, clause: sa.sql.ClauseElement, rows: Iterable[Mapping[str, Any]]
) -> None:
    text, fixed = _compile(clause)
    _driver(db).executemany(text, ({**fixed, **row} for row in rows))


def _driver(db: Connection) -> sqlite3.Connection:
    """The connection below SQLAlchemy's."""
    connection: sqlite3.Connection | None = db.connection.driver_connection
    if connection is None:
        raise sqlite3.ProgrammingError("the connection is closed")
    return connection


def _engine(path: Path) -> Engine:
    engine = sa.create_engine(
        f"sqlite:///{path}",
        poolclass=sa.pool.StaticPool,
        connect_args={"check_same_thread": False, "timeout": 10},
    )

    @sa.event.listens_for(engine, "connect")
    def _connect(connection: sqlite3.Connection, _: Any) -> None:
        connection.isolation_level = None  # the driver must not begin transactions by itself
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        _driver(connection).execute("BEGIN IMMEDIATE")

    return engine


class SqlStore:
    """See `contract.Store` for what each method promises."""

    def __init__(self, folder: Path, run_id: str | None = None) -> None:
        self.address = str(folder.resolve())
        self.run_id = ""
        self.epoch = 0
        self._folder = folder
        self._mutex = threading.RLock()
        self._failed: str | None = None
        self._ours = False  # the epoch is ours, and every transaction checks it
        self._lock_file = lock_folder(folder)
        try:
            self._engine = _engine(folder / DATABASE)
            self._open(run_id)
        except BaseException:
            self._lock_file.close()
            raise

    def _open(self, run_id: str | None) -> None:
        try:
            with self._transaction() as db:
                self._take_over(db, run_id)
            self._ours = True
            sync_folder(self._folder)
            self.blobs = FolderBlobs(self._folder, self._fail)
            self._mark_blobs()
        except OSError as error:
            self._engine.dispose()
            raise StorageFailed(
                f"cannot open the store in {self._folder}: {error.strerror or error}"
            ) from error
        except BaseException:
            self._engine.dispose()
            raise

    def _take_over(self, db: Connection, run_id: str | None) -> None:
        schema.create_tables(db)
        row = db.execute(sa.select(schema.meta)).one_or_none()
        if row is None:
            self.run_id, self.epoch = run_id or uuid.uuid4().hex, 1
            values = {"id": 1, "schema": schema.SCHEMA, "run_id": self.run_id, "epoch": 1}
            db.execute(schema.meta.insert().values(values))
            return
        if row.schema != schema.SCHEMA:
            raise RunError(
                f"{self._folder} was written by another BlockTrain "
                f"(schema {row.schema}, this one reads {schema.SCHEMA}): continue the run with the "
                "version that it began with, or start a new one in another folder"
            )
        if run_id is not None and run_id != row.run_id:
            raise RunError(
                f"{self._folder} holds the run {row.run_id}, not {run_id}: "
                "is the right folder mounted?"
            )
        self.run_id, self.epoch = row.run_id, row.epoch + 1
        db.execute(schema.meta.update().values(epoch=self.epoch))

    def _mark_blobs(self) -> None:
        """The run's id beside the blobs, so that a swapped blob folder is noticed."""
        mark = self._folder / "blobs" / "RUN"
        if not mark.exists():
            with self._transaction() as db:
                count = sa.select(sa.func.count()).select_from(schema.versions)
                versions = db.execute(count).scalar_one()
            if versions:
                raise RunError(
                    f"the blobs of run {self.run_id} are missing in {mark.parent}: "
                    "is the right folder mounted?"
                )
            write_atomic(mark, self.run_id.encode())
        elif mark.read_text(encoding="ascii") != self.run_id:
            raise RunError(
                f"{mark.parent} belongs to another run than {self._folder / DATABASE}: "
                "is the right folder mounted?"
            )

    def _fail(self, why: str) -> str:
        """After the first failure nothing is read or written, and every caller learns why."""
        self._failed = self._failed or why
        return why

    def require_open(self) -> None:
        if self._failed:
            raise StorageFailed(f"the store in {self._folder} is closed: {self._failed}")

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """One transaction of this epoch. It commits at the end, or changes nothing and raises."""
        with self._mutex:
            self.require_open()
            try:
                with self._engine.begin() as db:
                    if self._ours:
                        self._check_epoch(db)
                    yield db
            except (IntegrityError, sqlite3.IntegrityError) as error:
                cause = error.orig if isinstance(error, IntegrityError) else error
                raise Conflict(f"the store refused a change: {cause}") from error
            except (DBAPIError, sqlite3.Error) as error:
                cause = error.orig if isinstance(error, DBAPIError) else error
                why = (
                    f"cannot commit to {self._folder / DATABASE}: {cause}; "
                    "free space or repair it, then start again"
                )
                raise StorageFailed(self._fail(why)) from error

    def _check_epoch(self, db: Connection) -> None:
        run_id, epoch = _run(db, schema.EPOCH, {}).fetchone()
        if (run_id, epoch) != (self.run_id, self.epoch):
            why = (
                f"{self._folder} was taken over by another coordinator "
                f"(epoch {epoch}, ours was {self.epoch}); exit"
            )
            raise StorageFailed(self._fail(why))

    def close(self) -> None:
        with self._mutex:
            self._failed = self._failed or "it was closed"
            with suppress(DBAPIError):
                self._engine.dispose()
            self._lock_file.close()

    def create_run(self, document: dict[str, Any]) -> bool:
        text = canonical_json(document)
        with self._transaction() as db:
            stored = db.execute(sa.select(schema.meta.c.document)).scalar_one()
            if stored is not None:
                if stored != text:
                    raise Conflict(
                        f"{self._folder} holds a run with other settings: "
                        "continue it with its own, or choose another folder"
                    )
                return False
            db.execute(schema.meta.update().values(document=text))
            _append(db, link_entry(_head(db), "run", {**document, "run": self.run_id}))
            return True

    def run(self) -> dict[str, Any] | None:
        with self._transaction() as db:
            stored = db.execute(sa.select(schema.meta.c.document)).scalar_one()
        return _document(stored, self._folder)

    def save(self, changes: Changes) -> None:
        with self._transaction() as db:
            _write_changes(db, changes)

    def record_update(
        self, update: UpdateRecord, entry: LedgerEntry, receipt: bytes, changes: Changes = NOTHING
    ) -> StoredAnswer:
        if not self.blobs.has(update.payload):
            raise Conflict(f"the payload {update.payload} is not stored")
        with self._transaction() as db:
            if (known := _read_answer(db, update.task, update.payload)) is not None:
                return known
            if update.accepted:
                _finish_task(db, update)
            _append(db, entry)
            _put_update(db, update, entry.seq, receipt)
            _write_changes(db, changes)
        return StoredAnswer(update, receipt, repeated=False)

    def answer(self, task: int, payload: str) -> StoredAnswer | None:
        with self._transaction() as db:
            return _read_answer(db, task, payload)

    def answered_block(self, task: int) -> int | None:
        u = schema.updates.c
        accepted = sa.select(u.block).where(u.task == task, u.accepted == 1)
        with self._transaction() as db:
            return db.execute(accepted).scalar_one_or_none()

    def publish_version(
        self,
        version: VersionRecord,
        entry: LedgerEntry,
        applied: Sequence[str],
        changes: Changes = NOTHING,
    ) -> None:
        for name in version.blobs:
            if not self.blobs.has(name):
                raise Conflict(f"the blob {name} of version {version.version} is not stored")
        with self._transaction() as db:
            require_successor(version, _read_version(db, version.block, None))
            require_settled(version, applied, changes, _read_pending(db, version.block))
            rows = ({"name": name, "version": version.version} for name in applied)
            _run_each(db, schema.APPLY_UPDATE, rows)
            _append(db, entry)
            norms = json.dumps(version.norms)
            _run(db, schema.PUT_VERSION, {**vars(version), "norms": norms, "entry": entry.seq})
            _run(db, schema.END_ROUND, {"block": version.block})
            _write_changes(db, changes)

    def version(self, block: int, version: int | None = None) -> VersionRecord | None:
        with self._transaction() as db:
            return _read_version(db, block, version)

    def pending(self, block: int) -> tuple[UpdateRecord, ...]:
        with self._transaction() as db:
            return _read_pending(db, block)

    def ledger(self, after: int = 0, limit: int | None = None) -> list[LedgerEntry]:
        with self._transaction() as db:
            rows = _driver(db).execute(_LEDGER, (after, -1 if limit is None else limit))
            return [_entry(row) for row in rows]

    def head(self) -> LedgerEntry | None:
        with self._transaction() as db:
            return _head(db)

    def workers(self) -> list[WorkerRecord]:
        with self._transaction() as db:
            return _read_workers(db)

    def byte_counts(self) -> list[ByteCount]:
        c = schema.counters.c
        with self._transaction() as db:
            rows = db.execute(sa.select(schema.counters).order_by(c.block, c.worker))
            return [ByteCount(row.block, row.worker, row.bytes_in, row.bytes_out) for row in rows]

    def contributions(self) -> dict[str, tuple[int, int]]:
        with self._transaction() as db:
            rows = _driver(db).execute(_CONTRIBUTIONS)
            return {worker: (count, tokens) for worker, count, tokens in rows}

    def forget_nonces(self, before: float) -> int:
        old = schema.nonces.delete().where(schema.nonces.c.stamp < before)
        with self._transaction() as db:
            return db.execute(old).rowcount

    def recover(self, kept_times: int) -> StoredRun:
        t, v = schema.tasks.c, schema.versions.c
        with self._transaction() as db:
            highest = sa.select(t.block, sa.func.max(t.number)).group_by(t.block)
            numbers = {block: number + 1 for block, number in db.execute(highest)}
            blocks = list(db.execute(sa.select(v.block).distinct().order_by(v.block)).scalars())
            newest = [_read_version(db, block, None) for block in blocks]
            batches = (t.block, t.position, schema.updates.c.steps)
            accepted = (schema.updates.c.task == t.task, schema.updates.c.accepted == 1)
            spans = db.execute(sa.select(*batches).where(*accepted).order_by(t.block, t.position))
            out = sa.select(schema.tasks).where(t.status.in_(("open", "expired"))).order_by(t.task)
            last = db.execute(sa.select(sa.func.max(t.task))).scalar_one() or 0
            rounds = db.execute(sa.select(schema.rounds).order_by(schema.rounds.c.block))
            return StoredRun(
                versions=tuple(version for version in newest if version),
                rounds=tuple(_round(row) for row in rounds),
                leases=tuple(_lease(row) for row in db.execute(out)),
                workers=tuple(_read_workers(db)),
                pending=tuple(u for block in blocks for u in _read_pending(db, block)),
                task_seconds={block: _read_times(db, block, kept_times) for block in blocks},
                next_numbers=numbers,
                read=join_spans((block, first, steps) for block, first, steps in spans),
                next_task=last + 1,
            )


class SqlReader:
    """A store that is only read: no lock, and nothing is written beside it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / DATABASE
        if not self._path.is_file():
            raise RunError(f"{folder} holds no run of a coordinator")
        self.blobs = FolderBlobReader(folder)
        # A reader of a database that nobody has open would leave files beside it. Without a -wal
        # file nobody is writing.
        idle = not self._path.with_name(f"{DATABASE}-wal").exists()
        address = f"{self._path.resolve().as_uri()}?{'immutable=1' if idle else 'mode=ro'}"
        try:
            self._db = sqlite3.connect(address, uri=True, isolation_level=None)
            self._db.execute("BEGIN")  # all is read as of the commit that the first query sees
            self._db.execute("SELECT run_id FROM meta").fetchone()
        except sqlite3.Error as error:
            raise RunError(f"cannot read {self._path}: {error}") from None

    def run(self) -> dict[str, Any] | None:
        rows = self._rows("SELECT document FROM meta")
        return _document(rows[0][0] if rows else "", self._path.parent)

    def ledger(self, after: int = 0, limit: int | None = None) -> list[LedgerEntry]:
        return [_entry(row) for row in self._rows(_LEDGER, after, -1 if limit is None else limit)]

    def contributions(self) -> dict[str, tuple[int, int]]:
        return {worker: (count, tokens) for worker, count, tokens in self._rows(_CONTRIBUTIONS)}

    def _rows(self, query: str, *values: int) -> list[Any]:
        try:
            return self._db.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise RunError(f"cannot read {self._path}: {error}") from None

    def close(self) -> None:
        self._db.close()


def _document(stored: str | None, folder: Path) -> dict[str, Any] | None:
    try:
        return None if stored is None else json.loads(stored)
    except ValueError:
        raise Damaged(
            f"the run's settings in {folder / DATABASE} are damaged; restore it from a backup"
        ) from None


def _entry(row: Sequence[Any]) -> LedgerEntry:
    seq, kind, body, previous, digest = row
    try:
        return LedgerEntry(seq=seq, kind=kind, body=body, previous=previous, hash=digest)
    except ValidationError:
        raise RunError(
            f"entry {seq} of the ledger is of no known form; was it written by a newer BlockTrain?"
        ) from None


def _head(db: Connection) -> LedgerEntry | None:
    row = _run(db, schema.HEAD, {}).fetchone()
    return _entry(row) if row else None


def _append(db: Connection, entry: LedgerEntry) -> None:
    require_link(_head(db), entry)
    _run(db, schema.APPEND, dict(entry))


def _write_changes(db: Connection, changes: Changes) -> None:
    for lease in changes.leases:
        _write_lease(db, lease)
    times = changes.times  # one statement for all: this is done every few seconds for every lease
    _run_each(
        db,
        schema.PUT_TIMES,
        (
            {"of": x.task, "with_fence": x.fence, "passed": x.age, "left": x.remaining}
            for x in times
        ),
    )
    for task in changes.lost:
        _run(db, schema.LOSE_TASK, {"of": task})
    for name, reason in changes.dropped.items():
        if _run(db, schema.DROP_UPDATE, {"name": name, "reason": reason}).rowcount != 1:
            raise Conflict(f"the update {name} does not wait for a merge and cannot be dropped")
    for current in changes.rounds:
        _run(db, schema.PUT_ROUND, {**vars(current), "extended": int(current.extended)})
    for worker in changes.workers:
        _run(db, schema.PUT_WORKER, {**vars(worker), "kicked": int(worker.kicked)})
    _run_each(db, schema.FORGET_WORKER, ({"gone": worker} for worker in changes.gone))
    _run_each(db, schema.ADD_BYTES, map(vars, changes.counts))
    for used in changes.nonces:
        row = {"worker": used.worker, "nonce": used.nonce, "stamp": used.time}
        _run(db, schema.PUT_NONCE, row)
    for entry in changes.entries:
        _append(db, entry)


def _write_lease(db: Connection, lease: LeaseRecord) -> None:
    """A fence never goes down, and belongs to one worker. A finished task stays finished."""
    stored = _run(db, schema.TASK, {"task": lease.task}).fetchone()
    if stored is not None:
        status, fence, worker = stored
        if status in ("done", "lost"):
            raise Conflict(f"task {lease.task} is over")
        if lease.fence < fence or (lease.fence == fence and lease.worker != worker):
            raise Conflict(
                f"task {lease.task} has the fence {fence} of {worker}, "
                f"not {lease.fence} of {lease.worker}"
            )
    values = {k: v for k, v in vars(lease).items() if k != "expired"}
    status = "expired" if lease.expired else "open"
    _run(db, schema.PUT_TASK, {**values, "trained": int(lease.trained), "status": status})


def _finish_task(db: Connection, update: UpdateRecord) -> None:
    """The fence is checked where it counts: in the transaction that accepts."""
    key = ("task", "fence", "worker", "block", "base")
    its = {f"its_{name}": getattr(update, name) for name in key}
    if _run(db, schema.FINISH_TASK, its).rowcount != 1:
        raise Conflict(
            f"task {update.task} is not out with fence {update.fence} for {update.worker}"
        )


def _put_update(db: Connection, update: UpdateRecord, entry: int, receipt: bytes) -> None:
    row = {**vars(update), "id": update.id, "accepted": int(update.accepted), "entry": entry}
    _run(db, schema.PUT_UPDATE, {**row, "applied": None, "dropped": None})
    _run(db, schema.PUT_RECEIPT, {"update": update.id, "content": receipt})


def _update(row: Sequence[Any]) -> UpdateRecord:
    record = UpdateRecord(*row)
    return replace(record, accepted=bool(record.accepted))


def _read_answer(db: Connection, task: int, payload: str) -> StoredAnswer | None:
    row = _run(db, schema.ANSWER, {"task": task, "payload": payload}).fetchone()
    return StoredAnswer(_update(row[:-1]), row[-1], repeated=True) if row else None


def _read_pending(db: Connection, block: int) -> tuple[UpdateRecord, ...]:
    return tuple(_update(row) for row in _run(db, schema.PENDING, {"block": block}))


def _read_version(db: Connection, block: int, version: int | None) -> VersionRecord | None:
    if version is None:
        row = _run(db, schema.NEWEST, {"block": block}).fetchone()
    else:
        row = _run(db, schema.VERSION, {"block": block, "version": version}).fetchone()
    if row is None:
        return None
    stored = dict(zip(VersionRecord.__dataclass_fields__, row, strict=True))
    return VersionRecord(**{**stored, "norms": tuple(json.loads(stored["norms"]))})


def _read_workers(db: Connection) -> list[WorkerRecord]:
    rows = db.execute(sa.select(schema.workers).order_by(schema.workers.c.id))
    return [WorkerRecord(**{**row._asdict(), "kicked": bool(row.kicked)}) for row in rows]


def _read_times(db: Connection, block: int, count: int) -> tuple[float, ...]:
    """Seconds of the last accepted tasks, oldest first."""
    u = schema.updates.c
    timed = (u.block == block, u.accepted == 1, u.seconds.is_not(None))
    newest = sa.select(u.seconds).where(*timed).order_by(u.entry.desc()).limit(count)
    return tuple(reversed(list(db.execute(newest).scalars())))


def _round(row: sa.Row[Any]) -> RoundRecord:
    return RoundRecord(**{**row._asdict(), "extended": bool(row.extended)})


def _lease(row: sa.Row[Any]) -> LeaseRecord:
    values = {k: v for k, v in row._asdict().items() if k != "status"}
    expired = row.status == "expired"
    return LeaseRecord(**{**values, "trained": bool(row.trained), "expired": expired})
