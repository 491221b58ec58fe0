"""Time of a worker's training step, compared with a bare loop of the same layers and optimizer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from blocktrain.bench.machine import random_text
from blocktrain.config import Config
from blocktrain.errors import ConfigError
from blocktrain.learning.model import build_independent
from blocktrain.learning.optimizer import Optimizers
from blocktrain.learning.shards import memory_batches
from blocktrain.learning.threads import limited_threads
from blocktrain.learning.tokenizer import Bytes
from blocktrain.learning.train import Trainer, pick_device

BOUND = 1.05
WARMUP = 5  # first steps allocate optimizer state and buffers
CORPUS_BYTES = 1 << 20


def measure_step(
    config: Config | None = None,
    *,
    repeats: int = 200,
    seed: int = 0,
    progress: Callable[[float], None] = lambda _: None,
) -> dict[str, Any]:
    """Medians of `repeats` steps of each, in turns, so that a busy machine slows both alike."""
    if repeats < 2:
        raise ConfigError(
            f"repeats={repeats} is too few for a median and its spread; use 2 or more"
        )
    base = config or Config(width=128, context=128, batch=16)
    if base.objective != "next" or base.dtype != "float32":
        raise ConfigError(
            "the bare loop has the next-byte loss in float32; use objective=next and dtype=float32"
        )
    c = base.replace(seed=seed, steps=WARMUP + repeats)
    corpus = random_text(seed, max(CORPUS_BYTES, 2 * c.context))
    with limited_threads():
        batches = memory_batches(corpus, context=c.context, batch=c.batch, seed=seed)
        worker: Iterator[object] = Trainer(c, 1).run(batches, c.steps)
        bare: Iterator[object] = bare_loop(c, corpus)
        for _ in range(WARMUP):
            next(worker)
            next(bare)
        seconds: list[tuple[float, float]] = []
        for pair in range(repeats):
            if pair % 2:  # the second may find warmer caches, so each is second half of the time
                later = _step_seconds(bare)
                seconds.append((_step_seconds(worker), later))
            else:
                earlier = _step_seconds(worker)
                seconds.append((earlier, _step_seconds(bare)))
            progress((pair + 1) / repeats)
    return _summary(c, seconds)


def bare_loop(config: Config, corpus: Bytes) -> Iterator[float]:
    """A loop written by hand: no schedule, no checks, no resuming. Yields each step's loss."""
    device = pick_device(config.device)
    block = build_independent(config, 1).to(device)
    optimizer = Optimizers(block, config.optimizer, weight_decay=config.weight_decay)
    random = np.random.default_rng(config.seed)
    while True:
        offsets = random.integers(0, len(corpus) - config.context, size=config.batch)
        rows = np.stack([corpus[o : o + config.context + 1] for o in offsets])
        tokens = torch.from_numpy(rows.astype(np.int64)).to(device)
        logits = block(block.features(tokens[:, :-1]))
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        block.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(block.parameters(), 1.0)
        optimizer.step(config.learning_rate)
        yield loss.item()  # waits for the device: a step has ended when its loss is known


def _step_seconds(steps: Iterator[object]) -> float:
    began = time.perf_counter()
    next(steps)
    return time.perf_counter() - began


def _summary(config: Config, seconds: list[tuple[float, float]]) -> dict[str, Any]:
    worker, bare = ([1e3 * pair[side] for pair in seconds] for side in (0, 1))
    ratio = statistics.median(w / b for w, b in seconds)  # neighbours in time are slowed alike
    return {
        "ratio": ratio,
        "bound": BOUND,
        "within_bound": ratio <= BOUND,
        "worker_ms": statistics.median(worker),
        "bare_ms": statistics.median(bare),
        "spread": {  # quartiles; those of the ratio are of neighbours in time
            "worker_ms": _quartiles(worker),
            "bare_ms": _quartiles(bare),
            "ratio": _quartiles([w / b for w, b in seconds]),
        },
        "repeats": len(seconds),
        "threads": 1,
        "layers": config.layers_per_block,
        "width": config.width,
        "context": config.context,
        "batch": config.batch,
        "bytes_per_second": config.batch * config.context / (statistics.median(worker) / 1e3),
    }


def _quartiles(values: list[float]) -> list[float]:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]
