"""What is fitted and chosen on the calibration slice: pool weights, and the composition."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blocktrain.learning.compose import Model, context_predictors
from blocktrain.learning.evaluate import cross_entropies_of_rows, spread_rows
from blocktrain.learning.tokenizer import Ids

LEAST_WEIGHT = 1e-3  # of a block that the pool is better without
FIT_STEPS = 20
FIT_GAIN = 1e-7  # nats: less is not worth another step
FIT_RIDGE = 1e-6  # so that blocks that agree in everything have a solution too
FIT_PORTION = 512  # positions


@dataclass(frozen=True)
class CompositionChoice:
    """The composition that a model is used with, and why."""

    name: str
    scores: dict[str, float]
    """Nats per token by composition; empty if there was nothing to compare."""
    tokens: int
    """Of the calibration slice, on which they were scored."""

    @property
    def reason(self) -> str:
        if not self.scores:
            return f"nothing else was compared with {self.name}"
        scores = " and ".join(f"{name} {ce:.4f}" for name, ce in self.scores.items())
        return (
            f"{self.name} is best on {self.tokens:,} tokens of the calibration slice: "
            f"{scores} nats per token"
        )


def choose_composition(
    model: Model, calibration: Ids, *, limit: int = 1 << 16
) -> CompositionChoice:
    """What composes these blocks best: what they were trained for, or their pool.

    Every second row fits the weights of the pool, the others decide: scored on what it was fitted
    on, the pool would look better than it is.
    """
    config = model.config
    numbers = spread_rows(calibration, config.context, limit)
    if model.fusion is None or len(numbers) < 2:
        return CompositionChoice(config.compose, {}, 0)
    fitted = fit_rows(model, calibration, numbers[::2])
    pooled = Model(config, model.blocks, model.fusion, fitted)
    scores = cross_entropies_of_rows(
        context_predictors(pooled), calibration, config.context, numbers[1::2], device=model.device
    )
    candidates = {name: scores[name] for name in (config.compose, "pool")}
    finite = {name: ce for name, ce in candidates.items() if math.isfinite(ce)}
    best = min(finite, key=lambda name: finite[name], default=config.compose)
    return CompositionChoice(best, finite, len(numbers[1::2]) * config.context)


def fit_pool_weights(model: Model, calibration: Ids, *, limit: int = 1 << 16) -> Tensor:
    """Weights of the log-linear pool that fit the calibration slice best, none of them negative.

    Rows come from all over the slice: weights fitted on one stretch of it do not carry over.
    """
    return fit_rows(model, calibration, spread_rows(calibration, model.config.context, limit))


@torch.no_grad()
def fit_rows(model: Model, calibration: Ids, numbers: npt.NDArray[np.int64]) -> Tensor:
    """`fit_pool_weights` on some rows of the slice."""
    logp, targets = _calibration(model, calibration, numbers)
    best = torch.full((len(model.blocks),), LEAST_WEIGHT)
    blocks = torch.arange(len(model.blocks))
    # A block that only hurts gets the least weight, and the others are fitted again without it.
    while len(blocks):
        weights = _fit(logp, targets, blocks)
        if (weights > LEAST_WEIGHT).all():
            best[blocks] = weights.float()
            break
        blocks = blocks[weights > LEAST_WEIGHT]
    return best


def _fit(logp: Tensor, targets: Tensor, blocks: Tensor) -> Tensor:
    """The best weights of some blocks, of any sign: a small convex problem, by Newton's method."""
    weights = torch.full((len(blocks),), 1 / len(blocks), dtype=torch.float64)
    fit = _fit_of(weights, logp, targets, blocks)
    for _ in range(FIT_STEPS):
        step = torch.linalg.solve(fit.curve, fit.slope)
        if fit.slope @ step < FIT_GAIN:
            break
        after = _fit_of(weights - step, logp, targets, blocks)
        while after.loss > fit.loss and fit.slope @ step >= FIT_GAIN:
            step /= 2
            after = _fit_of(weights - step, logp, targets, blocks)
        weights, fit = weights - step, after
    return weights


class _Fit(NamedTuple):
    """How well weights fit: cross entropy, and its first and second derivative by the weights."""

    loss: float
    slope: Tensor
    curve: Tensor


def _fit_of(weights: Tensor, logp: Tensor, targets: Tensor, blocks: Tensor) -> _Fit:
    """Of log-probabilities (N, P, V): the mean over positions, in portions that fit the cache."""
    positions = len(targets)
    loss, slope = 0.0, torch.zeros_like(weights)
    curve = FIT_RIDGE * positions * torch.eye(len(blocks), dtype=weights.dtype)
    for portion, target in zip(logp.split(FIT_PORTION, 1), targets.split(FIT_PORTION), strict=True):
        each = portion[blocks]
        mixture = torch.einsum("n,npv->pv", weights.float(), each).log_softmax(-1)
        chance = mixture.exp()
        expected = torch.einsum("pv,npv->np", chance, each)
        spread = ((each - expected[..., None]) * chance.sqrt()).flatten(1)
        here = torch.arange(len(target))
        loss -= mixture[here, target].double().sum().item()
        slope += (expected - each[:, here, target]).double().sum(1)
        curve += (spread @ spread.T).double()
    return _Fit(loss / positions, slope / positions, curve / positions)


def _calibration(
    model: Model, split: Ids, numbers: npt.NDArray[np.int64], rows: int = 16
) -> tuple[Tensor, Tensor]:
    """Log-probabilities (N, P, V) of the blocks and the targets (P,), on some rows of a split."""
    context = model.config.context
    logps: list[Tensor] = []
    targets: list[Tensor] = []
    for some in np.array_split(numbers, -(-len(numbers) // rows)):
        rows_of_ids = np.stack([split[i * context : (i + 1) * context + 1] for i in some])
        tokens = torch.from_numpy(rows_of_ids.astype(np.int64))
        features = model.all_features(tokens[:, :-1].to(model.device))
        each = [
            block(f).log_softmax(-1).flatten(0, 1)
            for block, f in zip(model.blocks, features, strict=True)
        ]
        logps.append(torch.stack(each).cpu())
        targets.append(tokens[:, 1:].flatten())
    return torch.cat(logps, dim=1), torch.cat(targets)
