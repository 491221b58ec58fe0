"""Memory that is planned without torch, held against the peak of real training."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from torch.profiler import ProfilerActivity, profile

from blocktrain.config import Config, make_config
from blocktrain.footprint import PROCESS, training_footprint, worker_memory
from blocktrain.learning.model import build_independent
from blocktrain.learning.train import Trainer

SMALL = {"width": 64, "heads": 2, "context": 32, "batch": 8, "layers_per_block": 2}
TOKENS = {"tokenizer": "bpe:2048"}
VARIANTS: dict[str, dict[str, Any]] = {
    "bytes": {},
    "tokens": TOKENS,
    "full tables": {**TOKENS, "embedding": "full"},
    "one head, no lookback": {**TOKENS, "heads": 1, "lookback": 1},
    "micro-batches": {**TOKENS, "micro_batch": 2},
    "checkpointed": {"checkpoint_activations": True, "layers_per_block": 4},
    "checkpointed tokens": {**TOKENS, "checkpoint_activations": True},
    "both": {**TOKENS, "checkpoint_activations": True, "micro_batch": 1},
    "bfloat16": {**TOKENS, "dtype": "bfloat16"},
    "muon": {"optimizer": "muon", "batch": 1},
    "adamw": {"fusion_optimizer": "adamw"},
    "many blocks": {"blocks": 8},
    "pool": {"compose": "pool"},
    "denoise": {"objective": "denoise", "compose": "pool"},
    "paper": {"objective": "denoise", "skip": "edm", "compose": "euler"},
    "size 2M": {"width": 104, "heads": 4, "context": 128, "batch": 4, **TOKENS},
}


def measured_peak(config: Config, index: int) -> int:
    """Most bytes of tensors that exist at once, from building a trainer to its second step."""

    def batches(step: int) -> Any:
        shape = (config.batch, config.context + 1)
        return np.random.default_rng(step).integers(0, config.vocabulary, shape)

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        sources = [build_independent(config, n) for n in range(1, config.reads(index) + 1)]
        trainer = Trainer(config, index, sources)
        for _ in trainer.run(batches, 2):
            pass
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    levels = np.cumsum([change for _, change in changes])
    return int(levels.max())


@pytest.mark.parametrize("name", VARIANTS)
def test_memory_of_training_is_as_planned(name: str) -> None:
    config = make_config({**SMALL, **VARIANTS[name]})
    for index in {1, config.fusion or 1}:
        planned = training_footprint(config, index).training
        assert planned == pytest.approx(measured_peak(config, index), rel=0.1), index


WORKER = """
import json
import sys
import numpy as np
from blocktrain.config import make_config
from blocktrain.learning.threads import use_threads
from blocktrain.learning.train import Trainer, write_state
from blocktrain.processes import peak_mb, return_memory
from blocktrain.worker import command  # all that a worker imports
from blocktrain.protocol.compression import compress

use_threads()
config = make_config(json.loads(sys.argv[1]))

def batches(step):
    shape = (config.batch, config.context + 1)
    return np.random.default_rng(step).integers(0, config.vocabulary, shape)

trainer, residual = Trainer(config, 1), {}
for task in range(2):
    base = trainer.weights()
    for _ in trainer.run(batches, trainer.step + 1):
        pass
    trainer.drop_gradients()
    return_memory()
    new = trainer.weights()
    for name in new:
        new[name] -= base.pop(name)
    payload, residual = compress(new, residual, "int4")
    del new
    return_memory()
print(peak_mb())
"""


def test_memory_of_a_real_process_is_as_planned() -> None:
    settings = {"width": 512, "heads": 8, "context": 256, "batch": 2, "layers_per_block": 4}
    done = subprocess.run(
        [sys.executable, "-c", WORKER, json.dumps(settings)],
        check=True,
        capture_output=True,
        text=True,
    )
    planned = worker_memory(make_config(settings), 1)
    assert planned == pytest.approx(float(done.stdout) * 1e6, rel=0.1)


def test_a_gpu_holds_what_trains_and_the_machine_the_rest() -> None:
    config = make_config({**SMALL, **TOKENS})
    parts = training_footprint(config, 1)
    assert worker_memory(config, 1) == parts.total > PROCESS + parts.training
    assert worker_memory(config.replace(device="cuda"), 1) == PROCESS + parts.training
    fusion = training_footprint(config, 4)
    assert fusion.frozen > 0 == parts.frozen
