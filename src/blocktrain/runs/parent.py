"""A run that goes on from a trained one: the settings and the weights that it takes over.

The parent is a finished folder of `train`, a pulled model, or the folder of a coordinator whose run
is finished.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from blocktrain.audit.evidence import Finding, open_folder, read_verified
from blocktrain.config import DERIVED, TRAITS, Config, Origin, make_config, preset_settings
from blocktrain.errors import ConfigError, Damaged, RunError
from blocktrain.learning.tokenizer import load_tokenizer
from blocktrain.learning.train import Weights, block_weights
from blocktrain.protocol.ledger import (
    LedgerEntry,
    ParentRun,
    RunBody,
    RunFacts,
    read_body,
    require_chain,
)
from blocktrain.protocol.tensors import pack, unpack
from blocktrain.runs.folder import (
    ModelManifest,
    RunFolder,
    load_blocks,
    read_manifest,
    seal,
)
from blocktrain.runs.pull import RECORD, ModelVersions, PullRecord, compose_run

# Settings that decide the shape of the weights or what they mean; a parent's cannot be changed.
SHAPE = ("layers_per_block", "width", "heads", "lookback", "tokenizer", *DERIVED)
MEANING = ("objective", "skip")
TARGETS = ("z_width", "seed")  # of the table of targets, which blocks of objective=denoise learn
CPU = torch.device("cpu")


@dataclass(frozen=True)
class ParentModel:
    """A trained model with what is known of its run."""

    folder: Path
    manifest: ModelManifest
    data: str | None
    """The text that it was trained on, if it is known where that is."""
    run: str | None = None
    heads: tuple[str, ...] = ()
    """Hashes of its ledger's entries, the newest last; empty if none is known."""

    @property
    def config(self) -> Config:
        return self.manifest.config

    def weights(self, index: int) -> Weights:
        """Of one block, after its file has been checked."""
        return block_weights(load_blocks(self.manifest, [index], CPU)[index])


@contextmanager
def open_parent(folder: Path) -> Iterator[ParentModel]:
    """The model in a folder. The files of all its blocks are checked."""
    if str(folder).startswith(("http:/", "https:/")):
        raise RunError(
            f"{folder} is not a folder; fetch the model with `blocktrain pull URL --out RUN`, "
            "and go on from RUN"
        )
    if _is_coordinator(folder):
        with tempfile.TemporaryDirectory(prefix="blocktrain-parent-") as scratch:
            yield _compose(folder, Path(scratch))
        return
    manifest = read_manifest(folder)
    load_blocks(manifest, range(1, manifest.config.blocks + 1), CPU)
    pulled = (folder / RECORD).exists()  # without the text that was trained on
    yield ParentModel(folder, manifest, None if pulled else manifest.data, *_origin_of(folder))


def _origin_of(folder: Path) -> tuple[str | None, tuple[str, ...]]:
    """Run and ledger of a folder with a model, as far as it knows them."""
    if (folder / "coordinator").is_dir():
        entries = _ledger(folder)
        return read_body(RunBody, entries[0]).run, tuple(entry.hash for entry in entries)
    if not (folder / RECORD).exists():
        return None, ()
    try:
        record = PullRecord.model_validate_json((folder / RECORD).read_bytes())
    except (OSError, ValidationError):
        raise RunError(
            f"{folder / RECORD} is damaged; pull the model again into a new folder"
        ) from None
    return record.run, (record.head,) if record.head else ()


def _is_coordinator(folder: Path) -> bool:
    return (folder / "coordinator.pem").is_file() and not (folder / "model").exists()


def _ledger(folder: Path) -> tuple[LedgerEntry, ...]:
    """All entries of a run that has begun, with their chain checked."""
    try:
        entries = open_folder(folder).record().entries
        require_chain(entries)
    except (Damaged, OSError) as error:
        raise RunError(f"the ledger of {folder} cannot be read: {error}") from None
    if not entries:
        raise RunError(f"the run in {folder} has not begun: there is nothing to go on from")
    return entries


def _compose(folder: Path, scratch: Path) -> ParentModel:
    """The model of a coordinator's finished run, as `pull` would compose it."""
    entries, source = _ledger(folder), open_folder(folder)
    if not any(entry.kind == "finish" for entry in entries):
        raise RunError(
            f"the run in {folder} is not finished: wait for its end, or fetch the model as it is "
            "now with `blocktrain pull` and go on from that folder"
        )
    facts = read_body(RunBody, entries[0])
    config = make_config(dict(facts.config))
    if facts.corpus.tokenizer is not None:
        load_tokenizer(read_verified(source, facts.corpus.tokenizer))
    model = ModelVersions({first.block: first for first in facts.blocks})
    for entry in entries:
        model = model.follow(entry, config.fusion)
    run = RunFolder(scratch)
    compose_run(
        run,
        config,
        model.versions.values(),
        lambda pin: unpack(read_verified(source, pin.weights)),
    )
    seal(run, config, facts.corpus.name or "unknown", None)
    heads = tuple(entry.hash for entry in entries)
    return ParentModel(folder, read_manifest(scratch), None, facts.run, heads)


