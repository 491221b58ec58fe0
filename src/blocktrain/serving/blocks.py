"""What a stage or an entry computes: blocks of a fan, steps of the paper's path, or layers of the
end-to-end reference.

Several sessions share one forward pass: their rows go through the matrices together, and each
attends to its own cache. A row has the same bits as alone: matrices treat rows alike
(docs/method.md, "Same bits"), and attention never sees another session.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from blocktrain.config import Config, Topology
from blocktrain.errors import ConfigError
from blocktrain.learning.compose import euler_hop, in_pieces, middle_noise
from blocktrain.learning.model import (
    Cache,
    FanReadout,
    IndependentBlock,
    attend_cached,
    noise_features,
    target_table,
)
from blocktrain.learning.threads import use_threads

T = TypeVar("T")
SessionMemory = Any
"""What is kept of a session between its RUNs."""


@dataclass(frozen=True)
class BlockFacts:
    """What a stage says about its blocks."""

    kind: Literal["blocks", "reference"]
    blocks: tuple[int, ...]
    width: int
    context: int
    z_width: int
    fingerprint: str
    model: str
    vocabulary: int


@dataclass
class Rows:
    """New positions of one session: a whole RUN, or a piece of it."""

    memory: SessionMemory
    blocks: tuple[int, ...]
    start: int
    ids: Tensor  # (1, T)
    state: Tensor | None = None  # (1, T, state_width)
    tail: int = 0
    wanted: int = 0  # of the last positions


class ServedBlocks(Protocol):
    """Some blocks of a model. `work` is called on one thread only."""

    facts: BlockFacts
    device: torch.device  # what goes in must be there
    topology: Topology
    in_pieces: bool  # whether a RUN may be worked on in pieces, and with those of other sessions
    remembers: bool  # whether a RUN continues the ones before
    state_width: int  # of a position of the state that comes in; 0: none does
    pass_width: int  # of the state that a ring passes on
    last: bool  # whether a ring ends here

    def answer_width(self) -> int:
        """Of a position of the answer."""

    def fresh(self, blocks: tuple[int, ...]) -> SessionMemory:
        """The memory of a new session with these blocks."""

    def work(self, parts: Sequence[Rows]) -> list[Tensor]:
        """For every part its answer (blocks, wanted, width)."""


class ModelSource(Protocol):
    """A trained model as serving needs it: what it is, and how to load parts of it."""

    config: Config
    fan: bool  # whether blocks read only ids, so that all can be asked at once
    reference: bool  # the end-to-end model is served instead of the blocks
    compose: str  # how the blocks become one model, or "reference"
    model: str  # hash of the weights

    def load_blocks(self, numbers: Iterable[int]) -> dict[int, IndependentBlock]:
        """These blocks; only their files are read."""

    def load_readout(self) -> FanReadout:
        """The fusion block or the pool of a fan."""

    def load_reference(self) -> IndependentBlock:
        """The end-to-end model."""


class FanBlocks:
    """Independent blocks: ids in, features out."""

    topology: Topology = "fan"
    in_pieces = remembers = last = True
    state_width = pass_width = 0

    def __init__(self, config: Config, blocks: Mapping[int, IndependentBlock], model: str) -> None:
        self.facts = _facts(config, "blocks", blocks, model)
        self.blocks = {number: _freeze(blocks[number]) for number in self.facts.blocks}
        self.device = self.blocks[self.facts.blocks[0]].device
        self._noise = {
            n: middle_noise(config, n, self.device) if b.skip == "exact" else None
            for n, b in self.blocks.items()
        }

    def answer_width(self) -> int:
        """The features of a position."""
        return self.facts.width

    def fresh(self, blocks: tuple[int, ...]) -> SessionMemory:
        """A cache per block."""
        return {number: Cache(self.blocks[number], 1) for number in blocks}

    def work(self, parts: Sequence[Rows]) -> list[Tensor]:
        """Every block over the rows of all sessions that ask for it."""
        features: list[list[Tensor]] = [[] for _ in parts]
        for number, block in self.blocks.items():
            members = [i for i, part in enumerate(parts) if number in part.blocks]
            if not members:
                continue
            ids, caches = (
                [parts[i].ids for i in members],
                [parts[i].memory[number] for i in members],
            )
            _truncate(caches, [parts[i].start for i in members])
            sizes = [tokens.shape[1] for tokens in ids]
            x = through_layers(block, embed(block, ids, caches, self._noise[number]), sizes, caches)
            for i, rows in zip(members, x.split(sizes, dim=1), strict=True):
                features[i].append(rows)
        return [
            _last(torch.cat(rows), part.wanted) for rows, part in zip(features, parts, strict=True)
        ]


class ReferenceLayers:
    """Groups of layers of the end-to-end model.

    The first embeds ids, the last makes logits; the residual stream passes between them.
    """

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
        self.block = _freeze(reference)
        self.device = reference.device
        self.first, self.last = first == 1, last == config.blocks
        self.state_width, self.pass_width = (0 if self.first else config.width), config.width

    def answer_width(self) -> int:
        """Logits, or the residual stream."""
        return self.facts.vocabulary if self.last else self.facts.width

    def fresh(self, blocks: tuple[int, ...]) -> SessionMemory:
        """One cache for all layers."""
        return Cache(self.block, 1)

    def work(self, parts: Sequence[Rows]) -> list[Tensor]:
        """The layers over the rows of all sessions."""
        caches = [part.memory for part in parts]
        _truncate(caches, [part.start for part in parts])
        sizes = [part.ids.shape[1] for part in parts]
        if self.first:
            x = embed(self.block, [part.ids for part in parts], caches)
        else:
            x = torch.cat([part.state for part in parts if part.state is not None], dim=1)
        streams = through_layers(self.block, x, sizes, caches).split(sizes, dim=1)
        answers = [_last(rows, part.wanted) for rows, part in zip(streams, parts, strict=True)]
        if not self.last:
            return answers
        x = torch.cat(answers, dim=1)
        logits = (
            self.block(x) if x.shape[1] else x.new_zeros(1, 0, self.facts.vocabulary)
        )  # of a long RUN's first piece nothing may be wanted
        return list(logits.split([part.wanted for part in parts], dim=1))


class EulerSteps:
    """Steps of the paper's path over a whole window: ids and z in, z out; the last makes logits."""

    topology: Topology = "ring"
    in_pieces = remembers = False

    def __init__(self, config: Config, blocks: Mapping[int, IndependentBlock], model: str) -> None:
        self.config = config
        self.facts = _facts(config, "blocks", blocks, model)
        _require_neighbours(self.facts.blocks)
        self.blocks = {number: _freeze(blocks[number]) for number in self.facts.blocks}
        self.device = self.blocks[self.facts.blocks[0]].device
        self.table = target_table(config).to(self.device)
        self.last = self.facts.blocks[-1] == config.blocks
        self.state_width = self.pass_width = config.z_width

    def answer_width(self) -> int:
        """Logits, or z."""
        return self.facts.vocabulary if self.last else self.config.z_width

    def fresh(self, blocks: tuple[int, ...]) -> SessionMemory:
        """Nothing: z changes what positions attend to, so each RUN computes the whole window."""
        return None

    def work(self, parts: Sequence[Rows]) -> list[Tensor]:
        """One session after another: their windows are walked as the local path walks them."""
        return [self._walk(part) for part in parts]

    def _walk(self, part: Rows) -> Tensor:
        if part.state is None:
            raise ValueError("a step of the path needs z")
        z, logits = part.state, part.state
        for number, block in self.blocks.items():
            logits, z = euler_hop(
                self.config, number, block, self.table, part.ids, z, tail=part.tail
            )
        return _last(logits if self.last else z, part.wanted)


