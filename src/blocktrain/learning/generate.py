"""The loops that write text, without I/O: autoregressive, exact, sweep, and from noise.

A loop is a generator. It yields a step (`Draft`, `Score`, `Denoise`, `Commit`) and is sent the
result, so it does not know where the model is. `write` drives a loop with a model in this process;
`serving.entry.answer` drives the same loop with stages on other hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from blocktrain.config import Config
from blocktrain.errors import ConfigError
from blocktrain.learning.compose import (
    Model,
    Scorer,
    counter_draws,
    euler_path,
    path_start,
    position_noise,
)
from blocktrain.learning.model import target_table
from blocktrain.learning.tokenizer import tokenizer_of

COLDEST = 1e-6  # lower temperatures give no other token a chance, and would overflow
NEAR_TIE = 1e-4
NOT_EXACT = (
    "mode exact needs a model composed by fuse or pool, whose blocks read only tokens; "
    "use mode autoregressive"
)
LOCAL_DRAFT = 8  # tokens that mode exact drafts at a time when no network has to be hidden

Tokens = tuple[int, ...]
Mode = Literal["autoregressive", "sweep", "exact"]
DraftSource = Literal["first-block", "none"]
Scores = np.ndarray[tuple[int], np.dtype[np.float64]]


# -- sampling


@dataclass(frozen=True)
class Sampler:
    """The token at position t as a pure function of its logits, the seed and t.

    It takes the largest of log p / T + g, where g is Gumbel noise drawn by a counter. So the text
    depends on the seed, and not on how it was drafted or split into sweeps.
    """

    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0

    def pick(self, logits: Tensor, position: int) -> int:
        return int(self.scores(logits, position).argmax())

    def scores(self, logits: Tensor, position: int) -> Scores:
        """log p / T + g of every token; at temperature 0 log p alone."""
        logp: Scores = logits.cpu().double().log_softmax(-1).numpy()
        if self.temperature < COLDEST:
            return logp
        logp = logp / self.temperature
        if self.top_p < 1:
            order = np.argsort(-logp, kind="stable")
            p = np.exp(logp[order] - logp.max())
            before = (np.cumsum(p) - p) / p.sum()
            logp[order[1:][before[1:] >= self.top_p]] = -np.inf  # the likeliest always stays
        return logp + _gumbel(self.seed, position, len(logp))


@lru_cache(4096)  # a draft and its verification need the same noise within moments
def _gumbel(seed: int, position: int, size: int) -> Scores:
    return counter_draws("sampling", seed, position).gumbel(size=size)


@dataclass(frozen=True)
class TokenScore:
    """A token, its log-probability where it stands, and the likeliest tokens there, best first.

    Nothing comes before the first token of a prompt, so that one has no probability.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def score_tokens(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenScore]:
    """The scores of some tokens from the logits (T, V) that they were or could be picked from.

    They are the model's own: temperature and top_p do not change them.
    """
    logp = logits.cpu().double().log_softmax(-1)
    chosen = logp.gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    best = logp.topk(min(top, logp.shape[-1]), dim=-1)
    return [
        TokenScore(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, ids, values in zip(
            tokens, chosen, best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]


class Picker:
    """The tokens that a sampler picks, and how many of them were nearly a tie.

    With `top` it also keeps the score of each, and of so many other tokens.
    """

    def __init__(self, sampler: Sampler, top: int | None = None) -> None:
        self.sampler = sampler
        self.scores: dict[int, TokenScore] = {}  # by position
        self._top = top
        self._ties: set[int] = set()  # positions

    def picks(self, logits: Tensor, first: int) -> Iterator[int]:
        """The tokens of positions `first` and on from their logits (T, V), computed on demand."""
        for i, row in enumerate(logits):
            scores = self.sampler.scores(row, first + i)
            second, best = np.partition(scores, -2)[-2:]
            (self._ties.add if best - second < NEAR_TIE else self._ties.discard)(first + i)
            token = int(scores.argmax())
            if self._top is not None:
                self.scores[first + i] = score_tokens(row[None], [token], self._top)[0]
            yield token

    @property
    def near_ties(self) -> int:
        """Positions whose two best tokens were closer than NEAR_TIE when last picked."""
        return len(self._ties)


# -- the text


def window_start(known: int, context: int) -> int:
    """Where the window begins when `known` tokens are known.

    When the context is full the window restarts at its last half. This is a pure function, so that
    every mode and every host agrees.
    """
    half = context // 2
    return 0 if known <= context else -(-(known - context) // half) * half


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens are equal."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    return low


class Text:
    """A prompt and what is written behind it, up to `most` tokens or to the token `end`."""

    def __init__(
        self, prompt: Sequence[int], most: int, context: int, end: int | None = None
    ) -> None:
        self.ids: Tokens = tuple(prompt)
        self.context = context
        self.prompt = len(self.ids)
        self.ended = False
        self._end, self._end_token = len(self.ids) + most, end

    @property
    def begin(self) -> int:
        """Where the window begins in which the next token is written."""
        return window_start(len(self.ids), self.context)

    @property
    def window(self) -> Tokens:
        """What the model reads to write the next token."""
        return self.ids[self.begin :]

    @property
    def cut(self) -> int:
        """Tokens of the prompt that no window holds."""
        return window_start(self.prompt, self.context)

    @property
    def remaining(self) -> int:
        """Tokens that may still be written."""
        return 0 if self.ended else self._end - len(self.ids)

    @property
    def room(self) -> int:
        """Tokens that may still be written before the window has to move."""
        return min(self.remaining, self.begin + self.context - len(self.ids) + 1)

    def append(self, tokens: Sequence[int]) -> Tokens:
        """Write what there is room for, and return it. The end of the text is not part of it."""
        tokens = tuple(tokens)[: self.remaining]
        if self._end_token in tokens:
            tokens, self.ended = tokens[: tokens.index(self._end_token)], True
        self.ids += tokens
        return tokens


# -- what a loop asks for


@dataclass(frozen=True)
class Draft:
    """Send back up to `most` tokens that may follow the text; exactly `most` if `whole`."""

    most: int
    whole: bool = True


@dataclass(frozen=True)
class Score:
    """Send back the logits (T, V) of the window from position `start` on: one sweep.

    The last `drafted` tokens are a draft. While the sweep is under way, drafting may go on.
    """

    window: Tokens
    start: int
    drafted: int = 0


@dataclass(frozen=True)
class Denoise:
    """Send back the logits (tail, V) of the last positions of a path that starts at z (T, Z)."""

    ids: Tokens
    z: Tensor
    tail: int


@dataclass(frozen=True)
class Commit:
    """These tokens are final. Of `drafted` tokens that a sweep checked, `accepted` were right."""

    tokens: Tokens
    drafted: int | None = None  # None: no draft was checked
    accepted: int = 0


def prompt_steps(ids: Tokens, context: int, most: int) -> Iterator[Score]:
    """The sweeps that score all tokens of a text but the first, `most` positions at a time.

    Each token is read in the window in which it would have been written.
    """
    known = 1
    while known < len(ids):
        begin = window_start(known, context)
        last = min(begin + context, known + most - 1, len(ids) - 1)
        yield Score(ids[begin:last], known - 1 - begin)
        known = last + 1


Step = Draft | Score | Denoise | Commit
Loop = Generator[Step, Any, None]


# -- the loops


def text_loop(
    text: Text,
    picker: Picker,
    config: Config,
    *,
    mode: Mode = "autoregressive",
    sweeps: int = 1,
    draft: DraftSource = "first-block",
) -> Loop:
    """The loop of a mode; `sweeps` and `draft` are for mode sweep."""
    if mode == "autoregressive":
        return autoregressive(text, picker)
    if mode == "exact":
        return exact(text, picker)
    if draft == "first-block":
        return sweep(text, picker, sweeps)
    if not config.tail:
        raise ConfigError(
            "this model has no tail: train one with --objective denoise --compose euler --tail 32"
        )
    return from_noise(text, picker, config, sweeps)


def autoregressive(text: Text, picker: Picker) -> Loop:
    """One sweep for every token."""
    while text.remaining:
        window = text.window
        logits: Tensor = yield Score(window, len(window) - 1)
        yield Commit(text.append(tuple(picker.picks(logits, len(text.ids)))))


def exact(text: Text, picker: Picker) -> Loop:
    """Draft, verify in one sweep, keep what is right and the first correction."""
    while text.remaining:
        window = text.window
        draft: Tokens = yield Draft(text.room - 1, whole=False)
        logits: Tensor = yield Score(window + draft, len(window) - 1, len(draft))
        yield _verify(text, draft, picker.picks(logits, len(text.ids)))


def sweep(text: Text, picker: Picker, sweeps: int) -> Loop:
    """Draft all that the window has room for, and correct it in at most `sweeps` sweeps.

    Each sweep keeps what is right and the first correction; the rest is drafted again. With enough
    sweeps this is the autoregressive text.
    """
    while text.remaining:
        begin = text.begin
        for _ in range(sweeps):
            window = text.window
            draft: Tokens = yield Draft(text.room)
            logits: Tensor = yield Score(window + draft[:-1], len(window) - 1)
            yield _verify(text, draft, picker.picks(logits, len(text.ids)))
            if not text.remaining or text.begin != begin:
                break
        else:
            rest: Tokens = yield Draft(text.room)
            yield Commit(text.append(rest))


def from_noise(text: Text, picker: Picker, config: Config, sweeps: int) -> Loop:
    """The paper's path: a tail's length at a time, for models trained with a tail.

    Each further sweep of a chunk starts again around the chunk of the one before.
    """
    table, seed = target_table(config), picker.sampler.seed
    while text.remaining:
        size = min(config.tail, text.remaining)
        known = text.ids[-(config.context - size + 1) :]
        ids = known + (0,) * (size - 1)
        first = len(text.ids) - len(known)
        chunk: Tokens = ()
        for number in range(sweeps):
            noise = position_noise(seed + number, first, len(ids), config.z_width)
            z = path_start(config, noise)
            if chunk:
                z[-size:] += table[torch.tensor(chunk)]
            logits: Tensor = yield Denoise(ids, z, size)
            chunk = tuple(picker.picks(logits, len(text.ids)))
        yield Commit(text.append(chunk))


def accept(draft: Sequence[int], picks: Iterable[int]) -> Tokens:
    """The model's own picks, up to and with the first that differs from the draft.

    Pick i is computed from the text before position i, drafted tokens included, so it counts as
    long as those were right. The first pick depends on no draft. A draft that is right to its end
    is followed by one more pick.
    """
    committed: list[int] = []
    for i, pick in enumerate(picks):
        committed.append(pick)
        if i >= len(draft) or pick != draft[i]:
            break
    return tuple(committed)


def _verify(text: Text, draft: Tokens, picks: Iterable[int]) -> Commit:
    tokens = text.append(accept(draft, picks))
    right = sum(a == b for a, b in zip(tokens, draft, strict=False))
    return Commit(tokens, len(draft), right)


# -- drafts, and the model in this process


class Drafter:
    """What one block would write next. A guess is kept as long as the text agrees with it."""

    def __init__(self, read: Callable[[Tokens, int], Tensor], sampler: Sampler) -> None:
        """`read(ids, start)` forgets what it knew from `start` on, reads the ids, and returns the
        logits (V,) after the last of them."""
        self._read_ids, self._sampler = read, sampler
        self._ids: Tokens = ()  # the text and the guesses behind it
        self._begin = self._end = 0  # the cache knows ids[begin:end]

    def ready(self, text: Tokens) -> int:
        """How many guesses there are that still follow this text."""
        return len(self._ids) - len(text) if self._ids[: len(text)] == text else 0

    def knows(self, begin: int) -> bool:
        """Whether the block has read this window."""
        return self._begin == begin and self._end > begin

    def draft(self, text: Tokens, begin: int, count: int) -> Tokens:
        """`count` tokens that may follow the text, whose window starts at `begin`."""
        if self._ids[: len(text)] != text:
            self._end = min(self._end, common_prefix(self._ids, text))
            self._ids = text
        if begin != self._begin:
            self._begin = self._end = begin
        while len(self._ids) < len(text) + count:
            # If all was read already, the last token is read again: its logits are needed.
            start = min(self._end, len(self._ids) - 1)
            logits = self._read_ids(self._ids[start:], start - begin)
            self._end = len(self._ids)
            self._ids += (self._sampler.pick(logits, self._end),)
        return self._ids[len(text) : len(text) + count]


class LocalModel:
    """A model in this process, as a loop asks for it. It reads again only what changed."""

    def __init__(
        self,
        text: Text,
        sampler: Sampler,
        scorer: Scorer,
        drafter: Scorer | None = None,
        model: Model | None = None,
    ) -> None:
        self._text, self._scorer, self._model = text, scorer, model
        self._device = torch.device("cpu") if model is None else model.device
        self._known: Tokens = ()
        self._drafter = Drafter(self._reader(drafter or scorer), sampler)

    def perform(self, step: Step) -> Tokens | Tensor | None:
        if isinstance(step, Draft):
            count = step.most if step.whole else min(step.most, LOCAL_DRAFT)
            return self._drafter.draft(self._text.ids, self._text.begin, count)
        if isinstance(step, Score):
            return self._score(step.window, step.start)
        if isinstance(step, Denoise) and self._model is not None:
            z = step.z[None].to(self._device)
            path = euler_path(self._model, self._tensor(step.ids), z, tail=step.tail)
            return path[-1][0, -step.tail :]
        return None

    def _score(self, window: Tokens, start: int) -> Tensor:
        first = min(start, common_prefix(self._known, window))
        self._known = window
        return self._scorer(self._tensor(window[first:]), first)[0, start - first :]

    def _reader(self, scorer: Scorer) -> Callable[[Tokens, int], Tensor]:
        return lambda ids, start: scorer(self._tensor(ids), start)[0, -1]

    def _tensor(self, ids: Tokens) -> Tensor:
        return torch.tensor([ids], device=self._device)


def write(
    model: Model,
    prompt: Sequence[int],
    count: int,
    sampler: Sampler,
    *,
    mode: Mode = "autoregressive",
    sweeps: int = 1,
    draft: DraftSource = "first-block",
) -> Iterator[int]:
    """`count` tokens after the prompt, or fewer if the text ends, by a model in this process."""
    if mode == "exact" and model.composition.traits.topology != "fan":
        raise ConfigError(NOT_EXACT)
    end = tokenizer_of(model.config).end_of_text
    text = Text(prompt, count, model.config.context, end)
    loop = text_loop(text, Picker(sampler), model.config, mode=mode, sweeps=sweeps, draft=draft)
    drafter = model.drafter() if mode != "autoregressive" and draft == "first-block" else None
    scorer = model.scorer(seed=sampler.seed)
    return _drive(loop, LocalModel(text, sampler, scorer, drafter, model))


def write_with(
    scorer: Scorer,
    prompt: Sequence[int],
    count: int,
    context: int,
    sampler: Sampler,
) -> Iterator[int]:
    """`count` tokens after the prompt, one call of this scorer each."""
    text = Text(prompt, count, context)
    return _drive(autoregressive(text, Picker(sampler)), LocalModel(text, sampler, scorer))


def _drive(loop: Loop, local: LocalModel) -> Iterator[int]:
    result: Tokens | Tensor | None = None
    while True:
        with torch.no_grad():
            try:
                step = loop.send(result)
            except StopIteration:
                return
            result = local.perform(step)
        if isinstance(step, Commit):
            yield from step.tokens
