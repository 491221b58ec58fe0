"""Stages that answer wrongly: impossible numbers, and lies that only computing again can show."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktrain.learning.generate import Sampler
from blocktrain.learning.generate import write as write_locally
from blocktrain.runs.served import RunModel
from blocktrain.serving.blocks import Rows, ServedBlocks, serve_blocks
from blocktrain.serving.entry.answer import Request, Stats
from blocktrain.serving.entry.checks import HERE, FeatureClaim, agree, find_liars
from blocktrain.serving.entry.entry import Entry
from blocktrain.serving.entry.failover import AnswerFailed
from blocktrain.serving.metrics import ServingMetrics
from blocktrain.serving.request_queue import RequestQueue
from blocktrain.serving.stage.stage import Stage
from conftest import random_model, tiny_config
from support.serving import saved
from support.waiting import until_async

MODEL = random_model(tiny_config(blocks=4, context=16))
DEFAULT_SHARE = 0.02
Change = Callable[[Tensor], Tensor]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(MODEL, tmp_path_factory.mktemp("checks") / "small")


def honest(rows: Tensor) -> Tensor:
    return rows


def a_little_off(rows: Tensor) -> Tensor:
    """A lie that looks like any other answer: another direction, the same size."""
    return 0.9 * rows + 0.4 * rows.roll(1, dims=-1)


def lying(served: ServedBlocks, change: Change) -> ServedBlocks:
    """The same stage, whose features are changed before they are sent."""
    work = served.work

    def changed(parts: Sequence[Rows]) -> list[Tensor]:
        return [change(rows) for rows in work(parts)]

    served.work = changed  # type: ignore[method-assign]
    return served


@asynccontextmanager
async def serving(
    run: Path, *changes: Change, check: float = DEFAULT_SHARE
) -> AsyncIterator[tuple[Entry, list[str]]]:
    """An entry before stages that all hold blocks 2 and 3, and their names."""
    async with AsyncExitStack() as stack:
        stages = []
        for change in changes:
            stage = Stage(lying(serve_blocks(RunModel(run), (2, 3)), change))
            await stage.start()
            stack.push_async_callback(stage.aclose)
            stages.append(stage.address)
        entry = Entry(RunModel(run), stages, check=check)
        await entry.start()
        stack.push_async_callback(entry.aclose)
        yield entry, stages


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    def run(**arguments: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**arguments), 250))

    return wraps(test)(run)


async def write(entry: Entry, count: int = 40) -> tuple[bytes, Stats]:
    text, stats = b"", None
    async for piece in entry.generate(Request(b"the ", count, mode="autoregressive")):
        text, stats = text + piece.text, piece.stats
    assert stats is not None
    return text, stats


def alone(count: int = 40) -> bytes:
    return bytes(write_locally(MODEL, b"the ", count, Sampler()))


def trouble(entry: Entry) -> dict[str, str]:
    return {host["name"]: host["trouble"] for host in entry.status()["hosts"] if host["trouble"]}


def nearest_first(entry: Entry, *names: str) -> None:
    """Which stage is asked does not depend on this machine's load."""

    def far(_: float) -> None:
        """The round trip stays as it is."""

    for line in entry.route.lines:
        heartbeat = line._heartbeat
        heartbeat.rtt = 0.1 * names.index(line.name)
        heartbeat.on_round_trip = far  # type: ignore[method-assign,assignment]
        line.rtt_ms = 1e3 * heartbeat.rtt


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "not finite"),
        (float("inf"), "not finite"),
        (1e30, "not finite"),
        (1e6, "larger or smaller"),
        (0.0, "larger or smaller"),
    ],
)
@in_a_loop
async def test_numbers_that_cannot_be_right_count_as_a_lost_stage(
    run: Path, value: float, words: str
) -> None:
    """A10: a stage answers with features that are not finite, or far too large or small."""

    def broken(rows: Tensor) -> Tensor:
        return rows * 0 + value

    async with serving(run, broken, honest) as (entry, (bad, good)):
        nearest_first(entry, bad, good)
        text, stats = await write(entry)
        assert text == alone() and stats.degraded == () and stats.failovers == 1
        assert stats.suspects == (bad,) and words in trouble(entry)[bad]
    async with serving(run, broken) as (entry, (bad,)):
        text, stats = await write(entry, 8)
        assert stats.degraded == (2, 3) and b"\0" not in text
        assert entry.missing_blocks() == [2, 3]


