"""Records of one small run, for tests of a store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blocktrain.protocol.identity import canonical_json
from blocktrain.protocol.ledger import LedgerEntry
from blocktrain.store.contract import (
    NOTHING,
    Changes,
    LeaseRecord,
    Store,
    StoredAnswer,
    UpdateRecord,
    VersionRecord,
    WorkerRecord,
    link_entry,
)


def lease(task: int, **changes: Any) -> LeaseRecord:
    record = LeaseRecord(
        task=task,
        number=task - 1,
        block=1,
        base=0,
        fence=1,
        worker="w",
        steps=10,
        start_step=0,
        position=10 * (task - 1),
        age=10.0,
        remaining=60.0,
        expected=20.0,
        trained=False,
        expired=False,
    )
    return replace(record, **changes)


def update(store: Store, task: int, content: bytes = b"payload", **changes: Any) -> UpdateRecord:
    record = UpdateRecord(
        task=task,
        fence=1,
        block=1,
        base=0,
        worker="w",
        payload=store.blobs.put(content),
        size=len(content),
        tokens=640,
        steps=10,
        seconds=2.5,
        staleness=0,
        weight=1.0,
        accepted=True,
        code="accepted",
    )
    return replace(record, **changes)


def version(
    store: Store, number: int, content: bytes = b"weights", **changes: Any
) -> VersionRecord:
    record = VersionRecord(
        block=1,
        version=number,
        weights=store.blobs.put(content),
        momentum=None,
        steps=10 * number,
        tokens=640 * number,
        loss=2.0,
        norms=(1.0, 2.0),
        reason="all replicas are here",
    )
    return replace(record, **changes)


def entry(store: Store, kind: str, **body: Any) -> LedgerEntry:
    """The entry that would follow now."""
    return link_entry(store.head(), kind, body)


def record(store: Store, sent: UpdateRecord, changes: Changes = NOTHING) -> StoredAnswer:
    """Link, receipt and commit, as a coordinator does."""
    linked = entry(store, "update", **vars(sent), id=sent.id)
    receipt = canonical_json({"entry": linked.seq, "hash": linked.hash}).encode()
    return store.record_update(sent, linked, receipt, changes)


def publish(
    store: Store,
    made: VersionRecord,
    applied: list[str] | None = None,
    dropped: dict[str, str] | None = None,
) -> LedgerEntry:
    body = {**vars(made), "norms": list(made.norms), "applied": applied or []}
    linked = entry(store, "version", **body)
    store.publish_version(made, linked, applied or [], Changes(dropped=dropped or {}))
    return linked


def started(store: Store) -> Store:
    """A run with version 0 of its only block, two tasks out, and one worker."""
    store.create_run({"blocks": 1, "fingerprint": "f"})
    publish(store, version(store, 0))
    worker = WorkerRecord("w", "key", "laptop", 1, 0.5, 1.0)
    store.save(Changes(leases=[lease(1), lease(2)], workers=[worker]))
    return store
