"""What each hardware option costs and gains: memory and time of a step, and what it changes.

Memory is the peak of the bytes that tensors hold in one step, beside weights and moments: saved
activations, gradients and what is computed on the way. Each row is measured in a process of its
own, one after another.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blocktrain.bench.machine import random_text
from blocktrain.config import Config
from blocktrain.learning.model import build_independent
from blocktrain.learning.shards import memory_batches
from blocktrain.learning.threads import use_threads
from blocktrain.learning.train import Trainer
from blocktrain.processes import Channel

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batch 4": {"micro_batch": 4},
    "micro-batch 1": {"micro_batch": 1},
    "checkpointed": {"checkpoint_activations": True},
    "checkpointed, micro-batch 4": {"checkpoint_activations": True, "micro_batch": 4},
    "bfloat16": {"dtype": "bfloat16"},
    "compiled": {"compile": True},
}
BASE = Config(blocks=4, layers_per_block=4, width=128, context=256, batch=16)
COMPARE = 4  # steps after which losses are compared
REPEATS = 12  # steps that are timed


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that are made while it is on, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in known:
                self._count(tensor)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


def measure_option(base: Config, option: str, kind: str, repeats: int = REPEATS) -> dict[str, Any]:
    """One row: a block or the fusion block with one option, beside the same without it.

    Steps of both are timed in turns, so that a busy machine slows both alike.
    """
    config = base.replace(**OPTIONS[option])
    plain, steps = _steps(base, kind), _steps(config, kind)
    for _ in range(COMPARE):
        plain_loss, loss = next(plain)[1], next(steps)[1]
    seconds = [(_seconds(plain), _seconds(steps)) for _ in range(repeats)]
    peaks = []
    for each in (plain, steps):
        with LiveBytes() as live:
            next(each)
        peaks.append(live.peak)
    step = statistics.median(second for _, second in seconds)
    return {
        "block": kind,
        "option": option,
        "peak_mb": round(peaks[1] / 1e6, 1),
        "memory_ratio": round(peaks[1] / peaks[0], 3),
        "step_ms": round(1e3 * step, 1),
        "time_ratio": round(statistics.median(b / a for a, b in seconds), 3),
        "loss_difference": f"{abs(loss - plain_loss):.1e}",
    }


def _steps(config: Config, kind: str) -> Iterator[tuple[int, float]]:
    """The endless training of an independent block, or of the fusion block."""
    index, sources = 1, []
    if kind == "fusion":
        index = config.fusion or config.blocks
        sources = [build_independent(config, n) for n in range(1, config.independent + 1)]
    text = random_text(config.seed, 64 * (config.context + 1))
    batches = memory_batches(text, context=config.context, batch=config.batch)
    return Trainer(config, index, sources).run(batches, 10**9)


def _seconds(steps: Iterator[tuple[int, float]]) -> float:
    began = time.perf_counter()
    next(steps)
    return time.perf_counter() - began


def measure_row(channel: Channel, base: Config, option: str, kind: str) -> None:
    """The same in a process of its own."""
    use_threads()
    channel.send(share=0.0)
    channel.send(share=1.0, row=measure_option(base, option, kind))
