"""One answer: drives a text loop with an entry's drafts and sweeps, and says what was written."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from torch import Tensor

from blocktrain.config import Config
from blocktrain.errors import ConfigError
from blocktrain.learning.generate import (
    Commit,
    Denoise,
    Draft,
    Drafter,
    DraftSource,
    Mode,
    Picker,
    Score,
    Step,
    Text,
    Tokens,
    TokenScore,
    prompt_steps,
    score_tokens,
    text_loop,
)
from blocktrain.serving.blocks import ComputeThread
from blocktrain.serving.entry.drafting import Pace
from blocktrain.serving.entry.failover import AnswerFailed, retrieve_exception
from blocktrain.serving.entry.fan import FanSession
from blocktrain.serving.entry.ring import RingSession

SCORED_VALUES = 1 << 22  # logits that one sweep over a prompt returns
SLICE = 8  # tokens that are drafted before another answer may compute
LOOK_SECONDS = 0.005  # between two checks whether the thread is idle

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Request:
    """What to write, and how. An answer that is not complete after `deadline` seconds fails.

    With `logprobs` every token comes with its score and those of so many others, and with
    `score_prompt` the tokens of the prompt do too.
    """

    prompt: bytes | Tokens
    max_tokens: int = 256
    mode: Mode = "exact"
    sweeps: int = 1
    draft: DraftSource = "first-block"
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[bytes, ...] = ()
    logprobs: int | None = None
    score_prompt: bool = False
    allow_degraded: bool = True
    deadline: float = 600.0


@dataclass
class Stats:
    """How an answer was written, up to now."""

    mode: str
    sweeps: int = 0
    drafted: int = 0
    accepted: int = 0  # of the drafted tokens
    accepted_per_sweep: list[int] = field(default_factory=list)
    wire_bytes: int = 0
    degraded: tuple[int, ...] = ()  # blocks that some of it was written without
    failovers: int = 0
    suspects: tuple[str, ...] = ()  # stages that answered wrongly, as far as it is known
    near_ties: int = 0
    prompt_tokens: int = 0
    prompt_bytes_cut: int = 0
    tokens: int = 0  # whose text was shown
    first_byte_ms: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Piece:
    """Some more text. All pieces of an answer share `stats`; the last one has `finish`.

    `scores` are those of the tokens that are shown whole by now and were not before.
    """

    text: bytes
    finish: FinishReason | None
    stats: Stats
    scores: tuple[TokenScore, ...] = ()


@dataclass
class SharedCompute:
    """What all answers of an entry share to compute with."""

    thread: ComputeThread
    pace: Pace = field(default_factory=Pace)
    answers: int = 0  # under way


class Output:
    """The text that may be shown: it ends before a stop word, and holds no part of one."""

    def __init__(self, decode: Callable[[int], bytes], stop: Sequence[bytes] = ()) -> None:
        self._decode = decode
        self._stop = [word for word in stop if word]
        self._text = bytearray()
        self._ends: list[int] = []  # of the text of each token
        self._shown = 0
        self.stopped = False

    def take(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            for byte in self._decode(token):
                self._text.append(byte)
                if word := next((w for w in self._stop if self._text.endswith(w)), None):
                    del self._text[-len(word) :]
                    self.stopped = True
                    return
            self._ends.append(len(self._text))

    def show(self, *, final: bool) -> bytes:
        """What was not shown before, without an end that may yet become a stop word."""
        until = len(self._text)
        if self._stop and not final:
            longest = min(max(map(len, self._stop)) - 1, until - self._shown)
            ends = (
                size
                for size in range(longest, 0, -1)
                if any(word.startswith(self._text[-size:]) for word in self._stop)
            )
            until -= next(ends, 0)
        text = bytes(self._text[self._shown : until])
        self._shown = max(until, self._shown)
        return text

    @property
    def tokens(self) -> int:
        """How many tokens were shown whole."""
        return sum(end <= self._shown for end in self._ends)


@dataclass
class TextAnswer:
    """An answer under way."""

    request: Request
    config: Config
    text: Text
    output: Output
    picker: Picker
    session: FanSession | RingSession
    drafter: Drafter | None
    shared: SharedCompute
    stats: Stats
    deadline: float  # on the loop's clock
    began: float = field(default_factory=time.perf_counter)
    window: int = -1  # where the window begins that the stages know
    _scores: list[TokenScore] = field(default_factory=list)  # of the prompt, until they are shown
    _scored: int = 0  # tokens of the text whose scores were shown

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The text as it comes. Closing this frees the sessions everywhere."""
        request = self.request
        loop = text_loop(
            self.text,
            self.picker,
            self.config,
            mode=request.mode,
            sweeps=request.sweeps,
            draft=request.draft,
        )
        self.shared.answers += 1
        try:
            if request.score_prompt and request.logprobs is not None:
                await self._score_prompt(request.logprobs)
            result: Tokens | Tensor | None = None
            text = b""
            while self._finish() is None:
                step = loop.send(result)
                result = await self._perform(step)
                text = b""
                if isinstance(step, Commit):
                    text = self.output.show(final=self._finish() is not None)
                if text and self._finish() is None:
                    yield self._piece(text)
            yield self._piece(text)
        finally:
            self.shared.answers -= 1
            await self.session.aclose()

    def _finish(self) -> FinishReason | None:
        if self.output.stopped or self.text.ended:
            return "stop"
        return None if self.text.remaining else "length"

    def _piece(self, text: bytes) -> Piece:
        stats, tally = self.stats, self.session.tally
        stats.seconds = time.perf_counter() - self.began
        if text and not stats.first_byte_ms:
            stats.first_byte_ms = 1000 * stats.seconds
        stats.wire_bytes, stats.failovers = tally.wire_bytes, tally.failovers
        stats.degraded = tuple(sorted(tally.missing))
        stats.suspects = tuple(sorted(tally.suspects))
        stats.near_ties, stats.tokens = self.picker.near_ties, self.output.tokens
        return Piece(text, self._finish(), stats, self._new_scores(stats.tokens))

    def _new_scores(self, shown: int) -> tuple[TokenScore, ...]:
        if self.request.logprobs is None:
            return ()
        places = range(self.text.prompt + self._scored, self.text.prompt + shown)
        scores = (*self._scores, *(self.picker.scores[place] for place in places))
        self._scores, self._scored = [], shown
        return scores

    async def _score_prompt(self, top: int) -> None:
        """Score the prompt: a sweep for each window of it, and no sampling."""
        ids, thread = self.text.ids, self.shared.thread
        scores, most = [TokenScore(ids[0])], max(1, SCORED_VALUES // self.config.vocabulary)
        for step in prompt_steps(ids, self.config.context, most):
            async with self._deadline():
                logits = await self.session.score(step.window, step.start)
            tokens = ids[len(scores) : len(scores) + len(logits)]
            scores += await thread.run(partial(score_tokens, logits, tokens, top))
            self.stats.sweeps += 1
        self._scores = scores

    # -- the steps of a loop

    async def _perform(self, step: Step) -> Tokens | Tensor | None:
        if isinstance(step, Draft):
            pace = self.shared.pace
            count = step.most if step.whole else pace.best_draft(step.most)
            if count:
                await self._prefill()
            return await self._draft(count)
        if isinstance(step, Score):
            return await (self._overlap(step) if step.drafted else self._score(step))
        if isinstance(step, Denoise):
            return await self._denoise(step)
        self._commit(step)
        return None

    def _commit(self, step: Commit) -> None:
        self.output.take(step.tokens)
        if step.drafted is None:
            return
        stats, pace = self.stats, self.shared.pace
        stats.drafted, stats.accepted = stats.drafted + step.drafted, stats.accepted + step.accepted
        stats.accepted_per_sweep.append(step.accepted)
        if self.request.mode != "exact":
            return
        if step.drafted:
            pace.record_verification(step.accepted, step.drafted)
        else:
            pace.record_skip()

    async def _score(self, step: Score) -> Tensor:
        """One sweep."""
        began, known, tally = time.perf_counter(), self.window, self.session.tally
        begin = self.text.begin
        async with self._deadline():
            logits = await self.session.score(step.window, step.start)
        self.stats.sweeps += 1
        self.window = begin
        if known == begin and not tally.had_failure:
            self.shared.pace.sweep.add(tally.positions, time.perf_counter() - began)
        return logits

    async def _overlap(self, step: Score) -> Tensor:
        """Sweep, and go on drafting meanwhile."""
        sweep = asyncio.create_task(self._score(step))
        sweep.add_done_callback(retrieve_exception)
        try:
            await self._draft_on(step.drafted, sweep)
            return await sweep
        finally:
            sweep.cancel()

    async def _denoise(self, step: Denoise) -> Tensor:
        if not isinstance(self.session, RingSession):
            raise ConfigError("only a model composed by euler can write from noise")
        async with self._deadline():
            logits = await self.session.denoise(step.ids, step.z, step.tail, tail=step.tail)
        self.stats.sweeps += 1
        return logits

    async def _prefill(self) -> None:
        """Let the stages read a window that they do not know yet while the draft is made."""
        window = self.text.window
        if self.window != self.text.begin and len(window) > SLICE:
            await self.session.prefill(window[:-1])

    async def _draft(self, count: int) -> Tokens:
        """`count` tokens that may follow the text."""
        drafter, text, begin = self.drafter, self.text.ids, self.text.begin
        if drafter is None or not count:
            return ()
        shared, began, ready = self.shared, time.perf_counter(), drafter.ready(text)
        known = drafter.knows(begin)
        draft: Tokens = ()
        while len(draft) < count:
            target = min(count, max(len(draft), ready) + SLICE) if shared.answers > 1 else count
            draft = await shared.thread.run(partial(drafter.draft, text, begin, target))
        if known:  # else most of the time went into reading the window
            shared.pace.record_draft(count - ready, time.perf_counter() - began)
        return draft

    async def _draft_on(self, drafted: int, sweep: asyncio.Task[Tensor]) -> None:
        """Draft on as if the draft were right, as long as no other answer has to compute."""
        await asyncio.sleep(0)  # the sweep is sent first
        pace, room = self.shared.pace, self.text.room
        most = min(room, drafted + 1 + pace.best_draft(room))
        if not pace.worth_extending(drafted):
            return
        count = drafted
        while count < most and not sweep.done():
            if self.shared.thread.idle:
                count = min(count + SLICE // 2, most)
                await self._draft(count)
            else:
                await asyncio.wait([sweep], timeout=LOOK_SECONDS)

    @contextlib.asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        """Fail the answer at its deadline."""
        try:
            async with asyncio.timeout_at(self.deadline):
                yield
        except TimeoutError:
            late = (
                f"the answer was not complete after {self.request.deadline:g} s; "
                "ask for less, raise --deadline, or see which host is slow"
            )
            raise AnswerFailed(self.session.tally.lacks or late) from None
