"""An entry with real stages behind real sockets: the same text as one machine, whatever dies."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blocktrain.bench.network.shaper import Link, shape_link
from blocktrain.config import TOKENIZERS
from blocktrain.errors import ConfigError
from blocktrain.learning.compose import Model, in_pieces
from blocktrain.learning.generate import Sampler, write_with
from blocktrain.learning.generate import write as write_locally
from blocktrain.learning.model import Cache, build_reference
from blocktrain.learning.tokenizer import Bytes, Ids, Tokenizer, register
from blocktrain.learning.train import REFERENCE
from blocktrain.runs.folder import RunFolder, publish
from blocktrain.runs.served import RunModel
from blocktrain.serving.blocks import serve_blocks
from blocktrain.serving.entry import failover, route
from blocktrain.serving.entry.answer import Piece, Request, Stats
from blocktrain.serving.entry.drafting import Pace
from blocktrain.serving.entry.entry import Entry
from blocktrain.serving.entry.failover import AnswerFailed
from blocktrain.serving.line.stage_line import StageRefused
from blocktrain.serving.stage.stage import Stage
from conftest import random_model, tiny_config
from support.answers import near_and_far, stage_process
from support.serving import saved
from support.waiting import until_async

CPU = torch.device("cpu")
CONTEXT = 16
MODELS = {
    "fuse": random_model(tiny_config(blocks=4, context=CONTEXT)),
    "pool": random_model(tiny_config(context=CONTEXT, compose="pool")),
    "denoise": random_model(tiny_config(context=CONTEXT, compose="pool", objective="denoise")),
    "euler": random_model(
        tiny_config(context=CONTEXT, compose="euler", objective="denoise", tail=6)
    ),
    "paper": random_model(
        tiny_config(context=CONTEXT, compose="euler", objective="denoise", skip="edm")
    ),
    "zero": random_model(
        tiny_config(context=CONTEXT, compose="euler", objective="denoise", tail=6, start="zero")
    ),
}
FUSE = MODELS["fuse"]
PROMPT = bytes(range(65, 65 + 50))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    folders = {name: saved(model, folder / name) for name, model in MODELS.items()}
    reference = build_reference(FUSE.config)
    for layer in reference.layers:
        torch.nn.init.normal_(layer.down.weight, std=0.1)  # type: ignore[union-attr,arg-type]
    publish(RunFolder(folders["fuse"]), REFERENCE, reference)
    return folders


class Drafting(Pace):
    """Drafts of given lengths, whatever they cost here."""

    def __init__(self, *lengths: int) -> None:
        super().__init__()
        self._lengths = itertools.cycle(lengths)

    def best_draft(self, most: int) -> int:
        return min(next(self._lengths), most)


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in a loop of its own, with a limit."""

    def run(**arguments: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**arguments), 250))

    return wraps(test)(run)


@asynccontextmanager
async def serving(
    folder: Path,
    *groups: Sequence[int],
    pace: Pace | None = None,
    reference: bool = False,
    **options: Any,
) -> AsyncIterator[tuple[Entry, list[Stage]]]:
    """An entry and a stage for each group of blocks, all gone at the end."""
    async with AsyncExitStack() as stack:
        stages = []
        for blocks in groups:
            stage = Stage(serve_blocks(RunModel(folder, reference=reference), blocks))
            await stage.start()
            stack.push_async_callback(stage.aclose)
            stages.append(stage)
        source = RunModel(folder, reference=reference)
        entry = Entry(source, [stage.address for stage in stages], **options)
        entry.shared.pace = pace or Drafting(5)
        await entry.start()
        stack.push_async_callback(entry.aclose)
        yield entry, stages


async def write(
    entry: Entry, count: int = 40, length: int = 10, **request: Any
) -> tuple[bytes, Stats]:
    """A whole answer, streamed."""
    text, stats = b"", None
    async for piece in entry.generate(Request(PROMPT[:length], count, **request)):
        assert piece.text or piece.finish
        text, stats = text + piece.text, piece.stats
        assert (piece.finish is None) == (len(text) < count)
    assert stats is not None
    return text, stats


