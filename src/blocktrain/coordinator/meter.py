"""Bytes in and out, counted from any thread: nobody who only counts waits for a commit."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable

from blocktrain.store.contract import Traffic

Bytes = tuple[int, int]  # in and out
NONE: Bytes = (0, 0)


class Meter:
    """What was counted since the last commit, per block and worker; and since the beginning, by block, by worker and in all."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._open: dict[tuple[int, str], Bytes] = {}
        self._taken: list[Traffic] = []
        self.by_block: dict[int, Bytes] = defaultdict(lambda: NONE)
        self.by_worker: dict[str, Bytes] = defaultdict(lambda: NONE)
        self.moved = NONE  # by the whole run

    def begin(self, committed: Iterable[Traffic]) -> None:
        """Go on from what was counted before."""
        with self._mutex:
            for t in committed:
                self._sum(t)

    def add(self, t: Traffic) -> None:
        """Count."""
        with self._mutex:
            self._open[t.block, t.worker] = _plus(self._open.get((t.block, t.worker), NONE), t)
            self._sum(t)

    def _sum(self, t: Traffic) -> None:
        self.by_block[t.block] = _plus(self.by_block[t.block], t)
        self.by_worker[t.worker] = _plus(self.by_worker[t.worker], t)
        self.moved = _plus(self.moved, t)

    def take(self) -> list[Traffic]:
        """What the next transaction commits; until `settle` it is not forgotten."""
        with self._mutex:
            self._taken = [
                Traffic(block, worker, *counts)
                for (block, worker), counts in self._open.items()
                if any(counts)
            ]
        return self._taken

    def settle(self) -> None:
        """What was taken is committed; what was counted meanwhile stays."""
        with self._mutex:
            for t in self._taken:
                came, went = self._open.pop((t.block, t.worker))
                if (came, went) != (t.bytes_in, t.bytes_out):
                    self._open[t.block, t.worker] = (came - t.bytes_in, went - t.bytes_out)
            self._taken = []


def _plus(counted: Bytes, t: Traffic) -> Bytes:
    return counted[0] + t.bytes_in, counted[1] + t.bytes_out
