"""The serving benches at tiny scale: real stages behind shaped links, every row, the same text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktrain.bench.quality import quality
from blocktrain.bench.serving import report as serving_report
from blocktrain.bench.serving.answers import Way, quantile, take_prompts
from blocktrain.bench.serving.costs import Costs, fit_line
from blocktrain.bench.serving.failover import Case, summary
from blocktrain.bench.serving.serving import SWEEPS, gain
from blocktrain.bench.serving.shape import Shape, buffer, parse_shape, shared_model
from blocktrain.bench.serving.stages import split
from blocktrain.errors import ConfigError, RunError
from blocktrain.learning.corpus.source import Source
from blocktrain.learning.model import Cache
from blocktrain.serving.entry.drafting import LinearCost
from support.command import blocktrain

pytestmark = pytest.mark.timeout(900)  # a minute on two free cores; other tests run beside it

RTT_MS = 40.0
KILLS, BLACKHOLES = 2, 1
TOKENS = 6


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus_folder: Path) -> Path:
    """What the benches train when they get no run, with fewer steps."""
    folder = tmp_path_factory.mktemp("bench") / "model"
    small = {
        "width": 16,
        "heads": 2,
        "layers_per_block": 1,
        "blocks": 4,
        "context": 32,
        "batch": 8,
        "steps": 40,
        "z_width": 8,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(quality.SCALES, "tiny", small)
        source = Source(str(corpus_folder), None, corpus_folder)
        assert serving_report.train_run(folder, "tiny", source, 0, 2) == folder
        before = (folder / "model" / "config.json").stat().st_mtime_ns
        assert serving_report.train_run(folder, "tiny", source, 0, 2) == folder
        assert (folder / "model" / "config.json").stat().st_mtime_ns == before
        with pytest.raises(RunError, match="--out"):
            serving_report.train_run(folder, "tiny", source, 1, 2)
    return folder


def bench(name: str, folder: Path, *arguments: str) -> dict[str, Any]:
    process = blocktrain(
        "bench", name, *arguments, "--out", str(folder / name), "--json", cwd=folder, timeout=860
    )
    assert process.returncode == 0, process.stderr
    return dict(json.loads(process.stdout))


# -- bench serving


@pytest.fixture(scope="module")
def serving_result(run: Path) -> dict[str, Any]:
    return bench(
        "serving", run.parent, "--run", str(run), "--scale", "tiny", "--rtt-ms", f"{RTT_MS:g}"
    )


def test_every_row_is_there(serving_result: dict[str, Any], run: Path) -> None:
    ways = [(row["model"], row["topology"], row["mode"]) for row in serving_result["rows"]]
    fan = [("fuse", "fan", mode) for mode in ("autoregressive", *["sweep"] * len(SWEEPS), "exact")]
    assert ways == [
        *fan,
        ("reference", "ring", "autoregressive"),
        ("reference", "star", "autoregressive"),
    ]
    assert [row["sweeps"] for row in serving_result["rows"] if row["mode"] == "sweep"] == list(
        SWEEPS
    )
    for row in serving_result["rows"]:
        assert row["bytes_per_s"] > 0
        assert row["predicted"] > 0
        assert 0 < row["quality"] < 12
        assert row["first_byte_ms"] >= RTT_MS
        assert row["wire_bytes"] > serving_result["output_bytes"]
    assert {"real", "first block alone"} < set(serving_result["quality"])
    assert (run.parent / "serving" / "serving.png").stat().st_size > 10_000
    assert json.loads((run.parent / "serving" / "serving.json").read_text()) == serving_result


def test_the_text_is_the_same_on_every_line_and_exact_never_diverges(
    serving_result: dict[str, Any],
) -> None:
    assert serving_result["texts_changed"] == 0
    assert serving_result["divergences"] == 0
    assert serving_result["positions"] == 80
    assert 0 < serving_result["acceptance"] < 1
    by_mode = {row["mode"]: row for row in serving_result["rows"] if row["topology"] == "fan"}
    assert by_mode["exact"]["quality"] == by_mode["autoregressive"]["quality"]


def test_nothing_is_faster_than_its_line(serving_result: dict[str, Any]) -> None:
    trips = {"fan": 1.0, "ring": 1.5, "star": 2.0}  # of a sweep over three hosts
    for row in serving_result["rows"]:
        assert row["bytes_per_s"] <= row["bytes_per_sweep"] * 1000 / (
            RTT_MS * trips[row["topology"]]
        )
        if row["mode"] == "autoregressive":
            assert row["bytes_per_sweep"] == 1
    swept = next(row for row in serving_result["rows"] if row["mode"] == "sweep")
    assert swept["bytes_per_sweep"] == serving_result["output_bytes"]
    (gains,) = serving_result["gains"]
    assert gains["sweep_1"] > 1
    assert gains["exact_bytes_per_sweep"] >= 1


def test_what_does_not_fit_into_rows_is_there(serving_result: dict[str, Any]) -> None:
    assert 0 < serving_result["hop_overhead_ms_p50"] <= serving_result["hop_overhead_ms_p99"]
    assert [(row["mode"], row["users"]) for row in serving_result["users"]] == [
        ("autoregressive", 4),
        ("exact", 4),
    ]
    assert all(0 < row["seconds_p50"] <= row["seconds_p99"] for row in serving_result["users"])
    assert sum(serving_result["accepted_per_sweep"][f"{RTT_MS:g}"].values()) > 0
    assert [(row["topology"], row["hosts"]) for row in serving_result["first_byte"]] == [
        ("fan", 2),
        ("fan", 4),
    ]
    assert serving_result["first_byte_growth"] > -1


# -- bench failover


def test_answers_survive_kills_and_black_holes(run: Path) -> None:
    counts = ("--kills", str(KILLS), "--blackholes", str(BLACKHOLES))
    result = bench("failover", run.parent, *counts, "--run", str(run), "--rtt-ms", "10")
    assert (result["kills"], result["identical"]) == (KILLS, KILLS)
    assert (result["blackholes"], result["blackhole_identical"]) == (BLACKHOLES, BLACKHOLES)
    assert all(row["failovers"] for row in result["rows"])
    for name in (
        "detect_ms_p99",
        "blackhole_detect_ms_p99",
        "next_byte_ms_p50",
        "next_byte_ms_p99",
    ):
        assert result[name] > 0
    alone = result["no_replica"]
    assert alone["degraded"] == [2]
    assert alone["bytes"] == result["output_bytes"]
    assert alone["refused"]
    assert alone["refused_after_s"] < alone["deadline_s"] + 20
    assert alone["used_again"]


# -- bench serving --shape


def test_a_small_shape_is_served_as_the_large_one_is(tmp_path: Path) -> None:
    result = bench("serving", tmp_path, "--shape", "300K", "--tokens", str(TOKENS), "--rtt-ms", "5")
    one, swept = result["rows"]
    assert (one["mode"], one["traversals"]) == ("autoregressive", TOKENS)
    assert (swept["mode"], swept["traversals"]) == ("sweep", 1)
    assert result["same_choices"] == TOKENS
    state = TOKENS * result["width"] * 2  # fp16, over each of two lines
    assert swept["wire_bytes"] > 2 * state
    assert swept["seconds"] >= 1.5 * 5e-3
    assert result["memory_gib"] > 0
    assert "quality" in result["does_not_prove"]
    assert not list((tmp_path / "serving").glob("*.bin"))


def test_the_published_shape_has_the_published_size() -> None:
    assert parse_shape("75.8B", 3) == Shape(7168, 3, 41)
    assert parse_shape("75.8B", 3).parameters == pytest.approx(75.84e9, rel=1e-3)
    assert parse_shape("75.8B", 3).buffer_bytes < 2.5e9
    for text, blocks in (("10M", 3), ("300k", 2), ("1.5B", 4)):
        shape = parse_shape(text, blocks)
        assert shape.parameters == pytest.approx(
            float(text[:-1]) * {"K": 1e3, "M": 1e6, "B": 1e9}[text[-1].upper()], rel=0.2
        )
        assert shape.config(32).heads >= 1
    for wrong in ("", "B", "x7B", "75.8", "1B2", "-1B", "9000B"):
        with pytest.raises(ConfigError, match="--shape"):
            parse_shape(wrong, 3)


def test_all_layers_of_a_shape_share_one_buffer_and_have_caches_of_their_own(
    tmp_path: Path,
) -> None:
    shape = parse_shape("300K", 3)
    with buffer(tmp_path, shape) as path:
        assert path.stat().st_size == shape.buffer_bytes
        model = shared_model(shape, shape.config(TOKENS), path)
        assert len(model.layers) == shape.blocks * shape.layers
        assert (
            len(
                {parameter.data_ptr() for layer in model.layers for parameter in layer.parameters()}
            )
            == 6
        )
        cache = Cache(model, 1)
        with torch.no_grad():
            model.features(torch.tensor([list(b"shape")]), cache=cache)
    assert len({tuple(keys.flatten().tolist()) for keys in cache.data[:, 0]}) == len(model.layers)
    assert not path.exists()


# -- the parts


def test_blocks_are_spread_evenly_and_no_host_is_empty() -> None:
    assert split(range(2, 4), 2) == [(2,), (3,)]
    assert split(range(1, 5), 3) == [(1, 2), (3,), (4,)]
    assert split([2], 3) == [(2,)]


def test_quantiles_are_values_that_occurred() -> None:
    assert quantile([3.0], 0.99) == 3.0
    assert [quantile(range(1, 101), share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]


def test_prompts_are_followed_by_what_really_follows() -> None:
    text = torch.arange(100, dtype=torch.uint8).numpy()
    for prompt in take_prompts(text, 3, 10, 20):
        assert prompt.text + prompt.real == bytes(range(prompt.text[0], prompt.text[0] + 30))
    with pytest.raises(ConfigError, match="give it a run of tokenizer=bytes"):
        take_prompts(text.astype("u2"), 3, 10, 20)


def test_the_cost_model_knows_what_a_line_costs() -> None:
    free = LinearCost(0.0)
    costs = Costs(free, 0.0, free, free, 3, 8, 0.0, 0.0, acceptance=0.5)

    def predict(topology: Any, mode: Any, sweeps: float = 1) -> float:
        rate = costs.predict(Way("", topology, mode), 100.0, 0.0, 32, 96, sweeps)
        assert rate is not None
        return rate

    assert predict("fan", "autoregressive") == pytest.approx(10)
    assert predict("fan", "sweep") == pytest.approx(960)
    assert predict("fan", "sweep", 4) == pytest.approx(240)
    assert predict("fan", "exact") == pytest.approx(
        20, rel=0.01
    )  # half of the drafted bytes are right: two a sweep
    assert predict("ring", "autoregressive") == pytest.approx(96 / (0.1 + 96 * 0.15))
    assert predict("star", "autoregressive") == pytest.approx(96 / (0.1 + 96 * 0.2))
    line = fit_line([(1, 3.0), (1, 2.0), (1, 9.0), (5, 11.0)])
    assert [line.base, line.each] == pytest.approx([1.0, 2.0])


def test_gains_are_over_the_best_autoregressive_row() -> None:
    rows = [
        {
            "mode": mode,
            "model": model,
            "topology": "fan",
            "rtt_ms": 80.0,
            "bytes_per_s": speed,
            "bytes_per_sweep": 7.0,
            "sweeps": 1,
        }
        for mode, model, speed in (
            ("autoregressive", "fuse", 10.0),
            ("autoregressive", "reference", 12.0),
            ("sweep", "fuse", 240.0),
            ("exact", "fuse", 60.0),
        )
    ]
    gains = gain(rows)
    assert (gains["best_autoregressive"], gains["sweep_1"], gains["exact"]) == (
        "reference, fan",
        20.0,
        5.0,
    )


def test_kills_and_black_holes_are_counted_apart() -> None:
    cases = [Case("kill", "exact", True, 5.0, 9.0, 1), Case("kill", "exact", False, 7.0, 9.0, 1)]
    figures = summary([*cases, Case("blackhole", "exact", True, 900.0, 1000.0, 1)])
    assert (figures["kills"], figures["identical"], figures["detect_ms_p99"]) == (2, 1, 7.0)
    assert (
        figures["blackholes"],
        figures["blackhole_identical"],
        figures["blackhole_detect_ms_p99"],
    ) == (1, 1, 900.0)
    assert summary(cases)["blackholes"] == 0
