"""Blocks as plain callables -> one model.

A *stage* is anything called as `stage(ids, start) -> features`: it forgets what it knew from position `start` on, reads
the ids from there, and returns their features (1, T, W). Local blocks and remote ones look alike. A *scorer* is the same
one level up, `scorer(ids, start) -> logits`: the composed model with its caches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from blocktrain.config import Config
from blocktrain.errors import ConfigError
from blocktrain.learning.model import Block, Cache, Readout, target_table
from blocktrain.learning.noise import edm, euler_step, in_tail, noise_levels
from blocktrain.learning.objective import denoise_logits

Stage = Callable[[Tensor, int], Tensor]
Scorer = Callable[[Tensor, int], Tensor]
PIECE = 128


@dataclass
class Model:
    """A trained run: its independent blocks in order, the fusion block if it has one, and the fitted pool weights."""

    config: Config
    blocks: list[Block]
    fusion: Block | None = None
    pool_weights: Tensor | None = None
    table: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.table = target_table(self.config).to(self.blocks[0].embed.device)
        for block in [*self.blocks, *([self.fusion] if self.fusion else [])]:
            block.requires_grad_(False).eval()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.blocks[0].embed.device

    def features(self, number: int, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """What block `number` (from 1) makes of the bytes alone, without a noised target."""
        block = self.blocks[number - 1]
        if block.skip != "exact":
            return block.features(tokens, cache=cache)
        z = torch.zeros(
            *tokens.shape, self.config.z_width, device=self.device
        )  # the mean of what the block saw
        return block.features(
            tokens, z=z, c_noise=middle_noise(self.config, number, self.device), cache=cache
        )

    def all_features(self, tokens: Tensor) -> Tensor:
        """(N, B, T, W)."""
        return torch.stack([self.features(n, tokens) for n in range(1, len(self.blocks) + 1)])

    def readout(self) -> Readout:
        """The pool of the independent blocks under the fitted weights (equal ones where none are fitted)."""
        pool = Readout(len(self.blocks), self.config.width).to(self.device).requires_grad_(False)
        pool.copy_from(self.blocks)
        if self.pool_weights is not None:
            pool.weights.copy_(self.pool_weights)
        return pool

    def scorer(self, *, seed: int = 0) -> Scorer:
        """The composed model as it was meant to be used, with its caches."""
        if self.config.compose == "euler":
            return EulerScorer(self, seed)
        return Fan(
            [LocalStage(self, n) for n in range(1, len(self.blocks) + 1)],
            self.fusion or self.readout(),
        )

    def drafter(self, number: int = 1) -> Scorer:
        """One block as a language model of its own."""
        if self.blocks[number - 1].skip == "edm":
            raise ConfigError(
                "a block of skip=edm cannot draft; use mode autoregressive, or --draft none for a model with a tail"
            )
        stage = LocalStage(self, number)
        return lambda ids, start: self.blocks[number - 1](stage(ids, start))


def middle_noise(config: Config, number: int, device: torch.device) -> Tensor:
    """The noise level that block `number` is told when it has no z: the middle of its range."""
    low, high = noise_levels(config).ranges(config.blocks, 0.0)[number - 1]
    return edm(torch.tensor((low * high) ** 0.5, device=device), config.sigma_data).noise


class LocalStage:
    """A block in this process, with its cache."""

    def __init__(self, model: Model, number: int) -> None:
        self.model, self.number = model, number
        self.cache = Cache(model.blocks[number - 1], 1)

    def __call__(self, ids: Tensor, start: int) -> Tensor:
        self.cache.truncate(start)
        return in_pieces(
            lambda part: self.model.features(self.number, ids[:, part], self.cache), ids.shape[1]
        )


class Fan:
    """All stages read the same ids; their features meet in the fusion block or in the pool."""

    def __init__(self, stages: Sequence[Stage], readout: Block | Readout) -> None:
        self.stages, self.readout = stages, readout
        self.cache = Cache(readout, 1) if isinstance(readout, Block) else None

    def __call__(self, ids: Tensor, start: int) -> Tensor:
        features = torch.stack([stage(ids, start) for stage in self.stages])
        kept = torch.ones(features.shape[:2], device=features.device)
        if self.cache:
            self.cache.truncate(start)
        return in_pieces(
            lambda part: self._answer(ids[:, part], features[:, :, part], kept), ids.shape[1]
        )

    def _answer(self, ids: Tensor, features: Tensor, kept: Tensor) -> Tensor:
        if isinstance(self.readout, Block):
            return self.readout.fuse(ids, features, kept, self.cache)
        return self.readout(self.readout.normed(features), kept)


def in_pieces(work: Callable[[slice], Tensor], positions: int) -> Tensor:
    """`work` on at most PIECE positions at a time, joined: BLAS may sum a longer product in another order."""
    return torch.cat([work(slice(i, i + PIECE)) for i in range(0, positions, PIECE)], dim=1)


class EulerScorer:
    """The paper's path: every position starts from its own noise and passes all blocks from high noise to low.

    Its blocks mix z into what later positions attend to, so the window is walked again each time instead of cached.
    """

    def __init__(self, model: Model, seed: int) -> None:
        self.model, self.seed = model, seed
        self.window = torch.zeros(1, 0, dtype=torch.long, device=model.device)

    def __call__(self, ids: Tensor, start: int) -> Tensor:
        self.window = torch.cat([self.window[:, :start], ids], dim=1)
        noise = window_noise(self.seed, bytes(self.window[0].tolist()), self.model.config.z_width)[
            None
        ]
        return euler_path(self.model, self.window, noise.to(self.model.device))[-1][:, start:]


def euler_path(model: Model, tokens: Tensor, noise: Tensor, *, tail: int = 0) -> list[Tensor]:
    """Logits (B, T, V) after each block, walking the noise levels down from sigma_max; noise (B, T, Z) is standard normal."""
    z = model.config.sigma_max * noise
    path = []
    for number, block in enumerate(model.blocks, start=1):
        logits, z = euler_hop(model.config, number, block, model.table, tokens, z, tail=tail)
        path.append(logits)
    return path


def euler_hop(
    config: Config,
    number: int,
    block: Block,
    table: Tensor,
    tokens: Tensor,
    z: Tensor,
    *,
    tail: int = 0,
) -> tuple[Tensor, Tensor]:
    """Block `number`'s part of the path: its logits (B, T, V), and z one step further down; a tail goes further than the rest."""
    sigma_next, sigma = noise_levels(config).edges(config.blocks)[-number - 1 :][:2]
    if not tail:
        logits = denoise_logits(
            block, table, tokens, z, torch.tensor(sigma, device=tokens.device), config.sigma_data
        )
        return logits, euler_step(z, logits.softmax(-1) @ table, sigma, sigma_next)
    low_next, low = noise_levels(config, tail=True).edges(config.blocks)[-number - 1 :][:2]
    where = in_tail(tokens.shape[1], tail, tokens.device)[None]
    level, level_next = torch.where(where, low, sigma), torch.where(where, low_next, sigma_next)
    logits = denoise_logits(block, table, tokens, z, level, config.sigma_data, tail=tail)
    return logits, euler_step(
        z, logits.softmax(-1) @ table, level[..., None], level_next[..., None]
    )


def position_noise(seed: int, first: int, count: int, width: int) -> Tensor:
    """Standard normal (count, width), row i a pure function of (seed, first + i)."""
    rows = [counter_draws("noise", seed, first + i).standard_normal(width) for i in range(count)]
    return torch.from_numpy(np.stack(rows)).float()


def window_noise(seed: int, window: bytes, width: int, first: int = 0) -> Tensor:
    """Standard normal (bytes from `first` on, width), each row a pure function of the seed and of the window up to there.

    By its place in the window alone, every window would begin with the noise of the one before, and the text would repeat itself.
    """
    read, rows = hashlib.sha256(window[:first]), []
    for byte in window[first:]:
        read.update(bytes([byte]))
        mark = int.from_bytes(read.digest()[:8]) >> 4  # a purpose has the upper bits
        rows.append(counter_draws("noise", seed, mark).standard_normal(width))
    return torch.from_numpy(np.stack(rows)).float() if rows else torch.zeros(0, width)


def counter_draws(
    purpose: Literal["noise", "sampling"], seed: int, position: int
) -> np.random.Generator:
    """Random numbers of one position, by counter; different purposes never share them."""
    key = np.array([seed, position | (1 if purpose == "noise" else 2) << 60], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))
