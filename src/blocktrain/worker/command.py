"""`blocktrain worker`: one worker process, its signals, and its output.

On a terminal it shows a status line, without one it writes a plain log, with --json JSON lines.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
from rich.live import Live
from rich.text import Text

from blocktrain.clock import Clock, SystemClock
from blocktrain.learning.threads import use_threads
from blocktrain.learning.train import pick_device
from blocktrain.protocol.messages import as_name
from blocktrain.terminal import console, speed
from blocktrain.units import amount, parse_bytes
from blocktrain.web.client import HttpClient
from blocktrain.worker.loop import Machine, Worker, WorkSummary
from blocktrain.worker.session import EventHandler
from blocktrain.worker.shards import CACHE_LIMIT
from blocktrain.worker.state import own_identity

REPORT_SECONDS = 0.5
STOP_SECONDS = 5.0  # until a stop that the work does not notice ends the process
WAITING_SECONDS = 60.0  # between two log lines about the same wait
LARGE_DOWNLOAD = 10**7  # bytes that deserve a line of their own


@dataclass(frozen=True)
class WorkerOptions:
    """The options of the command line."""

    url: str
    token: str
    device: str
    memory: str  # such as 8GB; empty: what the machine has
    name: str  # empty: the machine's own
    cache: Path
    ca: Path | None = None
    json: bool = False
    cache_limit: str = ""  # such as 20GB; empty: the default


def run_worker(options: WorkerOptions) -> int:
    """Work until the run is finished or the user stops it; returns the exit code."""
    machine = machine_of(options)
    with open_outputs([""], as_json=options.json) as outputs, stop_signals(outputs[""]) as stop:
        work_on(machine, options, outputs[""], stop.now.is_set, stop.after_task.is_set)
    return 0


def machine_of(options: WorkerOptions, workers: int = 1) -> Machine:
    """What a worker has; `workers` share the device."""
    device = str(pick_device(options.device))
    memory = parse_bytes(options.memory) if options.memory else device_memory(device) // workers
    limit = parse_bytes(options.cache_limit) if options.cache_limit else CACHE_LIMIT
    return Machine(device, memory, as_name(options.name or platform.node()), limit)


def work_on(
    machine: Machine,
    options: WorkerOptions,
    emit: EventHandler,
    stopped: Callable[[], bool],
    finishing: Callable[[], bool],
) -> WorkSummary:
    """The work of one worker process."""
    if machine.device == "cpu":
        # The same bits as in an audit. A machine with many cores runs many workers instead:
        # their threads would slow each other down.
        use_threads()
    client = HttpClient(options.url, options.token, ca=options.ca)
    try:
        with own_identity(options.cache) as identity:
            return Worker(client, options.cache, identity, machine, emit).run(stopped, finishing)
    finally:
        client.close()


def device_memory(device: str) -> int:
    if device.startswith("cuda"):
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class StopRequest:
    """What the user has asked for by signals."""

    after_task: threading.Event = field(default_factory=threading.Event)
    now: threading.Event = field(default_factory=threading.Event)  # with the current step


@contextmanager
def stop_signals(emit: EventHandler, seconds: float | None = None) -> Iterator[StopRequest]:
    """Ctrl-C finishes the task. A second one, or SIGTERM, stops at once.

    If the work does not notice a stop within `seconds`, the process ends all the same: everything
    that counts is on the disk. A signal handler interrupts code that may hold a lock, or that
    swallows what is raised in it. So it only queues the signal, and a thread acts on it.
    """
    stop, signals = StopRequest(), SimpleQueue[int | None]()
    seconds = STOP_SECONDS if seconds is None else seconds

    def finish_task() -> None:
        with suppress(OSError):
            emit("leaving", reason="finishing the task; press again to abandon it")
        stop.after_task.set()

    def act() -> None:
        again = False
        while (number := signals.get()) is not None:
            if number == signal.SIGTERM or again:
                stop.now.set()
                try:
                    if signals.get(timeout=seconds) is None:
                        return
                except Empty:
                    pass
                console.show_cursor()
                os._exit(0)  # in a long download, or a call without an answer
            again = True
            # In a thread: writing the event may block, and the next signal counts all the same.
            threading.Thread(target=finish_task, name="leaving", daemon=True).start()

    before = {
        number: signal.signal(number, lambda number, _: signals.put(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    threading.Thread(target=act, name="signals", daemon=True).start()
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signals.put(None)


@contextmanager
def open_outputs(labels: Sequence[str], *, as_json: bool) -> Iterator[dict[str, EventHandler]]:
    """Where the events of each worker go; a label is "" if there is only one."""
    if as_json:
        yield {label: JsonOutput(label).emit for label in labels}
    elif not console.is_terminal:
        yield {label: LogOutput(label).emit for label in labels}
    else:
        with StatusLines(labels) as lines:
            yield {label: TerminalOutput(lines, label).emit for label in labels}


class JsonOutput:
    """Every event as a line of JSON on stdout; steps at most twice a second."""

    def __init__(self, label: str = "", clock: Clock | None = None) -> None:
        self._label = {"name": label} if label else {}
        self._clock = clock or SystemClock()
        self._mutex = threading.Lock()
        self._last_step = 0.0

    def emit(self, kind: str, /, **fields: Any) -> None:
        with self._mutex:
            now = self._clock.monotonic()
            if kind == "step":
                if now - self._last_step < REPORT_SECONDS and fields["step"] < fields["of"]:
                    return
                self._last_step = now
            event = {"time": round(self._clock.time(), 3), "kind": kind, **self._label, **fields}
            # In one piece: the process may be ended between a line and its newline.
            print(json.dumps(event) + "\n", end="", flush=True)


class LogOutput:
    """Every event but steps as a plain line with a timestamp on stderr, for logs of services."""

    def __init__(self, label: str = "", clock: Clock | None = None) -> None:
        self._label = label
        self._clock = clock or SystemClock()
        self._mutex = threading.Lock()
        self._steps = 0  # of the current task
        self._last_wait = ("", 0.0)  # why, and when that was last logged

    def emit(self, kind: str, /, **fields: Any) -> None:
        with self._mutex:
            if kind == "task":
                self._steps = fields["steps"]
            if kind == "waiting" and self._is_repeat(fields["code"]):
                return
            if kind != "waiting":
                self._last_wait = ("", 0.0)
            if line := log_line(kind, fields, self._steps):
                now = datetime.fromtimestamp(self._clock.time()).astimezone()
                console.print(
                    f"{now.isoformat(timespec='seconds')} {_labelled(self._label, line)}",
                    highlight=False,
                    markup=False,
                    soft_wrap=True,
                )

    def _is_repeat(self, code: str) -> bool:
        """Whether this wait was logged a moment ago: a worker asks again every few seconds."""
        known, logged = self._last_wait
        now = self._clock.monotonic()
        if code == known and now - logged < WAITING_SECONDS:
            return True
        self._last_wait = (code, now)
        return False


class StatusLines:
    """One line per worker at the bottom of the terminal."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._mutex = threading.Lock()
        self._lines = dict.fromkeys(labels, "joining")
        self._live = Live(self._text(), console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> StatusLines:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, label: str, line: str) -> None:
        with self._mutex:
            self._lines[label] = line
            self._live.update(self._text())

    def print(self, label: str, sentence: str) -> None:
        """A line above them."""
        self._live.console.print(_labelled(label, sentence), highlight=False, markup=False)

    def _text(self) -> Text:
        return Text("\n".join(_labelled(label, line) for label, line in self._lines.items()))


