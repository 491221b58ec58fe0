"""Plans: what a fleet can do, what it lacks, and that estimates hold against what is measured."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from blocktrain.config import Config
from blocktrain.coordinator.policy import Policy, policy_for_size
from blocktrain.errors import ConfigError
from blocktrain.learning.compose import build_block
from blocktrain.learning.shards import Batches
from blocktrain.learning.train import Trainer, block_weights
from blocktrain.protocol.compression import METHODS, compress, compress_weights
from blocktrain.protocol.tensors import pack
from blocktrain.runs.fleet import FleetMachine, read_fleet
from blocktrain.runs.plan import RunPlan, duration, make_plan
from blocktrain.sizes import make_sized_config
from blocktrain.watch.server import Listen, serve_coordinator
from blocktrain.web.client import HttpClient
from support.worker_run import worker_runs

GB = 10**9


def machine(name: str = "one", **fields: Any) -> FleetMachine:
    return FleetMachine(**{"name": name, "device": "cpu", "memory": 64 * GB, **fields})


def plan(
    settings: dict[str, Any], *machines: FleetMachine, policy: dict[str, Any] | None = None
) -> RunPlan:
    config = make_sized_config(settings)
    return make_plan(config, Policy(**{**policy_for_size(config), **(policy or {})}), machines)


def test_a_fleet_that_can_do_it() -> None:
    result = plan({"size": "10M"}, machine("small", count=3), machine("large", device="h100"))
    assert result.problems == []
    assert [m.independent and m.fusion for m in result.machines] == [True, True]
    assert result.seconds is not None
    c = result.config
    assert result.tokens == (3 * c.steps + c.steps_of(4)) * c.batch * c.context
    assert c.steps_of(4) < c.steps
    assert result.as_dict()["possible"]


def test_more_machines_and_more_hours_take_less_time() -> None:
    def seconds(**fields: Any) -> float:
        return plan({"size": "124M"}, machine(**fields)).seconds or 0.0

    whole = seconds()
    assert seconds(count=4) == pytest.approx(whole / 4)
    assert seconds(hours=12) == pytest.approx(whole * 2)
    assert seconds(tokens_per_second=1e9) < whole
    assert seconds(down=0.1) > whole, "it waits for its line"


def test_fewer_machines_than_blocks_are_enough() -> None:
    result = plan({"size": "350M"}, machine())
    assert result.config.blocks == 8
    assert result.problems == []


def test_no_machine_has_the_memory_for_a_block() -> None:
    result = plan({"size": "7B"}, machine("laptop", memory=2 * GB), machine("pi", memory=GB))
    (problem,) = result.problems
    assert problem.startswith("no machine can train a block: laptop: training a block takes ")
    assert "and it has 2 GB; pi: " in problem
    assert result.seconds is None
    assert [m.independent for m in result.machines] == [False, False]


def test_no_machine_has_the_memory_for_the_fusion_block() -> None:
    needs = plan({"size": "1B"})
    assert needs.fusion is not None
    between = (needs.independent.memory + needs.fusion.memory) // 2
    result = plan({"size": "1B"}, machine(memory=between, count=100, device="cpu"))
    (problem,) = result.problems
    assert problem.startswith("no machine has the memory for the fusion block, which takes ")
    assert result.machines[0].reasons[0].startswith("it cannot train the fusion block")
    assert plan({"size": "1B", "compose": "pool"}, machine(memory=between)).problems == []
    one = machine("one", memory=2 * needs.fusion.memory)
    assert plan({"size": "1B"}, machine(memory=between), one).problems == []


def test_a_machine_that_is_too_slow_for_one_step_a_day() -> None:
    result = plan({"size": "7B"}, machine(memory=1000 * GB, flops=1e9, device=None))
    assert "one step takes" in result.problems[0]
    line = plan({"size": "7B"}, machine(memory=1000 * GB, device="h100", up=0.001))
    assert "over its line, more than a task may" in line.problems[0]


def test_a_machine_that_waits_for_its_line_is_told() -> None:
    result = plan(
        {"size": "124M"},
        machine(down=1.0),
        policy={"task_seconds": 5.0, "version_compression": "none"},
    )
    assert any("a longer --task-seconds (now 5) helps" in r for r in result.machines[0].reasons)


def test_what_the_protocol_refuses_is_refused_here() -> None:
    result = plan({"size": "7B", "blocks": 2}, machine(memory=10**15))
    assert any("the protocol allows" in problem for problem in result.problems)
    exact = plan({"size": "7B"}, policy={"compression": "none"})
    assert any("use another --compression" in problem for problem in exact.problems)


def test_tokens_of_a_run_end_it() -> None:
    short = plan({"size": "2M"}, machine(), policy={"tokens": 10**6})
    long = plan({"size": "2M"}, machine(), policy={"tokens": 10**7})
    assert long.seconds == pytest.approx(10 * (short.seconds or 0))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", r"names no machine; describe each kind in a table \[\[machine\]\]"),
        ("machine = 3", r"machines are tables: write \[\[machine\]\]"),
        ("[machine]\nname = 'a'", r"machines are tables: write \[\[machine\]\]"),
        ("speed = 1\n[[machine]]\nname='a'\ndevice='h100'", "unknown key 'speed'"),
        ("[[machine]]\ndevice = 'h100'", "machine 1 needs a name"),
        ("[[machine]]\nname='a'\nram=3", "machine 'a': unknown key 'ram'; known: name, count"),
        ("[[machine]]\nname='a'\ndevice='h100'\ncount=0", "machine 'a': count must be at least 1"),
        ("[[machine]]\nname='a'\ndevice='h100'\nup=-1", "machine 'a': up must be above 0"),
        ("[[machine]]\nname='a'\ndevice='h100'\nhours=25", "hours must be at most 24"),
        ("[[machine]]\nname='a'\ndevice='cray'", "'a': device must be one of cpu, .* flops"),
        ("[[machine]]\nname='a'\ndevice='h100'\nmemory='much'", "is not an amount of bytes"),
        ("[[machine]]\nname='a'\ndevice='h100'\nmemory=-5", "memory must be above 0"),
        ("[[machine]]\nname='a'\ndevice='cpu'", "machine 'a' needs its memory"),
        ("[[machine]]\nname='a'\nmemory='8 GB'", "machine 'a' needs a device, its peak as flops"),
        ("[[machine]]\nname='a'\ndown=nan\ndevice='h100'", "down must be a finite number"),
        ("[[machine", "is not valid TOML"),
    ],
)
def test_a_wrong_fleet_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        read_fleet(path)


def test_a_fleet_file(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(
        "[[machine]]\nname = 'a'\ncount = 2\nmemory = '16 GB'\ndevice = 'cpu'\n"
        "[[machine]]\nname = 'b'\ndevice = 'rtx4090'\n"
        "[[machine]]\nname = 'c'\nmemory = 8e9\ntokens_per_second = 1200\nup = 5\nhours = 8\n"
    )
    a, b, c = read_fleet(path)
    assert (a.count, a.memory, a.hours) == (2, 16 * GB, 24)
    assert b.memory == 24 * 2**30
    assert (c.memory, c.tokens_per_second, c.up) == (8 * GB, 1200, 5)
    with pytest.raises(ConfigError, match="cannot read"):
        read_fleet(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (3.0, "3 seconds"),
        (600, "10 minutes"),
        (9000, "2.5 hours"),
        (1e6, "12 days"),
        (1e10, "320 years"),
    ],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def common_and_rare_tokens(config: Config) -> Batches:
    """Batches in which, as in a text, few tokens are frequent and most are rare."""

    def batches(step: int) -> npt.NDArray[np.int64]:
        rng = np.random.default_rng(step)
        ranks = rng.zipf(1.2, (config.batch, config.context + 1))
        return np.asarray((ranks - 1) % config.vocabulary, np.int64)

    return batches


def trained_update(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights after a task of an independent block, and what it changed."""
    trainer = Trainer(config, 1)
    before = trainer.weights()
    for _ in trainer.run(common_and_rare_tokens(config), 8):
        pass
    after = trainer.weights()
    return after, {name: after[name] - before[name] for name in after}


