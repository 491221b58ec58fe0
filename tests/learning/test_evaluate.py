"""Cross entropies against hand-made sums, what each kind of model has, the pool's weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from blocktrain.learning.compose import (
    Model,
    context_predictors,
    euler_path,
    path_start,
    row_noise,
)
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.evaluate import cross_entropies, evaluate, evaluate_alone, text_bits
from blocktrain.learning.objective import denoise_logits
from blocktrain.learning.pool import fit_pool_weights
from conftest import random_model, tiny_config, train_model

MODELS = {
    "fuse": random_model(tiny_config()),
    "pool": random_model(tiny_config(compose="pool")),
    "exact": random_model(tiny_config(compose="euler", objective="denoise")),
    "paper": random_model(tiny_config(compose="euler", objective="denoise", skip="edm")),
    "zero": random_model(
        tiny_config(compose="euler", objective="denoise", skip="edm", start="zero")
    ),
}
NAMES = {
    "fuse": {"composed", "block_1", "block_2", "pool", "fuse"},
    "pool": {"composed", "block_1", "block_2", "block_3", "pool"},
    "exact": {
        "composed",
        "block_1",
        "block_2",
        "block_3",
        "pool",
        "euler_1",
        "euler_2",
        "euler_3",
        "euler",
        "marginal",
    },
    "paper": {"composed", "euler_1", "euler_2", "euler_3", "euler", "marginal"},
    "zero": {"composed", "euler_1", "euler_2", "euler_3", "euler"},
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_number_of_rows_changes_nothing(kind: str, corpus: TokenCorpus) -> None:
    split = corpus.valid[: 16 * 20 + 6]  # a ragged last row
    one, three, sixteen = (evaluate(MODELS[kind], split, rows=rows, draws=2) for rows in (1, 3, 16))
    assert set(one) == NAMES[kind]
    assert one == pytest.approx(three, abs=1e-6)
    assert one == pytest.approx(sixteen, abs=1e-6)
    assert one["composed"] == one[MODELS[kind].config.compose]


def test_cross_entropy_by_hand(corpus: TokenCorpus) -> None:
    block, split = MODELS["pool"].blocks[0], corpus.valid[:50]
    total = 0.0
    for first in range(0, 49, 16):
        ids = torch.tensor([split[first : first + 17].tolist()])
        logp = block(block.features(ids[:, :-1])).log_softmax(-1)[0]
        total -= sum(logp[t, ids[0, t + 1]].item() for t in range(ids.shape[1] - 1))
    assert evaluate_alone(block, split, 16) == pytest.approx(total / 49, abs=1e-6)
    assert evaluate(MODELS["pool"], split)["block_1"] == pytest.approx(total / 49, abs=1e-6)


def test_the_noise_of_the_path_belongs_to_the_row(corpus: TokenCorpus) -> None:
    model, split = MODELS["exact"], corpus.valid[: 16 * 5 + 1]
    total = 0.0
    for row in range(5):
        ids = torch.tensor([split[row * 16 : row * 16 + 17].tolist()])
        z = path_start(model.config, row_noise(3, 0, row, 16, 8)[None])
        logits = euler_path(model, ids[:, :-1], z)[-1]
        total += torch.nn.functional.cross_entropy(logits[0], ids[0, 1:]).item() / 5
    assert evaluate(model, split, seed=3, draws=1)["euler"] == pytest.approx(total, abs=1e-5)
    assert evaluate(model, split, seed=4, draws=1)["euler"] != pytest.approx(total, abs=1e-5)


def test_a_path_from_zero_depends_on_no_seed(corpus: TokenCorpus) -> None:
    model, split = MODELS["zero"], corpus.valid[: 16 * 5 + 1]
    assert evaluate(model, split, seed=3) == evaluate(model, split, seed=4)
    ids = torch.tensor([split[:17].tolist()])
    first = model.blocks[0]
    logits = denoise_logits(
        first,
        model.table,
        ids[:, :-1],
        torch.zeros(1, 16, 8),
        torch.tensor(model.config.sigma_max),
        model.config.sigma_data,
    )
    ce = torch.nn.functional.cross_entropy(logits[0], ids[0, 1:]).item()
    assert evaluate(model, split[:17])["euler_1"] == pytest.approx(ce, abs=1e-5)


def test_progress_ends_at_one(corpus: TokenCorpus) -> None:
    shares: list[float] = []
    evaluate(MODELS["fuse"], corpus.valid[:200], rows=2, progress=shares.append)
    assert shares == sorted(shares) and shares[-1] == 1.0 and len(shares) > 3


def test_pool_and_fusion_beat_single_blocks(trained: Model, corpus: TokenCorpus) -> None:
    ce = evaluate(trained, corpus.valid)
    single = [ce[f"block_{n}"] for n in (1, 2, 3)]
    assert max(single) < 2.0, "the blocks have learnt something"
    assert ce["pool"] < np.mean(single)
    assert ce["fuse"] < ce["pool"]
    assert ce["composed"] == ce["fuse"]


def test_a_missing_block_costs_little(trained: Model, corpus: TokenCorpus) -> None:
    ce = cross_entropies(
        context_predictors(trained, leave_out=True), corpus.valid, trained.config.context
    )
    without = [ce[f"fuse_without_{n}"] for n in (1, 2, 3)]
    assert all(ce["fuse"] < value < ce["fuse"] + 0.5 for value in without)


def test_fitted_weights_beat_equal_ones_where_they_are_fitted(
    trained: Model, corpus: TokenCorpus
) -> None:
    equal = evaluate(Model(trained.config, trained.blocks, trained.fusion), corpus.calibration)
    after = evaluate(trained, corpus.calibration)
    assert trained.pool_weights is not None and (trained.pool_weights > 0).all()
    assert after["pool"] < equal["pool"]
    assert after["fuse"] == equal["fuse"], "the fusion block has weights of its own"


def test_weights_are_fitted_on_the_slice_alone(trained: Model, corpus: TokenCorpus) -> None:
    assert trained.pool_weights is not None
    again = fit_pool_weights(Model(trained.config, trained.blocks), np.array(corpus.calibration))
    assert torch.equal(again, trained.pool_weights)
    before = [p.clone() for block in trained.blocks for p in block.parameters()]
    other = fit_pool_weights(Model(trained.config, trained.blocks), corpus.calibration[:1000])
    assert not torch.equal(other, trained.pool_weights)
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            before, (p for block in trained.blocks for p in block.parameters()), strict=True
        )
    )


def test_a_block_that_only_hurts_gets_almost_no_say(trained: Model, corpus: TokenCorpus) -> None:
    config = trained.config
    stranger = random_model(config.replace(seed=7)).blocks[0]
    torch.nn.init.normal_(stranger.head.weight, std=3.0, generator=torch.Generator().manual_seed(0))
    weights = fit_pool_weights(Model(config, [*trained.blocks[:2], stranger]), corpus.calibration)
    assert (weights > 0).all()
    assert weights[2] < 0.1 * weights[:2].min()


def test_many_weak_blocks_are_never_worse_than_equal_weights(corpus: TokenCorpus) -> None:
    """Their best weights have both signs; the positive ones are only good with the others."""
    config = tiny_config(compose="pool", blocks=12, steps=40, data_order="shared")
    blocks = train_model(config, corpus).blocks
    weights = fit_pool_weights(Model(config, blocks), corpus.calibration)
    assert (weights > 0).all() and weights.min() == pytest.approx(1e-3)
    equal, best = (
        evaluate(Model(config, blocks, None, w), corpus.calibration)["pool"]
        for w in (None, weights)
    )
    assert best < equal


def test_bits_of_a_text_under_a_block(corpus: TokenCorpus) -> None:
    block, text = MODELS["pool"].blocks[0], bytes(corpus.valid[:17])
    assert text_bits(block, text[:1], text[1:]) == pytest.approx(
        evaluate_alone(block, corpus.valid[:17], 16) / math.log(2), abs=1e-5
    )
    logp = block(block.features(torch.tensor([list(text[:-1])]))).log_softmax(-1)[0]
    assert text_bits(block, text[:-1], text[-1:]) == pytest.approx(
        -logp[-1, text[-1]].item() / math.log(2), abs=1e-5
    )
