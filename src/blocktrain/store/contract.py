"""What every store promises: the ledger with its records, and the blobs.

A store knows neither the coordinator's decisions nor its clock. Times go in and come out as seconds
that are left or have passed, because a monotonic clock starts again with the machine.

A store never calls back. The caller links its ledger entries to the head that it knows, signs what
depends on their hashes, and hands over the finished transaction. In the transaction the store
checks that the ledger has not moved on in the meantime.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, get_args

from blocktrain.errors import Conflict
from blocktrain.protocol.identity import canonical_json
from blocktrain.protocol.ledger import BEGINNING, EntryKind, LedgerEntry, entry_hash
from blocktrain.protocol.messages import update_id
from blocktrain.protocol.positions import Ranges, add_range

KINDS: tuple[EntryKind, ...] = get_args(EntryKind)
_NAME = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True)
class UpdateRecord:
    """An update that was judged: accepted, or refused for what it contains."""

    task: int
    fence: int
    block: int
    base: int
    worker: str
    payload: str  # sha256
    size: int
    tokens: int
    steps: int
    seconds: float | None
    staleness: int
    weight: float
    accepted: bool
    code: str

    @property
    def id(self) -> str:
        """Updates are merged in the order of their ids."""
        return update_id(self.task, self.payload)


@dataclass(frozen=True)
class StoredAnswer:
    """The answer to a submission. `repeated`: it was already there."""

    update: UpdateRecord
    receipt: bytes
    repeated: bool


@dataclass(frozen=True)
class VersionRecord:
    """A committed version of a block."""

    block: int
    version: int
    weights: str  # sha256
    momentum: str | None  # sha256 of the outer step's momentum
    steps: int
    tokens: int
    loss: float | None
    norms: tuple[float, ...]
    reason: str
    delta: str | None = None  # sha256 of what was added to the parent's weights
    residual: str | None = None  # sha256 of what the delta lacks

    @property
    def blobs(self) -> tuple[str, ...]:
        """All that must be stored before the version is published."""
        return tuple(filter(None, (self.weights, self.momentum, self.delta, self.residual)))


@dataclass(frozen=True)
class LeaseRecord:
    """A task in the hands of a worker."""

    task: int
    number: int
    block: int
    base: int
    fence: int
    worker: str
    steps: int
    start_step: int
    position: int  # the first batch that it reads
    age: float  # seconds since it was granted
    remaining: float  # seconds until it expires
    expected: float  # seconds that it should take
    trained: bool
    expired: bool


@dataclass(frozen=True)
class LeaseTimes:
    """Time has passed for a lease, and nothing else has changed."""

    task: int
    fence: int
    age: float
    remaining: float


@dataclass(frozen=True)
class RoundRecord:
    """The open round of a block."""

    block: int
    version: int
    attempt: int
    length: float
    remaining: float | None  # seconds to the deadline; None: its clock has not started
    extended: bool
    grace_remaining: float | None


@dataclass(frozen=True)
class WorkerRecord:
    """A worker that has joined, with what was measured of it."""

    id: str
    key: str
    name: str = ""
    block: int | None = None
    seconds_per_step: float | None = None
    overhead: float = 0.0
    kicked: bool = False


@dataclass(frozen=True)
class ByteCount:
    """Bytes to be added to the counters of a block and a worker."""

    block: int
    worker: str
    bytes_in: int = 0
    bytes_out: int = 0


@dataclass(frozen=True)
class NonceRecord:
    """A nonce that a worker has used. To use it again is a Conflict."""

    worker: str
    nonce: str
    time: float  # unix time


@dataclass(frozen=True)
class Changes:
    """What one transaction commits, besides an update or a version."""

    leases: Sequence[LeaseRecord] = ()
    times: Sequence[LeaseTimes] = ()
    lost: Sequence[int] = ()  # tasks that can no longer count
    dropped: Mapping[str, str] = field(default_factory=dict)  # update left out by a merge -> reason
    rounds: Sequence[RoundRecord] = ()
    workers: Sequence[WorkerRecord] = ()
    counts: Sequence[ByteCount] = ()
    nonces: Sequence[NonceRecord] = ()
    gone: Sequence[str] = ()  # workers to be forgotten
    entries: Sequence[LedgerEntry] = ()  # in order; the first one links to the head of the ledger

    def __bool__(self) -> bool:
        return any(vars(self).values())


NOTHING = Changes()


@dataclass(frozen=True)
class StoredRun:
    """All that a coordinator needs to continue, as of the last commit."""

    versions: tuple[VersionRecord, ...]  # the newest of each block
    rounds: tuple[RoundRecord, ...]
    leases: tuple[LeaseRecord, ...]  # open ones, and expired ones that may still be answered
    workers: tuple[WorkerRecord, ...]
    pending: tuple[UpdateRecord, ...]  # accepted, not merged yet
    task_seconds: Mapping[int, tuple[float, ...]]  # by block: of its last accepted tasks
    next_numbers: Mapping[int, int]  # by block: the number of its next task
    read: Mapping[int, Ranges]  # by block: the batches of its accepted updates
    next_task: int


class BlobReader(Protocol):
    """Immutable bytes, named by their sha256. A name that is none is a Conflict."""

    def has(self, name: str) -> bool:
        """Whether a blob is there. Says nothing about its bytes."""

    def size(self, name: str) -> int: ...

    def read(self, name: str) -> bytes:
        """The bytes. Damaged, if they do not hash to their name."""

    def pieces(self, name: str, start: int = 0) -> Iterator[bytes]:
        """The bytes from `start` on, for sending. Not hashed here: the receiver does that."""

    def verify(self, name: str) -> None:
        """Damaged, unless the stored bytes hash to their name. Needs little memory."""

    def names(self) -> Iterator[str]:
        """All blobs, sorted."""

    def export(self, name: str, target: Path) -> None:
        """Make a file of a blob, without a copy where that is possible.

        It may be a link to the blob: only for reading, and only while the store is there.
        """


class Blobs(BlobReader, Protocol):
    """Blobs, and the chunks of incomplete uploads. What `put` has returned is durable."""

    def put(self, content: bytes) -> str:
        """Store bytes and give their name. The same bytes again are the same blob."""

    def put_stream(self, pieces: Iterable[bytes], name: str) -> str:
        """Store bytes that come in pieces. A Conflict, if they do not hash to the name."""

    def link(self, files: Mapping[str, Path]) -> None:
        """Take files over as the blobs of these names, without a copy where that is possible.

        They are not hashed here, because that takes long: `verify` and the receivers do that. So
        they must be files that nothing changes any more.
        """

    def delete(self, name: str) -> None:
        """Remove a blob that nothing refers to."""

    def free(self) -> int:
        """Bytes that the disk has left."""

    def put_chunk(self, task: int, fence: int, index: int, content: bytes) -> str:
        """Keep one chunk of an upload and give its sha256. It may be lost with the power."""

    def chunks(self, task: int, fence: int) -> dict[int, str]:
        """The chunks of an upload that are here, with their sha256."""

    def assemble(self, task: int, fence: int, chunks: Sequence[str], name: str) -> str:
        """One durable blob of all chunks of an upload.

        Chunks that are missing or damaged are named in a Conflict, and removed.
        """

    def drop_chunks(self, task: int, fence: int) -> None:
        """Remove an upload: it is a blob now, or never will be."""

    def keep_uploads(self, tasks: set[tuple[int, int]]) -> None:
        """Remove all uploads but those of these (task, fence)."""


class StoreReader(Protocol):
    """A run that is only read, also while its coordinator is writing."""

    @property
    def blobs(self) -> BlobReader: ...

    def run(self) -> dict[str, Any] | None:
        """The run's document, or None before there is a run."""

    def ledger(self, after: int = 0, limit: int | None = None) -> list[LedgerEntry]:
        """The entries after a number, in order. The chain is not checked here."""

    def contributions(self) -> dict[str, tuple[int, int]]:
        """Updates and tokens that became part of a version, per worker."""

    def close(self) -> None: ...