def continued_config(
    parent: ParentModel, named: Mapping[str, Any], preset: str | None = None
) -> Config:
    """The settings of the new run: those that were named, and the parent's for all others.

    The seed is the parent's plus one, so that the text is read in another order.
    """
    old, named = parent.config, {**preset_settings(preset), **named}
    if named.get("size"):
        raise ConfigError(
            f"--size chooses the shape of a new model, and {parent.folder} has its own: "
            "leave it out; --blocks adds blocks"
        )
    denoise = old.objective == "denoise"
    fixed = (*SHAPE, *MEANING, *(TARGETS if denoise else ()))
    for name in fixed:
        if name in named and named[name] != getattr(old, name):
            raise ConfigError(
                f"{name}={named[name]} does not fit {parent.folder}, whose blocks have "
                f"{name}={getattr(old, name)}: leave it out, or start a new run"
            )
    if bool(named.get("tail", old.tail)) != bool(old.tail):
        raise ConfigError(
            f"tail={named['tail']} does not fit {parent.folder}, whose blocks have "
            f"tail={old.tail}: leave it out, or start a new run"
        )
    traits = TRAITS.get(named.get("compose", old.compose), old.traits)
    defaults: dict[str, Any] = {"blocks": old.independent + traits.fusion}
    if not denoise:
        defaults["seed"] = (old.seed + 1) % 2**32
    new = make_config({**old.model_dump(), **defaults, **named})
    if new.independent < old.independent:
        raise ConfigError(
            f"blocks={new.blocks} leaves out blocks of {parent.folder}: with "
            f"compose={new.compose} at least {old.independent + new.traits.fusion} are needed"
        )
    return new


def take_over(parent: ParentModel, config: Config, origin: Origin) -> ParentRun:
    """Which blocks begin with the parent's weights, and which of them stay as they are."""
    old = parent.config
    same_reads = old.independent == config.independent
    if origin.new_fusion and config.fusion is None:
        raise ConfigError(
            f"--new-fusion: compose={config.compose} has no fusion block; use --compose fuse"
        )
    if origin.freeze and not same_reads and config.objective == "denoise":
        raise ConfigError(
            "--freeze: with objective=denoise every block has its share of the noise, which "
            "changes with the number of blocks; leave out --freeze or the added blocks"
        )
    frozen = tuple(range(1, old.independent + 1)) if origin.freeze else ()
    if len(frozen) == config.blocks:
        raise ConfigError(
            "--freeze leaves nothing to train: add blocks with a larger --blocks, "
            "or use --compose fuse for a fusion block"
        )
    kept = [*range(1, old.independent + 1)]
    if config.fusion and old.fusion and same_reads and not origin.new_fusion:
        kept.append(config.fusion)
    return ParentRun(
        run=parent.run,
        head=parent.heads[-1] if parent.heads else None,
        model=parent.manifest.model_hash,
        fingerprint=old.fingerprint,
        blocks=tuple(kept),
        frozen=frozen,
    )


def describe(parent: ParentModel, config: Config, facts: ParentRun) -> str:
    """What begins with which weights, for people."""
    old = parent.config
    state = "frozen" if facts.frozen else "trained further"
    parts = [f"{_blocks(range(1, old.independent + 1))} from {parent.folder}, {state}"]
    if config.independent > old.independent:
        parts.append(f"{_blocks(range(old.independent + 1, config.independent + 1))} new")
    if config.fusion in facts.blocks:
        parts.append("the fusion block trained further")
    elif config.fusion and old.fusion and old.independent != config.independent:
        parts.append(
            f"a new fusion block, because it reads {config.independent} blocks now "
            f"instead of {old.independent}"
        )
    elif config.fusion:
        parts.append("a new fusion block")
    return "; ".join(parts)


def _blocks(numbers: range) -> str:
    first, last = numbers[0], numbers[-1]
    if first == last:
        return f"block {first}"
    return f"blocks {first} {'and' if last == first + 1 else 'to'} {last}"


def check_parent(facts: RunFacts, folder: Path) -> list[Finding]:
    """Whether a run goes on from the model in this folder, as its ledger says."""
    named = facts.parent
    if named is None:
        raise ConfigError("this run does not go on from another one: leave out --parent")
    with open_parent(folder) as parent:
        sentences = [*_differences(named, parent), *_foreign_blocks(facts, parent)]
    return [Finding("parent", 1, sentence) for sentence in sentences]


def _differences(named: ParentRun, parent: ParentModel) -> Iterator[str]:
    if named.run is not None and named.run != parent.run:
        yield f"it goes on from run {named.run}, and {parent.folder} holds {parent.run or 'none'}"
    elif named.head is not None and parent.heads and named.head not in parent.heads:
        yield f"it goes on from ledger entry {named.head}, which {parent.folder} does not have"
    if named.model != parent.manifest.model_hash:
        yield f"it goes on from model {named.model}, and {parent.folder} holds another one"


def _foreign_blocks(facts: RunFacts, parent: ParentModel) -> Iterator[str]:
    for first in facts.blocks:
        if first.block not in facts.taken:
            continue
        known = first.block <= parent.config.blocks
        weights = pack(parent.weights(first.block)) if known else b""
        if hashlib.sha256(weights).hexdigest() != first.weights.sha256:
            yield f"version 0 of block {first.block} is not that of {parent.folder}"
