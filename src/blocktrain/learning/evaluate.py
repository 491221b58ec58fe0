"""Cross entropy of a composed model, of its blocks and of the paper's path, over a whole split without overlap."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from blocktrain.learning.compose import Model, euler_path, position_noise
from blocktrain.learning.data import Bytes, rows_without_overlap
from blocktrain.learning.model import Block, pool

MARGINAL_DRAWS = 8
LEAST_SAY = 1e-3  # weight of a block that the pool is better without
FIT_STEPS = 20
FIT_GAIN = 1e-7  # nats: less is not worth another step
FIT_RIDGE = 1e-6  # so that blocks that agree in everything have a solution, too
FIT_PORTION = 512  # positions
Predictors = Callable[[Tensor, int], dict[str, Tensor]]
"""(tokens (B, T), index of the first row) -> log-probabilities or logits (B, T, V) by name."""
Progress = Callable[[float], None]
"""Told the share of the work that is done."""


@torch.no_grad()
def cross_entropies(
    predict: Predictors,
    split: Bytes,
    context: int,
    *,
    rows: int = 16,
    device: torch.device | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, float]:
    """Nats per byte of several predictors in one walk over the split. Sums are per row in float64: `rows` changes nothing."""
    totals: dict[str, float] = {}
    count = 0
    for first, tokens in rows_without_overlap(split, context, rows):
        moved = tokens.to(device) if device else tokens
        targets = moved[:, 1:]
        for name, logits in predict(moved[:, :-1], first).items():
            ce = F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")
            totals[name] = totals.get(name, 0.0) + ce.double().sum().item()
        count += targets.numel()
        progress(count / (len(split) - 1))
    return {name: total / count for name, total in totals.items()}


def context_predictors(model: Model, *, leave_out: bool = False) -> Predictors:
    """Every block alone, their pool, and the fused model, whole or (leave_out) with each block missing in turn."""
    readout = model.readout()
    count = len(model.blocks)

    def predict(tokens: Tensor, first: int) -> dict[str, Tensor]:
        features = model.all_features(tokens)
        found = {f"block_{n + 1}": model.blocks[n](features[n]) for n in range(count)}
        kept = torch.ones(count, tokens.shape[0], device=tokens.device)
        logp = torch.stack([found[f"block_{n + 1}"].log_softmax(-1) for n in range(count)])
        found["pool"] = pool(logp, readout.weights, kept)
        if model.fusion:
            found["fuse"] = model.fusion.fuse(tokens, features, kept)
            for n in range(count) if leave_out and count > 1 else ():
                missing = kept.clone()
                missing[n] = 0
                found[f"fuse_without_{n + 1}"] = model.fusion.fuse(tokens, features, missing)
        return found

    return predict


def euler_predictors(model: Model, *, seed: int = 0, draws: int = MARGINAL_DRAWS) -> Predictors:
    """The paper's path after each block, and (draws > 1) its probabilities averaged over noise draws."""

    def predict(tokens: Tensor, first: int) -> dict[str, Tensor]:
        B, T = tokens.shape
        found: dict[str, Tensor] = {}
        total: Tensor | None = None
        for draw in range(draws):
            noise = torch.stack(
                [
                    position_noise_row(seed, draw, first + i, T, model.config.z_width)
                    for i in range(B)
                ]
            )
            path = euler_path(model, tokens, noise.to(tokens.device))
            if draw == 0:
                found = {f"euler_{n + 1}": logits for n, logits in enumerate(path)}
                found["euler"] = path[-1]
            p = path[-1].softmax(-1)
            total = p if total is None else total + p
        if total is not None and draws > 1:
            found["marginal"] = (total / draws).log()
        return found

    return predict


def position_noise_row(seed: int, draw: int, row: int, count: int, width: int) -> Tensor:
    """Standard normal (count, width) for one row of a split: a pure function, so batches may be cut anywhere."""
    return position_noise((seed << 8) + draw, row, 1, count * width).reshape(count, width)


def evaluate(
    model: Model,
    split: Bytes,
    *,
    seed: int = 0,
    draws: int = MARGINAL_DRAWS,
    rows: int = 16,
    progress: Progress = lambda _: None,
) -> dict[str, float]:
    """All cross entropies that this kind of model has, with `composed` for the way it is meant to be used."""
    config = model.config
    found: dict[str, float] = {}
    if model.blocks[0].skip != "edm":
        found |= cross_entropies(
            context_predictors(model),
            split,
            config.context,
            rows=rows,
            device=model.device,
            progress=progress,
        )
    if model.blocks[0].skip:
        predict = euler_predictors(model, seed=seed, draws=draws)
        found |= cross_entropies(
            predict, split, config.context, rows=rows, device=model.device, progress=progress
        )
    return {"composed": found[config.compose], **found}