@in_a_loop
async def test_a_ring_that_ends_in_nonsense_fails_its_answer(tmp_path: Path) -> None:
    config = tiny_config(context=16, compose="euler", objective="denoise", tail=6)
    run = saved(random_model(config), tmp_path / "ring")

    def broken(rows: Tensor) -> Tensor:
        return rows * float("nan")

    stage = Stage(lying(serve_blocks(RunModel(run)), broken))
    await stage.start()
    entry = Entry(RunModel(run), [stage.address])
    await entry.start()
    with pytest.raises(AnswerFailed, match="not finite"):
        await write(entry, 4)
    await entry.aclose()
    await stage.aclose()


@in_a_loop
async def test_a_liar_is_named_within_twenty_answers(run: Path) -> None:
    """A10: a stage answers with other features that look right. Two honest stages know better.

    With the share that `serve` has by default.
    """
    async with serving(run, a_little_off, honest, honest) as (entry, (liar, *others)):
        nearest_first(entry, liar, *others)
        for _ in range(20):
            await write(entry)
            if trouble(entry):
                break
        assert "its features of block" in trouble(entry)[liar] and len(trouble(entry)) == 1
        text, stats = await write(entry)
        assert text == alone() and stats.degraded == (), "it is left out"
        metrics = ServingMetrics(entry.status, RequestQueue(1, 1)).text().decode()
        assert f'blocktrain_host_suspect{{host="{liar}"}} 1.0' in metrics
        assert "blocktrain_checks_failed_total 1.0" in metrics


@in_a_loop
async def test_an_answer_names_a_liar_that_is_found_meanwhile(run: Path) -> None:
    async with serving(run, a_little_off, honest, honest, check=1.0) as (entry, (liar, *others)):
        nearest_first(entry, liar, *others)
        _, stats = await write(entry, 120)
        assert stats.suspects == (liar,) and stats.failovers >= 1


@in_a_loop
async def test_one_against_one_names_both_and_goes_on(run: Path) -> None:
    async with serving(run, a_little_off, honest, check=1.0) as (entry, names):
        await write(entry)
        await until_async(lambda: set(trouble(entry)) == set(names))
        assert all("there is" not in words for words in trouble(entry).values())
        _, stats = await write(entry)
        assert stats.degraded == (), "somebody has to be asked"


@in_a_loop
async def test_honest_stages_are_checked_and_not_accused(run: Path) -> None:
    async with serving(run, honest, honest, check=1.0) as (entry, _):
        text, stats = await write(entry)
        assert text == alone() and stats.suspects == () and stats.failovers == 0
        await until_async(lambda: entry.status()["checks"]["made"] > 0)
        assert entry.status()["checks"]["failed"] == 0 and trouble(entry) == {}


def claim(holder: str, rows: Tensor) -> FeatureClaim:
    return FeatureClaim(holder, 2, (1, 2), 0, rows, "fp32")


def test_most_of_three_are_right_and_what_was_computed_here_is() -> None:
    true = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(1))
    rounded, false, other = true * 1.0001, a_little_off(true), -true
    assert agree(true, rounded, "fp32") and not agree(true, false, "fp32")
    assert not agree(true, true * float("nan"), "fp32")
    a, b, c = claim("a", true), claim("b", rounded), claim("c", false)
    assert find_liars([a, b]) == ([], [])
    assert find_liars([c, a]) == ([], ["c", "a"])
    assert find_liars([c, a, b]) == (["c"], [])
    assert find_liars([a, c, b]) == (["c"], [])
    assert find_liars([c, a, claim("d", other)]) == ([], ["c", "a", "d"])
    assert find_liars([c, claim(HERE, true)]) == (["c"], [])
