"""Drafting: one block as a fast language model of its own, and how many tokens to draft.

`DraftBlock` has the numbers of `Model.drafter`, bit for bit; it only prepares padding, masks and
views once instead of for every token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from blocktrain.config import Config
from blocktrain.errors import ConfigError
from blocktrain.learning.compose import middle_noise
from blocktrain.learning.model import MIN_ROWS, Cache, Layer, noise_features
from blocktrain.serving.blocks import FanBlocks, local_features

EPSILON = 1e-6  # of the norms
MAX_DRAFT = 32
DECAY = 0.9  # what a measurement counts for after the next one
PRIOR_ACCEPTANCE, PRIOR_TOKENS = (
    0.85,
    20.0,
)  # the acceptance to start from, and how many drafted tokens it counts for
MEMORY_TOKENS = 400.0  # drafted tokens over which acceptance is averaged
EQUAL = 1.02  # lengths within this factor of the best count as equal
WORTH_EXTENDING = 0.05  # draft on behind a draft that is right to its end with this probability
PRIOR_SLOPE, SLOPE_WEIGHT = 5e-5, 50.0  # seconds per position of a sweep, and how firmly


class DraftBlock:
    """A block that reads one token after another into its cache.

    Row 0 of four is the token, the others are padding.
    """

    def __init__(self, config: Config, served: FanBlocks, number: int = 1) -> None:
        block = served.blocks[number]
        if block.skip == "edm":
            raise ConfigError(
                "a block of skip=edm predicts nothing without a noised target; "
                "use mode autoregressive"
            )
        self.number, self.block, self._served = number, block, served
        self.cache = Cache(block, 1)
        slots, width = self.cache.data.shape[-2], block.width
        heads, size = block.heads, width // block.heads
        device, tables = block.device, None if block.shares_table else block.embed
        self._tables = None if tables is None else tables.reshape(-1, width)  # (lookback * V, W)
        self._offsets = block.vocabulary * torch.arange(block.lookback, device=device)
        self._query = torch.zeros(1, heads, MIN_ROWS, size, device=device)
        cosine, sine = block.rotation
        self._cosine, self._sine = (
            torch.cat([cosine, cosine], -1),
            torch.cat([-sine, sine], -1),
        )  # (positions, D)
        # A slice of it is the mask of a position: nothing to add up to its own slot, -inf beyond.
        self._mask = torch.cat([torch.zeros(slots), torch.full((slots,), -torch.inf)]).to(device)
        self._extra = (
            block.noise_in(noise_features(middle_noise(config, number, device)))[0]
            if block.skip
            else None
        )
        self._layers: list[Layer] = list(block.layers)  # type: ignore[arg-type]
        self._keys = [
            (data[0, 0], data[1, 0]) for data in self.cache.data
        ]  # (H, slots, D) of every layer

    def read(self, ids: Sequence[int], start: int) -> Tensor:
        """Forget what came from `start` on, read the ids, return the logits (V,) after the last."""
        self.cache.truncate(start)
        if len(ids) == 1:
            return self._step(ids[0])
        features = local_features(
            self._served, {self.number: self.cache}, (self.number,), ids, start
        )
        return self.block(features[:, -1:])[0, 0]

    def _step(self, token: int) -> Tensor:
        cache = self.cache
        position = cache.length
        if position >= self.block.context:
            raise ValueError(
                f"position {position} does not fit the context of {self.block.context}"
            )
        cache.ids[0, position] = token
        x = self._embed(position)
        cosine, sine = self._cosine[position], self._sine[position]
        slots = cache.data.shape[-2]
        mask = self._mask[slots - 1 - position : 2 * slots - 1 - position].view(1, slots)
        for layer, (keys, values) in zip(self._layers, self._keys, strict=True):
            x = self._layer(layer, x, (cosine, sine, mask, keys, values), position)
        cache.length = position + 1
        width = x.shape[-1]
        return (F.rms_norm(x, (width,), self.block.norm.scale, EPSILON) @ self.block.head.weight)[0]

    def _embed(self, position: int) -> Tensor:
        """(4, W), the token and those before it in row 0."""
        block = self.block
        before = min(position, block.lookback - 1)
        last = self.cache.ids[0, position - before : position + 1].flip(0)
        x = torch.zeros(MIN_ROWS, block.width, device=block.device)
        if self._tables is None:
            vectors = x.new_zeros(block.lookback, 1, *x.shape)
            vectors[: before + 1, 0, 0] = block.token_vectors(last)
            x = block.join_tokens(list(vectors))[0]
        else:
            for row in self._tables[last + self._offsets[: before + 1]]:
                x[0] += row
        if self._extra is not None:
            x[0] += self._extra
        return x

    def _layer(
        self,
        layer: Layer,
        x: Tensor,
        around: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        position: int,
    ) -> Tensor:
        cosine, sine, mask, keys, values = around
        width = x.shape[-1]
        qkv = (F.rms_norm(x, (width,), layer.norm_attention.scale, EPSILON) @ layer.qkv.weight)[
            0
        ].view(3, layer.heads, -1)
        qk = qkv[:2]
        qk = (
            qk * cosine + qk.roll(qk.shape[-1] // 2, -1) * sine
        )  # as `rotate`: the halves are the coordinates
        self._query[0, :, 0] = qk[0]
        keys[:, position] = qk[1]
        values[:, position] = qkv[2]
        a = F.scaled_dot_product_attention(self._query, keys[None], values[None], attn_mask=mask)
        x = x + a[0].transpose(0, 1).reshape(MIN_ROWS, width) @ layer.attention_out.weight
        hidden = F.rms_norm(x, (width,), layer.norm_mlp.scale, EPSILON) @ layer.up.weight
        return x + hidden.relu_().square_() @ layer.down.weight


@dataclass(frozen=True)
class LinearCost:
    """Seconds of a computation on m positions."""

    base: float
    each: float = 0.0

    def __call__(self, positions: int) -> float:
        return self.base + self.each * positions


@dataclass(frozen=True)
class LinkCost:
    """A link between two hosts.

    Round trip in seconds, bits per second (0: no bound), and seconds that software adds to a hop.
    """

    rtt: float
    bits: float = 0.0
    overhead: float = 1e-3

    def transfer(self, size: float) -> float:
        """Seconds to send this many bytes."""
        return 8 * size / self.bits if self.bits else 0.0


def fan_sweep(
    positions: int, line: LinkCost, answer_bytes: float, stage: LinearCost, fusion: LinearCost
) -> float:
    """Seconds of a fan sweep.

    `answer_bytes` come back for a position from all stages, which share the entry's downlink.
    """
    return (
        line.rtt
        + line.overhead
        + line.transfer(positions * answer_bytes)
        + stage(positions)
        + fusion(positions)
    )


def ring_sweep(
    positions: int, line: LinkCost, hosts: int, state_bytes: float, stage: LinearCost
) -> float:
    """Seconds of a sweep through hosts in turn: the first is the entry's, the last answers it."""
    hop = line.rtt / 2 + line.overhead + line.transfer(positions * state_bytes)
    return (hosts - 1) * hop + hosts * stage(positions) + line.rtt / 2 + line.overhead


