"""Who reads for an answer: blocks of a stage, in a session of their own, or blocks of this process.

A reader is told only what it has not read: ids from the first position on where its text differs. So caches are rolled back,
windows restarted and lost readers replaced by one rule, from ids alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from blocktrain.errors import BlockTrainError
from blocktrain.learning.compose import in_pieces
from blocktrain.learning.model import Cache
from blocktrain.protocol import frames
from blocktrain.protocol.frames import Wire
from blocktrain.serving.entry.decode import common
from blocktrain.serving.entry.thread import ComputeThread
from blocktrain.serving.holding import FanBlocks, Part
from blocktrain.serving.line.lines import StageLine

RESULT_BYTES = frames.PREFIX.size + 16  # of a RESULT without its features


class AnswerFailed(BlockTrainError):
    """An answer cannot be finished; the service lives on."""


@dataclass
class Tally:
    """What happened to an answer on the way."""

    wire_bytes: int = 0
    failovers: int = 0
    missing: set[int] = field(default_factory=set)  # blocks that some of it was written without
    positions: int = 0  # that the last sweep read
    troubled: bool = False  # whether it met a failure
    lacks: str = ""  # what it waits for, if it must not go on without


class Reader(Protocol):
    """Some blocks in one place, with what they have read of the window."""

    blocks: tuple[int, ...]

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""

    def ahead(self, window: bytes, epoch: int) -> None:
        """Let it read this much already; what it makes of it is asked for later."""

    def read(self, window: bytes, first: int, epoch: int) -> Awaitable[Tensor]:
        """Features (blocks, T, W) of the window from position `first` on. What is to be sent is sent before this returns."""

    async def aclose(self) -> None:
        """Forget the session."""


class RemoteReader:
    """Blocks of one stage, in a session of their own."""

    def __init__(self, line: StageLine, blocks: tuple[int, ...], wire: Wire, tally: Tally) -> None:
        self.line, self.blocks, self._wire, self._tally = line, blocks, wire, tally
        self._session = secrets.randbits(63)
        self._known = b""  # what the stage will have read when it has done all that it was sent
        self._early: tuple[bytes, int, asyncio.Future[Tensor]] | None = None

    @property
    def alive(self) -> bool:
        """Whether its line stands; the session on it may still be gone."""
        return self.line.alive

    async def open(self) -> None:
        """Open the session; what is read may be sent at once."""
        await self.line.open(self._session, self._wire, blocks=self.blocks)

    def ahead(self, window: bytes, epoch: int) -> None:
        """Let the stage read this much already."""
        start = common(self._known, window)
        if start < len(window):
            future = self._send(window, start, start, epoch)
            future.add_done_callback(seen)
            self._early = (window, start, future)

    async def _whole(self, early: asyncio.Future[Tensor], rest: asyncio.Future[Tensor]) -> Tensor:
        rest.add_done_callback(seen)
        return torch.cat([await early, await rest], dim=1)

    def read(self, window: bytes, first: int, epoch: int) -> Awaitable[Tensor]:
        """The features from `first` on; those that are already on their way are not asked for again."""
        early, self._early = self._early, None
        if (
            early is not None
            and early[1] == first
            and len(early[0]) < len(window)
            and window.startswith(early[0])
        ):
            return self._whole(early[2], self._send(window, len(early[0]), len(early[0]), epoch))
        return self._send(window, min(first, common(self._known, window)), first, epoch)

    def _send(self, window: bytes, start: int, first: int, epoch: int) -> asyncio.Future[Tensor]:
        """Send the window from `start` on, for the features from `first` on."""
        facts = self.line.facts
        ids, wanted = window[start:], len(window) - first
        run = frames.Run(epoch, start, len(ids), wanted)
        future = self.line.submit(self._session, run, ids)
        self._known = window
        width = facts.width if facts else 0
        self._tally.wire_bytes += sum(map(len, frames.encode(run, self._session, 0, [ids])))
        self._tally.wire_bytes += (
            RESULT_BYTES + len(self.blocks) * wanted * width * frames.ITEM[self._wire]
        )
        return future

    async def aclose(self) -> None:
        """End the session at the stage."""
        with contextlib.suppress(BlockTrainError):
            await self.line.close(self._session)


class LocalReader:
    """Blocks in this process."""

    alive = True

    def __init__(self, holding: FanBlocks, blocks: tuple[int, ...], thread: ComputeThread) -> None:
        self.blocks, self._holding, self._thread = blocks, holding, thread
        self._memory = holding.fresh(blocks)
        self._known = b""

    def ahead(self, window: bytes, epoch: int) -> None:
        """Nothing: there is no way to save."""

    def read(self, window: bytes, first: int, epoch: int) -> Awaitable[Tensor]:
        """The features from `first` on, computed while the others' are on their way."""
        start = min(first, common(self._known, window))
        self._known = window
        return asyncio.ensure_future(
            self._thread.run(lambda: self._work(window[start:], start)[:, first - start :])
        )

    def _work(self, ids: bytes, start: int) -> Tensor:
        return local_features(self._holding, self._memory, self.blocks, ids, start)

    async def aclose(self) -> None:
        """Nothing to free but memory."""


def local_features(
    holding: FanBlocks, memory: dict[int, Cache], blocks: tuple[int, ...], ids: bytes, start: int
) -> Tensor:
    """What blocks of this process make of ids from `start` on: (blocks, T, W)."""
    tokens = torch.tensor([list(ids)])

    def work(part: slice) -> Tensor:
        piece = tokens[:, part]
        return holding.work(
            [Part(memory, blocks, start + part.start, piece, wanted=piece.shape[1])]
        )[0]

    return in_pieces(work, len(ids))


def seen(future: asyncio.Future[Tensor]) -> None:
    """Nobody may look at it any more: that is no reason to complain at the end."""
    if not future.cancelled():
        future.exception()
