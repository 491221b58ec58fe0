"""One model trained by several workers in rounds, as a run over HTTP would: tasks, compressed
updates, merges. All workers are in one process and take turns, so a result does not depend on
timing, and no machine needs to exist for each of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from blocktrain.config import Config
from blocktrain.coordinator.merging.merge import MergeContext, Update, merge
from blocktrain.coordinator.policy import Policy
from blocktrain.errors import RunError
from blocktrain.learning.model import Block
from blocktrain.learning.shards import Batches
from blocktrain.learning.train import Trainer, read_state, write_state
from blocktrain.protocol.compression import compress, decompress
from blocktrain.protocol.tensors import Tensors, schema_of

TASK_STEPS = 50
"""Steps of a task, as in `bench transport`."""


class Replicas:
    """Workers of one model: each has its own optimizer, residual and sequences of the corpus."""

    def __init__(self, config: Config, index: int, workers: int) -> None:
        self.config, self.step = config, 0
        self._trainers = [Trainer(config, index) for _ in range(workers)]
        self._version: Tensors = self._trainers[0].weights()
        self._residuals: list[Tensors] = [{} for _ in range(workers)]
        self._norms: tuple[float, ...] = ()

    @property
    def block(self) -> Block:
        """The model as of the last merge."""
        self._trainers[0].load_weights(self._version)
        return self._trainers[0].block

    @property
    def seconds(self) -> float:
        """Training time of all workers."""
        return sum(trainer.seconds for trainer in self._trainers)

    def train_round(self, batches: Batches) -> Iterator[float]:
        """One task for each worker, then a merge; yields every loss."""
        steps = min(TASK_STEPS, self.config.steps - self.step)
        updates = []
        for number, trainer in enumerate(self._trainers):
            trainer.load_weights(self._version)
            trainer.step = self.step
            # All workers of a round read different sequences of one order.
            trainer.shift = self.step * (len(self._trainers) - 1) + steps * number
            for _, loss in trainer.run(batches, self.step + steps):
                yield loss
            updates.append(self._update(number, trainer))
        before = MergeContext(self._version, norms=self._norms)
        merged = merge(before, updates)
        if merged.state is None:
            raise RunError(f"a round of {len(updates)} workers cannot be merged: {merged.reason}")
        self._version = {name: w.astype(np.float32) for name, w in merged.state.items()}
        self._norms = merged.norms
        self.step += steps

    def _update(self, number: int, trainer: Trainer) -> Update:
        delta = {name: w - self._version[name] for name, w in trainer.weights().items()}
        method = Policy().compression
        payload, self._residuals[number] = compress(delta, self._residuals[number], method)
        values = decompress(payload, schema_of(delta), method=method)
        return Update(str(number), values, tokens=1)

    def save(self, path: Path) -> None:
        """Everything that the next round continues with, as one file, atomically."""
        groups = {"version": self._version}
        groups |= {f"residual{n}": residual for n, residual in enumerate(self._residuals)}
        tensors = {
            f"{group}/{name}": torch.from_numpy(array)
            for group, arrays in groups.items()
            for name, array in arrays.items()
        }
        for number, trainer in enumerate(self._trainers):
            tensors |= {f"moments{number}/{name}": t for name, t in trainer.moments().items()}
        note = {
            "fingerprint": self.config.fingerprint,
            "step": self.step,
            "norms": self._norms,
            "seconds": [trainer.seconds for trainer in self._trainers],
        }
        write_state(path, tensors, json.dumps(note))

    def load(self, path: Path) -> None:
        """Continue from a saved state of the same settings."""
        tensors, text = read_state(path)
        note = json.loads(text)
        if note["fingerprint"] != self.config.fingerprint:
            raise RunError(f"{path} is of other settings; remove it to train again")
        groups: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            group, _, name = key.partition("/")
            groups.setdefault(group, {})[name] = tensor
        self.step, self._norms = note["step"], tuple(note["norms"])
        self._version = {name: t.numpy() for name, t in groups["version"].items()}
        for number, trainer in enumerate(self._trainers):
            residual = groups.get(f"residual{number}", {})
            self._residuals[number] = {name: t.numpy() for name, t in residual.items()}
            trainer.restore(groups[f"moments{number}"])
            trainer.seconds = note["seconds"][number]
