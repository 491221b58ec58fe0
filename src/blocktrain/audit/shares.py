"""What part every update has in a version, computed again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

PROBATION = 3  # merged updates before a worker is no newcomer any more
Counted = tuple[str, float, int]
"""Of an update: its worker, its tokens times its weight, and how many of the worker's updates were
merged before."""


def plain_shares(updates: Sequence[Counted]) -> list[float]:
    """Shares by tokens times weight."""
    total = math.fsum(weight for _, weight, _ in updates) or math.inf
    return [weight / total for _, weight, _ in updates]


def capped_shares(updates: Sequence[Counted]) -> list[float]:
    """The same, but a worker counts as its largest update, and at most as twice the median worker.

    All newcomers together have at most a fifth, unless there is nobody else.
    """
    largest: dict[str, float] = {}
    total: dict[str, float] = {}
    for worker, weight, _ in updates:
        largest[worker] = max(largest.get(worker, 0.0), weight)
        total[worker] = total.get(worker, 0.0) + weight
    most = 2 * median(largest.values() or [0.0])
    weights = [w * min(largest[worker], most) / total[worker] for worker, w, _ in updates]
    is_new = [merged < PROBATION for *_, merged in updates]
    new = sum(w for w, fresh in zip(weights, is_new, strict=True) if fresh)
    old = sum(weights) - new
    scale = min(1.0, old / 4 / new) if new > 0 and old > 0 else 1.0
    return plain_shares(
        [
            (worker, w * scale if fresh else w, merged)
            for w, fresh, (worker, _, merged) in zip(weights, is_new, updates, strict=True)
        ]
    )
