"""Updates that repeat what another worker has sent. Pure numpy: the same inputs, the same answer.

Payloads are secret until their round is closed. So who copies sends what somebody else sent in one
of the last rounds, as it was or changed a little. The earlier update, by the ledger, is no copy.

Whoever trains a fresh worker's public task can send that before the worker does. Then the
worker's own update is left out, once: its next task starts from a state that nobody else has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from blocktrain.coordinator.merging.merge import Likeness, State, Update, Wide

SAMPLE = 1 << 16
"""Weights that are compared at most. Which ones follows from the payload: to choose what is not
looked at, one would have to change nearly everything."""


def find_copies(
    current: State, updates: Sequence[Update], earlier: Iterable[Update]
) -> dict[str, Likeness]:
    """What each update is most like, of the earlier ones of other workers.

    Both are in the order of the ledger. One earlier update is in memory at a time.
    """
    found: dict[str, Likeness] = {}
    views = [_View(current, update) for update in updates]
    for known in map(_decoded, earlier):
        for view in views:
            view.compare(known, found)
    for number, known in enumerate(map(_decoded, updates)):
        for view in views[number + 1 :]:
            view.compare(known, found)
    return found


def _decoded(update: Update) -> Update:
    """Values are decoded whenever they are looked at; these will be looked at often."""
    return replace(update, values={name: update.values[name] for name in sorted(update.values)})


class _View:
    """A sample of an update's change, which earlier ones are held against."""

    def __init__(self, current: State, update: Update) -> None:
        self._current, self._update = current, update
        self._pick = _places(update.payload, tuple(current[name].size for name in sorted(current)))
        self._base = self._of(current if update.base is None else update.base)
        self._change = self._change_of(update, self._base)

    def compare(self, earlier: Update, found: dict[str, Likeness]) -> None:
        """Note how like the earlier update is, if it is the likest one up to now."""
        mine = self._update
        if mine.payload == earlier.payload:
            # Also its own: another task never gives the same bytes.
            found[mine.id] = Likeness(earlier.id, 1.0)
        if mine.worker == earlier.worker:
            return
        cosine = _cosine(self._change, self._change_of(earlier, self._start_of(earlier)))
        if mine.absolute and earlier.absolute:  # its weights can be sent again, from another base
            cosine = max(cosine, _cosine(self._change, self._change_of(earlier, self._base)))
        if mine.id not in found or cosine > found[mine.id].cosine:
            found[mine.id] = Likeness(earlier.id, cosine)

    def _start_of(self, update: Update) -> Wide:
        return self._of(self._current if update.base is None else update.base)

    def _change_of(self, update: Update, base: Wide) -> Wide:
        values = self._of(update.values)
        return values - base if update.absolute else values

    def _of(self, state: State) -> Wide:
        parts = [
            state[name].reshape(-1)[places].astype(np.float64)
            for name, places in zip(sorted(state), self._pick, strict=True)
        ]
        return np.concatenate(parts)


def _places(payload: str, sizes: tuple[int, ...]) -> list[NDArray[np.int64] | slice]:
    """Which weights of each tensor are compared: all of a small block."""
    total = sum(sizes)
    if total <= SAMPLE:
        return [slice(None) for _ in sizes]
    draw = np.random.default_rng(int(payload[:16], 16))
    places = np.sort(draw.integers(0, total, SAMPLE))
    ends = np.cumsum(sizes)
    parts = np.split(places, np.searchsorted(places, ends[:-1]))
    return [part - (end - size) for part, end, size in zip(parts, ends, sizes, strict=True)]


def _cosine(a: Wide, b: Wide) -> float:
    length = math.sqrt(float(np.sum(a * a))) * math.sqrt(float(np.sum(b * b)))
    return float(np.sum(a * b)) / length if length > 0 else 0.0
