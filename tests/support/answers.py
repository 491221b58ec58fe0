"""What a run folder writes when it is served: an entry here, and stages over TCP."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

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
