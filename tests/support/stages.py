"""Stages in the test's loop, lines to them, a client that may send anything, a relay."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import ssl
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, ParamSpec

import torch
from torch import Tensor

from blocktrain.config import Config
from blocktrain.learning.compose import Model
from blocktrain.learning.model import Cache, IndependentBlock, build_reference
from blocktrain.learning.train import REFERENCE
from blocktrain.protocol import frames, handshake
from blocktrain.protocol.frames import Buffer, Decoder, Frame, Header
from blocktrain.runs.folder import RunFolder, create_run, publish, seal
from blocktrain.serving.blocks import FanBlocks, Rows, ServedBlocks
from blocktrain.serving.line.stage_line import StageAccess, StageLine
from blocktrain.serving.stage.stage import Stage, StageGuard, StageLimits
from conftest import random_model

VOCABULARY = 256  # of the models of tests
KEY = b"a key of some length"
MODEL = "0" * 64
P = ParamSpec("P")


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a coroutine test; it also fails if a task that nobody awaits fails."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(watched(test(*args, **kwargs)))

    return run


async def watched(work: Coroutine[Any, Any, None]) -> None:
    troubles: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: troubles.append(context))
    await asyncio.wait_for(work, 120)
    assert not troubles


def random_reference(config: Config) -> IndependentBlock:
    """The end-to-end model with random weights everywhere."""
    made = build_reference(config)
    generator = torch.Generator().manual_seed(6)
    for parameter in made.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=parameter.shape[0] ** -0.5, generator=generator)
    return made.requires_grad_(False).eval()


def run_folder(folder: Path, config: Config) -> Model:
    """A finished run with random weights, and its reference."""
    model = random_model(config)
    run: RunFolder = create_run(folder, config, "none")
    for number, block in enumerate(
        [*model.blocks, *([model.fusion] if model.fusion else [])], start=1
    ):
        publish(run, number, block)
    publish(run, REFERENCE, random_reference(config))
    seal(run, config, "none", None)
    return model


class Slow(FanBlocks):
    """Slow, blocked or broken on request; keeps what it computed in one batch."""

    seconds = 0.0
    broken = False

    def __init__(self, model: Model, *numbers: int) -> None:
        chosen = numbers or range(1, len(model.blocks) + 1)
        super().__init__(model.config, {n: model.blocks[n - 1] for n in chosen}, MODEL)
        self.together: list[int] = []
        self.starts: list[int] = []
        self.caches: list[weakref.ref[Cache]] = []
        self.gate = threading.Event()
        self.gate.set()

    def fresh(self, blocks: tuple[int, ...]) -> dict[int, Cache]:
        """Caches by block, with weak references to see when they are freed."""
        made: dict[int, Cache] = super().fresh(blocks)
        self.caches += map(weakref.ref, made.values())
        return made

    def work(self, parts: Sequence[Rows]) -> list[Tensor]:
        self.together.append(len(parts))
        self.starts += [part.start for part in parts]
        time.sleep(self.seconds)
        self.gate.wait(120)
        if self.broken:
            raise RuntimeError("out of order")
        return super().work(parts)


def fan_of(model: Model, *numbers: int) -> FanBlocks:
    return FanBlocks(
        model.config,
        {n: model.blocks[n - 1] for n in numbers or range(1, len(model.blocks) + 1)},
        MODEL,
    )


@contextlib.asynccontextmanager
async def serving(
    served: ServedBlocks, limits: StageLimits | None = None, key: bytes = KEY
) -> AsyncIterator[Stage]:
    stage = Stage(served, StageGuard(key), limits)
    await stage.start()
    try:
        yield stage
    finally:
        await stage.aclose()


@contextlib.asynccontextmanager
async def line_to(
    stage: Stage | str,
    fingerprint: str = "",
    key: bytes = KEY,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[StageLine]:
    address = stage
    if isinstance(stage, Stage):
        address, fingerprint = stage.address, fingerprint or stage.blocks.facts.fingerprint
    line = StageLine(str(address), StageAccess(fingerprint, key, tls=tls, vocabulary=VOCABULARY))
    try:
        await line.ready()
        yield line
    finally:
        await line.aclose()


@contextlib.asynccontextmanager
async def ring_of(every: Sequence[ServedBlocks]) -> AsyncIterator[list[StageLine]]:
    async with contextlib.AsyncExitStack() as stack:
        stages = [await stack.enter_async_context(serving(blocks)) for blocks in every]
        yield [await stack.enter_async_context(line_to(stage)) for stage in stages]


class Bare:
    """A connection by hand, for a client that breaks the rules."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.decoder = Decoder(lambda *_: 1 << 20)
        self.found: list[Frame] = []

    @classmethod
    async def dial(cls, address: str) -> Bare:
        host, _, port = address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    @classmethod
    async def greeted(cls, stage: Stage, role: frames.Role = "entry", id_bytes: int = 1) -> Bare:
        """Let in."""
        made = await cls.dial(stage.address)
        challenge = (await made.next()).header
        assert isinstance(challenge, frames.Challenge)
        made.say(
            handshake.make_hello(
                stage.guard.key,
                challenge.nonce,
                bytes(32),
                role,
                stage.blocks.facts.fingerprint,
                id_bytes,
            )
        )
        assert isinstance((await made.next()).header, frames.Welcome)
        return made

    def say(
        self, header: Header, session: int = 0, sequence: int = 0, payload: Sequence[Buffer] = ()
    ) -> None:
        self.raw(b"".join(frames.encode(header, session, sequence, payload)))

    def raw(self, data: bytes) -> None:
        self.writer.write(data)

    async def next(self) -> Frame:
        """The next frame; EOFError at the end."""
        while not self.found:
            data = await asyncio.wait_for(self.reader.read(65536), 120)
            if not data:
                raise EOFError
            self.found += self.decoder.feed(data)
        return self.found.pop(0)

    async def error(self) -> tuple[str, bool]:
        """The code of the next error, and whether the connection is still open."""
        while not isinstance(header := (await self.next()).header, frames.Error):
            pass
        try:
            self.say(frames.Ping(99))
            while not isinstance((await self.next()).header, frames.Pong):
                pass
            return header.code, True
        except (EOFError, ConnectionError):
            return header.code, False

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


class Wire:
    """A relay in front of a stage that can silently drop everything."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.dead = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Listen; returns the address."""
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.dead:
            return
        host, _, port = self.target.rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.get_running_loop().create_task(self._pass(source, sink))
            self._tasks.add(task)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if not self.dead:
                    sink.write(data)
            if not self.dead:
                sink.close()

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def text_of(length: int, seed: int = 1) -> bytes:
    return bytes(
        torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    )


def ids_of(text: bytes) -> Tensor:
    return torch.tensor([list(text)])


def mutated(data: bytes, draw: random.Random) -> bytearray:
    """With some bits, bytes or lengths changed."""
    found = bytearray(data)
    for _ in range(draw.randrange(1, 4)):
        place = draw.randrange(len(found))  # a frame is longer than what is taken from it
        match draw.randrange(4):
            case 0:
                found[place] ^= 1 << draw.randrange(8)
            case 1:
                found[place] = draw.randrange(256)
            case 2:
                del found[place : place + draw.randrange(1, 9)]
            case _:
                found[place:place] = draw.randbytes(draw.randrange(1, 9))
    return found
