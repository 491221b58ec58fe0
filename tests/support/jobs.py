"""The jobs of `train` in this process, where a test has registered something of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from blocktrain.processes import Job

OnMessage = Callable[[str, dict[str, Any]], None]


class LocalChannel:
    """What a job sees of the process that started it."""

    should_stop = False

    def __init__(self, name: str, on_message: OnMessage) -> None:
        self._name, self._on_message = name, on_message

    def send(self, **message: Any) -> None:
        self._on_message(self._name, message)


def run_here(jobs: Iterable[Job], slots: int, on_message: OnMessage, **_: Any) -> None:
    """In place of `processes.run_jobs`: one job after another."""
    for job in jobs:
        job.work(LocalChannel(job.name, on_message), *job.arguments)
