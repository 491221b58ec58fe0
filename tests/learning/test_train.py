"""Training: stopped and continued to the bit, data order, learning rates, saved states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.config import Schedule
from blocktrain.errors import ConfigError, RunError
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.model import build_independent
from blocktrain.learning.train import REFERENCE, Trainer, pick_device
from blocktrain.schedule import learning_rate
from conftest import tiny_config

KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "next": ({}, 1),
    "reference": ({}, REFERENCE),
    "fusion": ({}, 3),
    "exact": ({"objective": "denoise", "compose": "pool"}, 2),
    "paper": ({"objective": "denoise", "compose": "euler", "skip": "edm"}, 1),
    "tail": ({"objective": "denoise", "compose": "euler", "tail": 5, "tail_share": 0.3}, 3),
    "tail of one": ({"objective": "denoise", "compose": "euler", "tail": 1}, 1),
    "bfloat16": ({"dtype": "bfloat16"}, 1),
    "bfloat16 fusion": ({"dtype": "bfloat16"}, 3),
    "highest seed": ({"objective": "denoise", "compose": "pool", "seed": 2**32 - 1}, 1),
}


def trainer_of(kind: str, **changes: Any) -> Trainer:
    settings, index = KINDS[kind]
    config = tiny_config(**{**settings, **changes})
    reads = index == config.fusion
    return Trainer(config, index, [build_independent(config, n) for n in (1, 2)] if reads else [])


def run(trainer: Trainer, corpus: TokenCorpus, until: int) -> list[float]:
    batches = corpus.batches(trainer.config, trainer.index)
    return [loss for _, loss in trainer.run(batches, until)]


def loss_of_zeros(trainer: Trainer) -> float:
    zeros = torch.zeros(4, 17, dtype=torch.long)
    return trainer._loss(zeros, trainer._draw(4)).ce.item()


def same(a: Trainer, b: Trainer) -> bool:
    mine, theirs = a.block.state_dict(), b.block.state_dict()
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_bits_whole_or_resumed(
    kind: str, corpus: TokenCorpus, tmp_path: Path
) -> None:
    whole = trainer_of(kind)
    losses = run(whole, corpus, 12)

    first = trainer_of(kind)
    before = run(first, corpus, 5)
    first.save(tmp_path / "state.safetensors")
    resumed = trainer_of(kind)
    resumed.load(tmp_path / "state.safetensors")
    assert resumed.step == 5
    torch.manual_seed(99)  # the global generator has no say
    assert before + run(resumed, corpus, 12) == losses
    assert same(resumed, whole)


def test_another_seed_or_block_gives_other_weights(corpus: TokenCorpus) -> None:
    trainers = [
        trainer_of("next"),
        trainer_of("next", seed=1),
        trainer_of("exact"),
        trainer_of("exact", seed=1),
    ]
    for trainer in trainers:
        run(trainer, corpus, 2)
    embeds = [trainer.block.embed for trainer in trainers]
    assert all(not torch.equal(a, b) for n, a in enumerate(embeds) for b in embeds[:n])


def test_noise_differs_between_blocks_and_steps(corpus: TokenCorpus) -> None:
    config = tiny_config(objective="denoise", compose="pool", data_order="shared", gamma=0.0)
    losses = set()
    for index in (1, 2):
        trainer = Trainer(config, index)
        for trainer.step in (0, 1):
            losses.add(loss_of_zeros(trainer))
    assert len(losses) == 4


def test_a_state_is_loaded_only_where_it_belongs(corpus: TokenCorpus, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    trainer_of("next").save(path)
    trainer_of("next").load(path)  # a state before the first step is one too
    for other in (Trainer(tiny_config(), 2), trainer_of("next", steps=13)):
        with pytest.raises(RunError, match="another run or block"):
            other.load(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(RunError, match="damaged"):
        trainer_of("next").load(path)
    with pytest.raises(RunError, match="cannot read"):
        trainer_of("next").load(tmp_path / "nowhere")


@pytest.mark.parametrize("kind", ["next", "fusion", "exact"])
def test_a_task_continues_from_weights_and_moments(kind: str, corpus: TokenCorpus) -> None:
    whole, first, second = trainer_of(kind), trainer_of(kind), trainer_of(kind)
    assert first.moments() == {}
    losses = run(whole, corpus, 12)
    before = run(first, corpus, 5)
    run(second, corpus, 2)  # what it had of its own is forgotten
    second.load_weights(first.weights())
    second.restore({name: moment.clone() for name, moment in first.moments().items()})
    second.step = 5
    assert before + run(second, corpus, 12) == losses
    assert same(second, whole)
    names = {name for name, _ in whole.block.named_parameters()}
    assert set(whole.weights()) == names
    assert not any("readout.heads" in name for name in names)
    with pytest.raises(RunError, match="first difference: embed"):
        second.load_weights({name: w for name, w in whole.weights().items() if name != "embed"})


def test_another_position_has_other_text_and_other_noise(corpus: TokenCorpus) -> None:
    """A replica reads on where another one ends, and repeats nothing of it."""
    settings, index = KINDS["exact"]
    config = tiny_config(**settings)
    losses = {}
    for shift in (0, 2, 300):
        trainer = Trainer(config, index, shift=shift)
        noise = loss_of_zeros(trainer)
        losses[shift] = (noise, *run(trainer, corpus, 2))
    assert len({loss[0] for loss in losses.values()}) == len({x[1] for x in losses.values()}) == 3
    trainer = Trainer(config, index, step=2)
    assert loss_of_zeros(trainer) == losses[2][0]  # the same batch, by another worker


def test_training_lowers_the_loss(corpus: TokenCorpus) -> None:
    losses = run(trainer_of("next", steps=60, learning_rate=1e-2), corpus, 60)
    assert losses[0] > 5
    assert sum(losses[-5:]) / 5 < 3


def test_a_loss_that_is_not_finite_is_a_sentence(corpus: TokenCorpus) -> None:
    trainer = trainer_of("next")
    torch.nn.init.constant_(trainer.block.embed, float("nan"))
    with pytest.raises(RunError, match="lower the learning rate"):
        run(trainer, corpus, 1)


def test_a_fusion_trainer_needs_all_it_reads() -> None:
    with pytest.raises(ConfigError, match="reads 2 blocks, 1 were given"):
        Trainer(tiny_config(), 3, [build_independent(tiny_config(), 1)])


def test_bfloat16_trains_float32_weights(corpus: TokenCorpus) -> None:
    exact, rounded = trainer_of("next"), trainer_of("bfloat16")
    losses = run(exact, corpus, 3), run(rounded, corpus, 3)
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], abs=0.1)
    assert {p.dtype for p in rounded.block.parameters()} == {torch.float32}


def test_devices_that_are_not_there_are_refused_in_a_sentence() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type in ("cpu", "cuda", "mps")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="use --device cpu"):
            pick_device("cuda:0")
    if not torch.backends.mps.is_available():
        with pytest.raises(ConfigError, match="use --device cpu"):
            pick_device("mps")


@given(st.integers(1, 500), st.integers(0, 80), st.sampled_from(["cosine", "linear", "constant"]))
def test_the_learning_rate_rises_to_its_peak_and_falls(
    steps: int, warmup: int, schedule: Schedule
) -> None:
    rates = [learning_rate(step, steps, 2.0, warmup, schedule) for step in range(steps)]
    top = min(warmup, steps // 10)
    assert all(0 < rate <= 2.0 for rate in rates)
    assert rates[top] == 2.0
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    if schedule == "constant":
        assert set(rates[top:]) == {2.0}
    else:
        assert {
            learning_rate(step, steps, 2.0, warmup, schedule)
            for step in (steps, steps + 1, 3 * steps)
        } == {0.0}
