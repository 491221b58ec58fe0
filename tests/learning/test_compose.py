"""The composed model writing text: windows, cached against brute force, sweeps against one at a time, the sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.errors import ConfigError
from blocktrain.learning.compose import EulerScorer, Model, euler_path, position_noise, window_noise
from blocktrain.learning.generate import (
    Sampler,
    autoregressive,
    sweep,
    sweep_from_noise,
    window_start,
)
from conftest import random_model, tiny_config

CPU = torch.device("cpu")
CONTEXT = 16
FUSE = random_model(tiny_config(context=CONTEXT))
POOL = random_model(tiny_config(context=CONTEXT, compose="pool"))
DENOISE = random_model(tiny_config(context=CONTEXT, compose="pool", objective="denoise"))
EULER = random_model(tiny_config(context=CONTEXT, compose="euler", objective="denoise"))
PAPER = random_model(tiny_config(context=CONTEXT, compose="euler", objective="denoise", skip="edm"))
TAIL = random_model(tiny_config(context=CONTEXT, compose="euler", objective="denoise", tail=6))
MODELS = {"fuse": FUSE, "pool": POOL, "denoise": DENOISE}
PROMPT = bytes(range(65, 65 + 50))


def write(model: Model, prompt: bytes, count: int, sampler: Sampler) -> bytes:
    return bytes(autoregressive(model.scorer(), prompt, count, model.config.context, sampler, CPU))


def write_sweeps(model: Model, prompt: bytes, count: int, sampler: Sampler, sweeps: int) -> bytes:
    return bytes(
        sweep(
            model.scorer(),
            model.drafter(),
            prompt,
            count,
            model.config.context,
            sampler,
            sweeps,
            CPU,
        )
    )


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
    draft = bytes(autoregressive(FUSE.drafter(), PROMPT[:2], 12, CONTEXT, sampler, CPU))
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
        found = np.bincount(
            [sampler.pick(logits, position) for position in range(count)], minlength=256
        )
        p = (logits.double() / temperature).softmax(-1).numpy()
        assert found[4:].sum() == 0
        assert np.all(np.abs(found[:4] - count * p[:4]) < 4 * np.sqrt(count * p[:4] * (1 - p[:4])))


@given(st.floats(0, 1), st.integers(0, 1000))
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, position: int) -> None:
    p = [0.4, 0.3, 0.2, 0.1]
    logits = torch.full((256,), -1e9)
    logits[torch.tensor([30, 20, 10, 0])] = torch.tensor(p).log()
    kept = max(1, sum(before < top_p + 1e-6 for before in (0.0, 0.4, 0.7, 0.9)))
    assert Sampler(seed=1, top_p=top_p).pick(logits, position) in [30, 20, 10, 0][:kept]


def test_top_p_still_draws_among_what_it_keeps() -> None:
    logits = torch.full((256,), -1e9)
    logits[:3] = torch.tensor([0.5, 0.4, 0.1]).log()
    assert {Sampler(seed=1, top_p=0.8).pick(logits, position) for position in range(100)} == {0, 1}


def test_position_noise_is_a_pure_function_of_seed_and_position() -> None:
    whole = position_noise(1, 0, 20, 8)
    assert torch.equal(position_noise(1, 5, 3, 8), whole[5:8])
    assert not torch.equal(position_noise(2, 0, 20, 8), whole)
    assert abs(float(position_noise(3, 0, 2000, 8).std()) - 1) < 0.02


def test_noise_follows_the_text_and_no_window_repeats_that_of_another() -> None:
    whole = window_noise(1, PROMPT[:20], 8)
    assert torch.equal(window_noise(1, PROMPT[:20], 8, 5), whole[5:])
    assert torch.equal(window_noise(1, PROMPT[:12] + b"other", 8)[:12], whole[:12])
    for others in (window_noise(2, PROMPT[:20], 8), window_noise(1, PROMPT[1:21], 8)):
        assert not (others == whole).any()
    assert window_noise(1, PROMPT[:20], 8, 20).shape == (0, 8)


@pytest.mark.parametrize("model", [EULER, PAPER], ids=["exact", "edm"])
def test_the_path_from_noise_is_the_same_in_chunks_and_has_a_step_per_block(model: Model) -> None:
    text = torch.tensor([list(PROMPT[:CONTEXT])])
    path = euler_path(model, text, window_noise(7, PROMPT[:CONTEXT], 8)[None])
    assert len(path) == 3
    scorer = EulerScorer(model, 7)
    found = torch.cat(
        [scorer(text[:, :5], 0), scorer(text[:, 5:6], 5), scorer(text[:, 6:], 6)], dim=1
    )
    assert torch.allclose(found, path[-1], atol=1e-4, rtol=1e-4)
    scorer(text[:, :3], 6)  # a wrong draft
    assert torch.allclose(scorer(text[:, 6:], 6), path[-1][:, 6:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model", [EULER, PAPER], ids=["exact", "edm"])
def test_the_paper_writes_text_past_its_context(model: Model) -> None:
    written = [
        bytes(autoregressive(model.scorer(seed=2), PROMPT[:3], 25, CONTEXT, Sampler(seed=1), CPU))
        for _ in range(2)
    ]
    assert written[0] == written[1]
    assert len(written[0]) == 25


def test_a_block_of_the_paper_cannot_draft() -> None:
    with pytest.raises(ConfigError, match="autoregressive"):
        PAPER.drafter()


@pytest.mark.parametrize(("length", "count", "sweeps"), [(1, 4, 1), (5, 17, 2), (40, 13, 3)])
def test_a_sweep_from_noise_writes_as_many_bytes_as_asked(
    length: int, count: int, sweeps: int
) -> None:
    written = [
        bytes(sweep_from_noise(TAIL, PROMPT[:length], count, Sampler(seed=1), sweeps))
        for _ in range(2)
    ]
    assert len(written[0]) == count
    assert written[0] == written[1]


def test_what_stands_before_a_tail_is_denoised_as_without_one() -> None:
    text, noise = torch.tensor([list(PROMPT[:CONTEXT])]), position_noise(7, 0, CONTEXT, 8)[None]
    plain, tailed = euler_path(TAIL, text, noise), euler_path(TAIL, text, noise, tail=6)
    for without, behind in zip(plain, tailed, strict=True):
        assert torch.allclose(without[:, :-6], behind[:, :-6], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(plain[-1][:, -6:], tailed[-1][:, -6:], atol=1e-2)


def test_a_sweep_from_noise_needs_a_tail() -> None:
    with pytest.raises(ConfigError, match="no tail"):
        sweep_from_noise(EULER, PROMPT, 4, Sampler(), 1)  # before anything is written
