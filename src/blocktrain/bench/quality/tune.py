"""Learning rates of reference, blocks and fusion on one grid, chosen on the calibration slice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from blocktrain.config import Config
from blocktrain.errors import Interrupted
from blocktrain.learning.compose import composition_of, context_predictors, independent
from blocktrain.learning.corpus.source import Source
from blocktrain.learning.evaluate import cross_entropies, evaluate_alone
from blocktrain.learning.model import Block, IndependentBlock
from blocktrain.learning.threads import use_threads
from blocktrain.learning.tokenizer import tokenizer_of
from blocktrain.learning.train import REFERENCE, Trainer
from blocktrain.processes import Channel, Job
from blocktrain.runs.folder import (
    RunFolder,
    load_block,
    publish,
    read_json,
    read_tokenizer,
    write_json,
)

GRID = (1e-3, 2e-3, 3.5e-3, 6e-3, 1e-2)
SETTINGS = {
    "reference": "reference_learning_rate",
    "block": "learning_rate",
    "fusion": "fusion_learning_rate",
}


def block_jobs(folder: Path, base: Config, source: Source) -> list[Job]:
    """Reference and first block at every learning rate of the grid."""
    grid = [("block", 1, rate) for rate in GRID] + [("reference", REFERENCE, rate) for rate in GRID]
    return [
        Job(f"{kind} {rate:g}", _try, (folder, base, source, kind, index, rate))
        for kind, index, rate in grid
    ]


def fusion_jobs(folder: Path, base: Config, source: Source) -> list[Job]:
    """The blocks at their best rate, then the fusion block at every rate of the grid."""
    best = base.replace(learning_rate=best_rate(folder, "block"))
    blocks = [
        Job(f"block-{n}", _read_block, (folder, best, source, n))
        for n in range(1, best.independent + 1)
    ]
    names = tuple(job.name for job in blocks)
    return blocks + [
        Job(f"fusion {r:g}", _try, (folder, best, source, "fusion", best.blocks, r), after=names)
        for r in GRID
    ]


def best_rate(folder: Path, kind: str) -> float:
    """The rate with the lowest cross entropy so far."""
    return min(GRID, key=lambda rate: read_json(_path(folder, kind, rate))["ce"])


def table(folder: Path) -> list[dict[str, Any]]:
    """A row per kind: cross entropy at every rate, and the best."""
    rows = []
    for kind, setting in SETTINGS.items():
        ces = {f"{rate:g}": round(read_json(_path(folder, kind, rate))["ce"], 4) for rate in GRID}
        rows.append({"setting": setting, **ces, "best": best_rate(folder, kind)})
    return rows


def _path(folder: Path, kind: str, rate: float) -> Path:
    return folder / f"{kind}-{rate:g}.json"


def _read_block(channel: Channel, folder: Path, config: Config, source: Source, index: int) -> None:
    if not RunFolder(folder).weights(index).exists():
        read_tokenizer(folder, config)
        publish(RunFolder(folder), index, _train(channel, Trainer(config, index), source))


def _train(channel: Channel, trainer: Trainer, source: Source) -> Block:
    use_threads()
    steps = trainer.config.steps_of(trainer.index)
    for step, loss in trainer.run(
        source.open(tokenizer_of(trainer.config)).batches(trainer.config, trainer.index),
        steps,
    ):
        if step % 10 == 0:
            channel.send(step=step, steps=steps, loss=loss)
        if channel.should_stop:
            raise Interrupted(
                "stopped; finished trainings are kept: call the bench again to continue"
            )
    return trainer.block


def _try(
    channel: Channel, folder: Path, base: Config, source: Source, kind: str, index: int, rate: float
) -> None:
    """Train one model at one rate and leave its cross entropy on the calibration slice."""
    if _path(folder, kind, rate).exists():
        return
    config = base.replace(**{SETTINGS[kind]: rate})
    read_tokenizer(folder, config)
    blocks: dict[int, Block] = {}
    if kind == "fusion":
        device = torch.device("cpu")
        blocks = {
            n: load_block(RunFolder(folder), config, n, device)
            for n in range(1, base.independent + 1)
        }
    block = _train(channel, Trainer(config, index, independent(blocks)), source)
    calibration = source.open(tokenizer_of(config)).calibration
    if isinstance(block, IndependentBlock):
        ce = evaluate_alone(block, calibration, config.context)
    else:
        model = composition_of(config).assemble(config, {**blocks, index: block})
        scores = cross_entropies(context_predictors(model), calibration, config.context)
        ce = scores[config.compose]
    write_json(_path(folder, kind, rate), {"ce": ce})