def serve_blocks(source: ModelSource, numbers: Sequence[int] = ()) -> ServedBlocks:
    """These blocks of a model as a stage serves them; none: all that a stage can serve."""
    config, reference = source.config, source.reference
    most = config.blocks if reference else config.independent
    numbers = tuple(numbers) or tuple(range(1, most + 1))
    wrong = [n for n in numbers if n > most]
    if not reference and wrong == [config.fusion]:
        raise ConfigError(
            f"block {wrong[0]} is the fusion block, which the entry holds; "
            f"serve some of 1 to {most}"
        )
    if wrong:
        raise ConfigError(f"this model has no block {wrong[0]} to serve; choose from 1 to {most}")
    if reference:
        return ReferenceLayers(config, source.load_reference(), numbers, source.model)
    make: type[FanBlocks] | type[EulerSteps] = FanBlocks if source.fan else EulerSteps
    return make(config, source.load_blocks(numbers), source.model)


def name_blocks(numbers: Iterable[int]) -> str:
    """block 3, or blocks 2, 3."""
    names = [str(number) for number in numbers]
    return f"block{'' if len(names) == 1 else 's'} {', '.join(names)}"


def parse_blocks(text: str) -> tuple[int, ...]:
    """2-3 or 1,3 or 1,3-4 as numbers in order; nothing means all."""
    numbers: set[int] = set()
    for part in text.split(",") if text else []:
        match = re.fullmatch(r"([0-9]{1,3})(?:-([0-9]{1,3}))?", part)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= low <= high:
            raise ConfigError(
                f"--blocks {text!r} is no list of blocks, for example 2 or 2-3 or 1,3"
            )
        numbers |= set(range(low, high + 1))
    return tuple(sorted(numbers))


