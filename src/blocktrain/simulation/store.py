"""A real store whose commits are effects: each may be lost, made, or made without an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from blocktrain.errors import StorageFailed
from blocktrain.protocol.ledger import LedgerEntry
from blocktrain.store.blobs import FolderBlobs
from blocktrain.store.contract import (
    NOTHING,
    ByteCount,
    Changes,
    Store,
    StoredAnswer,
    StoredRun,
    UpdateRecord,
    VersionRecord,
    WorkerRecord,
)

R = TypeVar("R")


class EffectStore:
    """See `contract.Store`. Records are those of `inner`, blobs are on the simulated disk."""

    address = ""

    def __init__(
        self,
        inner: Store,
        open_blobs: Callable[[Callable[[str], object]], FolderBlobs],
        effect: Callable[[str, str], bool],
    ) -> None:
        self._inner, self._effect = inner, effect
        self._failed = ""
        self.run_id, self.epoch = inner.run_id, inner.epoch
        try:
            self.blobs = open_blobs(self._fail)
        except BaseException:
            inner.close()  # a process that ends gives its lock back
            raise
        # The inner store looks whether a blob is there before it commits its name.
        inner.blobs = self.blobs  # type: ignore[misc]

    def _fail(self, why: str) -> None:
        self._failed = self._failed or why

    def require_open(self) -> None:
        if self._failed:
            raise StorageFailed(f"the store is closed: {self._failed}")
        self._inner.require_open()

    def _commit(self, name: str, work: Callable[[], R]) -> R:
        self.require_open()
        if self._effect("commit", name):
            self._fail("a commit has failed")
            raise StorageFailed("a commit has failed")
        result = work()
        if self._effect("commit", f"{name} is made"):
            self._fail("a commit has failed")
            raise StorageFailed("a commit has failed")
        return result

    def _read(self, work: Callable[[], R]) -> R:
        self.require_open()
        return work()

    def close(self) -> None:
        self._inner.close()

    def create_run(self, document: dict[str, Any]) -> bool:
        return self._commit("create run", lambda: self._inner.create_run(document))

    def save(self, changes: Changes) -> None:
        self._commit("save", lambda: self._inner.save(changes))

    def record_update(
        self, update: UpdateRecord, entry: LedgerEntry, receipt: bytes, changes: Changes = NOTHING
    ) -> StoredAnswer:
        return self._commit(
            "update", lambda: self._inner.record_update(update, entry, receipt, changes)
        )

    def publish_version(
        self,
        version: VersionRecord,
        entry: LedgerEntry,
        applied: Sequence[str],
        changes: Changes = NOTHING,
    ) -> None:
        self._commit(
            "version", lambda: self._inner.publish_version(version, entry, applied, changes)
        )

    def forget_nonces(self, before: float) -> int:
        return self._commit("forget", lambda: self._inner.forget_nonces(before))

    def run(self) -> dict[str, Any] | None:
        return self._read(self._inner.run)

    def answer(self, task: int, payload: str) -> StoredAnswer | None:
        return self._read(lambda: self._inner.answer(task, payload))

    def answered_block(self, task: int) -> int | None:
        return self._read(lambda: self._inner.answered_block(task))

    def version(self, block: int, version: int | None = None) -> VersionRecord | None:
        return self._read(lambda: self._inner.version(block, version))

    def pending(self, block: int) -> tuple[UpdateRecord, ...]:
        return self._read(lambda: self._inner.pending(block))

    def ledger(self, after: int = 0, limit: int | None = None) -> list[LedgerEntry]:
        return self._read(lambda: self._inner.ledger(after, limit))

    def head(self) -> LedgerEntry | None:
        return self._read(self._inner.head)

    def workers(self) -> list[WorkerRecord]:
        return self._read(self._inner.workers)

    def byte_counts(self) -> list[ByteCount]:
        return self._read(self._inner.byte_counts)

    def contributions(self) -> dict[str, tuple[int, int]]:
        return self._read(self._inner.contributions)

    def recover(self, kept_times: int) -> StoredRun:
        return self._read(lambda: self._inner.recover(kept_times))
