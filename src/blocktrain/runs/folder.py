"""The run folder: what is in it, how it is read and written, and what is said when it is not what it should be.

RUN/
  config.toml             settings with their fingerprint, the corpus, whether the reference is wanted
  events.jsonl            what happened, a line each
  coordinator/            ledger, versions and updates: all that `blocktrain audit` needs
  state/                  optimizer and updates of unfinished blocks, weights and step of the unfinished reference
  model/                  block-N.safetensors, config.json (settings, hashes, pool weights), README.md (model card)
  reference/              the end-to-end model, if it was asked for
  result.json             cross entropies, memory, seconds, sample
  report.html             all of it to look at
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import tomli_w
import torch

from blocktrain.config import Config, make_config, read_settings
from blocktrain.errors import ConfigError, RunError
from blocktrain.files import write_atomic
from blocktrain.learning.compose import Model, build_block, composition_of
from blocktrain.learning.model import Block, IndependentBlock, build_reference
from blocktrain.learning.train import REFERENCE, load_weights, read_tensors

FORMAT = "blocktrain-model-2"


@dataclass(frozen=True)
class Run:
    """Paths of one run folder."""

    folder: Path

    @property
    def model(self) -> Path:
        """Folder of the published weights."""
        return self.folder / "model"

    @property
    def events(self) -> Path:
        """The event log."""
        return self.folder / "events.jsonl"

    def state(self, index: int) -> Path:
        """Unfinished state of a block or of the reference."""
        return self.folder / "state" / f"{block_name(index)}.safetensors"

    def weights(self, index: int) -> Path:
        """Published weights of a block or of the reference."""
        return (
            self.folder / "reference" / "model.safetensors"
            if index == REFERENCE
            else self.model / f"{block_name(index)}.safetensors"
        )


def block_name(index: int) -> str:
    """How a block is called in files and on screens."""
    return "reference" if index == REFERENCE else f"block-{index}"


class Opened(NamedTuple):
    """What config.toml of a run folder says."""

    run: Run
    config: Config
    data: str
    reference: bool


def create_run(folder: Path, config: Config, data: str, *, reference: bool = False) -> Run:
    """A new run folder; refuses one that already holds something."""
    run = Run(folder)
    try:
        content = _settings(config, data, reference)
    except UnicodeEncodeError:
        raise RunError(
            f"the name of the corpus, {data!a}, is not UTF-8 and cannot be written down; rename it"
        ) from None
    try:
        if folder.exists() and any(folder.iterdir()):
            raise RunError(
                f"{folder} already holds something; continue it with --resume, or name another folder with --out"
            )
        for path in (folder, run.model, folder / "state"):
            path.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "config.toml", content)
    except OSError as error:
        raise RunError(
            f"cannot write the run folder {folder}: {error.strerror or error}; name another one with --out"
        ) from None
    return run


def _settings(config: Config, data: str, reference: bool) -> bytes:
    told = {"data": data, "reference": reference, "fingerprint": config.fingerprint}
    return tomli_w.dumps({**told, **config.model_dump()}).encode()


def open_run(folder: Path) -> Opened:
    """An existing run folder; its settings must be those that it was made with."""
    path = folder / "config.toml"
    if not path.is_file():
        raise RunError(
            f"{folder} is not a run folder (it has no config.toml); begin a run without --resume, in a new folder"
        )
    settings, told = read_settings(path)
    data, reference, fingerprint = (told.get(name) for name in ("data", "reference", "fingerprint"))
    if (
        not isinstance(data, str)
        or not isinstance(reference, bool)
        or not isinstance(fingerprint, str)
    ):
        raise RunError(
            f"{path} is damaged or no run's: it does not say data, reference and fingerprint"
        )
    try:
        config = make_config(settings)
    except ConfigError as error:
        raise RunError(f"{path} is damaged, or of another version of blocktrain: {error}") from None
    if config.fingerprint != fingerprint:
        raise RunError(
            f"{path} was changed, or is of another version of blocktrain: start a new run with --config"
        )
    return Opened(Run(folder), config, data, reference)


def want_reference(opened: Opened) -> Opened:
    """Let the run remember that the end-to-end model is wanted too, however often it is resumed."""
    write_atomic(opened.run.folder / "config.toml", _settings(opened.config, opened.data, True))
    return opened._replace(reference=True)


def publish(run: Run, index: int, block: Block) -> None:
    """Write a finished block's weights."""
    target = run.weights(index)
    target.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().cpu().contiguous() for name, t in block.state_dict().items()}
    # One entry: safetensors writes several in random order, and equal weights must be equal files.
    write_atomic(
        target, safetensors.torch.save(tensors, {"format": f"{FORMAT} {block_name(index)}"})
    )


