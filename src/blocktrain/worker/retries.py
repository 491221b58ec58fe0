"""Retries: the one place that decides how long a worker backs off from a coordinator.

A call is repeated with growing, jittered pauses until it is answered. Whoever watches hears once
that the coordinator is away, and once that it is back.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from blocktrain.clock import Clock
from blocktrain.errors import BlockTrainError, Interrupted, Unreachable
from blocktrain.web.client import retry_later

T = TypeVar("T")
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 15.0  # seconds
POLL_SECONDS = 0.05  # how soon a stop is noticed


class EventHandler(Protocol):
    """Receives every event of a worker: a kind and its fields. Called from several threads."""

    def __call__(self, kind: str, /, **fields: Any) -> None: ...


def pause(clock: Clock, seconds: float, stopped: Callable[[], bool]) -> None:
    """Sleep, and raise Interrupted as soon as the worker is stopped."""
    end = clock.monotonic() + seconds
    while True:
        if stopped():
            raise Interrupted("stopped; an update without an answer is sent at the next start")
        left = end - clock.monotonic()
        if left <= 0:
            return
        clock.sleep(min(left, POLL_SECONDS))


class Retries:
    """Shared by all threads of a worker, so that an outage is announced once."""

    def __init__(self, emit: EventHandler, clock: Clock) -> None:
        self._emit, self._clock = emit, clock
        self._away = False
        self._mutex = threading.Lock()

    def call(self, call: Callable[[], T], stopped: Callable[[], bool]) -> T:
        """The call's answer, however long it takes; Refused or Interrupted end it."""
        seconds = FIRST_PAUSE
        while True:
            try:
                answer = call()
            except BlockTrainError as error:
                if not retry_later(error):
                    raise
                pause(self._clock, 0.0, stopped)  # a stop is no outage
                self._note(away=isinstance(error, Unreachable), reason=str(error))
                pause(self._clock, seconds * random.uniform(0.5, 1.0), stopped)
                seconds = min(2 * seconds, LONGEST_PAUSE)
            else:
                self._note(away=False)
                return answer

    def _note(self, *, away: bool, reason: str = "") -> None:
        with self._mutex:
            if away and not self._away:
                self._emit("away", reason=reason)
            if self._away and not away:
                self._emit("back")
            self._away = away
