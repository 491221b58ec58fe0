"""The one thread of an entry on which tensors are worked with, so that lines and users are never kept waiting by them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class ComputeThread:
    """Runs one thing after another; `idle` when nothing waits."""

    def __init__(self, threads: int = 1) -> None:
        self._pool = ThreadPoolExecutor(1, "compute", torch.set_num_threads, (threads,))
        self._waiting = 0

    @property
    def idle(self) -> bool:
        """Whether whatever comes next would begin at once."""
        return not self._waiting

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns, computed there."""
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, _inferring, work)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """End after what is under way."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _inferring(work: Callable[[], T]) -> T:
    with torch.inference_mode():
        return work()
