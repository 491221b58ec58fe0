"""The run folder: what is in it, and how it is read, checked and written.

RUN/
  config.toml     settings with their fingerprint, the corpus, whether the reference is wanted
  tokenizer.json  the vocabulary, unless tokens are bytes; also in model/
  events.jsonl    what happened, a line per event
  coordinator/    ledger, versions and updates: all that `blocktrain audit` needs
  state/          optimizer and updates of unfinished blocks, and the unfinished reference
  model/          block-N.safetensors, config.json (settings, hashes, pool weights), README.md,
                  chat_template.jinja
  reference/      the end-to-end model, if it was asked for
  result.json     cross entropies, memory, seconds, sample
  report.html     all of it to look at
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import tomli_w
import torch

from blocktrain.config import Config, Origin, make_config, read_origin, read_settings
from blocktrain.errors import ConfigError, RunError
from blocktrain.files import write_atomic
from blocktrain.learning.compose import Model, build_block, composition_of
from blocktrain.learning.model import Block, IndependentBlock, build_reference
from blocktrain.learning.pool import CompositionChoice
from blocktrain.learning.tokenizer import JsonTokenizer, load_tokenizer, tokenizer_of
from blocktrain.learning.train import REFERENCE, load_weights, read_tensors
from blocktrain.protocol.ledger import ParentRun, RunBody, read_body
from blocktrain.store.open import read_store

FORMAT = "blocktrain-model-2"
CHAT_TEMPLATE = Path(__file__).parents[1] / "serving" / "chat_template.jinja"  # the default
CARD_USAGE = """`block-N.safetensors` hold the weights, `config.json` the settings, the pool weights
and the sha256 of every file. Use it with `blocktrain evaluate RUN` and
`blocktrain generate RUN --prompt ...`, where RUN is the folder above this one."""
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class RunFolder:
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

    @property
    def chat_template(self) -> Path:
        """How messages of a chat become one text: a Jinja template, which its owner may change."""
        return self.model / "chat_template.jinja"

    def state(self, index: int) -> Path:
        """Saved training state of a block or of the reference."""
        return self.folder / "state" / f"{block_name(index)}.safetensors"

    def weights(self, index: int) -> Path:
        """Published weights of a block or of the reference."""
        return (
            self.folder / "reference" / "model.safetensors"
            if index == REFERENCE
            else self.model / f"{block_name(index)}.safetensors"
        )


def block_name(index: int) -> str:
    """The name of a block in files and on screens."""
    return "reference" if index == REFERENCE else f"block-{index}"


class RunSettings(NamedTuple):
    """The content of a run folder's config.toml."""

    run: RunFolder
    config: Config
    data: str
    reference: bool
    origin: Origin | None = None


def create_run(
    folder: Path,
    config: Config,
    data: str,
    *,
    reference: bool = False,
    origin: Origin | None = None,
) -> RunFolder:
    """A new run folder; an existing folder must be empty."""
    run = RunFolder(folder)
    try:
        content = _settings(config, data, reference, origin)
    except UnicodeEncodeError:
        raise RunError(
            f"the name of the corpus, {data!a}, is not UTF-8 and cannot be written; rename it"
        ) from None
    try:
        if folder.exists() and any(folder.iterdir()):
            raise RunError(
                f"{folder} is not empty; continue it with --resume, "
                "or name another folder with --out"
            )
        for path in (folder, run.model, folder / "state"):
            path.mkdir(parents=True, exist_ok=True)
        write_tokenizer(folder, config)
        parent = RunFolder(Path(origin.folder)).chat_template if origin else None
        if parent is not None and parent.is_file():  # the model goes on in the same form
            write_atomic(run.chat_template, parent.read_bytes())
        write_atomic(folder / "config.toml", content)
    except OSError as error:
        raise RunError(
            f"cannot write the run folder {folder}: {error.strerror or error}; "
            "name another one with --out"
        ) from None
    return run


