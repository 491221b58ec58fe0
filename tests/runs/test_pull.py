"""`pull`: a model out of a coordinator's run, and the update of a folder that was pulled before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from blocktrain.coordinator.policy import Policy
from blocktrain.errors import RunError
from blocktrain.runs.folder import load_model
from blocktrain.runs.pull import pull
from blocktrain.web.client import LocalClient
from support.worker_run import WorkerRun, worker_runs


@pytest.fixture
def place(tmp_path: Path, corpus_folder: Path) -> Iterator[Callable[..., WorkerRun]]:
    with worker_runs(tmp_path / "runs", corpus_folder) as make:
        yield make


class CountingClient(LocalClient):
    """Remembers which blobs were fetched."""

    def __init__(self, run: WorkerRun) -> None:
        super().__init__(run.coordinator)
        self.fetched: list[str] = []

    def blob(self, name: str, start: int = 0, worker: str = "") -> Iterator[bytes]:
        self.fetched.append(name)
        return super().blob(name, start, worker)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "model").glob("block-*")}


def test_a_pulled_folder_is_updated_and_only_changed_blocks_are_fetched(
    place: Callable[..., WorkerRun], tmp_path: Path
) -> None:
    run, out = place(Policy.exact(5), blocks=3), tmp_path / "pulled"
    assert pull(LocalClient(run.coordinator), out).summary == dict.fromkeys(
        ("block-1", "block-2", "block-3"), 0
    )
    run.worker().run(finishing=lambda: len(run.events("accepted")) >= 1)
    changed_block = run.events("accepted")[0]["block"]
    client = CountingClient(run)
    versions = pull(client, out)
    assert versions.summary[f"block-{changed_block}"] == 1
    assert client.fetched == [versions.versions[changed_block].weights.sha256]
    load_model(out, torch.device("cpu"))

    client = CountingClient(run)
    before = files(out)
    pull(client, out)
    assert client.fetched == [] and files(out) == before

    run.worker().run()
    pull(LocalClient(run.coordinator), out)
    pull(LocalClient(run.coordinator), tmp_path / "at once")
    assert files(out) == files(tmp_path / "at once")
    load_model(out, torch.device("cpu"))


def test_a_pulled_folder_is_updated_by_deltas(
    place: Callable[..., WorkerRun], tmp_path: Path
) -> None:
    policy = Policy.exact(2).model_copy(
        update={"compression": "int4", "version_compression": "int4"}
    )
    run, out = place(policy, blocks=2), tmp_path / "pulled"
    pull(LocalClient(run.coordinator), out)
    run.worker().run(finishing=lambda: len(run.events("accepted")) >= 4)
    client = CountingClient(run)
    pull(client, out)
    sent = {update.payload_sha256 for update in run.updates()}
    assert client.fetched and set(client.fetched) <= sent, "each version is one update"
    pull(LocalClient(run.coordinator), tmp_path / "at once")
    assert files(out) == files(tmp_path / "at once")


def test_an_update_that_was_interrupted_is_repeated(
    place: Callable[..., WorkerRun], tmp_path: Path
) -> None:
    run, out = place(Policy.exact(5), blocks=2), tmp_path / "pulled"
    pull(LocalClient(run.coordinator), out)
    good = files(out)
    (out / "model" / "block-1.safetensors").write_bytes(b"half of it")
    (out / "model" / "config.json").unlink()
    client = CountingClient(run)
    versions = pull(client, out)
    assert client.fetched == [versions.versions[1].weights.sha256]
    assert files(out) == good
    load_model(out, torch.device("cpu"))


def test_other_folders_are_refused(place: Callable[..., WorkerRun], tmp_path: Path) -> None:
    first, second = place(Policy.exact(5), blocks=2), place(Policy.exact(5), blocks=2)
    pull(LocalClient(first.coordinator), tmp_path / "pulled")
    with pytest.raises(RunError, match=r"was pulled from run .*; name another folder with --out"):
        pull(LocalClient(second.coordinator), tmp_path / "pulled")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear diary")
    with pytest.raises(RunError, match="was not pulled; name a new folder with --out"):
        pull(LocalClient(first.coordinator), tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["diary.txt"]
