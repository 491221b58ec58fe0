"""The embedded store: SQLite for what is counted, a folder for what is heavy. One process at a time, one connection, nothing lost.

Order of durability: blob -> one transaction -> acknowledgement. After the first write that fails, nothing is written any more.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, IntegrityError

from blocktrain.coordinator.state import RunState
from blocktrain.errors import Conflict, FolderInUse, RunError, StorageFailed
from blocktrain.files import sync_folder, write_atomic
from blocktrain.store import rows, tables
from blocktrain.store.blobs import Blobs
from blocktrain.store.contract import (
    NOTHING,
    Answer,
    Changes,
    Traffic,
    UpdateRecord,
    VersionRecord,
    WorkerRecord,
)
from blocktrain.store.ledger import Entry, Note, canonical, verify
from blocktrain.store.statements import Statement, driver

DATABASE = "run.sqlite"
_EPOCH = Statement(sa.select(tables.meta.c.run_id, tables.meta.c.epoch))


def open_store(folder: Path, run_id: str | None = None) -> EmbeddedStore:
    """Open a store or make a new one; refused while another coordinator has it, or if it holds another run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
    except OSError as error:
        raise RunError(f"cannot use the folder {folder}: {error.strerror or error}") from None
    try:
        return EmbeddedStore(folder, lock, run_id)
    except BaseException:
        lock.close()
        raise


def _lock(folder: Path) -> IO[str]:
    """Held as long as the file is open. A forked child would hold it too: start children by spawn."""
    file = (folder / "lock").open("a+", encoding="ascii")
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


def _engine(path: Path) -> Engine:
    engine = sa.create_engine(
        f"sqlite:///{path}",
        poolclass=sa.pool.StaticPool,
        connect_args={"check_same_thread": False, "timeout": 10},
    )

    @sa.event.listens_for(engine, "connect")
    def _connect(connection: sqlite3.Connection, _: Any) -> None:
        connection.isolation_level = None  # the driver shall not begin transactions on its own
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        driver(connection).execute("BEGIN IMMEDIATE")

    return engine


