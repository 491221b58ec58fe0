"""Noise levels: their distribution, its split among blocks, EDM's coefficients, the Euler step.

Symbols follow Karras et al. 2022 (EDM) and the DiffusionBlocks paper: sigma is a noise level,
ln(sigma) is normal with mean p_mean and deviation p_std, truncated to [sigma_min, sigma_max].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from blocktrain.config import Config

LOG_SHARE = 0.05  # of edges by loss: how much of them goes by log-width


class Range(NamedTuple):
    """The noise levels one block is responsible for."""

    low: float
    high: float


@dataclass(frozen=True)
class NoiseLevels:
    """Truncated log-normal distribution of sigma, cut into a part for each block."""

    p_mean: float
    p_std: float
    sigma_min: float
    sigma_max: float
    cuts: tuple[float, ...] = ()
    """Levels between the blocks, rising; without any, parts have equal probability."""

    def mass_below(self, sigma: float) -> float:
        """Probability that the untruncated distribution gives a level below sigma."""
        return NormalDist(self.p_mean, self.p_std).cdf(math.log(sigma))

    def edges(self, blocks: int) -> list[float]:
        """blocks + 1 rising levels."""
        if self.cuts:
            return [self.sigma_min, *self.cuts, self.sigma_max]
        low, high = self.mass_below(self.sigma_min), self.mass_below(self.sigma_max)
        normal = NormalDist(self.p_mean, self.p_std)
        inner = [
            math.exp(normal.inv_cdf(low + (high - low) * i / blocks)) for i in range(1, blocks)
        ]
        return [self.sigma_min, *inner, self.sigma_max]

    def ranges(self, blocks: int, gamma: float) -> list[Range]:
        """A range per block; block 1 has the highest noise.

        Each range is widened by gamma of its log-width on both sides.
        """
        edges = self.edges(blocks)
        ranges = []
        for low, high in reversed(list(itertools.pairwise(edges))):
            factor = (high / low) ** gamma
            ranges.append(
                Range(max(low / factor, self.sigma_min), min(high * factor, self.sigma_max))
            )
        return ranges

    def sample(self, part: Range, uniform: Tensor) -> Tensor:
        """Levels inside a range from uniform numbers in [0, 1), by the inverse CDF."""
        low, high = self.mass_below(part.low), self.mass_below(part.high)
        normal = torch.special.ndtri(
            (low + (high - low) * uniform.double()).clamp(1e-12, 1 - 1e-12)
        )
        return torch.exp(self.p_mean + self.p_std * normal).clamp(part.low, part.high).float()


class Edm(NamedTuple):
    """EDM's preconditioning at one noise level: D = skip * z + out * F(in_ * z, noise)."""

    skip: Tensor
    out: Tensor
    in_: Tensor
    noise: Tensor
    weight: Tensor


def edm(sigma: Tensor, sigma_data: float) -> Edm:
    """The coefficients of EDM (table 1).

    With them F has unit variance at its input and output, at every noise level.
    """
    variance = sigma**2 + sigma_data**2
    return Edm(
        skip=sigma_data**2 / variance,
        out=sigma * sigma_data / variance.sqrt(),
        in_=variance.rsqrt(),
        noise=sigma.log() / 4,
        weight=variance / (sigma * sigma_data) ** 2,
    )


def in_tail(positions: int, tail: int, device: torch.device) -> Tensor:
    """Which of the positions (T,) are the last `tail`."""
    return torch.arange(positions, device=device) >= positions - tail


def euler_step(
    z: Tensor, denoised: Tensor, sigma: float | Tensor, sigma_next: float | Tensor
) -> Tensor:
    """One step of the probability-flow ODE from sigma to sigma_next."""
    return z + (sigma_next - sigma) * (z - denoised) / sigma


def noise_levels(config: Config, *, tail: bool = False) -> NoiseLevels:
    """The distribution a run trains with; the tail has its own lower end, and equal parts."""
    low, cuts = (config.tail_sigma_min, ()) if tail else (config.sigma_min, config.inner_edges)
    return NoiseLevels(config.p_mean, config.p_std, low, config.sigma_max, cuts)


def edges_by_loss(curve: Mapping[float, float], blocks: int) -> list[float]:
    """blocks + 1 rising levels between which the measured loss rises by the same amount.

    `curve` is the loss at some noise levels. It rises with the noise, up to what the context alone
    leaves open; so every block gets an equal part of what z can tell. A small share goes by
    log-width, so that no range is empty where the curve is flat.
    """
    levels = np.array(sorted(curve))
    losses = np.maximum.accumulate([curve[level] for level in levels])
    position = np.log(levels / levels[0]) / np.log(levels[-1] / levels[0])
    rise = losses[-1] - losses[0]
    share = (losses - losses[0]) / rise if rise > 0 else position
    share = (1 - LOG_SHARE) * share + LOG_SHARE * position
    inner = np.interp(np.arange(1, blocks) / blocks, share, np.log(levels))
    return [float(levels[0]), *map(float, np.exp(inner)), float(levels[-1])]
