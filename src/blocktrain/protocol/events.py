"""Events: what happens in a run, for people, pages and reports.

One schema for all who write or read them. `watch/feed` checks and writes them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class RunEvent(BaseModel):
    """Fields have defaults: only those that were given are written."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RunStarted(RunEvent):
    """A coordinator took the run over."""

    run: str = ""
    fingerprint: str = ""
    corpus: str = ""
    blocks: int = 0
    fusion: int | None = None
    """The block that fuses the others."""
    steps: int = 0
    """Of each block but the fusion block."""
    fusion_steps: int | None = None
    """Of the fusion block."""
    compose: str = ""
    compression: str = ""
    """How updates are sent."""
    version_compression: str = ""
    """How versions are published; none: as whole weights."""
    task_seconds: float = 0.0
    protocol: int = 0
    parent: str = ""
    """The run that this one goes on from, if it is known."""
    restart: bool = False


class WorkerChanged(RunEvent):
    worker: str = ""
    name: str = ""
    device: str = ""
    state: Literal["joined", "back", "left", "lost", "kicked"] = "joined"
    reason: str = ""


class TaskLeased(RunEvent):
    worker: str = ""
    block: int = 0
    task: int = 0
    base: int = 0
    steps: int = 0
    deadline: float | None = None
    """Of the round, in seconds since 1970."""
    target: int = 0
    """Updates that close the round."""


class UpdateAccepted(RunEvent):
    worker: str = ""
    block: int = 0
    task: int = 0
    base: int = 0
    version: int = 0
    """The block's version when the update came."""
    staleness: int = 0
    """Versions that were published since the base."""
    weight: float = 0.0
    steps: int = 0
    tokens: int = 0
    bytes: int = 0
    loss_before: float = 0.0
    loss_after: float = 0.0
    seconds: float = 0.0
    sentence: str = ""


class RequestRefused(RunEvent):
    """Refusals with one code and worker within a second are one event."""

    code: str = ""
    sentence: str = ""
    worker: str = ""
    block: int = 0
    count: int = 1


class StandingChanged(RunEvent):
    """A worker sits out some rounds, for what its updates held, or gets tasks again."""

    worker: str = ""
    block: int = 0
    standing: Literal["quarantined", "back"] = "quarantined"
    reason: str = ""


Attempt = Literal["share", "stage", "harm", "hold", "disk"]
"""To hold more than one may; to be a stage without the key; an update that was left out for what it
holds; tasks that are only taken; and that the disk allows no more updates."""


class MemberNoticed(RunEvent):
    """Somebody tries to get more than its share. At most one a minute for each member and kind."""

    attempt: Attempt = "share"
    worker: str = ""
    sentence: str = ""


class RoundChanged(RunEvent):
    """A round that made no version, or a lease of it that expired."""

    block: int = 0
    version: int = 0
    outcome: Literal["extended", "empty", "expired"] = "empty"
    deadline: float | None = None
    reason: str = ""
    worker: str = ""
    task: int = 0


class VersionPublished(RunEvent):
    block: int = 0
    version: int = 0
    steps: int = 0
    tokens: int = 0
    loss: float | None = None
    updates: int = 0
    clipped: int = 0
    dropped: dict[str, str] = Field(default_factory=dict)
    """Updates that could not be merged, and why."""
    reason: str = ""
    bytes_in: int = 0
    bytes_out: int = 0
    weights: str = ""
    length: int = 0


class VersionsScored(RunEvent):
    scores: dict[str, float] = Field(default_factory=dict)
    """Nats per token on the valid part, by what was scored: block-1, pool, fused."""
    versions: dict[str, int] = Field(default_factory=dict)
    features: dict[str, int] = Field(default_factory=dict)
    steps: dict[str, int] = Field(default_factory=dict)
    """Steps that each block has made."""
    bytes_per_token: float = 1.0
    """Of the valid part: nats per token / bytes per token / ln 2 are bits per byte."""
    valid_bytes: int = 0
    seconds: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0


class RunFinished(RunEvent):
    reason: str = ""


class TrainingStarted(RunEvent):
    """`train` began, or went on."""

    fingerprint: str = ""
    blocks: int = 0
    steps: int = 0


class StepDone(RunEvent):
    """Progress of a block in `train`; the loss is a mean since the last one."""

    block: int | str = 0
    step: int = 0
    loss: float = 0.0
    """Nats per token."""
    bits_per_byte: float = 0.0
    """The same, so that runs of different tokenizers compare."""
    tokens_per_second: float = 0.0
    peak_share: float = 0.0
    """Of the device's peak, estimated."""


class BlockTrained(RunEvent):
    block: int | str = 0
    step: int = 0
    seconds: float = 0.0
    peak_mb: float | None = None
    tokens_per_second: float = 0.0
    peak_share: float = 0.0
    """Of the device's peak, estimated."""


class StateLost(RunEvent):
    """A saved optimizer could not be read; training went on without it."""

    block: int | str = 0
    task: int | None = None


KINDS: dict[str, type[RunEvent]] = {
    "run": RunStarted,
    "worker": WorkerChanged,
    "task": TaskLeased,
    "update": UpdateAccepted,
    "refused": RequestRefused,
    "standing": StandingChanged,
    "notice": MemberNoticed,
    "round": RoundChanged,
    "version": VersionPublished,
    "score": VersionsScored,
    "finish": RunFinished,
    "start": TrainingStarted,
    "step": StepDone,
    "trained": BlockTrained,
    "state_lost": StateLost,
}
