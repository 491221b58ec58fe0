"""Several sessions in one forward: their rows go through the matrices together, each looks into its own cache.

A row has the same bits as alone: matrices treat rows alike (docs/method.md, "Same bits"), and attention never sees another session.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blocktrain.learning.model import Cache, IndependentBlock, attend_cached, noise_features


def embed(
    block: IndependentBlock,
    ids: Sequence[Tensor],
    caches: Sequence[Cache],
    c_noise: Tensor | None = None,
) -> Tensor:
    """The rows (1, R, W) with which a block begins: the ids (1, T) of each session, one after another."""
    x = torch.cat(
        [
            block.embedded(tokens, cache.length, cache, 0)
            for tokens, cache in zip(ids, caches, strict=True)
        ],
        dim=1,
    )
    if c_noise is None:
        return x
    z = torch.zeros(*x.shape[:2], block.z_in.weight.shape[0], device=x.device)
    return x + block.z_in(z) + block.noise_in(noise_features(c_noise)).reshape(-1, 1, x.shape[-1])


def through_layers(
    block: IndependentBlock, x: Tensor, sizes: Sequence[int], caches: Sequence[Cache]
) -> Tensor:
    """The residual stream (1, R, W) after the block's layers; session i has `sizes[i]` of the rows and continues its cache."""
    starts = [cache.length for cache in caches]
    for start, size in zip(starts, sizes, strict=True):
        if start + size > block.context:
            raise ValueError(
                f"positions {start} to {start + size} do not fit the context of {block.context}"
            )
    rotation = torch.cat(
        [
            block.rotation[:, start : start + size]
            for start, size in zip(starts, sizes, strict=True)
        ],
        dim=1,
    )
    masks = [
        block.visible(size, start, cache, 0)
        for start, size, cache in zip(starts, sizes, caches, strict=True)
    ]
    for number, layer in enumerate(block.layers):

        def look(q: Tensor, k: Tensor, v: Tensor, number: int = number) -> Tensor:
            found, at = [], 0
            for mask, start, size, cache in zip(masks, starts, sizes, caches, strict=True):
                own = slice(at, at + size)
                found.append(
                    attend_cached(
                        q[:, :, own], k[:, :, own], v[:, :, own], mask, cache.data[number], start
                    )
                )
                at += size
            return found[0] if len(found) == 1 else torch.cat(found, dim=2)

        x = layer(x, rotation, look)
    for cache, start, size in zip(caches, starts, sizes, strict=True):
        cache.length = start + size
    return x