def expected_tokens(acceptance: float, drafted: int) -> float:
    """Tokens that a sweep commits, if each drafted one is accepted with this probability."""
    return (
        drafted + 1.0 if acceptance >= 1 else (1 - acceptance ** (drafted + 1)) / (1 - acceptance)
    )


def exact_seconds(acceptance: float, drafted: int, draft: float, sweep: float) -> float:
    """Seconds per token of mode exact; `draft` is for one token, `sweep` for drafted + 1 positions.

    While a sweep is under way the next draft is made. If the draft was right to its end, the next
    one costs only the time that did not fit in there.
    """
    right = acceptance**drafted if drafted else 0.0
    seconds = (1 - right) * drafted * draft + right * max((drafted + 1) * draft - sweep, 0.0)
    return (seconds + sweep) / expected_tokens(acceptance, drafted)


def sweep_seconds(
    acceptance: float, length: int, sweeps: int, draft: float, sweep: Callable[[int], float]
) -> float:
    """Seconds per token of mode sweep: what a sweep does not commit is drafted again."""
    seconds, rest = 0.0, float(length)
    for _ in range(sweeps):
        seconds += rest * draft + sweep(round(rest))
        rest = max(0.0, rest - expected_tokens(acceptance, round(rest) - 1))
        if rest < 1:
            break
    return (seconds + rest * draft) / length


