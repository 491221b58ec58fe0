"""The whole network: layer, blocks, the pool of several blocks, the target table, the cache.

Shapes in comments: B sequences, T positions, W width, H heads, D = W / H, V vocabulary,
N blocks that are read, Z z_width.

A row times a matrix gives the same bits whether the row comes alone or with others: matrices are
stored (in, out), rows are padded to four, and cached attention always looks at all key slots.
Because of that a drafted, verified or failed-over answer is the same text, token for token
(docs/method.md, "Same bits").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blocktrain.config import Config

MIN_ROWS = 4
NOISE_FREQUENCIES = 16
Look = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention: rotated queries, keys and values (B, H, T, D) -> what each position takes from those
it sees, (B, H, T, D)."""


class Linear(nn.Module):
    """x @ weight, with the weight stored (in, out).

    In this order BLAS gives a row the same bits in any batch of MIN_ROWS or more.
    """

    def __init__(self, inputs: int, outputs: int, *, gain: float = 1.0, parts: int = 1) -> None:
        super().__init__()
        self.parts = parts  # matrices stored side by side, along the longer side
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * (gain * inputs**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight)


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """x @ matrix, with x padded to at least MIN_ROWS rows."""
    rows = x.numel() // x.shape[-1]
    if rows >= MIN_ROWS:
        return x @ matrix
    flat = F.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, MIN_ROWS - rows)) @ matrix
    return flat[:rows].reshape(*x.shape[:-1], -1)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.scale, 1e-6)