SHAPES: dict[str, dict[str, Any]] = {
    "2M": {"size": "2M", "steps": 100},
    "bytes": {"size": "2M", "tokenizer": "bytes", "steps": 100},
    "10M": {"size": "10M", "steps": 100, "batch": 2},
}


@pytest.mark.parametrize("name", SHAPES)
def test_bytes_of_weights_and_updates_are_as_planned(name: str) -> None:
    config = make_sized_config(SHAPES[name])
    weights, delta = trained_update(config)
    for method in METHODS.values():
        planned = make_plan(
            config, Policy(compression=method.name, version_compression="none"), []
        ).independent
        payload = (
            compress_weights(weights, method.name)
            if method.exact
            else compress(delta, None, method.name)[0]
        )
        if method.name in ("int2", "topk"):  # zstd makes less of updates with many zeros
            assert 0.9 * len(payload) < planned.update < 2.2 * len(payload), method.name
        else:
            assert planned.update == pytest.approx(len(payload), rel=0.1), method.name
        assert planned.weights == pytest.approx(len(pack(weights)), rel=0.01)


def test_bytes_of_a_fusion_block_are_as_planned() -> None:
    config = make_sized_config({"size": "2M"})
    planned = make_plan(config, Policy(version_compression="none"), []).fusion
    weights = block_weights(build_block(config, config.blocks))
    assert planned is not None
    assert planned.parameters == sum(w.size for w in weights.values())
    assert planned.weights == pytest.approx(len(pack(weights)), rel=0.01)
    source = len(pack(block_weights(build_block(config, 1))))
    assert planned.reads == pytest.approx(config.independent * source, rel=0.01)


def test_bytes_of_a_real_run_are_as_planned(tmp_path: Path, corpus_folder: Path) -> None:
    policy = Policy(task_steps=4, version_compression="none")
    shape: dict[str, Any] = {"width": 96, "heads": 4, "blocks": 3, "layers_per_block": 2}
    shape |= {"steps": 12, "fusion_share": 1.0}
    with worker_runs(tmp_path, corpus_folder) as make:
        here = make(policy, **shape)
        with serve_coordinator(here.coordinator, Listen()) as url:
            client = HttpClient(url)
            here.worker(client).run()
            client.close()
        blocks = here.coordinator.status().blocks
        trained = Counter(event["block"] for event in here.events("trained"))
    planned = make_plan(here.config, policy, [])
    assert planned.fusion is not None
    kinds = {1: planned.independent, 2: planned.independent, 3: planned.fusion}
    fetched = sum(block.bytes_out for block in blocks)
    needed = sum(trained[index] * kind.weights for index, kind in kinds.items())
    for block in blocks:
        assert trained[block.block] >= 3  # more, if a busy machine makes a task late
        expected = trained[block.block] * kinds[block.block].update
        assert block.bytes_in == pytest.approx(expected, rel=0.1), block.block
    # Version 0 is drawn, not fetched. The fusion block reads the others, which are finished when it
    # begins the last time.
    drawn = sum(kind.weights for kind in kinds.values())
    assert (needed - drawn) * 0.9 < fetched < 1.1 * (needed + trained[3] * planned.fusion.reads)
