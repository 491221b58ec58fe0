"""The loops that write text with a model: autoregressive, draft and correct, and from pure noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from blocktrain.errors import ConfigError
from blocktrain.learning.compose import (
    Model,
    Scorer,
    counter_draws,
    euler_path,
    position_noise,
)

COLDEST = 1e-6  # temperatures below leave no other byte a chance, and would overflow


def window_start(known: int, context: int) -> int:
    """Where the window begins when `known` bytes are known: a pure function, so that every mode and host agrees.

    When the context is full the window restarts at its last half.
    """
    half = context // 2
    return 0 if known <= context else -(-(known - context) // half) * half


@dataclass(frozen=True)
class Sampler:
    """The byte at position t as a pure function of its logits, the seed and t (Gumbel noise from a counter)."""

    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0

    def pick(self, logits: Tensor, position: int) -> int:
        """Index of the chosen byte; temperature 0, or next to it, takes the likeliest."""
        return int(self.scores(logits, position).argmax())

    def scores(self, logits: Tensor, position: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """What `pick` takes the largest of: log p / T + g, for every byte."""
        logp = logits.double().log_softmax(-1).cpu().numpy()
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
def _gumbel(
    seed: int, position: int, vocabulary: int
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return counter_draws("sampling", seed, position).gumbel(size=vocabulary)


@torch.no_grad()
def autoregressive(
    scorer: Scorer, prompt: bytes, count: int, context: int, sampler: Sampler, device: torch.device
) -> Iterator[int]:
    """`count` bytes after the prompt, one traversal each."""
    text = list(prompt)
    begin = read = 0  # the scorer knows text[begin:read]
    for _ in range(count):
        if window_start(len(text), context) != begin:
            begin = read = window_start(len(text), context)
        logits = scorer(torch.tensor([text[read:]], device=device), read - begin)[0, -1]
        read = len(text)
        text.append(sampler.pick(logits, read))
        yield text[-1]


@torch.no_grad()
def sweep(
    scorer: Scorer,
    drafter: Scorer,
    prompt: bytes,
    count: int,
    context: int,
    sampler: Sampler,
    sweeps: int,
    device: torch.device,
) -> Iterator[int]:
    """`count` bytes in at most `sweeps` traversals per window: a draft of them all, of which a traversal keeps what is right and
    corrects the first byte that is not; behind that is drafted anew. Enough traversals end in the autoregressive answer."""
    text = list(prompt)
    end = len(text) + count
    while len(text) < end:
        begin = window_start(len(text), context)
        last = len(text)  # one past the last byte that this window may predict
        while last < end and window_start(last, context) == begin:
            last += 1
        for left in range(sweeps, -1, -1):
            known = len(text)
            draft = list(
                autoregressive(drafter, bytes(text), last - known, context, sampler, device)
            )
            if left:
                logits = scorer(torch.tensor([(text + draft)[begin : last - 1]], device=device), 0)[
                    0, known - 1 - begin :
                ]
                picks = [sampler.pick(row, known + i) for i, row in enumerate(logits)]
                right = next(
                    (
                        i
                        for i, (pick, guess) in enumerate(zip(picks, draft, strict=True))
                        if pick != guess
                    ),
                    len(draft),
                )
                draft = picks[: right + 1]
            text += draft
            yield from draft
            if len(text) == last:
                break


def sweep_from_noise(
    model: Model, prompt: bytes, count: int, sampler: Sampler, sweeps: int
) -> Iterator[int]:
    """`count` bytes, a tail's length per traversal, from pure noise: the paper's path, for models trained with a tail.

    Each further sweep of a chunk starts again from noise around the text of the one before.
    """
    if not model.config.tail:
        raise ConfigError(
            "this model has no tail: train one with --objective denoise --compose euler --tail 32"
        )
    return _from_noise(model, list(prompt), len(prompt) + count, sampler, sweeps)


@torch.no_grad()
def _from_noise(
    model: Model, text: list[int], end: int, sampler: Sampler, sweeps: int
) -> Iterator[int]:
    config = model.config
    while len(text) < end:
        size = min(config.tail, end - len(text))
        known = text[-(config.context - size + 1) :]
        tokens = torch.tensor([known + [0] * (size - 1)], device=model.device)
        first = len(text) - len(known)
        chunk: list[int] = []
        for number in range(sweeps):
            noise = position_noise(sampler.seed + number, first, tokens.shape[1], config.z_width)[
                None
            ].to(model.device)
            if chunk:
                noise[:, -size:] += (
                    model.table[torch.tensor(chunk, device=model.device)] / config.sigma_max
                )
            logits = euler_path(model, tokens, noise, tail=size)[-1][0, -size:]
            chunk = [sampler.pick(logits[i], len(text) + i) for i in range(size)]
        text += chunk
        yield from chunk
