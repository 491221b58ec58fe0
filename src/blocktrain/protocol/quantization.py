"""Values in groups with one scale each: levels, and how they are packed into bytes.

Pure numpy, and the same on every machine. docs/protocol.md has the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from blocktrain.protocol.refusals import Code, Refused
from blocktrain.protocol.tensors import Array

GROUP = 128
LARGE_GROUP = 512
MOST_COARSE = 7  # the largest level


def join(parts: Sequence[Array], dtype: str) -> Array:
    return np.concatenate([np.zeros(0, dtype), *parts])


def cut(joined: Array, sizes: Sequence[int]) -> list[Array]:
    ends = np.cumsum([0, *sizes])
    return [joined[start:end] for start, end in pairwise(ends)]


def group_count(size: int, group: int = GROUP) -> int:
    return -(-size // group)


def in_groups(x: Array, group: int) -> Array:
    """A flat tensor as rows of float64. The last one is filled with zeros."""
    groups = np.zeros((group_count(x.size, group), group), np.float64)
    groups.reshape(-1)[: x.size] = x
    return groups


def quantize(x: Array, levels: float, exponent: int) -> tuple[Array, Array]:
    """(levels, scales) of one flat tensor. float64 finds the nearest level without rounding."""
    groups = in_groups(x, GROUP)
    exact = np.ldexp(np.abs(groups).max(axis=1, initial=0) / levels, -exponent)
    scales = exact.astype("<f2")
    # Rounded up, so that no level lies beyond the last.
    scales = np.where(scales < exact, np.nextafter(scales, np.float16(np.inf)), scales)
    steps = np.ldexp(scales.astype(np.float64), exponent)
    nearest = np.rint(groups / np.where(steps == 0, 1, steps)[:, None])
    return nearest.astype(np.int8).reshape(-1)[: x.size], scales


def quantize_coarsely(x: Array, step: float, exponent: int) -> tuple[Array, Array]:
    """(levels, scales) of one flat tensor: the scale is `step` root mean squares of its group."""
    groups = in_groups(x, LARGE_GROUP)
    counts = np.full(len(groups), LARGE_GROUP)
    counts[-1:] -= -x.size % LARGE_GROUP  # the last group is short
    exact = step * np.sqrt(np.square(groups).sum(axis=1) / counts)
    scales = np.ldexp(exact, -exponent).astype("<f2")
    steps = np.ldexp(scales.astype(np.float64), exponent)
    nearest = np.rint(groups / np.where(steps == 0, np.inf, steps)[:, None])
    levels = np.clip(nearest, -MOST_COARSE, MOST_COARSE).astype(np.int8)
    return levels.reshape(-1)[: x.size], scales


def dequantize_all(
    levels: Array, scales: Array, sizes: Sequence[int], exponent: int, group: int = GROUP
) -> list[Array]:
    """All flat tensors, each with the scales of its groups."""
    steps = cut(scales, [group_count(size, group) for size in sizes])
    return [
        _dequantize(*pair, exponent, group) for pair in zip(cut(levels, sizes), steps, strict=True)
    ]


def _dequantize(values: Array, scales: Array, exponent: int, group: int) -> Array:
    """One flat tensor in float32; exact, as a level has 7 bits and a scale 11."""
    out = values.astype(np.float32)
    steps = np.ldexp(scales.astype(np.float32), exponent)
    whole = out.size - out.size % group
    out[:whole].reshape(-1, group)[...] *= steps[: whole // group, None]
    out[whole:] *= steps[whole // group :]  # the last group is short, or there is none
    return out


def pack_nibbles(levels: Array) -> Array:
    """Level + 8 (1 to 15) in four bits, the first of two in the low half.

    An odd number of levels is padded with level 0.
    """
    codes = np.full(levels.size + levels.size % 2, 8, np.uint8)
    codes[: levels.size] = levels + 8
    return codes[0::2] | (codes[1::2] << 4)


def check_scales(scales: Array) -> None:
    if (scales < 0).any():
        raise Refused(Code.NOT_FINITE, "a scale is negative")


def check_nibbles(packed: Array, size: int) -> None:
    low, high = packed & 15, packed >> 4
    if (low == 0).any() or (high == 0).any() or (size % 2 and high[-1] != 8):
        raise Refused(
            Code.MALFORMED, "an int4 code is 0, or the padding is not level 0; codes are 1 to 15"
        )


def unpack_nibbles(packed: Array, size: int) -> Array:
    codes = np.empty(2 * packed.size, np.int8)
    codes[0::2] = packed & 15
    codes[1::2] = packed >> 4
    return codes[:size] - np.int8(8)
