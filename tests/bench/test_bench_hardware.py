"""Hardware options measured: less memory, and the same result to rounding."""

from __future__ import annotations

import pytest
import torch

from blocktrain.bench.hardware import LiveBytes, measure_option
from blocktrain.config import Config
from blocktrain.learning.threads import limited_threads

SMALL = Config(blocks=3, layers_per_block=4, width=32, heads=2, context=32, batch=8)


def test_tensors_count_while_they_live() -> None:
    with LiveBytes() as live:
        x = torch.zeros(1000)
        y = x + 1
        view = y[10:]
        del y
        assert (live.now, live.peak) == (8000, 8000), "a view keeps its storage"
        del view
        assert live.now == 4000
        x.add_(1)
        z = x * 2
        assert (live.now, live.peak) == (8000, 8000)
        del z


@pytest.mark.parametrize("kind", ["one", "fusion"])
def test_micro_batches_and_checkpoints_lower_the_peak(kind: str) -> None:
    names = (
        "plain",
        "micro-batch 4",
        "micro-batch 1",
        "checkpointed",
        "checkpointed, micro-batch 4",
    )
    with limited_threads():
        rows = {name: measure_option(SMALL, name, kind, repeats=1) for name in names}
    peak = {name: row["peak_mb"] for name, row in rows.items()}
    assert peak["micro-batch 1"] < peak["micro-batch 4"] < peak["plain"]
    assert peak["checkpointed, micro-batch 4"] < peak["checkpointed"] < peak["plain"]
    assert rows["micro-batch 4"]["memory_ratio"] < (0.75 if kind == "one" else 0.85)
    assert rows["checkpointed"]["memory_ratio"] < (0.75 if kind == "one" else 0.85)
    assert rows["checkpointed"]["loss_difference"] == "0.0e+00"
    assert all(float(row["loss_difference"]) < 1e-4 for row in rows.values())
