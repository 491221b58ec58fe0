"""`bench serving --shape`: the logical shape of a large model as a ring.

One sweep for the whole output is compared with one for every byte. Stages, frames, lines, caches
and every multiplication are those of a model of that size. Only the weights are not: all layers
share the weights of one layer.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from blocktrain.bench.machine import BenchResult, header
from blocktrain.bench.network.shaper import LOCALHOST, Link, ShapedLink, shape_link
from blocktrain.bench.serving.shape import Shape, buffer, model_hash, parse_shape, shared_model
from blocktrain.bench.serving.stages import START_SECONDS, STOP_SECONDS, count_bytes, names
from blocktrain.config import Config
from blocktrain.errors import RunError
from blocktrain.learning.generate import Picker, Sampler
from blocktrain.learning.model import Cache
from blocktrain.learning.threads import use_threads
from blocktrain.protocol import frames
from blocktrain.runs.folder import write_json
from blocktrain.serving.blocks import ReferenceLayers, through_layers
from blocktrain.serving.entry.drafting import LinearCost, LinkCost, ring_sweep
from blocktrain.serving.line.address import parse_address
from blocktrain.serving.line.stage_line import Ring, StageAccess, StageLine
from blocktrain.serving.stage.stage import Stage, StageLimits
from blocktrain.terminal import JobBars, console

PROMPT = b"\n"
WIRE: frames.Wire = "fp16"
HOUR = 3600.0
LONG_SECONDS = 1800.0
PROVES = (
    "that stages, frames, lines, caches and schedule carry a model of this width and depth, "
    "and what its arithmetic takes on this machine; "
    "same_choices counts the bytes that one traversal for all and one for each agree on"
)
NOT_PROVED = (
    "anything about quality, about memory (all layers share one layer's weights), "
    "or about a graphics card"
)


@dataclass(frozen=True)
class LargeOptions:
    """What `bench serving --shape` was asked for."""

    folder: Path
    shape: str
    tokens: int
    hosts: int
    link: Link
    threads: int  # of a stage: in a ring one computes at a time


def large(options: LargeOptions, command: str) -> BenchResult:
    """Both modes, timed; leaves shape.json in the folder."""
    shape = parse_shape(options.shape, options.hosts)
    config = shape.config(options.tokens)
    options.folder.mkdir(parents=True, exist_ok=True)
    summary = (
        f"{shape.parameters / 1e9:.4g}B parameters: "
        f"{shape.blocks} blocks of {shape.layers} layers, {shape.width} wide"
    )
    console.print(
        f"{summary}; one layer of {shape.buffer_bytes / 2**30:.2f} GiB is really there",
        highlight=False,
    )
    with buffer(options.folder, shape) as path:
        estimate = _estimate(shape, config, path, options)
        total = sum(estimate.values())
        console.print(
            f"this will take about {total / 60:.0f} minutes"
            + (", which is long" if total > LONG_SECONDS else ""),
            highlight=False,
        )
        with _ring(options, shape, config, path) as ring, JobBars(options.shape, 2) as bars:
            rows, same = asyncio.run(_measure(options, config, ring, bars.update))
    for row in rows:
        row["predicted_seconds"] = estimate[row["mode"]]
    one, sweep = rows
    result = {
        **header(command, 0),
        "shape": options.shape,
        "parameters": shape.parameters,
        "width": shape.width,
        "blocks": shape.blocks,
        "layers_per_block": shape.layers,
        "hosts": options.hosts,
        "topology": "ring",
        "rtt_ms": options.link.rtt_ms,
        "mbit": options.link.mbit,
        "arithmetic": "fp32",
        "wire": WIRE,
        "threads": options.threads,
        "tokens": options.tokens,
        "rows": rows,
        "gain": one["seconds"] / sweep["seconds"],
        "same_choices": same,
        "buffer_gib": shape.buffer_bytes / 2**30,
        "memory_gib": max(row["memory_gib"] for row in rows),
        "logical_gib": shape.parameters * 4 / 2**30,
        "proves": PROVES,
        "does_not_prove": NOT_PROVED,
    }
    write_json(options.folder / "shape.json", result)
    console.print(
        f"proves {PROVES}\ndoes not prove {NOT_PROVED}\nwrote {options.folder / 'shape.json'}",
        highlight=False,
    )
    return result


def _estimate(shape: Shape, config: Config, path: Path, options: LargeOptions) -> dict[str, float]:
    """Seconds of both modes, from the time of one layer."""
    before = torch.get_num_threads()
    use_threads(options.threads)
    try:
        one, all_ = (_layer_seconds(shape, config, path, count) for count in (1, options.tokens))
    finally:
        use_threads(before)
    line = LinkCost(options.link.rtt_ms / 1000, options.link.mbit * 1e6)

    def sweep(positions: int, seconds: float) -> float:
        return ring_sweep(
            positions,
            line,
            shape.blocks,
            shape.width * frames.ITEM[WIRE],
            LinearCost(shape.layers * seconds),
        )

    return {"autoregressive": options.tokens * sweep(1, one), "sweep": sweep(options.tokens, all_)}


def _layer_seconds(shape: Shape, config: Config, path: Path, positions: int) -> float:
    one = Shape(shape.width, 1, 1)
    block = shared_model(one, config, path)
    times = []
    with torch.inference_mode():
        for _ in range(3):  # the first maps the pages
            cache = Cache(block, 1)
            x = torch.randn(1, positions, shape.width)
            began = time.perf_counter()
            through_layers(block, x, [positions], [cache])
            times.append(time.perf_counter() - began)
    return min(times)


# -- the hosts


@dataclass(frozen=True)
class _Host:
    process: BaseProcess
    control: Connection
    address: str


@dataclass(frozen=True)
class _Ring:
    """Stages in their order as the entry calls them, the lines between hosts, and the processes."""

    names: list[str]
    lines: list[ShapedLink]
    pids: list[int]
    access: StageAccess


@contextmanager
def _ring(options: LargeOptions, shape: Shape, config: Config, path: Path) -> Iterator[_Ring]:
    """A stage on every host, the first on the entry's own."""
    with ExitStack() as stack:
        hosts = [
            stack.enter_context(_host(shape, config, path, number, options.threads))
            for number in range(1, shape.blocks + 1)
        ]
        lines = [
            stack.enter_context(shape_link(LOCALHOST, parse_address(host.address)[1], options.link))
            for host in hosts[1:]
        ]
        pids = [host.process.pid for host in hosts if host.process.pid is not None]
        yield _Ring(
            [hosts[0].address, *names(lines)],
            lines,
            pids,
            StageAccess(
                config.fingerprint,
                b"",
                model_hash(shape),
                vocabulary=config.vocabulary,
            ),
        )