def alone(model: Model, count: int = 40, length: int = 10, seed: int = 0) -> bytes:
    """What `blocktrain generate` writes."""
    return bytes(write_locally(model, PROMPT[:length], count, Sampler(seed)))


def reader_of(stages: Sequence[Stage]) -> Stage:
    """The stage that has the answer's session."""
    return next(stage for stage in stages if stage.sessions)


# -- the same bytes


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("fuse", ()),
        ("fuse", ((2, 3),)),
        ("fuse", ((2,), (3,), (1, 3))),
        ("pool", ((2,), (3,))),
        ("denoise", ((2, 3),)),
    ],
)
@in_a_loop
async def test_one_host_or_many_write_what_generate_writes(
    runs: dict[str, Path], name: str, groups: Sequence[Sequence[int]]
) -> None:
    model = MODELS[name]
    async with serving(runs[name], *groups) as (entry, stages):
        assert entry.status()["model"]["local_blocks"] == [
            n for n in (1, 2, 3) if n == 1 or not any(n in h for h in groups)
        ]
        for length, count in [(1, 20), (50, 12)]:
            expected = alone(model, count, length, seed=3)
            for mode in ("autoregressive", "exact"):
                text, stats = await write(entry, count, length, mode=mode, seed=3)
                assert text == expected, mode
                assert stats.prompt_bytes_cut == (40 if length == 50 else 0)
                assert (stats.wire_bytes > 0) == bool(groups)
                assert stats.failovers == 0 == len(stats.degraded)
                assert mode == "exact" or stats.sweeps == count
                assert mode != "exact" or len(text) == stats.accepted + stats.sweeps
            for sweeps in (1, 3):
                how: Any = {"mode": "sweep", "sweeps": sweeps}
                text, _ = await write(entry, count, length, seed=3, **how)
                expected = bytes(write_locally(model, PROMPT[:length], count, Sampler(3), **how))
                assert text == expected
        await until_async(lambda: not any(stage.sessions for stage in stages))


@in_a_loop
async def test_the_draft_never_changes_the_text(runs: dict[str, Path]) -> None:
    draw = random.Random(1)
    expected = alone(FUSE, 60, 5, seed=7)
    async with serving(runs["fuse"], (2,), (3,)) as (entry, _):
        for _ in range(3):
            entry.shared.pace = Drafting(*(draw.choice([0, 1, 2, 5, 16, 32]) for _ in range(7)))
            text, stats = await write(entry, 60, 5, seed=7)
            assert text == expected
            assert stats.accepted == sum(stats.accepted_per_sweep) > 0
            assert len(stats.accepted_per_sweep) == stats.sweeps
        entry.shared.pace = Pace()
        assert (await write(entry, 60, 5, seed=7))[0] == expected


@in_a_loop
async def test_temperature_top_p_stop_and_lengths(runs: dict[str, Path]) -> None:
    async with serving(runs["fuse"], (2, 3)) as (entry, _):
        sampler = Sampler(2, 0.7, 0.8)
        expected = bytes(write_locally(FUSE, PROMPT[:4], 20, sampler))
        assert (await write(entry, 20, 4, seed=2, temperature=0.7, top_p=0.8))[0] == expected
        pieces = [
            p
            async for p in entry.generate(
                Request(PROMPT[:4], 20, seed=2, temperature=0.7, top_p=0.8, stop=(expected[7:10],))
            )
        ]
        end = expected.index(expected[7:10])
        assert (b"".join(p.text for p in pieces), pieces[-1].finish) == (expected[:end], "stop")
        assert (await write(entry, 1, 4, seed=2))[0] == alone(FUSE, 1, 4, seed=2)
        nothing = [p async for p in entry.generate(Request(b"x", 0))]
        assert [(p.text, p.finish) for p in nothing] == [(b"", "length")]
        empty = [p.text async for p in entry.generate(Request(b"", 3))]
        assert b"".join(empty) == bytes(write_locally(FUSE, b"\n", 3, Sampler()))


