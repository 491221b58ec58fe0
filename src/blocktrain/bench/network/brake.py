"""Makes processes slower than others by stopping them, so that they look like slow machines."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TICK_SECONDS = 0.05
LONGEST_REST = 2.0  # seconds; heartbeats of a stopped process do not go out either


@dataclass
class _SlowProcess:
    pid: int
    factor: float
    allowed: float = 0.0  # seconds of processor time
    stopped: bool = False
    since: float = 0.0


class Brake:
    """Gives a process 1 / factor of the processor time that others get.

    While the others rest, it gets that share of the clock.
    """

    def __init__(self) -> None:
        self._free: dict[int, float] = {}  # pid -> processor seconds at the last tick
        self._slow: list[_SlowProcess] = []
        self._stop = threading.Event()
        self._mutex = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="brake", daemon=True)

    def __enter__(self) -> Brake:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for process in self._slow:
            _signal(process.pid, signal.SIGCONT)

    def add(self, pid: int, factor: float) -> None:
        """A process of the trial; 1 leaves it alone."""
        with self._mutex:
            if factor > 1:
                self._slow.append(_SlowProcess(pid, factor, processor_seconds(pid) or 0.0))
            else:
                self._free[pid] = processor_seconds(pid) or 0.0

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(TICK_SECONDS):
            with self._mutex:
                now = time.monotonic()
                share = self._mean_use() or now - before
                for process in self._slow:
                    _turn(process, share / process.factor, now)
                before = now

    def _mean_use(self) -> float:
        """Processor time that a free process has used since the last tick, on average."""
        times = {
            pid: seconds for pid in self._free if (seconds := processor_seconds(pid)) is not None
        }
        total = sum(seconds - self._free[pid] for pid, seconds in times.items())
        self._free = times
        return total / max(1, len(times))


def _turn(process: _SlowProcess, share: float, now: float) -> None:
    """Stop it when it has used more than its share; otherwise let it run."""
    used = processor_seconds(process.pid)
    if used is None:
        return
    process.allowed += share
    over = used > process.allowed
    if over and not process.stopped:
        process.stopped, process.since = True, now
        _signal(process.pid, signal.SIGSTOP)
    elif process.stopped and (not over or now - process.since > LONGEST_REST):
        process.stopped = False
        _signal(process.pid, signal.SIGCONT)


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def processor_seconds(pid: int) -> float | None:
    """What a process has used so far; None when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
