"""Rounds that are being closed: one at a time, without the run's lock, so that others are served; nobody touches their blocks meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

R = TypeVar("R")


class Merging:
    """Which blocks are being merged. The caller holds the run's lock, except for `run`."""

    def __init__(self, lock: threading.RLock) -> None:
        self._blocks: set[int] = set()
        self._freed = threading.Condition(lock)
        self._thread = ThreadPoolExecutor(
            1, "merger"
        )  # always the same: memory for one round's updates, and only once

    def __contains__(self, block: int | None) -> bool:
        return block in self._blocks

    def claim(self, blocks: Iterable[int]) -> None:
        """From now on these are the caller's."""
        self._blocks.update(blocks)

    def free(self, blocks: Iterable[int]) -> None:
        """They are published, or failed."""
        self._blocks.difference_update(blocks)
        self._freed.notify_all()

    def wait(self, block: int | None = None) -> None:
        """Until the block (every block, if none is named) is free. Lets go of the lock meanwhile."""
        self._freed.wait_for(
            lambda: not self._blocks if block is None else block not in self._blocks
        )

    def run(self, work: Callable[..., R], *arguments: Any) -> R:
        """Do the work when it is its turn."""
        return self._thread.submit(work, *arguments).result()

    def close(self) -> None:
        """No more merges."""
        self._thread.shutdown(wait=False)


class Closer:
    """A thread that does what is due whenever it is woken. What stops it is raised to whoever wakes it next."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work, self._stopped = work, False
        self._failure: BaseException | None = None
        self._due = threading.Event()
        self._thread = threading.Thread(target=self._run, name="closer", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There may be something to do."""
        if self._failure is not None:
            raise self._failure
        self._due.set()

    def stop(self) -> None:
        """After what it is doing now. The caller does not hold the run's lock."""
        self._stopped = True
        self._due.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped:
            self._due.wait()
            self._due.clear()
            try:
                if not self._stopped:
                    self._work()
            except BaseException as error:  # told by `wake`
                self._failure = error
                return
