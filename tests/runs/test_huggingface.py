"""A run for `transformers`: the same logits and the same text, without BlockTrain."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from blocktrain.config import Config
from blocktrain.errors import ConfigError, RunError
from blocktrain.learning.compose import Model
from blocktrain.learning.generate import Sampler, write
from blocktrain.learning.pool import CompositionChoice
from blocktrain.learning.tokenizer import load_tokenizer, tokenizer_of
from blocktrain.learning.vocabulary import settings_with, train_bpe
from blocktrain.runs.folder import RunFolder, load_model, seal
from blocktrain.runs.huggingface.export import export_run
from blocktrain.runs.huggingface.tokenizer import pad_id, write_tokenizer
from blocktrain.runs.huggingface.weights import write_weights
from blocktrain.serving.chat_template import default_template
from conftest import random_model, tiny_config, write_text
from support.command import blocktrain
from support.serving import saved
from support.tokenizer_files import byte_level, edited, metaspace, sentencepiece

CPU = torch.device("cpu")
SCRIPT = Path(__file__).parents[1] / "support" / "load_export.py"
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "huggingface.md"
TEXTS = ("", "plain", "Ā is no control character, <|pad|> no padding\n", "\x00\r\n東京 🙂  ")
PROMPTS = ("the amber ", "t", "a prompt that is far longer than the context of this model")


def save_run(folder: Path, model: Model) -> Path:
    """A finished run of this model, with pool weights that are not equal."""
    if model.config.predicts_without_noise:
        model.pool_weights = torch.linspace(0.5, 1, model.config.independent)
    return saved(model, folder)


def expectations(folder: Path) -> dict[str, Any]:
    """What `transformers` must find, computed by BlockTrain."""
    model = load_model(folder, CPU)
    tokenizer, context = tokenizer_of(model.config), model.config.context

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text.encode()).tolist()

    window = ids("the amber meets the birch by the cedar.\n" * 9)[:context]
    tokens = torch.tensor([window])
    logits = model.scorer()(tokens, 0)
    return {
        "ids": {text: ids(text) for text in TEXTS},
        "window": window,
        "logits": logits[0].tolist(),
        "loss": F.cross_entropy(logits[0, :-1], tokens[0, 1:]).item(),
        "count": 3 * context,
        "texts": {
            prompt: list(write(model, ids(prompt), 3 * context, Sampler(temperature=0)))
            for prompt in PROMPTS
        },
    }


def test_transformers_loads_an_export_without_blocktrain(tmp_path: Path) -> None:
    bpe = load_tokenizer(train_bpe(write_text(200, seed=3).encode(), 300))
    fused = tiny_config(tokenizer="bpe:300", embedding="shared")
    models = {
        "bytes": random_model(tiny_config(compose="pool")),
        "bpe": random_model(settings_with(fused, bpe)),
    }
    for name, model in models.items():
        run = save_run(tmp_path / f"{name}-run", model)
        export_run(run, tmp_path / name)
        (tmp_path / f"{name}.json").write_text(json.dumps(expectations(run)))
    done = subprocess.run(
        [sys.executable, "-I", SCRIPT, GUIDE, *(tmp_path / name for name in models)],
        env={**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.stdout.endswith("as expected\n"), done.stdout + done.stderr


def variants() -> Iterator[Config]:
    """Every setting with another value, with a pool if fusion does not go with it: a setting that
    changes what blocks compute, and that the export does not know, changes the logits."""
    changes: list[dict[str, Any]] = [
        {"compose": "pool"},
        {"objective": "denoise", "tail": 4},
        {"blocks": 2, "lookback": 1, "heads": 1},
        {"embedding": "shared", "lookback": 1},
        {"embedding": "shared", "compose": "pool"},
    ]
    small = tiny_config().model_dump()
    for name, field in Config.model_fields.items():
        values: tuple[Any, ...] = ()
        if get_origin(field.annotation) is Literal:
            values = get_args(field.annotation)
        elif isinstance(field.default, bool):
            values = (not field.default,)
        elif isinstance(field.default, int):
            values = (field.default * 2 or 1,)
        changes += [{name: value} for value in values if value != small.get(name)]
    for change in changes:
        for more in ({}, {"compose": "pool"}):
            with suppress(ConfigError):
                yield tiny_config(**{**more, **change})
                break


def test_every_setting_that_changes_the_model_is_known_to_the_export(tmp_path: Path) -> None:
    from blocktrain.runs.huggingface.exported.configuration_blocktrain import BlockTrainConfig
    from blocktrain.runs.huggingface.exported.modeling_blocktrain import BlockTrainForCausalLM

    checked = 0
    for number, config in enumerate(variants()):
        run = save_run(tmp_path / str(number), random_model(config))
        export_run(run, run / "hf")
        settings = json.loads((run / "hf" / "config.json").read_text())
        model = BlockTrainForCausalLM(BlockTrainConfig(**settings)).eval()
        model.load_state_dict(load_file(run / "hf" / "model.safetensors"))
        tokens = torch.arange(config.context)[None] % tokenizer_of(config).vocabulary
        with torch.no_grad():
            logits = load_model(run, CPU).scorer()(tokens, 0)
            assert torch.allclose(model(tokens).logits, logits, atol=1e-5), config
        checked += 1
    assert checked > 20


def test_large_weights_are_several_files(tmp_path: Path) -> None:
    tensors = {f"t{n}": torch.full((10,), float(n)) for n in range(5)}
    write_weights(tmp_path, [dict([pair]) for pair in tensors.items()], largest=80)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 200
    assert {p.name for p in tmp_path.glob("*.safetensors")} == {
        f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)
    }
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("runs") / "run", random_model(tiny_config()))


def test_an_export_follows_the_composition_that_scored_best(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    model = load_model(folder, CPU)
    seal(
        RunFolder(folder),
        model.config,
        "stdlib",
        torch.tensor([0.4, 0.7]),
        CompositionChoice("pool", {"fuse": 2.0, "pool": 1.0}, 100),
    )
    export_run(folder, tmp_path / "hf")
    settings = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert settings["fusion"] is False and settings["num_hidden_layers"] == 2
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(weights["pool_weights"], torch.tensor([0.4, 0.7]))
    assert not [name for name in weights if name.startswith("fusion")]


def test_equal_models_are_equal_files(run: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        export_run(run, tmp_path / name, name="the-model")
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("one", "two")
    )
    assert first == second
    card = first["README.md"].decode()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert 'from_pretrained("the-model", trust_remote_code=True)' in card


def lose_the_manifest(folder: Path) -> None:
    (folder / "model" / "config.json").unlink()


def damage_a_block(folder: Path) -> None:
    path = folder / "model" / "block-2.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lose_the_manifest, "has no finished model: its training is not finished"),
        (damage_a_block, "block-2.safetensors is damaged or foreign"),
        (lambda folder: (folder / "hf").mkdir(), "is there already; name a new folder with --out"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_leaves_nothing(
    run: Path, tmp_path: Path, damage: Callable[[Path], None], sentence: str
) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    damage(folder)
    if (folder / "hf").exists():
        (folder / "hf" / "mine").touch()
    before = sorted(folder.rglob("*"))
    with pytest.raises(RunError, match=re.escape(sentence)):
        export_run(folder, folder / "hf")
    assert sorted(folder.rglob("*")) == before


def test_an_export_has_a_chat_template_that_works(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    template = folder / "model" / "chat_template.jinja"
    template.unlink()
    export_run(folder, tmp_path / "default")
    kept = (tmp_path / "default" / "chat_template.jinja").read_text()
    assert kept == default_template().source
    template.write_text("{% for message in messages %}")
    with pytest.raises(ConfigError, match="is not a Jinja template"):
        export_run(folder, tmp_path / "broken")
    assert not (tmp_path / "broken").exists()


def test_a_model_that_needs_noise_is_refused(tmp_path: Path) -> None:
    model = random_model(tiny_config(objective="denoise", compose="euler"))
    with pytest.raises(ConfigError, match=r"composed by euler.*train with --compose fuse or"):
        export_run(save_run(tmp_path / "run", model), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_killed_export_leaves_no_folder_that_looks_whole(run: Path, tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from blocktrain.runs.huggingface import export
def die(share):
    if share > 0:
        os.kill(os.getpid(), signal.SIGKILL)
export.export_run(Path(sys.argv[1]), Path(sys.argv[2]), progress=die)
"""
    out = tmp_path / "hf"
    done = subprocess.run([sys.executable, "-c", code, run, out], check=False)
    assert done.returncode == -signal.SIGKILL and not out.exists()
    export_run(run, out)
    assert (out / "model.safetensors").exists()


