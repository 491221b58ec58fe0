"""Whether drafted and checked text is the autoregressive one: choices compared position by position, always after the same bytes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from blocktrain.bench.serving.answers import Prompt, Way, write
from blocktrain.config import Config
from blocktrain.learning.compose import composition_of
from blocktrain.learning.generate import Sampler
from blocktrain.runs.folder import load_blocks, load_independents, read_manifest
from blocktrain.serving.entry.decode import Answer, Picker, common
from blocktrain.serving.entry.drafting import Drafter, Lean
from blocktrain.serving.entry.entry import Entry
from blocktrain.serving.entry.fan import FanSession, Home, Terms
from blocktrain.serving.entry.route import Route
from blocktrain.serving.entry.thread import ComputeThread
from blocktrain.serving.holding import FanBlocks
from blocktrain.serving.line.lines import Access

LENGTHS = (31, 7, 15, 3, 23, 1, 11)  # of the drafts, in turn: every number of rows from two to 32
AT_ONCE = 4  # texts that are written side by side, so that stages batch them
CPU = torch.device("cpu")


@dataclass
class Agreement:
    """What was compared, and how it went."""

    positions: int = 0
    divergences: int = 0
    near_ties: int = 0
    tried: int = 0  # drafted bytes up to the first wrong one of each draft
    right: int = 0

    @property
    def acceptance(self) -> float:
        """Probability that the next drafted byte is right."""
        return self.right / max(self.tried, 1)


@asynccontextmanager
async def fan_home(folder: Path, route: Sequence[str]) -> AsyncIterator[Home]:
    """What an entry has: a route, the block it drafts with, and the readout."""
    manifest = read_manifest(folder)
    config = manifest.config
    thread, lines = (
        ComputeThread(),
        Route(route, Access(config.fingerprint, b"", manifest.model_hash)),
    )
    weights = None if manifest.pool_weights is None else torch.tensor(manifest.pool_weights)
    readout = composition_of(config).readout(
        config, lambda numbers: load_blocks(manifest, numbers, CPU), weights
    )
    local = FanBlocks(config, load_independents(manifest, [1], CPU), manifest.model_hash)
    try:
        await lines.start(30.0)
        yield Home(lines, thread, local, frozenset({1}), readout, config.independent, config.width)
    finally:
        await lines.aclose()
        thread.close()


async def compare(
    entry: Entry,
    home: Home,
    prompts: Sequence[Prompt],
    size: int,
    progress: Callable[[float], None] = lambda _: None,
) -> Agreement:
    """Write every text autoregressively, then choose each of its bytes again from a sweep over a draft behind the same bytes."""
    found = Agreement()
    places = asyncio.Semaphore(AT_ONCE)
    way = Way(entry.config.compose, "fan", "autoregressive")

    async def one(prompt: Prompt) -> None:
        async with places:
            told = await write(entry, way.request(prompt, size))
            found.near_ties += told.stats.near_ties
            await _check(entry.config, home, prompt, told.text, found)
            progress(found.positions / (len(prompts) * size))

    await asyncio.gather(*(one(prompt) for prompt in prompts))
    return found


async def _check(config: Config, home: Home, prompt: Prompt, text: bytes, found: Agreement) -> None:
    sampler = Sampler(prompt.seed)
    answer, picker = Answer(prompt.text, len(text), config.context), Picker(sampler)
    drafter = Drafter(Lean(config, home.local), sampler)
    session = FanSession(home, Terms(allow_degraded=False))
    lengths = itertools.cycle(LENGTHS)
    try:
        while answer.finish is None:
            follows = text[len(text) - answer.left :]
            count = min(next(lengths), answer.room - 1)
            known, window, begin = bytes(answer.text), answer.window, answer.begin
            draft = await home.thread.run(partial(drafter.draft, known, begin, count))
            logits = await session.score(window + draft, len(window) - 1)
            right = common(draft, follows)
            checked = follows[
                : right + 1
            ]  # a choice counts as long as the bytes before it are those of the text
            found.divergences += sum(
                a != b for a, b in zip(checked, picker.picks(logits, len(known)), strict=False)
            )
            found.positions += len(checked)
            found.tried, found.right = found.tried + min(right + 1, count), found.right + right
            answer.commit(checked)
    finally:
        await session.aclose()
