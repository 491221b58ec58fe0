"""Which holder computes each block for one answer, and what happens when a holder is lost.

A lost holder is replaced by another one, which reads the window again from ids alone, so the
answer finishes identically. The answer waits for a block without a holder. Then it goes on
without it (degraded), or fails if that is not allowed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from blocktrain.errors import BlockTrainError
from blocktrain.learning.generate import Tokens, common_prefix
from blocktrain.learning.model import FanReadout
from blocktrain.protocol import frames
from blocktrain.protocol.frames import Wire
from blocktrain.serving.blocks import ComputeThread, FanBlocks, local_features
from blocktrain.serving.entry.route import Route
from blocktrain.serving.line.stage_line import StageLine, StageRefused

if TYPE_CHECKING:
    from blocktrain.serving.entry.checks import SpotChecks

# How long a stage that was just lost may take to come back if no other holds its block.
GRACE_SECONDS, GRACE_ROUND_TRIPS = 0.5, 4
PATIENCE_SECONDS = 5.0  # the same, if the answer must not go on without the block
AVOID_SECONDS = 1.0  # how long a stage that refused is not asked again
# A stage that answers PINGs may compute this long before another holder is asked; twice as long
# the next time.
HANG_SECONDS = 20.0
HANG_AVOID_SECONDS = 60.0  # how long a stage that hung is avoided
RETRY_SECONDS, CHECK_SECONDS = 0.02, 0.25  # between two checks of the stages
RESULT_BYTES = frames.PREFIX.size + 16  # of a RESULT without its features


class AnswerFailed(BlockTrainError):
    """An answer cannot be finished. The service continues."""


@dataclass
class AnswerTally:
    """What one answer cost, and what went wrong."""

    wire_bytes: int = 0
    failovers: int = 0
    missing: set[int] = field(default_factory=set)  # blocks that some of it was written without
    suspects: set[str] = field(default_factory=set)  # stages that answered wrongly
    positions: int = 0  # of the last sweep
    had_failure: bool = False  # whether the last sweep met a failure
    lacks: str = ""  # the sentence about what it waits for, if it must not go on without


@dataclass(frozen=True)
class Terms:
    """How tensors are sent, whether blocks may be missing, and the deadline."""

    wire: Wire = "fp32"
    allow_degraded: bool = True
    deadline: float = math.inf  # on the loop's clock


@dataclass
class FanModel:
    """What all answers of an entry share when blocks are asked all at once."""

    route: Route
    thread: ComputeThread
    local: FanBlocks
    own: frozenset[int]  # blocks that are always computed here: the one that drafts
    readout: FanReadout
    blocks: int  # independent ones
    width: int
    close_tasks: set[asyncio.Task[None]] = field(default_factory=set)
    avoid_until: dict[str, float] = field(default_factory=dict)  # stages that hung, until when
    checks: SpotChecks | None = None


class BlockSession(Protocol):
    """Some blocks in one place, with the window that they have read.

    It sends or computes only what is new: ids from the first position on where the window differs.
    So one rule rolls caches back, restarts windows and replaces lost holders.
    """

    blocks: tuple[int, ...]

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""

    def prefill(self, window: Tokens, epoch: int) -> None:
        """Begin to read; the features are asked for later."""

    def read(self, window: Tokens, first: int, epoch: int) -> Awaitable[Tensor]:
        """Features (blocks, T, W) from position `first` on. All is sent before this returns."""

    async def aclose(self) -> None:
        """Free the session."""


class RemoteBlocks:
    """Blocks of one stage, in a session of their own."""

    def __init__(
        self, line: StageLine, blocks: tuple[int, ...], wire: Wire, tally: AnswerTally
    ) -> None:
        self.line, self.blocks, self._wire, self._tally = line, blocks, wire, tally
        self._session = secrets.randbits(63)
        self._known: Tokens = ()  # what the stage will have read after all that it was sent
        self._early: tuple[Tokens, int, asyncio.Future[Tensor]] | None = None

    @property
    def alive(self) -> bool:
        """Whether its line is up; the session on it may still be gone."""
        return self.line.alive

    async def open(self) -> None:
        await self.line.open(self._session, self._wire, blocks=self.blocks)

    def prefill(self, window: Tokens, epoch: int) -> None:
        start = common_prefix(self._known, window)
        if start < len(window):
            future = self._send(window, start, start, epoch)
            future.add_done_callback(retrieve_exception)
            self._early = (window, start, future)

    async def _join(self, early: asyncio.Future[Tensor], rest: asyncio.Future[Tensor]) -> Tensor:
        rest.add_done_callback(retrieve_exception)
        return torch.cat([await early, await rest], dim=1)

    def read(self, window: Tokens, first: int, epoch: int) -> Awaitable[Tensor]:
        """The features from `first` on; those already on their way are not asked for again."""
        early, self._early = self._early, None
        if early is not None and early[1] == first and len(early[0]) < len(window):
            size = len(early[0])
            if window[:size] == early[0]:
                return self._join(early[2], self._send(window, size, size, epoch))
        return self._send(window, min(first, common_prefix(self._known, window)), first, epoch)

    def _send(self, window: Tokens, start: int, first: int, epoch: int) -> asyncio.Future[Tensor]:
        """Send the window from `start` on, for the features from `first` on."""
        facts, ids, wanted = self.line.facts, window[start:], len(window) - first
        run = frames.Run(epoch, start, len(ids), wanted)
        future = self.line.submit(self._session, run, ids)
        self._known = window
        width = facts.width if facts else 0
        payload = frames.pack_ids(ids, self.line.access.id_bytes)
        self._tally.wire_bytes += sum(map(len, frames.encode(run, self._session, 0, [payload])))
        size = len(self.blocks) * wanted * width * frames.ITEM[self._wire]
        self._tally.wire_bytes += RESULT_BYTES + size
        return future

    async def aclose(self) -> None:
        with contextlib.suppress(BlockTrainError):
            await self.line.close(self._session)


class LocalBlocks:
    """Blocks in this process."""

    alive = True

    def __init__(self, served: FanBlocks, blocks: tuple[int, ...], thread: ComputeThread) -> None:
        self.blocks, self._served, self._thread = blocks, served, thread
        self._memory = served.fresh(blocks)
        self._known: Tokens = ()

    def prefill(self, window: Tokens, epoch: int) -> None:
        """Nothing: no round trip can be saved."""

    def read(self, window: Tokens, first: int, epoch: int) -> Awaitable[Tensor]:
        """The features from `first` on, computed while the others' are on their way."""
        start = min(first, common_prefix(self._known, window))
        self._known = window
        return asyncio.ensure_future(
            self._thread.run(lambda: self._work(window[start:], start)[:, first - start :])
        )

    def _work(self, ids: Tokens, start: int) -> Tensor:
        return local_features(self._served, self._memory, self.blocks, ids, start)

    async def aclose(self) -> None:
        """Nothing to free but memory."""