def test_the_command_says_where_the_folder_is(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    done = blocktrain("export", "run", "--format", "hf", "--json", cwd=tmp_path)
    assert json.loads(done.stdout) == {"run": "run", "format": "hf", "out": "run/hf"}
    assert (folder / "hf" / "tokenizer.json").exists()
    done = blocktrain("export", "run", "--format", "hf", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    sentence = "blocktrain: run/hf is there already; name a new folder with --out"
    assert done.stderr.strip() == sentence


def with_strip() -> bytes:
    """As Llama's: what is written loses the space that was put in front."""
    decoder = json.loads(sentencepiece())["decoder"]
    decoder["decoders"].append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return edited(sentencepiece(), decoder=decoder)


@pytest.mark.parametrize("make", [byte_level, sentencepiece, metaspace, with_strip])
def test_the_tokenizer_of_an_export_is_that_of_the_run(
    make: Callable[[], bytes], tmp_path: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = load_tokenizer(make())
    write_tokenizer(tokenizer, 16, tmp_path)
    exported: Any = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in (*TEXTS, " space in front", "<|endoftext|> </s> <0x41> as text", "  two"):
        ids = exported(text).input_ids
        assert ids == tokenizer.encode(text.encode()).tolist(), text
        assert exported.decode(ids) == tokenizer.decode(ids).decode(), text
    assert exported.eos_token_id == tokenizer.end_of_text
    assert exported.pad_token_id == pad_id(tokenizer)
    assert exported(["a", "a b c d"], padding=True).attention_mask[0][0] == 0
