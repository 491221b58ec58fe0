"""Composed models: cached against brute force, sweeps against one token at a time, noise."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from blocktrain.errors import ConfigError
from blocktrain.learning.compose import (
    EulerScorer,
    Model,
    composition_of,
    euler_path,
    path_loss,
    path_start,
    position_noise,
    window_noise,
)
from blocktrain.learning.model import IndependentBlock, build_independent, target_table
from blocktrain.learning.objective import Loss, draw_noise
from conftest import random_model, tiny_config

CONTEXT = 16
FUSE = random_model(tiny_config(context=CONTEXT))
POOL = random_model(tiny_config(context=CONTEXT, compose="pool"))
DENOISE = random_model(tiny_config(context=CONTEXT, compose="pool", objective="denoise"))
EULER = random_model(tiny_config(context=CONTEXT, compose="euler", objective="denoise"))
PAPER = random_model(tiny_config(context=CONTEXT, compose="euler", objective="denoise", skip="edm"))
TAIL = random_model(tiny_config(context=CONTEXT, compose="euler", objective="denoise", tail=6))
ZERO = random_model(
    tiny_config(context=CONTEXT, compose="euler", objective="denoise", start="zero")
)
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


@pytest.mark.parametrize("model", [EULER, PAPER, ZERO], ids=["exact", "edm", "zero"])
def test_the_path_is_the_same_in_chunks_and_has_a_step_per_block(model: Model) -> None:
    text = torch.tensor([list(PROMPT[:CONTEXT])])
    z = path_start(model.config, window_noise(7, PROMPT[:CONTEXT], 8)[None])
    path = euler_path(model, text, z)
    assert len(path) == 3
    scorer = EulerScorer(model, 7)
    logits = torch.cat(
        [scorer(text[:, :5], 0), scorer(text[:, 5:6], 5), scorer(text[:, 6:], 6)], dim=1
    )
    assert torch.allclose(logits, path[-1], atol=1e-4, rtol=1e-4)
    scorer(text[:, :3], 6)  # a wrong draft
    assert torch.allclose(scorer(text[:, 6:], 6), path[-1][:, 6:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model", [EULER, ZERO], ids=["noise", "zero"])
def test_a_block_trains_on_the_path_of_those_before_it(model: Model) -> None:
    tokens = torch.tensor([list(PROMPT[: CONTEXT + 1])])
    draws = draw_noise(model.config, 1, torch.Generator().manual_seed(1))
    path = euler_path(model, tokens[:, :-1], path_start(model.config, draws.noise))
    for count, logits in enumerate(path):
        loss = path_loss(
            model.blocks[count], model.blocks[:count], model.table, tokens, model.config, draws
        )
        assert torch.allclose(loss.ce, F.cross_entropy(logits[0], tokens[0, 1:]), atol=1e-5)


def test_a_block_stands_in_for_those_before_it() -> None:
    config = tiny_config(compose="euler", objective="denoise", start="zero", training_z="path")
    block, table = build_independent(config, 3), target_table(config)
    tokens = torch.tensor([list(PROMPT[: config.context + 1])])
    draws = draw_noise(config, 1, torch.Generator().manual_seed(1))

    def loss(*before: IndependentBlock) -> Loss:
        how = {"config": config, "index": 3, "table": table}
        return composition_of(config).loss(block, before, tokens, draws, **how)  # type: ignore[arg-type]

    assert loss().total.item() == loss(block, block).total.item()
    others = [build_independent(config, n) for n in (1, 2)]
    for other in others:
        torch.nn.init.normal_(other.head.weight)
    loss(*others).total.backward()
    assert loss(*others).total.item() != loss().total.item()
    assert block.head.weight.grad is not None
    assert all(p.grad is None for other in others for p in other.parameters())


def test_a_block_of_the_paper_cannot_draft() -> None:
    with pytest.raises(ConfigError, match="autoregressive"):
        PAPER.drafter()


def test_what_stands_before_a_tail_is_denoised_as_without_one() -> None:
    text, noise = torch.tensor([list(PROMPT[:CONTEXT])]), position_noise(7, 0, CONTEXT, 8)[None]
    z = path_start(TAIL.config, noise)
    plain, tailed = euler_path(TAIL, text, z), euler_path(TAIL, text, z, tail=6)
    for without, behind in zip(plain, tailed, strict=True):
        assert torch.allclose(without[:, :-6], behind[:, :-6], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(plain[-1][:, -6:], tailed[-1][:, -6:], atol=1e-2)
