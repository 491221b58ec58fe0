"""`blocktrain plan` as a command: its text, its JSON, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

from blocktrain.devices import DEVICES
from blocktrain.runs.fleet import FleetMachine
from blocktrain.shapes import model_parameters
from blocktrain.sizes import SIZES, make_sized_config
from support.command import blocktrain
from support.tokenizer_files import byte_level

FLEET = """
[[machine]]
name = "desktops"
count = 12
device = "rtx4090"
hours = 10

[[machine]]
name = "laptops"
count = 3
device = "cpu"
memory = "1 GB"
"""


def test_a_plan_is_printed_before_anybody_starts(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(FLEET)
    done = blocktrain("plan", "--size", "350M", "--fleet", "fleet.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("parameters in 8 blocks", "memory", "fetched for a task", "time to", "12 x desk"):
        assert words in done.stdout
    assert "3 x laptops" in done.stdout
    assert "no: training a block takes" in done.stdout
    assert list(tmp_path.iterdir()) == [tmp_path / "fleet.toml"], "a plan leaves nothing behind"


def test_an_impossible_fleet_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(FLEET)
    words = ["plan", "--size", "7B", "--batch", "512", "--fleet", "fleet.toml", "--json"]
    done = blocktrain(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("blocktrain: this run is not possible: no machine has the memory")
    assert done.stderr.count("\n") == 1
    result = json.loads(done.stdout)
    assert not result["possible"]
    assert result["settings"]["batch"] == 512
    assert [machine["fusion"] for machine in result["machines"]] == [False, False]


GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "sizes.md"


def test_the_guide_has_the_table_of_sizes() -> None:
    for size in SIZES:
        c = make_sized_config({"size": size})
        row = (
            f"| `{size}` | {model_parameters(c):,} | {c.blocks} × {c.layers_per_block} | {c.width} "
            f"| {c.heads} | {c.context} | `{c.tokenizer}` | {c.batch} ({c.rows}) | {c.steps:,} "
            f"| {c.learning_rate:g} | {c.fusion_learning_rate:g} |"
        )
        assert row in GUIDE.read_text()


def test_the_guide_shows_what_plan_prints() -> None:
    fleet = GUIDE.with_name("fleet.toml")
    assert fleet.read_text() in GUIDE.read_text()
    done = blocktrain("plan", "--size", "350M", "--fleet", fleet.name, cwd=fleet.parent)
    assert done.returncode == 0
    assert done.stdout in GUIDE.read_text()


def test_the_guide_names_all_devices_and_keys() -> None:
    for name in (*DEVICES, *FleetMachine.model_fields):
        assert f"`{name}`" in GUIDE.read_text()


def test_a_vocabulary_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(byte_level(400))
    words = ["plan", "--tokenizer", "tokenizer.json", "--json"]
    plain, sized = (
        json.loads(blocktrain(*words, *more, cwd=tmp_path).stdout)
        for more in ([], ["--size", "10M"])
    )
    assert plain["settings"]["vocabulary"] == sized["settings"]["vocabulary"] > 256
    assert abs(sized["parameters"] - 10e6) < 1e6