def _settings(config: Config, data: str, reference: bool, origin: Origin | None) -> bytes:
    about: dict[str, Any] = {"data": data, "reference": reference}
    if origin is not None:
        about |= {
            "from": origin.folder,
            "freeze": origin.freeze,
            "new_fusion": origin.new_fusion,
        }
    about["fingerprint"] = config.fingerprint
    return tomli_w.dumps({**about, **config.model_dump()}).encode()


def open_run(folder: Path) -> RunSettings:
    """The settings of an existing run folder; they must have the fingerprint of its creation."""
    path = folder / "config.toml"
    if not path.is_file():
        raise RunError(
            f"{folder} is not a run folder (it has no config.toml); "
            "start a run without --resume, in a new folder"
        )
    settings, about = read_settings(path)
    data, reference, fingerprint = (
        about.get(name) for name in ("data", "reference", "fingerprint")
    )
    if (
        not isinstance(data, str)
        or not isinstance(reference, bool)
        or not isinstance(fingerprint, str)
    ):
        raise RunError(
            f"{path} is damaged, or not of a run: it lacks data, reference or fingerprint"
        )
    try:
        config = make_config(settings)
    except ConfigError as error:
        raise RunError(f"{path} is damaged, or of another version of blocktrain: {error}") from None
    if config.fingerprint != fingerprint:
        raise RunError(
            f"{path} was changed, or is of another version of blocktrain: "
            "start a new run with --config"
        )
    read_tokenizer(folder, config)
    return RunSettings(RunFolder(folder), config, data, reference, read_origin(about, path))


def write_tokenizer(folder: Path, config: Config) -> None:
    """Keep the tokenizer of a run in its folder; bytes need no file."""
    tokenizer = tokenizer_of(config)
    if isinstance(tokenizer, JsonTokenizer):
        write_atomic(folder / TOKENIZER, tokenizer.content)


def read_tokenizer(folder: Path, config: Config) -> None:
    """Load the tokenizer of a run from its folder: `tokenizer_of` finds it from now on."""
    if not config.tokenizer_hash:
        return
    path = folder / TOKENIZER
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RunError(
            f"cannot read the tokenizer {path}: {error.strerror or error}; restore it"
        ) from None
    if hashlib.sha256(content).hexdigest() != config.tokenizer_hash:
        raise RunError(f"{path} is damaged or foreign: the run has another tokenizer; restore it")
    load_tokenizer(content, str(path))


def want_reference(settings: RunSettings) -> RunSettings:
    """Note in config.toml to train the end-to-end model too, now and in later resumes."""
    content = _settings(settings.config, settings.data, True, settings.origin)
    write_atomic(settings.run.folder / "config.toml", content)
    return settings._replace(reference=True)


def publish(run: RunFolder, index: int, block: Block) -> None:
    """Write a finished block's weights."""
    target = run.weights(index)
    target.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().cpu().contiguous() for name, t in block.state_dict().items()}
    # One entry only: safetensors writes several in random order, and equal weights must give
    # equal files.
    write_atomic(
        target, safetensors.torch.save(tensors, {"format": f"{FORMAT} {block_name(index)}"})
    )


def load_block(run: RunFolder, config: Config, index: int, device: torch.device) -> Block:
    """Published weights of one block (or the reference) as a module."""
    block = build_reference(config) if index == REFERENCE else build_block(config, index)
    tensors, _ = read_tensors(run.weights(index))
    load_weights(block, tensors, run.weights(index))
    return block.to(device)


def load_independent(
    run: RunFolder, config: Config, index: int, device: torch.device
) -> IndependentBlock:
    """The same for a block that reads only tokens, or the reference."""
    block = load_block(run, config, index, device)
    if not isinstance(block, IndependentBlock):
        raise RunError(
            f"{block_name(index)} is the fusion block; it cannot be used without the others"
        )
    return block


