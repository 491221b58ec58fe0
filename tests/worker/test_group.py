"""`blocktrain worker --devices` and `--cores`: several workers of one machine with one command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktrain.cli.run import DeviceFlags
from blocktrain.coordinator.policy import Policy
from blocktrain.errors import ConfigError
from blocktrain.watch.server import Listen, serve_coordinator
from blocktrain.worker.command import WorkerOptions
from blocktrain.worker.group import label_machines
from support.command import start
from support.waiting import PATIENCE, until
from support.worker_run import WorkerRun, worker_runs


@pytest.fixture
def place(tmp_path: Path, corpus_folder: Path) -> Iterator[Callable[..., WorkerRun]]:
    with worker_runs(tmp_path, corpus_folder) as make:
        yield make


def finish(group: subprocess.Popen[str]) -> tuple[int, list[dict[str, Any]]]:
    """The exit code and the events of a group that is about to end."""
    try:
        out, _ = group.communicate(timeout=PATIENCE)
    finally:
        group.kill()
    return group.returncode, [json.loads(line) for line in out.splitlines()]


def workers_of(here: WorkerRun) -> set[str]:
    return {update.worker for update in here.updates()}


def children(process: int) -> list[int]:
    return [
        int(child)
        for task in Path(f"/proc/{process}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


def job_processes(group: int) -> list[int]:
    """The processes of the workers: the server that forks them is the only parent among them."""
    return [grandchild for child in children(group) for grandchild in children(child)]


def test_two_workers_train_a_run_and_a_second_start_continues(
    place: Callable[..., WorkerRun], tmp_path: Path
) -> None:
    here = place(Policy.exact(5), blocks=2, compose="pool", steps=10**6)
    with serve_coordinator(here.coordinator, Listen(token="secret")) as url:
        command = ("worker", url, "--token", "secret", "--json")
        group = start(*command, "--devices", "cpu,cpu", "--name", "tower", cwd=tmp_path)
        until(lambda: len(workers_of(here)) == 2)
        names = {worker.name for worker in here.coordinator.status().workers}
        assert names == {"tower-cpu-1", "tower-cpu-2"}
        group.send_signal(signal.SIGINT)  # every worker finishes its task
        code, events = finish(group)
        assert code == 0
        for label in ("cpu-1", "cpu-2"):
            kinds = [event["kind"] for event in events if event["name"] == label]
            assert kinds[0] == "joined" and kinds[-1] == "left"
            assert [k for k in kinds if k in ("accepted", "trained")][-1] == "accepted"
        before = len(here.updates())
        fetched = [event["sha256"] for event in events if event["kind"] == "fetching"]

        group = start(*command, "--cores", "2", cwd=tmp_path)
        until(lambda: len(here.updates()) > before + 1)
        group.terminate()  # at once: tasks are saved where they are
        code, events = finish(group)
        assert code == 0
        assert {event["name"] for event in events} == {"cpu-1", "cpu-2"}
        assert "fresh" not in {event["kind"] for event in events}, "each goes on with its state"
    assert len(workers_of(here)) == 2, "the keys of the first start"
    shards = {path.stem for path in (tmp_path / "cache" / "shards").glob("*.tok")}
    assert sorted(shards) == sorted(shards & set(fetched)), "every shard once, by one of the two"
    assert len([name for name in fetched if name in shards]) == len(shards)


def test_a_worker_that_dies_is_named_and_the_other_goes_on(
    place: Callable[..., WorkerRun], tmp_path: Path
) -> None:
    here = place(Policy.exact(5), blocks=2, compose="pool", steps=10**6)
    with serve_coordinator(here.coordinator, Listen(token="secret")) as url:
        group = start(
            "worker", url, "--token", "secret", "--devices", "cpu,cpu", "--json", cwd=tmp_path
        )
        until(lambda: len(workers_of(here)) == 2)
        victim, _ = job_processes(group.pid)
        os.kill(victim, signal.SIGKILL)
        until(lambda: len(job_processes(group.pid)) == 1)
        before = len(here.updates())
        until(lambda: len(here.updates()) > before)
        group.terminate()
        code, events = finish(group)
    assert code == 2
    (failed,) = [event for event in events if event["kind"] == "failed"]
    assert "killed" in failed["reason"]
    error = (tmp_path / "worker.err").read_text()
    assert f"1 of 2 workers failed; {failed['name']}: the process was killed" in error


def test_labels_names_and_memory() -> None:
    options = WorkerOptions("http://x", "", "auto", "", "tower", Path())
    machines = label_machines(options, ["cpu", "cpu"])
    assert list(machines) == ["cpu-1", "cpu-2"]
    (alone,) = label_machines(options, ["cpu"]).values()
    assert alone.name == "tower-cpu"
    assert {machine.memory for machine in machines.values()} == {alone.memory // 2}
    with pytest.raises(ConfigError, match="names each device"):
        label_machines(options, ["auto"])
    with pytest.raises(ConfigError, match="must be cpu, cuda"):
        label_machines(options, ["gpu"])


def test_devices_that_are_not_there_are_one_sentence() -> None:
    options = WorkerOptions("http://x", "", "auto", "", "", Path())
    assert DeviceFlags(devices="0, 1,cpu", cores=1).several() == ["cuda:0", "cuda:1", "cpu", "cpu"]
    assert DeviceFlags().several() == []
    if not torch.cuda.is_available():
        with pytest.raises(
            ConfigError, match=r"device=cuda:0, but this torch sees no CUDA .*--cores"
        ):
            label_machines(options, ["cuda:0", "cuda:1"])
    with pytest.raises(ConfigError, match="--device is for one worker"):
        DeviceFlags(device="cpu", devices="0").several()