class SweepMeter:
    """Seconds of a sweep as a line over its positions, fitted to the latest sweeps."""

    def __init__(self) -> None:
        self.guess = 2e-3  # of a sweep of no positions, as long as none was measured
        self._weight = self._m = self._s = self._mm = self._ms = 0.0

    def add(self, positions: int, seconds: float) -> None:
        """One sweep, as it was measured."""
        values = (1.0, positions, seconds, positions * positions, positions * seconds)
        old = (self._weight, self._m, self._s, self._mm, self._ms)
        self._weight, self._m, self._s, self._mm, self._ms = (
            DECAY * a + b for a, b in zip(old, values, strict=True)
        )

    def __call__(self, positions: int) -> float:
        """Expected seconds of a sweep of this many positions."""
        if not self._weight:
            return self.guess + PRIOR_SLOPE * positions
        mean_m, mean_s = self._m / self._weight, self._s / self._weight
        variance = self._mm - self._weight * mean_m**2
        covariance = self._ms - self._weight * mean_m * mean_s
        slope = max((covariance + SLOPE_WEIGHT * PRIOR_SLOPE) / (variance + SLOPE_WEIGHT), 0.0)
        return max(mean_s + slope * (positions - mean_m), mean_s / 10)


class Pace:
    """Chooses the length of drafts.

    It measures how long drafts and sweeps take here, and how often a drafted token is right.
    """

    def __init__(self) -> None:
        self.sweep = SweepMeter()
        self.draft = 1e-3  # seconds a token
        self._trials, self._right = PRIOR_TOKENS, PRIOR_ACCEPTANCE * PRIOR_TOKENS

    @property
    def acceptance(self) -> float:
        """Probability that the next drafted token is right, as far as is known."""
        return self._right / self._trials

    def record_draft(self, count: int, seconds: float) -> None:
        """Record that `count` tokens were drafted in `seconds`."""
        if count:
            share = 1 - DECAY**count
            self.draft += share * (
                min(seconds / count, 3 * self.draft) - self.draft
            )  # one outlier must not dominate

    def record_verification(self, accepted: int, drafted: int) -> None:
        """Record that `accepted` tokens were right; those after a wrong one do not count."""
        trials = min(accepted + 1, drafted)
        decay = max(1 - trials / MEMORY_TOKENS, 0.0)
        self._trials, self._right = decay * self._trials + trials, decay * self._right + accepted

    def record_skip(self) -> None:
        """A sweep without a draft: acceptance drifts to its prior, so drafting is tried again."""
        self._trials, self._right = (
            0.98 * self._trials + 0.02 * PRIOR_TOKENS,
            0.98 * self._right + 0.02 * PRIOR_TOKENS * PRIOR_ACCEPTANCE,
        )

    def best_draft(self, most: int) -> int:
        """How many tokens to draft for the lowest time per token; 0: no draft.

        Among lengths that are nearly equal it picks the longest: it needs the fewest sweeps.
        """
        acceptance = min(self.acceptance, 0.995)
        seconds = [
            exact_seconds(acceptance, n, self.draft, self.sweep(n + 1))
            for n in range(min(most, MAX_DRAFT) + 1)
        ]
        best = min(seconds)
        return (
            max(n for n, each in enumerate(seconds) if each <= EQUAL * best)
            if best < seconds[0]
            else 0
        )

    def worth_extending(self, drafted: int) -> bool:
        """Whether a draft of this length is right often enough to draft on behind it."""
        return self.acceptance**drafted >= WORTH_EXTENDING
