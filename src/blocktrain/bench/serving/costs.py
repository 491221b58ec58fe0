"""The cost of each part of a sweep, measured here, and what the cost model predicts from them."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

import numpy as np
import torch

from blocktrain.bench.machine import BenchResult
from blocktrain.bench.serving.answers import Way
from blocktrain.config import Config
from blocktrain.learning.generate import Drafter, Picker, Sampler
from blocktrain.protocol import frames
from blocktrain.protocol.frames import Frame
from blocktrain.serving.entry.drafting import (
    MAX_DRAFT,
    DraftBlock,
    LinearCost,
    LinkCost,
    exact_seconds,
    fan_sweep,
    ring_sweep,
    sweep_seconds,
)
from blocktrain.serving.entry.failover import FanModel
from blocktrain.serving.entry.fan import Fusion
from blocktrain.serving.line.connection import Connection
from blocktrain.serving.line.stage_line import StageAccess, StageLine

FLOAT = 4  # bytes
REPEATS = 7  # of a timing whose median counts


class TimedLine(StageLine):
    """A line that keeps what stages say about the time they computed."""

    def __init__(self, name: str, access: StageAccess) -> None:
        super().__init__(name, access)
        self.compute_seconds: list[float] = []  # seconds

    def on_frames(self, connection: Connection, count: int, batch: list[Frame]) -> None:
        """(By the connection.)"""
        self.compute_seconds += [
            frame.header.microseconds / 1e6
            for frame in batch
            if isinstance(frame.header, frames.Result)
        ]
        super().on_frames(connection, count, batch)


@asynccontextmanager
async def timed_line(name: str, access: StageAccess) -> AsyncIterator[TimedLine]:
    """A line to a stage of this machine, ready to be asked."""
    line = TimedLine(name, access)
    await line.ready(30.0)
    try:
        yield line
    finally:
        await line.aclose()


async def hop_overhead(line: TimedLine, context: int, repeats: int) -> list[float]:
    """Seconds of a RUN of one byte, there and back, without the stage's computation."""
    session, times = secrets.randbits(63), []
    await line.open(session)
    await line.run(session, 0, 0, bytes(context // 2))
    for number in range(repeats):
        began = time.perf_counter()
        await line.run(session, number, context // 2 + number % (context // 2), b"e")
        times.append(time.perf_counter() - began - line.compute_seconds[-1])
    await line.close(session)
    return times


async def stage_cost(line: TimedLine, context: int) -> LinearCost:
    """Seconds that a stage computes, by the number of positions at the end of the window."""
    session = secrets.randbits(63)
    await line.open(session)
    await line.run(session, 0, 0, bytes(context))
    times: list[tuple[int, float]] = []
    for epoch, size in enumerate([size for size in _sizes(context) for _ in range(REPEATS)], 1):
        await line.run(session, epoch, context - size, bytes(size))
        times.append((size, line.compute_seconds[-1]))
    await line.close(session)
    return fit_line(times)


async def layers_cost(line: TimedLine, context: int, width: int) -> LinearCost:
    """The same of a stage that holds layers of the end-to-end model."""
    session = secrets.randbits(63)
    await line.open(session, topology="ring")
    first = line.facts is None or line.facts.blocks[0] == 1
    times: list[tuple[int, float]] = []
    for epoch, size in enumerate(
        [context, *(size for size in _sizes(context) for _ in range(REPEATS))]
    ):
        state = None if first else torch.zeros(size, width)
        await line.submit(session, frames.Run(epoch, context - size, size, 1), bytes(size), state)
        times.append((size, line.compute_seconds[-1]))
    await line.close(session)
    return fit_line(times[1:])


def entry_cost(model: FanModel, context: int) -> LinearCost:
    """Seconds from the features to the bytes: fusion and sampling."""
    fusion, picker = Fusion(model.readout), Picker(Sampler())
    window, present = (0,) * context, (True,) * model.blocks
    features = torch.randn(model.blocks, context, model.width)

    def sweep(size: int) -> None:
        logits = fusion.read(window, context - size, features[:, context - size :], present)
        list(picker.picks(logits, context))

    with torch.inference_mode():
        sweep(context)
        return fit_line(
            [(size, _seconds(sweep, size)) for size in _sizes(context) for _ in range(REPEATS)]
        )


def draft_cost(config: Config, model: FanModel) -> float:
    """Seconds that the entry's own block takes for a byte."""
    prompt, size = (0,) * (config.context // 4), config.context // 2
    times = []
    with torch.inference_mode():
        for _ in range(REPEATS):
            drafter = Drafter(DraftBlock(config, model.local).read, Sampler())
            drafter.draft(prompt, 0, 1)
            times.append(_seconds(drafter.draft, prompt, 0, 1 + size) / size)
    return statistics.median(times)


def _sizes(context: int) -> list[int]:
    return [1, context // 8, context // 4, context // 2]


def _seconds(work: Callable[..., object], *arguments: object) -> float:
    began = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - began


def fit_line(times: Sequence[tuple[int, float]]) -> LinearCost:
    """The line through the medians of every size, never below zero."""
    sizes = sorted({size for size, _ in times})
    medians = [statistics.median(seconds for s, seconds in times if s == size) for size in sizes]
    each, base = np.polyfit(sizes, medians, 1)
    return LinearCost(max(float(base), 0.0), max(float(each), 0.0))


@dataclass(frozen=True)
class Costs:
    """The inputs of the cost model."""

    stage: LinearCost  # of the stage with most blocks
    stage_bytes: float  # of a position, from that stage: every stage has a line of its own
    entry: LinearCost
    layers: LinearCost | None  # of a stage of the reference
    hosts: int  # of the ring
    width: int
    draft: float
    overhead: float
    acceptance: float

    def as_result(self) -> BenchResult:
        """For the result."""
        return {
            name: value if value is None or isinstance(value, float | int) else asdict(value)
            for name, value in vars(self).items()
        }

    def predict(
        self, way: Way, rtt_ms: float, mbit: float, prompt: int, output: int, sweeps: float
    ) -> float | None:
        """Bytes per second of an answer; `sweeps`: those of mode sweep until it was stable."""
        line = LinkCost(rtt_ms / 1000, mbit * 1e6, self.overhead)
        if way.topology == "fan":
            return output / self._fan(way.mode, line, prompt, output, sweeps)
        if self.layers is None:
            return None
        one, first = (self._reference(way.topology, line, positions) for positions in (1, prompt))
        return output / (
            line.rtt + first + (output - 1) * one
        )  # a session that is confirmed costs a round trip

    def _fan(self, mode: str, line: LinkCost, prompt: int, output: int, sweeps: float) -> float:
        def sweep(positions: int) -> float:
            return fan_sweep(positions, line, self.stage_bytes, self.stage, self.entry)

        if mode == "autoregressive":
            return sweep(prompt) + (output - 1) * sweep(1)
        if mode == "sweep":
            return output * sweep_seconds(self.acceptance, output, round(sweeps), self.draft, sweep)
        return output * min(
            exact_seconds(self.acceptance, n, self.draft, sweep(n + 1))
            for n in range(MAX_DRAFT + 1)
        )

    def _reference(self, topology: str, line: LinkCost, positions: int) -> float:
        """One traversal. A star returns to the entry between hosts; the first is the entry's."""
        if self.layers is None:
            return 0.0
        state = self.width * FLOAT
        if topology == "ring":
            return ring_sweep(positions, line, self.hosts, state, self.layers)
        there = line.transfer(positions * state)
        return (self.hosts - 1) * (line.rtt + line.overhead + 2 * there) + self.hosts * self.layers(
            positions
        )