def evaluate_alone(block: Block, split: Bytes, context: int, *, rows: int = 16) -> float:
    """Cross entropy of one plain block: the end-to-end reference, or a single `next` block."""
    device = block.embed.device
    return cross_entropies(
        lambda t, _: {"ce": block(block.features(t))}, split, context, rows=rows, device=device
    )["ce"]


@torch.no_grad()
def text_bits(block: Block, prompt: bytes, text: bytes) -> float:
    """Bits per byte of `text` after `prompt` under a plain block; the whole must fit its context."""
    ids = torch.tensor([list(prompt + text)], device=block.embed.device)
    logp = block(block.features(ids[:, :-1])).log_softmax(-1)
    taken = logp[0, torch.arange(ids.shape[1] - 1), ids[0, 1:]][len(prompt) - 1 :]
    return -taken.double().mean().item() / math.log(2)


@torch.no_grad()
def fit_pool_weights(
    model: Model, calibration: Bytes, *, rows: int = 16, limit: int = 1 << 16
) -> Tensor:
    """Weights of the log-linear pool that fit the calibration slice best, none of them negative."""
    logp, targets = _calibration(model, calibration, rows, limit)
    found = torch.full((len(model.blocks),), LEAST_SAY)
    used = torch.arange(len(model.blocks))
    while len(
        used
    ):  # a block that only hurts gets next to no say, and the others are fitted anew without it
        weights = _fitted(logp, targets, used)
        if (weights > LEAST_SAY).all():
            found[used] = weights.float()
            break
        used = used[weights > LEAST_SAY]
    return found


def _fitted(logp: Tensor, targets: Tensor, used: Tensor) -> Tensor:
    """The best weights of some blocks, of any sign: a convex problem of a few numbers, by Newton's method."""
    weights = torch.full((len(used),), 1 / len(used), dtype=torch.float64)
    fit = _fit_of(weights, logp, targets, used)
    for _ in range(FIT_STEPS):
        step = torch.linalg.solve(fit.curve, fit.slope)
        if fit.slope @ step < FIT_GAIN:
            break
        while (
            found := _fit_of(weights - step, logp, targets, used)
        ).loss > fit.loss and fit.slope @ step >= FIT_GAIN:
            step /= 2
        weights, fit = weights - step, found
    return weights


class _Fit(NamedTuple):
    """How well a pool's weights fit: cross entropy, and its first and second derivative by the weights."""

    loss: float
    slope: Tensor
    curve: Tensor


def _fit_of(weights: Tensor, logp: Tensor, targets: Tensor, used: Tensor) -> _Fit:
    """Of some blocks' log-probabilities (N, P, V): the mean over positions, in portions that stay in the processor's cache."""
    positions = len(targets)
    loss, slope, curve = (
        0.0,
        torch.zeros_like(weights),
        FIT_RIDGE * positions * torch.eye(len(used), dtype=weights.dtype),
    )
    for portion, target in zip(logp.split(FIT_PORTION, 1), targets.split(FIT_PORTION), strict=True):
        each = portion[used]
        pooled = torch.einsum("n,npv->pv", weights.float(), each).log_softmax(-1)
        chance = pooled.exp()
        expected = torch.einsum("pv,npv->np", chance, each)
        spread = ((each - expected[..., None]) * chance.sqrt()).flatten(1)
        here = torch.arange(len(target))
        loss -= pooled[here, target].double().sum().item()
        slope += (expected - each[:, here, target]).double().sum(1)
        curve += (spread @ spread.T).double()
    return _Fit(loss / positions, slope / positions, curve / positions)


def _calibration(model: Model, split: Bytes, rows: int, limit: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities (N, P, V) of the blocks and the targets (P,) on about `limit` positions from all over the slice.

    Neighbouring text is alike: weights fitted on one stretch of it do not carry over.
    """
    context = model.config.context
    count = (len(split) - 1) // context
    picked = np.unique(np.linspace(0, count - 1, min(count, max(limit // context, 1))).astype(int))
    logps: list[Tensor] = []
    targets: list[Tensor] = []
    for some in np.array_split(picked, -(-len(picked) // rows)):
        tokens = torch.from_numpy(
            np.stack([split[i * context : (i + 1) * context + 1] for i in some]).astype(np.int64)
        )
        features = model.all_features(tokens[:, :-1].to(model.device))
        each = [
            block(f).log_softmax(-1).flatten(0, 1)
            for block, f in zip(model.blocks, features, strict=True)
        ]
        logps.append(torch.stack(each).cpu())
        targets.append(tokens[:, 1:].flatten())
    return torch.cat(logps, dim=1), torch.cat(targets)
