"""`bench quality --readings`: trains and evaluates the readings of the paper beside end to end.

Its jobs lie in the folder of the bench, so what both train is trained once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from blocktrain.bench.quality.quality import (
    Setup,
    load_model,
    report_progress,
    save_result,
    train_job,
    without_finished,
)
from blocktrain.bench.quality.readings import CURVES, READINGS
from blocktrain.config import Config
from blocktrain.learning.compose import Model, Predictors, euler_predictors, row_noise
from blocktrain.learning.evaluate import cross_entropies, evaluate_alone, rows_without_overlap
from blocktrain.learning.model import IndependentBlock, target_table
from blocktrain.learning.noise import edges_by_loss
from blocktrain.learning.objective import denoise_logits
from blocktrain.learning.threads import use_threads
from blocktrain.learning.tokenizer import Ids
from blocktrain.learning.train import REFERENCE, Trainer
from blocktrain.processes import Channel, Job
from blocktrain.runs.folder import block_name, load_independent

PILOT_SHARE = 8  # a pilot trains for this part of the steps
PILOT_LEVELS = 9  # noise levels at which its loss is measured
PILOT_TOKENS = 16_384  # of the calibration slice


def depths(setup: Setup) -> list[bool]:
    """Whether deep, for each depth of the readings of a setup; the depth of the bench is first."""
    return sorted({False, *(READINGS[name].deep for name in setup.variants)})


def plain_variant(deep: bool) -> str:
    """The variant with plain blocks of a depth, and the end-to-end model of as many layers."""
    return "deep" if deep else "fuse"


def plain_name(deep: bool, index: int) -> str:
    """The job that trains an end-to-end model, or a plain block by itself."""
    is_first = index == REFERENCE and not deep
    return "end_to_end" if is_first else f"{plain_variant(deep)}-{block_name(index)}"


def reading_jobs(setup: Setup) -> list[Job]:
    """Everything the readings of one seed need; what already has its result is left out."""
    pilots = {READINGS[name].edges for name in setup.variants}
    plan = [Job(name, measure_edges, (setup, name)) for name in CURVES if name in pilots]
    for deep in depths(setup):
        for index in (REFERENCE, 1):
            name = plain_name(deep, index)
            plan += [
                Job(name, train_job, (setup, plain_variant(deep), index)),
                Job(f"alone-{name}", evaluate_plain, (setup, deep, index), after=(name,)),
            ]
    for name in setup.variants:
        plan += _jobs_of(setup, name)
    return without_finished(setup, plan)


def _jobs_of(setup: Setup, name: str) -> Iterator[Job]:
    reading = READINGS[name]
    reading.config(setup.base)  # refuses settings that this reading cannot have
    trained: list[str] = []
    for index in range(1, reading.blocks(setup.base) + 1):
        after = [reading.edges] if reading.edges else trained if reading.chain else []
        job = f"{name}-{block_name(index)}"
        yield Job(job, train_job, (setup, name, index), after=tuple(after))
        trained.append(job)
    yield Job(f"path-{name}", evaluate_reading, (setup, name), after=tuple(trained))


def measure_edges(channel: Channel, setup: Setup, job: str) -> None:
    """Cut the noise range by the loss of a pilot: one block, trained briefly on all of it."""
    use_threads()
    steps = max(setup.base.steps // PILOT_SHARE, 1)
    config = setup.base.replace(**CURVES[job], blocks=1, steps=steps)
    corpus, trainer = setup.corpus(), Trainer(config, 1)
    for step, _ in trainer.run(corpus.batches(config, 1), steps):
        report_progress(channel, share=step / (steps + 1))
    if not isinstance(trainer.block, IndependentBlock):
        raise TypeError("a pilot is an independent block")
    curve = loss_curve(config, trainer.block, corpus.calibration[: PILOT_TOKENS + 1])
    inner = edges_by_loss(curve, setup.base.blocks)[1:-1]
    edges = ",".join(f"{level:.4f}" for level in inner) or "mass"
    save_result(setup, job, {"edges": edges, "curve": sorted(curve.items())})


@torch.no_grad()
def loss_curve(config: Config, block: IndependentBlock, text: Ids) -> dict[float, float]:
    """Cross entropy of a denoising block at levels from sigma_min to sigma_max."""
    table, count, total = target_table(config), 0, np.zeros(PILOT_LEVELS)
    levels = np.geomspace(config.sigma_min, config.sigma_max, PILOT_LEVELS)
    for first, tokens in rows_without_overlap(text, config.context, 16):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        rows = range(first, first + len(tokens))
        noise = torch.stack(
            [row_noise(config.seed, 0, row, inputs.shape[1], config.z_width) for row in rows]
        )
        for i, level in enumerate(levels):
            sigma = torch.tensor(level, dtype=torch.float32)
            z = table[targets] + sigma * noise
            logits = denoise_logits(block, table, inputs, z, sigma, config.sigma_data)
            total[i] += F.cross_entropy(logits.transpose(1, 2), targets, reduction="sum").item()
        count += targets.numel()
    return {float(level): float(ce) for level, ce in zip(levels, total / count, strict=True)}


def evaluate_plain(channel: Channel, setup: Setup, deep: bool, index: int) -> None:
    """Cross entropy of an end-to-end model, or of one plain block by itself."""
    use_threads()
    variant = plain_variant(deep)
    config = setup.config(variant)
    block = load_independent(setup.run(variant), config, index, torch.device("cpu"))

    def progress(share: float) -> None:
        report_progress(channel, share=share)

    ce = evaluate_alone(block, setup.valid(), config.context, progress=progress)
    save_result(setup, f"alone-{plain_name(deep, index)}", {"ce": ce})


def evaluate_reading(channel: Channel, setup: Setup, name: str) -> None:
    """Cross entropies along the path of one reading, from each of its starts."""
    use_threads()
    model, starts = load_model(setup, name), READINGS[name].starts
    result: dict[str, Any] = {}
    for number, start in enumerate(starts):

        def progress(share: float, finished: int = number) -> None:
            report_progress(channel, share=(finished + share) / len(starts))

        there = dataclasses.replace(model, config=model.config.replace(start=start))
        result[start] = cross_entropies(
            path_predictors(there), setup.valid(), model.config.context, progress=progress
        )
    save_result(setup, f"path-{name}", result)


def path_predictors(model: Model) -> Predictors:
    """The path after each block, and the equal pool of all that it says on its way."""
    along = euler_predictors(model, seed=model.config.seed, draws=1)

    def predict(tokens: torch.Tensor, first: int) -> dict[str, torch.Tensor]:
        path = along(tokens, first)
        steps = [path[f"euler_{n}"].log_softmax(-1) for n in range(1, len(model.blocks) + 1)]
        return {**path, "pooled": torch.stack(steps).mean(0)}

    return predict
