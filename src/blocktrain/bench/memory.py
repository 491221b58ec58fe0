"""Bytes that training holds: one worker against the end-to-end trainer of equal total depth.

It counts optimizer state, gradients, and what autograd saves for the backward pass, in one step of
the real Trainer: at the end of a forward pass all three exist at once. The fusion worker has a row
of its own, because it also holds the frozen blocks that it reads, and their features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from blocktrain.bench.machine import random_text
from blocktrain.config import TOKENIZERS, Config, bpe_size
from blocktrain.errors import ConfigError
from blocktrain.learning.model import Block, build_independent
from blocktrain.learning.shards import memory_batches
from blocktrain.learning.threads import limited_threads
from blocktrain.learning.train import REFERENCE, Trainer
from blocktrain.shapes import block_parameters, block_shapes

BLOCKS = (2, 4, 8, 16)
SLACK = 0.10  # every block has its own embedding, head and softmax: they may add this to 1 / blocks


def measure_memory(
    config: Config | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    depth: int = 16,
    seed: int = 0,
    progress: Callable[[float], None] = lambda _: None,
) -> dict[str, Any]:
    """Bytes of a worker by kind, and their ratio to the end-to-end trainer, at equal depth."""
    counts = [blocks for blocks in BLOCKS if depth % blocks == 0]
    if not counts:
        raise ConfigError(
            f"depth={depth} cannot be split into {', '.join(map(str, BLOCKS))} blocks; "
            "use a multiple of 2"
        )
    base = (config or Config(width=128, context=128, batch=16)).replace(
        seed=seed, **(settings or {})
    )
    if base.tokenizer not in TOKENIZERS and bpe_size(base.tokenizer) is None:
        raise ConfigError(f"tokenizer={base.tokenizer}: here only bytes or bpe:N is measured")
    with limited_threads():
        # One reference serves every row: its shape depends on the total depth only.
        reference = _measure_bytes(Trainer(_with_blocks(base, counts[0], depth), REFERENCE))
        progress(1 / (len(counts) + 1))
        rows = []
        for count, blocks in enumerate(counts, start=2):
            rows.append(_row(_with_blocks(base, blocks, depth), reference))
            progress(count / (len(counts) + 1))
    return {
        "depth": depth,
        "width": base.width,
        "context": base.context,
        "batch": base.batch,
        "vocabulary": base.vocabulary,
        "shared_table": base.shares_table,
        "dtype": base.dtype,
        "compose": base.compose,
        "threads": 1,
        "slack": SLACK,
        "reference": reference,
        "rows": rows,
        "within_bound": all(row["ratio"] <= row["bound"] for row in rows),
    }


def _with_blocks(base: Config, blocks: int, depth: int) -> Config:
    return base.replace(blocks=blocks, layers_per_block=depth // blocks)


def _row(config: Config, reference: dict[str, int]) -> dict[str, Any]:
    """For one number of blocks: an independent worker, and the fusion worker if there is one."""
    worker = _measure_bytes(Trainer(config, 1))
    fusion = _fusion(config) if config.fusion else None
    return {
        "blocks": config.blocks,
        "layers_per_block": config.layers_per_block,
        "ratio": worker["total"] / reference["total"],
        "bound": 1 / config.blocks + SLACK,
        "parameters": block_parameters(config, 1),
        "in_tables": _in_tables(config, 1),
        "fusion_parameters": block_parameters(config, config.blocks) if fusion else None,
        "fusion_in_tables": _in_tables(config, config.blocks) if fusion else None,
        "fusion_ratio": fusion["total"] / reference["total"] if fusion else None,
        "worker": worker,
        "fusion": fusion,
    }


def _in_tables(config: Config, index: int) -> int:
    """Parameters of a block that its tables of the vocabulary hold."""
    shapes = block_shapes(config, index)
    return sum(prod(shapes[name]) for name in ("embed", "head.weight") if name in shapes)


def _fusion(config: Config) -> dict[str, int]:
    """The fusion worker: the three kinds, and what it holds of the others."""
    sources = [build_independent(config, index) for index in range(1, config.blocks)]
    trainer = Trainer(config, config.blocks, sources)
    if trainer.fusion is None:
        raise ConfigError(f"block {config.blocks} is not a fusion block")
    sizes = _measure_bytes(trainer)
    # Autograd saves the normed features, which are among the activations. The raw ones are held
    # too until the forward pass ends. Both count: the figure is what the worker needs at its peak.
    features = len(sources) * config.batch * config.context * config.width * torch.float32.itemsize
    # The readout has copies of the norms and heads of the other blocks: they are held twice.
    copies = sum(storages([trainer.fusion.readout.norms, trainer.fusion.readout.heads]).values())
    frozen = sum(storages(_constants(sources)).values()) + copies
    total = sizes["total"] + frozen + features
    return {
        **sizes,
        "weights": sizes["weights"] - copies,
        "frozen": frozen,
        "features": features,
        "total": total,
    }


def _measure_bytes(trainer: Trainer) -> dict[str, int]:
    """Bytes by kind after one step. `weights` are not part of `total`."""
    c = trainer.config
    own = storages([*_constants([trainer.block]), trainer.table])
    activations = SavedActivations(own | storages(_constants(trainer.sources)))
    with activations.hooks():
        text = random_text(c.seed, 64 * (c.context + 1))
        batches = memory_batches(text, context=c.context, batch=c.batch)
        for _ in trainer.run(batches, trainer.step + 1):
            pass
    sizes = {
        "optimizer": sum(storages(trainer.moments().values()).values()),
        "gradients": sum(
            storages(p.grad for p in trainer.block.parameters() if p.grad is not None).values()
        ),
        "activations": sum(activations.sizes.values()),
    }
    return {**sizes, "total": sum(sizes.values()), "weights": sum(own.values())}


class SavedActivations:
    """Counts the storages that autograd saves for the backward pass, except constants.

    An address names a storage only while it lives. The graph keeps everything it saved until the
    backward pass, and that saves nothing, so no address is met twice with another content.
    """

    def __init__(self, constants: dict[int, int]) -> None:
        self.sizes: dict[int, int] = {}
        self._constants = constants

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        self.sizes.update(
            {at: size for at, size in storages([tensor]).items() if at not in self._constants}
        )
        return tensor


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address -> bytes of the storages behind tensors. A view counts as its whole storage, once."""
    return {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors
        if t.untyped_storage().nbytes()
    }


def _constants(blocks: Iterable[Block]) -> list[Tensor]:
    return [tensor for block in blocks for tensor in (*block.parameters(), *block.buffers())]
