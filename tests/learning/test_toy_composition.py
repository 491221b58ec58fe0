"""Adding a composition means adding one class: here the mean of the blocks' probabilities.

Nothing else is edited. The run is trained, evaluated, written with and served by the real code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blocktrain import config as settings
from blocktrain.config import Config, Traits
from blocktrain.errors import ConfigError
from blocktrain.learning import compose
from blocktrain.learning.compose import FanComposition, LoadBlocks, independent, register
from blocktrain.learning.corpus.source import Source
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.evaluate import evaluate
from blocktrain.learning.generate import Sampler, write
from blocktrain.learning.model import Cache, FanReadout, IndependentBlock
from blocktrain.runs import local
from blocktrain.runs.folder import create_run, load_model, read_manifest
from blocktrain.runs.reference import TrainingPlan
from blocktrain.runs.results import complete
from blocktrain.serving.entry.answer import Request
from conftest import tiny_config, train_model
from support.answers import ask
from support.jobs import run_here


class Mixture(FanComposition):
    """The mean of the blocks' probabilities (the pool takes that of their logarithms)."""

    traits = Traits("mixture", "mean of the probabilities", "fan")

    def readout(
        self, config: Config, load: LoadBlocks, pool_weights: Tensor | None = None
    ) -> FanReadout:
        return MeanReadout(independent(load(range(1, config.independent + 1))))


class MeanReadout:
    def __init__(self, blocks: list[IndependentBlock]) -> None:
        self.blocks = blocks

    def new_cache(self) -> None:
        """Nothing to remember."""

    def combine(
        self, tokens: Tensor, features: Tensor, present: Tensor, cache: Cache | None = None
    ) -> Tensor:
        probabilities = [
            block(x).softmax(-1) for block, x in zip(self.blocks, features, strict=True)
        ]
        shares = (present / present.sum(0))[:, :, None, None]
        return (torch.stack(probabilities) * shares).sum(0).log()


@pytest.fixture(autouse=True)
def _mixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compose, "COMPOSITIONS", dict(compose.COMPOSITIONS))
    before = dict(settings.TRAITS)
    register(Mixture())
    yield
    settings.TRAITS.clear()
    settings.TRAITS.update(before)


def test_it_is_named_in_settings() -> None:
    assert tiny_config(compose="mixture").independent == 3
    with pytest.raises(ConfigError, match="must be 'fuse', 'pool', 'euler' or 'mixture'"):
        tiny_config(compose="mixtures")
    with pytest.raises(ConfigError, match="skip=edm only composes by euler"):
        tiny_config(compose="mixture", objective="denoise", skip="edm")


def test_it_trains_evaluates_and_writes(corpus: TokenCorpus) -> None:
    config = tiny_config(compose="mixture", blocks=2, steps=40, learning_rate=1e-2)
    model = train_model(config, corpus)
    ce = evaluate(model, corpus.valid)
    assert set(ce) == {"composed", "block_1", "block_2", "pool", "mixture"}
    assert ce["composed"] == ce["mixture"] <= max(ce["block_1"], ce["block_2"])
    prompt, sampler = list(b"the "), Sampler(3, 0.8)
    plain = list(write(model, prompt, 24, sampler))
    swept = write(model, prompt, 24, sampler, mode="sweep", sweeps=30)
    assert list(swept) == plain, "enough sweeps end in the autoregressive text"


def test_a_run_of_it_is_trained_judged_and_served(
    tmp_path: Path, corpus_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run folder, the coordinator, the workers and the entry know nothing of it."""
    monkeypatch.setattr(local, "run_jobs", run_here)
    config = tiny_config(compose="mixture", blocks=2, steps=10)
    run = create_run(tmp_path / "run", config, str(corpus_folder))
    plan = TrainingPlan(run, config, Source(str(corpus_folder), None, tmp_path), slots=1)
    local.train_blocks(plan, lambda *_: None)
    result = complete(plan, lambda _: None)
    assert result["valid_ce"]["composed"] == result["valid_ce"]["mixture"]
    assert json.loads((run.model / "config.json").read_text())["settings"]["compose"] == "mixture"
    model = load_model(run.folder, torch.device("cpu"))
    expected = bytes(write(model, list(b"the "), 20, Sampler(5, 0.8)))
    request = Request(b"the ", 20, seed=5, temperature=0.8)
    assert ask(run.folder, request) == expected
    assert ask(run.folder, request, (1,), (2,)) == expected, "over TCP"
    assert read_manifest(run.folder).config == config
