"""Back-off on a simulated clock: no test here waits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from blocktrain.clock import SimulatedClock
from blocktrain.errors import Interrupted, Unreachable
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.worker.session import LONGEST_PAUSE, Retries, pause


class Events:
    def __init__(self) -> None:
        self.kinds: list[str] = []

    def __call__(self, kind: str, /, **_: Any) -> None:
        self.kinds.append(kind)


def failing(*errors: Exception) -> Callable[[], str]:
    left = list(errors)

    def call() -> str:
        if left:
            raise left.pop(0)
        return "answer"

    return call


def test_pauses_grow_up_to_a_limit_and_an_outage_is_announced_once() -> None:
    clock, events = SimulatedClock(), Events()
    times: list[float] = []
    call = failing(*[Unreachable("nobody")] * 20)

    def timed() -> str:
        times.append(clock.monotonic())
        return call()

    assert Retries(events, clock).call(timed, lambda: False) == "answer"
    assert events.kinds == ["away", "back"]
    pauses = [b - a for a, b in itertools.pairwise(times)]
    assert 0.1 <= pauses[0] <= 0.2 + 1e-9
    assert all(p <= LONGEST_PAUSE + 1e-6 for p in pauses)
    assert all(p >= LONGEST_PAUSE / 2 - 1e-6 for p in pauses[8:])


def test_a_busy_coordinator_is_asked_again_but_is_not_away() -> None:
    events = Events()
    retries = Retries(events, SimulatedClock())
    assert retries.call(failing(Refused(Code.BUSY)), lambda: False) == "answer"
    assert events.kinds == []


def test_a_refusal_ends_the_retries() -> None:
    clock = SimulatedClock()
    with pytest.raises(Refused):
        Retries(Events(), clock).call(failing(Refused(Code.TOO_STALE)), lambda: False)
    assert clock.monotonic() == 0.0


def test_a_stop_ends_a_pause_at_once_and_is_no_outage() -> None:
    clock, events = SimulatedClock(), Events()
    with pytest.raises(Interrupted, match="sent at the next start"):
        pause(clock, 3600.0, lambda: clock.monotonic() > 1.0)
    assert clock.monotonic() < 1.2
    with pytest.raises(Interrupted):
        Retries(events, clock).call(failing(Unreachable("nobody")), lambda: True)
    assert events.kinds == []
