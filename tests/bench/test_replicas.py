"""One model that several workers train in rounds, in one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from blocktrain.bench.quality import replicas
from blocktrain.bench.quality.replicas import Replicas
from blocktrain.config import Config
from blocktrain.errors import RunError
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.train import block_weights
from conftest import tiny_config


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(replicas, "TASK_STEPS", 2)
    return tiny_config(blocks=2, compose="pool", steps=5)


def test_a_stop_between_rounds_changes_nothing(
    config: Config, corpus: TokenCorpus, tmp_path: Path
) -> None:
    batches = corpus.batches(config, 1)
    whole, first = Replicas(config, 1, 3), Replicas(config, 1, 3)
    while whole.step < config.steps:
        assert all(np.isfinite(list(whole.train_round(batches))))
    list(first.train_round(batches))
    first.save(tmp_path / "state")
    resumed = Replicas(config, 1, 3)
    resumed.load(tmp_path / "state")
    while resumed.step < config.steps:
        list(resumed.train_round(batches))
    expected = block_weights(whole.block)
    for name, weights in block_weights(resumed.block).items():
        assert np.array_equal(weights, expected[name]), name
    with pytest.raises(RunError, match="of other settings"):
        Replicas(config.replace(seed=9), 1, 3).load(tmp_path / "state")


def test_workers_read_different_batches_and_all_of_them(
    config: Config, corpus: TokenCorpus
) -> None:
    read: list[int] = []
    batches = corpus.batches(config, 1)

    def remember(number: int) -> npt.NDArray[np.int64]:
        read.append(number)
        return batches(number)

    workers = Replicas(config, 1, 3)
    while workers.step < config.steps:
        list(workers.train_round(remember))
    assert sorted(read) == list(range(15)), "five steps of three workers"
