"""What a run folder writes when it is served: an entry here, and stages over TCP."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from collections.abc import AsyncIterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from blocktrain.bench.network.shaper import Link, shape_link
from blocktrain.runs.served import RunModel
from blocktrain.serving.blocks import serve_blocks
from blocktrain.serving.entry.answer import Request
from blocktrain.serving.entry.entry import Entry
from blocktrain.serving.stage.stage import Stage


def ask(folder: Path, request: Request, *held: tuple[int, ...]) -> bytes:
    """The answer of an entry whose stages hold these blocks."""

    async def answer() -> bytes:
        async with contextlib.AsyncExitStack() as stack:
            addresses = []
            for blocks in held:
                stage = Stage(serve_blocks(RunModel(folder), blocks))
                stack.push_async_callback(stage.aclose)
                await stage.start()
                addresses.append(stage.address)
            entry = Entry(RunModel(folder), addresses)
            stack.push_async_callback(entry.aclose)
            await entry.start()
            return b"".join([piece.text async for piece in entry.generate(request)])

    return asyncio.run(answer())


class StageProcess(NamedTuple):
    process: BaseProcess
    address: str


@contextlib.asynccontextmanager
async def stage_process(folder: Path, blocks: Sequence[int]) -> AsyncIterator[StageProcess]:
    """A stage in a process of its own, which may be killed."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_serve_stage, args=(folder, blocks, theirs), daemon=True
    )
    process.start()
    theirs.close()  # a process that fails to start then ends the wait below
    try:
        yield StageProcess(process, await asyncio.to_thread(ours.recv))
    finally:
        process.kill()
        process.join()


def _serve_stage(folder: Path, blocks: Sequence[int], pipe: Connection) -> None:
    async def run() -> None:
        stage = Stage(serve_blocks(RunModel(folder), blocks))
        pipe.send(await stage.start())
        await asyncio.Event().wait()

    asyncio.run(run())


@contextlib.asynccontextmanager
async def near_and_far(folder: Path, near: str, far: Stage) -> AsyncIterator[Entry]:
    """An entry with two holders, of which the one that is named is nearer."""
    with shape_link(
        "127.0.0.1", int(far.address.rpartition(":")[2]), Link(rtt_ms=400), apart=False
    ) as link:
        entry = Entry(RunModel(folder), [near, f"127.0.0.1:{link.port}"])
        await entry.start(60)
        try:
            yield entry
        finally:
            await entry.aclose()
