"""Which stage to ask for which block: the lines to all stages of a route, the nearest holder, and who has gone."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from blocktrain.errors import ConfigError
from blocktrain.protocol.frames import Why
from blocktrain.serving.lines import Access, StageLine, StageLost, StageRefused

QUEUE_MS = 2.0  # what a RUN that waits there counts for, beside a round trip
WRONG = frozenset({Why.WRONG_KEY, Why.WRONG_FINGERPRINT, Why.WRONG_MODEL, Why.WRONG_PROTOCOL})  # somebody has to change something
GHOST_SECONDS = 10.0  # unreachable for so long: nobody waits for it any more; its line still tries to come back


class Holder(Protocol):
    """A stage as far as choosing among several looks at it."""

    name: str
    blocks: tuple[int, ...]
    rtt_ms: float
    queue: int

    @property
    def alive(self) -> bool:
        """Whether it can be asked now."""


H = TypeVar("H", bound=Holder)


def distance_ms(holder: Holder) -> float:
    """How long it takes until it begins with what it is asked."""
    return holder.rtt_ms + QUEUE_MS * holder.queue


def nearest(holders: Iterable[H], block: int, avoid: Collection[str] = ()) -> H | None:
    """The living holder of a block that is soonest to answer."""
    able = [h for h in holders if h.alive and block in h.blocks and h.name not in avoid]
    return min(able, key=lambda h: (distance_ms(h), h.name), default=None)


def chain(holders: Iterable[H], blocks: int) -> list[H]:
    """Living stages one after another that hold blocks 1 to `blocks`, each once; empty if there are none."""
    able = [h for h in holders if h.alive and h.blocks]
    found: list[H] = []
    following = 1
    while following <= blocks:
        next_ = min((h for h in able if h.blocks[0] == following), key=lambda h: (-len(h.blocks), distance_ms(h)), default=None)
        if next_ is None or next_.blocks[-1] > blocks:
            return []
        found.append(next_)
        following = next_.blocks[-1] + 1
    return found


def parse_route(text: str) -> tuple[str, ...]:
    """host:port,host:port as names."""
    names = tuple(filter(None, (part.strip() for part in text.split(","))))
    if len(set(names)) != len(names):
        raise ConfigError(f"--route {text!r} names a stage twice; name each once")
    return names


class Route:
    """Warm lines to all stages that were named."""

    def __init__(self, names: Sequence[str], access: Access) -> None:
        self.lines = [StageLine(name, access) for name in names]
        self._since: dict[str, float] = {}  # when each last came or went
        self._news = asyncio.Event()

    async def start(self, seconds: float) -> None:
        """Connect to all of them. One that serves something else is an error; those that do not answer in time may come later."""
        for line in self.lines:
            line.on_change = self._changed

        async def ready(line: StageLine) -> None:
            try:
                await line.ready(seconds)
            except StageLost:
                pass
            except StageRefused as refused:
                if refused.code in WRONG:
                    raise

        await asyncio.gather(*(ready(line) for line in self.lines))

    async def aclose(self) -> None:
        """Hang up."""
        await asyncio.gather(*(line.aclose() for line in self.lines))

    def pick(self, block: int, avoid: Collection[str] = ()) -> StageLine | None:
        """Whom to ask for a block now."""
        return nearest(self.lines, block, avoid)

    def held(self) -> set[int]:
        """Blocks that some living stage holds."""
        return {block for line in self.lines if line.alive for block in line.blocks}

    def gone_for(self, block: int) -> float:
        """Seconds since the last holder of a block went; infinite if there never was one, or it is a ghost."""
        now = asyncio.get_running_loop().time()
        gone = [now - self._since.get(line.name, -math.inf) for line in self.lines if block in line.blocks and not line.alive]
        seconds = min(gone, default=math.inf)
        return seconds if seconds < GHOST_SECONDS else math.inf

    async def changed(self, seconds: float) -> None:
        """Wait until a stage comes or goes, or so long."""
        news = self._news
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(news.wait(), seconds)

    def status(self) -> list[dict[str, Any]]:
        """Every stage as it is now."""
        names = ("name", "alive", "queue", "failures", "bytes_in", "bytes_out")
        return [
            {n: getattr(line, n) for n in names} | {"blocks": list(line.blocks), "rtt_ms": round(line.rtt_ms, 3)} for line in self.lines
        ]

    def _changed(self, line: StageLine) -> None:
        self._since[line.name] = asyncio.get_running_loop().time()
        news, self._news = self._news, asyncio.Event()
        news.set()
