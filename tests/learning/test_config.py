"""Settings: every rule, sentences for wrong ones, TOML there and back, fingerprint, presets."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from blocktrain.config import DERIVED, PRESETS, Config, make_config, read_toml
from blocktrain.errors import ConfigError

FIRST_RELEASE = "ddbb384af72902d0d8bbc79724cc1bf2d573c79bf2a9bf3eccc615c95558beab"
DENOISE = {"objective": "denoise", "compose": "euler"}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"width": 96, "heads": 5}, "heads=5 must divide width=96 into even parts; try heads=4"),
        ({"width": 97, "heads": 4}, "try width=98 with heads=1"),
        ({"sigma_min": 10.0}, "sigma_min=10.0 must be below sigma_max=10.0"),
        ({"p_mean": -60.0}, "leave no noise between sigma_min and sigma_max"),
        ({"compose": "euler"}, "compose=euler needs objective=denoise"),
        (
            {"compose": "pool", "objective": "denoise", "skip": "edm"},
            "skip=edm only composes by euler",
        ),
        ({"blocks": 1}, "compose=fuse needs at least 2 blocks"),
        ({"objective": "denoise"}, "compose=fuse needs objective=next"),
        ({"tail": 8}, "tail needs objective=denoise"),
        ({**DENOISE, "tail": 128}, "tail=128 must be shorter than context=128"),
        (
            {**DENOISE, "tail": 8, "tail_sigma_min": 11.0},
            "tail_sigma_min=11.0 must be below sigma_max=10.0",
        ),
        ({"training_z": "path"}, "training_z=path needs compose=euler"),
        ({**DENOISE, "tail": 8, "training_z": "path"}, "tail needs training_z=target"),
        *(
            ({"noise_edges": wrong}, sentence)
            for wrong, sentence in (
                ("loss", "noise_edges: must be mass or rising noise levels, as in 1.5,2.5,5"),
                ("", "must be mass or rising noise levels"),
                ("1.5,,5", "must be mass or rising noise levels"),
                ("1.5,nan,5", "must be mass or rising noise levels"),
                ("2,5", "noise_edges=2,5 must be 3 levels, one between any two of 4 blocks"),
                ("2,5,4", "noise_edges=2,5,4 must rise from sigma_min=1.0 to sigma_max=10.0"),
                ("2,5,10", "must rise from sigma_min=1.0 to sigma_max=10.0"),
                ("1,2,5", "must rise from sigma_min=1.0 to sigma_max=10.0"),
            )
        ),
    ],
)
def test_settings_that_do_not_agree(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_config(settings)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"blocks": 0},
        {"layers_per_block": 0},
        {"width": 4},
        {"context": 4},
        {"lookback": 0},
        {"z_width": 1},
        {"feature_dropout": 1.0},
        {"gamma": -0.1},
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"sigma_max": float("inf")},
        {"p_mean": float("nan")},
        {"seed": -1},
        {"seed": 2**32},
        {"steps": 0},
        {"steps": "500"},
        {"steps": 1.5},
        {"batch": True},
        {"device": "tpu"},
        {"dtype": "float16"},
        {"schedule": "step"},
        {"objective": "mask"},
    ],
)
def test_a_setting_that_makes_no_sense_is_named_with_its_value(settings: dict[str, Any]) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(ConfigError, match=rf"^{name}: .*\(got {value!r}\)"):
        make_config(settings)


def test_an_unknown_setting_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown setting 'widht'; known settings: data, .*blocks, .*width",
    ):
        make_config({"widht": 3})


def test_several_errors_are_reported_at_once() -> None:
    with pytest.raises(ConfigError, match=r"blocks: .*; steps: "):
        make_config({"blocks": 0, "steps": 0})


def test_a_suggested_number_of_heads_is_accepted() -> None:
    for width in range(8, 60):
        for heads in (1, 3, 7, 64):
            try:
                make_config({"width": width, "heads": heads})
            except ConfigError as error:
                tried = str(error).rpartition("try ")[2].replace(" with", "").split()
                make_config(
                    {
                        "width": width,
                        **{name: int(value) for name, value in (pair.split("=") for pair in tried)},
                    }
                )


def test_settings_cannot_be_changed_in_place() -> None:
    with pytest.raises(ValidationError):
        Config().width = 3


def test_presets() -> None:
    paper = make_config({}, preset="paper")
    assert (paper.objective, paper.skip, paper.compose) == ("denoise", "edm", "euler")
    assert paper.start == "zero"
    assert make_config({"start": "noise"}, preset="paper").start == "noise"
    assert make_config({"skip": "exact"}, preset="paper").skip == "exact", "what is named wins"
    for preset in PRESETS:
        make_config({}, preset=preset)
    with pytest.raises(ConfigError, match=r"unknown preset 'best'; known: .*paper"):
        make_config({}, preset="best")


def test_replace_validates_again() -> None:
    assert Config().replace(width=32).width == 32
    with pytest.raises(ConfigError, match="must divide"):
        Config().replace(heads=7)


def test_how_many_blocks_read_only_bytes() -> None:
    assert Config(blocks=4).independent == 3
    assert Config(blocks=4, compose="pool").independent == 4


@given(
    st.fixed_dictionaries(
        {
            "width": st.integers(1, 20).map(lambda n: 8 * n),
            "context": st.integers(8, 999),
            "learning_rate": st.floats(1e-9, 1),
            "p_std": st.floats(0.5, 5),
            "seed": st.integers(0, 2**32 - 1),
            "compose": st.sampled_from(["fuse", "pool"]),
        }
    )
)
def test_toml_there_and_back(settings: dict[str, Any]) -> None:
    config = make_config(settings)
    again = make_config(tomllib.loads(tomli_w.dumps(config.model_dump())))
    assert again == config
    assert again.fingerprint == config.fingerprint


def test_the_fingerprint_is_stable_and_hears_every_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("blocktrain.config.TOKENIZERS", {"bytes": 256, "other": 256})
    config = make_config({"objective": "denoise", "compose": "euler", "tail": 2})
    assert (
        config.fingerprint == make_config(dict(reversed(config.model_dump().items()))).fingerprint
    )
    assert len(config.fingerprint) == 64
    assert Config(sigma_min=1).fingerprint == Config(sigma_min=1.0).fingerprint
    changes: dict[str, Any] = {
        "objective": "next",
        "compose": "pool",
        "skip": "edm",
        "schedule": "linear",
        "fusion_schedule": "cosine",
        "data_order": "shared",
    }
    changes |= {
        "device": "auto",
        "dtype": "bfloat16",
        "heads": 2,
        "optimizer": "adamw",
        "fusion_optimizer": "adamw",
        "tokenizer": "other",
        "embedding": "full",
        "checkpoint_activations": True,
        "compile": True,
        "noise_edges": "2,3,5",
        "training_z": "path",
        "noise_scale": "random",
        "start": "zero",
    }
    seen = {config.fingerprint}
    for name in Config.model_fields:
        value = getattr(config, name)
        other: dict[str, Any] = {
            name: changes[name] if name in changes else value * 2 if value else 1
        }
        if name == "training_z":
            other |= {"tail": 0}
        if name in ("objective",):
            other |= {"compose": "pool", "tail": 0}
        if name in DERIVED:
            other = {"tokenizer": "gpt2", name: {"vocabulary": 512}.get(name, "0" * 64)}
        seen.add(config.replace(**other).fingerprint)
    assert len(seen) == 1 + len(Config.model_fields)


def test_a_setting_that_was_added_later_keeps_the_fingerprint_of_older_runs() -> None:
    """The number is the one that the first release gave."""
    assert "tokenizer" not in Config().model_dump()
    assert make_config({"tokenizer": "bytes"}).model_dump() == Config().model_dump()
    defaults_then = Config(
        optimizer="adamw",
        learning_rate=3.5e-3,
        fusion_learning_rate=1e-3,
        reference_learning_rate=2e-3,
    )
    assert defaults_then.fingerprint == FIRST_RELEASE


@pytest.mark.parametrize(
    ("settings", "known"),
    [
        ({"compose": "stack"}, "compose: must be 'fuse', 'pool' or 'euler' (got 'stack')"),
        (
            {"tokenizer": "two words"},
            "tokenizer: must be bytes, bpe:N, the path of a tokenizer.json, or a name on the "
            "Hugging Face hub (got 'two words')",
        ),
        *(
            (
                {"tokenizer": wrong},
                "tokenizer: must be bpe:N with N from 300 to 1,000,000, as in bpe:4096 "
                f"(got {wrong!r})",
            )
            for wrong in ("bpe:299", "bpe:1000001", "bpe", "bpe:4k", "bpe:-5", "bpe:٣٠٠٠")
        ),
        ({"vocabulary": 300}, "tokenizer=bytes has 256 tokens and no tokenizer_hash"),
        (
            {"tokenizer_hash": "0" * 64},
            "tokenizer=bytes has 256 tokens and no tokenizer_hash",
        ),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(
    settings: dict[str, Any], known: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        make_config(settings)
    assert str(refused.value) == known


def test_a_tokenizer_brings_its_vocabulary() -> None:
    learned = make_config({"tokenizer": "bpe:4096"})
    assert (learned.vocabulary, learned.tokenizer_hash) == (4096, "")
    resolved = learned.replace(tokenizer_hash="a" * 64, vocabulary=4000)
    assert resolved.replace(width=64).vocabulary == 4000, "it stays with its tokenizer"
    assert resolved.replace(tokenizer="bytes").model_dump() == Config().model_dump()
    assert make_config(resolved.model_dump()) == resolved
    for name in ("gpt2", "org/model@main", "some/where/tokenizer.json", "./here", "~/models/x"):
        assert make_config({"tokenizer": name}).tokenizer == name


def test_the_fusion_block_is_the_last_one() -> None:
    assert (Config(blocks=4).fusion, Config(blocks=4).reads(4), Config(blocks=4).reads(3)) == (
        4,
        3,
        0,
    )
    assert Config(blocks=4, compose="pool").fusion is None


def test_settings_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("width = 32\nsigma_min = 2\n")
    assert make_config(read_toml(path)).sigma_min == 2.0
    path.write_text("width = ")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        read_toml(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        read_toml(path)
    with pytest.raises(ConfigError, match="cannot read the settings file"):
        read_toml(tmp_path / "nowhere.toml")


def test_every_setting_has_a_help_text() -> None:
    assert all(field.description for field in Config.model_fields.values())
