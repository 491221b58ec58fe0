"""The tables of the embedded store, and the statements that every call needs.

A change of a table's shape raises SCHEMA. A store with another number is refused with a sentence.
Only definitions are here: `sql` executes them.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import (
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.dialects.sqlite import Insert, insert
from sqlalchemy.engine import Connection

from blocktrain.store.contract import UpdateRecord, VersionRecord

SCHEMA = 3
metadata = sa.MetaData()

meta = Table(  # one row
    "meta",
    metadata,
    Column("id", Integer, CheckConstraint("id = 1"), primary_key=True),
    Column("schema", Integer, nullable=False),
    Column("run_id", String(32), nullable=False),
    Column("epoch", Integer, nullable=False),  # raised by every coordinator that opens the store
    Column("document", Text),  # of the run, canonical JSON; null until the run is created
)

ledger = Table(
    "ledger",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("kind", String(32), nullable=False),
    Column("body", Text, nullable=False),
    Column("previous", String(64), nullable=False),
    Column("hash", String(64), nullable=False),
)

versions = Table(
    "versions",
    metadata,
    Column("block", Integer, primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("weights", String(64), nullable=False),
    Column("momentum", String(64)),
    Column("delta", String(64)),
    Column("residual", String(64)),
    Column("steps", Integer, nullable=False),
    Column("tokens", Integer, nullable=False),
    Column("loss", Float),
    Column("norms", Text, nullable=False),  # JSON list: the last norms after this merge
    Column("reason", Text, nullable=False),
    Column("entry", Integer, ForeignKey("ledger.seq"), nullable=False),
)

rounds = Table(  # the open round of each block; closed ones are in the ledger
    "rounds",
    metadata,
    Column("block", Integer, primary_key=True),
    Column("version", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("length", Float, nullable=False),
    Column("remaining", Float),  # seconds to the deadline
    Column("extended", Integer, nullable=False),
    Column("grace_remaining", Float),
)

tasks = Table(
    "tasks",
    metadata,
    Column("task", Integer, primary_key=True),
    Column("number", Integer, nullable=False),
    Column("block", Integer, nullable=False),
    Column("base", Integer, nullable=False),
    Column("fence", Integer, nullable=False),
    Column("worker", String(64), nullable=False),
    Column("steps", Integer, nullable=False),
    Column("start_step", Integer, nullable=False),
    Column("position", Integer, nullable=False),
    Column("age", Float, nullable=False),
    Column("remaining", Float, nullable=False),
    Column("expected", Float, nullable=False),
    Column("trained", Integer, nullable=False),
    Column(
        "status",
        String(8),
        CheckConstraint("status in ('open', 'expired', 'done', 'lost')"),
        nullable=False,
    ),
    UniqueConstraint("block", "number"),
    Index("tasks_out", "status", "block"),
)

updates = Table(
    "updates",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("task", Integer, ForeignKey("tasks.task"), nullable=False),
    Column("fence", Integer, nullable=False),
    Column("block", Integer, nullable=False),
    Column("base", Integer, nullable=False),
    Column("worker", String(64), nullable=False),
    Column("payload", String(64), nullable=False),
    Column("size", Integer, nullable=False),
    Column("tokens", Integer, nullable=False),
    Column("steps", Integer, nullable=False),
    Column("seconds", Float),
    Column("staleness", Integer, nullable=False),
    Column("weight", Float, nullable=False),
    Column("accepted", Integer, nullable=False),
    Column("code", String(32), nullable=False),
    Column("applied", Integer),  # the version that it became part of
    Column("dropped", Text),  # why the merge left it out
    Column("entry", Integer, ForeignKey("ledger.seq"), nullable=False),
    UniqueConstraint("task", "payload"),
    # A task counts once, even if several updates are sent for it.
    Index("updates_once", "task", unique=True, sqlite_where=sa.text("accepted = 1")),
    Index("updates_pending", "block", "applied"),
)

receipts = Table(
    "receipts",
    metadata,
    Column("update", String(64), ForeignKey("updates.id"), primary_key=True),
    Column("content", LargeBinary, nullable=False),
)

workers = Table(
    "workers",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("key", String(128), nullable=False),
    Column("name", Text, nullable=False),
    Column("block", Integer),
    Column("seconds_per_step", Float),
    Column("overhead", Float, nullable=False),
    Column("kicked", Integer, nullable=False),
)

counters = Table(
    "counters",
    metadata,
    Column("block", Integer, primary_key=True),
    Column("worker", String(64), primary_key=True),
    Column("bytes_in", Integer, nullable=False),
    Column("bytes_out", Integer, nullable=False),
)

nonces = Table(
    "nonces",
    metadata,
    Column("worker", String(64), primary_key=True),
    Column("nonce", String(64), primary_key=True),
    Column("stamp", Float, nullable=False),
)


def create_tables(db: Connection) -> None:
    """Tables that are not there yet, and the triggers that keep the ledger append-only."""
    metadata.create_all(db)
    for verb in ("update", "delete"):
        db.execute(
            sa.text(
                f"CREATE TRIGGER IF NOT EXISTS ledger_no_{verb} BEFORE {verb} ON ledger "
                "BEGIN SELECT RAISE(ABORT, 'the ledger only grows'); END"
            )
        )


def _upsert(table: sa.Table, *added: str) -> Insert:
    """Insert a row or overwrite it. The columns `added` are added to what is there."""
    statement, keys = insert(table), [column.name for column in table.primary_key]
    new = {
        c.name: c + statement.excluded[c.name] if c.name in added else statement.excluded[c.name]
        for c in table.c
        if c.name not in keys
    }
    return statement.on_conflict_do_update(index_elements=keys, set_=new)


_t, _u, _v = tasks.c, updates.c, versions.c
EPOCH = sa.select(meta.c.run_id, meta.c.epoch)

HEAD = sa.select(ledger).order_by(ledger.c.seq.desc()).limit(1)
APPEND = ledger.insert()

TASK = sa.select(_t.status, _t.fence, _t.worker).where(_t.task == sa.bindparam("task"))
PUT_TASK = _upsert(tasks)
PUT_TIMES = (
    tasks.update()
    .where(
        _t.task == sa.bindparam("of"),
        _t.fence == sa.bindparam("with_fence"),
        _t.status == "open",
    )
    .values(age=sa.bindparam("passed"), remaining=sa.bindparam("left"))
)
LOSE_TASK = (
    tasks.update().where(_t.task == sa.bindparam("of"), _t.status != "done").values(status="lost")
)
FINISH_TASK = (
    tasks.update()
    .where(
        *(
            _t[name] == sa.bindparam(f"its_{name}")
            for name in ("task", "fence", "worker", "block", "base")
        )
    )
    .where((_t.status == "open") | (_t.status == "expired"))
    .values(status="done")
)

PUT_ROUND = _upsert(rounds)
END_ROUND = rounds.delete().where(rounds.c.block == sa.bindparam("block"))
PUT_WORKER = _upsert(workers)
FORGET_WORKER = workers.delete().where(workers.c.id == sa.bindparam("gone"))
ADD_BYTES = _upsert(counters, "bytes_in", "bytes_out")
PUT_NONCE = nonces.insert()

_UPDATE = [_u[name] for name in UpdateRecord.__dataclass_fields__]
_WAITS = (_u.accepted == 1, _u.applied.is_(None), _u.dropped.is_(None))
ANSWER = (
    sa.select(*_UPDATE, receipts.c.content)
    .select_from(updates.join(receipts, receipts.c.update == _u.id))
    .where(_u.task == sa.bindparam("task"), _u.payload == sa.bindparam("payload"))
)
PUT_UPDATE = updates.insert()
PUT_RECEIPT = receipts.insert()
PENDING = sa.select(*_UPDATE).where(_u.block == sa.bindparam("block"), *_WAITS).order_by(_u.id)
APPLY_UPDATE = (
    updates.update().where(_u.id == sa.bindparam("name")).values(applied=sa.bindparam("version"))
)
DROP_UPDATE = (
    updates.update()
    .where(_u.id == sa.bindparam("name"), *_WAITS)
    .values(dropped=sa.bindparam("reason"))
)

_OF_BLOCK = sa.select(*(_v[name] for name in VersionRecord.__dataclass_fields__)).where(
    _v.block == sa.bindparam("block")
)
NEWEST = _OF_BLOCK.order_by(_v.version.desc()).limit(1)
VERSION = _OF_BLOCK.where(_v.version == sa.bindparam("version"))
PUT_VERSION = versions.insert()
