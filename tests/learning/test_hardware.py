"""What a machine may do otherwise: micro-batches, checkpointed activations, bfloat16.

Each changes speed and memory, and the result by rounding at most.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from blocktrain.errors import ConfigError
from blocktrain.learning.compose import Model
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.train import REFERENCE, Trainer
from conftest import random_model, tiny_config

KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "next": ({}, 1),
    "muon": ({"optimizer": "muon"}, 1),
    "fusion": ({"feature_dropout": 0.4}, 3),
    "exact": ({"objective": "denoise", "compose": "pool"}, 2),
    "tail": ({"objective": "denoise", "compose": "euler", "skip": "edm", "tail": 5}, 1),
    "reference": ({}, REFERENCE),
}


def trainer_of(kind: str, **changes: Any) -> Trainer:
    """A block with random weights everywhere: also what starts at zero has gradients."""
    settings, index = KINDS[kind]
    config = tiny_config(layers_per_block=2, batch=7, **{**settings, **changes})
    model = random_model(config)
    trainer = Trainer(config, index, model.blocks if index == config.fusion else [])
    if index != REFERENCE:
        trainer.block.load_state_dict(block_of(model, index).state_dict())
    return trainer


def block_of(model: Model, index: int) -> torch.nn.Module:
    return model.select([index])[index]


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in trainer.block.named_parameters() if p.grad is not None}


def train(trainer: Trainer, corpus: TokenCorpus, steps: int) -> list[float]:
    batches = corpus.batches(trainer.config, trainer.index)
    return [loss for _, loss in trainer.run(batches, steps)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3])
def test_accumulated_gradients_are_those_of_the_whole_batch(
    kind: str, rows: int, corpus: TokenCorpus
) -> None:
    whole, parts = trainer_of(kind), trainer_of(kind, micro_batch=rows)
    assert train(whole, corpus, 1) == pytest.approx(train(parts, corpus, 1), rel=1e-6)
    expected = gradients(whole)
    for name, gradient in gradients(parts).items():
        assert (gradient - expected[name]).norm() <= 1e-6 * expected[name].norm(), name
    assert train(whole, corpus, 6) == pytest.approx(train(parts, corpus, 6), rel=1e-4)


@pytest.mark.parametrize("rows", [0, 7, 100])
def test_a_micro_batch_of_the_whole_batch_changes_no_bit(rows: int, corpus: TokenCorpus) -> None:
    whole, other = trainer_of("fusion"), trainer_of("fusion", micro_batch=rows)
    assert train(whole, corpus, 3) == train(other, corpus, 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpointed_activations_change_no_bit(kind: str, dtype: str, corpus: TokenCorpus) -> None:
    plain = trainer_of(kind, dtype=dtype)
    checkpointed = trainer_of(kind, dtype=dtype, checkpoint_activations=True)
    assert train(plain, corpus, 3) == train(checkpointed, corpus, 3)
    theirs = checkpointed.block.state_dict()
    assert all(torch.equal(t, theirs[name]) for name, t in plain.block.state_dict().items())


def test_without_a_compiler_compile_is_refused_in_a_sentence() -> None:
    import torch._inductor.config as inductor

    missing = inductor.patch({"cpp.cxx": ("no-such-compiler",)})
    with (
        missing,
        pytest.raises(ConfigError, match=r"needs a C\+\+ compiler .* leave --compile out"),
    ):
        trainer_of("next", compile=True)


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_compiled_layers_repeat_their_bits(corpus: TokenCorpus) -> None:
    """As plain ones to rounding, and to the bit when they are compiled again."""
    more: dict[str, Any] = {"micro_batch": 3, "checkpoint_activations": True}
    plain = trainer_of("fusion", **more)
    first, second = (trainer_of("fusion", compile=True, **more) for _ in range(2))
    losses = train(first, corpus, 2)
    torch._dynamo.reset()  # as in another process
    assert train(second, corpus, 2) == losses
    assert train(plain, corpus, 2) == pytest.approx(losses, rel=1e-5)
    theirs = second.weights()
    assert all((w == theirs[name]).all() for name, w in first.weights().items())


def test_settings_that_change_nothing_keep_the_fingerprint() -> None:
    plain = tiny_config()
    assert "micro_batch" not in plain.model_dump()
    assert plain.fingerprint != tiny_config(micro_batch=2).fingerprint
    assert plain.fingerprint != tiny_config(checkpoint_activations=True).fingerprint
