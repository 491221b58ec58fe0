"""Workers of a chaos run: the product's own loop, honest or with a row of `ATTACKS`, as processes.

What they report goes through a pipe: what was written to it outlives a SIGKILL.
"""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blocktrain.bench.attacks.member import AttackingWorker
from blocktrain.learning.threads import use_threads
from blocktrain.processes import Channel
from blocktrain.web.client import HttpClient
from blocktrain.worker.loop import Machine, Worker
from blocktrain.worker.state import own_identity

REPORTED = {
    "joined": ("worker",),
    "accepted": ("update", "entry"),
    "refused": ("reason",),
    "left": ("reason",),
}
"""Events that the chaos run reads, with the fields that it needs."""


@dataclass(frozen=True)
class MemberJob:
    """Who a process is. Attack "" is an honest worker."""

    url: str
    cache: Path
    name: str
    attack: str
    seed: int
    """Of its own chance, if it attacks."""
    direction: int
    """A seed that all attackers share."""


def train(channel: Channel, job: MemberJob) -> None:
    """Main function of a worker process, until the run is finished or the process is killed."""
    use_threads()
    emit = PipeOutput(channel).emit
    with closing(HttpClient(job.url)) as client, own_identity(job.cache) as identity:
        if job.attack:
            worker: Worker = AttackingWorker(
                client,
                job.cache,
                identity,
                emit,
                attack=job.attack,
                seed=job.seed,
                direction=job.direction,
            )
        else:
            worker = Worker(client, job.cache, identity, Machine("cpu", 0, job.name), emit)
        worker.run(lambda: channel.should_stop)


class PipeOutput:
    """Passes events on, and counts the steps. Several threads report."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._mutex = channel, threading.Lock()

    def emit(self, kind: str, /, **fields: Any) -> None:
        with self._mutex:
            if kind == "step":
                self._channel.send(kind="step")
            elif kind in REPORTED:
                self._channel.send(kind=kind, **{name: fields[name] for name in REPORTED[kind]})
