"""How a run is coordinated: the operator's choices, validated, and frozen with the run."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blocktrain.config import Config, words
from blocktrain.coordinator.merging.merge import MergeOptions
from blocktrain.coordinator.state import DAY, Options
from blocktrain.errors import ConfigError
from blocktrain.protocol.compression import METHODS, Method
from blocktrain.protocol.transfer import CHUNK_BYTES, MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from blocktrain.shapes import block_parameters

ALIKE = 0.99
"""Updates of honest workers, which read different text, came to at most 0.96 within a round and
0.90 between rounds: one layer of width 64 on WikiText-2, tasks of 2 to 32 steps, batches of 4 to
256 sequences, AdamW and Muon. What int4 has packed a second time stays above 0.999."""
CLIP_BY_STEPS = 2.0
"""Honest updates came to at most 1.7 medians: one layer of width 64 on WikiText-2, tasks of 2, 8,
24 and 64 steps side by side over a whole schedule, AdamW and Muon. Without regard to their steps
they came to 4.7."""
EARLIER_RULES: dict[str, Any] = {
    "keep_versions": 0,
    "undefended": True,
    "alike": None,
    "clip_by_steps": None,
    "retrain_share": 0.0,
}
"""What a run does that was begun before it could choose."""
USUAL_LINE = 100e6 / 8  # bytes a second
MOST_WAITING = 4  # updates of a member in an open round, where not every member is trusted


class Policy(BaseModel):
    """Field docstrings are the help texts of the flags."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    compression: Method = Field(
        default="int2",
        description=f"How updates are sent: one of {', '.join(METHODS)} (with error feedback).",
    )
    version_compression: Method = Field(
        default="int2",
        description="How versions are published: as whole weights (none), or as what changed since "
        f"the version before, by one of {', '.join(name for name in METHODS if name != 'none')} "
        "(with error feedback).",
    )
    replicas: int | None = Field(default=None, ge=1, le=4096)
    """Updates that close a round at once; by default as many as there are workers on the block."""
    min_replicas: int = Field(default=1, ge=1, le=4096)
    """Updates without which a round makes no version."""
    task_seconds: float = Field(default=20.0, gt=0, le=86400)
    """How long a task should take; its steps follow from the worker's speed."""
    task_steps: int | None = Field(default=None, ge=1, le=10**6)
    """The same number of steps for every task, instead of by speed."""
    rounds: int | None = Field(default=None, ge=1)
    """Rounds of each block after which the run ends (it ends at the latest after `steps` steps)."""
    tokens: int | None = Field(default=None, ge=1)
    """Tokens that all blocks together read until the run ends."""
    max_staleness: int = Field(default=4, ge=0, le=1000)
    """Versions that a late update may be behind and still count."""
    decay: float = Field(default=0.7, gt=0, le=1)
    """Weight of a late update per version that it is behind (one version behind counts in full)."""
    clip: float | None = Field(default=3.0, gt=0)
    """Longest update, in medians of the block's last ones; longer ones are shortened. Where members
    are trusted."""
    clip_by_steps: float | None = Field(default=CLIP_BY_STEPS, gt=0)
    """The same where they are not; norms are compared as if all updates had made the same steps."""
    clip_after: int = Field(default=5, ge=1, le=1000)
    """Updates that must have been merged before any is shortened."""
    outer: Literal["average", "nesterov"] = "average"
    """How a round's mean becomes the next version: as it is, or by an outer Nesterov step."""
    outer_learning_rate: float = Field(default=0.7, gt=0, le=100)
    """Of the outer Nesterov step."""
    outer_momentum: float = Field(default=0.9, ge=0, lt=1)
    """Of the outer Nesterov step."""
    undefended: bool = False
    """Believe every member: updates are neither bounded by what their steps can change, nor judged
    on secret text before they count, and shares are not capped."""
    retrain_share: float = Field(default=0.03, ge=0, le=1)
    """Share of the updates that a process beside the coordinator trains again. Ten times as many of
    newcomers and of members with faults, a third of those that have long delivered. 0: none."""
    alike: float | None = Field(default=ALIKE, gt=0, le=1)
    """Cosine with another worker's update from which on an update counts as its copy, and is left
    out."""
    keep_versions: int = Field(default=12, ge=0, le=1000)
    """Newest versions of a block that stay as whole weights, so that the last tasks can be trained
    again. Older ones follow from deltas. 0: all stay."""
    chunk_bytes: int = Field(default=CHUNK_BYTES, ge=MIN_CHUNK_BYTES, le=MAX_CHUNK_BYTES)
    """Size of the pieces in which updates are uploaded."""
    first_deadline: float = Field(default=60.0, gt=0, le=86400)
    """Seconds that the first round of a block has, before any task was timed."""
    exclusive: bool = Field(
        default=False,
        description="One worker per block, each task from the version that the last one made: "
        "nothing depends on time.",
    )

    @property
    def most_waiting(self) -> int | None:
        """Updates of a member in an open round; one where a round needs every replica and all tasks
        have one size: then a second one could only be late."""
        if self.undefended:
            return None
        in_step = self.task_steps is not None and self.replicas == self.min_replicas > 1
        return 1 if in_step else MOST_WAITING

    @classmethod
    def exact(cls, task_steps: int) -> Self:
        """For `blocktrain train`: the same seed gives the same bytes."""
        return cls(
            compression="none",
            version_compression="none",
            replicas=1,
            task_steps=task_steps,
            clip=None,
            exclusive=True,
            undefended=True,
        )  # all workers are trusted

    def options(self, config: Config) -> Options:
        """The numbers that decisions are made with."""
        fusion_steps = config.steps_of(config.fusion or 0)
        if self.exclusive:
            return Options.exact(self.task_steps or 50, config.steps, fusion_steps)
        return Options(
            target_replicas=self.replicas,
            min_replicas=self.min_replicas,
            first_deadline=self.first_deadline,
            decay=self.decay,
            max_staleness=self.max_staleness,
            task_seconds=self.task_seconds,
            fixed_steps=self.task_steps,
            budget_rounds=self.rounds,
            budget_steps=config.steps,
            fusion_steps=fusion_steps,
            budget_tokens=self.tokens,
            defences=not self.undefended,
            most_waiting=self.most_waiting,
        )

    def merge_options(self) -> MergeOptions:
        """How updates are merged."""
        by_steps = not self.undefended and self.clip_by_steps is not None
        return MergeOptions(
            self.outer,
            self.outer_learning_rate,
            self.outer_momentum,
            self.clip_by_steps if by_steps else self.clip,
            by_steps,
            self.clip_after,
            defences=not self.undefended,
            alike=self.alike,
            changes=self.version_compression != "none",
        )


def policy_for_size(config: Config) -> dict[str, float]:
    """What `--size` chooses: a task lasts fifty times as long as its transfers do."""
    per_parameter = 0.6  # bytes: an update and a version, of two bits a value each
    transfers = per_parameter * block_parameters(config, 1) / USUAL_LINE
    task_seconds = min(DAY / 3, max(20.0, float(f"{50 * transfers:.1e}")))
    return {"task_seconds": task_seconds, "first_deadline": 3 * task_seconds}


def make_policy(settings: dict[str, Any]) -> Policy:
    """Validated choices, or one sentence about what is wrong."""
    try:
        return Policy(**settings)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in problem["loc"])
        known = (
            f"; known: {', '.join(Policy.model_fields)}"
            if problem["type"] == "extra_forbidden"
            else ""
        )
        raise ConfigError(
            f"[coordination] {name}: {words(problem)} (got {problem['input']!r}){known}"
        ) from None
