"""Cross entropy of a composed model and of its parts, over a whole split without overlap."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from blocktrain.learning.compose import MARGINAL_DRAWS, Model, Predictors
from blocktrain.learning.model import IndependentBlock
from blocktrain.learning.tokenizer import Ids

Progress = Callable[[float], None]
"""Gets the share of the work that is done."""


def rows_without_overlap(data: Ids, context: int, rows: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(index of the first row, (rows, <= context + 1) ids).

    Every token but the first is predicted exactly once.
    """
    full = (len(data) - 1) // context
    for first in range(0, full, rows):
        some = [
            data[i * context : (i + 1) * context + 1] for i in range(first, min(first + rows, full))
        ]
        yield first, torch.from_numpy(np.stack(some).astype(np.int64))
    if full * context < len(data) - 1:
        yield full, torch.from_numpy(np.array(data[full * context :], dtype=np.int64)[None])


@torch.no_grad()
def cross_entropies(
    predict: Predictors,
    split: Ids,
    context: int,
    *,
    rows: int = 16,
    device: torch.device | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, float]:
    """Nats per token of several predictors in one walk over the split.

    Sums are per row in float64, so `rows` does not change the result.
    """
    totals: dict[str, float] = {}
    count = 0
    for first, tokens in rows_without_overlap(split, context, rows):
        ids = tokens.to(device) if device else tokens
        targets = ids[:, 1:]
        for name, logits in predict(ids[:, :-1], first).items():
            ce = F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")
            totals[name] = totals.get(name, 0.0) + ce.double().sum().item()
        count += targets.numel()
        progress(count / (len(split) - 1))
    return {name: total / count for name, total in totals.items()}


def spread_rows(split: Ids, context: int, limit: int) -> npt.NDArray[np.int64]:
    """Numbers of rows from all over a split, about `limit` tokens: neighbouring text is alike."""
    count = (len(split) - 1) // context
    wanted = min(count, max(limit // context, 1))
    return np.unique(np.linspace(0, count - 1, wanted).astype(np.int64))


@torch.no_grad()
def cross_entropies_of_rows(
    predict: Predictors,
    split: Ids,
    context: int,
    numbers: npt.NDArray[np.int64],
    *,
    rows: int = 16,
    device: torch.device | None = None,
) -> dict[str, float]:
    """`cross_entropies` on some rows of a split."""
    totals: dict[str, float] = {}
    for some in np.array_split(numbers, -(-len(numbers) // rows)):
        tokens = torch.from_numpy(
            np.stack([split[i * context : (i + 1) * context + 1] for i in some]).astype(np.int64)
        )
        ids = tokens.to(device) if device else tokens
        for name, logits in predict(ids[:, :-1], int(some[0])).items():
            ce = F.cross_entropy(logits.float().transpose(1, 2), ids[:, 1:], reduction="sum")
            totals[name] = totals.get(name, 0.0) + ce.item()
    return {name: total / (len(numbers) * context) for name, total in totals.items()}


def evaluate(
    model: Model,
    split: Ids,
    *,
    seed: int = 0,
    draws: int = MARGINAL_DRAWS,
    rows: int = 16,
    progress: Progress = lambda _: None,
) -> dict[str, float]:
    """All cross entropies of a model, with `composed` for the way it is meant to be used."""
    results: dict[str, float] = {}
    passes = model.composition.predictors(model, seed=seed, draws=draws)
    for number, predict in enumerate(passes):
        results |= cross_entropies(
            predict,
            split,
            model.config.context,
            rows=rows,
            device=model.device,
            progress=lambda share, finished=number: progress((finished + share) / len(passes)),  # type: ignore[misc]
        )
    return {"composed": results[model.compose], **results}


def evaluate_alone(
    block: IndependentBlock,
    split: Ids,
    context: int,
    *,
    rows: int = 16,
    progress: Progress = lambda _: None,
) -> float:
    """Cross entropy of one plain block: the end-to-end reference, or a single `next` block."""
    return cross_entropies(
        lambda t, _: {"ce": block(block.features(t))},
        split,
        context,
        rows=rows,
        device=block.device,
        progress=progress,
    )["ce"]


@torch.no_grad()
def text_bits(block: IndependentBlock, prompt: Sequence[int], text: Sequence[int]) -> float:
    """Bits per token of `text` after `prompt` under a plain block; both must fit its context."""
    ids = torch.tensor([[*prompt, *text]], device=block.device)
    logp = block(block.features(ids[:, :-1])).log_softmax(-1)
    chosen_logp = logp[0, torch.arange(ids.shape[1] - 1), ids[0, 1:]][len(prompt) - 1 :]
    return -chosen_logp.double().mean().item() / math.log(2)
