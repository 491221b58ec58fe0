"""Time as an object: every deadline, timestamp and wait of coordinator and worker goes through it.

The system's clock is one implementation. The simulated one stands still until a caller moves it,
so that a test or a simulation decides what time it is.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds that never go back: for deadlines and durations."""

    def time(self) -> float:
        """Seconds since 1970: for timestamps that people and other machines read."""

    def sleep(self, seconds: float) -> None: ...

    def wait(self, event: threading.Event, seconds: float | None = None) -> bool:
        """Until the event is set, or the time is over; whether it is set."""


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float | None = None) -> bool:
        return event.wait(seconds)


class SimulatedClock:
    """A sleep or a wait moves it forward: nothing takes real time.

    `now` is the monotonic time, and `epoch` the wall time when it was 0. Both may be set.
    """

    def __init__(self, now: float = 0.0, epoch: float = 1_700_000_000.0) -> None:
        self.now = now
        self.epoch = epoch

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.epoch + self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(0.0, seconds)

    def wait(self, event: threading.Event, seconds: float | None = None) -> bool:
        if not event.is_set():
            if seconds is None:
                event.wait()
            else:
                self.sleep(seconds)
        return event.is_set()
