"""Many seeds in several processes, and what became of them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blocktrain.files import write_atomic
from blocktrain.processes import Channel, Job, run_jobs
from blocktrain.simulation.shrink import shrink
from blocktrain.simulation.tape import draw_tape
from blocktrain.simulation.world import Outcome, simulate

OnSeed = Callable[[float, "FailedSeed | None"], None]
"""(share that is done, the seed that has failed)."""


@dataclass(frozen=True)
class FailedSeed:
    """A seed that breaks an invariant, and the smallest tape that breaks it, too."""

    seed: int
    violation: str
    sentence: str
    faults: int
    """Of the smallest tape."""
    tape: str
    """Its file."""


@dataclass
class SeedSummary:
    """What all seeds came to."""

    seeds: int = 0
    first: int = 0
    failed: list[FailedSeed] = field(default_factory=list)
    requests: int = 0
    effects: int = 0
    crashes: int = 0
    entries: int = 0
    simulated_hours: float = 0.0
    seconds: float = 0.0
    jobs: int = 1
    hash: str = ""
    """Of all that has happened in all seeds."""

    def as_dict(self) -> dict[str, Any]:
        return {"ok": not self.failed, **asdict(self)}


def run_seeds(
    first: int,
    count: int,
    jobs: int,
    out: Path,
    on_seed: OnSeed = lambda *_: None,
    minutes: float | None = None,
) -> SeedSummary:
    """Simulate seeds first ... first + count - 1, or as many as there is time for.

    A failing seed leaves its smallest tape in `out`.
    """
    began = time.monotonic()
    end = None if minutes is None else began + 60 * minutes
    hashes: dict[int, str] = {}
    summary = SeedSummary(first=first, jobs=jobs)

    def on_message(_: str, message: dict[str, Any]) -> None:
        outcome = Outcome(**message["outcome"])
        hashes[outcome.seed] = outcome.hash
        summary.requests += outcome.requests
        summary.effects += outcome.effects
        summary.crashes += max(0, outcome.starts - 1)
        summary.entries += outcome.entries
        summary.simulated_hours += outcome.seconds / 3600
        failed = FailedSeed(**message["failed"]) if message["failed"] else None
        if failed is not None:
            summary.failed.append(failed)
        on_seed(len(hashes) / count, failed)

    seeds = range(first, first + count)
    parts = [Job(f"seeds {n}", _work, (seeds[n::jobs], out, end)) for n in range(jobs)]
    run_jobs(parts, jobs, on_message, "start it again")
    summary.seeds = len(hashes)
    summary.failed.sort(key=lambda failed: failed.seed)
    summary.simulated_hours = round(summary.simulated_hours, 2)
    summary.seconds = round(time.monotonic() - began, 1)
    lines = "".join(f"{seed} {digest}\n" for seed, digest in sorted(hashes.items()))
    summary.hash = hashlib.sha256(lines.encode()).hexdigest()
    return summary


def _work(channel: Channel, seeds: range, out: Path, end: float | None) -> None:
    for seed in seeds:
        if channel.should_stop or (end is not None and time.monotonic() >= end):
            return
        outcome = simulate(draw_tape(seed))
        failed = keep_failure(outcome, out) if outcome.violation else None
        channel.send(outcome=asdict(outcome), failed=asdict(failed) if failed else None)


def keep_failure(outcome: Outcome, out: Path) -> FailedSeed:
    """The smallest tape of a failing seed, as a file."""
    tape = shrink(draw_tape(outcome.seed), outcome.violation, simulate)
    sentence = simulate(tape).sentence
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"seed-{outcome.seed}.json"
    write_atomic(path, tape.write().encode())
    return FailedSeed(outcome.seed, outcome.violation, sentence, len(tape.faults), str(path))
