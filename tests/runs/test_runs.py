"""Run folders: written whole, checked when read, refused with a sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from blocktrain.config import make_config, read_settings
from blocktrain.errors import BlockTrainError, RunError
from blocktrain.files import write_atomic
from blocktrain.runs.folder import (
    RunFolder,
    create_run,
    load_block,
    load_model,
    open_run,
    publish,
    read_json,
    seal,
    write_json,
)
from blocktrain.watch.feed import EventLog, read_events
from conftest import random_model, tiny_config

CPU = torch.device("cpu")
MODEL = random_model(tiny_config(blocks=2))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    run = create_run(folder, MODEL.config, "stdlib")
    assert MODEL.fusion is not None
    publish(run, 1, MODEL.blocks[0])
    publish(run, 2, MODEL.fusion)
    seal(run, MODEL.config, "stdlib", torch.tensor([0.75]))
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_what_is_written_is_what_is_read(finished: Path) -> None:
    run, *rest = open_run(finished)
    assert (run.folder, *rest) == (finished, MODEL.config, "stdlib", False, None)
    settings, about = read_settings(
        finished / "config.toml"
    )  # which --config of another run may name
    assert make_config(settings) == MODEL.config and about["data"] == "stdlib"
    model = load_model(finished, CPU)
    assert model.config == MODEL.config
    assert model.pool_weights is not None and model.pool_weights.tolist() == [0.75]
    text = torch.arange(16)[None]
    assert torch.equal(model.scorer()(text, 0), MODEL.scorer()(text, 0))
    assert (
        json.loads((finished / "model" / "config.json").read_text())["fingerprint"]
        == MODEL.config.fingerprint
    )


def test_equal_weights_are_equal_files(tmp_path: Path) -> None:
    for n in range(12):
        publish(RunFolder(tmp_path / str(n)), 1, MODEL.blocks[0])
    assert len({RunFolder(tmp_path / str(n)).weights(1).read_bytes() for n in range(12)}) == 1


def flip_a_byte(folder: Path) -> None:
    path = folder / "model" / "block-1.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


def swap_blocks(folder: Path) -> None:
    shutil.copy(folder / "model" / "block-2.safetensors", folder / "model" / "block-1.safetensors")


def lose_a_block(folder: Path) -> None:
    (folder / "model" / "block-2.safetensors").unlink()


def change(key: str, value: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "model" / "config.json"
        write_json(path, {**read_json(path), key: value})

    return damage


def garble(folder: Path) -> None:
    (folder / "model" / "config.json").write_bytes(b"\xff{")


def not_an_object(folder: Path) -> None:
    (folder / "model" / "config.json").write_text("[1]")


def unfinished(folder: Path) -> None:
    (folder / "model" / "config.json").unlink()


def foreign(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (flip_a_byte, "block-1.safetensors is damaged or foreign: its hash"),
        (swap_blocks, "block-1.safetensors is damaged or foreign: its hash"),
        (lose_a_block, "block-2.safetensors is missing"),
        (
            change("format", "blocktrain-model-1"),
            r"format this version reads \(blocktrain-model-2\)",
        ),
        (change("files", None), "not a BlockTrain model"),
        (change("settings", {"blocks": 0}), "blocks: "),
        (change("settings", {**MODEL.config.model_dump(), "width": 32}), "was changed"),
        (change("pool_weights", "a"), "pool_weights"),
        (change("pool_weights", [1.0, 2.0]), "pool_weights"),
        (garble, "config.json is damaged, it is not JSON"),
        (not_an_object, "does not hold an object"),
        (unfinished, "its training is not finished; continue with --resume"),
        (foreign, "it is not a run folder"),
    ],
)
def test_a_model_that_is_not_what_it_should_be(
    damage: Callable[[Path], None], sentence: str, folder: Path
) -> None:
    damage(folder)
    with pytest.raises(BlockTrainError, match=sentence) as refused:
        load_model(folder, CPU)
    assert "\n" not in str(refused.value)


def test_a_folder_that_is_no_run(tmp_path: Path, folder: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(RunError, match="is not a run folder"):
            open_run(path)
        with pytest.raises(RunError, match="it is not a run folder"):
            load_model(path, CPU)
    path = folder / "config.toml"
    for change, sentence in (
        ("", "lacks data, reference or fingerprint"),
        (path.read_text() + "colour = 1\ntaste = 2\n", "unknown setting 'colour', 'taste'; known"),
        (path.read_text().replace("blocks = ", "blocks = -"), "blocks: "),
        (path.read_text().replace("seed = 0", "seed = 5"), "was changed"),
    ):
        path.write_text(change)
        with pytest.raises(RunError, match=sentence):
            open_run(folder)


def test_a_block_of_another_shape_or_cut_short_is_refused(folder: Path) -> None:
    with pytest.raises(RunError, match=r"does not fit this model \(first difference: \S+\)"):
        load_block(RunFolder(folder), MODEL.config.replace(width=32), 1, CPU)
    path = RunFolder(folder).weights(1)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RunError, match="is damaged"):
        load_block(RunFolder(folder), MODEL.config, 1, CPU)
    path.unlink()
    with pytest.raises(RunError, match="cannot read"):
        load_block(RunFolder(folder), MODEL.config, 1, CPU)


def test_a_folder_that_holds_something_is_left_untouched(tmp_path: Path, finished: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(RunError, match="is not empty; continue it with --resume"):
        create_run(tmp_path, MODEL.config, "stdlib")
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]
    before = sorted((path, path.stat().st_mtime_ns) for path in finished.rglob("*"))
    with pytest.raises(RunError, match="is not empty"):
        create_run(finished, MODEL.config, "stdlib")
    assert sorted((path, path.stat().st_mtime_ns) for path in finished.rglob("*")) == before


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run")):
        with pytest.raises(RunError, match="cannot write the run folder"):
            create_run(folder, MODEL.config, "stdlib")
    create_run(tmp_path / "deep" / "run", MODEL.config, "stdlib")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    with pytest.raises(TypeError):
        write_atomic(path, "no bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"new"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_events_are_read_while_written_and_without_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert read_events(path) == []
    log = EventLog(path)
    log.write("start", steps=3)
    assert [(event["kind"], event["steps"]) for event in read_events(path)] == [("start", 3)]
    log.close()
    with path.open("a") as file:
        file.write('{"kind": "st')
    assert len(read_events(path)) == 1
    again = EventLog(path)
    again.write("step")
    again.close()
    assert [event["kind"] for event in read_events(path)] == ["start", "step"]
