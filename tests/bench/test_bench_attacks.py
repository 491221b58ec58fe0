"""The attack matrix: attacks change nothing where the defences hold, and ruin the control."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from blocktrain.bench import commands
from blocktrain.bench.attacks.matrix import MatrixOptions, MatrixSizes, jobs, require_attacks
from blocktrain.bench.attacks.trial import AttackTrial, run_trial
from blocktrain.config import make_config
from blocktrain.errors import ConfigError
from blocktrain.learning.corpus.source import Source
from conftest import write_text

SETTINGS = {
    "blocks": 1,
    "compose": "pool",
    "width": 16,
    "heads": 2,
    "layers_per_block": 1,
    "context": 16,
    "batch": 2,
    "steps": 12,
}
SIZES = MatrixSizes(SETTINGS, members=5, task_steps=4, valid_tokens=512)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "train.txt").write_text(write_text(1200, seed=1))
    (folder / "valid.txt").write_text(write_text(60, seed=2))
    return Source(str(folder), None, tmp_path / "cache")


def test_what_is_refused_changes_nothing(source: Source) -> None:
    clean = AttackTrial(make_config(SETTINGS), source, 3, 0, "", True, 4, 512)
    expected, found = (
        run_trial(trial) for trial in (clean, replace(clean, attackers=2, attack="zeros"))
    )
    assert found["ce"] == expected["ce"] and found["merged"] == {"honest": 9}
    assert set(found["left_out"]["attackers"]) == {"no_change"}
    assert 0 < found["checking"] < 1
    believed = run_trial(replace(clean, attackers=2, attack="flip-100", defended=False))
    assert believed["merged"]["attackers"] > 0 and believed["ce"] > expected["ce"]


def test_the_matrix_continues_with_what_is_missing(source: Source, tmp_path: Path) -> None:
    options = MatrixOptions(
        tmp_path / "out", "tiny", SIZES, source, ("nan",), (25,), 1, 0, 1, "bench attacks"
    )
    planned = [job.name for job in jobs(options)]
    assert len(planned) == 4
    result = commands.attacks(options)
    (row,) = result["rows"]
    assert (row["attack"], row["attackers"], row["attackers_merged"]) == ("nan", 2, 0.0)
    assert row["difference"] == 0.0 and result["harmed_cells"] == 0
    assert (options.folder / "attacks.png").stat().st_size > 1000
    options.result(planned[-1]).unlink()
    assert [job.name for job in jobs(options)] == planned[-1:]


def test_an_unknown_attack_is_refused() -> None:
    with pytest.raises(ConfigError, match="no attack is named 'zeroes'; known: zeros, noise"):
        require_attacks(["zeroes"])
