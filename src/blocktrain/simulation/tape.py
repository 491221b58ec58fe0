"""What a simulation consists of: a small run, its members, and every fault by itself.

A seed is drawn into a tape, and the tape alone decides what happens. Each fault stands by itself
(the 17th message is lost, the process dies at its 120th effect), so any of them can be left out.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blocktrain.config import TRAITS, Config, make_config, sentence
from blocktrain.coordinator.policy import Policy
from blocktrain.errors import ConfigError

LARGEST_TAPE = 1 << 20  # bytes
FaultKind = Literal[
    "drop",  # a message is lost: the request, or (reply) its answer
    "duplicate",  # a request arrives again after some seconds
    "delay",  # a request takes longer, so that others overtake it
    "cut",  # the connection breaks in the middle of a body
    "corrupt",  # a byte of a body changes
    "partition",  # a worker reaches nobody for some seconds
    "crash",  # the coordinator dies before an effect
    "fail",  # an effect of the coordinator fails: it must stop
    "overlap",  # another request is served while an effect takes its time
    "stop",  # the coordinator is killed or (orderly) closed between two requests
    "kill",  # a worker is killed
    "wipe",  # a worker is killed, and its disk is lost
    "freeze",  # a worker stands still for some seconds
    "leave",  # a worker signs off, and comes back
    "kick",  # the operator removes a worker
    "wall",  # a wall clock jumps
    "leap",  # the coordinator's machine was asleep: all its clocks jump
]
# What is drawn, and how often.
ON_MESSAGES: tuple[FaultKind, ...] = (
    *("drop", "drop", "drop", "duplicate", "duplicate"),
    *("delay", "cut", "cut", "corrupt"),
)
ON_EFFECTS: tuple[FaultKind, ...] = ("crash", "crash", "crash", "fail", "overlap", "overlap")
AT_TIMES: tuple[FaultKind, ...] = (
    *("partition", "stop", "kill", "wipe", "freeze", "leave", "wall", "leap"),
)
Member = Literal[
    "squatter",
    "replayer",
    "double",
    "wrong-hash",
    "stale-fence",
    "speed-liar",
    "nan",
    "huge",
    "zeros",
    "thief",
    "copier",
]
MEMBERS: tuple[Member, ...] = get_args(Member)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PlannedFault(_Frozen):
    """One thing that goes wrong. Which fields matter follows from its kind."""

    kind: FaultKind
    message: int = 0
    """Requests are numbered in the order in which they are sent, from 1."""
    effect: int = 0
    """Steps of the disk and commits are numbered in their order, from 1."""
    at: float = 0.0
    worker: int = 0
    """From 1; of a clock, 0 is the coordinator's."""
    seconds: float = 0.0
    """How long it lasts, or by how much a clock jumps."""
    reply: bool = False
    power: bool = False
    """The machine loses power, too: what was not durable may be lost."""
    orderly: bool = False


StepPace = Annotated[float, Field(gt=0, le=100)]


class WorldSettings(_Frozen):
    """The run and its members."""

    blocks: Annotated[int, Field(ge=1, le=4)] = 1
    compose: Literal["pool", "fuse"] = "pool"
    rounds: Annotated[int, Field(ge=1, le=20)] = 3
    replicas: Annotated[int | None, Field(ge=1, le=16)] = None
    min_replicas: Annotated[int, Field(ge=1, le=16)] = 1
    staleness: Annotated[int, Field(ge=0, le=1000)] = 4
    compression: str = "int4"
    version_compression: str = "int4"
    outer: Literal["average", "nesterov"] = "average"
    task_steps: int | None = 2
    exclusive: bool = False
    values: Annotated[int, Field(ge=1, le=10**5)] = 1500
    """Weights of a block besides its tags."""
    store: Literal["memory", "sql"] = "memory"
    honest: Annotated[tuple[StepPace, ...], Field(min_length=1, max_length=16)] = (1.0,)
    """Seconds per step of each honest worker."""
    byzantine: Annotated[tuple[Member, ...], Field(max_length=16)] = ()
    calm: Annotated[float, Field(ge=0, le=1e4)] = 60.0
    """From then on nothing goes wrong any more."""

    def config(self, seed: int) -> Config:
        blocks = max(2, self.blocks) if TRAITS[self.compose].fusion else self.blocks
        return make_config(
            {
                "blocks": blocks,
                "layers_per_block": 1,
                "width": 16,
                "heads": 2,
                "context": 16,
                "z_width": 8,
                "batch": 2,
                "steps": 2 * self.rounds if self.exclusive else 400,
                "warmup": 2,
                "compose": self.compose,
                "seed": seed % 2**32,
            }
        )

    def policy(self) -> Policy:
        return Policy(
            compression=self.compression,
            version_compression=self.version_compression,
            replicas=self.replicas,
            min_replicas=self.min_replicas,
            max_staleness=self.staleness,
            outer=self.outer,
            task_steps=self.task_steps,
            task_seconds=6.0,
            first_deadline=20.0,
            rounds=self.rounds,
            chunk_bytes=1024,
            exclusive=self.exclusive,
            undefended=True,  # the updates here are noise: judged, they would be left out
        )


