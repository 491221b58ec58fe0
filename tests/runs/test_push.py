"""Uploads to the hub: one commit, nothing twice, and a sentence for all that goes wrong."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from huggingface_hub import constants

from blocktrain.errors import BlockTrainError
from blocktrain.runs.huggingface import push
from blocktrain.runs.huggingface.export import export_run
from blocktrain.runs.huggingface.push import push_run
from conftest import random_model, tiny_config
from support.command import blocktrain
from support.serving import saved
from support.upload_hub import TOKEN, Hub, serve_uploads
from support.waiting import PATIENCE


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(random_model(tiny_config(blocks=2)), tmp_path_factory.mktemp("push") / "run")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub of its own for every test; the client reads its settings when it is imported."""
    with serve_uploads() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def test_a_push_is_one_commit_of_what_export_writes(hub: Hub, run: Path, tmp_path: Path) -> None:
    hub.private["ada/model"] = False
    hub.files["ada/model"] = {"model-00001-of-00002.safetensors": b"old", "notes.md": b"mine"}
    assert push_run(run, "model") == f"{hub.url}/ada/model"
    export_run(run, tmp_path / "hf", name="ada/model")
    written = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    assert hub.files["ada/model"] == {**written, "notes.md": b"mine"}
    assert hub.commits == 1 and not list(run.glob(".push-*"))

    (tmp_path / "hf" / "README.md").write_text("---\nlicense: mit\n---\n\n# A better card\n")
    push_run(tmp_path / "hf", "ada/model")
    assert hub.files["ada/model"]["README.md"].endswith(b"# A better card\n")
    assert hub.commits == 2 and len(hub.uploads) == 1  # the weights were there already


def test_a_push_that_broke_off_does_not_send_again_what_arrived(hub: Hub, run: Path) -> None:
    hub.broken = True
    with pytest.raises(BlockTrainError, match="the hub refused: the hub is being repaired; push"):
        push_run(run, "model")
    hub.broken = False
    push_run(run, "model")
    assert hub.commits == 1 and len(hub.uploads) == 1


def test_private_is_private(hub: Hub, run: Path) -> None:
    push_run(run, "ada/secret", private=True)
    assert hub.private["ada/secret"]
    push_run(run, "ada/open")
    with pytest.raises(BlockTrainError, match="ada/open is public on the hub, and --private does"):
        push_run(run, "ada/open", private=True)
    assert hub.commits == 2


@pytest.mark.parametrize(
    ("name", "token", "sentence"),
    [
        ("a b", TOKEN, "'a b' cannot be a name on the hub: write MODEL or OWNER/MODEL"),
        ("a/b/c", TOKEN, "'a/b/c' cannot be a name on the hub"),
        ("bob/model", TOKEN, "this token may not write to bob/model: use a token with write"),
        ("model", "hf_wrong", "the hub does not know this token: run `hf auth login`, or set"),
        ("model", "", "there is no token for the hub: run `hf auth login`, or set HF_TOKEN"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(
    hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch, name: str, token: str, sentence: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(BlockTrainError) as refusal:
        push_run(run, name)
    assert sentence in str(refusal.value) and "\n" not in str(refusal.value)
    assert hub.commits == 0 and not hub.uploads and not list(run.glob(".push-*"))


def test_a_hub_that_does_not_answer(hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "FIRST_SECONDS", 0.2)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(BlockTrainError, match="the hub does not answer"):
            push_run(run, "model")
    with pytest.raises(BlockTrainError, match="the hub does not answer"):
        push_run(run, "model")  # now nothing listens there
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(BlockTrainError, match="HF_HUB_OFFLINE is set: unset it"):
        push_run(run, "model")


def test_what_cannot_be_exported_makes_nothing_on_the_hub(
    hub: Hub, run: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    (folder / "model" / "config.json").unlink()
    with pytest.raises(BlockTrainError, match="has no finished model"):
        push_run(folder, "model")
    assert not hub.private


def test_the_command_prints_the_address(hub: Hub, run: Path, tmp_path: Path) -> None:
    words = ("push", str(run), "model", "--json")
    done = blocktrain(*words, cwd=tmp_path, timeout=PATIENCE, **hub.environment)
    assert json.loads(done.stdout) == {"run": str(run), "url": f"{hub.url}/ada/model"}, done.stderr
    assert hub.commits == 1