class Failover:
    """The holders of one answer: found when needed, replaced when lost."""

    def __init__(self, model: FanModel, terms: Terms) -> None:
        self._model, self._terms = model, terms
        self.tally = AnswerTally()
        self.holders: list[BlockSession] = []
        self.hang_seconds = HANG_SECONDS
        self._avoid: dict[str, float] = {}  # stages that refused, until when

    def present(self) -> tuple[bool, ...]:
        """For each block, whether it has a holder."""
        there = {number for holder in self.holders for number in holder.blocks}
        return tuple(number in there for number in range(1, self._model.blocks + 1))

    def _missing_blocks(self) -> list[int]:
        return [number for number, there in enumerate(self.present(), 1) if not there]

    async def choose(self) -> None:
        """Keep the holders that are alive; find one for every other block."""
        for holder in [h for h in self.holders if not self._may_stay(h)]:
            self.drop(holder)
        plan: dict[StageLine | None, list[int]] = {}
        for number in self._missing_blocks():
            line = None if number in self._model.own else self._pick(number)
            if line is not None or number in self._model.local.blocks:
                plan.setdefault(line, []).append(number)
        for line, numbers in plan.items():
            if line is None:
                model = self._model
                self.holders.append(LocalBlocks(model.local, tuple(numbers), model.thread))
            else:
                remote = RemoteBlocks(line, tuple(numbers), self._terms.wire, self.tally)
                await remote.open()
                self.holders.append(remote)

    def _may_stay(self, holder: BlockSession) -> bool:
        if isinstance(holder, RemoteBlocks) and not self._model.route.trusts(holder.line.name):
            return False
        return holder.alive

    def _pick(self, number: int) -> StageLine | None:
        """The stage to ask for a block; None: this process.

        One that hung, or that another one contradicts, is the last choice.
        """
        avoid, route = _active(self._avoid), self._model.route
        line = route.pick(number, avoid | _active(self._model.avoid_until) | route.doubts.keys())
        if line is not None or number in self._model.local.blocks:
            return line
        return route.pick(number, avoid)

    def drop(self, holder: BlockSession) -> None:
        """Use it no more, and close it in the background."""
        if holder in self.holders:
            self.holders.remove(holder)
            self.tally.failovers += 1
            task = asyncio.get_running_loop().create_task(holder.aclose())
            self._model.close_tasks.add(task)
            task.add_done_callback(self._model.close_tasks.discard)

    async def cover(self) -> None:
        """Find holders for all blocks; wait for a block without one as long as it may return.

        AnswerFailed if the answer may not go on without it.
        """
        loop, route = asyncio.get_running_loop(), self._model.route
        began = loop.time()
        while True:
            await self.choose()
            missing = self._missing_blocks()
            self.tally.lacks = ""
            if not missing:
                return
            absence = min(route.seconds_absent(number) for number in missing)
            if self._terms.allow_degraded:
                wait = self._grace() - absence
                if wait <= 0:
                    return
            else:
                wait = min(self._terms.deadline, began + PATIENCE_SECONDS) - loop.time()
                reachable = any(route.pick(number) for number in missing)  # alive, but refused us
                if wait <= 0 or (absence == math.inf and not reachable):
                    raise AnswerFailed(no_holder(missing))
                self.tally.lacks = no_holder(missing)
            self.tally.had_failure = True
            await route.wait_for_change(min(max(wait, RETRY_SECONDS), CHECK_SECONDS))

    def _grace(self) -> float:
        slowest = max((line.rtt_ms for line in self._model.route.lines), default=0.0) / 1000
        return GRACE_SECONDS + GRACE_ROUND_TRIPS * slowest

    def fail(self, holder: BlockSession, error: BlockTrainError) -> None:
        """Drop a holder that was lost or refused; do not ask one that refused again at once."""
        self.drop(holder)
        if (
            isinstance(error, StageRefused)
            and isinstance(holder, RemoteBlocks)
            and error.code != frames.Why.UNKNOWN_SESSION
        ):
            self._avoid[holder.line.name] = asyncio.get_running_loop().time() + AVOID_SECONDS

    def drop_hanging(self, holders: Iterable[BlockSession]) -> bool:
        """Drop those whose blocks have another holder; returns whether there were any."""
        hanging = [h for h in holders if isinstance(h, RemoteBlocks) and self._replaceable(h)]
        for holder in hanging:
            until = asyncio.get_running_loop().time() + HANG_AVOID_SECONDS
            self._model.avoid_until[holder.line.name] = until
            self.drop(holder)
        self.hang_seconds *= 2  # or no answer would ever come if all are slow
        return bool(hanging)

    def _replaceable(self, holder: RemoteBlocks) -> bool:
        model, avoid = self._model, _active(self._model.avoid_until) | {holder.line.name}
        return all(
            number in model.local.blocks or model.route.pick(number, avoid)
            for number in holder.blocks
        )

    async def aclose(self) -> None:
        holders, self.holders = self.holders, []
        for holder in holders:
            await holder.aclose()


def no_holder(blocks: Iterable[int]) -> str:
    names = ", ".join(map(str, blocks))
    return (
        f"no stage holds block {names} now; start one with: "
        f"blocktrain stage RUN --blocks {names}, or allow degraded answers"
    )


def _active(until: dict[str, float]) -> set[str]:
    """The names whose time is not over."""
    now = asyncio.get_running_loop().time()
    return {name for name, time in until.items() if time > now}


def retrieve_exception(future: asyncio.Future[Tensor]) -> None:
    """Mark the error as seen: asyncio would complain about a future that nobody awaits."""
    if not future.cancelled():
        future.exception()
