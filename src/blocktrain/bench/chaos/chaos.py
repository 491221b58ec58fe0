"""`blocktrain chaos`: one run without faults, one with all of them, and the same undefended."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blocktrain.bench.chaos.figures import ChaosFigures, measure
from blocktrain.bench.chaos.play import ChaosRun, play
from blocktrain.bench.chaos.schedule import FaultSchedule, draw_schedule
from blocktrain.bench.chaos.table import is_safe, plot, rows
from blocktrain.bench.machine import BenchResult, header
from blocktrain.config import Config, make_config
from blocktrain.coordinator.policy import Policy
from blocktrain.errors import Interrupted
from blocktrain.learning.corpus.source import Source
from blocktrain.learning.threads import limited_threads
from blocktrain.learning.tokenizer import tokenizer_of
from blocktrain.learning.train import Trainer
from blocktrain.runs.folder import write_json
from blocktrain.runs.prepare import prepare

PACE = 0.7
"""Share of the time of a chaos run in which rounds are made, as a guess."""
ROUND_SECONDS = 1.0  # of a round, beside its training, as a guess
LEAST_ROUNDS = 6
TIMED_STEPS = 20

OnChaosShare = Callable[[str, float], None]


@dataclass(frozen=True)
class ChaosSizes:
    """What is trained, by how many, and in tasks of how many steps."""

    settings: dict[str, Any]
    honest: int
    byzantine: int
    task_steps: int
    valid_tokens: int


_SHAPE = {"blocks": 1, "compose": "pool", "heads": 2, "layers_per_block": 1}
CHAOS_SCALES = {
    "tiny": ChaosSizes(_SHAPE | {"width": 16, "context": 16, "batch": 2}, 3, 2, 4, 4096),
    "standard": ChaosSizes(_SHAPE | {"width": 64, "context": 64, "batch": 8}, 6, 4, 32, 131_072),
}


@dataclass(frozen=True)
class ChaosOptions:
    """Options of `blocktrain chaos`."""

    folder: Path
    scale: str
    source: Source
    seed: int
    minutes: float
    steps: int | None
    """Of the run's schedule; None: as many as this machine makes in that time."""
    undefended: bool
    """Only the control."""
    cores: int
    command: str

    @property
    def sizes(self) -> ChaosSizes:
        return CHAOS_SCALES[self.scale]

    @property
    def members(self) -> dict[str, int]:
        return {"honest": self.sizes.honest, "byzantine": self.sizes.byzantine}


def run_chaos(options: ChaosOptions, on_share: OnChaosShare = lambda *_: None) -> BenchResult:
    """Leaves schedule.json, chaos.json and chaos.png in the folder."""
    options.source.require_outside(options.folder)
    schedule = draw_schedule(options.seed, options.minutes, sum(options.members.values()))
    shutil.rmtree(options.folder / "runs", ignore_errors=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    write_json(options.folder / "schedule.json", schedule.as_dict())
    found: dict[str, ChaosFigures] = {}
    try:
        config = _config(options)
        prepare(config, options.source, options.folder / "runs" / "prepared")
        for name in ("control",) if options.undefended else ("chaos", "fault_free", "control"):
            run = _run(options, config, schedule, name)
            if name == "fault_free":
                run = replace(run, honest=equal_replicas(found["chaos"], config, run.honest))
            played = play(run, lambda share, name=name: on_share(name, share))  # type: ignore[misc]
            found[name] = measure(played, options.source, options.sizes.valid_tokens)
    except KeyboardInterrupt:
        raise Interrupted(
            "stopped; all processes of the run have ended, and its folders are in "
            f"{options.folder / 'runs'}"
        ) from None
    result = _result(options, config, schedule, found)
    write_json(options.folder / "chaos.json", result)
    title = f"chaos of {options.minutes:g} min, {options.scale}, {options.source.name}"
    plot(options.folder / "chaos.png", found, f"{title}, seed {options.seed}")
    return result


def equal_replicas(found: ChaosFigures, config: Config, honest: int) -> int:
    """As many workers as make the same honest steps in a run without faults."""
    return min(honest, max(1, round(found["honest_steps"] / config.steps)))


def _config(options: ChaosOptions) -> Config:
    config = make_config({**options.sizes.settings, "seed": options.seed})
    corpus = options.source.open(tokenizer_of(config))
    corpus.require(config.context)
    steps = options.steps
    if steps is None:
        trainer, task = Trainer(config, 1), options.sizes.task_steps
        with limited_threads():
            _train(trainer, corpus.batches(config, 1), 2)
            began = time.perf_counter()
            _train(trainer, corpus.batches(config, 1), 2 + TIMED_STEPS)
        each = (time.perf_counter() - began) / TIMED_STEPS
        crowd = max(1.0, sum(options.members.values()) / options.cores)
        rounds = int(60 * options.minutes * PACE / (each * task * crowd + ROUND_SECONDS))
        steps = max(LEAST_ROUNDS, rounds) * task
    return config.replace(steps=steps)


def _train(trainer: Trainer, batches: Any, until: int) -> None:
    for _ in trainer.run(batches, until):
        pass


def _run(options: ChaosOptions, config: Config, schedule: FaultSchedule, name: str) -> ChaosRun:
    sizes, folder = options.sizes, options.folder / "runs"
    return ChaosRun(
        folder=folder / name,
        config=config,
        policy=Policy(
            task_steps=sizes.task_steps,
            first_deadline=10.0,
            undefended=name == "control",
            keep_versions=0,  # harm is measured from the version that each update began at
        ),
        data=options.source.spec,
        prepared=folder / "prepared",
        schedule=schedule,
        honest=sizes.honest,
        byzantine=sizes.byzantine,
        calm=name == "fault_free",
    )


def _result(
    options: ChaosOptions,
    config: Config,
    schedule: FaultSchedule,
    found: dict[str, ChaosFigures],
) -> BenchResult:
    """The table is of the defended run, and of the control if there is no other."""
    shown = found.get("chaos") or found["control"]
    return {
        **header(options.command, options.seed),
        "scale": options.scale,
        "data": options.source.name,
        "minutes": options.minutes,
        "members": options.members,
        "settings": config.model_dump(),
        "planned": schedule.counts,
        "rows": rows(
            shown, found.get("fault_free"), options.members, judged=options.scale != "tiny"
        ),
        "safe": all(map(is_safe, found.values())),
        "finished": shown["finished"],
        "runs": found,
    }


def problems(result: BenchResult) -> Sequence[str]:
    """Sentences about what must never happen; empty if all is well."""
    sentences = []
    for name, found in result["runs"].items():
        for what in ("lost", "doubled", "findings", "forgeries_accepted"):
            if found[what]:
                sentences.append(f"{name}: {what.replace('_', ' ')}: {list(found[what])[:3]}")
        if name != "control" and not found["finished"]:
            sentences.append(f"{name}: the run did not finish")
    return sentences
