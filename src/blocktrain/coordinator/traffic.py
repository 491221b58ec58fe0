"""Bytes in and out of a coordinator, per block and per worker."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Container, Iterable

from blocktrain.store.contract import ByteCount

ByteCounts = tuple[int, int]  # bytes in and out
NO_TRAFFIC: ByteCounts = (0, 0)


class TrafficCounter:
    """Bytes in and out, counted from any thread: counting never waits for a commit."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._open: dict[tuple[int, str], ByteCounts] = {}  # since the last commit
        self._snapshot: list[ByteCount] = []
        self.by_block: dict[int, ByteCounts] = defaultdict(lambda: NO_TRAFFIC)
        self.by_worker: dict[str, ByteCounts] = defaultdict(lambda: NO_TRAFFIC)
        self.total = NO_TRAFFIC
        self.training = 0  # in and out, of known workers, corpus aside

    def begin(self, committed: Iterable[ByteCount], known: Container[str]) -> None:
        """Continue from what was counted before, by worker where that is known."""
        with self._mutex:
            for count in committed:
                self._sum(count)
        self.forget([worker for worker in self.by_worker if worker not in known])

    def forget(self, workers: Iterable[str]) -> None:
        """From now on their bytes are nobody's."""
        with self._mutex:
            for worker in workers:
                came, went = self.by_worker.pop(worker, NO_TRAFFIC)
                self.by_worker[""] = _plus(self.by_worker[""], ByteCount(0, "", came, went))

    def add(self, count: ByteCount) -> None:
        with self._mutex:
            key = (count.block, count.worker)
            self._open[key] = _plus(self._open.get(key, NO_TRAFFIC), count)
            self._sum(count)

    def _sum(self, count: ByteCount) -> None:
        self.by_block[count.block] = _plus(self.by_block[count.block], count)
        self.by_worker[count.worker] = _plus(self.by_worker[count.worker], count)
        self.total = _plus(self.total, count)
        if count.block and count.worker:
            self.training += count.bytes_in + count.bytes_out

    def take(self) -> list[ByteCount]:
        """What the next transaction commits. It is kept until `settle`."""
        with self._mutex:
            moved = {key: traffic for key, traffic in self._open.items() if any(traffic)}
            self._snapshot = [ByteCount(*key, *traffic) for key, traffic in moved.items()]
        return self._snapshot

    def settle(self) -> None:
        """What was taken is committed. What was counted in the meantime stays."""
        with self._mutex:
            for count in self._snapshot:
                key = (count.block, count.worker)
                came, went = self._open.pop(key)
                if (came, went) != (count.bytes_in, count.bytes_out):
                    self._open[key] = (came - count.bytes_in, went - count.bytes_out)
            self._snapshot = []


def _plus(traffic: ByteCounts, count: ByteCount) -> ByteCounts:
    return traffic[0] + count.bytes_in, traffic[1] + count.bytes_out
