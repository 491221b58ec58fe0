"""`blocktrain worker --devices` and `--cores`: several workers of one machine with one command.

Each is a process with a key and a training state of its own; they share the downloads and one
display. If one fails, the others go on; it is not started again.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.synchronize import Event
from typing import Any

from blocktrain.clock import Clock, SystemClock
from blocktrain.errors import ConfigError, Interrupted, RunError
from blocktrain.processes import Channel, Job, run_jobs
from blocktrain.worker.command import (
    REPORT_SECONDS,
    STOP_SECONDS,
    WorkerOptions,
    machine_of,
    open_outputs,
    stop_signals,
    work_on,
)
from blocktrain.worker.loop import Machine


def run_group(options: WorkerOptions, devices: Sequence[str]) -> int:
    """Work on all devices until the run is finished or the user stops it; returns the exit code.

    Raises at the end if a worker has failed.
    """
    machines = label_machines(options, devices)
    finish = multiprocessing.get_context("forkserver").Event()
    jobs = [Job(label, work, (machine, options, finish)) for label, machine in machines.items()]
    failures: dict[str, str] = {}
    with open_outputs(list(machines), as_json=options.json) as outputs:

        def on_message(label: str, event: dict[str, Any]) -> None:
            outputs[label](event.pop("kind"), **event)

        def on_failure(label: str, reason: str) -> None:
            failures[label] = reason
            outputs[label]("failed", reason=reason)

        def leave(kind: str, /, **fields: Any) -> None:
            finish.set()
            for emit in outputs.values():
                emit(kind, **fields)

        # A stop is no error, as with one worker: everything that counts is on the disk.
        with stop_signals(leave, 3 * STOP_SECONDS) as stop, suppress(Interrupted):
            again = "start the command again"
            run_jobs(jobs, len(jobs), on_message, again, stop.now.is_set, on_failure)
    if failures:
        label, reason = next(iter(failures.items()))
        raise RunError(f"{len(failures)} of {len(jobs)} workers failed; {label}: {reason}")
    return 0


def label_machines(options: WorkerOptions, devices: Sequence[str]) -> dict[str, Machine]:
    """A label for each worker, and what it tells the coordinator."""
    counts, seen = Counter(devices), Counter[str]()
    machines = {}
    for device in devices:
        if device == "auto":
            raise ConfigError("--devices names each device, as in --devices 0,1 or cpu,cpu")
        try:
            machine = machine_of(replace(options, device=device), counts[device])
        except ConfigError as error:
            raise ConfigError(str(error).replace("--device cpu", "--cores N")) from None
        seen[device] += 1
        number = str(seen[device]) if counts[device] > 1 else ""
        label = device.replace(":", "") + (f"-{number}" if number else "")
        machines[label] = replace(machine, name=f"{machine.name[-50:]}-{label}")
    return machines


def work(channel: Channel, machine: Machine, options: WorkerOptions, finish: Event) -> None:
    """One worker of a group, in a process of its own."""
    reporter = EventSender(channel)
    threading.Thread(target=_end_in_time, args=(channel,), name="stop", daemon=True).start()
    work_on(machine, options, reporter.emit, lambda: channel.should_stop, finish.is_set)


def _end_in_time(channel: Channel) -> None:
    """End the process if the work does not notice a stop: in a call without an answer."""
    clock = SystemClock()
    while not channel.should_stop:
        clock.sleep(0.2)
    clock.sleep(STOP_SECONDS)
    os._exit(0)


@dataclass
class EventSender:
    """Sends a worker's events to the process that shows them; steps at most twice a second."""

    channel: Channel
    clock: Clock = field(default_factory=SystemClock)
    last_step: float = 0.0
    mutex: threading.Lock = field(default_factory=threading.Lock)

    def emit(self, kind: str, /, **fields: Any) -> None:
        with self.mutex:
            if kind == "step":
                now = self.clock.monotonic()
                if now - self.last_step < REPORT_SECONDS and fields["step"] < fields["of"]:
                    return
                self.last_step = now
            self.channel.send(kind=kind, **fields)
