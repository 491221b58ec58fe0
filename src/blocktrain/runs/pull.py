"""`blocktrain pull`: the composed model of a coordinator's run, as a run folder.

The run may be running or finished. A folder that was pulled before is updated: only blocks with a
new version are fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError

from blocktrain.config import Config, make_config
from blocktrain.errors import Damaged, RunError
from blocktrain.files import write_atomic
from blocktrain.learning.compose import build_block, composition_of
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.corpus.tokenize import INDEX
from blocktrain.learning.corpus.writer import shard_path
from blocktrain.learning.model import Block
from blocktrain.learning.shards import LARGEST_INDEX, read_index
from blocktrain.learning.threads import limited_threads
from blocktrain.learning.tokenizer import LARGEST_JSON, load_tokenizer
from blocktrain.learning.train import block_weights, put_weights
from blocktrain.protocol.calls import Calls
from blocktrain.protocol.compression import add_delta
from blocktrain.protocol.identity import verify
from blocktrain.protocol.ledger import LedgerEntry, VersionBody, read_body, require_chain
from blocktrain.protocol.messages import (
    Blob,
    BlockVersion,
    CorpusBlobs,
    Manifest,
    Message,
    RunId,
    Sha256,
    VersionDelta,
    delta_path,
    write,
)
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.protocol.tensors import Tensors, pack, unpack
from blocktrain.protocol.transfer import sha256
from blocktrain.runs.folder import (
    TOKENIZER,
    RunFolder,
    create_run,
    file_sha256,
    load_block,
    open_run,
    publish,
)
from blocktrain.runs.results import fit_and_seal
from blocktrain.web.client import fetch, fetch_bytes

RECORD = "pull.json"


class PulledBlock(Message):
    """A block in the folder: the weights that it was made of, and the file that they became."""

    weights: Sha256
    file: Sha256


class PullRecord(Message):
    """What pull.json says: the run that a folder was pulled from, and its blocks by number."""

    run: RunId
    head: Sha256 | None = None
    """Hash of the newest entry of its ledger; folders of earlier versions do not have it."""
    blocks: dict[str, PulledBlock]


@dataclass(frozen=True)
class ModelVersions:
    """The version of each block that the composed model is made of."""

    newest: Mapping[int, BlockVersion]
    pins: tuple[BlockVersion, ...] = ()
    """The versions that the newest fusion block was trained on."""

    @property
    def versions(self) -> dict[int, BlockVersion]:
        """By block."""
        return {**self.newest, **{pin.block: pin for pin in self.pins}}

    def follow(self, entry: LedgerEntry, fusion: int | None) -> ModelVersions:
        """With one more entry of the ledger."""
        if entry.kind != "version":
            return self
        body = read_body(VersionBody, entry)
        version = BlockVersion(block=body.block, version=body.version, weights=body.weights)
        pins = body.features if body.block == fusion else self.pins
        return ModelVersions({**self.newest, body.block: version}, pins)

    @property
    def summary(self) -> dict[str, int]:
        """Version by block, for people and scripts."""
        return {f"block-{index}": pin.version for index, pin in sorted(self.versions.items())}


def pull(
    client: Calls, out: Path, progress: Callable[[str], None] = lambda _: None
) -> ModelVersions:
    """Fetch, check and compose. A fusion block comes with the versions that it was trained on."""
    manifest = client.manifest()
    verify(manifest, manifest.coordinator)
    config = make_config(dict(manifest.config))
    if config.fingerprint != manifest.fingerprint:
        raise RunError(
            "the run's settings mean something else to this version of blocktrain; "
            "install the coordinator's version"
        )
    model, deltas = choose_versions(client, manifest, config)
    data = str((out / "corpus").resolve())
    if (tokenizer := manifest.corpus.tokenizer) is not None:
        load_tokenizer(_fetch_once(client, tokenizer, out / TOKENIZER, LARGEST_JSON))
    run, record = _open_folder(out, manifest.run, config, data)
    corpus = _fetch_corpus(client, manifest.corpus, out / "corpus", progress)

    def fetch_weights(pin: BlockVersion) -> Tensors:
        progress(f"block {pin.block}: version {pin.version}")
        if (old := record.blocks.get(str(pin.block))) is not None:
            path = delta_path(pin.weights.sha256, deltas, old.weights.__eq__)
            shorter = path and sum(step.delta.length for step in path) < pin.weights.length
            held = _present_weights(run, config, pin.block, old) if shorter else None
            if held is not None:
                return _add_deltas(client, held, path or (), pin)
        return _fetch_weights(client, pin, deltas, out / "state")

    compose_run(run, config, model.versions.values(), fetch_weights, record.blocks)
    blocks = {
        str(index): PulledBlock(weights=pin.weights.sha256, file=file_sha256(run.weights(index)))
        for index, pin in model.versions.items()
    }
    progress("pool weights")
    with limited_threads():
        fit_and_seal(run, config, data, corpus.calibration)
    record = PullRecord(run=manifest.run, head=manifest.head, blocks=blocks)
    write_atomic(out / RECORD, write(record))
    return model


def _present_weights(
    run: RunFolder, config: Config, index: int, known: PulledBlock
) -> Tensors | None:
    """The weights that a block in the folder was made of, if it is still that block."""
    if not run.weights(index).is_file() or file_sha256(run.weights(index)) != known.file:
        return None
    tensors = dict(block_weights(load_block(run, config, index, torch.device("cpu"))))
    return tensors if sha256(pack(tensors)) == known.weights else None


def _fetch_weights(
    client: Calls, pin: BlockVersion, deltas: Sequence[VersionDelta], folder: Path
) -> Tensors:
    """Whole weights; of a version that the run has moved on from, an older one and deltas."""

    def fetched(name: str) -> bool:
        try:
            fetch(client, Blob(sha256=name, length=pin.weights.length), folder / name)
        except Refused as error:
            if error.code is not Code.NOT_FOUND:
                raise
            return False
        return True

    path = delta_path(pin.weights.sha256, deltas, fetched)
    if path is None:
        raise Damaged(
            f"the coordinator has neither version {pin.version} of block {pin.block} nor what it "
            "follows from; ask its operator to restore the folder from a backup"
        )
    file = folder / (path[0].parent if path else pin.weights.sha256)
    tensors = unpack(file.read_bytes())
    file.unlink()
    return _add_deltas(client, tensors, path, pin) if path else tensors


def _add_deltas(
    client: Calls, held: Tensors, path: Sequence[VersionDelta], pin: BlockVersion
) -> Tensors:
    """The weights of a version from an older one."""
    for step in path:
        held = add_delta(held, fetch_bytes(client, step.delta, pin.weights.length))
    if sha256(pack(held)) != pin.weights.sha256:
        raise Damaged(
            f"the deltas of block {pin.block} do not lead to version {pin.version}; "
            "pull into a new folder, named with --out"
        )
    return held


def _fetch_corpus(
    client: Calls, corpus: CorpusBlobs, folder: Path, progress: Callable[[str], None]
) -> TokenCorpus:
    """The parts of the corpus that no block trains on: a model is evaluated with them."""
    content = _fetch_once(client, corpus.index, folder / INDEX, LARGEST_INDEX)
    index = read_index(content)
    for shard in dict.fromkeys((*index.calibration, *index.valid)):
        progress(f"corpus: shard {shard.sha256[:12]}")
        blob = Blob(sha256=shard.sha256, length=index.file_bytes(shard))
        fetch(client, blob, shard_path(folder, shard))
    write_atomic(folder / INDEX, content)
    return TokenCorpus(index, folder)


def _fetch_once(client: Calls, blob: Blob, path: Path, limit: int) -> bytes:
    """The bytes of a small blob: those of an earlier pull, if they are the same."""
    content = path.read_bytes() if path.is_file() else b""
    return content if sha256(content) == blob.sha256 else fetch_bytes(client, blob, limit)


def _open_folder(out: Path, run_id: str, config: Config, data: str) -> tuple[RunFolder, PullRecord]:
    """A new run folder, or one that was pulled from this run before."""
    if not out.is_dir() or not any(out.iterdir()):
        run, record = create_run(out, config, data), PullRecord(run=run_id, blocks={})
        write_atomic(out / RECORD, write(record))  # now: a pull that is killed can be repeated
        return run, record
    try:
        record = PullRecord.model_validate_json((out / RECORD).read_bytes())
    except (OSError, ValidationError):
        raise RunError(
            f"{out} already holds something that was not pulled; name a new folder with --out"
        ) from None
    if record.run != run_id:
        raise RunError(
            f"{out} was pulled from run {record.run[:12]}, and this coordinator has run "
            f"{run_id[:12]}; name another folder with --out"
        )
    return open_run(out).run, record


def choose_versions(
    client: Calls, manifest: Manifest, config: Config
) -> tuple[ModelVersions, list[VersionDelta]]:
    """The newest versions by the checked ledger; with a trained fusion block, those it names.

    And how versions follow from each other, where they are deltas.
    """
    model = ModelVersions({first.block: first for first in manifest.blocks})
    deltas: list[VersionDelta] = []
    last: LedgerEntry | None = None
    while page := client.ledger(last.seq if last else 0).entries:
        last = require_chain(page, last)
        for entry in page:
            model = model.follow(entry, config.fusion)
            if entry.kind == "version" and (step := read_body(VersionBody, entry).step):
                deltas.append(step)
    if last is None or last.seq < manifest.number:
        raise Damaged(
            "the ledger is shorter than the signed manifest says; pull from the coordinator itself"
        )
    return model, deltas


def compose_run(
    run: RunFolder,
    config: Config,
    versions: Iterable[BlockVersion],
    weights: Callable[[BlockVersion], Tensors],
    present: Mapping[str, PulledBlock] | None = None,
) -> None:
    """Write the weights of every block into a run folder, except those that are present already.

    A fusion block copies from the others; the copy is made again here.
    """
    blocks: dict[int, Block] = {}
    changed: set[int] = set()
    for pin in versions:
        known = (present or {}).get(str(pin.block))
        path = run.weights(pin.block)
        intact = known is not None and path.is_file() and file_sha256(path) == known.file
        if known is not None and intact and known.weights == pin.weights.sha256:
            blocks[pin.block] = load_block(run, config, pin.block, torch.device("cpu"))
            continue
        blocks[pin.block] = build_block(config, pin.block)
        put_weights(blocks[pin.block], weights(pin))
        changed.add(pin.block)
    if changed and config.fusion is not None:
        changed.add(config.fusion)
    composition_of(config).connect(config, blocks)
    for index in sorted(changed):
        publish(run, index, blocks[index])
