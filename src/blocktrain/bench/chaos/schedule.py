"""What goes wrong in a run, and when: all of it is drawn from the seed before the run begins.

To add a fault, add a row to `FAULTS`, and what it does to `DEEDS` in `play.py`.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from blocktrain.bench.attacks.policies import ATTACKS
from blocktrain.bench.network.shaper import Link

EARLY = 0.2
"""Share of the faults that do not wait until their victim is at work again."""
FORGERIES_PER_MINUTE = 500


@dataclass(frozen=True)
class FaultRow:
    """One row: what happens, how often, and for how long (from, to)."""

    sentence: str
    per_minute: float
    seconds: tuple[float, float] = (0.0, 0.0)


FAULTS: dict[str, FaultRow] = {
    "kill-worker": FaultRow("a worker gets SIGKILL, and is started again", 30.0),
    "pause-worker": FaultRow("a worker gets SIGSTOP, and SIGCONT later", 4.0, (1.0, 6.0)),
    "kill-coordinator": FaultRow("the coordinator gets SIGKILL", 200 / 60),
    "full-disk": FaultRow("no file of the coordinator can grow, so it must stop", 0.5),
    "partition": FaultRow("nothing passes between members and coordinator", 1.0, (0.5, 3.0)),
    "reset": FaultRow("all connections break, and new ones too", 2.0, (0.1, 1.0)),
}


@dataclass(frozen=True)
class ScheduledFault:
    """One thing that goes wrong."""

    at: float
    """Seconds after the first update was accepted."""
    kind: str
    member: int
    """Which worker, if it hits one."""
    seconds: float
    early: bool
    """It does not wait until its victim is at work."""


@dataclass(frozen=True)
class FaultSchedule:
    """All faults of a run, in order, and the attacks that byzantine members make in turn."""

    seed: int
    minutes: float
    faults: tuple[ScheduledFault, ...]
    attacks: tuple[str, ...]
    link: Link
    forgeries: int

    @property
    def counts(self) -> dict[str, int]:
        """Faults by kind."""
        return dict(Counter(fault.kind for fault in self.faults))

    def as_dict(self) -> dict[str, Any]:
        """For people, and to compare two of them."""
        return {**asdict(self), "counts": self.counts}


def draw_schedule(seed: int, minutes: float, members: int) -> FaultSchedule:
    """The same seed and length give the same faults. Each kind has draws of its own."""
    faults = [
        fault
        for kind, row in FAULTS.items()
        for fault in _of_kind(seed, kind, row, minutes, members)
    ]
    attacks = list(ATTACKS)
    random.Random(f"{seed}/attacks").shuffle(attacks)
    return FaultSchedule(
        seed,
        minutes,
        tuple(sorted(faults, key=lambda fault: (fault.at, fault.kind))),
        tuple(attacks),
        Link(rtt_ms=10, jitter_ms=20, loss=0.01, reset=0.01, seed=seed),
        max(1, round(FORGERIES_PER_MINUTE * minutes)),
    )


def _of_kind(
    seed: int, kind: str, row: FaultRow, minutes: float, members: int
) -> list[ScheduledFault]:
    draw = random.Random(f"{seed}/{kind}")
    return [
        ScheduledFault(
            at=round(draw.uniform(0.0, 60.0 * minutes), 2),
            kind=kind,
            member=draw.randrange(members),
            seconds=round(draw.uniform(*row.seconds), 2),
            early=draw.random() < EARLY,
        )
        for _ in range(max(1, round(row.per_minute * minutes)))
    ]
