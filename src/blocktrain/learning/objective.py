"""The loss of one block on one batch: next token, denoising (plain or with a tail), fusion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from blocktrain.config import Config
from blocktrain.learning.model import FusionBlock, IndependentBlock
from blocktrain.learning.noise import NoiseLevels, edm, in_tail, noise_levels


class Loss(NamedTuple):
    """`total` is what is minimised; `ce` is the plain cross entropy of the same predictions.

    Both are in nats per token.
    """

    total: Tensor
    ce: Tensor


class Draws(NamedTuple):
    """What a batch draws at random: always for the whole batch, also if its parts are computed one
    after another. So each sequence gets the same numbers however the batch is cut."""

    uniform: Tensor = torch.zeros(0)  # (B,) where in its range the noise level of a sequence is
    noise: Tensor = torch.zeros(0)  # (B, T, Z)
    tail: int = 0
    present: Tensor = torch.zeros(0)  # (B, N): which blocks a fusion block may read

    def of(self, rows: slice, device: torch.device) -> Draws:
        """Those of some sequences, on a device."""
        uniform, noise, tail, present = self
        return Draws(
            uniform[rows].to(device), noise[rows].to(device), tail, present[rows].to(device)
        )


def next_loss(block: IndependentBlock, tokens: Tensor) -> Loss:
    """Cross entropy of the next token; tokens (B, T + 1)."""
    ce = F.cross_entropy(
        block(block.features(tokens[:, :-1])).flatten(0, 1), tokens[:, 1:].flatten()
    )
    return Loss(ce, ce)


def denoise_logits(
    block: IndependentBlock,
    table: Tensor,
    tokens: Tensor,
    z: Tensor,
    sigma: Tensor,
    sigma_data: float,
    *,
    tail: int = 0,
) -> Tensor:
    """log p(next token | tokens, z) up to a constant, (B, T, V).

    sigma is one level, one per sequence (B,) or one per position (B, T).
    `exact`: Bayes' rule splits it into what the context says, f, and what z says, z.Y / sigma^2
    (rows of Y have unit length). `edm`: the network completes EDM's estimate D of the target, and
    a head reads D.
    """
    level = sigma[..., None] if sigma.ndim == 2 else sigma.reshape(-1, 1, 1)
    c = edm(level, sigma_data)
    hidden = block.features(tokens, z=c.in_ * z, c_noise=c.noise.squeeze(-1), tail=tail)
    if block.skip == "exact":
        logits = block(hidden)
        with torch.autocast(z.device.type, enabled=False):  # logits and loss stay float32
            return logits + (z @ table.T) / level**2
    estimate = c.skip * z + c.out * block.z_out(block.norm(hidden))
    return block.head(estimate).float()


def draw_noise(config: Config, sequences: int, generator: torch.Generator) -> Draws:
    """What `denoise_loss` needs for a batch."""
    uniform = torch.rand(sequences, generator=generator)
    noise = torch.randn(sequences, config.context, config.z_width, generator=generator)
    has_tail = config.tail and torch.rand((), generator=generator).item() < config.tail_share
    if config.noise_scale == "random":
        noise *= torch.rand(sequences, 1, 1, generator=generator)
    return Draws(uniform, noise, config.tail if has_tail else 0)


def denoise_loss(
    block: IndependentBlock,
    table: Tensor,
    tokens: Tensor,
    config: Config,
    index: int,
    draws: Draws,
) -> Loss:
    """Weighted cross entropy at noise levels drawn from the range of block `index`."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    sigma = training_levels(config, index, draws.uniform, targets.shape[1], draws.tail)
    z = table[targets] + sigma.reshape(*sigma.shape[:1], -1, 1) * draws.noise
    logits = denoise_logits(block, table, inputs, z, sigma, config.sigma_data, tail=draws.tail)
    ce = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    ce = ce.mean(1) if sigma.ndim == 1 else ce
    # The weight undoes c_out, the output scale of EDM's network; the exact skip has no such scale.
    weight = edm(sigma, config.sigma_data).weight if block.skip == "edm" else torch.ones_like(sigma)
    return Loss((weight * ce).mean(), ce.mean())


def training_levels(
    config: Config, index: int, uniform: Tensor, positions: int, tail: int
) -> Tensor:
    """Noise levels of block `index`, from one uniform number a sequence: (B,).

    With a tail, which goes further down, (B, T).
    """

    def sample(levels: NoiseLevels) -> Tensor:
        return levels.sample(levels.ranges(config.blocks, config.gamma)[index - 1], uniform)

    plain = sample(noise_levels(config))
    if not tail:
        return plain
    return torch.where(
        in_tail(positions, tail, uniform.device),
        sample(noise_levels(config, tail=True))[:, None],
        plain[:, None],
    )


def read_features(sources: Sequence[IndependentBlock], tokens: Tensor) -> Tensor:
    """Frozen features (N, B, T, W) of the blocks that a fusion block reads."""
    with torch.no_grad():
        return torch.stack([source.features(tokens) for source in sources])


def draw_present(blocks: int, sequences: int, dropout: float, generator: torch.Generator) -> Draws:
    """Which blocks a fusion block may read: some are left out at random, but never all of them."""
    present = torch.rand(blocks, sequences, generator=generator) >= dropout
    present |= ~present.any(0)
    return Draws(present=present.T.float())


def fusion_loss(
    fusion: FusionBlock, sources: Sequence[IndependentBlock], tokens: Tensor, draws: Draws
) -> Loss:
    """Cross entropy of the fusion block, of the blocks that are present."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    logits = fusion.combine(inputs, read_features(sources, inputs), draws.present.T.contiguous())
    ce = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return Loss(ce, ce)