class Store(StoreReader, Protocol):
    """Every method is one transaction, durable when it returns.

    Conflict: the stored state does not allow the change, and nothing was changed.
    StorageFailed: a write was not made durable. Acknowledge nothing and exit; the next start
    recovers.
    """

    run_id: str
    epoch: int  # grows with every coordinator that opens the store
    address: str  # for `read_store` in another process; empty: only this process can read it

    @property
    def blobs(self) -> Blobs: ...

    def create_run(self, document: dict[str, Any]) -> bool:
        """Begin the run. False: this run is there already. Another document is a Conflict.

        The first entry of the ledger has the document's fields and the run's id.
        """

    def save(self, changes: Changes) -> None:
        """Commit changes of state."""

    def record_update(
        self, update: UpdateRecord, entry: LedgerEntry, receipt: bytes, changes: Changes = NOTHING
    ) -> StoredAnswer:
        """Record an update and its receipt once. The same key gets the stored answer for ever.

        Only the holder's accepted updates, and refusals of what an update contains, are recorded. A
        stale fence is not: the task's new holder may come with the very same bytes. `entry` comes
        before the entries of `changes`.
        """

    def answer(self, task: int, payload: str) -> StoredAnswer | None:
        """The answer that was given to a submission."""

    def answered_block(self, task: int) -> int | None:
        """The block of a task that has an accepted update."""

    def publish_version(
        self,
        version: VersionRecord,
        entry: LedgerEntry,
        applied: Sequence[str],
        changes: Changes = NOTHING,
    ) -> None:
        """Commit a version with the updates that it was made of.

        Every pending update of the block is in `applied` or in `changes.dropped`.
        """

    def version(self, block: int, version: int | None = None) -> VersionRecord | None:
        """A version of a block; the newest one, if none is named."""

    def pending(self, block: int) -> tuple[UpdateRecord, ...]:
        """Accepted updates that are not merged yet, sorted by id."""

    def head(self) -> LedgerEntry | None:
        """The newest entry of the ledger."""

    def workers(self) -> list[WorkerRecord]:
        """Everyone who has joined and is not forgotten, sorted by id."""

    def byte_counts(self) -> list[ByteCount]:
        """Bytes in and out, per block and worker."""

    def forget_nonces(self, before: float) -> int:
        """Remove nonces that were used before this unix time; how many."""

    def require_open(self) -> None:
        """StorageFailed, if the store was closed or a write has failed."""

    def recover(self, kept_times: int) -> StoredRun:
        """Everything as of the last commit, with so many task times of each block."""


