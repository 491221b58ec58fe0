"""Whether drafted and checked text equals autoregressive text, compared byte by byte."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from blocktrain.bench.serving.answers import Prompt, Way, write
from blocktrain.config import Config
from blocktrain.learning.generate import Drafter, Picker, Sampler, Text, common_prefix
from blocktrain.runs.served import RunModel
from blocktrain.serving.blocks import ComputeThread, FanBlocks
from blocktrain.serving.entry.drafting import DraftBlock
from blocktrain.serving.entry.entry import Entry
from blocktrain.serving.entry.failover import FanModel, Terms
from blocktrain.serving.entry.fan import FanSession
from blocktrain.serving.entry.route import Route
from blocktrain.serving.line.stage_line import StageAccess

LENGTHS = (31, 7, 15, 3, 23, 1, 11)  # of the drafts, in turn: every number of rows from two to 32
AT_ONCE = 4  # texts that are written side by side, so that stages batch them


@dataclass
class Agreement:
    """What was compared, and how it went."""

    positions: int = 0
    divergences: int = 0
    near_ties: int = 0
    trials: int = 0  # drafted bytes up to the first wrong one of each draft
    right: int = 0

    @property
    def acceptance(self) -> float:
        """Probability that the next drafted byte is right."""
        return self.right / max(self.trials, 1)


@asynccontextmanager
async def open_fan_model(folder: Path, route: Sequence[str]) -> AsyncIterator[FanModel]:
    """What an entry has: a route, the block it drafts with, and the readout."""
    source = RunModel(folder)
    config, thread = source.config, ComputeThread()
    lines = Route(
        route,
        StageAccess(config.fingerprint, b"", source.model, vocabulary=config.vocabulary),
    )
    local = FanBlocks(config, source.load_blocks([1]), source.model)
    readout = source.load_readout()
    try:
        await lines.start(30.0)
        yield FanModel(
            lines, thread, local, frozenset({1}), readout, config.independent, config.width
        )
    finally:
        await lines.aclose()
        thread.close()


async def compare(
    entry: Entry,
    fan_model: FanModel,
    prompts: Sequence[Prompt],
    size: int,
    progress: Callable[[float], None] = lambda _: None,
) -> Agreement:
    """Write each text autoregressively, then choose each byte again from a sweep over a draft."""
    agreement = Agreement()
    slots = asyncio.Semaphore(AT_ONCE)
    way = Way(entry.config.compose, "fan", "autoregressive")

    async def one(prompt: Prompt) -> None:
        async with slots:
            answer = await write(entry, way.request(prompt, size))
            agreement.near_ties += answer.stats.near_ties
            await _check(entry.config, fan_model, prompt, answer.text, agreement)
            progress(agreement.positions / (len(prompts) * size))

    await asyncio.gather(*(one(prompt) for prompt in prompts))
    return agreement


async def _check(
    config: Config, fan_model: FanModel, prompt: Prompt, text: bytes, agreement: Agreement
) -> None:
    sampler = Sampler(prompt.seed)
    answer, picker = Text(prompt.text, len(text), config.context), Picker(sampler)
    drafter = Drafter(DraftBlock(config, fan_model.local).read, sampler)
    session = FanSession(fan_model, Terms(allow_degraded=False))
    lengths = itertools.cycle(LENGTHS)
    try:
        while answer.remaining:
            follows = tuple(text[len(text) - answer.remaining :])
            count = min(next(lengths), answer.room - 1)
            known, window, begin = answer.ids, answer.window, answer.begin
            draft = await fan_model.thread.run(partial(drafter.draft, known, begin, count))
            logits = await session.score(window + draft, len(window) - 1)
            right = common_prefix(draft, follows)
            # A choice counts as long as the tokens before it are those of the text.
            tokens = follows[: right + 1]
            agreement.divergences += sum(
                a != b for a, b in zip(tokens, picker.picks(logits, len(known)), strict=False)
            )
            agreement.positions += len(tokens)
            agreement.trials, agreement.right = (
                agreement.trials + min(right + 1, count),
                agreement.right + right,
            )
            answer.append(tokens)
    finally:
        await session.aclose()
