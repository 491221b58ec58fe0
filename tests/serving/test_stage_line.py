"""Lines to stages: loss is noticed at once, long work is not mistaken for it, lines come back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import trustme

from blocktrain.errors import ConfigError, IdentityError, RunError
from blocktrain.learning.compose import LocalStage, Model
from blocktrain.protocol import frames, handshake
from blocktrain.protocol.frames import Run, Why
from blocktrain.runs.served import RunModel
from blocktrain.serving.blocks import (
    EulerSteps,
    FanBlocks,
    ReferenceLayers,
    parse_blocks,
    serve_blocks,
)
from blocktrain.serving.line.address import format_address, is_loopback, parse_address, read_key
from blocktrain.serving.line.connection import IDLE_TICKS, SILENCE, TICK, LineHeartbeat
from blocktrain.serving.line.stage_line import StageAccess, StageLine, StageLost, StageRefused
from blocktrain.serving.line.tls import load_tls, own_tls, trust_key
from blocktrain.serving.stage.stage import Stage, StageGuard
from conftest import random_model, tiny_config
from support.command import blocktrain, start
from support.stages import (
    KEY,
    VOCABULARY,
    Slow,
    Wire,
    fan_of,
    ids_of,
    in_loop,
    line_to,
    mutated,
    run_folder,
    serving,
    text_of,
)
from support.waiting import until_async

Started = tuple[subprocess.Popen[str], dict[str, Any]]
CPU = torch.device("cpu")
CONFIG = tiny_config(blocks=4, context=32)
MODEL_4 = random_model(CONFIG)
TEXT = text_of(32)
ROUNDS = 2000 if os.environ.get("BLOCKTRAIN_LONG") else 100


# -- is it still there? (pure)


def test_a_busy_line_pings_four_times_a_second_and_an_idle_one_every_two_seconds() -> None:
    heartbeat = LineHeartbeat()
    heartbeat.reset(0.0)
    now, pings = 0.0, []
    for _ in range(3 * IDLE_TICKS):
        beat = heartbeat.beat(now, due=False)
        if beat.ping is not None:
            pings.append(now)
            heartbeat.on_received(now)
            heartbeat.on_pong(beat.ping, now + 0.01)
        now += beat.again
    assert [round(b - a, 2) for a, b in itertools.pairwise(pings)] == [2.0, 2.0]
    busy = [heartbeat.beat(now + i * TICK, due=True) for i in range(3)]
    assert all(beat.ping is not None and not beat.lost for beat in busy)
    assert 0.009 < heartbeat.rtt < 0.011


def test_silence_counts_from_when_something_was_due_and_grants_a_round_trip() -> None:
    heartbeat = LineHeartbeat()
    heartbeat.reset(0.0)
    heartbeat.on_round_trip(0.1)
    now = 100.0  # nothing was due until now
    heartbeat.on_request(now, due=False)
    heartbeat.beat(now, due=True)
    lost_at = None
    while lost_at is None:
        beat = heartbeat.beat(now, due=True)
        lost_at = now if beat.lost else None
        now += beat.again
    assert 100 + SILENCE + 0.1 - 1e-9 <= lost_at <= 100 + SILENCE + 0.12


def test_any_frame_counts_as_a_heartbeat() -> None:
    heartbeat = LineHeartbeat()
    heartbeat.reset(0.0)
    for i in range(100):
        heartbeat.on_received(i * TICK)
        assert not heartbeat.beat(i * TICK, due=True).lost


def test_a_process_that_stood_still_looks_before_it_judges() -> None:
    heartbeat = LineHeartbeat()
    heartbeat.reset(0.0)
    again = heartbeat.beat(0.0, due=True).again
    late = heartbeat.beat(10.0, due=True)
    assert not late.lost and again <= TICK
    assert heartbeat.beat(10.0 + late.again, due=True).lost  # nothing was in the socket


def test_what_takes_long_to_send_is_granted_its_time() -> None:
    heartbeat = LineHeartbeat()
    heartbeat.reset(0.0)
    heartbeat.on_sent(3_000_000)
    now, beat = 0.0, heartbeat.beat(0.0, due=True)
    while not beat.lost:
        now += beat.again
        beat = heartbeat.beat(now, due=True)
    assert 3 + SILENCE - 1e-6 <= now < 3.2 + SILENCE


# -- lines


@in_loop
async def test_a_line_comes_back_by_itself_and_sessions_do_not() -> None:
    first = Stage(fan_of(MODEL_4, 1), StageGuard(KEY))
    address = await first.start()
    seen: list[bool] = []
    async with line_to(first) as line:
        line.on_change = lambda line: seen.append(line.alive)
        await line.open(1)
        await line.run(1, 0, 0, b"ab")
        await first.aclose()
        await until_async(lambda: not line.alive)
        with pytest.raises(StageLost):
            await line.run(1, 0, 2, b"c")
        with pytest.raises(StageLost):
            await line.open(2)
        again = Stage(fan_of(MODEL_4, 1, 2), StageGuard(KEY))
        await again.start(*parse_address(address))
        await until_async(lambda: line.alive)
        assert line.blocks == (1, 2) and line.failures == 1 and seen == [False, True]
        with pytest.raises(StageLost):
            await line.run(1, 0, 2, b"c")
        await line.open(1)
        assert (await line.run(1, 0, 0, b"abc")).shape == (2, 3, 16)
        await again.aclose()


@in_loop
async def test_a_black_hole_is_noticed_within_a_second() -> None:
    async with serving(fan_of(MODEL_4, 1)) as stage:
        for _ in range(5):  # the machine may have been busy
            wire = Wire(stage.address)
            line = StageLine(
                await wire.start(), StageAccess(CONFIG.fingerprint, KEY, vocabulary=VOCABULARY)
            )
            await line.ready()
            await line.open(1)
            await line.run(1, 0, 0, b"ab")
            wire.dead = True
            began = time.monotonic()
            with pytest.raises(StageLost):
                await line.run(1, 0, 2, b"c")
            took = time.monotonic() - began
            assert took > 0.5
            assert not line.alive and line.failures == 1
            await line.aclose()
            await wire.close()
            if took < 1.1 + line.rtt_ms / 1e3:
                break
        assert took < 1.1 + line.rtt_ms / 1e3


@in_loop
async def test_a_long_computation_is_not_mistaken_for_a_dead_host() -> None:
    holding = Slow(MODEL_4)
    holding.seconds = 2 * SILENCE
    async with serving(holding) as stage, line_to(stage) as line:
        await line.open(1)
        assert (await line.run(1, 0, 0, b"ab")).shape == (3, 2, 16)
        assert line.failures == 0 and line.rtt_ms < 1000


@in_loop
async def test_a_cancelled_request_disturbs_nobody() -> None:
    holding = Slow(MODEL_4)
    holding.seconds = 0.1
    async with serving(holding) as stage, line_to(stage) as line:
        await line.open(1)
        task = asyncio.ensure_future(line.run(1, 0, 0, b"ab"))
        await asyncio.sleep(0)
        task.cancel()
        assert (await line.run(1, 0, 2, b"c")).shape == (3, 1, 16)
        closed = line.submit(1, Run(0, 3, 1), b"d")
        await line.close(1)
        with pytest.raises(StageLost):
            await closed
        with pytest.raises(StageRefused):
            await line.open(2)
            await line.open(2)
        await until_async(lambda: stage.queue == 0)
        assert line.alive


@in_loop
async def test_an_unreachable_stage_is_reported_in_time() -> None:
    line = StageLine("127.0.0.1:9", StageAccess(CONFIG.fingerprint, vocabulary=VOCABULARY))
    with pytest.raises(StageLost, match="blocktrain stage"):
        await line.ready(0.3)
    await line.aclose()
    with pytest.raises(ConfigError, match="host:port"):
        StageLine("nowhere", StageAccess(CONFIG.fingerprint, vocabulary=VOCABULARY))
    line = StageLine("no..name:9", StageAccess(CONFIG.fingerprint, vocabulary=VOCABULARY))
    with pytest.raises(StageLost, match="blocktrain stage"):
        await line.ready(0.3)
    await line.aclose()


# -- stages that know the key and say something else than was asked for


@contextlib.asynccontextmanager
async def liar(answer: Callable[[], Sequence[bytes]]) -> AsyncIterator[StageLine]:
    """A line to a stage that sends these frames when asked, and closes the connection."""
    facts = fan_of(MODEL_4, 1).facts
    claim = frames.Welcome(
        bytes(32),
        facts.kind,
        facts.blocks,
        facts.width,
        facts.context,
        facts.z_width,
        facts.fingerprint,
        facts.model,
    )

    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(frames.encode(frames.Challenge(bytes(32)))))
        decoder = frames.Decoder(lambda *_: 1 << 20)
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                for frame in decoder.feed(data):
                    if isinstance(frame.header, frames.Hello):
                        welcome = handshake.prove_welcome(KEY, bytes(32), frame.header.nonce, claim)
                        writer.write(b"".join(frames.encode(welcome)))
                    elif isinstance(frame.header, Run):
                        for piece in answer():
                            writer.write(piece)
                            await asyncio.sleep(0.01)
                        writer.close()

    server = await asyncio.start_server(lie, "127.0.0.1", 0)
    line = StageLine(
        f"127.0.0.1:{server.sockets[0].getsockname()[1]}",
        StageAccess(CONFIG.fingerprint, KEY, vocabulary=VOCABULARY),
    )
    try:
        await line.ready()
        yield line
    finally:
        await line.aclose()
        server.close()


def answer_frames(
    payload: bytes = bytes(2 * 16 * 4),
    blocks: tuple[int, ...] = (1,),
    width: int = 16,
    count: int = 2,
) -> bytes:
    """OPENED and RESULT."""
    result = frames.encode(frames.Result(0, 0, count, 0, 0), 1, 1, [payload])
    return b"".join([*frames.encode(frames.Opened(blocks, width), 1), *result])


ENDLESS = (
    frames.PREFIX.pack(frames.MAGIC, frames.PROTOCOL, frames.Kind.RESULT, 0, 1, 1, 6, 1 << 38)
    + b"\x95\0\0\2\0\0"
)
LIES: dict[str, Sequence[bytes]] = {
    "more blocks": [answer_frames(blocks=(1, 2))],
    "no blocks": [answer_frames(blocks=())],
    "another width": [answer_frames(width=256)],
    "room for what never comes": [
        b"".join(frames.encode(frames.Opened((1,), 1 << 31), 1)),
        ENDLESS,
    ],
    "fewer bytes": [answer_frames(bytes(64))],
    "fewer positions": [answer_frames(count=1)],
    "more than there can be": [answer_frames(bytes(1 << 16))],
    "not all of it": [answer_frames()[:-1]],
    "a question": [b"".join(frames.encode(frames.Ping(1)))],
}


@pytest.mark.parametrize("name", LIES)
@in_loop
async def test_an_answer_in_another_shape_is_not_taken(name: str) -> None:
    async with liar(lambda: LIES[name]) as line:
        await line.open(1)
        with pytest.raises(StageLost):
            await line.run(1, 0, 0, b"ab")
        assert line.failures == 1


@in_loop
async def test_mutated_answers_break_nothing() -> None:
    draw = random.Random(2)
    good = answer_frames() + b"".join(frames.encode(frames.Pong(1, 0)))
    for _ in range(ROUNDS):
        async with liar(lambda: [bytes(mutated(good, draw))]) as line:
            await line.open(1)
            with contextlib.suppress(StageLost, StageRefused):
                assert (await line.run(1, 0, 0, b"ab")).shape == (1, 2, 16)


@in_loop
async def test_a_tls_line_trusts_certificates_of_its_authority(tmp_path: Path) -> None:
    authority = trustme.CA()
    both = tmp_path / "both.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(both)
    stage = Stage(fan_of(MODEL_4, 1), StageGuard(KEY, load_tls(both, both)))
    await stage.start()
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    line = StageLine(
        stage.address, StageAccess(CONFIG.fingerprint, KEY, tls=trusting, vocabulary=VOCABULARY)
    )
    await line.ready()
    await line.open(1)
    with torch.no_grad():
        assert torch.equal(
            (await line.run(1, 0, 0, TEXT))[0], LocalStage(MODEL_4, 1)(ids_of(TEXT), 0)[0]
        )
    await line.aclose()
    stranger = StageLine(
        stage.address,
        StageAccess(
            CONFIG.fingerprint, KEY, tls=ssl.create_default_context(), vocabulary=VOCABULARY
        ),
    )
    with pytest.raises(StageRefused, match="--ca"):
        await stranger.ready()
    await stranger.aclose()
    plain = StageLine(stage.address, StageAccess(CONFIG.fingerprint, KEY, vocabulary=VOCABULARY))
    with pytest.raises((StageLost, StageRefused)):
        await plain.ready(0.5)
    await plain.aclose()
    await stage.aclose()


@in_loop
async def test_the_key_vouches_for_a_certificate_that_nobody_signed() -> None:
    """Who stands in between with a certificate of his own learns and changes nothing."""
    stage = Stage(fan_of(MODEL_4, 1), StageGuard(KEY, own_tls()))
    await stage.start()
    async with line_to(stage, tls=trust_key()) as line:
        await line.open(1)
        assert (await line.run(1, 0, 0, b"ab")).shape == (1, 2, 16)
    heard = bytearray()

    async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(4096):
                heard.extend(data)
                sink.write(data)
        sink.close()

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = stage.address.rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port), ssl=trust_key())
        await asyncio.gather(pass_on(far_reader, writer), pass_on(reader, far_writer))

    server = await asyncio.start_server(between, "127.0.0.1", 0, ssl=own_tls().context)
    name = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    access = StageAccess(CONFIG.fingerprint, KEY, tls=trust_key(), vocabulary=VOCABULARY)
    line = StageLine(name, access)
    with pytest.raises(StageRefused) as refused:
        await line.ready()
    assert refused.value.code == Why.WRONG_KEY and len(heard) < 600
    await line.aclose()
    server.close()
    await stage.aclose()


def test_it_works_on_the_other_event_loop_too() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def ask() -> None:
        async with serving(fan_of(MODEL_4, 1)) as stage, line_to(stage) as line:
            await line.open(1)
            features = await asyncio.gather(
                *(line.run(1, 0, i, TEXT[i : i + 4]) for i in range(0, 32, 4))
            )
            with torch.no_grad():
                assert torch.equal(
                    torch.cat(features, dim=1)[0], LocalStage(MODEL_4, 1)(ids_of(TEXT), 0)[0]
                )
            assert line.rtt_ms > 0
            await line.close(1)
            await until_async(lambda: stage.sessions == 0)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(ask())


# -- what a stage loads


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    run_folder(path, CONFIG)
    return path


def test_a_stage_loads_only_the_blocks_that_it_serves(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    run_folder(copy, CONFIG)
    (copy / "model" / "block-3.safetensors").unlink()
    holding = serve_blocks(RunModel(copy), (1, 2))
    assert isinstance(holding, FanBlocks) and holding.facts.blocks == (1, 2)
    assert holding.facts == serve_blocks(RunModel(folder), (1, 2)).facts
    with pytest.raises(RunError, match="missing"):
        serve_blocks(RunModel(copy), ())
    path = copy / "model" / "block-2.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\7")
    with pytest.raises(RunError, match="damaged"):
        serve_blocks(RunModel(copy), (2,))
    assert serve_blocks(RunModel(folder), ()).facts.blocks == (1, 2, 3)


def test_what_cannot_be_served_is_refused_with_the_fix(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fusion block"):
        serve_blocks(RunModel(folder), (3, 4))
    with pytest.raises(ConfigError, match="1 to 3"):
        serve_blocks(RunModel(folder), (7,))
    with pytest.raises(ConfigError, match="neighbours"):
        serve_blocks(RunModel(folder, reference=True), (1, 3))
    (folder / "reference").rename(folder / "elsewhere")
    with pytest.raises(ConfigError, match="--reference"):
        serve_blocks(RunModel(folder, reference=True), (1,))
    (folder / "elsewhere").rename(folder / "reference")
    for text in ("2-1", "0", "a", "1-", "-", "1,,x", "9999"):
        with pytest.raises(ConfigError, match="2-3"):
            parse_blocks(text)
    assert parse_blocks("1,3-4") == (1, 3, 4) and parse_blocks("") == ()


def test_the_reference_is_held_in_groups_of_layers(folder: Path) -> None:
    middle = serve_blocks(RunModel(folder, reference=True), (2, 3))
    assert isinstance(middle, ReferenceLayers)
    assert (
        len(middle.block.layers) == 2 and middle.state_width == 16 and middle.answer_width() == 16
    )
    assert serve_blocks(RunModel(folder, reference=True), ()).answer_width() == 256
    assert (
        middle.facts.kind == "reference"
        and middle.facts.model != serve_blocks(RunModel(folder), (1,)).facts.model
    )


def test_the_paper_is_held_as_steps(tmp_path: Path) -> None:
    model = run_folder(tmp_path / "run", tiny_config(compose="euler", objective="denoise"))
    assert isinstance(model, Model)
    holding = serve_blocks(RunModel(tmp_path / "run"), (2, 3))
    assert isinstance(holding, EulerSteps) and holding.last and holding.state_width == 8


def test_addresses_and_keys(tmp_path: Path) -> None:
    assert parse_address("[::1]:80") == ("::1", 80) and format_address("::1", 80) == "[::1]:80"
    assert format_address(*parse_address("host:1")) == "host:1"
    assert (
        is_loopback("127.0.0.9")
        and is_loopback("localhost")
        and not is_loopback("10.0.0.1")
        and not is_loopback("host")
    )
    key = tmp_path / "key"
    with pytest.raises(IdentityError, match="cannot read"):
        read_key(key)
    key.write_bytes(b"  0123456789abcdef \n")
    key.chmod(0o644)
    with pytest.raises(IdentityError, match="chmod 600"):
        read_key(key)
    key.chmod(0o600)
    assert read_key(key) == b"0123456789abcdef"
    key.write_bytes(b"short")
    with pytest.raises(IdentityError, match="at least 16"):
        read_key(key)


# -- the command


@pytest.fixture
def process(folder: Path, tmp_path: Path) -> Iterator[Started]:
    (tmp_path / "key").write_bytes(KEY)
    (tmp_path / "key").chmod(0o600)
    started = start(
        "stage",
        str(folder),
        "--blocks",
        "2-3",
        "--listen",
        "127.0.0.1:0",
        "--key",
        "key",
        "--json",
        cwd=tmp_path,
    )
    assert started.stdout is not None
    yield started, json.loads(started.stdout.readline())
    started.kill()
    started.wait()


def test_a_stage_in_a_process_of_its_own(process: Started) -> None:
    started, announcement = process
    assert (
        announcement["blocks"] == [2, 3]
        and announcement["kind"] == "blocks"
        and announcement["fingerprint"] == CONFIG.fingerprint
    )

    async def ask() -> None:
        async with line_to(announcement["address"], CONFIG.fingerprint, tls=trust_key()) as line:
            await line.open(1)
            features = await line.run(1, 0, 0, TEXT)
            with torch.no_grad():
                for place, number in enumerate((2, 3)):
                    assert torch.equal(
                        features[place], LocalStage(MODEL_4, number)(ids_of(TEXT), 0)[0]
                    )
            started.send_signal(signal.SIGSTOP)  # it will not answer
            waiting = line.submit(1, Run(1, 0, 32), TEXT)
            began = time.monotonic()
            started.kill()
            with pytest.raises(StageLost):
                await waiting
            assert (
                time.monotonic() - began < 0.3 + 20 and not line.alive
            )  # the rest for a busy machine

    asyncio.run(ask())


def test_ctrl_c_ends_it(process: Started) -> None:
    started, _ = process
    started.send_signal(signal.SIGINT)
    assert started.wait(timeout=60) == 0


def test_a_key_is_needed_beyond_this_machine(folder: Path, tmp_path: Path) -> None:
    result = blocktrain("stage", str(folder), "--listen", "0.0.0.0:0", cwd=tmp_path)
    assert (
        result.returncode == 2
        and "--key FILE" in result.stderr
        and "Traceback" not in result.stderr
    )
