"""Memory of a worker and time of its step, at a small scale, and that the counting is right."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktrain.bench.machine import header, random_text
from blocktrain.bench.memory import SLACK, SavedActivations, measure_memory, storages
from blocktrain.bench.step import bare_loop, measure_step
from blocktrain.config import Config, make_config
from blocktrain.errors import ConfigError
from blocktrain.learning.shards import memory_batches
from blocktrain.learning.threads import limited_threads
from blocktrain.learning.train import Trainer

FLOAT = 4


def tiny(**changes: Any) -> Config:
    return make_config({"width": 32, "heads": 2, "context": 16, "batch": 4, **changes})


def saved_sizes(function: Any, constants: list[Tensor]) -> dict[int, int]:
    counted = SavedActivations(storages(constants))
    with counted.hooks():
        out = function()
    out.sum().backward()
    return counted.sizes


def test_header_tells_the_machine_but_not_whose_it_is() -> None:
    result = header("blocktrain bench memory", 7)
    assert result["command"] == "blocktrain bench memory"
    assert result["seed"] == 7
    assert set(result["machine"]) >= {"cpu", "cores", "memory_gb", "python", "torch", "threads"}
    assert result["machine"]["memory_gb"] > 0
    assert result["machine"]["threads"] == torch.get_num_threads()
    assert platform.node() not in result["machine"].values()
    assert str(Path.cwd()) not in json.dumps(result)


def test_a_large_vocabulary_does_not_eat_the_block() -> None:
    result = measure_memory(tiny(), settings={"tokenizer": "bpe:2000"}, depth=4)
    full = measure_memory(tiny(), settings={"tokenizer": "bpe:2000", "embedding": "full"}, depth=4)
    assert (result["vocabulary"], result["shared_table"], full["shared_table"]) == (
        2000,
        True,
        False,
    )
    for one, several in zip(result["rows"], full["rows"], strict=True):
        assert one["in_tables"] == 2000 * 32 and several["in_tables"] == 5 * 2000 * 32
        assert one["fusion_in_tables"] == 0 and several["fusion_in_tables"] == 4 * 2000 * 32
        for worker in ("worker", "fusion"):
            assert one[worker]["optimizer"] < several[worker]["optimizer"] / 2.5
            assert one[worker]["total"] < several[worker]["total"]
    with pytest.raises(ConfigError, match="here only bytes or bpe:N is measured"):
        measure_memory(settings={"tokenizer": "gpt2"})


def test_one_thread_puts_back_what_was_set_even_after_an_error() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError, match="odd"), limited_threads():
            assert torch.get_num_threads() == 1
            raise RuntimeError("odd")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_parameters_that_autograd_saves_are_not_activations() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(4, 8, requires_grad=True)
    assert sum(saved_sizes(lambda: x @ weight, [weight]).values()) == 4 * 8 * FLOAT
    assert (
        sum(saved_sizes(lambda: x @ weight.T, [weight]).values()) == 4 * 8 * FLOAT
    )  # a view of a parameter is the parameter


def test_a_storage_saved_twice_counts_once_and_a_view_counts_what_it_keeps_alive() -> None:
    x = torch.randn(6, 10, requires_grad=True)
    assert sum(saved_sizes(lambda: x * x, []).values()) == 60 * FLOAT
    assert sum(saved_sizes(lambda: x[:1] * x[2:3], []).values()) == 60 * FLOAT
    assert sum(saved_sizes(lambda: x.exp().exp(), []).values()) == 120 * FLOAT


def test_a_worker_holds_little_more_than_its_share() -> None:
    seen: list[float] = []
    result = measure_memory(tiny(batch=8), depth=16, progress=seen.append)
    assert [row["blocks"] for row in result["rows"]] == [2, 4, 8, 16]
    for row in result["rows"]:
        assert row["blocks"] * row["layers_per_block"] == 16
        assert 1 / row["blocks"] < row["ratio"] <= 1 / row["blocks"] + SLACK
        assert row["fusion_ratio"] > row["ratio"]
        for sizes in (row["worker"], row["fusion"]):
            extra = sizes.get("frozen", 0) + sizes.get("features", 0)
            assert (
                sizes["total"]
                == sizes["optimizer"] + sizes["gradients"] + sizes["activations"] + extra
            )
            assert sizes["weights"] > 0
    assert result["within_bound"]
    assert seen == sorted(seen)
    assert seen[-1] == 1
    json.dumps(result)


def test_bytes_by_kind_agree_with_the_number_of_parameters() -> None:
    config = tiny(blocks=4, layers_per_block=1, optimizer="adamw")
    row = measure_memory(config, depth=4)["rows"][-1]
    muon = measure_memory(config.replace(optimizer="muon"), depth=4)["rows"][-1]
    assert muon["worker"]["optimizer"] < row["worker"]["optimizer"], "it has one moment, not two"
    block = Trainer(config, 1).block
    parameters = sum(p.numel() for p in block.parameters())
    scalars = FLOAT * len(list(block.parameters()))  # the optimizer counts steps for each parameter
    assert row["worker"]["gradients"] == FLOAT * parameters
    assert row["worker"]["optimizer"] == 2 * FLOAT * parameters + scalars
    readout = 3 * FLOAT * (config.width + config.width * 256)
    rotation = FLOAT * block.rotation.numel()
    assert row["fusion"]["frozen"] == 3 * (FLOAT * parameters + rotation) + readout
    assert row["fusion"]["features"] == 3 * FLOAT * config.batch * config.context * config.width


def test_memory_is_a_function_of_shapes_and_leaves_the_threads_alone() -> None:
    before = torch.get_num_threads()
    assert measure_memory(tiny(), depth=2, seed=1) == measure_memory(tiny(), depth=2, seed=2)
    assert torch.get_num_threads() == before


def test_without_fusion_there_is_no_fusion_worker() -> None:
    rows = measure_memory(tiny(compose="pool"), depth=2)["rows"]
    assert [(row["blocks"], row["fusion"], row["fusion_ratio"]) for row in rows] == [
        (2, None, None)
    ]


def test_a_depth_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="depth=3"):
        measure_memory(tiny(), depth=3)


def test_step_is_timed_in_pairs() -> None:
    seen: list[float] = []
    result = measure_step(tiny(layers_per_block=1), repeats=8, progress=seen.append)
    assert result["spread"]["ratio"][0] <= result["ratio"] <= result["spread"]["ratio"][1], (
        "the median of the pairs"
    )
    assert (
        0.2 < result["ratio"] < 5
    )  # other work on the machine decides more than ours at this size
    assert result["repeats"] == 8
    assert result["within_bound"] == (result["ratio"] <= result["bound"])
    for name in ("worker_ms", "bare_ms", "ratio"):
        low, high = result["spread"][name]
        assert 0 < low <= high
    assert seen == [(i + 1) / 8 for i in range(8)]
    json.dumps(result)


def test_the_bare_loop_does_the_same_arithmetic_as_the_worker() -> None:
    config = tiny(layers_per_block=1, schedule="constant", warmup=0, steps=4)
    row = random_text(0, config.context + 1)  # one place to begin only: both draw the same batches
    bare = bare_loop(config, row)
    batches = memory_batches(row, context=config.context, batch=config.batch)
    for (_, ours), theirs in zip(Trainer(config, 1).run(batches, 4), bare, strict=False):
        assert ours == theirs


@pytest.mark.parametrize(
    "changes", [{"objective": "denoise", "compose": "pool"}, {"dtype": "bfloat16"}]
)
def test_step_refuses_what_the_bare_loop_does_not_do(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="bare loop"):
        measure_step(tiny(**changes), repeats=2)


def test_step_refuses_too_few_repeats() -> None:
    with pytest.raises(ConfigError, match="repeats=1"):
        measure_step(tiny(), repeats=1)
