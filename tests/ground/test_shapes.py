"""Shapes that are counted without torch are those of the real modules, large ones included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blocktrain.config import make_config
from blocktrain.learning.compose import build_block
from blocktrain.shapes import block_parameters, block_shapes, flops_per_token, model_parameters

SMALL = {"width": 32, "heads": 2, "context": 16, "layers_per_block": 2, "z_width": 24}
VARIANTS: dict[str, dict[str, Any]] = {
    "fuse": {},
    "two blocks": {"blocks": 2},
    "pool": {"compose": "pool"},
    "denoise": {"objective": "denoise", "compose": "pool"},
    "paper": {"objective": "denoise", "skip": "edm", "compose": "euler"},
    "tail": {"objective": "denoise", "compose": "euler", "tail": 4},
    "tokens": {"tokenizer": "bpe:1000"},
    "large vocabulary": {"tokenizer": "bpe:4096"},
    "large, paper": {
        "objective": "denoise",
        "skip": "edm",
        "compose": "euler",
        "tokenizer": "bpe:4096",
    },
    "full tables": {"tokenizer": "bpe:4096", "embedding": "full"},
    "lookback": {"lookback": 1, "tokenizer": "bpe:4096"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_shapes_are_those_of_the_modules(name: str) -> None:
    config = make_config({**SMALL, **VARIANTS[name]})
    with torch.device("meta"):
        blocks = {index: build_block(config, index) for index in range(1, config.blocks + 1)}
    for index, block in blocks.items():
        real = {name: tuple(p.shape) for name, p in block.named_parameters()}
        assert block_shapes(config, index) == real
        assert block_parameters(config, index) == sum(p.numel() for p in block.parameters())
    assert model_parameters(config) == sum(
        p.numel() for block in blocks.values() for p in block.parameters()
    )


def test_flops_count_what_products_need() -> None:
    config = make_config({**SMALL, "blocks": 4})
    layers = 2 * (12 * 32**2 + 32 * 16)
    assert flops_per_token(config, 1) == 6 * (layers + 32 * 256)
    fusion = 6 * (layers + 3 * 3 * 32**2) + 4 * 3 * 32 * 256 + 2 * 3 * layers
    assert flops_per_token(config, 4) == fusion
    path = {"objective": "denoise", "compose": "euler", "training_z": "path"}
    walker = make_config({**SMALL, **path, "blocks": 4})
    assert flops_per_token(walker, 3) == flops_per_token(walker, 1) * (6 + 2 * 2) / 6
