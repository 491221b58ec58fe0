"""What happens when: events in the order of (time, number), and fibers that wait for them.

A fiber is code that may wait: a worker, its heartbeats, its upload. It runs in a thread of its
own, so that the real worker's code need not know of it, but only one of all these threads runs at
any time, and the scheduler alone decides which. So nothing depends on the system's threads.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from contextlib import suppress

Happening = Callable[[], None]


class Killed(BaseException):
    """Unwinds a fiber whose process was killed."""


class Scheduler:
    """The only clock of a simulation, and all that is still to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._queue: list[tuple[float, int, Happening]] = []
        self._number = 0
        self._fibers: list[Fiber] = []
        self.current: Fiber | None = None
        self.baton = threading.Lock()  # given back by a fiber that waits
        self.baton.acquire()

    def at(self, time: float, action: Happening) -> None:
        """Do something at a time. Of two at the same time, the one that was named first."""
        self._number += 1
        heapq.heappush(self._queue, (max(time, self.now), self._number, action))

    def after(self, seconds: float, action: Happening) -> None:
        self.at(self.now + seconds, action)

    def spawn(self, work: Happening, name: str) -> Fiber:
        """Run something that may wait, beginning now."""
        fiber = Fiber(self, work, name)
        self._fibers = [f for f in self._fibers if not f.ended]
        self._fibers.append(fiber)
        self.after(0.0, fiber.wake(fiber.pause))
        return fiber

    def step(self) -> bool:
        """Do the next thing that is due; False, if there is nothing."""
        if not self._queue:
            return False
        time, _, action = heapq.heappop(self._queue)
        self.now = max(self.now, time)
        self.events += 1
        action()
        return True

    def is_next(self, time: float) -> bool:
        """Whether nothing happens up to a time."""
        return not self._queue or self._queue[0][0] > time

    def close(self) -> None:
        """End all fibers."""
        self._queue.clear()
        for fiber in self._fibers:
            fiber.kill()


class Fiber:
    """Code that may wait for a time or an answer."""

    def __init__(self, scheduler: Scheduler, work: Happening, name: str) -> None:
        self._scheduler, self._work, self.name = scheduler, work, name
        self.pause = 0  # number of the wait that it is in
        self.ended = False
        self._killed = False
        self._error: BaseException | None = None
        self._woken = threading.Lock()
        self._woken.acquire()
        self._thread: threading.Thread | None = None

    def _main(self) -> None:
        self._woken.acquire()
        try:
            if not self._killed:
                self._work()
        except Killed:
            pass
        except BaseException as error:
            self._error = error
        self.ended = True
        self._scheduler.baton.release()

    def wake(self, pause: int) -> Happening:
        """What ends this wait of the fiber. Nothing, if it has ended in another way."""

        def go_on() -> None:
            if not self.ended and self.pause == pause:
                self.pause += 1
                self._resume()

        return go_on

    def _resume(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name=self.name, daemon=True)
            self._thread.start()
        before, self._scheduler.current = self._scheduler.current, self
        self._woken.release()
        self._scheduler.baton.acquire()
        self._scheduler.current = before
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Called in the fiber: until something wakes it."""
        self._scheduler.baton.release()
        self._woken.acquire()
        if self._killed:
            raise Killed

    def sleep(self, seconds: float) -> None:
        """Called in the fiber."""
        if self._killed:
            raise Killed
        end = self._scheduler.now + max(0.0, seconds)
        if self._scheduler.is_next(end):  # nothing else could run in the meantime
            self._scheduler.now = end
            return
        self._scheduler.at(end, self.wake(self.pause))
        self.wait()

    def kill(self) -> None:
        """End it where it waits, as by SIGKILL. Called outside of it."""
        if self.ended or self._killed:
            return
        self._killed = True
        self.pause += 1
        if self._thread is None:
            self.ended = True
            return
        while not self.ended:  # code on the way out may wait once more: it is killed again
            with suppress(Exception):
                self._resume()


class SimulatedTime:
    """The clock of one machine: see `clock.Clock`. Its moments mean nothing to others.

    `ahead` moves its wall clock, `leap` also its monotonic one.
    """

    def __init__(self, scheduler: Scheduler, begin: float, epoch: float = 1_700_000_000.0) -> None:
        self._scheduler = scheduler
        self._begin = begin - scheduler.now
        self._epoch = epoch
        self.ahead = 0.0
        self.frozen = 0.0  # the machine does nothing until then

    def thaw(self) -> None:
        """Called in a fiber of this machine: go on only when it is not frozen."""
        fiber = self._scheduler.current
        while fiber is not None and self.frozen > self._scheduler.now:
            fiber.sleep(self.frozen - self._scheduler.now)

    def leap(self, seconds: float) -> None:
        """As after a machine was asleep."""
        self._begin += seconds

    def monotonic(self) -> float:
        return self._scheduler.now + self._begin

    def time(self) -> float:
        return self._epoch + self._scheduler.now + self.ahead

    def sleep(self, seconds: float) -> None:
        fiber = self._scheduler.current
        if fiber is not None:
            fiber.sleep(seconds)
            self.thaw()

    def wait(self, event: threading.Event, seconds: float | None = None) -> bool:
        if not event.is_set():
            self.sleep(seconds or 0.0)
        return event.is_set()
