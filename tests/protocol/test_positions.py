"""Ranges of batches: joined where they touch, and the first gap between them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from blocktrain.protocol.positions import Ranges, add_range, first_gap, overlap

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6)), max_size=12)


@given(SPANS, st.integers(0, 40), st.integers(1, 6))
def test_ranges_are_sets_of_batches(spans: list[tuple[int, int]], first: int, steps: int) -> None:
    ranges: Ranges = ()
    batches: set[int] = set()
    for begin, length in spans:
        ranges = add_range(ranges, begin, begin + length)
        batches |= set(range(begin, begin + length))
    assert {n for low, high in ranges for n in range(low, high)} == batches
    assert all(a[1] < b[0] for a, b in pairwise(ranges))
    assert overlap(ranges, first, first + steps) == bool(batches & set(range(first, first + steps)))
    begin, end = first_gap(ranges, steps)
    assert not batches & set(range(begin, begin + steps if end is None else end))
    assert end is None or end - begin >= steps
    earlier = [n for n in range(begin) if not batches & set(range(n, n + steps))]
    assert not earlier