class ComputeThread:
    """The one thread of an entry on which tensors are computed, so that nothing else waits."""

    def __init__(self, threads: int = 1) -> None:
        self._pool = ThreadPoolExecutor(1, "compute", use_threads, (threads,))
        self._waiting = 0

    @property
    def idle(self) -> bool:
        """Whether the next work would begin at once."""
        return not self._waiting

    async def run(self, work: Callable[[], T]) -> T:
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, _infer, work)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """End after what is under way."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _infer(work: Callable[[], T]) -> T:
    with torch.inference_mode():
        return work()


def local_features(
    served: FanBlocks,
    memory: dict[int, Cache],
    blocks: tuple[int, ...],
    ids: Sequence[int],
    start: int,
) -> Tensor:
    """Features (blocks, T, W) of ids from position `start` on, computed in this process."""
    tokens = torch.tensor([list(ids)], device=served.device)

    def work(part: slice) -> Tensor:
        piece = tokens[:, part]
        return served.work(
            [Rows(memory, blocks, start + part.start, piece, wanted=piece.shape[1])]
        )[0]

    return in_pieces(work, len(ids))


def _require_neighbours(numbers: tuple[int, ...]) -> None:
    if numbers != tuple(range(numbers[0], numbers[-1] + 1)):
        raise ConfigError(
            "a ring passes from block to block: "
            f"serve neighbours, not {','.join(map(str, numbers))}"
        )


def _facts(
    config: Config, kind: Literal["blocks", "reference"], numbers: Iterable[int], model: str
) -> BlockFacts:
    return BlockFacts(
        kind,
        tuple(sorted(numbers)),
        config.width,
        config.context,
        config.z_width,
        config.fingerprint,
        model,
        config.vocabulary,
    )


def _freeze(block: IndependentBlock) -> IndependentBlock:
    return block.requires_grad_(False).eval()


def _truncate(caches: Sequence[Cache], starts: Sequence[int]) -> None:
    for cache, start in zip(caches, starts, strict=True):
        cache.truncate(start)


def _last(rows: Tensor, wanted: int) -> Tensor:
    """(N, T, W) -> the last `wanted` positions."""
    return rows[:, rows.shape[1] - wanted :]


def embed(
    block: IndependentBlock,
    ids: Sequence[Tensor],
    caches: Sequence[Cache],
    c_noise: Tensor | None = None,
) -> Tensor:
    """The rows (1, R, W) that a block begins with: the ids (1, T) of one session after another."""
    x = torch.cat(
        [
            block.embed_tokens(tokens, cache.length, cache, 0)
            for tokens, cache in zip(ids, caches, strict=True)
        ],
        dim=1,
    )
    if c_noise is None:
        return x
    z = torch.zeros(*x.shape[:2], block.z_in.weight.shape[0], device=x.device)
    return x + block.z_in(z) + block.noise_in(noise_features(c_noise)).reshape(-1, 1, x.shape[-1])


def through_layers(
    block: IndependentBlock, x: Tensor, sizes: Sequence[int], caches: Sequence[Cache]
) -> Tensor:
    """The residual stream (1, R, W) after the block's layers.

    Session i has `sizes[i]` of the rows, and continues its own cache.
    """
    starts = [cache.length for cache in caches]
    for start, size in zip(starts, sizes, strict=True):
        if start + size > block.context:
            raise ValueError(
                f"positions {start} to {start + size} do not fit the context of {block.context}"
            )
    rotation = torch.cat(
        [
            block.rotation[:, start : start + size]
            for start, size in zip(starts, sizes, strict=True)
        ],
        dim=1,
    )
    masks = [
        block.visible(size, start, cache, 0)
        for start, size, cache in zip(starts, sizes, caches, strict=True)
    ]
    for number, layer in enumerate(block.layers):

        def look(q: Tensor, k: Tensor, v: Tensor, number: int = number) -> Tensor:
            outputs, at = [], 0
            for mask, start, size, cache in zip(masks, starts, sizes, caches, strict=True):
                own = slice(at, at + size)
                outputs.append(
                    attend_cached(
                        q[:, :, own], k[:, :, own], v[:, :, own], mask, cache.data[number], start
                    )
                )
                at += size
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

        x = layer(x, rotation, look)
    for cache, start, size in zip(caches, starts, sizes, strict=True):
        cache.length = start + size
    return x
