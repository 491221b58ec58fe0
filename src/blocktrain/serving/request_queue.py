"""How many requests are answered at a time, and the queue for the others."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from blocktrain.serving.openai_messages import ApiError

QUEUE_SECONDS = 30.0  # the longest wait
LONGEST_RETRY = 60


class RequestQueue:
    """`most` requests run, `queue` wait in order, and the others learn when to try again."""

    def __init__(self, most: int, queue: int) -> None:
        self.most, self.queue = most, queue
        self.running = self.waiting = 0
        self._free = asyncio.Semaphore(most)
        self._seconds = 1.0  # that an answer takes, smoothed

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        if self._free.locked() and self.waiting >= self.queue:
            raise self._busy()
        self.waiting += 1
        try:
            async with asyncio.timeout(QUEUE_SECONDS):
                await self._free.acquire()
        except TimeoutError:
            raise self._busy() from None
        finally:
            self.waiting -= 1
        self.running += 1
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds += 0.2 * (time.monotonic() - began - self._seconds)
            self.running -= 1
            self._free.release()

    def _busy(self) -> ApiError:
        """Retry when all requests that wait now should have been answered."""
        again = min(
            LONGEST_RETRY, max(1, math.ceil(self._seconds * (self.waiting + 1) / self.most))
        )
        sentence = f"all slots are taken and {self.waiting} requests wait: try again in {again} s"
        return ApiError(429, sentence, "busy", retry_after=again)
