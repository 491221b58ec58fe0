"""What stages answer is checked: every answer for plausible numbers, some by computing them again.

A stage whose numbers cannot be right counts as lost. A share of the sweeps is computed again for
one block by another holder, beside the answer. If the two differ, a third one decides who lied.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from torch import Tensor

from blocktrain.errors import BlockTrainError
from blocktrain.learning.generate import Tokens
from blocktrain.protocol.frames import Wire
from blocktrain.serving.blocks import ComputeThread, FanBlocks
from blocktrain.serving.entry.failover import AnswerTally, LocalBlocks, RemoteBlocks
from blocktrain.serving.entry.route import Route

HERE = "this process"
MOST_FACTOR = 1e3
"""How much larger or smaller a position's features may be than those of the blocks computed here.
All blocks have the same shape, and what reads them normalizes each position anyway."""
BROKEN_SECONDS = 60.0  # that a stage with impossible numbers is not asked
TOLERANCE: dict[Wire, float] = {"fp32": 0.01, "fp16": 0.03}
"""Of a position's norm: above the rounding of other processors, below what changes a text."""
CHECK_SECONDS = 30.0  # that computing again may take


def find_broken(results: Mapping[RemoteBlocks, Tensor], local: Collection[Tensor]) -> list[str]:
    """For each stage why its features (blocks, T, W) cannot be right; empty if they can."""
    sizes = [_mean_squares(rows).mean() for rows in local if rows.numel()]
    usual = max((float(size) for size in sizes), default=0.0)
    return [_why_broken(rows, usual) for rows in results.values()]


def _why_broken(rows: Tensor, usual: float) -> str:
    squares = _mean_squares(rows)
    low, high = float(squares.min()), float(squares.max())
    if not high < float("inf"):  # NaN is not either
        return "its features are not finite"
    factor = MOST_FACTOR * MOST_FACTOR
    if usual and not usual / factor <= low <= high <= usual * factor:
        return f"its features are more than {MOST_FACTOR:.0f} times larger or smaller than usual"
    return ""


def _mean_squares(rows: Tensor) -> Tensor:
    """Of every position."""
    return rows.square().mean(-1)


def agree(one: Tensor, other: Tensor, wire: Wire) -> bool:
    """Whether two stages computed the same features, but for rounding."""
    size = _mean_squares(one).maximum(_mean_squares(other))
    return bool((_mean_squares(one - other) <= TOLERANCE[wire] ** 2 * size).all())


@dataclass(frozen=True)
class FeatureClaim:
    """The features (1, T, W) of a block from position `first` on, as one holder gave them."""

    holder: str
    block: int
    window: Tokens
    first: int
    rows: Tensor
    wire: Wire


def find_liars(claims: list[FeatureClaim]) -> tuple[list[str], list[str]]:
    """Who lied, and whose word stands against another's, among claims about the same features.

    What was computed here is right. Otherwise most of them are, if they agree.
    """
    for truth in sorted(claims, key=lambda claim: claim.holder != HERE):
        right = {c.holder for c in claims if agree(c.rows, truth.rows, truth.wire)}
        if truth.holder == HERE or 2 * len(right) > len(claims):
            return [c.holder for c in claims if c.holder not in right], []
    return [], [c.holder for c in claims]


@dataclass
class SpotChecks:
    """The checks of all answers of an entry, one at a time."""

    route: Route
    thread: ComputeThread
    local: FanBlocks
    share: float  # of the sweeps
    made: int = 0
    failed: int = 0
    _random: random.Random = field(default_factory=random.SystemRandom)  # no stage can foresee it
    _task: asyncio.Task[None] | None = None

    def consider(
        self,
        results: Mapping[RemoteBlocks, Tensor],
        window: Tokens,
        first: int,
        wire: Wire,
        tally: AnswerTally,
    ) -> None:
        """Perhaps compute one block of this sweep again, beside the answer."""
        if not results or self._task is not None or self._random.random() >= self.share:
            return
        holder, rows = self._random.choice(list(results.items()))
        place = self._random.randrange(len(holder.blocks))
        block, own = holder.blocks[place], rows[place : place + 1]
        claim = FeatureClaim(holder.line.name, block, window, first, own, wire)
        self._task = asyncio.get_running_loop().create_task(self._check(claim, tally))

    async def _check(self, claim: FeatureClaim, tally: AnswerTally) -> None:
        claims = [claim]
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                while (more := await self._again(claim, {c.holder for c in claims})) is not None:
                    claims.append(more)
                    if len(claims) == 3 or more.holder == HERE:
                        break
                    if agree(claim.rows, more.rows, claim.wire):
                        break
        except (BlockTrainError, TimeoutError):
            pass  # a stage was lost meanwhile: what there is has to do
        finally:
            self._task = None
        if len(claims) > 1:
            self.made += 1
            self._judge(claims, tally)

    async def _again(self, claim: FeatureClaim, asked: set[str]) -> FeatureClaim | None:
        """The same features from somebody who was not asked yet."""
        numbers, name = (claim.block,), HERE
        if claim.block in self.local.blocks:
            here = LocalBlocks(self.local, numbers, self.thread)
            rows = await here.read(claim.window, claim.first, 0)
        elif (line := self.route.pick(claim.block, asked)) is not None:
            name = line.name
            async with aclosing(RemoteBlocks(line, numbers, claim.wire, AnswerTally())) as session:
                await session.open()
                rows = await session.read(claim.window, claim.first, 0)
        else:
            return None
        return replace(claim, holder=name, rows=rows)

    def _judge(self, claims: list[FeatureClaim], tally: AnswerTally) -> None:
        liars, doubted = find_liars(claims)
        self.failed += bool(liars or doubted)
        tally.suspects |= {*liars, *doubted}
        block = claims[0].block
        for name in liars:
            others = " and ".join(c.holder for c in claims if c.holder not in liars)
            self.route.ban(name, f"its features of block {block} are not those of {others}")
        for name in doubted:
            others = " and ".join(c.holder for c in claims if c.holder != name)
            self.route.doubt(name, f"its features of block {block} are not those of {others}")

    async def aclose(self) -> None:
        """Give up the check under way."""
        if (task := self._task) is not None:
            task.cancel()
            await asyncio.wait([task])
