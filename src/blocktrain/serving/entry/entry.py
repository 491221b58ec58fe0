"""The entry: the process that users talk to. It drafts with a block of its own, asks the stages,
fuses their features, and streams the text."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from blocktrain.config import TRAITS
from blocktrain.errors import ConfigError
from blocktrain.learning.generate import NOT_EXACT, Drafter, DraftSource, Picker, Sampler, Text
from blocktrain.learning.model import IndependentBlock
from blocktrain.learning.tokenizer import tokenizer_of
from blocktrain.protocol.frames import Wire
from blocktrain.serving.blocks import ComputeThread, FanBlocks, ModelSource, name_blocks
from blocktrain.serving.entry.answer import (
    Output,
    Piece,
    Request,
    SharedCompute,
    Stats,
    TextAnswer,
)
from blocktrain.serving.entry.checks import SpotChecks
from blocktrain.serving.entry.drafting import DraftBlock
from blocktrain.serving.entry.failover import FanModel, Terms
from blocktrain.serving.entry.fan import FanSession
from blocktrain.serving.entry.ring import RingModel, RingSession
from blocktrain.serving.entry.route import FindStages, Route
from blocktrain.serving.line.stage_line import StageAccess, StageLine

CONNECT_SECONDS = 8.0
EMPTY_PROMPT = b"\n"  # a model needs something to continue

log = logging.getLogger("blocktrain.entry")


class Entry:
    """A model, served: `start` it, `generate` from it, `aclose` it.

    Blocks that no stage of the route holds at the start are computed here. Of the share `check`
    of the sweeps one block is computed again elsewhere.
    """

    def __init__(
        self,
        source: ModelSource,
        route: Sequence[str] | FindStages = (),
        *,
        key: bytes = b"",
        tls: ssl.SSLContext | None = None,
        wire: Wire = "fp32",
        threads: int = 1,
        check: float = 0.0,
    ) -> None:
        self.source, self.wire, self._check = source, wire, check
        self.config, self.reference, self.fan = source.config, source.reference, source.fan
        self.compose = source.compose
        self.tokenizer = tokenizer_of(self.config)
        access = StageAccess(
            self.config.fingerprint,
            key,
            source.model,
            tls=tls,
            vocabulary=self.tokenizer.vocabulary,
        )
        self.route = Route(route, access)
        self._thread = ComputeThread(threads)
        self.shared = SharedCompute(self._thread)
        self._local: FanBlocks | None = None  # with the block that drafts
        self._model: FanModel | RingModel | None = None
        self._missing: list[int] = []  # what the last change of a stage left without a holder
        self._seen: set[str] = set()  # stages that were connected once

    # -- life

    async def start(self, seconds: float = CONNECT_SECONDS) -> None:
        """Connect to the stages, and load what is computed here.

        Stages that do not answer in time may come later.
        """
        await self.route.start(seconds)
        self._model, self._local = await asyncio.to_thread(
            self._load_fan if self.fan else self._load_ring
        )
        self._missing = self.missing_blocks()
        self._seen = {line.name for line in self.route.lines if line.alive}
        self.route.on_change = self._on_stage_change

    def _load_fan(self) -> tuple[FanModel, FanBlocks]:
        config, source, remote = self.config, self.source, self.route.available_blocks()
        numbers = [n for n in range(1, config.independent + 1) if n == 1 or n not in remote]
        local = FanBlocks(config, source.load_blocks(numbers), source.model)
        readout = source.load_readout()
        shape = (config.independent, config.width)
        model = FanModel(self.route, self._thread, local, frozenset({1}), readout, *shape)
        model.checks = SpotChecks(self.route, self._thread, local, self._check)
        return model, local

    def _load_ring(self) -> tuple[RingModel, FanBlocks | None]:
        """All blocks if there is no route, and the one that drafts if the model has one."""
        config, source, remote = self.config, self.source, bool(self.route.lines)
        own: list[IndependentBlock] = []
        draft_blocks = None
        if self.reference:
            own = [] if remote else [source.load_reference()]
        else:
            blocks = source.load_blocks(range(1, 2 if remote else config.blocks + 1))
            if config.skip != "edm":
                draft_blocks = FanBlocks(config, {1: blocks[1]}, source.model)
            own = [] if remote else [b.requires_grad_(False).eval() for b in blocks.values()]
        return RingModel(self.route, self._thread, config, self.reference, own), draft_blocks

    async def aclose(self) -> None:
        """Close all lines and stop computing."""
        if isinstance(self._model, FanModel):
            await asyncio.gather(*self._model.close_tasks, return_exceptions=True)
            if self._model.checks is not None:
                await self._model.checks.aclose()
        await self.route.aclose()
        self._thread.close()

    # -- what it can do, and how it is

    def modes(self) -> list[str]:
        """How this model can write."""
        if self.reference or (self.config.skip == "edm" and not self.fan and not self.config.tail):
            return ["autoregressive"]
        return ["exact", "sweep", "autoregressive"] if self.fan else ["sweep", "autoregressive"]

    def draft(self) -> DraftSource:
        """What mode sweep starts from by default: a block of skip=edm cannot write alone."""
        return "none" if self.config.skip == "edm" and not self.fan else "first-block"

    def local_blocks(self) -> list[int]:
        return sorted(self._local.blocks) if self._local is not None and self.fan else []

    def missing_blocks(self) -> list[int]:
        """Blocks that have no holder now: neither a stage that is up nor this process."""
        if isinstance(self._model, RingModel) and self._model.blocks:
            return []
        available = self.route.available_blocks() | set(self.local_blocks())
        last = self.config.independent if self.fan else self.config.blocks
        return [number for number in range(1, last + 1) if number not in available]

    def unreachable(self) -> list[str]:
        """Stages of the route that cannot be asked now."""
        return [line.name for line in self.route.lines if not line.alive]

    def _on_stage_change(self, line: StageLine) -> None:
        """Log the loss and the return of a stage, and what that means for answers."""
        blocks = name_blocks(line.blocks)
        if not line.alive:
            log.warning("lost stage %s (%s)", line.name, blocks)
        elif line.name in self._seen:
            log.info("stage %s is back (%s)", line.name, blocks)
        else:
            log.info("stage %s connected (%s)", line.name, blocks)
        self._seen.add(line.name)
        before, self._missing = self._missing, self.missing_blocks()
        if before == self._missing:
            return
        if not self._missing:
            log.info("all blocks have a holder again: answers are whole")
            return
        names = name_blocks(self._missing)
        effect = "answers are written without it" if self.fan else "answers fail"
        log.warning("degraded: no stage holds %s; until one does, %s", names, effect)

    def status(self) -> dict[str, Any]:
        """The stages as they are now, and what is served."""
        config, pace = self.config, self.shared.pace
        facts = {
            "blocks": config.independent + TRAITS.get(self.compose, config.traits).fusion,
            "independent": config.blocks if self.reference else config.independent,
            "width": config.width,
            "context": config.context,
            "compose": self.compose,
            "fingerprint": config.fingerprint,
            "local_blocks": self.local_blocks(),
        }
        checks = self._model.checks if isinstance(self._model, FanModel) else None
        return {
            "hosts": self.route.status(),
            "checks": {
                "made": checks.made if checks else 0,
                "failed": checks.failed if checks else 0,
            },
            "missing_blocks": self.missing_blocks(),
            "sessions": self.shared.answers,
            "model": facts,
            "modes": self.modes(),
            "pace": {
                "acceptance": round(pace.acceptance, 4),
                "draft_ms": round(1000 * pace.draft, 3),
            },
        }

    # -- answers

    def check(self, request: Request) -> None:
        """Refuse what this model cannot do."""
        if request.mode == "exact" and not self.fan:
            raise ConfigError(NOT_EXACT)
        if request.mode != "sweep":
            return
        if request.logprobs is not None:
            raise ConfigError(
                "mode sweep keeps drafted text that the whole model has not scored: logprobs "
                "need mode exact or autoregressive"
            )
        if self.reference:
            raise ConfigError(
                "the end-to-end reference has no block to draft with; use mode autoregressive"
            )
        if request.draft == "none" and (self.fan or not self.config.tail):
            raise ConfigError(
                "a sweep from noise needs a model trained with "
                "--objective denoise --compose euler --tail N; use draft first-block"
            )
        if request.draft == "first-block" and self._local is None:
            raise ConfigError(
                "a block of skip=edm predicts nothing without a noised target; "
                "use mode autoregressive, or draft none"
            )
        if request.sweeps < 1:
            raise ConfigError("a sweep is made at least once; ask for sweeps of 1 or more")

    async def generate(self, request: Request) -> AsyncGenerator[Piece, None]:
        """The text after the prompt, as it comes. Closing it frees the sessions everywhere."""
        self.check(request)
        async with aclosing(self._answer(request).pieces()) as pieces:
            async for piece in pieces:
                yield piece

    def _answer(self, request: Request) -> TextAnswer:
        prompt = request.prompt or EMPTY_PROMPT
        if isinstance(prompt, bytes):
            prompt = tuple(self.tokenizer.encode(prompt).tolist())
        end = self.tokenizer.end_of_text
        text = Text(prompt, request.max_tokens, self.config.context, end)
        cut = len(self.tokenizer.decode(prompt[: text.cut]))
        sampler = Sampler(request.seed, request.temperature, request.top_p)
        deadline = asyncio.get_running_loop().time() + request.deadline
        session: FanSession | RingSession
        if isinstance(self._model, FanModel):
            session = FanSession(self._model, Terms(self.wire, request.allow_degraded, deadline))
        elif self._model is not None:
            session = RingSession(self._model, self.wire, request.seed)
        else:
            raise ConfigError("the entry was not started")
        rtts = [line.rtt_ms for line in self.route.lines if line.alive]
        self.shared.pace.sweep.guess = 2e-3 + max(rtts, default=0.0) / 1000
        drafter = None
        if request.mode != "autoregressive" and self._local is not None:
            drafter = Drafter(DraftBlock(self.config, self._local).read, sampler)
        return TextAnswer(
            request,
            self.config,
            text,
            Output(self.tokenizer.token, request.stop),
            Picker(sampler, request.logprobs),
            session,
            drafter,
            self.shared,
            Stats(request.mode, prompt_tokens=len(prompt), prompt_bytes_cut=cut),
            deadline,
        )
