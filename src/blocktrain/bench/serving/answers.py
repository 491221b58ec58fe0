"""Timed answers: one after another or many at once, in every mode and topology."""

from __future__ import annotations

import asyncio
import math
import secrets
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from blocktrain.bench.machine import BenchResult
from blocktrain.errors import BlockTrainError, ConfigError
from blocktrain.learning.generate import Mode, Picker, Sampler, Text, Tokens, common_prefix
from blocktrain.learning.tokenizer import Ids
from blocktrain.protocol import frames
from blocktrain.serving.entry.answer import Request, Stats
from blocktrain.serving.entry.entry import Entry
from blocktrain.serving.entry.failover import AnswerFailed
from blocktrain.serving.line.stage_line import StageLine, StageLost

PATIENCE = 3  # times that an answer is begun again when its ring broke


@dataclass(frozen=True)
class Prompt:
    """A piece of real text, what really follows it, and the seed that it is continued with."""

    text: bytes
    real: bytes
    seed: int


def take_prompts(valid: Ids, count: int, size: int, output: int, seed: int = 0) -> list[Prompt]:
    """Pieces from all over a text whose tokens are bytes: figures are per byte of text."""
    if valid.dtype.itemsize > 1:
        raise ConfigError("this bench compares bytes: give it a run of tokenizer=bytes")
    starts = [i * (len(valid) - size - output) // count for i in range(count)]
    return [
        Prompt(bytes(valid[s : s + size]), bytes(valid[s + size : s + size + output]), seed + i)
        for i, s in enumerate(starts)
    ]


@dataclass(frozen=True)
class Way:
    """How text is written: by which model, in which shape, in which mode."""

    model: str
    topology: Literal["fan", "ring", "star"]
    mode: Mode
    sweeps: int = 1

    @property
    def name(self) -> str:
        """For the plot and for people."""
        mode = f"sweep k={self.sweeps}" if self.mode == "sweep" else self.mode
        return f"{mode} ({self.model}, {self.topology})"

    def request(self, prompt: Prompt, output: int) -> Request:
        """What is asked for; never degraded: a figure is that of the whole model."""
        return Request(
            prompt.text, output, self.mode, self.sweeps, seed=prompt.seed, allow_degraded=False
        )


@dataclass
class TimedAnswer:
    """An answer, and what it took."""

    text: bytes
    seconds: float  # from the request to the last byte
    first_byte_ms: float
    sweeps: int
    stats: Stats = field(default_factory=lambda: Stats(""))


Writer = Callable[[Request], Awaitable[TimedAnswer]]


async def write(entry: Entry, request: Request) -> TimedAnswer:
    """One answer of an entry."""
    for attempt in range(PATIENCE):
        try:
            return await _write_once(entry, request)
        except AnswerFailed:
            if entry.fan or attempt == PATIENCE - 1:
                raise
            await asyncio.sleep(1.0)
    raise AnswerFailed("no attempt was made")  # pragma: no cover


async def _write_once(entry: Entry, request: Request) -> TimedAnswer:
    began, text, first, stats = time.perf_counter(), b"", 0.0, Stats(request.mode)
    async for piece in entry.generate(request):
        text, stats = text + piece.text, piece.stats
        first = first or (time.perf_counter() - began if text else 0.0)
    return TimedAnswer(text, time.perf_counter() - began, 1000 * first, stats.sweeps, stats)


class Star:
    """The end-to-end model as a star: the entry asks one stage after another."""

    def __init__(self, lines: Sequence[StageLine], context: int) -> None:
        self._lines, self._context = lines, context

    async def write(self, request: Request) -> TimedAnswer:
        """One autoregressive answer."""
        began, first = time.perf_counter(), 0.0
        text = Text(request.prompt, request.max_tokens, self._context)
        picker = Picker(Sampler(request.seed, request.temperature))
        session = secrets.randbits(63)
        known: Tokens = ()
        try:
            await asyncio.gather(*(line.open(session, topology="ring") for line in self._lines))
            while text.remaining:
                window = text.window
                start = min(len(window) - 1, common_prefix(known, window))
                logits = await self._ask(session, window[start:], start)
                known = window
                text.append(tuple(picker.picks(logits, len(text.ids))))
                first = first or time.perf_counter() - began
        finally:
            with suppress(StageLost):
                await asyncio.gather(*(line.close(session) for line in self._lines))
        answer = bytes(text.ids[text.prompt :])
        return TimedAnswer(answer, time.perf_counter() - began, 1000 * first, len(answer))

    async def _ask(self, session: int, ids: Tokens, start: int) -> Tensor:
        """Logits (1, V) after the last of the ids."""
        state: Tensor | None = None
        for line in self._lines:
            wanted = 1 if line is self._lines[-1] else 0
            state = (
                await line.submit(session, frames.Run(0, start, len(ids), wanted), ids, state)
            )[0]
        if state is None:
            raise BlockTrainError("a star has at least one stage")
        return state


@dataclass
class Measurement:
    """All answers of a row."""

    way: Way
    answers: list[TimedAnswer]
    wire_bytes: int  # between hosts, by all of them

    def row(self, rtt_ms: float) -> BenchResult:
        """The figures, without what is predicted and how good the text is."""
        count = len(self.answers)
        total = sum(len(answer.text) for answer in self.answers)
        sweeps = sum(answer.sweeps for answer in self.answers)
        return {
            "rtt_ms": rtt_ms,
            "model": self.way.model,
            "topology": self.way.topology,
            "mode": self.way.mode,
            "sweeps": self.way.sweeps if self.way.mode == "sweep" else round(sweeps / count, 2),
            "bytes_per_s": total / sum(answer.seconds for answer in self.answers),
            "bytes_per_sweep": total / sweeps,
            "first_byte_ms": statistics.median(answer.first_byte_ms for answer in self.answers),
            "wire_bytes": self.wire_bytes // count,
            "prompts": count,
            "traversals": sweeps / count,
            "failovers": sum(answer.stats.failovers for answer in self.answers),
        }

    def histogram(self) -> dict[str, int]:
        """Number of sweeps by the number of drafted bytes that they accepted."""
        counts = Counter(
            accepted for answer in self.answers for accepted in answer.stats.accepted_per_sweep
        )
        return {str(accepted): counts[accepted] for accepted in sorted(counts)}


async def users_at_once(
    entry: Entry, way: Way, prompts: Sequence[Prompt], output: int
) -> BenchResult:
    """One user per prompt, all at once: bytes per second of all, and seconds of each."""
    began = time.perf_counter()
    answers = await asyncio.gather(
        *(write(entry, way.request(prompt, output)) for prompt in prompts)
    )
    seconds = time.perf_counter() - began
    return {
        "users": len(prompts),
        "mode": way.mode,
        "bytes_per_s": sum(len(answer.text) for answer in answers) / seconds,
        "seconds_p50": quantile([answer.seconds for answer in answers], 0.5),
        "seconds_p99": quantile([answer.seconds for answer in answers], 0.99),
        "first_byte_ms_p50": quantile([answer.first_byte_ms for answer in answers], 0.5),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value with at least this share of all values at or below it."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


async def measure_way(
    way: Way, requests: Sequence[Request], one: Writer, wire: Callable[[], int]
) -> Measurement:
    """Answer one request after another."""
    before = await asyncio.to_thread(wire)
    answers = [await one(request) for request in requests]
    return Measurement(way, answers, await asyncio.to_thread(wire) - before)
