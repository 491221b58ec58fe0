"""What a stage holds and computes: blocks of a fan, steps of the paper's path, or layers of the end-to-end reference."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from blocktrain.config import Config
from blocktrain.errors import ConfigError
from blocktrain.learning.compose import euler_hop, middle_noise
from blocktrain.learning.model import Cache, IndependentBlock, target_table
from blocktrain.learning.train import REFERENCE
from blocktrain.protocol.frames import Topology
from blocktrain.runs.folder import (
    file_sha256,
    load_independent,
    load_independents,
    read_manifest,
)
from blocktrain.serving.stage import ragged

Memory = Any
"""What a holding keeps of a session between its RUNs."""


@dataclass(frozen=True)
class Facts:
    """What a stage tells about itself."""

    kind: Literal["blocks", "reference"]
    blocks: tuple[int, ...]
    width: int
    context: int
    z_width: int
    fingerprint: str
    model: str


@dataclass
class Part:
    """New positions of one session: a whole RUN, or a piece of it."""

    memory: Memory
    blocks: tuple[int, ...]
    start: int
    ids: Tensor  # (1, T)
    state: Tensor | None = None  # (1, T, state_width)
    tail: int = 0
    wanted: int = 0  # of the last positions


class Holding(Protocol):
    """A stage's share of a model. `work` is called on one thread only."""

    facts: Facts
    topology: Topology
    in_pieces: bool  # whether a RUN may be worked on in pieces, and with those of other sessions
    remembers: bool  # whether a RUN continues the ones before
    state_width: int  # of a position of the state that comes in; 0: none does
    pass_width: int  # of the state that a ring passes on
    last: bool  # whether a ring ends here

    def answer_width(self) -> int:
        """Of a position of the answer."""

    def fresh(self, blocks: tuple[int, ...]) -> Memory:
        """The memory of a new session with these blocks."""

    def work(self, parts: Sequence[Part]) -> list[Tensor]:
        """For every part its answer (blocks, wanted, width)."""


class FanBlocks:
    """Independent blocks: ids in, features out."""

    topology: Topology = "fan"
    in_pieces = remembers = last = True
    state_width = pass_width = 0

    def __init__(self, config: Config, blocks: Mapping[int, IndependentBlock], model: str) -> None:
        self.facts = _facts(config, "blocks", blocks, model)
        self.blocks = {number: _frozen(blocks[number]) for number in self.facts.blocks}
        self._noise = {
            n: middle_noise(config, n, b.embed.device) if b.skip == "exact" else None
            for n, b in self.blocks.items()
        }

    def answer_width(self) -> int:
        """The features of a position."""
        return self.facts.width

    def fresh(self, blocks: tuple[int, ...]) -> Memory:
        """A cache per block."""
        return {number: Cache(self.blocks[number], 1) for number in blocks}

    def work(self, parts: Sequence[Part]) -> list[Tensor]:
        """Every block over the rows of all sessions that ask for it."""
        found: list[list[Tensor]] = [[] for _ in parts]
        for number, block in self.blocks.items():
            asked = [i for i, part in enumerate(parts) if number in part.blocks]
            if not asked:
                continue
            ids, caches = [parts[i].ids for i in asked], [parts[i].memory[number] for i in asked]
            _truncate(caches, [parts[i].start for i in asked])
            sizes = [tokens.shape[1] for tokens in ids]
            x = ragged.through_layers(
                block, ragged.embed(block, ids, caches, self._noise[number]), sizes, caches
            )
            for i, rows in zip(asked, x.split(sizes, dim=1), strict=True):
                found[i].append(rows)
        return [
            _last(torch.cat(rows), part.wanted) for rows, part in zip(found, parts, strict=True)
        ]


class ReferenceLayers:
    """Groups of layers of the end-to-end model: the first embeds ids, the last makes logits, between them goes the residual stream."""

    topology: Topology = "ring"
    in_pieces = remembers = True

    def __init__(
        self, config: Config, reference: IndependentBlock, numbers: Iterable[int], model: str
    ) -> None:
        self.facts = _facts(config, "reference", numbers, model)
        _require_neighbours(self.facts.blocks)
        first, last = self.facts.blocks[0], self.facts.blocks[-1]
        each = config.layers_per_block
        reference.layers = nn.ModuleList(list(reference.layers)[(first - 1) * each : last * each])
        self.block = _frozen(reference)
        self.first, self.last = first == 1, last == config.blocks
        self.state_width, self.pass_width = (0 if self.first else config.width), config.width

    def answer_width(self) -> int:
        """Logits, or the residual stream."""
        return self.block.vocabulary if self.last else self.facts.width

    def fresh(self, blocks: tuple[int, ...]) -> Memory:
        """One cache for all layers."""
        return Cache(self.block, 1)

    def work(self, parts: Sequence[Part]) -> list[Tensor]:
        """The layers over the rows of all sessions."""
        caches = [part.memory for part in parts]
        _truncate(caches, [part.start for part in parts])
        sizes = [part.ids.shape[1] for part in parts]
        if self.first:
            x = ragged.embed(self.block, [part.ids for part in parts], caches)
        else:
            x = torch.cat([part.state for part in parts if part.state is not None], dim=1)
        found = ragged.through_layers(self.block, x, sizes, caches).split(sizes, dim=1)
        wanted = [_last(rows, part.wanted) for rows, part in zip(found, parts, strict=True)]
        if not self.last:
            return wanted
        x = torch.cat(wanted, dim=1)
        logits = (
            self.block(x) if x.shape[1] else x.new_zeros(1, 0, self.block.vocabulary)
        )  # of a long RUN's first piece nothing may be wanted
        return list(logits.split([part.wanted for part in parts], dim=1))


