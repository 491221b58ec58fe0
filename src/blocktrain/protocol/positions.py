"""Ranges of batches. A block's order of the corpus is endless; a task reads one range of it."""

from __future__ import annotations

from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]
"""(first, end) of each range: sorted, and with a gap between any two."""


def add_range(ranges: Ranges, first: int, end: int) -> Ranges:
    """The same with one more range. Ranges that touch become one."""
    if first >= end:
        return ranges
    if not ranges or first > ranges[-1][1]:  # nearly always: tasks read on where others ended
        return (*ranges, (first, end))
    joined: list[tuple[int, int]] = []
    for low, high in sorted((*ranges, (first, end))):
        if joined and low <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return tuple(joined)


def overlap(ranges: Ranges, first: int, end: int) -> bool:
    """Whether a range has a batch in common with these."""
    return any(low < end and first < high for low, high in ranges)


def first_gap(ranges: Iterable[tuple[int, int]], least: int = 1) -> tuple[int, int | None]:
    """(first, end) of the first gap of at least this length; the last one has no end.

    These ranges need not be sorted, and may touch.
    """
    at = 0
    for low, high in sorted(ranges):
        if low - at >= least:
            return at, low
        at = max(at, high)
    return at, None
