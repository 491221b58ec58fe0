"""One run over HTTP with real workers, timed: what the transport benches are made of.

The coordinator listens on a socket; every worker is a process with its own key, cache and
connection. A finished trial leaves `result.json` in its folder; an unfinished one starts again.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blocktrain.bench.machine import BenchResult
from blocktrain.bench.network.brake import Brake
from blocktrain.bench.network.hosts import Host, hosts
from blocktrain.bench.network.namespaces import enter
from blocktrain.bench.network.shaper import Link
from blocktrain.config import Config
from blocktrain.coordinator.policy import Policy
from blocktrain.learning.corpus.source import Source
from blocktrain.learning.evaluate import evaluate
from blocktrain.learning.threads import limited_threads, use_threads
from blocktrain.learning.tokenizer import tokenizer_of
from blocktrain.processes import Channel, Job, run_jobs
from blocktrain.protocol import messages as m
from blocktrain.protocol.identity import Identity, new_nonce
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.runs.folder import load_model, read_json, write_json
from blocktrain.runs.prepare import prepare
from blocktrain.runs.pull import pull
from blocktrain.watch.server import Listen, WatchedCoordinator, open_coordinator, serve_coordinator
from blocktrain.web.client import HttpClient, LocalClient
from blocktrain.worker.loop import Machine, Worker
from blocktrain.worker.state import own_identity

ReportTrial = Callable[[str, dict[str, Any]], None]
SAMPLE_SECONDS = 2.0  # between two points of the curve of loss over bytes


@dataclass(frozen=True)
class Placement:
    """The host of a worker, and its speed."""

    host: int | None = None  # number of the distant host; None: beside the coordinator
    slow: float = 1.0  # this many times slower than the others


@dataclass(frozen=True)
class Trial:
    """What is run, and by how many."""

    folder: Path
    config: Config
    policy: Policy
    source: Source
    places: tuple[Placement, ...]
    valid_bytes: int | None = None
    link: Link | None = None  # of every distant host
    from_start: bool = False  # also evaluate version 0
    in_time: float = 1.0  # share of the updates that are not dropped as late
    most_tasks: int | None = None  # that a worker trains before it leaves; None: until the end

    @property
    def settings(self) -> BenchResult:
        """What the result belongs to."""
        return {
            "fingerprint": self.config.fingerprint,
            "policy": self.policy.model_dump(),
            "data": self.source.spec,
            "workers": [asdict(place) for place in self.places],
            "link": asdict(self.link) if self.link else None,
            "valid_bytes": self.valid_bytes,
            "in_time": self.in_time,
        }


def run_trial(
    trial: Trial,
    report: ReportTrial = lambda *_: None,
    after: Callable[[Trial], BenchResult] = lambda _: {},
) -> BenchResult:
    """Train and measure a run; `after` may read the coordinator's folder and add to the result."""
    path = trial.folder / "result.json"
    if path.exists() and (result := read_json(path)).get("settings") == trial.settings:
        return result
    shutil.rmtree(trial.folder, ignore_errors=True)
    trial.folder.mkdir(parents=True)
    coordinator = open_coordinator(trial.folder / "coordinator")
    try:
        prepare(trial.config, trial.source, trial.folder / "prepared")
        coordinator.begin(trial.config, trial.policy, trial.source.spec, trial.folder / "prepared")
        start = _evaluate(trial, coordinator, "start") if trial.from_start else None
        figures = _train(trial, coordinator, report)
        ce = _evaluate(trial, coordinator, "end")
    finally:
        coordinator.close()
    result = {
        "settings": trial.settings,
        "start_ce": start["composed"] if start else None,
        "ce": ce,
        **figures,
        **after(trial),
    }
    write_json(path, result)
    for name in ("coordinator", "prepared", "caches", "start", "end"):
        shutil.rmtree(trial.folder / name, ignore_errors=True)
    return result


