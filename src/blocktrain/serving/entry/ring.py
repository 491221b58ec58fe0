"""One answer's ring: the paper's path and the end-to-end reference, stage to stage or in this process.

The state belongs to the stages that hold it, so a ring does not survive the loss of one: the answer fails, the next one is routed anew.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from blocktrain.config import Config
from blocktrain.errors import BlockTrainError
from blocktrain.learning.compose import euler_hop, in_pieces, position_noise, window_noise
from blocktrain.learning.model import Cache, IndependentBlock, target_table
from blocktrain.protocol import frames
from blocktrain.protocol.frames import Wire
from blocktrain.serving.entry.decode import Answer, Picker, common
from blocktrain.serving.entry.readers import RESULT_BYTES, AnswerFailed, Tally
from blocktrain.serving.entry.route import Route, chain
from blocktrain.serving.entry.thread import ComputeThread
from blocktrain.serving.line.lines import Ring, StageLost, StageRefused


@dataclass(frozen=True)
class RingHome:
    """What all answers of an entry share: the route, and the model itself where no stage holds it."""

    route: Route
    thread: ComputeThread
    config: Config
    reference: bool
    blocks: list[
        IndependentBlock
    ]  # all of them, or the reference alone, or none: then stages hold them


class Walk(Protocol):
    """One traversal of all blocks."""

    async def __call__(self, ids: bytes, run: frames.Run, state: Tensor | None) -> Tensor:
        """Logits (wanted, V) of the last positions of the run."""

    async def aclose(self) -> None:
        """Free what it holds."""


class RemoteWalk:
    """Through the stages of a ring."""

    def __init__(self, ring: Ring, wire: Wire, tally: Tally) -> None:
        self._ring, self._wire, self._tally = ring, wire, tally
        self._session = secrets.randbits(63)
        self._opened = False

    async def __call__(self, ids: bytes, run: frames.Run, state: Tensor | None) -> Tensor:
        try:
            if not self._opened:
                self._opened = True
                await self._ring.open(self._session, self._wire)
            found = await self._ring.run(self._session, run, ids, state)
        except (StageLost, StageRefused) as error:
            raise AnswerFailed(
                f"a ring cannot go on without one of its stages ({error}); ask again when it is back"
            ) from None
        hops = len(self._ring.lines)
        size = frames.ITEM[self._wire]
        width = (
            state.shape[-1]
            if state is not None
            else self._ring.lines[0].facts.width
            if self._ring.lines[0].facts
            else 0
        )
        passed = hops if state is not None else hops - 1
        self._tally.wire_bytes += (
            hops * (frames.PREFIX.size + 16 + len(ids)) + passed * run.count * width * size
        )
        self._tally.wire_bytes += RESULT_BYTES + found.shape[-1] * run.wanted * size
        return found[0]

    async def aclose(self) -> None:
        """End the session at every stage."""
        if self._opened:
            await self._ring.close(self._session)


class LocalEuler:
    """The paper's path in this process."""

    def __init__(self, home: RingHome) -> None:
        self._home, self._table = home, target_table(home.config)

    async def __call__(self, ids: bytes, run: frames.Run, state: Tensor | None) -> Tensor:
        return await self._home.thread.run(
            lambda: self._walk(torch.tensor([list(ids)]), state, run)[0, -run.wanted :]
        )

    def _walk(self, tokens: Tensor, state: Tensor | None, run: frames.Run) -> Tensor:
        if state is None:
            raise ValueError("a walk of the path begins with noise")
        z, logits = state[None], state
        for number, block in enumerate(self._home.blocks, 1):
            logits, z = euler_hop(
                self._home.config, number, block, self._table, tokens, z, tail=run.tail
            )
        return logits

    async def aclose(self) -> None:
        """Nothing to free."""


class LocalReference:
    """The end-to-end model in this process."""

    def __init__(self, home: RingHome) -> None:
        self._thread, self._block = home.thread, home.blocks[0]
        self._cache = Cache(self._block, 1)

    async def __call__(self, ids: bytes, run: frames.Run, state: Tensor | None) -> Tensor:
        return await self._thread.run(lambda: self._read(torch.tensor([list(ids)]), run))

    def _read(self, tokens: Tensor, run: frames.Run) -> Tensor:
        self._cache.truncate(run.start)
        found = in_pieces(
            lambda part: self._block.features(tokens[:, part], cache=self._cache), tokens.shape[1]
        )
        return self._block(found[:, -run.wanted :])[0]

    async def aclose(self) -> None:
        """Nothing to free but memory."""


class RingSession:
    """The model for one answer, as `await score(window, start)`."""

    def __init__(self, home: RingHome, wire: Wire, seed: int) -> None:
        self._home, self._seed = home, seed
        self.tally = Tally()
        self._walk = self._begin(wire)
        self._known = b""
        self._noise = torch.zeros(0, home.config.z_width)

    def _begin(self, wire: Wire) -> Walk:
        home = self._home
        if home.blocks:
            return LocalReference(home) if home.reference else LocalEuler(home)
        lines = chain(home.route.lines, home.config.blocks)
        if not lines:
            raise AnswerFailed(
                f"the stages that answer do not hold blocks 1 to {home.config.blocks} one after another; "
                "start the missing ones with: blocktrain stage RUN --blocks ..."
            )
        return RemoteWalk(Ring(lines), wire, self.tally)

    async def ahead(self, window: bytes) -> None:
        """Nothing: a ring has no way to save."""

    async def score(self, window: bytes, start: int) -> Tensor:
        """Logits (T, V) of the window from position `start` on: one walk through all blocks."""
        if self._home.reference:
            at = min(start, common(self._known, window))
            self._known = window
            return await self._walk(
                window[at:], frames.Run(0, at, len(window) - at, len(window) - start), None
            )
        same = common(self._known, window)
        more = window_noise(self._seed, window, self._home.config.z_width, same)
        self._known, self._noise = window, torch.cat([self._noise[:same], more])
        return await self.denoise(window, self._noise, len(window) - start)

    async def denoise(self, ids: bytes, noise: Tensor, wanted: int, *, tail: int = 0) -> Tensor:
        """Logits (wanted, V) at the end of a walk that begins with this noise (T, Z)."""
        return await self._walk(
            ids, frames.Run(0, 0, len(ids), wanted, tail), self._home.config.sigma_max * noise
        )

    async def aclose(self) -> None:
        """Free the session everywhere."""
        with contextlib.suppress(BlockTrainError):  # it went with its stage
            await self._walk.aclose()


async def from_noise(
    session: RingSession, config: Config, answer: Answer, picker: Picker, sweeps: int
) -> AsyncIterator[tuple[bytes, int]]:
    """The paper's sweep, a tail's length at a time, as `compose.sweep_from_noise`: each chunk and how many walks it took."""
    table = target_table(config)
    seed = picker.sampler.seed
    while answer.finish is None:
        size = min(config.tail, answer.left)
        known = bytes(answer.text[-(config.context - size + 1) :])
        ids = known + bytes(size - 1)
        first = len(answer.text) - len(known)
        chunk: list[int] = []
        for number in range(sweeps):
            noise = position_noise(seed + number, first, len(ids), config.z_width)
            if chunk:
                noise[-size:] += table[torch.tensor(chunk)] / config.sigma_max
            logits = await session.denoise(ids, noise, size, tail=size)
            chunk = list(picker.picks(logits, len(answer.text)))
        yield bytes(chunk), sweeps
