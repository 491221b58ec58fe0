"""A run over a network from a script: work for it, and fetch its model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from blocktrain.api.model import TrainedModel
from blocktrain.cli.environment import cache_folder
from blocktrain.runs.pull import pull as pull_run
from blocktrain.web.client import HttpClient
from blocktrain.worker.command import WorkerOptions, machine_of, work_on
from blocktrain.worker.loop import WorkSummary

OnEvent = Callable[[dict[str, Any]], None]
T = TypeVar("T")


def work(
    url: str,
    token: str = "",
    *,
    device: str = "cpu",
    memory: str = "",
    name: str = "",
    cache: Path | str | None = None,
    tasks: int | None = None,
    on_event: OnEvent = lambda _: None,
) -> WorkSummary:
    """Join a run and train one of its blocks, until the run ends or `tasks` tasks are done.

    Ctrl-C finishes the step and leaves; nothing that was acknowledged is lost. `on_event` gets
    what `blocktrain worker --json` prints.
    """
    options = WorkerOptions(url, token, device, memory, name, Path(cache or cache_folder()))
    machine, stop, accepted = machine_of(options), threading.Event(), []

    def emit(kind: str, /, **fields: Any) -> None:
        if kind == "accepted":
            accepted.append(fields)
        on_event({"kind": kind, **fields})

    def enough() -> bool:
        return tasks is not None and len(accepted) >= tasks

    return _interruptible(lambda: work_on(machine, options, emit, stop.is_set, enough), stop)


def _interruptible(action: Callable[[], T], stop: threading.Event) -> T:
    """Run in a thread, so that Ctrl-C stops it at a good moment and not anywhere."""
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:  # raised again below
            failures.append(error)

    thread = threading.Thread(target=run, name="work", daemon=True)
    thread.start()
    while thread.is_alive():
        try:
            thread.join(0.2)
        except KeyboardInterrupt:
            stop.set()
    if failures:
        raise failures[0]
    return results[0]


def pull(
    url: str,
    out: Path | str,
    token: str = "",
    *,
    on_progress: Callable[[str], None] = lambda _: None,
) -> TrainedModel:
    """Fetch the composed model of a run, running or finished, into a folder."""
    client = HttpClient(url, token)
    try:
        pull_run(client, Path(out), on_progress)
    finally:
        client.close()
    return TrainedModel(Path(out))