def load_block(run: Run, config: Config, index: int, device: torch.device) -> Block:
    """Published weights of one block (or the reference) as a module."""
    block = build_reference(config) if index == REFERENCE else build_block(config, index)
    tensors, _ = read_tensors(run.weights(index))
    load_weights(block, tensors, run.weights(index))
    return block.to(device)


def load_independent(
    run: Run, config: Config, index: int, device: torch.device
) -> IndependentBlock:
    """The same for a block that reads only tokens, or the reference."""
    block = load_block(run, config, index, device)
    if not isinstance(block, IndependentBlock):
        raise RunError(f"{block_name(index)} is the fusion block; it is nothing without the others")
    return block


def seal(run: Run, config: Config, data: str, pool_weights: torch.Tensor | None) -> None:
    """Write model/config.json, last: with it the model is complete, and every file is named by its hash."""
    files = {f.name: file_sha256(f) for f in sorted(run.model.glob("block-*.safetensors"))}
    reference = run.weights(REFERENCE)
    content = {
        "format": FORMAT,
        "settings": config.model_dump(),
        "fingerprint": config.fingerprint,
        "data": data,
        "pool_weights": None if pool_weights is None else [float(w) for w in pool_weights],
        "files": files,
        "reference": file_sha256(reference) if reference.exists() else None,
    }
    write_json(run.model / "config.json", {**content, "sha256": _digest(content)})


def _digest(content: dict[str, Any]) -> str:
    """Of all that a manifest says; so a change is noticed that would only make it another model."""
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def write_model_card(run: Run, config: Config, result: dict[str, Any]) -> None:
    """model/README.md: what this model is, what it was trained on, how good it is, what it is not for."""
    rows = "\n".join(
        f"| {name} | {value:.4f} | {value / math.log(2):.4f} |"
        for name, value in result["valid_ce"].items()
    )
    corpus, sample = result["corpus"], result["sample"]
    text = "\n".join("    " + line for line in (sample["prompt"] + sample["text"]).splitlines())
    card = f"""# A BlockTrain model

{config.blocks} blocks of {config.layers_per_block} layers, width {config.width}, context {config.context} bytes,
composed by `{config.compose}` (objective `{config.objective}`). Byte-level: no tokenizer.
Trained for {config.steps} steps a block on `{corpus["name"]}`
({corpus["train_bytes"]:,} bytes), seed {config.seed}. Fingerprint of the settings: `{config.fingerprint}`.

Cross entropy on the valid split ({corpus["valid_bytes"]:,} bytes):

| model | nats/byte | bits/byte |
|---|---|---|
{rows}

`block-N.safetensors` hold the weights, `config.json` the settings, the pool weights and the sha256 of every file.
Use it with `blocktrain evaluate RUN` and `blocktrain generate RUN --prompt ...`, RUN being the folder above this one.

A small model trained on little text: it writes in the manner of its corpus and knows no facts.
Sample at temperature {sample["temperature"]}:

{text}
"""
    write_atomic(run.model / "README.md", card.encode())


def load_model(folder: Path, device: torch.device) -> Model:
    """The composed model of a run folder; every file is checked against its hash."""
    manifest = read_manifest(folder)
    config = manifest.config
    blocks = load_blocks(manifest, range(1, config.blocks + 1), device)
    weights = manifest.pool_weights
    return composition_of(config).assemble(
        config, blocks, None if weights is None else torch.tensor(weights, device=device)
    )