class Tape(_Frozen):
    """All that a simulation needs. The same tape is the same simulation, event by event."""

    seed: Annotated[int, Field(ge=0, le=10**18)]
    world: WorldSettings = WorldSettings()
    faults: Annotated[tuple[PlannedFault, ...], Field(max_length=10_000)] = ()
    expected: str = ""
    """Of a tape that was kept: the invariant that it broke."""

    def write(self) -> str:
        return self.model_dump_json(indent=1, exclude_defaults=True) + "\n"


def read_tape(path: Path) -> Tape:
    """A tape from a file; ConfigError says what is wrong with it."""
    try:
        with path.open("rb") as file:
            return Tape.model_validate_json(file.read(LARGEST_TAPE))
    except OSError as error:
        raise ConfigError(f"cannot read the tape {path}: {error.strerror or error}") from None
    except ValidationError as error:
        raise ConfigError(f"{path} is no tape of `simulate`: {sentence(error)}") from None


def draw_tape(seed: int) -> Tape:
    """The tape of a seed."""
    draw = random.Random(seed)
    world = _draw_world(draw)
    weather = draw.choice((0.0, 0.3, 1.0, 1.0, 2.0))
    faults = (
        *_message_faults(draw, weather),
        *_effect_faults(draw, weather),
        *_timed_faults(draw, weather, world),
    )
    return Tape(seed=seed, world=world, faults=faults)


def _draw_world(draw: random.Random) -> WorldSettings:
    exclusive = draw.random() < 0.1
    honest = draw.choice((1, 2, 2, 3, 3, 4))
    blocks = draw.choice((1, 1, 1, 2, 2, 3))
    compression = draw.choice(("none", "none", "int4", "int4", "int8", "fp16"))
    byzantine = 0 if exclusive else draw.choice((0, 0, 0, 1, 1, 2, 3))
    return WorldSettings(
        blocks=blocks,
        compose=draw.choice(("pool", "pool", "pool", "fuse")),
        rounds=draw.choice((2, 3, 3, 4, 5)),
        replicas=1 if exclusive else draw.choice((None, None, None, 1, 2)),
        min_replicas=2 if not exclusive and blocks == 1 and honest >= 3 else 1,
        staleness=draw.choice((0, 1, 2, 4, 4)),
        compression="none" if exclusive else compression,
        version_compression=draw.choice(("none", "none", "int4", "int4", "int2", "topk")),
        outer="nesterov" if draw.random() < 0.15 else "average",
        task_steps=2 if exclusive else draw.choice((None, 1, 2, 3)),
        exclusive=exclusive,
        values=draw.choice((40, 700, 1500)),
        store="sql" if draw.random() < 0.15 else "memory",
        honest=tuple(round(draw.choice((0.3, 0.5, 1.0, 1.0, 2.5)), 2) for _ in range(honest)),
        byzantine=tuple(draw.choice(MEMBERS) for _ in range(byzantine)),
        calm=round(draw.uniform(30.0, 90.0), 1),
    )


def _message_faults(draw: random.Random, weather: float) -> list[PlannedFault]:
    faults = []
    for number in range(1, 400):
        if draw.random() >= 0.06 * weather:
            continue
        kind: FaultKind = draw.choice(
            ("drop", "drop", "drop", "duplicate", "delay", "cut", "cut", "corrupt")
        )
        seconds = round(draw.choice((0.05, 1.0, 5.0, 20.0)) * draw.uniform(0.5, 1.5), 2)
        reply = draw.random() < 0.6
        faults.append(PlannedFault(kind=kind, message=number, seconds=seconds, reply=reply))
    return faults


def _effect_faults(draw: random.Random, weather: float) -> list[PlannedFault]:
    faults = []
    for _ in range(round(draw.choice((0, 1, 2, 4, 8)) * weather)):
        kind = draw.choice(ON_EFFECTS)
        effect = int(draw.triangular(1, 1500, 1))
        power, down = draw.random() < 0.5, round(draw.uniform(0.2, 8.0), 2)
        faults.append(PlannedFault(kind=kind, effect=effect, power=power, seconds=down))
    return faults


def _timed_faults(draw: random.Random, weather: float, world: WorldSettings) -> list[PlannedFault]:
    members = len(world.honest) + len(world.byzantine)
    faults = []
    for _ in range(round(draw.choice((0, 1, 3, 6)) * weather)):
        kind = draw.choice(AT_TIMES)
        seconds = draw.choice((0.5, 5.0, 30.0, 90.0)) * draw.uniform(0.5, 1.5)
        if kind == "wall":
            seconds *= draw.choice((-40, 1, 40))
        faults.append(
            PlannedFault(
                kind=kind,
                at=round(draw.uniform(0.5, world.calm), 2),
                worker=draw.randint(0 if kind == "wall" else 1, members),
                seconds=round(seconds, 2),
                power=draw.random() < 0.5,
                orderly=draw.random() < 0.3,
            )
        )
    if len(world.honest) > 2 and draw.random() < 0.1 * weather:
        at = round(draw.uniform(1.0, world.calm), 2)
        faults.append(PlannedFault(kind="kick", at=at, worker=draw.randint(1, members)))
    return faults
