"""The loops that write text: windows, cached against brute force, sweeps against one token at a
time, drafts, and the sampler."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.errors import ConfigError
from blocktrain.learning.compose import Model
from blocktrain.learning.generate import (
    Commit,
    Draft,
    Mode,
    Picker,
    Sampler,
    Score,
    Text,
    accept,
    common_prefix,
    text_loop,
    window_start,
    write_with,
)
from blocktrain.learning.generate import write as write_tokens
from conftest import random_model, tiny_config

CONTEXT = 16
FUSE = random_model(tiny_config(context=CONTEXT))
POOL = random_model(tiny_config(context=CONTEXT, compose="pool"))
DENOISE = random_model(tiny_config(context=CONTEXT, compose="pool", objective="denoise"))
EULER = random_model(tiny_config(context=CONTEXT, compose="euler", objective="denoise"))
PAPER = random_model(tiny_config(context=CONTEXT, compose="euler", objective="denoise", skip="edm"))
TAIL = random_model(tiny_config(context=CONTEXT, compose="euler", objective="denoise", tail=6))
ZERO = random_model(
    tiny_config(context=CONTEXT, compose="euler", objective="denoise", tail=6, start="zero")
)
MODELS = {"fuse": FUSE, "pool": POOL, "denoise": DENOISE}
PROMPT = bytes(range(65, 65 + 50))
small = st.binary(max_size=12).map(lambda b: bytes(x % 3 for x in b))


def write(model: Model, prompt: bytes, count: int, sampler: Sampler) -> bytes:
    return bytes(write_tokens(model, prompt, count, sampler))


def write_sweeps(model: Model, prompt: bytes, count: int, sampler: Sampler, sweeps: int) -> bytes:
    return bytes(write_tokens(model, prompt, count, sampler, mode="sweep", sweeps=sweeps))


@given(st.integers(8, 200), st.integers(1, 2000))
def test_the_window_is_a_pure_function_that_fits_and_restarts_at_half(
    context: int, known: int
) -> None:
    start, half = window_start(known, context), context // 2
    assert 0 < known - start <= context
    assert start % half == 0
    if known > context:
        assert known - start > context - half
    assert window_start(known + 1, context) in (start, start + half)
    assert (window_start(known + 1, context) == start) == (known - start < context)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [1, 7, CONTEXT, CONTEXT + 1, 50])
def test_cached_generation_equals_every_window_recomputed_from_scratch(
    name: str, length: int
) -> None:
    model, sampler = MODELS[name], Sampler(seed=3)
    text = list(PROMPT[:length])
    for _ in range(2 * CONTEXT + 3):
        window = text[window_start(len(text), CONTEXT) :]
        logits = model.scorer()(torch.tensor([window]), 0)[0, -1]
        text.append(sampler.pick(logits, len(text)))
    assert write(model, PROMPT[:length], 2 * CONTEXT + 3, sampler) == bytes(text[length:])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("length", "count"), [(1, 6), (3, 13), (10, 30), (CONTEXT, 4), (CONTEXT + 1, 20), (50, 20)]
)
def test_enough_sweeps_equal_one_byte_at_a_time(name: str, length: int, count: int) -> None:
    sampler = Sampler(seed=4, temperature=0.9)
    expected = write(MODELS[name], PROMPT[:length], count, sampler)
    assert len(expected) == count
    assert (
        write_sweeps(MODELS[name], PROMPT[:length], count, sampler, sweeps=CONTEXT + 1) == expected
    )


def test_few_sweeps_fix_at_least_one_byte_each() -> None:
    sampler = Sampler(seed=5)
    expected = write(FUSE, PROMPT[:2], 12, sampler)
    for sweeps in range(1, 6):
        assert write_sweeps(FUSE, PROMPT[:2], 12, sampler, sweeps)[:sweeps] == expected[:sweeps]
    draft = bytes(write_with(FUSE.drafter(), PROMPT[:2], 12, CONTEXT, sampler))
    assert write_sweeps(FUSE, PROMPT[:2], 12, sampler, 0) == draft


def test_the_same_seed_writes_the_same_bytes_and_another_does_not() -> None:
    assert write(FUSE, PROMPT, 30, Sampler(seed=1)) == write(FUSE, PROMPT, 30, Sampler(seed=1))
    assert write(FUSE, PROMPT, 30, Sampler(seed=1)) != write(FUSE, PROMPT, 30, Sampler(seed=2))


def test_a_trained_model_writes_the_same_text_in_both_ways(trained: Model) -> None:
    sampler = Sampler(seed=0, temperature=0.8)
    expected = write(trained, b"the ", 80, sampler)
    assert write_sweeps(trained, b"the ", 80, sampler, sweeps=40) == expected
    assert b"the" in expected


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = torch.randn(256, generator=torch.Generator().manual_seed(0))
    assert {
        Sampler(seed, temperature=0).pick(logits, position)
        for seed in range(3)
        for position in range(3)
    } == {int(logits.argmax())}


def test_picks_follow_the_softmax_at_a_temperature() -> None:
    logits = torch.full((256,), -1e9)
    logits[:4] = torch.tensor([0.0, 1.0, 2.0, -1.0])
    count = 6000
    for temperature in (1.0, 0.5):
        sampler = Sampler(seed=9, temperature=temperature)
        counts = np.bincount(
            [sampler.pick(logits, position) for position in range(count)], minlength=256
        )
        p = (logits.double() / temperature).softmax(-1).numpy()
        assert counts[4:].sum() == 0
        assert np.all(np.abs(counts[:4] - count * p[:4]) < 4 * np.sqrt(count * p[:4] * (1 - p[:4])))


@given(st.floats(0, 1), st.integers(0, 1000))
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, position: int) -> None:
    p = [0.4, 0.3, 0.2, 0.1]
    logits = torch.full((256,), -1e9)
    logits[torch.tensor([30, 20, 10, 0])] = torch.tensor(p).log()
    size = max(1, sum(before < top_p + 1e-6 for before in (0.0, 0.4, 0.7, 0.9)))
    assert Sampler(seed=1, top_p=top_p).pick(logits, position) in [30, 20, 10, 0][:size]


def test_top_p_still_draws_among_what_it_keeps() -> None:
    logits = torch.full((256,), -1e9)
    logits[:3] = torch.tensor([0.5, 0.4, 0.1]).log()
    assert {Sampler(seed=1, top_p=0.8).pick(logits, position) for position in range(100)} == {0, 1}


@pytest.mark.parametrize("model", [EULER, PAPER], ids=["exact", "edm"])
def test_the_paper_writes_text_past_its_context(model: Model) -> None:
    texts = [
        bytes(write_with(model.scorer(seed=2), PROMPT[:3], 25, CONTEXT, Sampler(seed=1)))
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 25


@pytest.mark.parametrize("model", [TAIL, ZERO], ids=["noise", "zero"])
@pytest.mark.parametrize(("length", "count", "sweeps"), [(1, 4, 1), (5, 17, 2), (40, 13, 3)])
def test_a_sweep_of_tails_writes_as_many_bytes_as_asked(
    model: Model, length: int, count: int, sweeps: int
) -> None:
    how: Any = {"mode": "sweep", "sweeps": sweeps, "draft": "none"}
    texts = [
        bytes(write_tokens(model, PROMPT[:length], count, Sampler(seed=1), **how)) for _ in range(2)
    ]
    assert len(texts[0]) == count
    assert texts[0] == texts[1]


def test_from_zero_only_the_sampling_depends_on_the_seed() -> None:
    modes: list[dict[str, Any]] = [{}, {"mode": "sweep", "sweeps": 2, "draft": "none"}]
    for how in modes:
        texts = {
            bytes(write_tokens(ZERO, PROMPT[:9], 12, Sampler(seed, temperature=0), **how))
            for seed in (1, 2)
        }
        assert len(texts) == 1


def test_a_sweep_from_noise_needs_a_tail() -> None:
    with pytest.raises(ConfigError, match="no tail"):
        # before anything is written
        write_tokens(EULER, PROMPT, 4, Sampler(), mode="sweep", draft="none")


@given(small, small)
def test_common_counts_leading_bytes(a: bytes, b: bytes) -> None:
    expected = len(
        list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
    )
    assert common_prefix(tuple(a), tuple(b)) == common_prefix(tuple(b), tuple(a)) == expected


@given(small, st.integers(0, 3))
def test_a_sweep_commits_what_was_right_and_one_more_byte_of_the_model(
    draft: bytes, seed: int
) -> None:
    def model(before: bytes) -> int:  # any function of the text before
        return (sum(before) + len(before) + seed) % 3

    picks = [model(draft[:i]) for i in range(len(draft) + 1)]
    tokens = bytes(accept(draft, iter(picks)))
    text = b""
    while len(text) < len(tokens):
        text += bytes([model(text)])
    assert tokens == text  # nothing that the model would not have written itself
    assert tokens[:-1] == draft[: len(tokens) - 1]
    assert len(tokens) == len(draft) + 1 or tokens[-1] != draft[len(tokens) - 1]


def test_no_more_is_picked_than_is_committed() -> None:
    assert accept([1, 2, 3], (pick for pick in [1, 9, None])) == (1, 9)  # type: ignore[misc]


def test_a_text_knows_its_room() -> None:
    answer = Text(bytes(50), 100, CONTEXT)
    assert (answer.cut, answer.begin, answer.remaining) == (window_start(50, CONTEXT), 40, 100)
    while answer.remaining:
        assert 1 <= answer.room <= CONTEXT + 1
        last = len(answer.ids) + answer.room - 1  # the last byte that this window may predict
        assert window_start(last, CONTEXT) == answer.begin
        assert answer.room == answer.remaining or window_start(last + 1, CONTEXT) != answer.begin
        answer.append(bytes(answer.room))


def test_near_ties_are_counted_once_a_position() -> None:
    picker = Picker(Sampler(temperature=0))
    tie, clear = torch.zeros(256), torch.zeros(256)
    tie[[3, 5]] = torch.tensor([9.0, 9.00005])
    clear[7] = 5.0
    assert list(picker.picks(torch.stack([tie, clear]), 10)) == [5, 7]
    list(picker.picks(torch.stack([tie]), 10))
    assert picker.near_ties == 1
    list(picker.picks(torch.stack([clear]), 10))
    assert picker.near_ties == 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("length", "count"), [(1, 6), (10, 30), (50, 20)])
def test_exact_text_is_the_autoregressive_one(name: str, length: int, count: int) -> None:
    sampler = Sampler(seed=4, temperature=0.9)
    expected = write(MODELS[name], PROMPT[:length], count, sampler)
    text = write_tokens(MODELS[name], PROMPT[:length], count, sampler, mode="exact")
    assert bytes(text) == expected


def test_a_loop_asks_and_is_sent_the_results() -> None:
    """No model at all: ids beyond a byte, and a driver by hand."""

    def logits_after(ids: tuple[int, ...]) -> torch.Tensor:
        row = torch.zeros(1000)
        row[(sum(ids) * 7 + 300) % 1000] = 9.0
        return row

    def run(mode: Mode) -> list[int]:
        text = Text((500, 2), 9, CONTEXT)
        loop = text_loop(text, Picker(Sampler(temperature=0)), FUSE.config, mode=mode)
        tokens: list[int] = []
        step = next(loop)
        while True:
            result: object = None
            if isinstance(step, Draft):
                result = (7,) * min(step.most, 3)
            elif isinstance(step, Score):
                ends = range(step.start + 1, len(step.window) + 1)
                result = torch.stack([logits_after(step.window[:end]) for end in ends])
            elif isinstance(step, Commit):
                tokens += step.tokens
            try:
                step = loop.send(result)
            except StopIteration:
                return tokens

    assert run("exact") == run("autoregressive")
    assert max(run("exact")) > 255 and len(run("exact")) == 9