class EulerSteps:
    """Steps of the paper's path over a whole window: ids and z in, z out; the last one makes logits."""

    topology: Topology = "ring"
    in_pieces = remembers = False

    def __init__(self, config: Config, blocks: Mapping[int, IndependentBlock], model: str) -> None:
        self.config = config
        self.facts = _facts(config, "blocks", blocks, model)
        _require_neighbours(self.facts.blocks)
        self.blocks = {number: _frozen(blocks[number]) for number in self.facts.blocks}
        self.table = target_table(config).to(next(iter(self.blocks.values())).embed.device)
        self.last = self.facts.blocks[-1] == config.blocks
        self.state_width = self.pass_width = config.z_width

    def answer_width(self) -> int:
        """Logits, or z."""
        return self.table.shape[0] if self.last else self.config.z_width

    def fresh(self, blocks: tuple[int, ...]) -> Memory:
        """Nothing: z changes what every position attends to, so the window is walked again each time."""
        return None

    def work(self, parts: Sequence[Part]) -> list[Tensor]:
        """One session after another: their windows are walked as the local path walks them."""
        return [self._walk(part) for part in parts]

    def _walk(self, part: Part) -> Tensor:
        if part.state is None:
            raise ValueError("a step of the path needs z")
        z, logits = part.state, part.state
        for number, block in self.blocks.items():
            logits, z = euler_hop(
                self.config, number, block, self.table, part.ids, z, tail=part.tail
            )
        return _last(logits if self.last else z, part.wanted)


def load_holding(
    folder: Path, numbers: Sequence[int], device: torch.device, *, reference: bool = False
) -> Holding:
    """The blocks of a run that a stage serves; only their files are read, and checked against the model's hashes."""
    manifest = read_manifest(folder)
    config = manifest.config
    numbers = tuple(numbers) or tuple(
        range(1, (config.blocks if reference else config.independent) + 1)
    )
    _require_known(config, numbers, reference=reference)
    if reference:
        path = manifest.run.weights(REFERENCE)
        if not path.is_file():
            raise ConfigError(
                f"{folder} has no end-to-end reference; train one with: blocktrain train --reference"
            )
        return ReferenceLayers(
            config,
            load_independent(manifest.run, config, REFERENCE, device),
            numbers,
            file_sha256(path),
        )
    make: type[EulerSteps] | type[FanBlocks] = (
        EulerSteps if config.traits.topology == "ring" else FanBlocks
    )
    blocks = load_independents(manifest, numbers, device)
    return make(config, blocks, manifest.model_hash)


def parse_blocks(text: str) -> tuple[int, ...]:
    """2-3 or 1,3 or 1,3-4 as numbers in order; nothing means all."""
    numbers: set[int] = set()
    for part in text.split(",") if text else []:
        found = re.fullmatch(r"([0-9]{1,3})(?:-([0-9]{1,3}))?", part)
        low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= low <= high:
            raise ConfigError(
                f"--blocks {text!r} is no list of blocks, for example 2 or 2-3 or 1,3"
            )
        numbers |= set(range(low, high + 1))
    return tuple(sorted(numbers))


def _require_known(config: Config, numbers: Sequence[int], *, reference: bool) -> None:
    most = config.blocks if reference else config.independent
    wrong = [n for n in numbers if n > most]
    if not reference and wrong == [config.fusion]:
        raise ConfigError(
            f"block {wrong[0]} is the fusion block, which the entry holds; serve some of 1 to {most}"
        )
    if wrong:
        raise ConfigError(f"this model has no block {wrong[0]} to serve; choose from 1 to {most}")


def _require_neighbours(numbers: tuple[int, ...]) -> None:
    if numbers != tuple(range(numbers[0], numbers[-1] + 1)):
        raise ConfigError(
            f"a ring passes from block to block: serve neighbours, not {','.join(map(str, numbers))}"
        )


def _facts(
    config: Config, kind: Literal["blocks", "reference"], numbers: Iterable[int], model: str
) -> Facts:
    return Facts(
        kind,
        tuple(sorted(numbers)),
        config.width,
        config.context,
        config.z_width,
        config.fingerprint,
        model,
    )


def _frozen(block: IndependentBlock) -> IndependentBlock:
    return block.requires_grad_(False).eval()


def _truncate(caches: Sequence[Cache], starts: Sequence[int]) -> None:
    for cache, start in zip(caches, starts, strict=True):
        cache.truncate(start)


def _last(rows: Tensor, wanted: int) -> Tensor:
    """(N, T, W) -> the last `wanted` positions."""
    return rows[:, rows.shape[1] - wanted :]