def _labelled(label: str, text: str) -> str:
    return f"{label}: {text}" if label else text


class TerminalOutput:
    """A status line of the current task, and a line for every event that a person should know."""

    def __init__(self, lines: StatusLines, label: str = "") -> None:
        self._mutex = threading.Lock()
        self._lines, self._label = lines, label
        self._task: dict[str, Any] = {}
        self._accepted = self._sent = 0

    def emit(self, kind: str, /, **fields: Any) -> None:
        with self._mutex:
            if kind == "accepted":
                self._accepted += 1
                self._sent += fields["bytes"]
            if kind in ("task", "step"):
                self._task |= fields
            if line := sentence(kind, fields):
                self._lines.print(self._label, line)
            self._lines.update(self._label, self._status(kind, fields))

    def _status(self, kind: str, fields: dict[str, Any]) -> str:
        totals = f"{self._accepted} updates accepted, {self._sent / 1e6:.1f} MB sent"
        if kind == "waiting":
            return f"waiting: {fields['reason']} | {totals}"
        if "loss" not in self._task:
            return f"{kind} | {totals}"
        t = self._task
        return (
            f"block {t['block']}  task {t['task']}  version {t['base']}  "
            f"step {t['step']} of {t['of']}  loss {t['loss']:.3f}  {speed(t)} | {totals}"
        )


def log_line(kind: str, fields: dict[str, Any], steps: int) -> str:
    """A log line for an event; empty for those that are too frequent. `steps` of the task."""
    where = f"block {fields.get('block')} task {fields.get('task')}"
    if kind == "task":
        return f"{where}: {steps} steps from version {fields['base']}, step {fields['start']}"
    if kind == "trained":
        size = amount(fields["bytes"])
        return f"{where}: trained, loss {fields['loss']:.4f}, {speed(fields)}, sending {size}"
    if kind == "sending":
        return f"{where}: still sending; asking for the next task"
    if kind == "resending":
        return f"{where}: sending the update again"
    if kind == "accepted":
        return f"{where}: accepted, {amount(fields['bytes'])} sent; {fields['sentence']}"
    if kind == "waiting":
        return f"waiting: {fields['reason']}"
    if kind == "fetching":
        return f"fetching {amount(fields['bytes'])}"
    return sentence(kind, fields)


def sentence(kind: str, fields: dict[str, Any]) -> str:
    """An event that a person should know; empty for all others."""
    if kind == "joined":
        return (
            f"joined run {fields['run'][:12]} as worker {fields['worker'][:12]}: "
            f"{fields['blocks']} blocks, corpus {fields['corpus']}"
        )
    if kind == "fetching" and fields["bytes"] > LARGE_DOWNLOAD:
        return f"fetching {amount(fields['bytes'])}"
    if kind in ("refused", "abandoned"):
        return f"task {fields.get('task', '')} {kind}: {fields['reason']}"
    if kind == "fresh":
        return (
            f"block {fields['block']} starts with a fresh optimizer: this machine does not have "
            f"the state that task {fields['task']} continues"
        )
    if kind == "away":
        return f"lost the coordinator ({fields['reason']}); retrying until it is back"
    if kind == "back":
        return "the coordinator is back"
    if kind == "failed":
        return f"failed: {fields['reason']}"
    if kind in ("left", "leaving", "rejoin"):
        return str(fields["reason"])
    return ""
