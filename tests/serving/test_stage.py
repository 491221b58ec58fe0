"""Stages: remote equals local to the bit; every refusal by its name; no client stops the others."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktrain.learning.compose import (
    EulerScorer,
    LocalStage,
    Model,
    euler_path,
    in_pieces,
    path_start,
    position_noise,
    window_noise,
)
from blocktrain.learning.model import Cache, IndependentBlock
from blocktrain.protocol import frames, handshake
from blocktrain.protocol.frames import PREFIX, Kind, Run, Why
from blocktrain.serving.blocks import EulerSteps, ReferenceLayers
from blocktrain.serving.line.stage_line import Ring, StageAccess, StageLine, StageLost, StageRefused
from blocktrain.serving.stage.stage import CHECK_SECONDS, Stage, StageGuard, StageLimits
from conftest import random_model, tiny_config
from support.stages import (
    KEY,
    MODEL,
    VOCABULARY,
    Bare,
    Slow,
    fan_of,
    ids_of,
    in_loop,
    line_to,
    mutated,
    random_reference,
    ring_of,
    serving,
    text_of,
)
from support.waiting import until_async

CONTEXT = 72
FUSE = random_model(tiny_config(context=CONTEXT, blocks=4))
POOL = random_model(tiny_config(context=CONTEXT, compose="pool"))
DENOISE = random_model(tiny_config(context=CONTEXT, compose="pool", objective="denoise"))
EULER = random_model(tiny_config(context=24, compose="euler", objective="denoise"))
TAIL = random_model(
    tiny_config(context=24, compose="euler", objective="denoise", skip="edm", tail=6)
)
WIDE = random_model(tiny_config(blocks=2, width=256, heads=4, context=300))
DEEP = tiny_config(blocks=3, layers_per_block=2, context=CONTEXT)
LONG = tiny_config(blocks=2, context=300)
TEXT = text_of(300)
ROUNDS = 2000 if os.environ.get("BLOCKTRAIN_LONG") else 200


def local(model: Model, number: int, text: bytes) -> Tensor:
    """What the block makes of the text in this process, (T, W)."""
    with torch.no_grad():
        return LocalStage(model, number)(ids_of(text), 0)[0]


# -- the same bits


@pytest.mark.parametrize("model", [FUSE, POOL, DENOISE], ids=["fuse", "pool", "denoise"])
@in_loop
async def test_remote_equals_local_bit_for_bit_in_any_chunks(model: Model) -> None:
    numbers = range(1, len(model.blocks) + 1)
    expected = torch.stack([local(model, n, TEXT[:CONTEXT]) for n in numbers])
    async with serving(fan_of(model)) as stage, line_to(stage) as line:
        assert line.blocks == tuple(numbers) and line.alive and line.rtt_ms > 0
        for session, size in enumerate((1, 2, 3, 5, 17, CONTEXT)):
            await line.open(session)
            at = list(range(0, CONTEXT, size))
            features = await asyncio.gather(
                *(line.run(session, 0, i, TEXT[i : min(i + size, CONTEXT)]) for i in at)
            )
            assert torch.equal(torch.cat(features, dim=1), expected), f"chunks of {size}"
            await line.close(session)
        assert line.bytes_in > expected.numel() * 4 * 6 and line.bytes_out > 6 * CONTEXT


@in_loop
async def test_a_session_may_ask_for_some_blocks_only() -> None:
    async with serving(fan_of(FUSE, 1, 3)) as stage, line_to(stage) as line:
        await line.open(1, blocks=(3,))
        await line.open(2, blocks=(3, 1))
        one, both = await asyncio.gather(line.run(1, 0, 0, TEXT[:9]), line.run(2, 0, 0, TEXT[:9]))
        assert torch.equal(one, local(FUSE, 3, TEXT[:9])[None])
        assert torch.equal(both, torch.stack([local(FUSE, 1, TEXT[:9]), local(FUSE, 3, TEXT[:9])]))


@in_loop
async def test_what_comes_again_from_an_earlier_position_replaces_what_was_there() -> None:
    wrong = bytes(255 - b for b in TEXT)
    expected = local(FUSE, 2, TEXT[:CONTEXT])
    async with serving(fan_of(FUSE, 2)) as stage, line_to(stage) as line:
        await line.open(1)
        await line.run(1, 0, 0, TEXT[:20])
        await line.run(1, 0, 20, wrong[20:60])  # a wrong draft, longer than what replaces it
        assert torch.equal((await line.run(1, 1, 20, TEXT[20:23]))[0], expected[20:23])
        assert torch.equal((await line.run(1, 1, 23, TEXT[23:CONTEXT]))[0], expected[23:])
        assert torch.equal((await line.run(1, 2, 0, TEXT[:CONTEXT]))[0], expected)


@in_loop
async def test_work_of_many_sessions_is_done_together_with_the_same_bits() -> None:
    holding = Slow(FUSE, 1, 2)
    holding.gate.clear()
    texts = [text_of(CONTEXT, seed) for seed in range(9)]
    draw = random.Random(3)
    async with serving(holding) as stage, line_to(stage) as line:
        futures: list[list[asyncio.Future[Tensor]]] = [[] for _ in texts]
        for session in range(len(texts)):
            await line.open(session)
        at = [0] * len(texts)
        while any(a < CONTEXT for a in at):
            session = draw.choice([s for s, a in enumerate(at) if a < CONTEXT])
            size = min(draw.choice((1, 1, 2, 3, 4, 7, 33)), CONTEXT - at[session])
            ids = texts[session][at[session] : at[session] + size]
            futures[session].append(line.submit(session, Run(0, at[session], size), ids))
            at[session] += size
        await until_async(lambda: stage.queue == sum(map(len, futures)))
        holding.gate.set()
        for text, parts in zip(texts, futures, strict=True):
            features = torch.cat(await asyncio.gather(*parts), dim=1)
            assert torch.equal(features, torch.stack([local(FUSE, 1, text), local(FUSE, 2, text)]))
    assert max(holding.together) > 2


@in_loop
async def test_long_and_short_work_share_their_turns_with_the_same_bits() -> None:
    holding = Slow(WIDE)
    holding.gate.clear()
    async with serving(holding) as stage, line_to(stage) as line:
        for session in range(4):
            await line.open(session)
        texts = [text_of(size, size) for size in (300, 5, 130, 33)]
        futures = [line.submit(s, Run(0, 0, len(text)), text) for s, text in enumerate(texts)]
        await until_async(lambda: stage.queue == 4)
        holding.gate.set()
        results = await asyncio.gather(*futures)
    for text, features in zip(texts, results, strict=True):
        assert torch.equal(features[0], local(WIDE, 1, text))
    assert 256 in holding.starts and max(holding.together) > 1


@in_loop
async def test_half_precision_on_the_wire_rounds_and_nothing_else() -> None:
    async with serving(fan_of(FUSE, 1)) as stage, line_to(stage) as line:
        await line.open(1, "fp16")
        before = line.bytes_in
        features = await line.run(1, 0, 0, TEXT[:40])
        assert torch.equal(features[0], local(FUSE, 1, TEXT[:40]).half().float())
        assert line.bytes_in - before < 40 * 16 * 2 + 200


# -- rings


def reference_logits(block: IndependentBlock, text: bytes) -> Tensor:
    ids, cache = ids_of(text), Cache(block, 1)
    with torch.no_grad():
        return in_pieces(lambda part: block(block.features(ids[:, part], cache=cache)), len(text))


def layers(*numbers: int) -> ReferenceLayers:
    return ReferenceLayers(DEEP, random_reference(DEEP), numbers, MODEL)


@pytest.mark.parametrize("split", [[(1, 2, 3)], [(1,), (2, 3)], [(1,), (2,), (3,)]], ids=str)
@in_loop
async def test_the_reference_over_a_ring_equals_one_machine(split: list[tuple[int, ...]]) -> None:
    expected = reference_logits(random_reference(DEEP), TEXT[:CONTEXT])
    async with ring_of([layers(*numbers) for numbers in split]) as lines:
        ring = Ring(lines)
        await ring.open(5)
        first = await ring.run(5, Run(0, 0, 20, 1), TEXT[:20])
        assert torch.equal(first, expected[:, 19:20])
        await ring.run(5, Run(0, 20, 30, 1), bytes(30))  # a wrong draft
        more = [ring.submit(5, Run(1, i, 2), TEXT[i : i + 2]) for i in range(20, 40, 2)]
        assert torch.equal(torch.cat(await asyncio.gather(*more), dim=1), expected[:, 20:40])
        await ring.close(5)


@in_loop
async def test_the_reference_as_a_star_equals_one_machine() -> None:
    expected = reference_logits(random_reference(DEEP), TEXT[:30])
    async with ring_of([layers(1), layers(2), layers(3)]) as lines:
        for line in lines:
            await line.open(1, topology="ring")
        for start, count in ((0, 29), (29, 1)):
            run, ids, state = Run(0, start, count), TEXT[start : start + count], None
            for line in lines:
                state = await line.submit(1, run, ids, state)
            assert state is not None and torch.equal(state, expected[:, start : start + count])


@in_loop
async def test_many_sessions_on_a_ring_do_not_mix() -> None:
    reference = random_reference(DEEP)
    texts = [text_of(30, seed) for seed in range(6)]
    async with ring_of([layers(1), layers(2, 3)]) as lines:
        ring = Ring(lines)
        await asyncio.gather(*(ring.open(session) for session in range(6)))
        results = await asyncio.gather(
            *(ring.run(s, Run(0, 0, 30), text) for s, text in enumerate(texts))
        )
    for text, logits in zip(texts, results, strict=True):
        assert torch.equal(logits, reference_logits(reference, text))


@in_loop
async def test_of_a_long_run_only_the_end_may_be_wanted() -> None:
    """It is worked on in pieces, and the first ones have nothing to answer."""
    expected = reference_logits(random_reference(LONG), TEXT)
    async with ring_of(
        [ReferenceLayers(LONG, random_reference(LONG), [n], MODEL) for n in (1, 2)]
    ) as lines:
        ring = Ring(lines)
        await ring.open(1)
        assert torch.equal(await ring.run(1, Run(0, 0, 300, 1), TEXT), expected[:, -1:])
        assert torch.equal(await ring.run(1, Run(0, 0, 300, 50), TEXT), expected[:, -50:])


@in_loop
async def test_a_ring_passes_over_what_a_newer_epoch_has_overtaken() -> None:
    expected = reference_logits(random_reference(DEEP), TEXT[:5])
    async with ring_of([layers(1), layers(2), layers(3)]) as lines:
        ring = Ring(lines)
        await ring.open(1)
        first = ring.submit(1, Run(1, 0, 4), TEXT[:4])
        late = ring.submit(1, Run(0, 3, 1), b"x")
        last = ring.submit(1, Run(1, 4, 1), TEXT[4:5])
        assert torch.equal(torch.cat([await first, await last], dim=1), expected)
        with pytest.raises(StageRefused) as refusal:
            await late
        assert refusal.value.code == Why.OLD_EPOCH


def steps(model: Model, *numbers: int) -> EulerSteps:
    return EulerSteps(model.config, {n: model.blocks[n - 1] for n in numbers}, MODEL)


@in_loop
async def test_the_paper_over_a_ring_equals_one_machine() -> None:
    config = EULER.config
    async with ring_of([steps(EULER, 1, 2), steps(EULER, 3)]) as lines:
        ring = Ring(lines)
        await ring.open(1)
        scorer = EulerScorer(EULER, 7)
        for start, end in ((0, 9), (9, 10), (10, 24)):
            with torch.no_grad():
                expected = scorer(ids_of(TEXT[start:end]), start)
            z = path_start(config, window_noise(7, TEXT[:end], config.z_width))
            logits = await ring.run(1, Run(0, 0, end, end - start), TEXT[:end], z)
            assert torch.equal(logits, expected)


@in_loop
async def test_the_tail_of_the_paper_over_a_ring_equals_one_machine() -> None:
    config = TAIL.config
    z = path_start(config, position_noise(3, 0, 20, config.z_width))
    with torch.no_grad():
        expected = euler_path(TAIL, ids_of(TEXT[:20]), z[None], tail=6)[-1][:, -6:]
    async with ring_of([steps(TAIL, 1), steps(TAIL, 2, 3)]) as lines:
        ring = Ring(lines)
        await ring.open(1)
        assert torch.equal(await ring.run(1, Run(0, 0, 20, 6, 6), TEXT[:20], z), expected)


@in_loop
async def test_a_ring_whose_next_host_dies_says_so() -> None:
    async with serving(layers(1), StageLimits(handshake_seconds=1)) as first, line_to(first) as one:
        last = Stage(layers(2, 3), StageGuard(KEY))
        await last.start()
        async with line_to(last) as two:
            ring = Ring([one, two])
            await ring.open(1)
            await ring.run(1, Run(0, 0, 4), b"abcd")
            await last.aclose()
            with pytest.raises((StageLost, StageRefused)):
                await ring.run(1, Run(0, 4, 1), b"e")
            await until_async(lambda: first.sessions == 0)
        with pytest.raises(StageRefused) as refusal:
            await one.open(2, topology="ring", next=last.address)
        assert refusal.value.code == Why.NEXT_LOST
        assert one.alive


@in_loop
async def test_a_session_that_the_next_stage_dropped_ends_with_a_reason() -> None:
    async with ring_of([layers(1), layers(2, 3)]) as (one, two):
        ring = Ring([one, two])
        await ring.open(1)
        await two.close(1)
        future = one.submit(1, Run(0, 0, 2), b"ab")
        with pytest.raises(StageRefused) as refusal:
            await future
        assert refusal.value.code == Why.NEXT_LOST


@in_loop
async def test_a_next_host_that_nobody_needs_makes_room_for_another() -> None:
    async with serving(layers(1), StageLimits(followers=1)) as first, line_to(first) as one:
        async with serving(layers(2, 3)) as here, serving(layers(2, 3)) as there:
            for session, (following, other) in enumerate(
                [(here, there), (there, here), (here, there)]
            ):
                await one.open(session, topology="ring", next=following.address)
                with pytest.raises(StageRefused) as refusal:
                    await one.open(session + 10, topology="ring", next=other.address)
                assert refusal.value.code == Why.NEXT_LOST
                await one.close(session)
        await until_async(lambda: not first._followers)  # nobody dials for ever what is gone


# -- refusals


async def refusal_of(
    stage: Stage, *messages: tuple[frames.Header, int, int, bytes], role: frames.Role = "entry"
) -> tuple[str, bool]:
    """The answer to some frames: the code, and whether the connection lives on."""
    bare = await Bare.greeted(stage, role)
    for header, session, sequence, payload in messages:
        bare.say(header, session, sequence, [payload] if payload else [])
    try:
        return await bare.error()
    finally:
        await bare.close()


def opening(**changes: Any) -> frames.Open:
    fields: dict[str, Any] = {"topology": "fan", "wire": "fp32", "width": 16, "most": CONTEXT}
    return frames.Open(**{**fields, **changes})


OPEN = (opening(), 1, 0, b"")
GOOD = (Run(0, 0, 3), 1, 1, b"abc")
LIVES, ENDS = True, False
REFUSALS: dict[str, tuple[Why, bool, Sequence[tuple[frames.Header, int, int, bytes]]]] = {
    "a session that is not there": (Why.UNKNOWN_SESSION, LIVES, [GOOD]),
    "a closed session": (Why.UNKNOWN_SESSION, LIVES, [OPEN, (frames.Close(), 1, 0, b""), GOOD]),
    "a gap in the sequence": (Why.OUT_OF_ORDER, ENDS, [OPEN, (Run(0, 0, 3), 1, 2, b"abc")]),
    "a frame again": (Why.DUPLICATED, ENDS, [OPEN, GOOD, GOOD]),
    "a session again": (Why.DUPLICATED, ENDS, [OPEN, OPEN]),
    "an opening in the middle": (Why.OUT_OF_ORDER, ENDS, [(opening(), 1, 1, b"")]),
    "more bytes than positions": (Why.WRONG_SHAPE, ENDS, [OPEN, (Run(0, 0, 3), 1, 1, b"abcd")]),
    "no positions": (Why.WRONG_SHAPE, ENDS, [OPEN, (Run(0, 0, 0), 1, 1, b"")]),
    "positions beyond the context": (
        Why.WRONG_SHAPE,
        ENDS,
        [OPEN, (Run(0, CONTEXT, 1), 1, 1, b"a")],
    ),
    "more wanted than sent": (Why.WRONG_SHAPE, ENDS, [OPEN, (Run(0, 0, 3, 4), 1, 1, b"abc")]),
    "a tail for a fan": (Why.WRONG_SHAPE, ENDS, [OPEN, (Run(0, 0, 3, 0, 2), 1, 1, b"abc")]),
    "another width": (Why.WRONG_SHAPE, ENDS, [(opening(width=17), 1, 0, b"")]),
    "more than the context": (Why.WRONG_SHAPE, ENDS, [(opening(most=CONTEXT + 1), 1, 0, b"")]),
    "a next stage where none is": (
        Why.WRONG_SHAPE,
        ENDS,
        [(opening(next="127.0.0.1:1"), 1, 0, b"")],
    ),
    "blocks twice": (Why.WRONG_SHAPE, ENDS, [(opening(blocks=(1, 1)), 1, 0, b"")]),
    "a block of another stage": (Why.NOT_HERE, LIVES, [(opening(blocks=(1, 3)), 1, 0, b"")]),
    "a ring of a fan's model": (Why.NOT_FOR_RING, LIVES, [(opening(topology="ring"), 1, 0, b"")]),
    "positions before it unknown": (
        Why.WRONG_START,
        LIVES,
        [OPEN, GOOD, (Run(0, 4, 1), 1, 2, b"a")],
    ),
    "more than the session has": (
        Why.TOO_LARGE,
        ENDS,
        [(opening(most=4), 1, 0, b""), (Run(0, 0, 80), 1, 1, bytes(80))],
    ),
    "a payload where none is": (Why.TOO_LARGE, ENDS, [(frames.Ping(1), 0, 0, b"x")]),
    "a frame of the stage's": (Why.UNEXPECTED, ENDS, [(frames.Result(0, 0, 1, 0, 0), 1, 1, b"")]),
    "hello again": (
        Why.UNEXPECTED,
        ENDS,
        [(frames.Hello("entry", bytes(32), bytes(32), "0" * 64, 1), 0, 0, b"")],
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
@in_loop
async def test_what_does_not_fit_is_refused_by_name(name: str) -> None:
    why, lives, messages = REFUSALS[name]
    async with serving(fan_of(FUSE, 1, 2)) as stage:
        assert await refusal_of(stage, *messages) == (why, lives)
        async with line_to(stage) as line:  # and nobody else notices
            await line.open(1)
            assert (await line.run(1, 0, 0, b"ab")).shape == (2, 2, 16)


@in_loop
async def test_a_fan_is_not_for_a_ring_model_and_a_stage_only_passes_on() -> None:
    async with serving(layers(2)) as stage:
        assert await refusal_of(stage, OPEN) == (Why.NOT_FOR_FAN, True)
        assert await refusal_of(stage, (opening(topology="ring"), 1, 0, b""), role="stage") == (
            Why.UNEXPECTED,
            False,
        )
        assert await refusal_of(stage, (Run(0, 0, 1), 1, 1, bytes(65)), role="stage") == (
            Why.UNKNOWN_SESSION,
            True,
        )
        assert await refusal_of(stage, (opening(topology="ring", next="nowhere"), 1, 0, b"")) == (
            Why.WRONG_SHAPE,
            False,
        )
        bare = await Bare.greeted(stage)
        bare.say(opening(topology="ring"), 1)
        assert isinstance((await bare.next()).header, frames.Opened)
        assert await refusal_of(stage, (opening(topology="ring"), 1, 0, b"")) == (
            Why.DUPLICATED,
            False,
        )


@in_loop
async def test_an_early_run_of_a_ring_that_came_by_the_wrong_way_touches_no_fan() -> None:
    async with serving(fan_of(FUSE)) as stage, line_to(stage) as line:
        await line.open(1)
        await line.run(1, 0, 0, b"abc")
        assert await refusal_of(stage, (Run(0, 3, 1), 1, 2, b"d"), role="stage") == (
            Why.UNKNOWN_SESSION,
            True,
        )
        assert await refusal_of(stage, (Run(0, 3, 1), 1, 2, b"d")) == (
            Why.UNKNOWN_SESSION,
            True,
        )  # another's connection
        assert torch.equal((await line.run(1, 0, 3, b"d"))[0], local(FUSE, 1, b"abcd")[3:])


@in_loop
async def test_strangers_are_refused_by_name() -> None:
    async with serving(fan_of(FUSE)) as stage:
        fingerprint = FUSE.config.fingerprint
        for key, print_, model, code in (
            (b"", fingerprint, "", Why.WRONG_KEY),
            (KEY + b"!", fingerprint, "", Why.WRONG_KEY),
            (KEY, "1" * 64, "", Why.WRONG_FINGERPRINT),
            (KEY, fingerprint, "2" * 64, Why.WRONG_MODEL),
        ):
            line = StageLine(stage.address, StageAccess(print_, key, model, vocabulary=VOCABULARY))
            with pytest.raises(StageRefused) as refusal:
                await line.ready()
            assert refusal.value.code == code and not line.alive
            with pytest.raises(StageLost):
                await line.open(1)
            await line.aclose()
        wider = StageLine(stage.address, StageAccess(fingerprint, KEY, vocabulary=VOCABULARY + 1))
        with pytest.raises(StageRefused, match="2 bytes instead of 1") as refusal:
            await wider.ready()
        assert refusal.value.code == Why.WRONG_ID_WIDTH
        await wider.aclose()
        bare = await Bare.dial(stage.address)
        bare.raw(PREFIX.pack(frames.MAGIC, frames.PROTOCOL + 1, Kind.PING, 0, 0, 0, 0, 0))
        assert await bare.error() == (Why.WRONG_PROTOCOL, False)
        bare = await Bare.dial(stage.address)
        bare.raw(b"GET / HTTP/1.1\r\nHost: a stage is no web server\r\n\r\n")
        assert await bare.error() == (Why.MALFORMED, False)
        bare = await Bare.dial(stage.address)
        bare.say(Run(0, 0, 1), 1, 1, [b"a"])
        assert await bare.error() == (
            Why.TOO_LARGE,
            False,
        )  # nobody carries anything before it is known
        assert stage.sessions == 0


@in_loop
async def test_a_stage_that_does_not_know_the_key_is_not_believed() -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(frames.encode(frames.Challenge(bytes(32)))))
        await reader.read(4096)
        f = fan_of(FUSE).facts
        welcome = frames.Welcome(
            bytes(32), f.kind, f.blocks, f.width, f.context, f.z_width, f.fingerprint, f.model
        )
        writer.write(
            b"".join(
                frames.encode(handshake.prove_welcome(b"guessed", bytes(32), bytes(32), welcome))
            )
        )

    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    line = StageLine(
        f"127.0.0.1:{server.sockets[0].getsockname()[1]}",
        StageAccess(FUSE.config.fingerprint, KEY, vocabulary=VOCABULARY),
    )
    with pytest.raises(StageRefused) as refusal:
        await line.ready()
    assert refusal.value.code == Why.WRONG_KEY
    await line.aclose()
    server.close()


@in_loop
async def test_there_is_room_for_so_many_sessions_and_connections() -> None:
    async with (
        serving(fan_of(FUSE), StageLimits(sessions=3, peers=2)) as stage,
        line_to(stage) as line,
    ):
        for session in range(4):
            await line.open(session)
        with pytest.raises(StageRefused) as refusal:
            await line.run(3, 0, 0, b"ab")
        assert refusal.value.code == Why.TOO_MANY_SESSIONS and line.alive
        await line.close(0)
        await line.open(4)
        assert (await line.run(4, 0, 0, b"ab")).shape == (3, 2, 16)
        async with line_to(stage):
            third = StageLine(
                stage.address, StageAccess(FUSE.config.fingerprint, KEY, vocabulary=VOCABULARY)
            )
            with pytest.raises(StageRefused) as refusal:
                await third.ready()
            assert refusal.value.code == Why.BUSY
            await third.aclose()


@in_loop
async def test_only_the_first_error_is_reported() -> None:
    async with serving(fan_of(FUSE)) as stage:
        bare = await Bare.greeted(stage)
        bare.raw(
            b"".join(frames.encode(frames.Result(0, 0, 1, 0, 0), 1, 1)) + b"this is no frame" * 4
        )
        assert await bare.error() == (Why.UNEXPECTED, False)
        await bare.close()


@in_loop
async def test_late_frames_of_an_older_epoch_are_ignored() -> None:
    holding = Slow(FUSE, 1)
    async with serving(holding) as stage:
        bare = await Bare.greeted(stage)
        bare.say(opening(), 1)
        bare.say(Run(5, 0, 4), 1, 1, [b"abcd"])
        bare.say(Run(4, 1, 1), 1, 2, [b"x"])  # late
        bare.say(Run(5, 4, 1), 1, 3, [b"e"])
        assert isinstance((await bare.next()).header, frames.Opened)
        answers = [await bare.next(), await bare.next()]
        assert [
            (f.sequence, f.header.start) for f in answers if isinstance(f.header, frames.Result)
        ] == [(1, 0), (3, 4)]
        expected = local(FUSE, 1, b"abcde")
        assert bytes(answers[1].payload) == expected[4:].numpy().tobytes()
        assert 1 not in holding.starts
        await bare.close()


@in_loop
async def test_what_a_newer_epoch_overtakes_is_not_computed() -> None:
    holding = Slow(FUSE, 1)
    holding.gate.clear()
    async with serving(holding) as stage, line_to(stage) as line:
        await line.open(1)
        first = line.submit(1, Run(0, 0, 4), b"abcd")
        await until_async(lambda: holding.starts)
        drafts = [line.submit(1, Run(0, 4 + i, 1), b"x") for i in range(5)]
        new = line.submit(1, Run(1, 4, 1), b"e")
        await until_async(lambda: stage.queue == 7)
        holding.gate.set()
        assert torch.equal((await new)[0], local(FUSE, 1, b"abcde")[4:])
        await first
        for draft in drafts:
            with pytest.raises(StageRefused) as refusal:
                await draft
            assert refusal.value.code == Why.OLD_EPOCH
        assert holding.starts == [0, 4]
        await until_async(lambda: stage.queue == 0)


@in_loop
async def test_what_cannot_be_computed_ends_its_session_only() -> None:
    holding = Slow(FUSE, 1)
    async with serving(holding) as stage, line_to(stage) as line:
        await line.open(1)
        holding.broken = True
        with pytest.raises(StageRefused) as refusal:
            await line.run(1, 0, 0, b"abc")
        assert refusal.value.code == Why.FAILED and line.alive
        holding.broken = False
        await line.open(2)
        assert torch.equal((await line.run(2, 0, 0, b"abc"))[0], local(FUSE, 1, b"abc"))
        assert stage.sessions == 1


# -- nobody stops it for the rest


@in_loop
async def test_a_disconnect_frees_the_sessions() -> None:
    holding = Slow(FUSE)
    async with serving(holding) as stage:
        async with line_to(stage) as line:
            for session in range(5):
                await line.open(session)
            await line.run(0, 0, 0, b"abc")
            assert stage.sessions == 5
            await line.close(0)
            holding.gate.clear()
            waiting = [line.submit(s, Run(0, i, 1), b"x") for s in range(1, 5) for i in range(10)]
            await until_async(lambda: stage.queue == 40)
            assert stage.sessions == 4
        await until_async(lambda: stage.sessions == 0)
        holding.gate.set()
        await until_async(lambda: stage.queue == 0)
        assert all(w.done() for w in waiting)
        assert len(holding.starts) <= 1 + 4, "what still waited is not computed"
        await until_async(lambda: not any(cache() for cache in holding.caches))


@in_loop
async def test_idle_sessions_are_dropped() -> None:
    async with (
        serving(fan_of(FUSE), StageLimits(idle_seconds=0.3)) as stage,
        line_to(stage) as line,
    ):
        await line.open(1)
        await line.run(1, 0, 0, b"abc")
        await until_async(lambda: stage.sessions == 0)
        with pytest.raises(StageRefused) as refusal:
            await line.run(1, 0, 3, b"d")
        assert refusal.value.code == Why.UNKNOWN_SESSION and line.alive


@in_loop
async def test_silent_peers_are_dropped() -> None:
    async with serving(fan_of(FUSE), StageLimits(silence_seconds=0.3)) as stage:
        silent = await Bare.greeted(stage)
        assert (await silent.error()) == (Why.TOO_SLOW, False)


class Ahead(Stage):
    """Its clock can be set forward."""

    seconds = 0.0

    def now(self) -> float:
        return super().now() + self.seconds


@in_loop
async def test_time_in_which_nobody_read_is_not_held_against_a_frame() -> None:
    holding = Slow(FUSE, 1)
    holding.gate.clear()
    stage = Ahead(holding, StageGuard(KEY), StageLimits(waiting=2))
    await stage.start()
    bare = await Bare.greeted(stage)
    bare.say(opening(), 1)
    data = b"".join(b"".join(frames.encode(Run(0, i, 1), 1, 1 + i, [b"x"])) for i in range(3))
    bare.raw(data[:-1])
    await until_async(
        lambda: stage.queue == 2
    )  # so many that it is not read any more, in the middle of a frame
    stage.seconds = 60
    holding.gate.set()
    await until_async(lambda: stage.queue == 0)
    await asyncio.sleep(2 * CHECK_SECONDS)
    bare.raw(data[-1:])
    assert [(await bare.next()).sequence for _ in range(4)] == [0, 1, 2, 3]
    await bare.close()
    await stage.aclose()


@in_loop
async def test_slow_peers_are_dropped_before_and_after_the_handshake() -> None:
    async with serving(fan_of(FUSE), StageLimits(handshake_seconds=1, frame_seconds=1)) as stage:
        mute = await Bare.dial(stage.address)
        await mute.next()
        known = await Bare.greeted(stage)
        known.say(opening(), 1)
        assert isinstance((await known.next()).header, frames.Opened)
        ping, run = (
            b"".join(frames.encode(frames.Ping(1))),
            b"".join(frames.encode(Run(0, 0, 40), 1, 1, [bytes(40)])),
        )

        async def trickle(bare: Bare, data: bytes) -> tuple[str, bool]:
            refused = asyncio.ensure_future(bare.error())
            for byte in data[:-1]:  # never all of it, however long this takes
                bare.raw(bytes([byte]))
                await asyncio.wait([refused], timeout=0.05)
                if refused.done():
                    break
            return await refused

        refusals = await asyncio.gather(trickle(mute, ping), trickle(known, run))
        assert list(refusals) == [(Why.TOO_SLOW, False)] * 2
        assert stage.sessions == 0


@in_loop
async def test_a_peer_that_does_not_read_is_dropped() -> None:
    async with serving(fan_of(WIDE), StageLimits(frame_seconds=0.5, least_rate=1e9)) as stage:
        bare = await Bare.greeted(stage)
        bare.reader._transport.pause_reading()  # type: ignore[attr-defined]
        bare.say(opening(width=256, most=300), 1)
        for sequence in range(
            1, 120
        ):  # 300 KB each, more than the system keeps for somebody who does not read
            bare.say(Run(0, 0, 300), 1, sequence, [bytes(300)])
        await until_async(lambda: stage.sessions == 1)
        await until_async(lambda: stage.sessions == 0)


@in_loop
async def test_a_refused_peer_that_stays_counts_as_a_connection() -> None:
    async with serving(fan_of(FUSE), StageLimits(unproven=3, goodbye_seconds=60)) as stage:
        crowd = []
        for _ in range(8):
            crowd.append(await Bare.dial(stage.address))
            crowd[-1].raw(bytes(64))
            assert await crowd[-1].error() == (Why.MALFORMED, False)

        def is_gone(bare: Bare) -> bool:
            if not bare.writer.is_closing():
                bare.raw(b"x")
            return bare.writer.is_closing()

        await until_async(lambda: [is_gone(bare) for bare in crowd] == 5 * [True] + 3 * [False])


@in_loop
async def test_three_hundred_trickling_connections_do_not_stop_an_honest_user() -> None:
    async with serving(fan_of(FUSE, 1), StageLimits(unproven=100)) as stage:
        crowd = [await Bare.dial(stage.address) for _ in range(300)]

        async def trickle() -> None:
            while True:
                closed = [place for place, bare in enumerate(crowd) if bare.writer.is_closing()]
                for place in closed[:20]:  # they come back
                    crowd[place] = await Bare.dial(stage.address)
                for bare in crowd:
                    if not bare.writer.is_closing():
                        bare.raw(b"B")
                await asyncio.sleep(0.05)

        trickling = asyncio.ensure_future(trickle())
        expected = local(FUSE, 1, TEXT[:CONTEXT])
        for session in range(5):
            async with line_to(stage) as line:
                await line.open(session)
                results = [
                    await line.run(session, 0, i, TEXT[i : i + 4]) for i in range(0, CONTEXT, 4)
                ]
                assert torch.equal(torch.cat(results, dim=1)[0], expected)
        assert not trickling.done()
        trickling.cancel()
        for bare in crowd:
            bare.writer.close()


@in_loop
async def test_mutated_bytes_at_a_living_stage() -> None:
    draw = random.Random(1)
    hello = b"".join(frames.encode(frames.Hello("entry", bytes(32), bytes(32), "0" * 64, 1)))
    stream = b"".join(
        b"".join(frames.encode(h, s, n, [p]))
        for h, s, n, p in (OPEN, GOOD, (Run(1, 1, 2), 1, 2, b"xy"))
    )
    roles: Sequence[frames.Role] = ("entry", "entry", "stage")
    async with (
        serving(fan_of(FUSE, 1), StageLimits(goodbye_seconds=0.1)) as stage,
        line_to(stage) as line,
    ):
        await line.open(1)
        for number in range(ROUNDS):
            bare = (
                await Bare.greeted(stage, draw.choice(roles))
                if number % 4
                else await Bare.dial(stage.address)
            )
            bare.raw(bytes(mutated(stream if number % 4 else hello, draw)))
            await bare.close()
        assert torch.equal((await line.run(1, 0, 0, TEXT[:9]))[0], local(FUSE, 1, TEXT[:9]))
        await until_async(lambda: stage.sessions == 1)
        await until_async(lambda: stage.queue == 0)
