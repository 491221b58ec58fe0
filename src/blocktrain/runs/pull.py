"""The composed model out of a coordinator's run, running or finished, as a run folder for `evaluate`, `generate` and `serve`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blocktrain.config import Config, make_config
from blocktrain.errors import Damaged, RunError
from blocktrain.learning.compose import composition_of
from blocktrain.learning.data import open_corpus
from blocktrain.learning.tokenizer import tokenizer_of
from blocktrain.protocol.identity import verify
from blocktrain.protocol.ledger import LedgerEntry, require_chain
from blocktrain.protocol.messages import Blob, BlockVersion, Manifest
from blocktrain.protocol.tensors import unpack
from blocktrain.runs.folder import RunFolder, create_run, publish
from blocktrain.runs.results import fit_and_seal
from blocktrain.web.client import Calls, fetch
from blocktrain.worker.task import read_blocks

Told = Callable[[str], None]


@dataclass(frozen=True)
class Chosen:
    """The version of each block that the composed model is made of."""

    versions: dict[int, BlockVersion]

    @property
    def summary(self) -> dict[str, int]:
        """Version by block, for people and scripts."""
        return {f"block-{index}": found.version for index, found in sorted(self.versions.items())}


def pull(client: Calls, out: Path, told: Told = lambda _: None) -> Chosen:
    """Fetch, check and compose; a fusion block comes with exactly the block versions that it was trained on."""
    manifest = client.manifest()
    verify(manifest, manifest.coordinator)
    config = make_config(dict(manifest.config))
    if config.fingerprint != manifest.fingerprint:
        raise RunError(
            "the run's settings mean something else to this version of blocktrain; install the coordinator's version"
        )
    chosen = choose_versions(client, manifest, config)
    run = create_run(out, config, str((out / "corpus").resolve()))
    for part in ("train", "valid"):
        told(f"corpus: {part}")
        fetch(client, getattr(manifest.corpus, part), out / "corpus" / f"{part}.txt")

    def weights(blob: Blob) -> bytes:
        target = fetch(client, blob, out / "state" / blob.sha256)
        content = target.read_bytes()
        target.unlink()
        return content

    told("weights")
    compose_run(run, config, chosen.versions.values(), weights)
    told("pool weights")
    data = str((out / "corpus").resolve())
    corpus = open_corpus(data, None, out).encode(tokenizer_of(config))
    fit_and_seal(run, config, data, corpus.calibration)
    return chosen


def choose_versions(client: Calls, manifest: Manifest, config: Config) -> Chosen:
    """The newest versions by the checked ledger; with a trained fusion block, those that it names."""
    newest: dict[int, BlockVersion] = {first.block: first for first in manifest.blocks}
    pins: tuple[BlockVersion, ...] = ()
    last: LedgerEntry | None = None
    while page := client.ledger(last.seq if last else 0).entries:
        last = require_chain(page, last)
        for entry in page:
            if entry.kind == "version":
                body = json.loads(entry.body)
                newest[body["block"]] = _version(body)
                if body["block"] == config.fusion:
                    pins = tuple(_version(pin) for pin in body["features"])
    if last is None or last.seq < manifest.number:
        raise Damaged(
            "the ledger is shorter than the signed manifest says; pull from the coordinator itself"
        )
    return Chosen({**newest, **{pin.block: pin for pin in pins}})


def _version(body: dict[str, Any]) -> BlockVersion:
    return BlockVersion(
        block=body["block"], version=body["version"], weights=Blob(**body["weights"])
    )


def compose_run(
    run: RunFolder,
    config: Config,
    versions: Iterable[BlockVersion],
    weights: Callable[[Blob], bytes],
) -> None:
    """Write the weights of every block into a run folder; what a fusion block copies from the others is made again here."""
    blocks = read_blocks(config, versions, lambda blob: unpack(weights(blob)))
    composition_of(config).connect(config, blocks)
    for index, block in blocks.items():
        publish(run, index, block)
