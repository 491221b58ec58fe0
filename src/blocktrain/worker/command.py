"""`blocktrain worker`: one worker process, its signals, and what it says on the terminal or as JSON lines."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
from rich.live import Live
from rich.text import Text

from blocktrain.errors import ConfigError
from blocktrain.learning.train import pick_device
from blocktrain.protocol.messages import as_name
from blocktrain.terminal import console
from blocktrain.web.client import HttpClient
from blocktrain.worker.loop import Machine, Worker
from blocktrain.worker.slots import own_identity

REPORT_SECONDS = 0.5
STOP_SECONDS = 5.0  # until a stop that nobody notices ends the process
_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}


@dataclass(frozen=True)
class WorkerOptions:
    """What the command line says."""

    url: str
    token: str
    device: str
    memory: str  # such as 8GB; empty: what the machine has
    name: str  # empty: the machine's own
    cache: Path
    ca: Path | None = None
    json: bool = False


def run_worker(options: WorkerOptions) -> int:
    """Work for a coordinator until its run is finished or the user stops it; the exit code."""
    device = str(pick_device(options.device))
    if (
        device == "cpu"
    ):  # the same bits as in an audit; a machine with many cores runs many workers, or they would get in each other's way
        torch.set_num_threads(1)
    memory = parse_bytes(options.memory) if options.memory else _machine_memory(device)
    machine = Machine(device, memory, as_name(options.name or platform.node()))
    client = HttpClient(options.url, options.token, ca=options.ca)
    screen: JsonLines | Screen = JsonLines() if options.json else Screen()
    try:
        with own_identity(options.cache) as identity, screen, _signals(screen) as asked:
            Worker(client, options.cache, identity, machine, screen.told).run(
                asked.stopping.is_set, asked.finishing.is_set
            )
    finally:
        client.close()
    return 0


def parse_bytes(text: str) -> int:
    """8GB, 512 MiB or 1.5e9 as a number of bytes."""
    match = re.fullmatch(
        r"\s*([0-9.]+(?:e[0-9]+)?)\s*([KMGT]?I?)B?\s*", text.upper().replace("E", "e")
    )
    try:
        if match is None:
            raise ValueError
        found = int(float(match[1]) * _UNITS[match[2]])
        if not 0 < found < 2**53:
            raise ValueError
    except (ValueError, KeyError):
        raise ConfigError(f"{text!r} is no amount of memory; write it like 8GB or 512MiB") from None
    return found


def _machine_memory(device: str) -> int:
    if device.startswith("cuda"):
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class _Asked:
    """What the user has asked for by signals."""

    finishing: threading.Event = field(
        default_factory=threading.Event
    )  # end after the current task
    stopping: threading.Event = field(default_factory=threading.Event)  # end with the current step


@contextmanager
def _signals(screen: JsonLines | Screen) -> Iterator[_Asked]:
    """Ctrl-C finishes the task; a second one, or SIGTERM, stops the work, and ends the process if the work does not notice.

    A handler interrupts code that may hold a lock, or swallow what is raised in it: it only puts the signal where a thread finds it.
    """
    asked, signals = _Asked(), SimpleQueue[int | None]()

    def leaving() -> None:
        with suppress(OSError):
            screen.told("leaving", reason="finishing the task; press again to abandon it")
        asked.finishing.set()

    def heed() -> None:
        again = False
        while (number := signals.get()) is not None:
            if number == signal.SIGTERM or again:
                asked.stopping.set()
                try:
                    if signals.get(timeout=STOP_SECONDS) is None:
                        return
                except Empty:
                    pass
                console.show_cursor()
                os._exit(
                    0
                )  # in a long download, or a call that nobody answers: all that counts is on the disk
            again = True
            # By a thread of its own: whoever reads what is said may be gone, or not read, and the next signal counts all the same.
            threading.Thread(target=leaving, name="leaving", daemon=True).start()

    before = {
        number: signal.signal(number, lambda number, _: signals.put(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    threading.Thread(target=heed, name="signals", daemon=True).start()
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signals.put(None)


class JsonLines:
    """Every event as a line of JSON on stdout; steps not more often than twice a second."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._said = 0.0

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def told(self, kind: str, /, **fields: Any) -> None:
        """Something happened."""
        with self._mutex:
            now = time.monotonic()
            if kind == "step":
                if now - self._said < REPORT_SECONDS and fields["step"] < fields["of"]:
                    return
                self._said = now
            line = json.dumps({"time": round(time.time(), 3), "kind": kind, **fields}) + "\n"
            print(
                line, end="", flush=True
            )  # in one piece: the process may be ended between a line and its end


class Screen:
    """A line that shows where the task is, and a line for everything that a person should know."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._live = Live(Text("joining"), console=console, refresh_per_second=4, transient=True)
        self._task: dict[str, Any] = {}
        self._accepted = self._sent = 0

    def __enter__(self) -> Screen:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def told(self, kind: str, /, **fields: Any) -> None:
        """Something happened."""
        with self._mutex:
            if kind == "accepted":
                self._accepted += 1
                self._sent += fields["bytes"]
            if kind in ("task", "step"):
                self._task |= fields
            line = _sentence(kind, fields)
            if line:
                self._live.console.print(line, highlight=False, markup=False)
            self._live.update(Text(self._line(kind, fields)))

    def _line(self, kind: str, fields: dict[str, Any]) -> str:
        done = f"{self._accepted} updates accepted, {self._sent / 1e6:.1f} MB sent"
        if kind == "waiting":
            return f"waiting: {fields['reason']} | {done}"
        if "loss" not in self._task:
            return f"{kind} | {done}"
        t = self._task
        return f"block {t['block']}  task {t['task']}  version {t['base']}  step {t['step']} of {t['of']}  loss {t['loss']:.3f} | {done}"


def _sentence(kind: str, fields: dict[str, Any]) -> str:
    """What is worth a line of its own."""
    if kind == "joined":
        return f"joined run {fields['run'][:12]} as worker {fields['worker'][:12]}: {fields['blocks']} blocks, corpus {fields['corpus']}"
    if kind == "fetching" and fields["bytes"] > 10**7:
        return f"fetching {fields['bytes'] / 1e6:.0f} MB"
    if kind in ("refused", "abandoned"):
        return f"task {fields.get('task', '')} {kind}: {fields['reason']}"
    if kind == "fresh":
        return f"block {fields['block']} begins with a fresh optimizer: this machine has no state that task {fields['task']} continues"
    if kind == "away":
        return f"the coordinator is away ({fields['reason']}); trying again until it is back"
    if kind == "back":
        return "the coordinator is back"
    if kind in ("left", "leaving", "rejoin"):
        return str(fields["reason"])
    return ""
