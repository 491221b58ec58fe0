"""What the loops that write text decide, without a network: windows, what a sweep commits, when an answer ends (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
from torch import Tensor

from blocktrain.learning.generate import Sampler, window_start

NEAR_TIE = 1e-4
Finish = Literal["stop", "length"]


def common(a: bytes | bytearray, b: bytes | bytearray) -> int:
    """How many leading bytes are equal."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    return low


def accept(draft: Sequence[int], picks: Iterable[int]) -> list[int]:
    """What is committed of a draft: the model's own picks, up to and with the first that is not the drafted byte.

    Pick i is what the model makes of the text before position i, drafted bytes included, so it counts as long as those were
    right. The first one never depends on a draft, and one pick behind a draft that is right to its end is committed too.
    """
    committed: list[int] = []
    for i, pick in enumerate(picks):
        committed.append(pick)
        if i >= len(draft) or pick != draft[i]:
            break
    return committed


class Picker:
    """The bytes that a sampler takes, and at how many positions it was as good as a toss-up."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self._tied: set[int] = set()  # positions

    def picks(self, logits: Tensor, first: int) -> Iterator[int]:
        """The bytes of positions `first` and on, from their logits (T, V), as far as they are asked for."""
        for i, row in enumerate(logits):
            scores = self.sampler.scores(row, first + i)
            second, best = np.partition(scores, -2)[-2:]
            (self._tied.add if best - second < NEAR_TIE else self._tied.discard)(first + i)
            yield int(scores.argmax())

    @property
    def near_ties(self) -> int:
        """Positions whose two best bytes were closer than NEAR_TIE when they were last picked."""
        return len(self._tied)


class Answer:
    """The text as it grows: the prompt, what is committed, what of it may be shown, and why it ends."""

    def __init__(self, prompt: bytes, most: int, context: int, stop: Sequence[bytes] = ()) -> None:
        self.text = bytearray(prompt or b"\n")
        self.context = context
        self.finish: Finish | None = None if most > 0 else "length"
        self._end = len(self.text) + most
        self._stop = [word for word in stop if word]
        self._shown = self._first = len(self.text)

    @property
    def begin(self) -> int:
        """Where the window begins in which the next byte is written."""
        return window_start(len(self.text), self.context)

    @property
    def window(self) -> bytes:
        """What the model reads to write the next byte."""
        return bytes(self.text[self.begin :])

    @property
    def cut(self) -> int:
        """Bytes of the prompt that no window holds."""
        return window_start(self._first, self.context)

    @property
    def left(self) -> int:
        """Bytes that may still be written."""
        return self._end - len(self.text)

    @property
    def room(self) -> int:
        """Bytes that may still be written before the window has to move."""
        return min(self.left, self.begin + self.context - len(self.text) + 1)

    def commit(self, found: Iterable[int]) -> bytes:
        """Take bytes over, until the answer ends; returns what can be shown now."""
        for byte in found:
            if self.finish is not None:
                break
            self.text.append(byte)
            self._look_for_stop()
            if self.finish is None and not self.left:
                self.finish = "length"
        return self._show()

    def _look_for_stop(self) -> None:
        for word in self._stop:
            if self.text.endswith(word) and len(self.text) - len(word) >= self._first:
                del self.text[-len(word) :]
                self.finish = "stop"
                return

    def _show(self) -> bytes:
        """What was not shown before, without an end that may yet turn out to be a stop word."""
        until = len(self.text)
        if self.finish is None and self._stop:
            longest = min(max(map(len, self._stop)) - 1, until - self._shown)
            ends = (
                size
                for size in range(longest, 0, -1)
                if any(word.startswith(self.text[-size:]) for word in self._stop)
            )
            until -= next(ends, 0)
        shown = bytes(self.text[self._shown : until])
        self._shown = max(until, self._shown)
        return shown