def seal(
    run: RunFolder,
    config: Config,
    data: str,
    pool_weights: torch.Tensor | None,
    choice: CompositionChoice | None = None,
) -> None:
    """Write model/config.json, which makes the model complete: it has the hash of every file."""
    files = {f.name: file_sha256(f) for f in sorted(run.model.glob("block-*.safetensors"))}
    reference = run.weights(REFERENCE)
    content = {
        "format": FORMAT,
        "settings": config.model_dump(),
        "fingerprint": config.fingerprint,
        "data": data,
        "pool_weights": None if pool_weights is None else [float(w) for w in pool_weights],
        **({} if choice is None else {"composition": composition_record(choice)}),
        "files": files,
        "reference": file_sha256(reference) if reference.exists() else None,
    }
    write_tokenizer(run.model, config)
    if not run.chat_template.exists():
        write_atomic(run.chat_template, CHAT_TEMPLATE.read_bytes())
    write_json(run.model / "config.json", {**content, "sha256": _digest(content)})


def composition_record(choice: CompositionChoice) -> dict[str, Any]:
    """How a model is composed and why, for model/config.json and result.json."""
    return {
        "name": choice.name,
        "reason": choice.reason,
        "nats_per_token": {name: round(ce, 5) for name, ce in choice.scores.items()},
        "tokens": choice.tokens,
    }


def _digest(content: dict[str, Any]) -> str:
    """Detects a change that would still be a valid model, but another one."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def valid_size(valid_bytes: int, evaluated_bytes: int | None) -> str:
    """How much of the valid split a figure was measured on, in words; None is all of it."""
    if evaluated_bytes is not None and evaluated_bytes < valid_bytes:
        return f"the first {evaluated_bytes:,} of {valid_bytes:,} bytes of the valid split"
    return f"the valid split, {valid_bytes:,} bytes"


def write_model_card(run: RunFolder, config: Config, result: dict[str, Any]) -> None:
    """model/README.md: what the model is, what it was trained on, how good it is, its limits."""
    rows = "\n".join(
        f"| {name} | {result['nats_per_token'][name]:.4f} | {bits:.4f} |"
        for name, bits in result["bits_per_byte"].items()
    )
    corpus, sample, composition = (result[key] for key in ("corpus", "sample", "composition"))
    origin = f"It {result['parent']['sentence']}.\n" if "parent" in result else ""
    text = "\n".join("    " + line for line in (sample["prompt"] + sample["text"]).splitlines())
    card = f"""# A BlockTrain model

{config.blocks} blocks of {config.layers_per_block} layers, width {config.width}, context
{config.context} tokens, tokenizer `{config.tokenizer}`, composed by `{composition["name"]}`
(objective `{config.objective}`): {composition["reason"]}.
Trained for {config.length}, on `{corpus["name"]}` ({corpus["train_bytes"]:,} bytes),
seed {config.seed}. Fingerprint of the settings: `{config.fingerprint}`.
{origin}
Cross entropy on {valid_size(corpus["valid_bytes"], corpus.get("evaluated_bytes"))}:

| model | nats/token | bits/byte |
|---|---|---|
{rows}

{CARD_USAGE}

This is a small model trained on little text: it imitates its corpus and knows no facts.
Sample at temperature {sample["temperature"]}:

{text}
"""
    write_atomic(run.model / "README.md", card.encode())


def parent_of(folder: Path) -> ParentRun | None:
    """What the ledger of a run folder says about its parent."""
    if not (folder / "coordinator").is_dir():
        return None
    with closing(read_store(folder / "coordinator")) as store:
        first = store.ledger(0, 1)
    return read_body(RunBody, first[0]).parent if first else None


def load_model(folder: Path, device: torch.device) -> Model:
    """The composed model of a run folder; every file is checked against its hash."""
    manifest = read_manifest(folder)
    config = manifest.config
    blocks = load_blocks(manifest, range(1, config.blocks + 1), device)
    weights = manifest.pool_weights
    return composition_of(config).assemble(
        config,
        blocks,
        None if weights is None else torch.tensor(weights, device=device),
        manifest.compose,
    )


@dataclass(frozen=True)
class ModelManifest:
    """The content of a finished run's model/config.json."""

    run: RunFolder
    config: Config
    data: str
    files: dict[str, str]
    pool_weights: list[float] | None
    reference: str | None
    """Hash of the end-to-end model, where it was trained too."""
    composition: dict[str, Any]
    """The composition that scored best, its name and the scores; empty: nothing was compared."""

    @property
    def compose(self) -> str:
        """The composition that the model is used with: what its settings say, or the pool."""
        return str(self.composition.get("name", self.config.compose))

    @property
    def model_hash(self) -> str:
        """One hash over all weights: equal if and only if every file is equal."""
        canonical = json.dumps(self.files, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def read_manifest(folder: Path) -> ModelManifest:
    """The settings and hashes of a finished model."""
    run = RunFolder(folder)
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
            f"{path} was changed, or is of another version of blocktrain: "
            "its settings do not have its fingerprint"
        )
    if not isinstance(data, str) or not data:
        raise RunError(f"{path} is damaged: it lacks data, the corpus of the model")
    if weights is not None and not (
        isinstance(weights, list)
        and len(weights) == config.independent
        and all(type(w) is float and math.isfinite(w) for w in weights)
    ):
        raise RunError(
            f"{path} is damaged: pool_weights must be one number for each of "
            f"{config.independent} blocks"
        )
    reference = content.get("reference")
    if reference is not None and not isinstance(reference, str):
        raise RunError(
            f"{path} is damaged: reference must be the hash of the end-to-end model, or null"
        )
    composition = content.get("composition", {})
    names = (config.compose, *(["pool"] if config.traits.fusion else []))
    if not isinstance(composition, dict) or (composition and composition.get("name") not in names):
        raise RunError(f"{path} is damaged: composition must name {' or '.join(names)}")
    digest = content.pop("sha256", None)  # an early version wrote none
    if digest is not None and digest != _digest(content):
        raise RunError(f"{path} was changed; restore it, or train again")
    read_tokenizer(run.model, config)
    return ModelManifest(run, config, data, content["files"], weights, reference, composition)


def load_blocks(
    manifest: ModelManifest, numbers: Iterable[int], device: torch.device
) -> dict[int, Block]:
    """Some blocks of a finished model, by number. All files are checked before any is read."""
    numbers = list(numbers)
    for number in numbers:
        _check(manifest, number)
    return {number: load_block(manifest.run, manifest.config, number, device) for number in numbers}


def load_independents(
    manifest: ModelManifest, numbers: Iterable[int], device: torch.device
) -> dict[int, IndependentBlock]:
    """The same for blocks that read only tokens."""
    blocks = load_blocks(manifest, numbers, device)
    return {n: block for n, block in blocks.items() if isinstance(block, IndependentBlock)}


def load_reference(manifest: ModelManifest, device: torch.device) -> IndependentBlock | None:
    """The end-to-end model of a finished run, checked like its blocks; None if it has none."""
    if manifest.reference is None:
        return None
    _check(manifest, REFERENCE)
    return load_independent(manifest.run, manifest.config, REFERENCE, device)


def _check(manifest: ModelManifest, number: int) -> None:
    path = manifest.run.weights(number)
    if not path.is_file():
        raise RunError(f"{path} is missing; restore it or train again")
    if file_sha256(path) != (
        manifest.reference if number == REFERENCE else manifest.files.get(path.name)
    ):
        raise RunError(
            f"{path} is damaged or foreign: its hash is not the one in "
            f"{manifest.run.model / 'config.json'}"
        )


def write_json(path: Path, content: Any) -> None:
    """Indented JSON, atomically."""
    write_atomic(path, (json.dumps(content, indent=2) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; RunError says what is wrong with it."""
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