@in_a_loop
async def test_eight_users_at_once_each_get_their_own_text(runs: dict[str, Path]) -> None:
    async with serving(runs["fuse"], (2,), (3,)) as (entry, stages):
        modes = ["exact", "autoregressive"] * 4
        texts = await asyncio.gather(
            *(write(entry, 14, seed=seed, mode=mode) for seed, mode in enumerate(modes))
        )
        for seed, (text, _) in enumerate(texts):
            assert text == alone(FUSE, 14, seed=seed)
        assert entry.status()["sessions"] == 0
        await until_async(lambda: not any(stage.sessions for stage in stages))


@in_a_loop
async def test_half_precision_on_the_wire_is_smaller_and_as_long(runs: dict[str, Path]) -> None:
    async with (
        serving(runs["fuse"], (2, 3), wire="fp16") as (entry, _),
        serving(runs["fuse"], (2, 3)) as (plain, _),
    ):
        half, whole = (
            await write(entry, mode="autoregressive"),
            await write(plain, mode="autoregressive"),
        )
        assert len(half[0]) == 40
        assert half[1].wire_bytes < 0.8 * whole[1].wire_bytes


@in_a_loop
async def test_closing_an_answer_frees_its_sessions(runs: dict[str, Path]) -> None:
    async with serving(runs["fuse"], (2,), (3,)) as (entry, stages):
        async with aclosing(entry.generate(Request(PROMPT, 4000))) as pieces:
            await anext(pieces)
            assert [stage.sessions for stage in stages] == [1, 1]
            assert entry.status()["sessions"] == 1
        await until_async(lambda: not any(stage.sessions for stage in stages))
        task = asyncio.create_task(write(entry, 4000))
        await until_async(lambda: all(stage.sessions for stage in stages))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until_async(lambda: not any(stage.sessions for stage in stages))
        assert entry.status()["sessions"] == 0
        assert (await write(entry))[0] == alone(FUSE)


@in_a_loop
async def test_the_first_byte_takes_one_round_trip(runs: dict[str, Path]) -> None:
    async with serving(runs["fuse"], (2,), (3,)) as (_, stages), AsyncExitStack() as stack:
        ports = [int(stage.address.rpartition(":")[2]) for stage in stages]
        links = [
            stack.enter_context(shape_link("127.0.0.1", port, Link(rtt_ms=1000), apart=False))
            for port in ports
        ]
        entry = Entry(RunModel(runs["fuse"]), [f"127.0.0.1:{link.port}" for link in links])
        entry.shared.pace = Drafting(4)
        await entry.start(60)
        for _ in range(5):  # the machine may have been busy
            async with aclosing(entry.generate(Request(PROMPT, 4000))) as pieces:
                first = await anext(pieces)
            assert first.stats.first_byte_ms >= 1000
            assert first.stats.sweeps == 1
            if first.stats.first_byte_ms < 1950:
                break
        assert first.stats.first_byte_ms < 1950
        await entry.aclose()


# -- failures


async def interrupt(
    entry: Entry, when: int, happens: Callable[[], Awaitable[None]], count: int = 40, **request: Any
) -> tuple[bytes, Stats]:
    """An answer during which something happens after `when` bytes."""
    text, struck = b"", False
    piece: Piece | None = None
    async for piece in entry.generate(Request(PROMPT[:10], count, **request)):
        text += piece.text
        if len(text) >= when and not struck:
            struck = True
            await happens()
    assert piece is not None
    return text, piece.stats


@pytest.mark.parametrize("mode", ["exact", "autoregressive", "sweep"])
@in_a_loop
async def test_another_holder_takes_over_and_the_text_is_the_same(
    runs: dict[str, Path], mode: str
) -> None:
    async with serving(runs["fuse"], (2, 3), (2, 3), pace=Drafting(3)) as (entry, stages):
        expected = (await write(entry, 40, mode=mode))[0]
        assert mode == "sweep" or expected == alone(FUSE)
        text, stats = await interrupt(entry, 8, lambda: reader_of(stages).aclose(), mode=mode)
        assert text == expected
        assert (stats.failovers, stats.degraded) == (1, ())


@in_a_loop
async def test_a_killed_process_does_not_change_the_text(runs: dict[str, Path]) -> None:
    async with (
        stage_process(runs["fuse"], (2, 3)) as killed,
        serving(runs["fuse"], (2, 3)) as (_, (far,)),
        near_and_far(runs["fuse"], killed.address, far) as entry,
    ):
        entry.shared.pace = Drafting(5)

        async def kill() -> None:
            assert far.sessions == 0
            killed.process.kill()

        text, stats = await interrupt(entry, 8, kill, 24)
        assert (text, stats.failovers, stats.degraded) == (alone(FUSE, 24), 1, ())