class Cache:
    """What a block computed for the positions [0, length) of the current window.

    Ids, keys and values, and for a fusion block what each position hands on to the next.
    """

    def __init__(self, block: Block, batch: int) -> None:
        slots, width = block.context + MIN_ROWS, block.width
        shape = (len(block.layers), 2, batch, block.heads, slots, width // block.heads)
        self.data = torch.zeros(shape, device=block.device, dtype=block.dtype)
        self.ids = torch.zeros(batch, slots, device=block.device, dtype=torch.long)
        carry_slots = slots if isinstance(block, FusionBlock) else 0
        self.carry = torch.zeros(batch, carry_slots, width).to(self.data)
        self.length = 0

    def truncate(self, length: int) -> None:
        """Forget everything from this position on."""
        self.length = min(self.length, length)


class Layer(nn.Module):
    """Pre-norm attention and MLP, both added to the residual stream.

    Both start at zero, so a new layer changes nothing.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = RMSNorm(width)
        self.qkv = Linear(width, 3 * width, parts=3)
        self.attention_out = Linear(width, width, gain=0)
        self.norm_mlp = RMSNorm(width)
        self.up = Linear(width, 4 * width)
        self.down = Linear(4 * width, width, gain=0)

    def forward(self, x: Tensor, rotation: Tensor, look: Look) -> Tensor:
        B, T, W = x.shape
        q, k, v = (
            self.qkv(self.norm_attention(x))
            .view(B, T, 3, self.heads, W // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        a = look(rotate(q, rotation), rotate(k, rotation), v)
        x = x + self.attention_out(a.transpose(1, 2).reshape(B, T, W))
        return x + self.down(F.relu(self.up(self.norm_mlp(x))).square())


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of (B, H, T, D) among themselves, without a cache."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def attend_cached(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, slots: Tensor, start: int
) -> Tensor:
    """Attention into a cache: write keys and values at `start`, then look at every slot.

    `slots` are those of one layer, (2, B, H, slots, D).
    """
    T = q.shape[2]
    slots[0, :, :, start : start + T] = k
    slots[1, :, :, start : start + T] = v
    q = F.pad(q, (0, 0, 0, -T % MIN_ROWS))  # no tile of the kernel may have fewer rows
    a = F.scaled_dot_product_attention(
        q, slots[0].to(q.dtype), slots[1].to(q.dtype), attn_mask=mask
    )
    return a[:, :, :T]


class FanReadout(Protocol):
    """What turns the features of a fan's blocks into one prediction: a fusion block, or a pool."""

    def new_cache(self) -> Cache | None:
        """What it remembers of one window; None if it needs no memory."""

    def combine(
        self, tokens: Tensor, features: Tensor, present: Tensor, cache: Cache | None = None
    ) -> Tensor:
        """Logits (B, T, V) from tokens (B, T) and features (N, B, T, W).

        present (N, B) is 1 for blocks that are there and 0 for missing ones.
        """


class Readout(nn.Module):
    """The log-linear pool: frozen final norms and heads of the blocks, and a weight for each."""

    norms: Tensor
    heads: Tensor

    def __init__(self, count: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.full((count,), 1 / count))
        self.register_buffer("norms", torch.ones(count, width))
        self.register_buffer("heads", torch.zeros(count, width, vocabulary))

    def copy_from(self, blocks: Sequence[IndependentBlock]) -> None:
        """Copy the published norms and heads."""
        for i, block in enumerate(blocks):
            self.norms[i] = block.norm.scale.detach()
            self.heads[i] = block.head.weight.detach()

    def normalize(self, features: Tensor) -> Tensor:
        """(N, B, T, W) raw features -> the same under each block's own final norm."""
        return F.rms_norm(features, (features.shape[-1],), None, 1e-6) * self.norms[:, None, None]

    def forward(
        self, normalized: Tensor, present: Tensor, corrections: Tensor | None = None
    ) -> Tensor:
        """(N, B, T, W), present (N, B) -> pooled logits (B, T, V).

        One product pools them: the term that would make a block's logits log-probabilities is the
        same number for every token. Corrections (N, B, T, W) pass through all heads, because the
        heads are here even if a block's features are missing.
        """
        terms = normalized * shares(self.weights, present)[:, :, None, None]
        if corrections is not None:
            terms = terms + corrections * self.weights[:, None, None, None]
        return product(concatenate(terms), self.heads.flatten(0, 1)).float()

    def new_cache(self) -> None:
        """A pool remembers nothing."""

    def combine(
        self, tokens: Tensor, features: Tensor, present: Tensor, cache: Cache | None = None
    ) -> Tensor:
        return self(self.normalize(features), present)


class Block(nn.Module):
    """The layers that one worker trains, and the embedding that they read."""

    rotation: Tensor
    mask: nn.Parameter  # of the unknown positions, in a block that was trained with a tail

    def __init__(self, config: Config, *, layers: int) -> None:
        super().__init__()
        W = config.width
        self.context, self.heads, self.width = config.context, config.heads, W
        self.lookback, self.shares_table = config.lookback, config.shares_table
        self.checkpoint_activations = config.checkpoint_activations
        self.vocabulary = config.vocabulary
        if not self.shares_table:
            self.embed = nn.Parameter(torch.randn(config.lookback, self.vocabulary, W) * 0.1)
        self.layers = nn.ModuleList([Layer(W, config.heads) for _ in range(layers)])
        self.register_buffer(
            "rotation", rotations(config.context + MIN_ROWS, W // config.heads), persistent=False
        )

    @property
    def device(self) -> torch.device:
        return self.rotation.device

    def new_cache(self) -> Cache:
        return Cache(self, 1)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def shared_table(self) -> Tensor:
        """The table (W, V) that a block reads tokens with if it has none for them alone."""
        raise NotImplementedError

    def token_vectors(self, tokens: Tensor) -> Tensor:
        """The shared table's vectors of tokens, longer by sqrt(W): a head's are short."""
        return F.embedding(tokens, self.shared_table().T) * self.width**0.5

    def join_tokens(self, vectors: list[Tensor]) -> Tensor:
        """Vectors (B, T, W) of the tokens at distance 0, 1, ... as one."""
        raise NotImplementedError

    def through_layers(self, x: Tensor, cache: Cache | None = None, tail: int = 0) -> Tensor:
        """The residual stream (B, T, W) after the last layer."""
        T = x.shape[1]
        start = cache.length if cache else 0
        rotation = self.rotation[:, start : start + T]
        mask = self.visible(T, start, cache, tail)
        for i, layer in enumerate(self.layers):
            look = (
                partial(attend_cached, mask=mask, slots=cache.data[i], start=start)
                if cache
                else partial(attend, mask=mask)
            )
            if self.checkpoint_activations and torch.is_grad_enabled():
                # A layer draws nothing at random, so there is no generator to restore.
                x = checkpoint(
                    layer, x, rotation, look, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x = layer(x, rotation, look)
        if cache:
            cache.length = start + T
        return x

    def embed_tokens(self, tokens: Tensor, start: int, cache: Cache | None, tail: int) -> Tensor:
        """Every position from its own token and the few before it, (B, T, W).

        Two layers can then spend their attention on more than finding the neighbours of a token.
        """
        T, before = tokens.shape[1], 0
        if start + T > self.context:
            raise ValueError(
                f"positions {start} to {start + T} do not fit the context of {self.context}"
            )
        if cache:
            cache.ids[:, start : start + T] = tokens
            before = min(start, self.lookback - 1)
            tokens = cache.ids[:, start - before : start + T]
        positions = torch.arange(before + T, device=tokens.device)
        # The first position of a tail still knows its token: it does not know the next one.
        known = (positions <= before + T - tail)[:, None] if tail else None
        add_up = self.add_shared if self.shares_table else self.add_tables
        x = add_up(tokens, before, known)
        return x if known is None else torch.where(known[before:], x, x + self.mask)

    def add_tables(self, tokens: Tensor, before: int, known: Tensor | None) -> Tensor:
        """The sum of the tokens, each distance back from a table of its own, (B, T, W)."""
        x = torch.zeros((), device=tokens.device)
        for back, table in enumerate(self.embed[: tokens.shape[1]]):
            vectors = F.embedding(tokens, table)
            vectors = vectors if known is None else vectors * known
            x = x + F.pad(vectors, (0, 0, back, -back))
        return x[:, before:]

    def add_shared(self, tokens: Tensor, before: int, known: Tensor | None) -> Tensor:
        """The token and those before it, all from one table, joined by a matrix, (B, T, W)."""
        vectors = self.token_vectors(tokens)
        vectors = vectors if known is None else vectors * known
        T, most = tokens.shape[1] - before, self.lookback - 1
        shifted = F.pad(vectors, (0, 0, most, 0))  # nothing precedes the first position
        firsts = range(most + before, before - 1, -1)
        return self.join_tokens([shifted[:, first : first + T] for first in firsts])

    def visible(self, T: int, start: int, cache: Cache | None, tail: int) -> Tensor | None:
        """Which keys a query may see: itself and what came before.

        The positions of a tail also see each other.
        """
        if cache is None and not tail:
            return None
        queries = T + -T % MIN_ROWS if cache else T
        keys = torch.arange(cache.data.shape[-2] if cache else T, device=self.device)
        query = start + torch.arange(queries, device=self.device)
        last = start + T - 1
        in_tail = (query > last - tail) & (query <= last)
        return (keys <= query[:, None]) | (in_tail[:, None] & (keys <= last))


class IndependentBlock(Block):
    """A block that predicts the next token from tokens alone (and a noised target, if it has one).

    It needs no other block, so anyone can train it without waiting for others.
    """

    def __init__(self, config: Config, *, layers: int) -> None:
        super().__init__(config, layers=layers)
        W = config.width
        self.norm = RMSNorm(W)
        self.skip = config.skip if config.objective == "denoise" else None
        if self.skip:  # starts at zero: an untrained z path must not disturb the context path
            self.z_in = Linear(config.z_width, W, gain=0)
            self.noise_in = Linear(2 * NOISE_FREQUENCIES, W, gain=0)
        if config.tail:
            self.mask = nn.Parameter(torch.randn(W) * 0.1)
        if self.skip == "edm":
            self.z_out = Linear(W, config.z_width)
        self.head = Linear(config.z_width if self.skip == "edm" else W, self.vocabulary, gain=0.5)
        if self.shares_table and self.lookback > 1:  # starts at zero: first a token means itself
            back = self.lookback - 1
            self.look_back = Linear(back * W, W, gain=0, parts=back)

    def shared_table(self) -> Tensor:
        """The head reads features with the vectors that stand for the tokens."""
        return self.head.weight

    def join_tokens(self, vectors: list[Tensor]) -> Tensor:
        own, *before = vectors
        return own + self.look_back(torch.cat(before, -1)) if before else own

    def features(
        self,
        tokens: Tensor,  # (B, T)
        *,
        z: Tensor | None = None,  # (B, T, Z), scaled by c_in
        c_noise: Tensor | None = None,  # (), (B,) or, one per position, (B, T)
        cache: Cache | None = None,
        tail: int = 0,
    ) -> Tensor:
        """The residual stream (B, T, W) after the last layer.

        With a cache, the tokens continue where it ends.
        """
        x = self.embed_tokens(tokens, cache.length if cache else 0, cache, tail)
        if z is not None and c_noise is not None:
            sequences = c_noise.shape[0] if c_noise.ndim else 1
            noise = self.noise_in(noise_features(c_noise)).reshape(sequences, -1, x.shape[-1])
            x = x + self.z_in(z) + noise
        return self.through_layers(x, cache, tail)

    def forward(self, features: Tensor) -> Tensor:
        """Next-token logits (B, T, V) of this block alone, from its features."""
        return self.head(self.norm(features)).float()


class FusionBlock(Block):
    """A block that corrects the features of all others, which are frozen while it trains.

    The heads that the blocks were trained with read the corrected features. New layers add
    nothing, so fusion starts as the pool.
    """

    def __init__(self, config: Config, *, layers: int, reads: int) -> None:
        super().__init__(config, layers=layers)
        W = config.width
        self.reads = reads
        self.readout = Readout(reads, W, self.vocabulary)
        self.mix = Linear(reads * W, W, parts=reads)
        self.correct = Linear(W, reads * W, parts=reads)
        self.hand_on = Linear(reads * W, W, gain=0, parts=reads)
        if self.shares_table:
            self.look_back = Linear(self.lookback * W, W, parts=self.lookback)

    def shared_table(self) -> Tensor:
        """That of the first block: a fusion block trains no table of the vocabulary."""
        return self.readout.heads[0]

    def join_tokens(self, vectors: list[Tensor]) -> Tensor:
        return self.look_back(torch.cat(vectors, -1))

    def combine(
        self, tokens: Tensor, features: Tensor, present: Tensor, cache: Cache | None = None
    ) -> Tensor:
        """Logits (B, T, V) from the features (N, B, T, W) of the blocks; present (N, B) says which.

        A position also knows the features of the one before it: what each block expected of the
        token that then came.
        """
        normalized = self.readout.normalize(features) * present[:, :, None, None]
        inputs = concatenate(normalized)
        x = (
            self.embed_tokens(tokens, cache.length if cache else 0, cache, 0)
            + self.mix(inputs)
            + shift_by_one(self.hand_on(inputs), cache)
        )
        corrections = (
            self.correct(self.through_layers(x, cache) - x)
            .unflatten(-1, (self.reads, -1))
            .permute(2, 0, 1, 3)
        )
        return self.readout(normalized, present, corrections)


def shift_by_one(x: Tensor, cache: Cache | None) -> Tensor:
    """(B, T, W) -> the same one position later; nothing precedes the first position of a window."""
    if not cache:
        return F.pad(x, (0, 0, 1, -1))
    start, end = cache.length, cache.length + x.shape[1]
    cache.carry[:, start + 1 : end + 1] = x
    return cache.carry[:, start:end]


def pool(logp: Tensor, weights: Tensor, present: Tensor) -> Tensor:
    """Weighted sum over the first axis, (N, B, T, V) -> (B, T, V)."""
    return torch.einsum("nb,nbtv->btv", shares(weights, present), logp)


def shares(weights: Tensor, present: Tensor) -> Tensor:
    """Weights (N,) for each sequence, (N, B): present blocks share the weights of missing ones."""
    w = weights[:, None] * present
    return w * (weights.sum() / w.sum(0))


def concatenate(features: Tensor) -> Tensor:
    """(N, B, T, W) -> (B, T, N * W)."""
    return features.permute(1, 2, 0, 3).flatten(2)


def rotations(positions: int, head_width: int) -> Tensor:
    """Rotary angles as (2, positions, D / 2): cosine and sine."""
    frequency = 10000.0 ** (-torch.arange(0, head_width, 2) / head_width)
    angle = torch.arange(positions)[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary position embedding of (B, H, T, D), halves as the two coordinates."""
    cos, sin = rotation
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


def noise_features(c_noise: Tensor) -> Tensor:
    """Sines and cosines of every noise level, (as many as there are, 2 * NOISE_FREQUENCIES)."""
    frequency = torch.logspace(0, 5, NOISE_FREQUENCIES, base=2.0, device=c_noise.device)
    angle = c_noise.reshape(-1, 1).float() * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def target_table(config: Config) -> Tensor:
    """Y (V, Z): unit rows drawn from the run's seed; never trained, never shipped.

    Only objective=denoise has targets.
    """
    if config.objective != "denoise":
        return torch.zeros(0, config.z_width)
    generator = torch.Generator().manual_seed(config.seed)
    rows = torch.randn(config.vocabulary, config.z_width, generator=generator)
    return F.normalize(rows, dim=-1)


def build_independent(config: Config, index: int) -> IndependentBlock:
    """Block `index` (from 1) with its initial weights, a function of (seed, index)."""
    with _fork_seed(config, index):
        return IndependentBlock(config, layers=config.layers_per_block)


def build_fusion(config: Config, index: int) -> FusionBlock:
    """The fusion block with its initial weights, a function of (seed, index)."""
    with _fork_seed(config, index):
        return FusionBlock(config, layers=config.layers_per_block, reads=config.independent)


def build_reference(config: Config) -> IndependentBlock:
    """The end-to-end model of the same shape: all layers in one stack, trained as one."""
    plain = config.replace(objective="next", tail=0, compose="pool", skip="exact")
    with _fork_seed(plain, 0):
        return IndependentBlock(plain, layers=config.blocks * config.layers_per_block)


@contextmanager
def _fork_seed(config: Config, index: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed * 1009 + index)
        yield
