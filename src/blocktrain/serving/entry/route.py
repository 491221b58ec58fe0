"""The stages of a route: a line to each, the nearest holder of a block, and which are gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from blocktrain.errors import BlockTrainError, ConfigError
from blocktrain.protocol.frames import Why
from blocktrain.serving.line.stage_line import StageAccess, StageLine, StageLost, StageRefused

QUEUE_MS = 2.0  # a RUN that waits at the stage counts as so much round trip
WRONG = frozenset(
    {Why.WRONG_KEY, Why.WRONG_FINGERPRINT, Why.WRONG_MODEL, Why.WRONG_PROTOCOL}
)  # waiting does not help
GHOST_SECONDS = 10.0  # then no answer waits for a lost stage; its line still reconnects
LOOK_SECONDS = 5.0  # between two requests to the coordinator

log = logging.getLogger("blocktrain.entry")
FindStages = Callable[[str], Awaitable[Sequence[str]]]
"""Where the stages of the model with this hash are now."""


class Holder(Protocol):
    """What the choice among several stages depends on."""

    name: str
    blocks: tuple[int, ...]
    rtt_ms: float
    queue: int

    @property
    def alive(self) -> bool:
        """Whether it can be asked now."""


H = TypeVar("H", bound=Holder)


def distance_ms(holder: Holder) -> float:
    """How long until it begins with a new RUN."""
    return holder.rtt_ms + QUEUE_MS * holder.queue


def nearest(holders: Iterable[H], block: int, avoid: Collection[str] = ()) -> H | None:
    """The living holder of a block that is soonest to answer."""
    able = [h for h in holders if h.alive and block in h.blocks and h.name not in avoid]
    return min(able, key=lambda h: (distance_ms(h), h.name), default=None)


def chain(holders: Iterable[H], blocks: int) -> list[H]:
    """Living stages in order that hold blocks 1 to `blocks`, each once; empty if there are none."""
    able = [h for h in holders if h.alive and h.blocks]
    stages: list[H] = []
    block = 1
    while block <= blocks:
        next_ = min(
            (h for h in able if h.blocks[0] == block),
            key=lambda h: (-len(h.blocks), distance_ms(h)),
            default=None,
        )
        if next_ is None or next_.blocks[-1] > blocks:
            return []
        stages.append(next_)
        block = next_.blocks[-1] + 1
    return stages


class Route:
    """Warm lines to all stages that are named, or that a coordinator lists."""

    def __init__(self, stages: Sequence[str] | FindStages, access: StageAccess) -> None:
        self.lines: list[StageLine] = []
        self._access = access
        self._find = stages if callable(stages) else None
        self._look_task: asyncio.Task[None] | None = None
        self._since: dict[str, float] = {}  # when each last came or went
        self._news = asyncio.Event()
        self._banned: dict[str, tuple[float, str]] = {}  # stages that answer wrongly: until, why
        self.doubts: dict[str, str] = {}  # stages that are the last choice, and why
        self.bans = 0
        self.on_change: Callable[[StageLine], None] | None = None  # a stage came or went
        for name in () if callable(stages) else stages:
            self._add(name)

    def _add(self, name: str) -> None:
        line = StageLine(name, self._access)
        line.on_change = self._on_line_change
        self.lines.append(line)

    async def start(self, seconds: float) -> None:
        """Connect to all of them. A named one that serves something else is an error.

        Those that do not answer in time may come later.
        """
        if self._find is not None:
            await self._follow(await self._find(self._access.model))
            self._look_task = asyncio.create_task(self._look(self._find))

        async def ready(line: StageLine) -> None:
            try:
                await line.ready(seconds)
            except StageLost:
                pass
            except StageRefused as refused:
                if refused.code in WRONG and self._find is None:
                    raise

        await asyncio.gather(*(ready(line) for line in self.lines))

    async def aclose(self) -> None:
        """Close all lines."""
        self.on_change = None
        if self._look_task is not None:
            self._look_task.cancel()
        await asyncio.gather(*(line.aclose() for line in self.lines))

    async def _look(self, find: FindStages) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            with contextlib.suppress(BlockTrainError):  # the coordinator is away: keep the lines
                await self._follow(await find(self._access.model))

    async def _follow(self, names: Sequence[str]) -> None:
        """Dial new stages; drop those that are unreachable and no longer listed."""
        known, now = {line.name for line in self.lines}, asyncio.get_running_loop().time()
        for name in names:
            if name not in known:
                with contextlib.suppress(
                    ConfigError
                ):  # not an address: a coordinator may list anything
                    self._add(name)
                    self.lines[-1].start()
        absent = [line for line in self.lines if line.name not in names and not line.alive]
        for line in [
            line for line in absent if now - self._since.get(line.name, -math.inf) >= GHOST_SECONDS
        ]:
            self.lines.remove(line)
            await line.aclose()

    def pick(self, block: int, avoid: Collection[str] = ()) -> StageLine | None:
        """The stage to ask for a block now."""
        return nearest(self.trusted(), block, avoid)

    def available_blocks(self) -> set[int]:
        """Blocks that some living stage holds."""
        return {block for line in self.trusted() if line.alive for block in line.blocks}

    def ban(self, name: str, reason: str, seconds: float = math.inf) -> None:
        """Do not ask a stage that answered wrongly."""
        self._banned[name] = asyncio.get_running_loop().time() + seconds, reason
        self.bans += 1
        log.warning("stage %s is not asked any more: %s", name, reason)
        self._tell()

    def doubt(self, name: str, reason: str) -> None:
        """Ask a stage only where no other can be asked."""
        self.doubts[name] = reason
        log.warning("stage %s is asked last: %s, and there is no third to decide", name, reason)

    def trusts(self, name: str) -> bool:
        until, _ = self._banned.get(name, (-math.inf, ""))
        return until <= asyncio.get_running_loop().time()

    def trusted(self) -> list[StageLine]:
        """All but those that answered wrongly."""
        return (
            [line for line in self.lines if self.trusts(line.name)] if self._banned else self.lines
        )

    def _trouble(self, name: str) -> str:
        return self.doubts.get(name, "") if self.trusts(name) else self._banned[name][1]

    def seconds_absent(self, block: int) -> float:
        """Seconds since the last holder of a block went; infinite if none was there lately."""
        now = asyncio.get_running_loop().time()
        absences = [
            now - self._since.get(line.name, -math.inf)
            for line in self.lines
            if block in line.blocks and not line.alive
        ]
        seconds = min(absences, default=math.inf)
        return seconds if seconds < GHOST_SECONDS else math.inf

    async def wait_for_change(self, seconds: float) -> None:
        """Wait until a stage comes or goes, at most this long."""
        news = self._news
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(news.wait(), seconds)

    def status(self) -> list[dict[str, Any]]:
        """Every stage as it is now."""
        names = ("name", "alive", "queue", "failures", "bytes_in", "bytes_out")
        return [
            {n: getattr(line, n) for n in names}
            | {"blocks": list(line.blocks), "rtt_ms": round(line.rtt_ms, 3)}
            | {"trouble": self._trouble(line.name)}
            for line in self.lines
        ]

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _on_line_change(self, line: StageLine) -> None:
        self._since[line.name] = asyncio.get_running_loop().time()
        self._tell()
        if self.on_change is not None:
            self.on_change(line)