@in_a_loop
async def test_a_black_hole_does_not_change_the_text(runs: dict[str, Path]) -> None:
    async with serving(runs["fuse"], (2, 3), (2, 3)) as (_, (near, far)):
        port = int(near.address.rpartition(":")[2])
        with shape_link("127.0.0.1", port, Link(rtt_ms=5), apart=False) as link:
            async with near_and_far(runs["fuse"], f"127.0.0.1:{link.port}", far) as entry:
                entry.shared.pace = Drafting(5)

                async def swallow() -> None:
                    assert far.sessions == 0
                    await asyncio.to_thread(link.block)

                text, stats = await interrupt(entry, 8, swallow, 24)
                assert (text, stats.failovers, stats.degraded) == (alone(FUSE, 24), 1, ())
                await asyncio.to_thread(link.open)


def without(model: Model, missing: int, count: int, seed: int = 0) -> bytes:
    """What the model writes with one block left out."""
    assert model.fusion is not None

    def scorer(ids: torch.Tensor, start: int) -> torch.Tensor:
        known[:] = known[:start] + ids[0].tolist()
        tokens = torch.tensor([known])
        features = torch.stack(
            [model.features(n, tokens, Cache(model.blocks[n - 1], 1)) for n in (1, 2, 3)]
        )
        present = torch.tensor([[float(n != missing)] for n in (1, 2, 3)])
        assert model.fusion is not None
        return in_pieces(
            partial(_fuse, model, tokens, features, present, Cache(model.fusion, 1)),
            tokens.shape[1],
        )[:, start:]

    known: list[int] = []
    return bytes(write_with(scorer, PROMPT[:10], count, CONTEXT, Sampler(seed)))


def _fuse(
    model: Model,
    tokens: torch.Tensor,
    features: torch.Tensor,
    present: torch.Tensor,
    cache: Cache,
    part: slice,
) -> torch.Tensor:
    assert model.fusion is not None
    return model.fusion.combine(tokens[:, part], features[:, :, part], present, cache)


@in_a_loop
async def test_with_no_other_holder_it_goes_on_without_the_block_and_uses_it_again(
    runs: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "blocktrain.entry")
    async with serving(runs["fuse"], (2,), (3,), pace=Drafting(3)) as (entry, stages):
        port = int(stages[1].address.rpartition(":")[2])
        text, stats = await interrupt(entry, 8, stages[1].aclose, 30)
        whole = alone(FUSE, 30)
        assert text[:8] == whole[:8]
        assert (len(text), stats.degraded, stats.failovers) == (30, (3,), 1)
        text, stats = await write(entry, 20)
        assert (text, stats.degraded, stats.failovers) == (without(FUSE, 3, 20), (3,), 0)
        assert entry.missing_blocks() == [3] and entry.unreachable() == [stages[1].address]
        assert "degraded: no stage holds block 3" in caplog.messages[-1]

        back = Stage(serve_blocks(RunModel(runs["fuse"]), (3,)))

        async def come_back() -> None:
            await back.start(port=port)
            await until_async(lambda: entry.route.lines[1].alive)

        async with aclosing(entry.generate(Request(PROMPT[:10], 4000))) as pieces:
            piece = await anext(pieces)
            await come_back()
            while not back.sessions:  # it is used again in the middle of an answer
                piece = await anext(pieces)
            assert piece.stats.degraded == (3,)
        text, stats = await write(entry, 30)
        assert (text, stats.degraded) == (whole, ())
        assert entry.missing_blocks() == []
        assert f"stage {back.address} is back (block 3)" in caplog.messages
        assert "all blocks have a holder again" in caplog.messages[-1]
        await back.aclose()


