"""The arithmetic of a version, written a second time for the audit.

What an update proposes, and which weights follow from all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import numpy as np

from blocktrain.protocol.compression import UpdateTensors
from blocktrain.protocol.ledger import VersionFacts
from blocktrain.protocol.tensors import Tensors

ROBUST_FROM = 5  # workers of a version whose mean is trimmed


def propose(
    current: Tensors, opened: UpdateTensors, base: Tensors | None, scale: float
) -> tuple[Tensors, float]:
    """The weights that an update proposes, in float64, and the norm of its change before the clip.

    `base` is what late weights started from.
    """
    values = {name: tensor.astype(np.float64) for name, tensor in opened.tensors.items()}
    start = current if base is None else base
    delta = {
        name: value - start[name].astype(np.float64) if opened.absolute else value
        for name, value in values.items()
    }
    norm = math.sqrt(math.fsum(float(np.sum(np.square(change))) for change in delta.values()))
    if not (opened.absolute and base is None and scale == 1.0):
        values = {
            name: current[name].astype(np.float64) + scale * change
            for name, change in delta.items()
        }
    return values, norm


def trimmed_mean(proposed: Sequence[tuple[float, Tensors]]) -> Tensors:
    """Of each worker's (share, sum of share times proposal), without a fifth at either end."""
    drop = max(1, len(proposed) // 5)
    shares = np.array([share for share, _ in proposed])
    mean: Tensors = {}
    for name in proposed[0][1]:
        rows = np.stack([total[name] / share for share, total in proposed])
        order = np.argsort(rows, axis=0, kind="stable")[drop:-drop]
        values, weights = np.take_along_axis(rows, order, axis=0), shares[order]
        mean[name] = np.asarray((weights * values).sum(axis=0) / weights.sum(axis=0))
    return mean


def add(mean: Tensors | None, share: float, proposed: Tensors) -> Tensors:
    """One more proposal in the mean."""
    return {
        name: share * value if mean is None else mean[name] + share * value
        for name, value in proposed.items()
    }


class Mean:
    """Of proposals, weighted. Without trust it is the trimmed one where enough have answered."""

    def __init__(self, trusting: bool) -> None:
        self._trusting = trusting
        self._all: Tensors | None = None
        self._own: dict[str, tuple[float, Tensors]] = {}  # by worker

    def add(self, worker: str, share: float, proposed: Tensors) -> None:
        self._all = add(self._all, share, proposed)
        if not self._trusting:
            before, total = self._own.get(worker, (0.0, None))
            self._own[worker] = before + share, add(total, share, proposed)

    def result(self) -> Tensors | None:
        """None, if nothing was added."""
        if len(self._own) < ROBUST_FROM:
            return self._all
        return trimmed_mean(list(self._own.values()))


def clip_scale(norm: float, known: Sequence[float], clip: float | None, clip_after: float) -> float:
    """What a change of this length is shortened by, after changes of the known lengths."""
    limit = math.inf if clip is None or len(known) < clip_after else clip * median(known)
    return min(1.0, limit / norm) if norm > 0 else 1.0


def outer_step(
    current: Tensors, mean: Tensors, buffers: Tensors | None, version: VersionFacts
) -> tuple[Tensors, Tensors | None]:
    """(weights, memory of the outer step) after the mean of the proposals, in float64."""
    if version.outer == "average":
        return mean, None
    weights: Tensors = {}
    momentum: Tensors = {}
    for name, tensor in current.items():
        now = tensor.astype(np.float64)
        gradient = now - mean[name]
        buffer = (
            version.outer_momentum
            * (np.zeros_like(now) if buffers is None else buffers[name].astype(np.float64))
            + gradient
        )
        weights[name] = now - version.outer_learning_rate * (
            gradient + version.outer_momentum * buffer
        )
        momentum[name] = buffer
    return weights, momentum


def change_of(current: Tensors, target: Tensors) -> Tensors:
    """What a version adds to its parent, before it is compressed."""
    return narrow({name: target[name] - current[name].astype(np.float64) for name in current})


def narrow(wide: Tensors) -> Tensors:
    with np.errstate(over="ignore"):
        return {name: np.asarray(tensor).astype(np.float32) for name, tensor in wide.items()}
