"""The Python API does what the commands do, with the same results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

import blocktrain as bt
from blocktrain.errors import ConfigError, RunError
from support.command import blocktrain

TINY: dict[str, Any] = {
    "blocks": 2,
    "layers_per_block": 1,
    "width": 16,
    "heads": 2,
    "context": 32,
    "batch": 4,
    "steps": 24,
    "warmup": 2,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    lines = (f"the {i % 7} birch and the {i % 5} cedar grow in row {i}\n" for i in range(4000))
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def training(text: Path, tmp_path_factory: pytest.TempPathFactory) -> bt.Training:
    """A finished one."""
    out = tmp_path_factory.mktemp("runs") / "first"
    training = bt.Training(str(text), out, track=["tensorboard"], **TINY)
    with pytest.raises(RunError, match="not finished"):
        _ = training.model
    events = list(training)
    assert {event["kind"] for event in events} >= {"start", "step", "trained"}
    assert {event["block"] for event in events if event["kind"] == "step"} == {1, 2}
    return training


@pytest.fixture(scope="module")
def model(training: bt.Training) -> bt.TrainedModel:
    return training.model


def test_training_leaves_the_folder_of_the_command(training: bt.Training) -> None:
    for name in ("config.toml", "events.jsonl", "report.html", "result.json", "tensorboard"):
        assert (training.folder / name).exists()
    assert training.result is not None and "composed" in training.result["valid_ce"]


def test_text_scores_and_logits_are_those_of_the_commands(model: bt.TrainedModel) -> None:
    command = blocktrain(
        *("generate", str(model.folder), "--prompt", "the ", "--max-tokens", "40", "--seed", "5"),
        cwd=model.folder,
    )
    written = model.generate("the ", max_tokens=40, seed=5)
    assert command.stdout.rstrip("\n") == ("the " + written).rstrip("\n")
    assert "".join(model.stream("the ", max_tokens=40, seed=5)) == written
    assert model.generate("the ", max_tokens=40, seed=5, mode="exact") == written

    scores = model.evaluate()
    assert set(scores) >= {"composed", "block_1", "pool", "fuse"}
    composed = scores["composed"]
    assert composed.nats_per_byte == pytest.approx(composed.nats_per_token)  # tokens are bytes
    assert composed.bits_per_byte > composed.nats_per_byte
    command = blocktrain("evaluate", str(model.folder), "--json", cwd=model.folder)
    models = json.loads(command.stdout)["models"]
    assert models["composed"]["nats_per_byte"] == pytest.approx(composed.nats_per_byte, rel=1e-6)

    logits = model.logits("the birch")
    assert logits.shape == (9, 256)
    assert (
        int(logits[-1].argmax())
        == model.encode(model.generate("the birch", max_tokens=1, temperature=0))[0]
    )


def test_wrong_input_is_one_sentence(model: bt.TrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reads 1 to 32"):
        model.logits("x" * 33)
    with pytest.raises(ConfigError, match="0 to 255"):
        model.generate([1, 256])
    with pytest.raises(ConfigError, match="max_tokens must be at least 1"):
        model.generate("x", max_tokens=0)
    with pytest.raises(bt.BlockTrainError, match="not a run folder"):
        bt.TrainedModel(tmp_path)
    with pytest.raises(ConfigError, match="unknown setting 'widht'"):
        bt.train("stdlib", tmp_path / "new", widht=3)
    assert not (tmp_path / "new").exists()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = bt.nothing


def test_a_training_that_is_left_goes_on_to_the_same_weights(
    training: bt.Training, text: Path, tmp_path: Path
) -> None:
    again = bt.Training(str(text), tmp_path / "again", **TINY)
    for event in again:
        if event["kind"] == "step":
            break
    with pytest.raises(RunError, match="not finished"):
        _ = again.model
    model = bt.train(out=tmp_path / "again", resume=True)
    assert model.manifest.model_hash == training.model.manifest.model_hash


def test_a_model_is_continued_on_other_text(model: bt.TrainedModel, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("fir and pine, pine and fir\n" * 3000)
    before = model.evaluate(str(other))["composed"].bits_per_byte
    tuned = bt.train(str(other), tmp_path / "tuned", parent=model, steps=20)
    assert tuned.evaluate()["composed"].bits_per_byte < before - 0.5


def test_a_run_is_coordinated_worked_for_and_pulled(text: Path, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    with bt.coordinate(str(text), tmp_path / "run", token="s", task_steps=12, **TINY) as run:
        summary = bt.work(run.url, "s", cache=tmp_path / "cache", tasks=1, on_event=events.append)
        assert summary.accepted == 1 and not run.finished
        more = bt.work(run.url, "s", cache=tmp_path / "cache", on_event=events.append)
        assert more.accepted == 3 and run.finished
        run.wait()
        assert len(run.status().blocks) == 2
        shared = run.pull(tmp_path / "model")
    assert {"joined", "task", "step", "accepted", "left"} <= {event["kind"] for event in events}
    assert shared.generate("the ", max_tokens=10)
    with (
        pytest.raises(bt.BlockTrainError, match="other settings"),
        bt.coordinate(str(text), tmp_path / "run", **{**TINY, "width": 32}),
    ):
        pass


def test_a_model_is_served(model: bt.TrainedModel) -> None:
    with bt.serve(model) as server:
        body = {"model": server.model, "prompt": "the ", "max_tokens": 20, "seed": 5}
        request = Request(
            f"{server.url}/v1/completions",
            json.dumps({**body, "temperature": 0.8}).encode(),
            {"Content-Type": "application/json"},
        )
        with urlopen(request, timeout=60) as response:
            answer = json.load(response)
        with pytest.raises(ConfigError, match="cannot listen"):
            bt.serve(model, server.url.removeprefix("http://"))
    assert answer["choices"][0]["text"] == model.generate("the ", max_tokens=20, seed=5)


def test_importing_the_package_loads_no_torch() -> None:
    code = (
        "import blocktrain, sys; assert blocktrain.__version__; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
