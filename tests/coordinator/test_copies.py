"""Updates that repeat what somebody else has sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blocktrain.coordinator.history import FAULTS
from blocktrain.coordinator.merging.copies import SAMPLE, find_copies
from blocktrain.coordinator.merging.merge import Likeness, MergeContext, MergeOptions, Update, merge
from blocktrain.coordinator.policy import ALIKE

SMALL, LARGE = 256, 3 * SAMPLE


def noise(size: int, seed: int, scale: float = 1.0) -> Any:
    return (scale * np.random.default_rng(seed).standard_normal(size)).astype(np.float32)


def sent(name: str, worker: str, change: Any, **more: Any) -> Update:
    """An update of two tensors; its payload is named after it."""
    half = len(change) // 2
    values = {"a": change[:half], "b": change[half:].reshape(2, -1)}
    fields = {"payload": f"{sum(map(ord, name)):064x}", **more}
    return Update(name, values, 100, worker=worker, **fields)


def state(values: Any) -> dict[str, Any]:
    return dict(sent("", "", values).values)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_who_sends_what_another_has_sent_is_found(size: int) -> None:
    honest, other = noise(size, 1), noise(size, 2)
    updates = [
        sent("honest", "h", other),
        sent("again", "a", honest),
        sent("hidden", "b", honest + noise(size, 3, 0.1)),
        sent("scaled", "c", -0.5 * -honest),
        sent("opposite", "d", -honest),
        sent("mixed", "e", honest + other),
    ]
    found = find_copies(state(0 * honest), updates, [sent("first", "f", honest)])
    copies = {name for name, like in found.items() if like.cosine >= ALIKE}
    assert copies == {"again", "hidden", "scaled"}
    assert {found[name].of for name in copies} <= {"first", "again", "hidden"}


def test_the_earlier_one_counts_also_within_a_round() -> None:
    honest = noise(SMALL, 1)
    updates = [sent("z", "x", honest), sent("a", "y", honest)]
    options = MergeOptions(defences=True, alike=ALIKE)
    found = find_copies(state(0 * honest), updates, [])
    liked = [sent(u.id, u.worker, honest, like=found.get(u.id)) for u in updates]
    result = merge(MergeContext(state(0 * honest), options), liked)
    assert [c.update.id for c in result.used] == ["z"]
    (refused,) = result.rejected
    assert (refused.id, refused.code) == ("a", "copy") and refused.code in FAULTS
    trusting = MergeOptions(defences=True, alike=None)
    assert len(merge(MergeContext(state(0 * honest), trusting), liked).used) == 2


def test_nobody_is_accused_of_what_it_has_sent_itself() -> None:
    honest = noise(SMALL, 1)
    again = sent("again", "h", honest * 1.001)
    assert find_copies(state(0 * honest), [again], [sent("first", "h", honest)]) == {}
    same = sent("same", "h", honest, payload="f" * 64)
    first = sent("first", "h", honest, payload="f" * 64)
    found = find_copies(state(0 * honest), [same], [first])
    assert found == {"same": Likeness("first", 1.0)}, "no two tasks give the same bytes"


def test_whole_weights_are_compared_by_what_they_change() -> None:
    start, now = noise(SMALL, 1, 10.0), noise(SMALL, 2, 10.0)
    trained = start + noise(SMALL, 3)
    first = sent("first", "f", trained, absolute=True, base=state(start))
    updates = [
        sent("honest", "h", now + noise(SMALL, 4), absolute=True),
        sent("late", "i", start + noise(SMALL, 5), absolute=True, base=state(start)),
        sent("weights", "c", trained, absolute=True),
        sent("change", "d", now + (trained - start), absolute=True),
    ]
    found = find_copies(state(now), updates, [first])
    assert {n for n, like in found.items() if like.cosine >= ALIKE} == {"weights", "change"}
