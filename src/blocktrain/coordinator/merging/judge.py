"""The question whether updates are worth anything. Another process answers it: that needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from blocktrain.protocol.messages import BlockVersion


@dataclass(frozen=True)
class Suspect:
    """An update's payload, or (`weights`) a whole version."""

    payload: str | None = None
    compression: str = ""
    base: str | None = None  # what late absolute weights started from
    weights: str | None = None


@dataclass(frozen=True)
class Question:
    """What suspects would make of a block's weights, on text that the seed picks."""

    block: int
    weights: str
    features: tuple[BlockVersion, ...]
    suspects: tuple[Suspect, ...]
    seed: int


@dataclass(frozen=True)
class Judged:
    """How far the loss falls by it, how much that may be off, and the loss at its end."""

    gain: float
    noise: float
    loss: float


class Judge(Protocol):
    """It may take as long as a few steps of training. Raises StorageFailed if it cannot answer."""

    def judge(self, question: Question) -> list[Judged]: ...

    def close(self) -> None: ...