@in_a_loop
async def test_a_short_loss_of_the_only_holder_does_not_change_the_text(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover, "GRACE_SECONDS", 60.0)
    async with serving(runs["fuse"], (2,), (3,), pace=Drafting(3)) as (entry, stages):

        async def hiccup() -> None:
            line = entry.route.lines[1]
            assert line.alive
            for peer in list(stages[1]._peers):
                peer.transport.abort()
            await until_async(lambda: not line.alive)

        text, stats = await interrupt(entry, 8, hiccup)
        assert (text, stats.degraded, stats.failovers) == (alone(FUSE), (), 1)


@in_a_loop
async def test_no_degraded_fails_in_time_and_the_service_lives_on(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover, "PATIENCE_SECONDS", 600.0)  # the deadline comes first
    monkeypatch.setattr(route, "GHOST_SECONDS", 600.0)
    async with serving(runs["fuse"], (2,), (3,), pace=Drafting(3)) as (entry, stages):
        with pytest.raises(AnswerFailed, match="block 3"):
            await asyncio.wait_for(
                interrupt(entry, 8, stages[1].aclose, allow_degraded=False, deadline=8.0), 60
            )
        monkeypatch.undo()
        text, stats = await write(entry, 5)
        assert (len(text), stats.degraded) == (5, (3,))
        assert entry.status()["sessions"] == 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fuse", {}),
        ("fuse", {"mode": "autoregressive"}),
        ("euler", {"mode": "sweep", "draft": "none"}),
    ],
    ids=["exact", "autoregressive", "from noise"],
)
@in_a_loop
async def test_an_answer_that_takes_longer_than_its_deadline_fails(
    runs: dict[str, Path], name: str, options: dict[str, Any]
) -> None:
    async with serving(runs[name], (1, 2, 3)) as (entry, stages):
        with pytest.raises(AnswerFailed, match="not complete after"):
            await write(entry, 100_000, deadline=0.3, **options)
        mute(stages[0])
        with pytest.raises(AnswerFailed, match="not complete after"):
            await write(entry, 1, deadline=0.3, **options)
        await until_async(lambda: not stages[0].sessions and not entry.status()["sessions"])


def mute(stage: Stage) -> None:
    """Let it answer PINGs, and nothing else."""
    stage._compute.put = lambda work: None  # type: ignore[method-assign]


@in_a_loop
async def test_a_hung_stage_fails_over_to_another_holder(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover, "HANG_SECONDS", 5.0)
    async with serving(runs["fuse"], (2, 3), (2, 3)) as (entry, stages):

        async def hang() -> None:
            mute(reader_of(stages))

        text, stats = await interrupt(entry, 8, hang, 24)
        assert (text, stats.failovers, stats.degraded) == (alone(FUSE, 24), 1, ())
        text, stats = await write(entry, 24)
        assert (text, stats.failovers, stats.degraded) == (
            alone(FUSE, 24),
            0,
            (),
        )  # others need not find out for themselves


@in_a_loop
async def test_a_stage_of_another_run_or_key_is_an_error_at_the_start(
    runs: dict[str, Path],
) -> None:
    async with serving(runs["fuse"], (2,)) as (_, stages):
        for folder, key in ((runs["pool"], b""), (runs["fuse"], b"another key of 16")):
            entry = Entry(RunModel(folder), [stages[0].address], key=key)
            with pytest.raises(StageRefused):
                await entry.start()
            await entry.aclose()


