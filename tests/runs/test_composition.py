"""The composed model is whatever scores best on the calibration slice, wherever it is used."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from blocktrain.errors import RunError
from blocktrain.learning.compose import Model
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.evaluate import evaluate
from blocktrain.learning.generate import Sampler, write
from blocktrain.learning.pool import choose_composition
from blocktrain.runs.folder import load_model, read_manifest
from blocktrain.runs.results import fit_and_seal
from blocktrain.runs.served import RunModel
from blocktrain.serving.entry.answer import Request
from support.answers import ask
from support.serving import saved

CPU = torch.device("cpu")


@pytest.fixture
def spoiled(trained: Model) -> Model:
    """The same blocks with a fusion block that does harm."""
    fusion = copy.deepcopy(trained.fusion)
    assert fusion is not None
    for parameter in fusion.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    return replace(trained, fusion=fusion, compose="")


def publish_sealed(model: Model, folder: Path, corpus: TokenCorpus) -> Path:
    saved(model, folder)
    manifest = read_manifest(folder)
    fit_and_seal(manifest.run, model.config, "tiny", corpus.calibration)
    return folder


def test_the_fusion_block_is_used_where_it_is_better(
    trained: Model, corpus: TokenCorpus, tmp_path: Path
) -> None:
    choice = choose_composition(trained, corpus.calibration)
    assert choice.name == "fuse" and choice.scores["fuse"] < choice.scores["pool"]
    assert choice.reason.startswith("fuse is best on ")
    folder = publish_sealed(trained, tmp_path / "run", corpus)
    assert read_manifest(folder).compose == load_model(folder, CPU).compose == "fuse"
    assert RunModel(folder).load_readout().__class__.__name__ == "FusionBlock"


def test_the_pool_is_used_where_the_fusion_block_does_harm(
    spoiled: Model, corpus: TokenCorpus, tmp_path: Path
) -> None:
    folder = publish_sealed(spoiled, tmp_path / "run", corpus)
    manifest, model = read_manifest(folder), load_model(folder, CPU)
    assert manifest.config.compose == "fuse" and manifest.compose == model.compose == "pool"
    scores = manifest.composition["nats_per_token"]
    assert scores["pool"] < scores["fuse"] and "pool is best" in manifest.composition["reason"]
    ce = evaluate(model, corpus.valid)
    assert ce["composed"] == ce["pool"] < ce["fuse"]

    config = model.config.replace(compose="pool", blocks=model.config.independent)
    pool = Model(config, model.blocks, pool_weights=model.pool_weights)
    texts = [list(write(m, [65, 66], 20, Sampler(3, 0.8))) for m in (model, pool)]
    assert texts[0] == texts[1]


def test_an_entry_of_a_pool_needs_no_fusion_block(
    spoiled: Model, corpus: TokenCorpus, tmp_path: Path
) -> None:
    folder = publish_sealed(spoiled, tmp_path / "run", corpus)
    expected = bytes(write(load_model(folder, CPU), [65, 66], 12, Sampler(3, 0.8)))
    (folder / "model" / f"block-{spoiled.config.fusion}.safetensors").unlink()
    assert ask(folder, Request(b"AB", 12, seed=3, temperature=0.8), (2, 3)) == expected
    assert RunModel(folder).compose == "pool"


def test_a_short_slice_compares_nothing(trained: Model) -> None:
    short = np.zeros(trained.config.context + 2, np.uint8)
    choice = choose_composition(trained, short)
    assert choice.name == "fuse" and not choice.scores and "nothing else" in choice.reason


def test_a_foreign_composition_is_refused(
    trained: Model, corpus: TokenCorpus, tmp_path: Path
) -> None:
    folder = publish_sealed(trained, tmp_path / "run", corpus)
    path = folder / "model" / "config.json"
    content = json.loads(path.read_text())
    for wrong in ({"name": "euler"}, {"name": 3}, [1]):
        path.write_text(json.dumps({**content, "composition": wrong}))
        with pytest.raises(RunError, match="composition must name fuse or pool"):
            read_manifest(folder)
