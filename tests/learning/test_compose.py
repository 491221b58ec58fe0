"""Composed models: cached against brute force, sweeps against one token at a time, noise."""

from __future__ import annotations

import pytest
import torch

from blocktrain.errors import ConfigError
from blocktrain.learning.compose import EulerScorer, Model, euler_path, position_noise, window_noise
from conftest import random_model, tiny_config

CONTEXT = 16
FUSE = random_model(tiny_config(context=CONTEXT))
POOL = random_model(tiny_config(context=CONTEXT, compose="pool"))
DENOISE = random_model(tiny_config(context=CONTEXT, compose="pool", objective="denoise"))
EULER = random_model(tiny_config(context=CONTEXT, compose="euler", objective="denoise"))
PAPER = random_model(tiny_config(context=CONTEXT, compose="euler", objective="denoise", skip="edm"))
TAIL = random_model(tiny_config(context=CONTEXT, compose="euler", objective="denoise", tail=6))
MODELS = {"fuse": FUSE, "pool": POOL, "denoise": DENOISE}
PROMPT = bytes(range(65, 65 + 50))


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
    logits = torch.cat(
        [scorer(text[:, :5], 0), scorer(text[:, 5:6], 5), scorer(text[:, 6:], 6)], dim=1
    )
    assert torch.allclose(logits, path[-1], atol=1e-4, rtol=1e-4)
    scorer(text[:, :3], 6)  # a wrong draft
    assert torch.allclose(scorer(text[:, 6:], 6), path[-1][:, 6:], atol=1e-4, rtol=1e-4)


def test_a_block_of_the_paper_cannot_draft() -> None:
    with pytest.raises(ConfigError, match="autoregressive"):
        PAPER.drafter()


def test_what_stands_before_a_tail_is_denoised_as_without_one() -> None:
    text, noise = torch.tensor([list(PROMPT[:CONTEXT])]), position_noise(7, 0, CONTEXT, 8)[None]
    plain, tailed = euler_path(TAIL, text, noise), euler_path(TAIL, text, noise, tail=6)
    for without, behind in zip(plain, tailed, strict=True):
        assert torch.allclose(without[:, :-6], behind[:, :-6], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(plain[-1][:, -6:], tailed[-1][:, -6:], atol=1e-2)