def link_entry(previous: LedgerEntry | None, kind: str, body: Mapping[str, Any]) -> LedgerEntry:
    """The entry that follows. A pure function: its hash is known before it is committed."""
    known = next((k for k in KINDS if k == kind), None)
    if known is None:
        raise ValueError(f"the ledger has no entries of the kind {kind!r}")
    seq, head = (previous.seq + 1, previous.hash) if previous else (1, BEGINNING)
    text = canonical_json(body)
    digest = entry_hash(seq, kind, text, head)
    return LedgerEntry(seq=seq, kind=known, body=text, previous=head, hash=digest)


def require_link(head: LedgerEntry | None, entry: LedgerEntry) -> None:
    """A Conflict, unless the entry follows this head."""
    if (entry.seq, entry.previous) != ((head.seq + 1, head.hash) if head else (1, BEGINNING)):
        raise Conflict("the ledger has moved on: read its head and link the entry again")


def require_successor(version: VersionRecord, parent: VersionRecord | None) -> None:
    """A Conflict, unless the version follows its parent."""
    if version.version != (parent.version + 1 if parent else 0):
        raise Conflict(
            f"version {version.version} of block {version.block} does not follow "
            f"{parent.version if parent else 'nothing'}"
        )


def require_settled(
    version: VersionRecord,
    applied: Sequence[str],
    changes: Changes,
    pending: Sequence[UpdateRecord],
) -> None:
    """A Conflict, unless every pending update is applied or dropped; none twice, none forgotten."""
    named = [*applied, *changes.dropped]
    if len(set(named)) != len(named) or set(named) != {u.id for u in pending}:
        raise Conflict(
            f"version {version.version} of block {version.block} must settle exactly "
            "the updates that wait for it"
        )


def join_spans(spans: Iterable[tuple[int, int, int]]) -> dict[int, Ranges]:
    """The batches that each block has read, from (block, position, steps) of its updates."""
    read: dict[int, Ranges] = {}
    for block, position, steps in spans:
        read[block] = add_range(read.get(block, ()), position, position + steps)
    return read


def is_blob_name(name: str) -> bool:
    """Whether this is a blob's name. Nothing else may reach a path."""
    return _NAME.match(name) is not None


def require_blob_name(name: str) -> str:
    if not is_blob_name(name):
        raise Conflict("a blob is named by the 64 hex digits of its sha256")
    return name


def require_upload(task: int, fence: int) -> tuple[int, int]:
    """What names an upload."""
    if not (isinstance(task, int) and isinstance(fence, int) and task >= 0 and fence >= 0):
        raise Conflict("an upload is named by two small integers")
    return task, fence


def require_chunks(task: int, missing: Sequence[int], count: int) -> None:
    """A Conflict that names the chunks to send again, if there are any."""
    if missing:
        indices = ", ".join(map(str, missing[:20]))
        raise Conflict(f"task {task}: send the chunks {indices} (of {count}) again")