def _evaluate(trial: Trial, coordinator: WatchedCoordinator, name: str) -> dict[str, float]:
    """Cross entropies of the run as `blocktrain pull` fetches it now."""
    folder = trial.folder / name
    pull(LocalClient(coordinator), folder)
    model = load_model(folder, torch.device("cpu"))
    tokens = trial.source.open(tokenizer_of(model.config))
    with limited_threads():
        return evaluate(model, tokens.valid[: trial.valid_bytes])


def _train(trial: Trial, coordinator: WatchedCoordinator, report: ReportTrial) -> BenchResult:
    sheets: dict[str, BenchResult] = {}
    brake = Brake()
    curve = _Curve(coordinator, trial, report)

    def on_message(name: str, message: dict[str, Any]) -> None:
        if "pid" in message:
            brake.add(message["pid"], trial.places[int(name.removeprefix("worker-")) - 1].slow)
        else:
            sheets[name] = message

    began = time.monotonic()
    with (
        serve_coordinator(coordinator, Listen()) as url,
        _network(trial, url) as network,
        brake,
        curve,
    ):
        jobs = [_worker_job(trial, n, url, network) for n in range(len(trial.places))]
        run_jobs([Job(job.name, work, (job,)) for job in jobs], len(jobs), on_message)
        seconds = time.monotonic() - began
        counters = [host.link.counters() for host in network]
    status = coordinator.status()
    return {
        "seconds": round(seconds, 1),
        "bytes_in": status.bytes_in,
        "bytes_out": status.bytes_out,
        "training_bytes": status.training_bytes,
        "float32_bytes": status.float32_bytes,
        "versions": status.rounds,
        "updates": sum(block.accepted for block in status.blocks),
        "late": sum(block.late for block in status.blocks),
        "refusals": dict(status.refusals),
        "workers": [sheets[job.name] for job in jobs],
        "curve": curve.points,
        "kind": network[0].kind if network else None,
        "wire_bytes": sum(link.up + link.down for link in counters),
    }


@contextmanager
def _network(trial: Trial, url: str) -> Iterator[list[Host]]:
    """The distant hosts of a trial, if it has any."""
    count = len({place.host for place in trial.places} - {None})
    if not count:
        yield []
        return
    with hosts(count, trial.link or Link(), int(url.rpartition(":")[2])) as network:
        yield network


def _worker_job(trial: Trial, index: int, url: str, network: Sequence[Host]) -> WorkerJob:
    place, name = trial.places[index], f"worker-{index + 1}"
    host = None if place.host is None else network[place.host]
    namespace = host.name if host and host.kind == "namespaces" else ""
    lateness = Lateness(trial.config.seed, trial.in_time, trial.most_tasks)
    machine = name if place.host is None else f"host-{place.host + 1}"
    cache = trial.folder / "caches" / machine  # the workers of a machine share what they fetch
    return WorkerJob(host.url if host else url, cache, name, namespace, lateness)


class _Curve:
    """Samples the run: seconds, bytes moved, mean loss of the blocks."""

    def __init__(self, coordinator: WatchedCoordinator, trial: Trial, report: ReportTrial) -> None:
        self.points: list[tuple[float, int, float]] = []
        self._coordinator, self._report, self._name = coordinator, report, trial.folder.name
        config = trial.config
        self._steps = sum(config.steps_of(index) for index in range(1, config.blocks + 1))
        self._stop = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._look, name="curve", daemon=True)

    def __enter__(self) -> _Curve:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            status = self._coordinator.status()
            losses = [block.loss for block in status.blocks if block.loss is not None]
            share = min(1.0, sum(block.steps for block in status.blocks) / self._steps)
            if losses:
                loss = sum(losses) / len(losses)
                self.points.append(
                    (
                        round(time.monotonic() - self._began, 1),
                        status.bytes_in + status.bytes_out,
                        round(loss, 4),
                    )
                )
                self._report(self._name, {"share": share, "loss": loss})


