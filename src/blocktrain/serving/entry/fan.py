"""One answer's fan: ask all blocks at once, and fuse their features."""

from __future__ import annotations

import asyncio
import contextlib

import torch
from torch import Tensor

from blocktrain.learning.compose import in_pieces
from blocktrain.learning.generate import Tokens, common_prefix
from blocktrain.learning.model import FanReadout
from blocktrain.serving.entry.checks import BROKEN_SECONDS, find_broken
from blocktrain.serving.entry.failover import (
    AnswerFailed,
    BlockSession,
    Failover,
    FanModel,
    RemoteBlocks,
    Terms,
    retrieve_exception,
)
from blocktrain.serving.line.stage_line import StageLost, StageRefused


class Fusion:
    """The fusion block, or the pool, of one answer."""

    def __init__(self, readout: FanReadout, device: torch.device | None = None) -> None:
        self.readout, self._device = readout, device
        self._cache = readout.new_cache()
        self._known: Tokens = ()
        self._present: tuple[bool, ...] = ()  # the blocks with which that was read

    def first(self, window: Tokens, start: int, present: tuple[bool, ...]) -> int:
        """From which position on it needs features to score from `start` on."""
        if self._cache is None:
            return start
        return min(start, common_prefix(self._known, window)) if present == self._present else 0

    def read(
        self, window: Tokens, first: int, features: Tensor, present: tuple[bool, ...]
    ) -> Tensor:
        """Logits (T, V) of the window from `first` on, from the features (N, T, W)."""
        ids = torch.tensor([window[first:]], device=self._device)
        mask = torch.tensor(present, dtype=torch.float32, device=self._device)[:, None]
        features = features.to(ids.device)
        if self._cache is not None:
            self._cache.truncate(first)
            self._known, self._present = window[:first], present
        logits = in_pieces(
            lambda part: self._answer(ids[:, part], features[:, None, part], mask), ids.shape[1]
        )[0]
        self._known = window
        return logits.cpu()

    def _answer(self, ids: Tensor, features: Tensor, mask: Tensor) -> Tensor:
        return self.readout.combine(ids, features, mask, self._cache)


class FanSession:
    """The composed model for one answer, as `await score(window, start)`."""

    def __init__(self, model: FanModel, terms: Terms) -> None:
        self._model = model
        self._failover = Failover(model, terms)
        self.tally = self._failover.tally
        self._fusion = Fusion(model.readout, model.local.device)
        self._terms = terms
        self._epoch = 0
        self._bans = model.route.bans

    async def prefill(self, window: Tokens) -> None:
        """Let all holders read this window ahead; failures are handled by the next score."""
        with contextlib.suppress(StageLost, StageRefused):
            await self._failover.choose()
            for holder in self._failover.holders:
                holder.prefill(window, self._epoch)

    async def score(self, window: Tokens, start: int) -> Tensor:
        """Logits (T, V) of the window from position `start` on.

        One round trip; more only where a stage is lost.
        """
        self.tally.had_failure = False
        while True:
            await self._failover.cover()
            present = self._failover.present()
            if self._bans != self._model.route.bans:  # what was read may come from a liar
                self._bans = self._model.route.bans
                self._fusion = Fusion(self._model.readout, self._model.local.device)
            if not any(present):
                raise AnswerFailed(
                    "no stage of any block can be reached; start one with: blocktrain stage RUN"
                )
            first = self._fusion.first(window, start, present)
            self.tally.positions = len(window) - first
            features = await self._ask(window, first)
            if features is not None:
                break
            self.tally.had_failure = True
            self._epoch += 1
        self.tally.missing |= {number for number, there in enumerate(present, 1) if not there}
        logits = await self._model.thread.run(
            lambda: self._fusion.read(window, first, features, present)
        )
        return logits[start - first :]

    async def _ask(self, window: Tokens, first: int) -> Tensor | None:
        """Features (N, T, W) of all blocks from `first` on, zeros for those without a holder.

        None if a holder was lost: the sweep is then repeated with another.
        """
        failover, lost = self._failover, False
        requests: Requests = {}
        for holder in list(failover.holders):
            try:
                requests[asyncio.ensure_future(holder.read(window, first, self._epoch))] = holder
            except (StageLost, StageRefused) as error:
                failover.fail(holder, error)
                lost = True
        try:
            pending = set(requests)
            while pending and not lost:
                done, pending = await asyncio.wait(
                    pending, timeout=failover.hang_seconds, return_when=asyncio.FIRST_COMPLETED
                )
                lost = not done and failover.drop_hanging([requests[future] for future in pending])
                for future in done:
                    problem = future.exception()
                    if isinstance(problem, StageLost | StageRefused):
                        failover.fail(requests[future], problem)
                        lost = True
                    elif problem is not None:
                        raise problem
        finally:
            for future in requests:  # those still on their way are not awaited
                future.add_done_callback(retrieve_exception)
        if lost or self._drop_broken(requests):
            return None
        if (checks := self._model.checks) is not None:
            checks.consider(_remote(requests), window, first, self._terms.wire, self.tally)
        features = torch.zeros(self._model.blocks, len(window) - first, self._model.width)
        for future, holder in requests.items():
            for number, rows in zip(holder.blocks, future.result(), strict=True):
                features[number - 1] = rows
        return features

    def _drop_broken(self, requests: Requests) -> bool:
        """Drop stages whose answers cannot be right; returns whether there were any."""
        results = _remote(requests)
        local = [future.result() for future, h in requests.items() if h not in results]
        broken = [
            (holder, why)
            for holder, why in zip(results, find_broken(results, local), strict=True)
            if why
        ]
        for holder, why in broken:
            self.tally.suspects.add(holder.line.name)
            self._model.route.ban(holder.line.name, why, BROKEN_SECONDS)
            self._failover.drop(holder)
        return bool(broken)

    async def aclose(self) -> None:
        """Free the sessions everywhere."""
        await self._failover.aclose()


Requests = dict[asyncio.Future[Tensor], BlockSession]


def _remote(requests: Requests) -> dict[RemoteBlocks, Tensor]:
    """What the stages answered."""
    return {h: future.result() for future, h in requests.items() if isinstance(h, RemoteBlocks)}
