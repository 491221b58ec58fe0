"""The quality bench at tiny scale: all rows, a second call that continues, and leakage."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from blocktrain.bench import commands
from blocktrain.bench.quality import quality, tune
from blocktrain.bench.quality.quality import is_published, version_beside
from blocktrain.bench.quality.readings import READINGS, require_readings
from blocktrain.bench.quality.table import mean_rows
from blocktrain.config import make_config
from blocktrain.errors import ConfigError, RunError
from blocktrain.learning.corpus.source import Source
from support.command import blocktrain

NAMES = [
    "end_to_end",
    "single_block",
    "best_block",
    "paper",
    "exact_euler",
    "exact_marginal",
    "exact_pool",
    "pool",
    "fuse",
    "fuse_without_1",
    "fuse_without_2",
    "fuse_without_3",
    "fuse_equal_steps",
    "fuse_same_data",
    "fuse_beside",
    "fuse_equal_time",
    "pool_equal_time",
    "single_block_equal_time",
    "end_to_end_equal_time",
    "averaged_block",
    "averaged_end_to_end",
]


pytestmark = pytest.mark.timeout(600)  # a minute on two free cores; other tests run beside it


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return blocktrain(
        "bench",
        "quality",
        "--scale",
        "tiny",
        "--out",
        str(folder),
        "--json",
        *arguments,
        cwd=folder.parent,
        timeout=560,
    )


@pytest.fixture(scope="module")
def bench_result(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("quality") / "bench"
    process = bench(folder)
    assert process.returncode == 0, process.stderr
    return folder, json.loads(process.stdout)


def test_every_row_is_there_with_its_figures(bench_result: tuple[Path, dict[str, Any]]) -> None:
    folder, result = bench_result
    assert [row["name"] for row in result["rows"]] == NAMES
    by_name = {row["name"]: row for row in result["rows"]}
    for row in result["rows"]:
        assert row["gap"] == pytest.approx(
            row["valid_ce"] - by_name["end_to_end"]["valid_ce"], abs=1e-4
        )
        assert (
            min(row["seconds"], row["worker_mb"], row["million_parameters"], row["distinct_mb"]) > 0
        )
    assert by_name["pool"]["valid_ce"] < by_name["single_block"]["valid_ce"]
    time = {name: row["time"] for name, row in by_name.items()}
    assert time["end_to_end"] == 1
    for name in ("single_block", "pool", "fuse"):
        assert time[f"{name}_equal_time"] == pytest.approx(1, rel=0.06)
    assert time["end_to_end_equal_time"] == pytest.approx(time["fuse"], rel=0.06)
    wall = {name: row["wall_clock"] for name, row in by_name.items()}
    assert wall["pool"] < wall["fuse"] < time["fuse"]
    for name in ("averaged_block", "averaged_end_to_end"):
        assert wall[name] == pytest.approx(wall["fuse"], rel=0.06)
        assert time[name] == pytest.approx(4 * wall["fuse"], rel=0.06)
    memory = {name: row["worker_mb"] for name, row in by_name.items()}
    assert memory["averaged_block"] == memory["single_block"] < memory["averaged_end_to_end"]
    assert by_name["end_to_end"]["traffic_mb"] == 0 < by_name["averaged_block"]["traffic_mb"]
    assert by_name["fuse"]["valid_ce"] < by_name["best_block"]["valid_ce"]
    assert by_name["fuse_same_data"]["distinct_mb"] < by_name["fuse"]["distinct_mb"]
    assert time["fuse"] < time["fuse_equal_steps"]
    assert {"command", "seed", "machine", "settings"} < set(result)
    assert (folder / "quality.png").stat().st_size > 10_000


def test_means_are_of_the_seeds_that_have_a_row() -> None:
    def row(name: str, ce: float) -> dict[str, Any]:
        return {"name": name, "valid_ce": ce, "gap": ce - 1}

    seeds = [{"rows": [row("fuse", 1.2), row("paper", 1.6)]}, {"rows": [row("fuse", 1.1)]}]
    fuse, paper = mean_rows(seeds)
    assert (fuse["seeds"], fuse["valid_ce"], fuse["spread"]) == (2, 1.15, 0.1)
    assert (paper["seeds"], paper["valid_ce"], "spread" in paper) == (1, 1.6, False)


def test_samples_are_judged_beside_real_text(bench_result: tuple[Path, dict[str, Any]]) -> None:
    rows = {row["name"]: row for row in bench_result[1]["per_seed"][0]["samples"]}
    assert set(rows) == {"real", "autoregressive", "sweep_1", "sweep_2", "sweep_4", "first_block"}
    agreement = [
        rows[name]["same_as_autoregressive"]
        for name in ("first_block", "sweep_1", "sweep_4", "autoregressive")
    ]
    assert agreement == sorted(agreement)
    assert agreement[-1] == 1


def test_below_sigma_one_the_target_leaks(bench_result: tuple[Path, dict[str, Any]]) -> None:
    """The training loss falls with sigma_min, because the answer shows through the noise.

    The composed model does not profit.
    """
    leakage = bench_result[1]["per_seed"][0]["leakage"]
    assert [row["sigma_min"] for row in leakage] == [0.05, 0.2, 1.0]
    assert leakage[0]["train_ce_last_block"] < leakage[2]["train_ce_last_block"] - 1
    assert leakage[0]["composed_ce"] > leakage[2]["composed_ce"] - 0.1


def test_a_second_call_continues_and_other_settings_are_refused(
    bench_result: tuple[Path, dict[str, Any]],
) -> None:
    folder, result = bench_result
    (folder / "seed-0" / "results" / "evaluate-pool.json").unlink()
    again = bench(folder)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["rows"] == result["rows"]
    other = bench(folder, "--steps", "7")
    assert other.returncode == 2
    assert "other settings" in other.stderr


def test_gaps_of_several_results_in_one_plot(
    bench_result: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, result = bench_result
    longer = tmp_path / "longer"
    longer.mkdir()
    settings = {**result["settings"], "steps": 120}
    (longer / "quality.json").write_text(json.dumps({**result, "settings": settings}))
    process = blocktrain("bench", "gaps", str(longer), str(folder), "--json", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    gaps = json.loads(process.stdout)
    assert [entry["steps"] for entry in gaps["results"]] == [60, 120]
    row = next(row for row in gaps["rows"] if row["name"] == "fuse")
    assert row["tiny 60"] == row["tiny 120"] == gaps["results"][0]["gaps"]["fuse"]
    assert (tmp_path / "results" / "gaps.png").stat().st_size > 10_000
    (longer / "quality.json").write_text("{}")
    refused = blocktrain("bench", "gaps", str(longer), cwd=tmp_path)
    assert (refused.returncode, refused.stderr.count("not a result of")) == (2, 1)
    refused = blocktrain("bench", "gaps", str(tmp_path), cwd=tmp_path)
    assert "no quality.json" in refused.stderr


def test_the_fusion_block_beside_reads_only_versions_that_were_published() -> None:
    for steps in (1, 2, 7, 50, 60, 1200):
        published = {step for step in range(1, steps + 1) if is_published(step, steps)}
        read = [version_beside(step / steps, steps) for step in range(steps + 1)]
        assert set(read) <= published
        assert read == sorted(read)
        assert read[-1] == steps


READING_ROWS = {
    "end_to_end": "end_to_end",
    "single_block": "end_to_end",
    "exact_edges_noise": "end_to_end",
    "exact_edges_zero": "end_to_end",
    "exact_chain_zero": "end_to_end",
    "end_to_end_deep": "end_to_end_deep",
    "single_block_deep": "end_to_end_deep",
    "paper_deep_noise": "end_to_end_deep",
    "paper_deep_zero": "end_to_end_deep",
}


def test_readings_of_the_paper_stand_beside_end_to_end_of_as_many_layers(
    tmp_path: Path, corpus_folder: Path
) -> None:
    small = {"width": 16, "heads": 2, "context": 16, "z_width": 8, "blocks": 3, "steps": 8}
    options = commands.QualityOptions(
        tmp_path / "bench",
        "tiny",
        Source(str(corpus_folder), None, tmp_path / "cache"),
        (0,),
        small,
        slots=2,
        command="blocktrain bench quality --readings",
    )
    names = ("exact_edges", "exact_chain", "paper_deep")
    result = commands.readings(options, names)
    rows = {row["name"]: row for row in result["rows"]}
    assert {name: row["against"] for name, row in rows.items()} == READING_ROWS
    assert list(rows) == list(READING_ROWS)
    for row in rows.values():
        expected = row["valid_ce"] - rows[row["against"]]["valid_ce"]
        assert row["gap"] == pytest.approx(expected, abs=2e-5)
        assert row["steps"] == 8
    # A block less, each of twice as many layers: 4 layers instead of 3.
    deep, plain = rows["end_to_end_deep"], rows["end_to_end"]
    assert deep["million_parameters"] > plain["million_parameters"]
    figures = result["per_seed"][0]
    assert [len(ces) for ces in figures["after_block"].values()] == [3, 3, 3, 2, 2]
    levels = [float(level) for level in figures["edges"]["edges-exact"]["edges"].split(",")]
    assert 1 < levels[0] < levels[1] < 10

    (tmp_path / "bench" / "seed-0" / "results" / "path-exact_chain.json").unlink()
    assert commands.readings(options, names)["rows"] == result["rows"]
    with pytest.raises(RunError, match="other settings"):
        other = dataclasses.replace(options, settings={**small, "steps": 9})
        commands.readings(other, names)


def test_readings_are_chosen_by_name() -> None:
    assert require_readings(["all"]) == tuple(READINGS)
    assert require_readings(["exact", "paper", "exact"]) == ("exact", "paper")
    with pytest.raises(ConfigError, match="--readings papper: there is no such reading; choose"):
        require_readings(["papper"])


def test_every_reading_has_settings_that_agree() -> None:
    base = make_config(quality.SCALES["standard"])
    configs = {name: reading.config(base) for name, reading in READINGS.items()}
    assert all(config.compose == "euler" for config in configs.values())
    deep = configs["paper_deep_both"]
    assert (deep.blocks, deep.layers_per_block, deep.sigma_min) == (3, 4, 3.0)
    assert deep.sigma_data == pytest.approx(128**-0.5)
    assert len({config.fingerprint for config in configs.values()}) == len(configs) - 3


def test_tuning_finds_a_rate_for_each_kind(
    tmp_path: Path, corpus_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "GRID", (1e-3, 2e-3))
    small = {"width": 16, "context": 16, "blocks": 2, "steps": 3}
    source = Source(str(corpus_folder), None, tmp_path / "cache")
    options = commands.QualityOptions(
        tmp_path / "bench",
        "tiny",
        source,
        (0,),
        small,
        slots=2,
        command="blocktrain bench quality --tune",
    )
    result = commands.tune(options)
    assert [row["setting"] for row in result["rows"]] == [
        "reference_learning_rate",
        "learning_rate",
        "fusion_learning_rate",
    ]
    for row in result["rows"]:
        assert row["best"] == min(tune.GRID, key=lambda rate: row[f"{rate:g}"])
    assert json.loads((tmp_path / "bench" / "tune.json").read_text())["rows"] == result["rows"]
