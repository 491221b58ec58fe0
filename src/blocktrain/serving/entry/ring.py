"""One answer's ring: the paper's path and the end-to-end reference, through stages or locally.

The stages hold the state, so a ring does not survive the loss of one: the answer fails, and the
next one takes another route.
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from blocktrain.config import Config
from blocktrain.errors import BlockTrainError
from blocktrain.learning.compose import euler_hop, in_pieces, path_start, window_noise
from blocktrain.learning.generate import Tokens, common_prefix
from blocktrain.learning.model import Cache, IndependentBlock, target_table
from blocktrain.protocol import frames
from blocktrain.protocol.frames import Wire
from blocktrain.serving.blocks import ComputeThread
from blocktrain.serving.entry.failover import RESULT_BYTES, AnswerFailed, AnswerTally
from blocktrain.serving.entry.route import Route, chain
from blocktrain.serving.line.stage_line import Ring, StageLost, StageRefused


@dataclass(frozen=True)
class RingModel:
    """What all answers of an entry share: the route, or the whole model if there is none."""

    route: Route
    thread: ComputeThread
    config: Config
    reference: bool
    # All of them, or the reference alone, or none: then stages hold them.
    blocks: list[IndependentBlock]


class Walk(Protocol):
    """One traversal of all blocks."""

    async def __call__(self, ids: Tokens, run: frames.Run, state: Tensor | None) -> Tensor:
        """Logits (wanted, V) of the last positions of the run."""

    async def aclose(self) -> None:
        """Free what it holds."""


class RemoteWalk:
    """Through the stages of a ring."""

    def __init__(self, ring: Ring, wire: Wire, tally: AnswerTally) -> None:
        self._ring, self._wire, self._tally = ring, wire, tally
        self._session = secrets.randbits(63)
        self._is_open = False

    async def __call__(self, ids: Tokens, run: frames.Run, state: Tensor | None) -> Tensor:
        try:
            if not self._is_open:
                self._is_open = True
                await self._ring.open(self._session, self._wire)
            logits = await self._ring.run(self._session, run, ids, state)
        except (StageLost, StageRefused) as error:
            raise AnswerFailed(
                f"a ring cannot go on without one of its stages ({error}); "
                "ask again when it is back"
            ) from None
        if not torch.isfinite(logits).all():
            raise AnswerFailed(
                "a stage of the ring answers in numbers that are not finite; "
                "restart it, or leave it out of --route"
            )
        self._count(len(ids), run, state, logits.shape[-1])
        return logits[0]

    def _count(self, ids: int, run: frames.Run, state: Tensor | None, logits: int) -> None:
        """Add the bytes of one walk: ids on every hop, the state where it is passed on."""
        first = self._ring.lines[0]
        hops, size = len(self._ring.lines), frames.ITEM[self._wire]
        width = first.facts.width if first.facts else 0
        width, state_hops = (width, hops - 1) if state is None else (state.shape[-1], hops)
        header = frames.PREFIX.size + 16
        self._tally.wire_bytes += hops * (header + ids * first.access.id_bytes)
        self._tally.wire_bytes += state_hops * run.count * width * size
        self._tally.wire_bytes += RESULT_BYTES + run.wanted * logits * size

    async def aclose(self) -> None:
        """End the session at every stage."""
        if self._is_open:
            await self._ring.close(self._session)


class LocalEuler:
    """The paper's path in this process."""

    def __init__(self, model: RingModel) -> None:
        self._model, self._device = model, model.blocks[0].device
        self._table = target_table(model.config).to(self._device)

    async def __call__(self, ids: Tokens, run: frames.Run, state: Tensor | None) -> Tensor:
        return await self._model.thread.run(
            lambda: self._walk(torch.tensor([ids], device=self._device), state, run)
        )

    def _walk(self, tokens: Tensor, state: Tensor | None, run: frames.Run) -> Tensor:
        if state is None:
            raise ValueError("a walk of the path begins with z")
        z, logits = state[None].to(self._device), state
        for number, block in enumerate(self._model.blocks, 1):
            logits, z = euler_hop(
                self._model.config, number, block, self._table, tokens, z, tail=run.tail
            )
        return logits[0, -run.wanted :].cpu()

    async def aclose(self) -> None:
        """Nothing to free."""


class LocalReference:
    """The end-to-end model in this process."""

    def __init__(self, model: RingModel) -> None:
        self._thread, self._block = model.thread, model.blocks[0]
        self._cache = Cache(self._block, 1)

    async def __call__(self, ids: Tokens, run: frames.Run, state: Tensor | None) -> Tensor:
        return await self._thread.run(lambda: self._read(ids, run))

    def _read(self, ids: Tokens, run: frames.Run) -> Tensor:
        tokens = torch.tensor([ids], device=self._block.device)
        self._cache.truncate(run.start)
        features = in_pieces(
            lambda part: self._block.features(tokens[:, part], cache=self._cache), tokens.shape[1]
        )
        return self._block(features[:, -run.wanted :])[0].cpu()

    async def aclose(self) -> None:
        """Nothing to free but memory."""


class RingSession:
    """The model for one answer, as `await score(window, start)`."""

    def __init__(self, model: RingModel, wire: Wire, seed: int) -> None:
        self._model, self._seed = model, seed
        self.tally = AnswerTally()
        self._walk = self._begin(wire)
        self._known: Tokens = ()
        self._noise = torch.zeros(0, model.config.z_width)

    def _begin(self, wire: Wire) -> Walk:
        model = self._model
        if model.blocks:
            return LocalReference(model) if model.reference else LocalEuler(model)
        lines = chain(model.route.trusted(), model.config.blocks)
        if not lines:
            raise AnswerFailed(
                "the stages that answer do not hold blocks 1 to "
                f"{model.config.blocks} one after another; "
                "start the missing ones with: blocktrain stage RUN --blocks ..."
            )
        return RemoteWalk(Ring(lines), wire, self.tally)

    async def prefill(self, window: Tokens) -> None:
        """Nothing: a ring saves no round trip by it."""

    async def score(self, window: Tokens, start: int) -> Tensor:
        """Logits (T, V) of the window from position `start` on: one walk through all blocks."""
        if self._model.reference:
            at = min(start, common_prefix(self._known, window))
            self._known = window
            return await self._walk(
                window[at:], frames.Run(0, at, len(window) - at, len(window) - start), None
            )
        same = common_prefix(self._known, window)
        more = window_noise(self._seed, window, self._model.config.z_width, same)
        self._known, self._noise = window, torch.cat([self._noise[:same], more])
        z = path_start(self._model.config, self._noise)
        return await self.denoise(window, z, len(window) - start)

    async def denoise(self, ids: Tokens, z: Tensor, wanted: int, *, tail: int = 0) -> Tensor:
        """Logits (wanted, V) at the end of a walk that begins with this z (T, Z)."""
        return await self._walk(ids, frames.Run(0, 0, len(ids), wanted, tail), z)

    async def aclose(self) -> None:
        """Free the session everywhere."""
        with contextlib.suppress(BlockTrainError):  # the session is gone with its stage
            await self._walk.aclose()
