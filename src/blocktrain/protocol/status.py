"""The answer to `GET /v1/status`: blocks, rounds, workers, and all bytes in and out.

For people and pages; nothing is decided by it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from blocktrain.protocol.ledger import ParentRun
from blocktrain.protocol.messages import (
    MAX_BLOCKS,
    Blob,
    BlockIndex,
    Count,
    LossValue,
    Message,
    Name,
    Number,
    RunId,
    Seconds,
    Sentence,
    Sha256,
    Speed,
    WorkerId,
)
from blocktrain.protocol.refusals import Code

MAX_WORKERS = 4096  # that a status lists
MAX_NOTICES = 8  # that a status lists


class Traffic(Message):
    """Body bytes as counted by the coordinator."""

    bytes_in: Count = 0
    bytes_out: Count = 0


class RoundStatus(Message):
    """The open round of a block."""

    version: Count
    """The round leads from this version to the next."""
    updates: Count
    leased: Count
    target: Count
    minimum: Count
    extensions: Count
    open_seconds: Seconds
    deadline_seconds: Seconds
    reason: Sentence
    """Why it is still open."""


class BlockStatus(Traffic):
    """One block."""

    block: BlockIndex
    version: Count
    weights: Blob
    steps: Count
    tokens: Count
    loss: LossValue | None = None
    accepted: Count
    refused: Count
    late: Count
    """Accepted updates that were trained from an older version of the block."""
    late_by_one: Count = 0
    """Of the late ones, those that were one version behind; they count in full."""
    frozen: bool = False
    """It comes from another run and is not trained."""
    round: RoundStatus | None = None


class WorkerStatus(Traffic):
    """One worker."""

    worker: WorkerId
    name: Name
    device: Name
    state: Literal["training", "waiting", "lost", "left", "kicked"]
    block: BlockIndex | None = None
    task: Number | None = None
    step: Count = 0
    steps: Count = 0
    loss: LossValue | None = None
    speed: Speed = 0.0
    """Steps a second."""
    tokens_per_second: Annotated[float, Field(ge=0)] = 0.0
    accepted: Count = 0
    refused: Count = 0
    tokens: Count = 0
    seen_seconds: Seconds = 0.0
    standing: Literal["newcomer", "proven", "quarantined"] = "newcomer"
    barred: Count = 0
    """Rounds of its block that it still has to sit out."""
    checked: Count = 0
    """Updates that were trained again, and came out right."""
    share: Annotated[float, Field(ge=0)] = 0.0
    """Of the last version that it was part of."""
    held: Count = 0
    """Bytes on the coordinator's disk that no round has taken yet."""


class DiskStatus(Message):
    """What the run has on the coordinator's disk, without the corpus, and what it may have."""

    used: Count = 0
    limit: Count | None = None
    """--disk-limit; None: until little is left."""
    free: Count = 0
    worker_limit: Count | None = None
    """Of each worker, of what no round has taken yet."""
    problem: Sentence = ""
    """Why no updates are taken at the moment."""


class NoticeStatus(Message):
    """Somebody tried to get more than its share."""

    attempt: Name
    worker: Name
    sentence: Sentence
    time: Annotated[float, Field(ge=0)]
    """In seconds since 1970."""


class Status(Traffic):
    """The whole run."""

    protocol: Count
    run: RunId
    fingerprint: Sha256
    parent: ParentRun | None = None
    """The trained model that the run goes on from."""
    state: Literal["running", "stopping", "finished"]
    reason: Sentence = ""
    up_seconds: Seconds
    rounds: Count
    """Rounds that were closed with a new version."""
    tokens: Count
    token_budget: Count | None = None
    round_budget: Count | None = None
    task_seconds: Seconds = 0.0
    """How long a task should take; 0 is unknown."""
    task_steps: Count | None = None
    """Steps of every task, if they do not follow from the worker's speed."""
    blocks: Annotated[tuple[BlockStatus, ...], Field(max_length=MAX_BLOCKS)]
    workers: Annotated[tuple[WorkerStatus, ...], Field(max_length=MAX_WORKERS)]
    """All that are here, then as many of the others as there is room for."""
    training_bytes: Count = 0
    """Weights, deltas and updates of workers, in and out, without the corpus."""
    float32_bytes: Count = 0
    """What the same tasks and updates would have moved as whole float32 weights, both ways."""
    notices: Annotated[tuple[NoticeStatus, ...], Field(max_length=MAX_NOTICES)] = ()
    """The newest, oldest first."""
    disk: DiskStatus = DiskStatus()
    refusals: dict[Code, Count] = Field(default_factory=dict)
    scores: dict[Name, LossValue] = Field(default_factory=dict)
    """Nats per token on the valid part by what was scored: block-1, pool, fused."""
    bits_per_byte: dict[Name, LossValue] = Field(default_factory=dict)
    """The same, so that runs of different tokenizers compare."""
    scores_seconds: Seconds | None = None
    """Since they were computed."""

    @property
    def bytes_per_update(self) -> float | None:
        """Training bytes for each accepted update."""
        accepted = sum(block.accepted for block in self.blocks)
        return self.training_bytes / accepted if accepted else None

    @property
    def float32_share(self) -> float | None:
        """The part of the bytes of whole float32 weights, both ways, that was moved."""
        return self.training_bytes / self.float32_bytes if self.float32_bytes else None
