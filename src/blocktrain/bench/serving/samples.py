"""Quality of text that a model writes: bits per byte under the end-to-end model, and diversity."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from blocktrain.learning.compose import Model
from blocktrain.learning.evaluate import Progress, text_bits
from blocktrain.learning.generate import Sampler, Tokens, write, write_with
from blocktrain.learning.model import IndependentBlock
from blocktrain.learning.tokenizer import Ids, tokenizer_of

SWEEPS = (1, 2, 4)


def judge_samples(
    model: Model,
    reference: IndependentBlock,
    valid: Ids,
    *,
    count: int,
    seed: int,
    progress: Progress = lambda _: None,
) -> list[dict[str, Any]]:
    """Rows for real, autoregressive, swept and drafted text after the same prompts."""
    context, decode = model.config.context, tokenizer_of(model.config).decode
    prompt_size, size = context // 4, context - context // 4
    starts = [i * (len(valid) - context) // count for i in range(count)]
    prompts = [tuple(valid[s : s + prompt_size].tolist()) for s in starts]

    def sample(number: int, sweeps: int | None) -> Tokens:
        sampler = Sampler(seed + number)
        if sweeps is None:
            return tuple(write(model, prompts[number], size, sampler))
        return tuple(write(model, prompts[number], size, sampler, mode="sweep", sweeps=sweeps))

    kinds: dict[str, Callable[[int], Tokens]] = {
        "real": lambda i: tuple(valid[starts[i] + prompt_size : starts[i] + context].tolist())
    }
    kinds["autoregressive"] = lambda i: sample(i, None)
    for k in SWEEPS:
        kinds[f"sweep_{k}"] = lambda i, k=k: sample(i, k)  # type: ignore[misc]
    kinds["first_block"] = lambda i: tuple(
        write_with(model.drafter(), prompts[i], size, context, Sampler(seed + i))
    )
    texts: dict[str, list[Tokens]] = {name: [] for name in kinds}
    for number, (name, i) in enumerate(itertools.product(kinds, range(count)), 1):
        texts[name].append(kinds[name](i))
        progress(number / (len(kinds) * count))
    exact = texts["autoregressive"]
    return [
        {
            "name": name,
            "bits_per_byte": sum(
                text_bits(reference, p, t) * len(t) / len(decode(t))
                for p, t in zip(prompts, samples, strict=True)
            )
            / count,
            "distinct_4grams": _distinct(samples),
            "same_as_autoregressive": sum(
                a == b
                for t, e in zip(samples, exact, strict=True)
                for a, b in zip(t, e, strict=True)
            )
            / (count * size),
        }
        for name, samples in texts.items()
    ]


def _distinct(texts: list[Tokens]) -> float:
    """Different sequences of 4 tokens by all there are: low where a model repeats itself."""
    grams = [t[i : i + 4] for t in texts for i in range(len(t) - 3)]
    return len(set(grams)) / len(grams)
