"""The tables of the embedded store. A change of their shape raises SCHEMA; an older store is then refused with a sentence."""

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

SCHEMA = 1
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
    Column("steps", Integer, nullable=False),
    Column("tokens", Integer, nullable=False),
    Column("loss", Float),
    Column("norms", Text, nullable=False),  # JSON list: the running norms after this merge
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
    Column("remaining", Float),  # seconds; no moment is ever stored
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
    # A task counts once, whatever else is sent for it.
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

_GROWS = "CREATE TRIGGER IF NOT EXISTS ledger_no_{verb} BEFORE {verb} ON ledger BEGIN SELECT RAISE(ABORT, 'the ledger only grows'); END"


def create(db: sa.Connection) -> None:
    """Tables that are not there yet, and the triggers that keep the ledger append-only."""
    metadata.create_all(db)
    for verb in ("update", "delete"):
        db.execute(sa.text(_GROWS.format(verb=verb)))
