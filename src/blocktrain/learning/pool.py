"""Weights of the log-linear pool, fitted on the calibration slice."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from blocktrain.learning.compose import Model
from blocktrain.learning.tokenizer import Ids

LEAST_WEIGHT = 1e-3  # of a block that the pool is better without
FIT_STEPS = 20
FIT_GAIN = 1e-7  # nats: less is not worth another step
FIT_RIDGE = 1e-6  # so that blocks that agree in everything have a solution too
FIT_PORTION = 512  # positions


@torch.no_grad()
def fit_pool_weights(
    model: Model, calibration: Ids, *, rows: int = 16, limit: int = 1 << 16
) -> Tensor:
    """Weights of the log-linear pool that fit the calibration slice best, none of them negative."""
    logp, targets = _calibration(model, calibration, rows, limit)
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


def _calibration(model: Model, split: Ids, rows: int, limit: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities (N, P, V) of the blocks and the targets (P,), on about `limit` positions.

    They come from all over the slice: neighbouring text is alike, and weights fitted on one
    stretch of it do not carry over.
    """
    context = model.config.context
    count = (len(split) - 1) // context
    numbers = np.unique(np.linspace(0, count - 1, min(count, max(limit // context, 1))).astype(int))
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
