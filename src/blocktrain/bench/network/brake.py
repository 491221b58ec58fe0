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
class _Braked:
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
        self._free: dict[int, float] = {}  # pid -> what it had used when it was last looked at
        self._braked: list[_Braked] = []
        self._ended = threading.Event()
        self._mutex = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="brake", daemon=True)

    def __enter__(self) -> Brake:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for braked in self._braked:
            _signal(braked.pid, signal.SIGCONT)

    def add(self, pid: int, factor: float) -> None:
        """A process of the trial; 1 leaves it alone."""
        with self._mutex:
            if factor > 1:
                self._braked.append(_Braked(pid, factor, processor_seconds(pid) or 0.0))
            else:
                self._free[pid] = processor_seconds(pid) or 0.0

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._ended.wait(TICK_SECONDS):
            with self._mutex:
                now = time.monotonic()
                share = self._used() or now - before
                for braked in self._braked:
                    _turn(braked, share / braked.factor, now)
                before = now

    def _used(self) -> float:
        """Processor time that a free process has used since the last look, on average."""
        found = {
            pid: seconds for pid in self._free if (seconds := processor_seconds(pid)) is not None
        }
        used = sum(seconds - self._free[pid] for pid, seconds in found.items())
        self._free = found
        return used / max(1, len(found))


def _turn(braked: _Braked, earned: float, now: float) -> None:
    """Stop it when it has used more than it earned, let it go on when it has not."""
    spent = processor_seconds(braked.pid)
    if spent is None:
        return
    braked.allowed += earned
    over = spent > braked.allowed
    if over and not braked.stopped:
        braked.stopped, braked.since = True, now
        _signal(braked.pid, signal.SIGSTOP)
    elif braked.stopped and (not over or now - braked.since > LONGEST_REST):
        braked.stopped = False
        _signal(braked.pid, signal.SIGCONT)


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
