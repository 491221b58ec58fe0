"""A finished run as a folder that `transformers` loads, without BlockTrain installed.

FOLDER/
  model.safetensors            the weights (several files and an index if they are large)
  config.json                  the shape, and where its code is
  configuration_blocktrain.py  that code
  modeling_blocktrain.py
  generation_config.json       how `generate` ends
  tokenizer.json               the run's tokenizer
  tokenizer_config.json
  chat_template.jinja          how messages of a chat become one text
  README.md                    the model card
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from blocktrain.errors import ConfigError, RunError
from blocktrain.files import sync_folder
from blocktrain.learning.compose import COMPOSITIONS, Fuse, WeightedPool
from blocktrain.learning.evaluate import Progress
from blocktrain.learning.tokenizer import tokenizer_of
from blocktrain.runs.folder import ModelManifest, read_manifest, write_json
from blocktrain.runs.huggingface.card import write_card
from blocktrain.runs.huggingface.tokenizer import pad_id, write_tokenizer
from blocktrain.runs.huggingface.weights import model_tensors, write_weights
from blocktrain.runs.served import chat_template

CODE = ("configuration_blocktrain.py", "modeling_blocktrain.py")


def export_run(
    folder: Path, out: Path, *, name: str = "", progress: Progress = lambda _: None
) -> None:
    """Write the model of a run folder into a new folder; it appears when it is whole.

    The card calls it by `name`, or else by its folder.
    """
    manifest = read_manifest(folder)
    fusion, template = fusion_block(manifest), chat_template(folder)
    with new_folder(out) as partial:
        write_model(manifest, fusion, partial, progress)
        write_tokenizer(tokenizer_of(manifest.config), manifest.config.context, partial)
        (partial / "chat_template.jinja").write_text(template.source, encoding="utf-8")
        write_card(manifest, name or str(out), partial)


def fusion_block(manifest: ModelManifest) -> int | None:
    """The number of the fusion block that the model is used with; None: it is a pool."""
    composition = COMPOSITIONS[manifest.compose]
    if not isinstance(composition, Fuse | WeightedPool):
        raise ConfigError(
            f"{manifest.run.folder} is composed by {composition.traits.name}, and transformers has "
            "no place for the state that its path hands from block to block: train with "
            "--compose fuse or --compose pool to export a model"
        )
    return manifest.config.fusion if isinstance(composition, Fuse) else None


def write_model(
    manifest: ModelManifest, fusion: int | None, folder: Path, progress: Progress
) -> None:
    """Weights, settings and code."""
    config = manifest.config
    numbers = [*range(1, config.independent + 1), *([fusion] if fusion else [])]

    def report(tensors: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for done, part in enumerate(tensors):
            progress(done / len(numbers))
            yield part

    write_weights(folder, report(model_tensors(manifest, numbers)))
    write_json(folder / "config.json", model_config(manifest, fusion=fusion is not None))
    tokenizer = tokenizer_of(config)
    tokens = {"eos_token_id": tokenizer.end_of_text, "pad_token_id": pad_id(tokenizer)}
    write_json(folder / "generation_config.json", tokens)
    for name in CODE:
        content = files("blocktrain.runs.huggingface.exported").joinpath(name).read_bytes()
        (folder / name).write_bytes(content)


def model_config(manifest: ModelManifest, *, fusion: bool) -> dict[str, Any]:
    """config.json: the settings that `BlockTrainConfig` knows, and where the model comes from."""
    config, tokenizer = manifest.config, tokenizer_of(manifest.config)
    return {
        "architectures": ["BlockTrainForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_blocktrain.BlockTrainConfig",
            "AutoModelForCausalLM": "modeling_blocktrain.BlockTrainForCausalLM",
        },
        "model_type": "blocktrain",
        "dtype": "float32",
        "vocab_size": tokenizer.vocabulary,
        "hidden_size": config.width,
        "num_hidden_layers": (config.independent + fusion) * config.layers_per_block,
        "num_attention_heads": config.heads,
        "max_position_embeddings": config.context,
        "num_blocks": config.independent,
        "fusion": fusion,
        "lookback": config.lookback,
        "shared_embedding": config.shares_table,
        "input_offset": config.objective == "denoise",
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.end_of_text,
        "blocktrain": {
            "fingerprint": config.fingerprint,
            "model_hash": manifest.model_hash,
        },
    }


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name at the end: a killed export leaves none that looks
    whole."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out} is there already; name a new folder with --out")
    out = out.absolute()
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for path in partial.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(partial)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    sync_folder(out.parent)
