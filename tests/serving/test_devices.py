"""Nothing stays on the processor when a model is on another device: training, text, serving."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from blocktrain.learning.compose import Model, composition_of
from blocktrain.learning.evaluate import evaluate
from blocktrain.learning.generate import Mode, Sampler, write
from blocktrain.learning.model import IndependentBlock, target_table
from blocktrain.serving.blocks import EulerSteps, FanBlocks, ReferenceLayers, Rows
from blocktrain.serving.entry.drafting import DraftBlock
from blocktrain.serving.entry.fan import Fusion
from conftest import random_model, tiny_config
from support.other_device import OTHER, other_device

DENOISE: dict[str, Any] = {"objective": "denoise", "compose": "euler", "tail": 4}
KINDS: dict[str, dict[str, Any]] = {
    "fuse": {},
    "pool": {"compose": "pool"},
    "exact": {"objective": "denoise", "compose": "pool"},
    "euler": DENOISE,
    "edm": {**DENOISE, "skip": "edm"},
}
TEXT = np.random.default_rng(0).integers(0, 256, 70).astype(np.uint8)


def move(model: Model) -> Model:
    """The same model on the other device."""
    blocks = model.select(range(1, model.config.blocks + 1))
    moved = {number: block.to(OTHER) for number, block in blocks.items()}
    return composition_of(model.config).assemble(model.config, moved)


def test_the_other_device_is_strict() -> None:
    with other_device() as device:
        there = torch.ones(3, device=device)
        assert (there + torch.ones(3).to(device)).cpu().tolist() == [2, 2, 2]
        with pytest.raises(RuntimeError, match="same device"):
            there + torch.ones(3)


@pytest.mark.parametrize("kind", KINDS)
def test_losses(kind: str) -> None:
    config = tiny_config(**KINDS[kind])
    tokens = torch.from_numpy(TEXT[:68].astype(np.int64)).view(4, 17)
    losses = []
    for device in ("cpu", OTHER):
        with other_device():
            model = random_model(config)
            model = move(model) if device == OTHER else model
            composition, table = composition_of(config), target_table(config).to(device)
            for index, block in model.select(range(1, config.blocks + 1)).items():
                draws = composition.draw(block, config, 4, torch.Generator().manual_seed(1))
                loss = composition.loss(
                    block,
                    model.blocks,
                    tokens.to(device),
                    draws.of(slice(0, 4), torch.device(device)),
                    config=config,
                    index=index,
                    table=table,
                )
                losses.append(loss.total.item())
    half = len(losses) // 2
    assert losses[:half] == pytest.approx(losses[half:], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_and_text(kind: str) -> None:
    config = tiny_config(**KINDS[kind])
    here = random_model(config)
    modes: list[Mode] = ["autoregressive"]
    if kind not in ("euler", "edm"):
        modes += ["exact", "sweep"]
    prompt, sampler = TEXT[:9].tolist(), Sampler(3, 0.8)
    expected = evaluate(here, TEXT, draws=2)["composed"]
    texts = [list(write(here, prompt, 12, sampler, mode=mode)) for mode in modes]
    if config.tail:
        texts.append(list(write(here, prompt, 12, sampler, mode="sweep", draft="none")))
    with other_device():
        there = move(here)
        assert evaluate(there, TEXT, draws=2)["composed"] == pytest.approx(expected, rel=1e-5)
        again = [list(write(there, prompt, 12, sampler, mode=mode)) for mode in modes]
        if config.tail:
            again.append(list(write(there, prompt, 12, sampler, mode="sweep", draft="none")))
    assert again == texts


@pytest.mark.parametrize("kind", ["fuse", "pool", "exact"])
def test_a_fan_of_stages_drafts_and_fuses(kind: str) -> None:
    config = tiny_config(**KINDS[kind])
    here = random_model(config)
    ids = tuple(TEXT[:9].tolist())

    def answer(model: Model) -> list[float]:
        blocks = dict(enumerate(model.blocks, 1))
        served = FanBlocks(config, blocks, "")
        tokens = torch.tensor([ids]).to(served.device)
        numbers = tuple(blocks)
        (features,) = served.work([Rows(served.fresh(numbers), numbers, 0, tokens, wanted=9)])
        readout = composition_of(config).readout(config, model.select, None)
        fusion = Fusion(readout, served.device)
        logits = fusion.read(ids, 0, features.cpu(), (True,) * len(blocks))
        draft = DraftBlock(config, served)
        draft.read(ids, 0)
        return [*logits[-1].tolist(), *draft.read(ids[:1], 9).tolist()]

    expected = answer(here)
    with other_device():
        assert answer(move(here)) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_rings_of_stages() -> None:
    config = tiny_config(**DENOISE)
    here = random_model(config)
    z = torch.randn(1, 9, config.z_width, generator=torch.Generator().manual_seed(0))
    tokens = torch.from_numpy(TEXT[None, :9].astype(np.int64))

    def answers(model: Model) -> list[float]:
        steps = EulerSteps(config, dict(enumerate(model.blocks, 1)), "")
        ring = Rows(None, (1, 2, 3), 0, tokens.to(steps.device), z.to(steps.device), wanted=2)
        block: IndependentBlock = model.blocks[0]
        layers = ReferenceLayers(config.replace(blocks=1, tail=0), block, [1], "")
        rows = Rows(layers.fresh((1,)), (1,), 0, tokens.to(layers.device), wanted=2)
        return [t.sum().item() for t in (*steps.work([ring]), *layers.work([rows]))]

    expected = answers(here)
    with other_device():
        assert answers(move(here)) == pytest.approx(expected, rel=1e-4)
