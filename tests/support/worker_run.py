"""A coordinator and a worker in one process: what tests of the worker stand on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from blocktrain.clock import SystemClock
from blocktrain.config import Config
from blocktrain.coordinator.policy import Policy
from blocktrain.learning.corpus.source import Source
from blocktrain.protocol import messages as m
from blocktrain.protocol.calls import Calls
from blocktrain.protocol.identity import Identity, new_identity
from blocktrain.protocol.tensors import unpack
from blocktrain.runs.prepare import prepare
from blocktrain.watch.server import WatchedCoordinator, open_coordinator
from blocktrain.web.client import LocalClient
from blocktrain.worker.loop import Machine, Worker
from conftest import tiny_config


class SkippingClock(SystemClock):
    """Sleeps take no time, but are counted; waiting for a thread is real."""

    def __init__(self) -> None:
        self._skipped = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self._skipped

    def sleep(self, seconds: float) -> None:
        self._skipped += seconds


def small(**changes: Any) -> Config:
    return tiny_config(**{"batch": 2, "steps": 10, **changes})


class WorkerRun:
    """A coordinator's folder and a worker's cache."""

    def __init__(self, folder: Path, corpus: Path, config: Config, policy: Policy) -> None:
        self.folder, self.config = folder, config
        self.coordinator = open_coordinator(folder / "coordinator")
        prepare(config, Source(str(corpus), None, folder), folder / "prepared")
        # No update is checked: which ones are is random, and rounds wait for it.
        chosen = policy.model_copy(update={"retrain_share": 0.0})
        self.coordinator.begin(config, chosen, "words", folder / "prepared")
        self.identity = new_identity()
        self.emitted: list[tuple[str, dict[str, Any]]] = []

    def worker(
        self, client: Calls | None = None, identity: Identity | None = None, **options: Any
    ) -> Worker:
        def emit(kind: str, /, **fields: Any) -> None:
            self.emitted.append((kind, fields))

        machine, cache = (
            options.pop("machine", Machine()),
            self.folder / options.pop("cache", "cache"),
        )
        return Worker(
            client or LocalClient(self.coordinator),
            cache,
            identity or self.identity,
            machine,
            emit,
            **options,
        )

    def restart(self) -> WatchedCoordinator:
        self.coordinator.close()
        self.coordinator = open_coordinator(self.folder / "coordinator")
        return self.coordinator

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [fields for found, fields in self.emitted if found == kind]

    def updates(self) -> list[m.Submission]:
        """All that was accepted, in order."""
        bodies = [
            json.loads(entry.body)
            for entry in self.coordinator.ledger().entries
            if entry.kind == "update"
        ]
        return [m.Submission.model_validate_json(json.dumps(body["submission"])) for body in bodies]

    def weights(self, index: int) -> dict[str, np.ndarray]:
        found = next(b for b in self.coordinator.manifest().blocks if b.block == index)
        return unpack(b"".join(self.coordinator.blob(found.weights.sha256)))


@contextmanager
def worker_runs(tmp_path: Path, corpus_folder: Path) -> Iterator[Callable[..., WorkerRun]]:
    """Makes runs with a policy and changed settings; closes them at the end."""
    made: list[WorkerRun] = []

    def make(policy: Policy, **changes: Any) -> WorkerRun:
        made.append(WorkerRun(tmp_path / str(len(made)), corpus_folder, small(**changes), policy))
        return made[-1]

    yield make
    for one in made:
        one.coordinator.close()
