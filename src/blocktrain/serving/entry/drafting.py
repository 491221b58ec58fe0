"""Drafting: one block as a language model of its own, a byte at a time, as fast as single operations allow.

The numbers are those of `Model.drafter`, bit for bit; only what surrounds them (padding, masks, views) is done once
instead of for every byte.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from blocktrain.config import Config
from blocktrain.errors import ConfigError
from blocktrain.learning.compose import middle_noise
from blocktrain.learning.generate import Sampler
from blocktrain.learning.model import MIN_ROWS, Cache, Layer, noise_features
from blocktrain.serving.entry.decode import common
from blocktrain.serving.entry.readers import local_features
from blocktrain.serving.holding import FanBlocks

EPSILON = 1e-6  # of the norms


class Lean:
    """A block that reads one byte after another into its cache: row 0 of four is the byte, the others are padding."""

    def __init__(self, config: Config, holding: FanBlocks, number: int = 1) -> None:
        block = holding.blocks[number]
        if block.skip == "edm":
            raise ConfigError(
                "a block of skip=edm predicts nothing without a noised target; use mode autoregressive"
            )
        self.number, self.block, self._holding = number, block, holding
        self.cache = Cache(block, 1)
        slots, width = self.cache.data.shape[-2], block.embed.shape[-1]
        heads, size = block.heads, width // block.heads
        self._tables = block.embed.reshape(-1, width)  # (lookback * V, W)
        self._offsets = [block.vocabulary * back for back in range(block.embed.shape[0])]
        self._query = torch.zeros(1, heads, MIN_ROWS, size)
        cosine, sine = block.rotation
        self._cosine, self._sine = (
            torch.cat([cosine, cosine], -1),
            torch.cat([-sine, sine], -1),
        )  # (positions, D)
        # A slice of it is the mask of a position: nothing to add up to its own slot, -inf beyond.
        self._seen = torch.cat([torch.zeros(slots), torch.full((slots,), -torch.inf)])
        self._extra = (
            block.noise_in(noise_features(middle_noise(config, number, block.embed.device)))[0]
            if block.skip
            else None
        )
        self._layers: list[Layer] = list(block.layers)  # type: ignore[arg-type]
        self._keys = [
            (data[0, 0], data[1, 0]) for data in self.cache.data
        ]  # (H, slots, D) of every layer

    def read(self, ids: bytes, start: int) -> Tensor:
        """Forget what came from `start` on, read the ids from there, and return the logits (V,) after the last of them."""
        self.cache.truncate(start)
        if len(ids) == 1:
            return self._step(ids[0])
        found = local_features(self._holding, {self.number: self.cache}, (self.number,), ids, start)
        return self.block(found[:, -1:])[0, 0]

    def _step(self, byte: int) -> Tensor:
        cache = self.cache
        position = cache.length
        if position >= self.block.context:
            raise ValueError(
                f"position {position} does not fit the context of {self.block.context}"
            )
        cache.ids[0, position] = byte
        x = self._embedded(position)
        cosine, sine = self._cosine[position], self._sine[position]
        slots = cache.data.shape[-2]
        seen = self._seen[slots - 1 - position : 2 * slots - 1 - position].view(1, slots)
        for layer, (keys, values) in zip(self._layers, self._keys, strict=True):
            x = self._layer(layer, x, (cosine, sine, seen, keys, values), position)
        cache.length = position + 1
        width = x.shape[-1]
        return (F.rms_norm(x, (width,), self.block.norm.scale, EPSILON) @ self.block.head.weight)[0]

    def _embedded(self, position: int) -> Tensor:
        """(4, W), the byte and those before it in row 0."""
        before = min(position, len(self._offsets) - 1)
        last = self.cache.ids[0, position - before : position + 1].tolist()
        found = self._tables[
            [offset + byte for offset, byte in zip(self._offsets, reversed(last), strict=False)]
        ]
        x = torch.zeros(MIN_ROWS, found.shape[-1])
        for row in found:
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
        cosine, sine, seen, keys, values = around
        width = x.shape[-1]
        qkv = (F.rms_norm(x, (width,), layer.norm_attention.scale, EPSILON) @ layer.qkv.weight)[
            0
        ].view(3, layer.heads, -1)
        turned = qkv[:2]
        turned = (
            turned * cosine + turned.roll(turned.shape[-1] // 2, -1) * sine
        )  # as `rotate`: the halves are the coordinates
        self._query[0, :, 0] = turned[0]
        keys[:, position] = turned[1]
        values[:, position] = qkv[2]
        a = F.scaled_dot_product_attention(self._query, keys[None], values[None], attn_mask=seen)
        x = x + a[0].transpose(0, 1).reshape(MIN_ROWS, width) @ layer.attention_out.weight
        hidden = F.rms_norm(x, (width,), layer.norm_mlp.scale, EPSILON) @ layer.up.weight
        return x + hidden.relu_().square_() @ layer.down.weight


class Drafter:
    """What the block thinks comes next. A guess is kept as long as the text agrees with it."""

    def __init__(self, lean: Lean, sampler: Sampler) -> None:
        self.lean, self.sampler = lean, sampler
        self._text = bytearray()  # the text and the guesses behind it
        self._begin = self._read = 0  # the cache knows text[begin:read]

    def ready(self, text: bytes) -> int:
        """How many guesses there are that still follow this text."""
        return len(self._text) - len(text) if self._text.startswith(text) else 0

    def knows(self, begin: int) -> bool:
        """Whether the block has read this window."""
        return self._begin == begin and self._read > begin

    def draft(self, text: bytes, begin: int, count: int) -> bytes:
        """`count` bytes that may follow the text; `begin` is where its window does."""
        if not self._text.startswith(text):
            same = common(self._text, text)
            self._text = bytearray(text)
            self._read = min(self._read, same)
        if begin != self._begin:
            self._begin = self._read = begin
        while len(self._text) < len(text) + count:
            # The last byte is read again where all were: its logits are what is wanted.
            read = min(self._read, len(self._text) - 1)
            logits = self.lean.read(bytes(self._text[read:]), read - begin)
            self._read = len(self._text)
            self._text.append(self.sampler.pick(logits, self._read))
        return bytes(self._text[len(text) : len(text) + count])
