"""One answer's fan: who reads which block, what is done when a reader is lost, and the fusion of what they say."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blocktrain.errors import BlockTrainError
from blocktrain.learning.compose import in_pieces
from blocktrain.learning.model import FanReadout
from blocktrain.protocol import frames
from blocktrain.protocol.frames import Wire
from blocktrain.serving.entry.decode import common
from blocktrain.serving.entry.readers import (
    AnswerFailed,
    LocalReader,
    Reader,
    RemoteReader,
    Tally,
    seen,
)
from blocktrain.serving.entry.route import Route
from blocktrain.serving.entry.thread import ComputeThread
from blocktrain.serving.holding import FanBlocks
from blocktrain.serving.line.lines import StageLine, StageLost, StageRefused

GRACE_SECONDS, GRACE_ROUND_TRIPS = (
    0.5,
    4,
)  # that a stage which was just lost is given to come back, if no other holds its block
PATIENCE_SECONDS = 5.0  # the same, if the answer must not go on without the block
AVOID_SECONDS = 1.0  # how long a stage that refused is not asked again
HANG_SECONDS = 20.0  # that a stage which answers PINGs may compute before another holder is asked; twice as long the next time
SHUN_SECONDS = 60.0  # how long one that took longer is asked by nobody, if others hold its blocks
RETRY_SECONDS, CHECK_SECONDS = 0.02, 0.25  # between two looks at who is there


@dataclass(frozen=True)
class Terms:
    """How an answer's fan may be read."""

    wire: Wire = "fp32"
    allow_degraded: bool = True
    deadline: float = math.inf  # on the loop's clock: after it nobody is waited for


class Fusion:
    """The fusion block, or the pool, of one answer: a function of the window and of which blocks are there."""

    def __init__(self, readout: FanReadout) -> None:
        self.readout = readout
        self._cache = readout.new_cache()
        self._known, self._kept = b"", ()  # type: tuple[bytes, tuple[bool, ...]]

    def first(self, window: bytes, start: int, kept: tuple[bool, ...]) -> int:
        """From which position on it needs features to tell what follows position `start` and on."""
        if self._cache is None:
            return start
        return min(start, common(self._known, window)) if kept == self._kept else 0

    def read(self, window: bytes, first: int, features: Tensor, kept: tuple[bool, ...]) -> Tensor:
        """Logits (T, V) of the window from `first` on, from the features (N, T, W)."""
        ids = torch.tensor([list(window[first:])])
        there = torch.tensor(kept, dtype=torch.float32)[:, None]
        if self._cache is None:
            return in_pieces(
                lambda part: self._answer(ids[:, part], features[:, None, part], there),
                ids.shape[1],
            )[0]
        self._cache.truncate(first)
        self._known, self._kept = window[:first], kept
        found = in_pieces(
            lambda part: self._answer(ids[:, part], features[:, None, part], there), ids.shape[1]
        )[0]
        self._known = window
        return found

    def _answer(self, ids: Tensor, features: Tensor, kept: Tensor) -> Tensor:
        return self.readout.combine(ids, features, kept, self._cache)


