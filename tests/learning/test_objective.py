"""Losses: next token, denoising against Bayes' rule, tails, fusion."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from blocktrain.learning.compose import Model, independent
from blocktrain.learning.evaluate import evaluate
from blocktrain.learning.model import build_fusion, build_independent, target_table
from blocktrain.learning.objective import (
    denoise_logits,
    denoise_loss,
    draw_noise,
    draw_present,
    fusion_loss,
    next_loss,
    read_features,
    training_levels,
)
from blocktrain.learning.shards import memory_batches
from blocktrain.learning.train import Trainer
from conftest import random_model, tiny_config

TOKENS = torch.randint(0, 256, (3, 17), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("sigma", [0.3, 1.0, 4.0])
def test_the_exact_skip_is_bayes_rule(sigma: float) -> None:
    config = tiny_config(objective="denoise", compose="pool")
    block, table = build_independent(config, 1), target_table(config)
    token, level = torch.tensor([[7]]), torch.tensor(sigma)
    symbols, prior = [65, 66, 200], np.array([0.5, 0.3, 0.2])
    logits = torch.full((256,), -100.0)
    logits[symbols] = torch.tensor(np.log(prior)).float()
    with torch.no_grad():  # a head that answers this one context with exactly these logits
        seen = block.norm(block.features(token))[0, 0]
        block.head.weight.copy_(torch.outer(seen, logits) / seen.dot(seen))
        z = (table[66] + sigma * torch.randn(8, generator=torch.Generator().manual_seed(3)))[
            None, None
        ]
        probabilities = (
            denoise_logits(block, table, token, z, level, config.sigma_data)
            .softmax(-1)[0, 0]
            .numpy()
        )

    distance = ((z[0, 0].double() - table[symbols].double()) ** 2).sum(-1).numpy()
    posterior = prior * np.exp(-distance / (2 * sigma**2))
    assert probabilities[symbols] == pytest.approx(posterior / posterior.sum(), abs=1e-4)
    assert probabilities.sum() - probabilities[symbols].sum() < 1e-6


def test_with_all_noise_the_exact_skip_is_the_plain_loss() -> None:
    config = tiny_config(objective="denoise", compose="pool")
    block, table = build_independent(config, 1), target_table(config)
    z = torch.zeros(3, 16, 8)
    logits = denoise_logits(block, table, TOKENS[:, :-1], z, torch.tensor(1e6), config.sigma_data)
    assert torch.allclose(logits, block(block.features(TOKENS[:, :-1])), atol=1e-5)


def test_without_noise_edm_reads_z_itself() -> None:
    config = tiny_config(objective="denoise", compose="euler", skip="edm")
    block, table = build_independent(config, 1), target_table(config)
    z = table[TOKENS[:, 1:]]
    logits = denoise_logits(block, table, TOKENS[:, :-1], z, torch.tensor(1e-6), config.sigma_data)
    assert torch.allclose(logits, block.head(z), atol=1e-4)


def test_the_plain_loss_is_the_cross_entropy_of_the_next_byte() -> None:
    block = random_model(tiny_config()).blocks[0]
    logp = block(block.features(TOKENS[:, :-1])).log_softmax(-1)
    expected = -logp.gather(-1, TOKENS[:, 1:, None]).mean()
    loss = next_loss(block, TOKENS)
    assert loss.total.item() == pytest.approx(expected.item())
    assert loss.ce.item() == loss.total.item()


def test_only_edm_weighs_its_loss() -> None:
    exact = tiny_config(objective="denoise", compose="pool")
    draws = draw_noise(exact, 3, torch.Generator().manual_seed(1))
    loss = denoise_loss(build_independent(exact, 1), target_table(exact), TOKENS, exact, 1, draws)
    assert loss.total.item() == pytest.approx(loss.ce.item())
    edm = tiny_config(objective="denoise", compose="euler", skip="edm")
    loss = denoise_loss(build_independent(edm, 1), target_table(edm), TOKENS, edm, 1, draws)
    assert (
        loss.total.item() > 3.5 * loss.ce.item()
    )  # the weight is above 1 / sigma_data^2 = 4 at every level


def test_noise_of_random_scale_is_as_strong_as_told_or_weaker() -> None:
    """The other draws are the same, so a run without it keeps its bits."""
    config = tiny_config(objective="denoise", compose="euler", tail=4)
    weaker = config.replace(noise_scale="random")
    full = draw_noise(config, 5, torch.Generator().manual_seed(1))
    some = draw_noise(weaker, 5, torch.Generator().manual_seed(1))
    scale = (some.noise / full.noise).flatten(1)
    assert torch.allclose(scale, scale[:, :1].expand_as(scale), atol=1e-4)
    assert scale.min() >= 0 and scale.max() < 1 and scale[:, 0].std() > 0.1
    assert torch.equal(some.uniform, full.uniform) and some.tail == full.tail


def test_only_the_tail_goes_below_the_lowest_noise() -> None:
    config = tiny_config(
        objective="denoise", compose="euler", tail=4, tail_sigma_min=0.1, gamma=0.0
    )
    uniform = torch.linspace(0, 0.999, 8)
    plain = training_levels(config, 3, uniform, 16, 0)
    levels = training_levels(config, 3, uniform, 16, 4)
    assert torch.equal(levels[:, :12], plain[:, None].expand(8, 12)) and plain.min() >= 1
    assert levels[:, 12:].min() < 0.11 and levels[0, 12] < 1 <= levels[0, 11]


def test_a_tail_trains_its_mask_and_only_in_its_share() -> None:
    config = tiny_config(objective="denoise", compose="euler", tail=4, tail_share=0.5)
    block, table = build_independent(config, 1), target_table(config)
    touched = 0
    for seed in range(20):
        block.zero_grad(set_to_none=True)
        draws = draw_noise(config, 3, torch.Generator().manual_seed(seed))
        denoise_loss(block, table, TOKENS, config, 1, draws).total.backward()
        touched += block.mask.grad is not None
    assert 4 <= touched <= 16


def test_training_loss_leaks_below_sigma_one_and_composition_gains_nothing() -> None:
    """Four equally likely symbols without any order: no context can give less than ln 4."""
    text = np.random.default_rng(0).choice(np.frombuffer(b"acgt", np.uint8), 4000)
    floor = np.log(4)
    leaked = {}
    for sigma_min in (0.05, 1.0):
        config = tiny_config(
            objective="denoise",
            compose="euler",
            blocks=2,
            sigma_min=sigma_min,
            steps=60,
            batch=8,
            learning_rate=2e-2,
            z_width=16,
        )
        batches = [memory_batches(text, context=config.context, batch=8, block=n) for n in (1, 2)]
        trainers = [Trainer(config, n) for n in (1, 2)]
        ce = [
            np.mean([loss for _, loss in trainer.run(read, config.steps)][-10:])
            for trainer, read in zip(trainers, batches, strict=True)
        ]
        composed = evaluate(
            Model(config, independent({t.index: t.block for t in trainers})), text[:801], draws=1
        )
        leaked[sigma_min] = floor - ce[1]
        assert composed["euler"] > floor - 0.01
        assert composed["block_2"] > floor - 0.01
    assert leaked[0.05] > 0.9
    assert leaked[1.0] < 0.4


def test_the_fusion_loss_leaves_out_blocks_but_never_all() -> None:
    model = random_model(tiny_config())
    assert model.fusion is not None
    for seed in range(10):
        draws = draw_present(2, 3, 0.99, torch.Generator().manual_seed(seed))
        assert draws.present.sum(1).min() >= 1
        loss = fusion_loss(model.fusion, model.blocks, TOKENS, draws)
        assert torch.isfinite(loss.total)
    all_present = draw_present(2, 3, 0.0, torch.Generator().manual_seed(0))
    whole = fusion_loss(model.fusion, model.blocks, TOKENS, all_present).total
    logits = model.fusion.combine(
        TOKENS[:, :-1], read_features(model.blocks, TOKENS[:, :-1]), torch.ones(2, 3)
    )
    assert whole.item() == pytest.approx(
        F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten()).item()
    )


def test_what_fusion_reads_gets_no_gradient() -> None:
    config = tiny_config()
    sources = [build_independent(config, n) for n in (1, 2)]
    fusion = build_fusion(config, 3)
    fusion.readout.copy_from(sources)
    draws = draw_present(2, 3, 0.15, torch.Generator().manual_seed(0))
    fusion_loss(fusion, sources, TOKENS, draws).total.backward()
    assert all(p.grad is None for source in sources for p in source.parameters())
    assert all(p.grad is not None for p in fusion.parameters())
