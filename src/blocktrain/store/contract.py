"""What goes into a store and comes out of it, and the contract that every store keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from blocktrain.coordinator.state import Lease, RoundState, RunState, WorkerState
from blocktrain.protocol.messages import update_id
from blocktrain.store.blobs import Blobs
from blocktrain.store.ledger import Entry, Note


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
        """Sorted by this, updates are merged."""
        return update_id(self.task, self.payload)


@dataclass(frozen=True)
class Answer:
    """The stored answer to a submission; `repeated` if it was not given for the first time."""

    update: UpdateRecord
    receipt: bytes
    repeated: bool


@dataclass(frozen=True)
class VersionRecord:
    """A committed version of a block."""

    block: int
    version: int
    weights: str  # sha256
    momentum: str | None  # sha256 of the outer step's memory
    steps: int
    tokens: int
    loss: float | None
    norms: tuple[float, ...]
    reason: str


@dataclass(frozen=True)
class WorkerRecord:
    """A worker that has joined."""

    state: WorkerState
    key: str
    name: str = ""


@dataclass(frozen=True)
class Traffic:
    """Bytes to be added to the counters of a block and a worker."""

    block: int
    worker: str
    bytes_in: int = 0
    bytes_out: int = 0


@dataclass(frozen=True)
class Changes:
    """What is committed together with a transaction, or as one of its own."""

    leases: Sequence[Lease] = ()
    times: Sequence[Lease] = ()  # nothing but time has passed for these
    lost: Sequence[int] = ()  # tasks that can no longer count
    dropped: Mapping[str, str] = field(
        default_factory=dict
    )  # accepted updates that a merge refused without making a version -> reason
    rounds: Mapping[int, tuple[int, RoundState]] = field(
        default_factory=dict
    )  # block -> (version, its open round)
    workers: Sequence[WorkerRecord] = ()
    traffic: Sequence[Traffic] = ()
    nonces: Sequence[
        tuple[str, str, float]
    ] = ()  # (worker, nonce, wall time): a second use is a Conflict
    notes: Sequence[Note] = ()

    def __bool__(self) -> bool:
        """Whether there is anything to commit."""
        return any(vars(self).values())


NOTHING = Changes()


class Store(Protocol):
    """Every method is one transaction, durable when it returns. StorageFailed is fatal: acknowledge nothing, exit."""

    run_id: str
    epoch: int
    blobs: Blobs

    def create_run(self, document: dict[str, Any]) -> bool:
        """Begin the run, or find that it is the same one (False); another document is a Conflict. Its fields are the first entry's."""

    def run(self) -> dict[str, Any] | None:
        """The run's document."""

    def save(self, now: float, changes: Changes) -> tuple[Entry, ...]:
        """Commit changes of state; the entries of its notes."""

    def record_update(
        self,
        now: float,
        update: UpdateRecord,
        receipt: Callable[[Entry], bytes],
        extra: dict[str, Any],
        changes: Changes = NOTHING,
    ) -> Answer:
        """Record an update and its receipt once; the same key gets the stored answer for ever.

        Only the holder's accepted updates, and refusals of what an update contains, are recorded. A stale fence must not be:
        the task's new holder may come with the very same bytes. `extra` is added to the ledger's body and wins over the record.
        """

    def answer(self, task: int, payload: str) -> Answer | None:
        """The answer that was given to a submission."""

    def answered(self, task: int) -> int | None:
        """The block of a task that has an accepted update."""

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

    def version(self, block: int, version: int | None = None) -> VersionRecord | None:
        """A version of a block; the newest if none is named."""

    def pending(self, block: int) -> tuple[UpdateRecord, ...]:
        """Accepted updates that are not yet merged, sorted by id."""

    def ledger(self, after: int = 0, limit: int = 1000) -> list[Entry]:
        """Entries after a number."""

    def head(self) -> Entry | None:
        """The newest entry."""

    def workers(self) -> list[WorkerRecord]:
        """Everyone who has ever joined."""

    def traffic(self) -> list[Traffic]:
        """Bytes in and out, per block and worker."""

    def contributions(self) -> dict[str, tuple[int, int]]:
        """Updates and tokens that became part of a version, per worker."""

    def forget_nonces(self, before: float) -> int:
        """Drop nonces that are too old to be accepted anyway."""

    def require_open(self) -> None:
        """Raise StorageFailed if a write has failed, or if it was closed: what is in memory may not be true."""

    def recover(self, now: float, fusion: int | None = None) -> RunState:
        """The state as of the last commit; times left are counted from now."""

    def close(self) -> None:
        """Let another coordinator open it."""
