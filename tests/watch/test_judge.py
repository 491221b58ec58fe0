"""Judgement of updates: what they do to the loss on text that was drawn after they were stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from blocktrain.config import Config
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.train import Trainer
from blocktrain.protocol.compression import compress
from blocktrain.protocol.tensors import Tensors, pack
from blocktrain.store.memory import MemoryStore
from blocktrain.watch.checking.judge import judge_suspects
from conftest import tiny_config

WORKERS, TASK, ROUNDS = 4, 8, 4


def add(weights: Tensors, change: Mapping[str, Any], size: float = 1.0) -> Tensors:
    return {name: w + np.float32(size) * change[name] for name, w in weights.items()}


class Replicas:
    """Honest workers of one block whose updates are averaged, at full learning rate."""

    def __init__(self, config: Config, corpus: TokenCorpus) -> None:
        self.config, self.corpus, self.blobs = config, corpus, MemoryStore().blobs
        self.trainers = [Trainer(config, 1) for _ in range(WORKERS)]
        self.version: Tensors = self.trainers[0].weights()

    def train_round(self) -> list[Tensors]:
        changes = []
        for number, trainer in enumerate(self.trainers):
            trainer.load_weights(self.version)
            trainer.shift = trainer.step * (WORKERS - 1) + TASK * number
            for _ in trainer.run(self.corpus.batches(self.config, 1), trainer.step + TASK):
                pass
            changes.append({n: w - self.version[n] for n, w in trainer.weights().items()})
        return changes

    def judge(self, *changes: Tensors) -> list[dict[str, float]]:
        payloads = [self.blobs.put(compress(change, None, "none")[0]) for change in changes]
        return self._ask([{"payload": p, "compression": "none", "base": None} for p in payloads])

    def judge_versions(self, *versions: Tensors) -> list[dict[str, float]]:
        return self._ask([{"weights": self.blobs.put(pack(version))} for version in versions])

    def _ask(self, suspects: list[dict[str, Any]]) -> list[dict[str, float]]:
        question = {
            "block": 1,
            "seed": 77,
            "weights": self.blobs.put(pack(self.version)),
            "features": {},
            "suspects": suspects,
        }
        return judge_suspects(self.config, self.blobs, self.corpus, question)


@pytest.fixture(scope="module")
def replicas(corpus: TokenCorpus) -> Iterator[tuple[Replicas, list[Tensors]]]:
    """After some rounds, with the updates of the next one."""
    rate = {"learning_rate": 4e-2, "schedule": "constant", "steps": 400}
    together = Replicas(tiny_config(blocks=1, compose="pool", batch=16, context=32, **rate), corpus)
    for _ in range(ROUNDS):
        changes = together.train_round()
        mean = {n: sum(c[n] for c in changes) / WORKERS for n in together.version}
        together.version = add(together.version, mean)
    yield together, together.train_round()


def is_left_out(verdict: dict[str, float]) -> bool:
    return verdict["gain"] < -verdict["noise"]


def test_honest_updates_pass_although_the_loss_at_their_end_is_higher(
    replicas: tuple[Replicas, list[Tensors]],
) -> None:
    """A version is a mean of several workers: lower than where each of them goes next."""
    together, changes = replicas
    start = together.judge_versions(together.version)[0]["loss"]
    judged = together.judge(*changes)
    assert any(verdict["loss"] > start for verdict in judged), "the case is there"
    assert not any(map(is_left_out, judged))
    assert all(verdict["gain"] > 0 for verdict in judged)


def test_turned_updates_are_left_out(replicas: tuple[Replicas, list[Tensors]]) -> None:
    together, changes = replicas
    turned = [{name: -w for name, w in change.items()} for change in changes]
    small = [{name: w / 4 for name, w in change.items()} for change in turned]
    assert all(map(is_left_out, together.judge(*turned, *small)))


def test_an_update_that_goes_down_and_then_far_too_far_is_left_out(
    replicas: tuple[Replicas, list[Tensors]],
) -> None:
    together, changes = replicas
    (verdict,) = together.judge({name: 40 * w for name, w in changes[0].items()})
    assert is_left_out(verdict)


def test_a_version_may_be_a_little_worse_and_not_much(
    replicas: tuple[Replicas, list[Tensors]],
) -> None:
    together, changes = replicas
    one, much = (add(together.version, changes[0], size) for size in (1.0, 40.0))
    broken = {name: np.full_like(w, np.nan) for name, w in one.items()}
    assert [*map(is_left_out, together.judge_versions(one, much, broken))] == [False, True, True]
