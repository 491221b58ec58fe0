"""How much a run, and each of its members, may have on the coordinator's disk.

Bytes are counted as they come and from the ledger, never by a look at the folder.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from blocktrain.coordinator.history import RunHistory
from blocktrain.coordinator.state import Lease, RunState
from blocktrain.protocol.compression import Method, payload_cap
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.protocol.tensors import Schema
from blocktrain.store.contract import Blobs
from blocktrain.units import amount

WORKER_PAYLOADS = 8  # longest payloads that a member may have in uploads and in open rounds
RESERVE, RESERVED_MODELS = 64 << 20, 4  # bytes, and models, that stay free on the disk
Upload = tuple[int, int]  # task and fence


@dataclass(frozen=True)
class DiskLimits:
    """What the operator allows, in bytes. None: what follows from the size of the model."""

    total: int | None = None
    worker: int | None = None


@dataclass(frozen=True)
class DiskUse:
    """Of the whole run."""

    used: int
    limit: int | None
    free: int
    reserve: int

    @property
    def problem(self) -> str:
        """Why nothing more is taken, or nothing."""
        if self.limit is not None and self.used >= self.limit:
            return f"the run holds {amount(self.used)} of {amount(self.limit)} (--disk-limit)"
        if self.free < self.reserve:
            free, reserve = amount(self.free), amount(self.reserve)
            return f"the coordinator's disk has {free} left, of which {reserve} stay free"
        return ""


class OpenUploads:
    """The chunks of uploads that are not complete, and what they weigh."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._sizes: dict[Upload, dict[int, int]] = {}
        self._mutex = threading.Lock()

    def keep(self, uploads: set[Upload], chunk_bytes: int) -> None:
        """After a start: remove all but these. Each chunk counts as a whole one."""
        self._blobs.keep_uploads(uploads)
        found = {key: self._blobs.chunks(*key) for key in sorted(uploads)}
        self._sizes = {key: dict.fromkeys(x, chunk_bytes) for key, x in found.items() if x}

    def put(self, upload: Upload, index: int, content: bytes) -> None:
        self._blobs.put_chunk(*upload, index, content)
        with self._mutex:
            self._sizes.setdefault(upload, {})[index] = len(content)

    def drop(self, upload: Upload) -> None:
        self._blobs.drop_chunks(*upload)
        with self._mutex:
            self._sizes.pop(upload, None)

    def size(self, uploads: Iterable[Upload]) -> int:
        """Bytes of these."""
        with self._mutex:
            return sum(sum(self._sizes.get(upload, {}).values()) for upload in uploads)

    def has(self, upload: Upload, index: int) -> int:
        """Bytes of a chunk that is here."""
        return self._sizes.get(upload, {}).get(index, 0)

    @property
    def total(self) -> int:
        with self._mutex:
            return sum(sum(sizes.values()) for sizes in self._sizes.values())


class DiskQuotas:
    """What there is, and who may have how much of it."""

    def __init__(self, blobs: Blobs, history: RunHistory) -> None:
        self._blobs, self._history = blobs, history
        self.uploads = OpenUploads(blobs)
        self.limits = DiskLimits()
        self._free, self._reserve = blobs.free(), 0
        self._derived: int | None = None

    def begin(self, schemas: Iterable[Schema], compression: Method, *, defended: bool) -> None:
        """Derive what the operator did not set. Who believes every member limits none."""
        known = list(schemas)
        self._reserve = RESERVE + RESERVED_MODELS * sum(map(_model_bytes, known))
        longest = max(payload_cap(schema, compression) for schema in known)
        self._derived = WORKER_PAYLOADS * longest if defended else None

    def look(self) -> None:
        """See how much the disk has left."""
        self._free = self._blobs.free()

    @property
    def worker_limit(self) -> int | None:
        return self._derived if self.limits.worker is None else self.limits.worker

    @property
    def use(self) -> DiskUse:
        used = self._history.stored + self.uploads.total
        return DiskUse(used, self.limits.total, self._free, self._reserve)

    def held(self, state: RunState, worker: str) -> int:
        """Bytes of a member that no round has settled yet."""
        out = ((x.task, x.fence) for x in state.leases.values() if x.worker == worker)
        return self.uploads.size(out) + self._history.waiting_bytes[worker]

    def held_by_all(self, state: RunState) -> Counter[str]:
        """`held` of every member."""
        held = Counter(self._history.waiting_bytes)
        for lease in state.leases.values():
            held[lease.worker] += self.uploads.size([(lease.task, lease.fence)])
        return held

    def require_disk(self) -> None:
        """Refuse to take more while the run has too much, or the disk too little."""
        if problem := self.use.problem:
            raise Refused(Code.DISK_LIMIT, problem)

    def require_room(self, state: RunState, lease: Lease, index: int, length: int) -> None:
        """Refuse a chunk with which its worker would hold more than its share."""
        self.require_disk()
        limit = self.worker_limit
        if limit is None:
            return
        again = self.uploads.has((lease.task, lease.fence), index)
        held = self.held(state, lease.worker) - again + length
        if held > limit:
            worker = lease.worker[:8]
            raise Refused(
                Code.OVER_QUOTA, f"worker {worker} holds {amount(held)} of {amount(limit)}"
            )


def _model_bytes(schema: Schema) -> int:
    """Of whole weights."""
    return sum(4 * spec.size for spec in schema.values())
