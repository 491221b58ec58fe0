"""One dial: what a size chooses, what wins over it, and that the model is as large as it says."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from blocktrain.config import Config, make_config
from blocktrain.errors import ConfigError
from blocktrain.learning.compose import build_block
from blocktrain.shapes import model_parameters
from blocktrain.sizes import SIZES, expand_size, is_near_size, make_sized_config

ALL = tuple(SIZES)


@pytest.mark.parametrize("size", ALL)
def test_a_model_has_the_parameters_of_its_name(size: str) -> None:
    config = make_sized_config({"size": size})
    with torch.device("meta"):
        independent = build_block(config, 1)
        fusion = build_block(config, config.blocks)
    total = sum(p.numel() for p in independent.parameters()) * (config.blocks - 1)
    total += sum(p.numel() for p in fusion.parameters())
    assert total == model_parameters(config)
    assert total == pytest.approx(SIZES[size], rel=0.1)


@pytest.mark.parametrize("size", ALL)
@pytest.mark.parametrize(
    "named",
    [
        {"tokenizer": "bytes"},
        {"tokenizer": "bpe:4096"},
        {"blocks": 2},
        {"compose": "pool"},
        {"layers_per_block": 1},
    ],
    ids=str,
)
def test_what_is_not_named_still_meets_the_size(size: str, named: dict[str, Any]) -> None:
    config = make_sized_config({"size": size, **named})
    assert model_parameters(config) == pytest.approx(SIZES[size], rel=0.1)
    assert all(getattr(config, name) == value for name, value in named.items())


def test_larger_models_are_wider_deeper_and_learn_slower() -> None:
    configs = [make_sized_config({"size": size}) for size in ALL]
    for small, large in pairwise(configs):
        assert small.width < large.width
        depth = small.blocks * small.layers_per_block
        assert depth <= large.blocks * large.layers_per_block
        assert small.context <= large.context
        assert small.vocabulary <= large.vocabulary
        assert small.batch * small.context <= large.batch * large.context
        assert small.learning_rate > large.learning_rate
        assert small.fusion_learning_rate > large.fusion_learning_rate
        assert small.reference_learning_rate > large.reference_learning_rate
    for config in configs:
        text = config.steps * config.batch * config.context * config.blocks
        tokens = text / model_parameters(config)
        assert 3.9 < tokens < 21
        assert tokens > 18 or model_parameters(config) < 1e8
        assert config.rows * config.context <= 4096


def test_rates_follow_the_width_and_the_optimizer() -> None:
    narrow = make_sized_config({"size": "2M", "width": 128})
    rates = (
        narrow.learning_rate,
        narrow.fusion_learning_rate,
        narrow.reference_learning_rate,
    )
    defaults = Config()
    assert rates == (
        defaults.learning_rate,
        defaults.fusion_learning_rate,
        defaults.reference_learning_rate,
    )
    wide = make_sized_config({"size": "2M", "width": 512})
    assert wide.learning_rate == pytest.approx(narrow.learning_rate / 2, rel=0.03)
    assert wide.fusion_learning_rate == pytest.approx(narrow.fusion_learning_rate / 2, rel=0.03)
    adamw = make_sized_config({"size": "2M", "width": 512, "optimizer": "adamw"})
    assert adamw.learning_rate == pytest.approx(3.5e-3 / 4, rel=0.03)
    assert adamw.fusion_learning_rate == wide.fusion_learning_rate


def test_every_named_setting_wins() -> None:
    named = {
        "width": 48,
        "heads": 3,
        "layers_per_block": 1,
        "blocks": 3,
        "context": 32,
        "tokenizer": "bytes",
        "batch": 5,
        "micro_batch": 2,
        "steps": 7,
        "warmup": 1,
        "learning_rate": 0.01,
        "seed": 9,
    }
    config = make_sized_config({"size": "7B", **named})
    assert {name: getattr(config, name) for name in named} == named


def test_heads_that_are_named_decide_which_widths_are_possible() -> None:
    config = make_sized_config({"size": "10M", "heads": 12})
    assert config.heads == 12
    assert config.width % 24 == 0
    assert is_near_size(config, "10M")


def test_a_preset_is_counted_as_it_is() -> None:
    config = make_sized_config({"size": "10M", "tokenizer": "bytes"}, "paper")
    assert config.compose == "euler"
    assert model_parameters(config) == pytest.approx(10e6, rel=0.1)


def test_a_size_is_no_setting_of_the_run() -> None:
    sized = make_sized_config({"size": "2M"})
    spelled_out = make_config(expand_size({"size": "2M"}))
    assert "size" not in spelled_out.model_dump()
    assert spelled_out.fingerprint == sized.fingerprint
    assert make_sized_config({"size": " 2m "}) == sized
    assert make_sized_config({"width": 32}) == make_config({"width": 32})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"size": "3M"}, r"size: must be 2M, 10M, 50M, 124M, 350M, 1B or 7B \(got '3M'\)"),
        ({"size": 2}, r"size: must be 2M, .* \(got 2\)"),
        ({"size": ""}, r"size: must be 2M, .* \(got ''\)"),
        ({"size": "2M", "heads": "many"}, "heads: must be a whole number"),
        ({"size": "2M", "heads": -1}, "heads: must be at least 1"),
        ({"size": "2M", "blocks": 0}, "blocks: must be at least 1"),
        ({"size": "2M", "width": 33}, "must divide width=33 into even parts"),
        ({"size": "2M", "withd": 64}, "unknown setting 'withd'"),
        (
            {"size": "2M", "tokenizer": "bpe:300000"},
            r"size=2M cannot be met .* the nearest model has [\d,]+ parameters; name a width",
        ),
    ],
)
def test_a_wrong_size_is_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_sized_config(settings)
