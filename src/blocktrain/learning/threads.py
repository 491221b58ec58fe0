"""One policy for torch's threads, for training, evaluation, scoring, text and serving.

A process computes on one thread unless the user asks for more (`--threads`). Torch's own default is
a thread per core; these wait for each other by spinning, so on a busy machine they are many times
slower than one: 57 s against 5 s for 20 kB on 2 cores at a load of 13. One thread also gives the
same bits on every number of cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

THREADS = 1


def use_threads(count: int = THREADS) -> None:
    """From now on compute on this many threads; a thread that calls torch decides for itself."""
    torch.set_num_threads(count)


@contextmanager
def limited_threads(count: int = THREADS) -> Iterator[None]:
    """Compute on this many threads, then restore the number from before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