@in_a_loop
async def test_a_stage_that_is_not_there_yet_is_used_when_it_comes(runs: dict[str, Path]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    entry = Entry(RunModel(runs["fuse"]), [f"127.0.0.1:{port}"])
    await entry.start(0.2)
    assert (await write(entry, 5))[1].wire_bytes == 0
    stage = Stage(serve_blocks(RunModel(runs["fuse"]), (2, 3)))
    await stage.start(port=port)
    await until_async(lambda: entry.route.lines[0].alive)
    text, stats = await write(entry, 5)
    assert text == alone(FUSE, 5)
    assert stats.wire_bytes > 0
    await entry.aclose()
    await stage.aclose()


# -- rings


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("euler", ()),
        ("euler", ((1,), (2, 3))),
        ("paper", ((1, 2), (3,))),
        ("zero", ()),
        ("zero", ((1,), (2, 3))),
    ],
)
@in_a_loop
async def test_the_paper_s_path_is_the_same_as_a_ring(
    runs: dict[str, Path], name: str, groups: Sequence[Sequence[int]]
) -> None:
    model = MODELS[name]
    async with serving(runs[name], *groups) as (entry, stages):
        assert (await write(entry, 12, mode="autoregressive", seed=2))[0] == alone(
            model, 12, seed=2
        )
        with pytest.raises(ConfigError, match="exact"):
            await write(entry, mode="exact")
        if name != "paper":
            how: Any = {"mode": "sweep", "sweeps": 2}
            expected = bytes(write_locally(model, PROMPT[:10], 9, Sampler(1), **how))
            assert (await write(entry, 9, seed=1, **how))[0] == expected
            how["draft"] = "none"
            expected = bytes(write_locally(model, PROMPT[:10], 9, Sampler(1), **how))
            text, stats = await write(entry, 9, seed=1, **how)
            assert (text, stats.sweeps) == (expected, 4)
        else:
            with pytest.raises(ConfigError, match="edm"):
                await write(entry, mode="sweep")
        await until_async(lambda: not any(stage.sessions for stage in stages))


@pytest.mark.parametrize("groups", [(), ((1, 2), (3, 4))])
@in_a_loop
async def test_the_reference_is_served_by_layers(
    runs: dict[str, Path], groups: Sequence[Sequence[int]]
) -> None:
    async with (
        serving(runs["fuse"], *groups, reference=True) as (entry, _),
        serving(runs["fuse"], reference=True) as (local, _),
    ):
        text, stats = await write(entry, 24, mode="autoregressive", seed=1)
        assert text == (await write(local, 24, mode="autoregressive", seed=1))[0]
        assert stats.sweeps == 24
        with pytest.raises(ConfigError, match="autoregressive"):
            await write(entry, mode="sweep")


@in_a_loop
async def test_a_ring_fails_with_its_stage_and_works_again_when_it_is_back(
    runs: dict[str, Path],
) -> None:
    async with serving(runs["euler"], (1,), (2, 3)) as (entry, stages):
        port = int(stages[1].address.rpartition(":")[2])
        with pytest.raises(AnswerFailed, match="ring"):
            await interrupt(entry, 3, stages[1].aclose, 30, mode="autoregressive")
        with pytest.raises(AnswerFailed, match="blocks 1 to 3"):
            await write(entry, mode="autoregressive")
        back = Stage(serve_blocks(RunModel(runs["euler"]), (2, 3)))
        await back.start(port=port)
        await until_async(lambda: entry.route.lines[1].alive)
        assert (await write(entry, 6, mode="autoregressive"))[0] == alone(MODELS["euler"], 6)
        await back.aclose()


# -- tokens that are no bytes


class DoubledBytes(Tokenizer):
    """Ids of two bytes, each of which stands for a byte twice."""

    name, vocabulary = "doubled", 300

    def encode(self, text: bytes | Bytes) -> Ids:
        return np.frombuffer(bytes(text)[::2], np.uint8).astype("<u2") + np.uint16(44)

    def token(self, token_id: int) -> bytes:
        return bytes([max(token_id - 44, 0)] * 2)


@in_a_loop
async def test_ids_wider_than_a_byte_are_served_like_any_other(tmp_path: Path) -> None:
    register(DoubledBytes())
    model = random_model(tiny_config(blocks=4, context=CONTEXT, tokenizer="doubled"))
    folder = saved(model, tmp_path / "wide")
    prompt = bytes(byte for byte in PROMPT[:20] for _ in range(2))
    tokenizer = DoubledBytes()
    expected = list(write_locally(model, tokenizer.encode(prompt).tolist(), 30, Sampler(3)))
    assert max(expected) > 255
    async with serving(folder, (2,), (3,)) as (entry, _):
        for mode in ("autoregressive", "exact"):
            request = Request(prompt, 30, mode=mode, seed=3)
            pieces = [piece async for piece in entry.generate(request)]
            assert b"".join(piece.text for piece in pieces) == tokenizer.decode(expected)
            stats = pieces[-1].stats
            assert (stats.prompt_tokens, stats.tokens, stats.degraded) == (20, 30, ())
    TOKENIZERS.pop("doubled")  # other tests list the names