@dataclass(frozen=True)
class Manifest:
    """What model/config.json of a finished run says."""

    run: Run
    config: Config
    data: str
    files: dict[str, str]
    pool_weights: list[float] | None
    reference: str | None
    """Hash of the end-to-end model, where it was trained too."""

    @property
    def model_hash(self) -> str:
        """One hash over all weights: equal exactly where every file is."""
        return hashlib.sha256(
            json.dumps(self.files, sort_keys=True, separators=(",", ":")).encode()
        ).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The settings and hashes of a finished model."""
    run = Run(folder)
    path = run.model / "config.json"
    if not path.is_file():
        reason = (
            "its training is not finished; continue with --resume"
            if (folder / "config.toml").is_file()
            else "it is not a run folder"
        )
        raise RunError(f"{folder} has no finished model: {reason}")
    content = read_json(path)
    if (
        content.get("format") != FORMAT
        or not isinstance(content.get("settings"), dict)
        or not isinstance(content.get("files"), dict)
    ):
        raise RunError(
            f"{path} is not a BlockTrain model of a format this version reads ({FORMAT})"
        )
    try:
        config = make_config(content["settings"])
    except ConfigError as error:
        raise RunError(f"{path} is damaged, or of another version of blocktrain: {error}") from None
    weights, data = content.get("pool_weights"), content.get("data")
    if content.get("fingerprint") != config.fingerprint:
        raise RunError(
            f"{path} was changed, or is of another version of blocktrain: its settings are not those of its fingerprint"
        )
    if not isinstance(data, str) or not data:
        raise RunError(f"{path} is damaged: it does not say what the model was trained on")
    if weights is not None and not (
        isinstance(weights, list)
        and len(weights) == config.independent
        and all(type(w) is float and math.isfinite(w) for w in weights)
    ):
        raise RunError(
            f"{path} is damaged: pool_weights must be a number for each of {config.independent} blocks"
        )
    reference = content.get("reference")
    if reference is not None and not isinstance(reference, str):
        raise RunError(
            f"{path} is damaged: reference must be the hash of the end-to-end model, or null"
        )
    said = content.pop("sha256", None)  # an early version wrote none
    if said is not None and said != _digest(content):
        raise RunError(f"{path} was changed; restore it, or train again")
    return Manifest(run, config, data, content["files"], weights, reference)


def load_blocks(
    manifest: Manifest, numbers: Iterable[int], device: torch.device
) -> dict[int, Block]:
    """Some blocks of a finished model, by number; their files are checked against the hashes before any is read."""
    numbers = list(numbers)
    for number in numbers:
        _check(manifest, number)
    return {number: load_block(manifest.run, manifest.config, number, device) for number in numbers}


def load_independents(
    manifest: Manifest, numbers: Iterable[int], device: torch.device
) -> dict[int, IndependentBlock]:
    """The same for blocks that read only tokens."""
    blocks = load_blocks(manifest, numbers, device)
    return {n: block for n, block in blocks.items() if isinstance(block, IndependentBlock)}


def load_reference(manifest: Manifest, device: torch.device) -> IndependentBlock | None:
    """The end-to-end model that was trained beside a finished model, checked like its blocks; None where there is none."""
    if manifest.reference is None:
        return None
    _check(manifest, REFERENCE)
    return load_independent(manifest.run, manifest.config, REFERENCE, device)


def _check(manifest: Manifest, number: int) -> None:
    path = manifest.run.weights(number)
    if not path.is_file():
        raise RunError(f"{path} is missing; restore it or train again")
    if file_sha256(path) != (
        manifest.reference if number == REFERENCE else manifest.files.get(path.name)
    ):
        raise RunError(
            f"{path} is damaged or foreign: its hash is not the one in {manifest.run.model / 'config.json'}"
        )


def write_json(path: Path, content: Any) -> None:
    """Indented JSON, atomically."""
    write_atomic(path, (json.dumps(content, indent=2) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a sentence."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise RunError(
            f"{path} is damaged, it is not JSON ({error}); restore it or train again"
        ) from None
    if not isinstance(content, dict):
        raise RunError(f"{path} is damaged: it does not hold an object")
    return content


def file_sha256(path: Path) -> str:
    """The hash that names a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
