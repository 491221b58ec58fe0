"""The entry: what users talk to. It drafts with a block of its own, asks the stages, fuses what they say, and streams the text."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from blocktrain.errors import ConfigError
from blocktrain.learning.compose import composition_of
from blocktrain.learning.generate import Sampler
from blocktrain.learning.model import Block, FanReadout, IndependentBlock
from blocktrain.learning.train import REFERENCE
from blocktrain.protocol.frames import Wire
from blocktrain.runs.folder import (
    ModelManifest,
    file_sha256,
    load_blocks,
    load_independent,
    load_independents,
    read_manifest,
)
from blocktrain.serving.entry.cost import Pace
from blocktrain.serving.entry.decode import Answer, Picker, accept
from blocktrain.serving.entry.drafting import Drafter, Lean
from blocktrain.serving.entry.fan import FanSession, Home, Terms
from blocktrain.serving.entry.readers import AnswerFailed, seen
from blocktrain.serving.entry.ring import RingHome, RingSession, from_noise
from blocktrain.serving.entry.route import Find, Route
from blocktrain.serving.entry.thread import ComputeThread
from blocktrain.serving.holding import FanBlocks
from blocktrain.serving.line.lines import Access

CONNECT_SECONDS = 8.0
SLICE = 8  # bytes that are drafted before somebody else's answer may compute
LOOK_SECONDS = 0.005  # between two looks whether there is time to draft on
CPU = torch.device("cpu")

Mode = Literal["autoregressive", "sweep", "exact"]


@dataclass(frozen=True)
class Request:
    """What is to be written, and how. An answer that is not complete after `deadline` seconds fails."""

    prompt: bytes
    max_tokens: int = 256
    mode: Mode = "exact"
    sweeps: int = 1
    draft: Literal["first-block", "none"] = "first-block"
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[bytes, ...] = ()
    allow_degraded: bool = True
    deadline: float = 600.0


@dataclass
class Stats:
    """How an answer came about, up to now."""

    mode: str
    sweeps: int = 0
    drafted: int = 0
    accepted: int = 0  # of the drafted bytes
    accepted_per_sweep: list[int] = field(default_factory=list)
    wire_bytes: int = 0
    degraded: tuple[int, ...] = ()  # blocks that some of it was written without
    failovers: int = 0
    near_ties: int = 0
    prompt_bytes_cut: int = 0
    first_byte_ms: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Piece:
    """Some more text. `stats` is the same object in all pieces of an answer; the last piece says why it is the last."""

    text: bytes
    finish: Literal["stop", "length"] | None
    stats: Stats


@dataclass
class _Job:
    """An answer under way."""

    request: Request
    answer: Answer
    picker: Picker
    session: FanSession | RingSession
    drafter: Drafter | None
    stats: Stats
    deadline: float  # on the loop's clock
    began: float = field(default_factory=time.perf_counter)
    window: int = -1  # where the window begins that the stages know

    def piece(self, shown: bytes) -> Piece:
        """The text with what is known now."""
        stats, tally = self.stats, self.session.tally
        stats.seconds = time.perf_counter() - self.began
        if shown and not stats.first_byte_ms:
            stats.first_byte_ms = 1000 * stats.seconds
        stats.wire_bytes, stats.failovers = tally.wire_bytes, tally.failovers
        stats.degraded = tuple(sorted(tally.missing))
        stats.near_ties = self.picker.near_ties
        return Piece(shown, self.answer.finish, stats)


class Entry:
    """A run, served: `start` it, `generate` from it, `aclose` it. Blocks that no stage of the route holds it serves itself."""

    def __init__(
        self,
        folder: Path,
        route: Sequence[str] | Find = (),
        *,
        key: bytes = b"",
        tls: ssl.SSLContext | None = None,
        wire: Wire = "fp32",
        reference: bool = False,
        threads: int = 1,
    ) -> None:
        self.manifest: ModelManifest = read_manifest(folder)
        self.config, self.reference, self.wire = self.manifest.config, reference, wire
        self.fan = self.config.traits.topology == "fan" and not reference
        if reference and not self.manifest.run.weights(REFERENCE).is_file():
            raise ConfigError(
                f"{folder} has no end-to-end reference; train one with: blocktrain train --reference"
            )
        weights = (
            file_sha256(self.manifest.run.weights(REFERENCE))
            if reference
            else self.manifest.model_hash
        )
        self.route = Route(route, Access(self.config.fingerprint, key, weights, tls=tls))
        self.pace = Pace()
        self._thread = ComputeThread(threads)
        self._local: FanBlocks | None = None  # with the block to draft with
        self._home: Home | None = None
        self._ring: RingHome | None = None
        self._jobs = 0

    # -- life

    async def start(self, seconds: float = CONNECT_SECONDS) -> None:
        """Connect to the stages, and load what is served here; stages that are not there after so long may come later."""
        await self.route.start(seconds)
        if self.fan:
            held = self.route.held()
            numbers = [n for n in range(1, self.config.independent + 1) if n == 1 or n not in held]
            local, readout = await asyncio.to_thread(self._load_fan, numbers)
            facts = (self.config.independent, self.config.width)
            self._local, self._home = (
                local,
                Home(self.route, self._thread, local, frozenset({1}), readout, *facts),
            )
        else:
            blocks, self._local = await asyncio.to_thread(self._load_ring)
            self._ring = RingHome(self.route, self._thread, self.config, self.reference, blocks)

    def _load_fan(self, numbers: list[int]) -> tuple[FanBlocks, FanReadout]:
        config, manifest = self.config, self.manifest
        loaded: dict[int, Block] = {}

        def load(wanted: Iterable[int]) -> dict[int, Block]:
            loaded.update(load_blocks(manifest, [n for n in wanted if n not in loaded], CPU))
            return {number: loaded[number] for number in wanted}

        weights = None if manifest.pool_weights is None else torch.tensor(manifest.pool_weights)
        readout = composition_of(config).readout(config, load, weights)
        own = {n: b for n, b in load(numbers).items() if isinstance(b, IndependentBlock)}
        return FanBlocks(config, own, manifest.model_hash), readout

    def _load_ring(self) -> tuple[list[IndependentBlock], FanBlocks | None]:
        """All blocks where there is no route, and the one to draft with where that makes sense."""
        config, manifest = self.config, self.manifest
        if self.reference:
            own = (
                []
                if self.route.lines
                else [
                    load_independent(manifest.run, config, REFERENCE, CPU)
                    .requires_grad_(False)
                    .eval()
                ]
            )
            return own, None
        numbers = range(1, 2 if self.route.lines else config.blocks + 1)
        blocks = load_independents(manifest, numbers, CPU)
        drafting = (
            None if config.skip == "edm" else FanBlocks(config, {1: blocks[1]}, manifest.model_hash)
        )
        own = (
            []
            if self.route.lines
            else [block.requires_grad_(False).eval() for block in blocks.values()]
        )
        return own, drafting

    async def aclose(self) -> None:
        """Hang up and stop computing."""
        if self._home is not None:
            await asyncio.gather(*self._home.closing, return_exceptions=True)
        await self.route.aclose()
        self._thread.close()

    def modes(self) -> list[str]:
        """How this model can be written with."""
        if self.reference or (self.config.skip == "edm" and not self.fan and not self.config.tail):
            return ["autoregressive"]
        return ["exact", "sweep", "autoregressive"] if self.fan else ["sweep", "autoregressive"]

    def draft(self) -> Literal["first-block", "none"]:
        """What mode sweep starts from unless it is told: a block of skip=edm has no text of its own."""
        return "none" if self.config.skip == "edm" and not self.fan else "first-block"

    def status(self) -> dict[str, Any]:
        """The stages as they are now, and what is served."""
        config = self.config
        local = sorted(self._local.blocks) if self._local is not None and self.fan else []
        facts = {
            "blocks": config.blocks,
            "independent": config.blocks if self.reference else config.independent,
            "width": config.width,
            "context": config.context,
            "compose": "reference" if self.reference else config.compose,
            "fingerprint": config.fingerprint,
            "local_blocks": local,
        }
        pace = {
            "acceptance": round(self.pace.acceptance, 4),
            "draft_ms": round(1000 * self.pace.draft, 3),
        }
        return {
            "hosts": self.route.status(),
            "sessions": self._jobs,
            "model": facts,
            "modes": self.modes(),
            "pace": pace,
        }

    # -- answers

    def check(self, request: Request) -> None:
        """Refuse what this model cannot do."""
        config = self.config
        if request.mode == "exact" and not self.fan:
            raise ConfigError(
                "mode exact needs a model composed by fuse or pool, whose blocks read only bytes; use mode autoregressive"
            )
        if request.mode != "sweep":
            return
        if self.reference:
            raise ConfigError(
                "the end-to-end reference has no block to draft with; use mode autoregressive"
            )
        if request.draft == "none" and (self.fan or not config.tail):
            raise ConfigError(
                "a sweep from noise needs a model trained with --objective denoise --compose euler --tail N; use draft first-block"
            )
        if request.draft == "first-block" and self._local is None:
            raise ConfigError(
                "a block of skip=edm predicts nothing without a noised target; use mode autoregressive, or draft none"
            )
        if request.sweeps < 1:
            raise ConfigError("a sweep is made at least once; ask for sweeps of 1 or more")

    async def generate(self, request: Request) -> AsyncGenerator[Piece, None]:
        """The text after the prompt, as it comes. Closing it frees the sessions everywhere."""
        self.check(request)
        job = self._begin(request)
        self._jobs += 1
        try:
            writing = self._writing(job)
            async with contextlib.aclosing(writing):
                async for found in writing:
                    shown = job.answer.commit(found)
                    if shown and job.answer.finish is None:
                        yield job.piece(shown)
                    elif job.answer.finish is not None:
                        break
                else:
                    shown = b""
            yield job.piece(shown)
        finally:
            self._jobs -= 1
            await job.session.aclose()

    def _begin(self, request: Request) -> _Job:
        answer = Answer(request.prompt, request.max_tokens, self.config.context, request.stop)
        sampler = Sampler(request.seed, request.temperature, request.top_p)
        deadline = asyncio.get_running_loop().time() + request.deadline
        session: FanSession | RingSession
        if self._home is not None:
            session = FanSession(self._home, Terms(self.wire, request.allow_degraded, deadline))
        elif self._ring is not None:
            session = RingSession(self._ring, self.wire, request.seed)
        else:
            raise ConfigError("the entry was not started")
        self.pace.sweep.guess = (
            2e-3 + max((line.rtt_ms for line in self.route.lines if line.alive), default=0.0) / 1000
        )
        drafting = request.mode != "autoregressive" and self._local is not None
        drafter = (
            Drafter(Lean(self.config, self._local), sampler)
            if drafting and self._local is not None
            else None
        )
        stats = Stats(request.mode, prompt_bytes_cut=answer.cut)
        return _Job(request, answer, Picker(sampler), session, drafter, stats, deadline)

    def _writing(self, job: _Job) -> AsyncGenerator[Sequence[int], None]:
        """What is to be committed, bit by bit."""
        if job.request.mode == "autoregressive":
            return self._autoregressive(job)
        if job.request.mode == "exact":
            return self._exact(job)
        return self._from_noise(job) if job.request.draft == "none" else self._sweeps(job)

    async def _autoregressive(self, job: _Job) -> AsyncGenerator[Sequence[int], None]:
        """One sweep for every byte."""
        answer = job.answer
        while answer.finish is None:
            logits = await self._score(job, answer.window, len(answer.window) - 1)
            yield list(job.picker.picks(logits, len(answer.text)))

    async def _exact(self, job: _Job) -> AsyncGenerator[Sequence[int], None]:
        """Draft, verify in one sweep, keep what is right and the first correction."""
        answer, stats = job.answer, job.stats
        while answer.finish is None:
            count = self.pace.best_draft(answer.room - 1)
            window = answer.window
            if count:
                await self._ahead(job)
            draft = await self._draft(job, count)
            sweep = asyncio.create_task(self._score(job, window + draft, len(window) - 1))
            sweep.add_done_callback(seen)
            try:
                await self._draft_on(job, count, sweep)
                logits = await sweep
            finally:
                sweep.cancel()
            found = accept(draft, job.picker.picks(logits, len(answer.text)))
            right = len(found) - 1
            stats.drafted, stats.accepted = stats.drafted + count, stats.accepted + right
            stats.accepted_per_sweep.append(right)
            if count:
                self.pace.verified(right, count)
            else:
                self.pace.undrafted()
            yield found

    async def _sweeps(self, job: _Job) -> AsyncGenerator[Sequence[int], None]:
        """Draft all that the window has room for; in each of `sweeps` sweeps keep what is right and the first correction, and draft the
        rest anew."""
        answer, stats = job.answer, job.stats
        while answer.finish is None:
            await self._ahead(job)
            begin = answer.begin
            for _ in range(job.request.sweeps):
                window = answer.window
                draft = await self._draft(job, answer.room)
                logits = await self._score(job, window + draft[:-1], len(window) - 1)
                found = accept(draft, job.picker.picks(logits, len(answer.text)))
                right = sum(a == b for a, b in zip(found, draft, strict=False))
                stats.drafted, stats.accepted = stats.drafted + len(draft), stats.accepted + right
                stats.accepted_per_sweep.append(right)
                yield found
                if answer.finish is not None or answer.begin != begin:
                    break
            else:
                yield await self._draft(job, answer.room)

    async def _from_noise(self, job: _Job) -> AsyncGenerator[Sequence[int], None]:
        """The paper's path."""
        if not isinstance(job.session, RingSession):
            raise ConfigError("only a model composed by euler is written with from noise")
        chunks = from_noise(job.session, self.config, job.answer, job.picker, job.request.sweeps)
        while job.answer.finish is None:
            async with _in_time(job):
                chunk, sweeps = await anext(chunks)
            job.stats.sweeps += sweeps
            yield chunk

    # -- steps

    async def _score(self, job: _Job, window: bytes, start: int) -> Tensor:
        """One sweep."""
        began, known = time.perf_counter(), job.window == job.answer.begin
        async with _in_time(job):
            logits = await job.session.score(window, start)
        job.stats.sweeps += 1
        job.window = job.answer.begin
        if known and not job.session.tally.troubled:
            self.pace.sweep.add(job.session.tally.positions, time.perf_counter() - began)
        return logits

    async def _ahead(self, job: _Job) -> None:
        """A window that the stages do not know yet can be read by them while the draft is made."""
        if job.window != job.answer.begin and len(job.answer.window) > SLICE:
            await job.session.ahead(job.answer.window[:-1])

    async def _draft(self, job: _Job, count: int) -> bytes:
        """`count` bytes that may follow the text."""
        drafter, text, begin = job.drafter, bytes(job.answer.text), job.answer.begin
        if drafter is None or not count:
            return b""
        began, there = time.perf_counter(), drafter.ready(text)
        known = drafter.knows(begin)
        draft = b""
        while len(draft) < count:
            target = min(count, max(len(draft), there) + SLICE) if self._jobs > 1 else count
            draft = await self._thread.run(partial(drafter.draft, text, begin, target))
        if known:  # else most of the time went into reading the window
            self.pace.drafted(count - there, time.perf_counter() - began)
        return draft

    async def _draft_on(self, job: _Job, drafted: int, sweep: asyncio.Task[Tensor]) -> None:
        """While a sweep is under way: go on as if the draft were right, as long as nobody else has something to compute."""
        await asyncio.sleep(0)  # the sweep is sent first
        most = min(job.answer.room, drafted + 1 + self.pace.best_draft(job.answer.room))
        if not drafted or not self.pace.worth_going_on(drafted):
            return
        there = drafted
        while there < most and not sweep.done():
            if self._thread.idle:
                there = min(there + SLICE // 2, most)
                await self._draft(job, there)
            else:
                await asyncio.wait([sweep], timeout=LOOK_SECONDS)


@contextlib.asynccontextmanager
async def _in_time(job: _Job) -> AsyncIterator[None]:
    """Fail an answer at its deadline, whatever it waits for then."""
    try:
        async with asyncio.timeout_at(job.deadline):
            yield
    except TimeoutError:
        late = f"the answer was not complete after {job.request.deadline:g} s; ask for less, raise --deadline, or see which host is slow"
        raise AnswerFailed(job.session.tally.lacks or late) from None
