"""Fibers: one at a time, in the order of their times, and killed where they wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from blocktrain.simulation.scheduler import Scheduler, SimulatedTime


def sleeper(scheduler: Scheduler, log: list[str], name: str, pause: float) -> Callable[[], None]:
    clock = SimulatedTime(scheduler, 100.0)

    def work() -> None:
        try:
            for n in range(3):
                clock.sleep(pause)
                log.append(f"{name}{n} {scheduler.now:g}")
        finally:
            log.append(f"{name} ends")

    return work


def test_fibers_run_in_the_order_of_time() -> None:
    scheduler, log = Scheduler(), list[str]()
    scheduler.spawn(sleeper(scheduler, log, "a", 2.0), "a")
    scheduler.spawn(sleeper(scheduler, log, "b", 3.0), "b")
    while scheduler.step():
        pass
    assert log == ["a0 2", "b0 3", "a1 4", "b1 6", "a2 6", "a ends", "b2 9", "b ends"]


def test_a_killed_fiber_ends_where_it_waits() -> None:
    scheduler, log = Scheduler(), list[str]()
    fiber = scheduler.spawn(sleeper(scheduler, log, "a", 2.0), "a")
    scheduler.at(3.0, fiber.kill)
    while scheduler.step():
        pass
    assert fiber.ended and log == ["a0 2", "a ends"]


def test_an_error_in_a_fiber_reaches_the_loop() -> None:
    scheduler = Scheduler()

    def work() -> None:
        raise ValueError("wrong")

    scheduler.spawn(work, "a")
    with pytest.raises(ValueError, match="wrong"):
        while scheduler.step():
            pass


def test_each_machine_has_its_own_clock() -> None:
    scheduler = Scheduler()
    one, other = SimulatedTime(scheduler, 5.0), SimulatedTime(scheduler, 1e6)
    scheduler.at(7.0, lambda: other.leap(100.0))
    scheduler.step()
    assert (one.monotonic(), other.monotonic()) == (12.0, 1e6 + 107.0)
    other.ahead = -3600.0
    assert other.time() == one.time() - 3600.0