@contextmanager
def _host(shape: Shape, config: Config, path: Path, number: int, threads: int) -> Iterator[_Host]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=hold,
        args=(theirs, shape, config, path, number, threads),
        name=f"stage-{number}",
        daemon=True,
    )
    process.start()
    theirs.close()
    try:
        try:
            address = ours.recv() if ours.poll(START_SECONDS) else ""
        except EOFError:
            address = ""
        if not address:
            raise RunError("a stage of the shape did not start; see what it said above")
        yield _Host(process, ours, address)
    finally:
        ours.close()
        process.join(STOP_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()


def hold(
    control: Connection, shape: Shape, config: Config, path: Path, number: int, threads: int
) -> None:
    """A host's process: the same stage as `blocktrain stage`, until its parent is gone."""
    use_threads(threads)
    layers = ReferenceLayers(config, shared_model(shape, config, path), [number], model_hash(shape))

    async def serve() -> None:
        stage = Stage(layers, limits=StageLimits(idle_seconds=HOUR), threads=threads)
        stop = asyncio.Event()
        control.send(await stage.start())
        asyncio.get_running_loop().add_reader(control.fileno(), stop.set)
        await stop.wait()
        await stage.aclose()

    with suppress(KeyboardInterrupt):
        asyncio.run(serve())


def memory_gib(pids: Sequence[int]) -> float:
    """Memory of processes together, in GiB, what they share counted once."""
    total = 0
    for pid in pids:
        rollup = Path(f"/proc/{pid}/smaps_rollup")
        if rollup.exists():
            line = next(line for line in rollup.read_text().splitlines() if line.startswith("Pss:"))
            total += int(line.split()[1]) * 1024
    return total / 2**30


# -- the two modes


async def _measure(
    options: LargeOptions, config: Config, ring: _Ring, report: Callable[[str, BenchResult], None]
) -> tuple[list[BenchResult], int]:
    """Autoregressive first; the sweep then chooses all bytes of that text again, at once."""
    lines = [StageLine(name, ring.access) for name in ring.names]
    try:
        for line in lines:
            await line.ready(START_SECONDS)
        writer = _Writer(Ring(lines), options, ring)
        text, one = await writer.autoregressive(
            lambda share: report("autoregressive", {"share": share})
        )
        choices, all_ = await writer.sweep(text, lambda share: report("sweep", {"share": share}))
    finally:
        for line in lines:
            await line.aclose()
    return [one, all_], sum(a == b for a, b in zip(text, choices, strict=True))


class _Writer:
    """Writes over the ring, and measures time, bytes and memory."""

    def __init__(self, ring: Ring, options: LargeOptions, hosts: _Ring) -> None:
        self._ring, self._tokens, self._hosts = ring, options.tokens, hosts
        self._picker = Picker(Sampler())

    async def autoregressive(self, progress: Callable[[float], None]) -> tuple[bytes, BenchResult]:
        """A traversal for every byte."""
        text = bytearray(PROMPT)
        progress(0.0)

        async def write(session: int) -> int:
            for number in range(self._tokens):
                text.extend(await self._choose(session, number, bytes(text[-1:]), 1))
                progress((number + 1) / self._tokens)
            return self._tokens

        row = await self._time_mode("autoregressive", write)
        return bytes(text[len(PROMPT) :]), row

    async def sweep(
        self, draft: bytes, progress: Callable[[float], None]
    ) -> tuple[bytes, BenchResult]:
        """One traversal for all."""
        choices = bytearray()
        progress(0.0)

        async def write(session: int) -> int:
            choices.extend(await self._choose(session, 0, PROMPT + draft[:-1], self._tokens))
            return 1

        row = await self._time_mode("sweep", write)
        progress(1.0)
        return bytes(choices), row

    async def _choose(self, session: int, start: int, ids: bytes, wanted: int) -> bytes:
        logits = await self._ring.run(session, frames.Run(0, start, len(ids), wanted), ids)
        return bytes(self._picker.picks(logits[0], start + 1 + len(ids) - wanted))

    async def _time_mode(self, mode: str, write: Callable[[int], Awaitable[int]]) -> BenchResult:
        session = secrets.randbits(63)
        await self._ring.open(session, WIRE)
        before, began = await asyncio.to_thread(count_bytes, self._hosts.lines), time.perf_counter()
        traversals = await write(session)
        seconds = time.perf_counter() - began
        memory = await asyncio.to_thread(memory_gib, [*self._hosts.pids, os.getpid()])
        await self._ring.close(session)
        return {
            "mode": mode,
            "tokens": self._tokens,
            "traversals": traversals,
            "seconds": seconds,
            "tokens_per_s": self._tokens / seconds,
            "wire_bytes": await asyncio.to_thread(count_bytes, self._hosts.lines) - before,
            "memory_gib": memory,
        }