@dataclass(frozen=True)
class Lateness:
    """Which updates of a run are late: drawn from its seed."""

    seed: int
    in_time: float
    most_tasks: int | None

    def is_late(self, update: m.Submission) -> bool:
        """Whether an update comes after its deadline. The task's next lease is drawn anew."""
        draw = np.random.default_rng([self.seed, update.task, update.fence])
        return float(draw.random()) >= self.in_time

    def is_enough(self, sheet: Timesheet) -> bool:
        """Whether a worker has trained all that it should."""
        return self.most_tasks is not None and sheet.updates + sheet.refused >= self.most_tasks


class LateClient(HttpClient):
    """Drops the updates that are late, as a deadline does: their tasks go to whoever asks next."""

    def __init__(self, url: str, identity: Identity, lateness: Lateness) -> None:
        super().__init__(url)
        self._identity, self._lateness = identity, lateness

    def submit(self, message: m.Submission) -> m.SubmitReply:
        if not self._lateness.is_late(message):
            return super().submit(message)
        leave = m.TaskRequest(
            run=message.run,
            worker=message.worker,
            fingerprint=self.manifest().fingerprint,
            speed=0.0,
            leaving=True,
            nonce=new_nonce(),
        )
        self.next_task(self._identity.sign(leave))
        raise Refused(Code.TOO_STALE, "this update was drawn to be late")


@dataclass(frozen=True)
class WorkerJob:
    """The arguments of a worker process."""

    url: str
    cache: Path
    name: str
    namespace: str
    lateness: Lateness


def work(channel: Channel, job: WorkerJob) -> None:
    """Main function of a worker process, until the run is finished."""
    use_threads()
    if job.namespace:
        enter(job.namespace)
    channel.send(pid=os.getpid())
    sheet = Timesheet()
    with own_identity(job.cache) as identity:
        client = LateClient(job.url, identity, job.lateness)
        Worker(client, job.cache, identity, Machine("cpu", 0, job.name), sheet.record).run(
            lambda: channel.should_stop, lambda: job.lateness.is_enough(sheet)
        )
        client.close()
    channel.send(**sheet.summary())


@dataclass
class Timesheet:
    """How a worker spends its time. Several threads report, but only one reports training."""

    began: float = 0.0
    training: float = 0.0  # seconds between the beginning of a task and its last step
    trained: int = 0  # steps
    accepted: int = 0  # steps
    updates: int = 0
    refused: int = 0
    abandoned: int = 0
    sent: int = 0  # bytes of updates
    waits: dict[str, float] = field(default_factory=dict)
    _task: float = 0.0
    _steps: dict[int, int] = field(default_factory=dict)  # by task

    def record(self, kind: str, /, **fields: Any) -> None:
        """Takes one event of the worker."""
        now = time.monotonic()
        if kind == "joined" and not self.began:
            self.began = now
        elif kind == "task":
            self._task = now
            self._steps[fields["task"]] = fields["steps"]
        elif kind == "step":
            self.training += now - self._task
            self._task = now
            self.trained += 1
        elif kind == "accepted":
            self.accepted += self._steps.pop(fields["task"], 0)
            self.updates += 1
            self.sent += fields["bytes"]
        elif kind in ("refused", "abandoned"):
            setattr(self, kind, getattr(self, kind) + 1)
        elif kind == "waiting":
            self.waits[fields["reason"]] = self.waits.get(fields["reason"], 0.0) + fields["seconds"]

    def summary(self) -> BenchResult:
        """For the bench, at the end."""
        return {
            "seconds": time.monotonic() - self.began,
            "training": self.training,
            **{
                name: getattr(self, name)
                for name in (
                    "trained",
                    "accepted",
                    "updates",
                    "refused",
                    "abandoned",
                    "sent",
                    "waits",
                )
            },
        }


def utilisation(workers: Sequence[BenchResult]) -> float:
    """Share of the workers' time, from joining to leaving, that they spent training."""
    return sum(w["training"] for w in workers) / sum(w["seconds"] for w in workers)


def goodput(workers: Sequence[BenchResult]) -> float:
    """Share of the trained steps whose update was accepted."""
    return sum(w["accepted"] for w in workers) / max(1, sum(w["trained"] for w in workers))
