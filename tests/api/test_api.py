"""The Python API does what the commands do, with the same results."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch

import blocktrain as bt
from blocktrain.api.model import TextOptions
from blocktrain.api.options import CoordinateOptions, ServeOptions, TrainOptions
from blocktrain.cli.coordinator import CoordinatorFlags, ListenFlags
from blocktrain.cli.flags import BeginFlags
from blocktrain.cli.generate import TextFlags
from blocktrain.cli.serve import AnswerFlags, ApiFlags, RouteFlags
from blocktrain.cli.train import TrainFlags
from blocktrain.config import DERIVED, Config
from blocktrain.coordinator.policy import Policy
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
    training = bt.Training(text, out, track="tensorboard", **TINY)
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


def test_wrong_input_is_one_sentence(model: bt.TrainedModel, text: Path, tmp_path: Path) -> None:
    api: Any = bt  # as a script without types calls it
    wrong_prompts: list[Any] = [5, None, ["a"], "\ud800"]
    with pytest.raises(ConfigError, match="reads 1 to 32"):
        model.logits("x" * 33)
    with pytest.raises(ConfigError, match="0 to 255"):
        model.generate([1, 256])
    for options, sentence in (
        ({"max_tokens": 0}, "max_tokens: must be at least 1"),
        ({"mode": "fast"}, "mode: must be 'autoregressive', 'exact' or 'sweep'"),
        ({"temperature": "hot"}, "temperature: must be a number"),
        ({"seed": -1}, "seed: must be at least 0"),
        ({"sweeps": 2}, "for --mode sweep"),
        ({"tempo": 1}, "unknown option 'tempo'; known: mode"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            model.stream("x", **options)  # at once, not when it is read
    for prompt in wrong_prompts:
        with pytest.raises(ConfigError, match=r"give a text|cannot be written as UTF-8"):
            model.generate(prompt)
    with pytest.raises(ConfigError, match="threads: must be at least 1"):
        bt.TrainedModel(model.folder, threads=0)
    with pytest.raises(bt.BlockTrainError, match="not a run folder"):
        bt.TrainedModel(tmp_path)
    with pytest.raises(ConfigError, match="unknown setting 'widht'"):
        api.train("stdlib", tmp_path / "new", widht=3)
    new: Any = tmp_path / "new"
    for flags, sentence in (
        ({"threads": 0}, "threads: must be at least 1"),
        ({"reference": "perhaps"}, "reference: must be true or false"),
        ({"eval_bytes": -1}, "eval_bytes: must be at least 1"),
        ({"track": "comet"}, "track: must be 'tensorboard', 'wandb' or 'mlflow'"),
        ({"freeze": True}, "need --from RUN"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            api.train(text, new, **TINY | flags)
    for data in (5, ["text.txt"]):
        with pytest.raises(ConfigError, match="data: must be a text"):
            api.train(data, new)
    with pytest.raises(ConfigError, match="score_bytes: must be a whole number"):
        api.coordinate(text, new, score_bytes="all")
    assert not new.exists()
    with pytest.raises(ConfigError, match=r"mode: must be .*'exact'"):
        api.serve(model, mode="fast")
    with pytest.raises(ConfigError, match="unknown option 'modus'; known: reference, route"):
        api.serve(model, modus="exact")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = bt.nothing


def test_options_are_the_flags_of_the_commands() -> None:
    def flags(*kinds: Any) -> set[str]:
        return {field.name for kind in kinds for field in fields(kind)}

    settings = Config.model_fields.keys() - set(DERIVED) | {"size"}
    begin = settings | flags(BeginFlags) - {"data", "from_"} | {"parent", "config"}
    assert begin | flags(TrainFlags) | {"resume", "preset"} == set(get_type_hints(TrainOptions))
    beside, policy = flags(CoordinatorFlags) - {"exit", "track"}, set(Policy.model_fields)
    coordinate = begin | flags(ListenFlags) | policy | beside
    assert coordinate == set(get_type_hints(CoordinateOptions))
    serve = flags(RouteFlags, ApiFlags, AnswerFlags) - {"listen"} | {"reference"}
    assert serve == set(get_type_hints(ServeOptions))
    assert flags(TextFlags) - {"max_tokens"} == set(get_type_hints(TextOptions))


def test_ids_may_be_of_numpy_or_torch(model: bt.TrainedModel) -> None:
    ids = model.encode("the ")
    assert model.encode(np.array(ids)) == model.encode(torch.tensor(ids)) == ids


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
    before = model.evaluate(other)["composed"].bits_per_byte
    tuned = bt.train(other, tmp_path / "tuned", parent=model, new_fusion=True, steps=20)
    assert tuned.evaluate()["composed"].bits_per_byte < before - 0.5


def test_a_run_is_coordinated_worked_for_and_pulled(text: Path, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    with bt.coordinate(
        str(text), tmp_path / "run", token="s", task_steps=12, fusion_share=1.0, **TINY
    ) as run:
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