class EmbeddedStore:
    """See `records.Store` for what each method promises."""

    def __init__(self, folder: Path, lock: IO[str], run_id: str | None) -> None:
        self.folder = folder
        self.run_id = ""
        self.epoch = 0
        self._lock_file = lock
        self._mutex = threading.RLock()
        self._failed: str | None = None
        self._engine = _engine(folder / DATABASE)
        self._opened = False
        try:
            with self._transaction() as db:
                self._take_over(db, run_id)
            self._opened = True
            sync_folder(folder)
            self.blobs = Blobs(folder, self._fail)
            self._mark_blobs()
        except OSError as error:
            self._engine.dispose()
            raise StorageFailed(
                f"cannot open the store in {folder}: {error.strerror or error}"
            ) from error
        except BaseException:
            self._engine.dispose()
            raise

    def _take_over(self, db: Connection, run_id: str | None) -> None:
        tables.create(db)
        row = db.execute(sa.select(tables.meta)).one_or_none()
        if row is None:
            self.run_id, self.epoch = run_id or uuid.uuid4().hex, 1
            db.execute(
                tables.meta.insert().values(id=1, schema=tables.SCHEMA, run_id=self.run_id, epoch=1)
            )
            return
        if row.schema != tables.SCHEMA:
            raise RunError(
                f"{self.folder} was written by another BlockTrain (schema {row.schema}, this one reads {tables.SCHEMA})"
            )
        if run_id is not None and run_id != row.run_id:
            raise RunError(
                f"{self.folder} holds the run {row.run_id}, not {run_id}: is the right folder mounted?"
            )
        self.run_id, self.epoch = row.run_id, row.epoch + 1
        db.execute(tables.meta.update().values(epoch=self.epoch))

    def _mark_blobs(self) -> None:
        """The run's id beside the blobs, so that a swapped blob folder is noticed."""
        mark = self.folder / "blobs" / "RUN"
        if not mark.exists():
            if self.version_count():
                raise RunError(
                    f"the blobs of run {self.run_id} are missing in {mark.parent}: is the right folder mounted?"
                )
            write_atomic(mark, self.run_id.encode())
        elif mark.read_text(encoding="ascii") != self.run_id:
            raise RunError(
                f"{mark.parent} belongs to another run than {self.folder / DATABASE}: is the right folder mounted?"
            )

    def _fail(self, why: str) -> str:
        """After the first failure nothing is read or written any more, and everyone is told why."""
        self._failed = self._failed or why
        return why

    def require_open(self) -> None:
        """Raise if it was closed, with what went wrong."""
        if self._failed:
            raise StorageFailed(f"the store in {self.folder} is closed: {self._failed}")

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """One transaction of this epoch; commits at the end, or raises and has changed nothing that was acknowledged."""
        with self._mutex:
            self.require_open()
            try:
                with self._engine.begin() as db:
                    if self._opened:
                        self._check_epoch(db)
                    yield db
            except (IntegrityError, sqlite3.IntegrityError) as error:
                raise Conflict(
                    f"the store refused a change: {error.orig if isinstance(error, IntegrityError) else error}"
                ) from error
            except (DBAPIError, sqlite3.Error) as error:
                cause = error.orig if isinstance(error, DBAPIError) else error
                why = f"cannot commit to {self.folder / DATABASE}: {cause}; free space or repair it, then start again"
                raise StorageFailed(self._fail(why)) from error

    def _check_epoch(self, db: Connection) -> None:
        run_id, epoch = _EPOCH.run(db, {}).fetchone()
        if (run_id, epoch) != (self.run_id, self.epoch):
            why = f"{self.folder} was taken over by another coordinator (epoch {epoch}, ours was {self.epoch}); exit"
            raise StorageFailed(self._fail(why))

    def close(self) -> None:
        """Let another coordinator open it."""
        with self._mutex:
            self._failed = self._failed or "it was closed"
            with suppress(DBAPIError):
                self._engine.dispose()
            self._lock_file.close()

    def create_run(self, document: dict[str, Any]) -> bool:
        """Begin the run, or find that it is the same one (False); another document is a Conflict."""
        text = canonical(document)
        with self._transaction() as db:
            stored = db.execute(sa.select(tables.meta.c.document)).scalar_one()
            if stored is not None:
                if stored != text:
                    raise Conflict(
                        f"{self.folder} holds a run with other settings: continue it with its own, or choose another folder"
                    )
                return False
            db.execute(tables.meta.update().values(document=text))
            rows.append(db, Note("run", {**document, "run": self.run_id}))
            return True

    def run(self) -> dict[str, Any] | None:
        """The run's document."""
        with self._transaction() as db:
            stored = db.execute(sa.select(tables.meta.c.document)).scalar_one()
        return None if stored is None else json.loads(stored)

    def save(self, now: float, changes: Changes) -> tuple[Entry, ...]:
        """Commit changes of state; the entries of its notes."""
        with self._transaction() as db:
            return rows.write_changes(db, now, changes)

    def record_update(
        self,
        now: float,
        update: UpdateRecord,
        receipt: Callable[[Entry], bytes],
        extra: dict[str, Any],
        changes: Changes = NOTHING,
    ) -> Answer:
        """Record an update and its receipt once; the same key gets the stored answer for ever."""
        if update.accepted and not self.blobs.has(update.payload):
            raise Conflict(
                f"the payload of update {update.id} is not stored"
            )  # the blob comes first
        with self._transaction() as db:
            if (known := rows.read_answer(db, update.task, update.payload)) is not None:
                return known
            if update.accepted:
                rows.finish_task(db, update)
            entry = rows.append(db, Note("update", {**rows.update_body(update), **extra}))
            content = receipt(entry)
            rows.put_update(db, update, entry.seq, content)
            rows.write_changes(db, now, changes)
        return Answer(update, content, repeated=False)

    def answer(self, task: int, payload: str) -> Answer | None:
        """The answer that was given to a submission."""
        with self._transaction() as db:
            return rows.read_answer(db, task, payload)

    def answered(self, task: int) -> int | None:
        """The block of a task that has an accepted update."""
        found = sa.select(tables.updates.c.block).where(
            tables.updates.c.task == task, tables.updates.c.accepted == 1
        )
        with self._transaction() as db:
            return db.execute(found).scalar_one_or_none()

    def publish_version(
        self,
        now: float,
        version: VersionRecord,
        applied: Sequence[str],
        dropped: Mapping[str, str],
        extra: dict[str, Any],
        changes: Changes = NOTHING,
    ) -> Entry:
        """Commit a version with the updates it was made of; every accepted update of its block is applied or dropped."""
        for name in filter(None, (version.weights, version.momentum)):
            if not self.blobs.has(name):
                raise Conflict(f"the blob {name} of version {version.version} is not stored")
        with self._transaction() as db:
            parent = rows.read_version(db, version.block, None)
            if version.version != (parent.version + 1 if parent else 0):
                raise Conflict(
                    f"version {version.version} of block {version.block} does not follow {parent.version if parent else 'nothing'}"
                )
            rows.settle_updates(db, version, applied, dropped)
            body = {**rows.version_body(version), "parent": parent.weights if parent else None}
            entry = rows.append(
                db,
                Note(
                    "version",
                    {**body, "applied": sorted(applied), "dropped": dict(dropped), **extra},
                ),
            )
            rows.put_version(db, version, entry.seq)
            rows.write_changes(db, now, changes)
            return entry

    def version(self, block: int, version: int | None = None) -> VersionRecord | None:
        """A version of a block; the newest if none is named."""
        with self._transaction() as db:
            return rows.read_version(db, block, version)

    def version_count(self) -> int:
        """Versions of all blocks."""
        with self._transaction() as db:
            return db.execute(sa.select(sa.func.count()).select_from(tables.versions)).scalar_one()

    def pending(self, block: int) -> tuple[UpdateRecord, ...]:
        """Accepted updates that are not yet merged, sorted by id."""
        with self._transaction() as db:
            return tuple(rows.read_pending(db, block))

    def ledger(self, after: int = 0, limit: int = 1000) -> list[Entry]:
        """Entries after a number."""
        with self._transaction() as db:
            found = db.execute(
                sa.select(tables.ledger)
                .where(tables.ledger.c.seq > after)
                .order_by(tables.ledger.c.seq)
                .limit(limit)
            )
            return [rows.entry(row) for row in found]

    def head(self) -> Entry | None:
        """The newest entry."""
        with self._transaction() as db:
            return rows.head(db)

    def workers(self) -> list[WorkerRecord]:
        """Everyone who has ever joined."""
        with self._transaction() as db:
            return rows.read_workers(db, 0.0)

    def traffic(self) -> list[Traffic]:
        """Bytes in and out, per block and worker."""
        with self._transaction() as db:
            found = db.execute(
                sa.select(tables.counters).order_by(
                    tables.counters.c.block, tables.counters.c.worker
                )
            )
            return [Traffic(row.block, row.worker, row.bytes_in, row.bytes_out) for row in found]

    def contributions(self) -> dict[str, tuple[int, int]]:
        """Updates and tokens that became part of a version, per worker."""
        u = tables.updates.c
        query = (
            sa.select(u.worker, sa.func.count(), sa.func.sum(u.tokens))
            .where(u.applied.is_not(None))
            .group_by(u.worker)
        )
        with self._transaction() as db:
            return {worker: (count, tokens) for worker, count, tokens in db.execute(query)}

    def forget_nonces(self, before: float) -> int:
        """Drop nonces that are too old to be accepted anyway."""
        with self._transaction() as db:
            return db.execute(tables.nonces.delete().where(tables.nonces.c.stamp < before)).rowcount

    def recover(self, now: float, fusion: int | None = None) -> RunState:
        """The state as of the last commit; times left are counted from now."""
        with self._transaction() as db:
            return rows.read_state(db, now, fusion)


def read_ledger(folder: Path) -> list[Entry]:
    """All entries of a store that may be in use by its coordinator, verified; takes no lock and writes nothing."""
    path = folder / DATABASE
    if not path.is_file():
        raise RunError(f"{folder} holds no run of a coordinator")
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        found = connection.execute(
            "SELECT seq, kind, body, previous, hash FROM ledger ORDER BY seq"
        ).fetchall()
    except sqlite3.Error as error:
        raise RunError(f"cannot read {path}: {error}") from None
    finally:
        connection.close()
    entries = [Entry(*row) for row in found]
    verify(entries)
    return entries
