"""Versions as deltas: workers fetch little, hold the same bits as everybody, and lose nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blocktrain.audit.audit import audit
from blocktrain.audit.evidence import open_folder
from blocktrain.clock import SimulatedClock
from blocktrain.coordinator.policy import Policy
from blocktrain.protocol import messages as m
from blocktrain.protocol.compression import add_delta
from blocktrain.protocol.identity import new_identity
from blocktrain.protocol.tensors import pack, unpack
from blocktrain.watch.server import WatchedCoordinator, open_coordinator
from support.fake_worker import FakeWorker, as_task, begin, crash, whole_ledger
from support.worker_run import WorkerRun, worker_runs


@pytest.fixture
def place(tmp_path: Path, corpus_folder: Path) -> Iterator[Callable[..., WorkerRun]]:
    with worker_runs(tmp_path, corpus_folder) as make:
        yield make


def versions(run: WorkerRun) -> list[dict[str, Any]]:
    """The bodies of all versions that were made of updates."""
    bodies = [(e.kind, json.loads(e.body)) for e in run.coordinator.ledger().entries]
    return [body for kind, body in bodies if kind == "version" and body["version"] > 0]


def fetched(run: WorkerRun) -> set[str]:
    return {event["sha256"] for event in run.events("fetching")}


def deltas_policy(**changes: Any) -> Policy:
    both = {"compression": "int4", "version_compression": "int4"}
    return Policy(**{**both, "replicas": 1, "task_steps": 4, "clip": None, **changes})


@pytest.mark.parametrize("shape", [{"blocks": 1, "compose": "pool"}, {}], ids=["one", "fuse"])
def test_a_lone_worker_fetches_no_whole_weights(
    place: Callable[..., WorkerRun], shape: dict[str, Any]
) -> None:
    """Version 0 comes from the seed, and the delta of each version is what it sent itself."""
    here = place(deltas_policy(exclusive=True), **shape)
    here.worker().run()
    assert here.coordinator.finished
    made, sent = versions(here), {update.payload_sha256 for update in here.updates()}
    assert {body["delta"]["sha256"] for body in made} == sent
    assert all(body["residual"] is None for body in made)
    weights = {body["weights"]["sha256"] for body in made}
    weights |= {first.weights.sha256 for first in here.coordinator.run.run_blocks}
    assert not fetched(here) & weights
    if here.config.blocks == 1:
        assert not fetched(here) & sent
    here.coordinator.close()
    found = audit(open_folder(here.folder / "coordinator"), retrain=True)
    assert found.ok and found.retrained == len(made) == 3 * here.config.blocks


def rounds_of_two(folder: Path, killed: bool) -> list[dict[str, Any]]:
    """Versions of two updates each; killed: the coordinator is replaced after every answer."""
    policy: dict[str, Any] = {"replicas": 2, "min_replicas": 2, "clip": None}
    policy["version_compression"] = "int2"
    clock = SimulatedClock()
    coordinator = begin(folder, clock, **policy)
    workers = [FakeWorker(coordinator, seed) for seed in (1, 2, 3, 4)]  # two for each block
    tasks = [worker.joined() for worker in workers]
    for _ in range(4):
        for worker, task in zip(workers, tasks, strict=True):
            worker.send(task)
            if killed:
                crash(coordinator)
                coordinator = open_coordinator(folder, clock)
                for one in workers:
                    one.client = coordinator
        tasks = [as_task(worker.ask()) for worker in workers]
        for task in tasks:
            assert_steps(coordinator, task)
    bodies = [(e.kind, json.loads(e.body)) for e in whole_ledger(coordinator)]
    coordinator.close()
    return [body for kind, body in bodies if kind == "version" and body["version"] > 0]


def assert_steps(coordinator: WatchedCoordinator, task: m.Task) -> None:
    """The deltas of a task lead to its weights, bit for bit."""
    steps = [step for step in task.deltas if step.block == task.block]
    assert [step.version for step in steps] == list(range(task.base, 0, -1))

    def read(name: str) -> bytes:
        return b"".join(coordinator.blob(name))

    for step in steps:
        made = add_delta(unpack(read(step.parent)), read(step.delta.sha256))
        assert pack(made) == read(step.weights)
    assert m.delta_path(task.weights.sha256, steps, {steps[-1].parent}.__contains__) == tuple(
        reversed(steps)
    )


def test_the_residual_survives_every_kill_and_is_recomputed(tmp_path: Path) -> None:
    whole = rounds_of_two(tmp_path / "whole", killed=False)
    again = rounds_of_two(tmp_path / "killed", killed=True)
    keys = ("block", "version", "weights", "delta", "residual")
    assert [[b[k] for k in keys] for b in whole] == [[b[k] for k in keys] for b in again]
    assert len(whole) == 8 and all(body["residual"] for body in whole)
    assert all(body["delta"]["length"] < body["weights"]["length"] / 8 for body in whole)
    for name in ("whole", "killed"):
        assert audit(open_folder(tmp_path / name)).findings == ()


@pytest.mark.parametrize("fault", ["gone", "damaged", "parent damaged"])
def test_where_deltas_do_not_lead_to_the_weights_they_are_fetched_whole(
    place: Callable[..., WorkerRun], fault: str
) -> None:
    """A second replica, so that the deltas are not what the worker has sent."""
    here = place(deltas_policy(), blocks=1, compose="pool", steps=16)
    here.worker().run(finishing=lambda: len(here.events("accepted")) >= 1)
    other = here.worker(identity=new_identity(), cache="other")
    other.run(finishing=lambda: len(here.events("accepted")) >= 2)
    newest = versions(here)[-1]
    blob = here.coordinator.run.store.blobs
    name = newest["delta"]["sha256"]
    if fault == "gone":
        del here.coordinator.run.history.public[name]
    here.emitted.clear()
    folder = next((here.folder / "cache" / "runs").glob("*/weights/*"))
    if fault == "parent damaged":
        for path in folder.iterdir():
            path.write_bytes(path.read_bytes()[:-4] + b"\0\0\1\0")
    if fault == "damaged":
        payload = blob.read(name)
        (folder / name).write_bytes(payload[:-4] + b"\0\0\1\0")
    here.worker().run(finishing=lambda: len(here.events("accepted")) >= 1)
    whole = newest["weights"]["sha256"] in fetched(here)
    assert whole == (fault != "damaged"), "a damaged delta on the disk is fetched again"
    assert here.events("accepted")
