"""The model of a run folder as `blocktrain stage` and `blocktrain serve` load it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from blocktrain.errors import ConfigError
from blocktrain.learning.compose import composition_of
from blocktrain.learning.model import Block, FanReadout, IndependentBlock
from blocktrain.learning.train import REFERENCE
from blocktrain.runs.folder import (
    RunFolder,
    file_sha256,
    load_blocks,
    load_independent,
    read_manifest,
)
from blocktrain.serving.chat_template import ChatTemplate, default_template, read_template

CPU = torch.device("cpu")


def chat_template(folder: Path) -> ChatTemplate:
    """The template that a run keeps with its model; the default one if it has none."""
    path = RunFolder(folder).chat_template
    return read_template(path) if path.exists() else default_template()


class RunModel:
    """Reads files only when a block is asked for, and checks them against the model's hashes."""

    def __init__(
        self, folder: Path, *, reference: bool = False, device: torch.device = CPU
    ) -> None:
        self.device = device
        self._manifest = read_manifest(folder)
        self.config, self.reference = self._manifest.config, reference
        self.compose = "reference" if reference else self._manifest.compose
        self.fan = self.config.traits.topology == "fan" and not reference
        path = self._manifest.run.weights(REFERENCE)
        if reference and not path.is_file():
            raise ConfigError(
                f"{folder} has no end-to-end reference; "
                "train one with: blocktrain train --reference"
            )
        self.model = file_sha256(path) if reference else self._manifest.model_hash

    def load_blocks(self, numbers: Iterable[int]) -> dict[int, IndependentBlock]:
        blocks = self._load(numbers)
        return {n: block for n, block in blocks.items() if isinstance(block, IndependentBlock)}

    def _load(self, numbers: Iterable[int]) -> dict[int, Block]:
        return load_blocks(self._manifest, numbers, self.device)

    def load_readout(self) -> FanReadout:
        weights = self._manifest.pool_weights
        pool = None if weights is None else torch.tensor(weights, device=self.device)
        return composition_of(self.config, self.compose).readout(self.config, self._load, pool)

    def load_reference(self) -> IndependentBlock:
        block = load_independent(self._manifest.run, self.config, REFERENCE, self.device)
        return block.requires_grad_(False).eval()