class FanSession:
    """The composed model for one answer, as `await score(window, start)`."""

    def __init__(self, home: Home, terms: Terms) -> None:
        self._home, self._terms = home, terms
        self.tally = Tally()
        self._fusion = Fusion(home.readout)
        self._readers: list[Reader] = []
        self._epoch = 0
        self._avoid: dict[str, float] = {}
        self._hang_seconds = HANG_SECONDS

    async def ahead(self, window: bytes) -> None:
        """Let all stages read this much while something else is done; a stage that fails is noticed later."""
        with contextlib.suppress(StageLost, StageRefused):
            await self._choose()
            for reader in self._readers:
                reader.ahead(window, self._epoch)

    async def score(self, window: bytes, start: int) -> Tensor:
        """Logits (T, V) of the window from position `start` on: one round trip, more only where a stage is lost."""
        self.tally.troubled = False
        while True:
            await self._wait_for_all()
            kept = self._kept()
            if not any(kept):
                raise AnswerFailed(
                    "no stage of any block can be reached; start one with: blocktrain stage RUN"
                )
            first = self._fusion.first(window, start, kept)
            self.tally.positions = len(window) - first
            features = await self._ask(window, first)
            if features is not None:
                break
            self.tally.troubled = True
            self._epoch += 1
        self.tally.missing |= {number for number, there in enumerate(kept, 1) if not there}
        logits = await self._home.thread.run(
            lambda: self._fusion.read(window, first, features, kept)
        )
        return logits[start - first :]

    async def aclose(self) -> None:
        """Free the sessions everywhere."""
        readers, self._readers = self._readers, []
        for reader in readers:
            await reader.aclose()

    # -- who reads

    def _kept(self) -> tuple[bool, ...]:
        there = {number for reader in self._readers for number in reader.blocks}
        return tuple(number in there for number in range(1, self._home.blocks + 1))

    async def _choose(self) -> None:
        """Keep the readers that live; find one for every other block that somebody holds."""
        for reader in [r for r in self._readers if not r.alive]:
            self._drop(reader)
        wanted: dict[StageLine | None, list[int]] = {}
        for number, there in enumerate(self._kept(), 1):
            if there:
                continue
            line = None if number in self._home.own else self._pick(number)
            if line is not None or number in self._home.local.blocks:
                wanted.setdefault(line, []).append(number)
        for line, numbers in wanted.items():
            if line is None:
                self._readers.append(
                    LocalReader(self._home.local, tuple(numbers), self._home.thread)
                )
            else:
                reader = RemoteReader(line, tuple(numbers), self._terms.wire, self.tally)
                await reader.open()
                self._readers.append(reader)

    def _pick(self, number: int) -> StageLine | None:
        """Whom to ask for a block, None for this process: one that hung lately only if there is nobody else."""
        avoid, route = _names(self._avoid), self._home.route
        found = route.pick(number, avoid | _names(self._home.shunned))
        return (
            found
            if found is not None or number in self._home.local.blocks
            else route.pick(number, avoid)
        )

    def _drop(self, reader: Reader) -> None:
        if reader in self._readers:
            self._readers.remove(reader)
            self.tally.failovers += 1
            closing = asyncio.get_running_loop().create_task(reader.aclose())
            self._home.closing.add(closing)
            closing.add_done_callback(self._home.closing.discard)

    async def _wait_for_all(self) -> None:
        """Readers for all blocks; for one that nobody holds any more, wait as long as that makes sense."""
        loop, route = asyncio.get_running_loop(), self._home.route
        began = loop.time()
        while True:
            await self._choose()
            missing = [number for number, there in enumerate(self._kept(), 1) if not there]
            self.tally.lacks = ""
            if not missing:
                return
            gone = min(route.gone_for(number) for number in missing)
            slowest = max((line.rtt_ms for line in route.lines), default=0.0) / 1000
            grace = GRACE_SECONDS + GRACE_ROUND_TRIPS * slowest
            if self._terms.allow_degraded:
                if gone >= grace:
                    return
                wait = grace - gone
            else:
                wait = min(self._terms.deadline, began + PATIENCE_SECONDS) - loop.time()
                refused = any(
                    route.pick(number) for number in missing
                )  # alive, but it said no a moment ago
                if wait <= 0 or (gone == math.inf and not refused):
                    raise AnswerFailed(self._nobody(missing))
                self.tally.lacks = self._nobody(missing)
            self.tally.troubled = True
            await route.changed(min(max(wait, RETRY_SECONDS), CHECK_SECONDS))

    def _nobody(self, missing: list[int]) -> str:
        names = ", ".join(str(number) for number in missing)
        return f"no stage holds block {names} now; start one with: blocktrain stage RUN --blocks {names}, or allow degraded answers"

    # -- what they say

    async def _ask(self, window: bytes, first: int) -> Tensor | None:
        """Features (N, T, W) of all blocks from `first` on, zeros for those that nobody holds; None where a reader was lost."""
        asked: dict[asyncio.Future[Tensor], Reader] = {}
        lost = False
        for reader in list(self._readers):
            try:
                asked[asyncio.ensure_future(reader.read(window, first, self._epoch))] = reader
            except (StageLost, StageRefused) as error:
                self._failed(reader, error)
                lost = True
        try:
            waiting = set(asked)
            while waiting and not lost:
                done, waiting = await asyncio.wait(
                    waiting, timeout=self._hang_seconds, return_when=asyncio.FIRST_COMPLETED
                )
                lost = not done and self._leave_hanging([asked[future] for future in waiting])
                for future in done:
                    problem = future.exception()
                    if isinstance(problem, StageLost | StageRefused):
                        self._failed(asked[future], problem)
                        lost = True
                    elif problem is not None:
                        raise problem
        finally:
            for future in asked:  # what is still on its way nobody waits for
                future.add_done_callback(seen)
        if lost:
            return None
        features = torch.zeros(self._home.blocks, len(window) - first, self._home.width)
        for future, reader in asked.items():
            for number, rows in zip(reader.blocks, future.result(), strict=True):
                features[number - 1] = rows
        return features

    def _leave_hanging(self, readers: list[Reader]) -> bool:
        """Give up those that somebody else can stand in for; whether there are any."""
        found = [
            reader
            for reader in readers
            if isinstance(reader, RemoteReader) and self._can_do_without(reader)
        ]
        for reader in found:
            self._home.shunned[reader.line.name] = asyncio.get_running_loop().time() + SHUN_SECONDS
            self._drop(reader)
        self._hang_seconds *= 2  # all may be slow: then no answer would ever come
        return bool(found)

    def _can_do_without(self, reader: RemoteReader) -> bool:
        home, avoid = self._home, _names(self._home.shunned) | {reader.line.name}
        return all(
            number in home.local.blocks or home.route.pick(number, avoid)
            for number in reader.blocks
        )

    def _failed(self, reader: Reader, error: BlockTrainError) -> None:
        self._drop(reader)
        if (
            isinstance(error, StageRefused)
            and isinstance(reader, RemoteReader)
            and error.code != frames.Why.UNKNOWN_SESSION
        ):
            self._avoid[reader.line.name] = asyncio.get_running_loop().time() + AVOID_SECONDS


def _names(until: dict[str, float]) -> set[str]:
    """Of those whose time is not over."""
    now = asyncio.get_running_loop().time()
    return {name for name, time in until.items() if time > now}


@dataclass
class Home:
    """What all answers of an entry share: its route, its own blocks, the readout, and the thread that computes."""

    route: Route
    thread: ComputeThread
    local: FanBlocks
    own: frozenset[int]  # blocks that it always reads itself: the one it drafts with
    readout: FanReadout
    blocks: int  # independent ones
    width: int
    closing: set[asyncio.Task[None]] = field(default_factory=set)
    shunned: dict[str, float] = field(default_factory=dict)  # stages that hung, until when
