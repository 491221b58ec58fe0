"""The transport bench at tiny scale: real runs over HTTP in every part of the bench."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from blocktrain.bench.network.brake import Brake, processor_seconds
from blocktrain.bench.transport.transport import RUNGS, SCALES, SHARES, smallest
from blocktrain.bench.transport.trial import Timesheet, goodput, utilisation
from support.command import blocktrain

pytestmark = pytest.mark.timeout(600)


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    text = folder.parent / "text.txt"
    if not text.exists():
        text.write_text(
            "".join(
                f"{n} sheep went over the hill, and {n * n % 97} came back.\n" for n in range(4000)
            )
        )
    options = ("--scale", "tiny", "--data", str(text), "--out", str(folder), "--json")
    return blocktrain("bench", "transport", *options, *arguments, cwd=folder.parent, timeout=560)


@pytest.fixture(scope="module")
def bench_result(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("transport") / "bench"
    process = bench(folder)
    assert process.returncode == 0, process.stderr
    return folder, json.loads(process.stdout)


def test_a_run_over_http_replays_to_the_same_hashes(
    bench_result: tuple[Path, dict[str, Any]],
) -> None:
    result = bench_result[1]
    assert result["equal_hashes"] is True
    assert result["replay"]["retrained"] == result["replay"]["updates"] > 0
    assert {"command", "seed", "machine", "paper"} < set(result)


def test_more_workers_train_more_text_at_the_same_steps(
    bench_result: tuple[Path, dict[str, Any]],
) -> None:
    rows = {row["name"]: row for row in bench_result[1]["workers"]}
    assert list(rows) == ["one_per_block", "six_workers", "six_workers_equal_text"]
    assert rows["six_workers"]["trained_steps"] > rows["one_per_block"]["trained_steps"]
    assert (
        bench_result[1]["six_worker_cost"]
        == rows["six_workers"]["valid_ce"] - rows["one_per_block"]["valid_ce"]
    )


def test_distant_hosts_learn_and_every_byte_is_counted(
    bench_result: tuple[Path, dict[str, Any]],
) -> None:
    figures = bench_result[1]["hosts"]
    assert figures["start_ce"] > figures["end_ce"] + 1
    assert figures["workers"] == 5
    assert figures["slow_workers"] == 1
    assert 0 < figures["utilisation"] <= 1
    assert 0.5 < figures["goodput"] <= 1
    assert figures["ce_per_gb"] == pytest.approx(
        (figures["start_ce"] - figures["end_ce"]) / figures["gb"]
    )
    assert figures["wire_gb"] == pytest.approx(figures["gb"], rel=0.5), (
        "bodies as the coordinator counts them, bytes as the link does"
    )


def test_the_ladder_gets_smaller_and_names_the_default(
    bench_result: tuple[Path, dict[str, Any]],
) -> None:
    rows = bench_result[1]["ladder"]
    assert [row["name"] for row in rows] == list(RUNGS)
    ratios = [row["bytes_ratio"] for row in rows]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] < 0.1 < ratios[0] <= 1
    assert rows[0]["ce_cost"] == 0
    assert all(row["bytes_per_update"] >= row["sent_per_update"] > 0 for row in rows)
    assert bench_result[1]["ladder_default"] == "int2"


def test_late_updates_cost_work_and_no_quality(
    bench_result: tuple[Path, dict[str, Any]],
) -> None:
    rows = bench_result[1]["participation"]
    assert [row["in_time"] for row in rows] == list(SHARES)
    whole, _, few, none = rows
    assert whole["dropped"] == 0 < few["dropped"] and few["updates"] == whole["updates"]
    assert few["trained_steps"] > whole["trained_steps"]
    assert abs(few["cost"]) < 0.3 < none["cost"]
    assert none["updates"] == none["versions"] == 0 < none["trained_steps"]


def test_outer_steps_are_compared_at_two_task_lengths(
    bench_result: tuple[Path, dict[str, Any]],
) -> None:
    rows = [(row["outer"], row["task_steps"]) for row in bench_result[1]["outer"]]
    assert rows == [
        (outer, steps) for steps in SCALES["tiny"].outer_tasks for outer in ("average", "nesterov")
    ]


def test_what_is_done_is_not_run_again_and_a_part_can_be_asked_for(
    bench_result: tuple[Path, dict[str, Any]],
) -> None:
    folder, result = bench_result
    assert (folder / "transport.png").stat().st_size > 10_000
    again = bench(folder, "--part", "ladder")
    assert again.returncode == 0, again.stderr
    again_result = json.loads(again.stdout)
    assert again_result["ladder"] == result["ladder"]
    assert "hosts" not in again_result


def test_smallest_rung_within_the_bound() -> None:
    rows = [
        {"name": "none", "bytes_ratio": 1.0, "ce_cost": 0.0},
        {"name": "int8", "bytes_ratio": 0.25, "ce_cost": 0.004},
        {"name": "int4", "bytes_ratio": 0.12, "ce_cost": 0.006},
    ]
    assert smallest(rows) == "int8"
    assert smallest(rows, bound=0.01) == "int4"


def test_a_timesheet_counts_training_and_what_came_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    sheet = Timesheet(began=0.0)
    sheet.record("joined")
    sheet.record("task", task=1, steps=2)
    sheet.record("step")
    sheet.record("step")
    sheet.record("accepted", task=1, bytes=10)
    sheet.record("task", task=2, steps=1)
    sheet.record("step")
    sheet.record("refused", task=2)
    monkeypatch.undo()
    assert (
        sheet.training,
        sheet.trained,
        sheet.accepted,
        sheet.updates,
        sheet.refused,
        sheet.sent,
    ) == (5.0, 3, 2, 1, 1, 10)
    workers = [
        {"training": 5.0, "seconds": 10.0, "accepted": 2, "trained": 3},
        {"training": 10.0, "seconds": 10.0, "accepted": 3, "trained": 3},
    ]
    assert utilisation(workers) == 0.75
    assert goodput(workers) == pytest.approx(5 / 6)


def test_a_braked_process_gets_a_fifth() -> None:
    spin = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(spin) as free, subprocess.Popen(spin) as slow, Brake() as brake:
        try:
            brake.add(free.pid, 1.0)
            brake.add(slow.pid, 5.0)
            start = processor_seconds(slow.pid) or 0.0
            begun = processor_seconds(free.pid) or 0.0
            end = time.monotonic() + 30
            while (processor_seconds(free.pid) or 0.0) - begun < 1.5 and time.monotonic() < end:
                time.sleep(0.05)
            used = (processor_seconds(slow.pid) or 0.0) - start
            assert 0.1 < used < 0.5 * ((processor_seconds(free.pid) or 0.0) - begun)
            os.kill(slow.pid, 0)
        finally:
            free.kill()
            slow.kill()
    assert processor_seconds(slow.pid) is None
