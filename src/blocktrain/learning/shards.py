"""A corpus as shards of token ids, and the order in which a block reads them. Needs no torch.

A shard is a file of ids, named by its sha256. `CorpusIndex` lists the shards of a corpus; it is
small, so the coordinator and every worker have it, however large the corpus is. `SequenceOrder`
says which sequence each step reads: a pure function of (seed, block, position), in which no
sequence comes twice before every one came once. It goes through one shard after another, so a
worker needs only the one or two shards that its task reads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from blocktrain.config import LARGEST_SHARD, Config, sentence
from blocktrain.errors import CorpusError
from blocktrain.learning.tokenizer import Ids

FORMAT = "blocktrain-corpus-1"
SHARD_TOKENS = 1 << 22
LARGEST_INDEX = 1 << 28  # bytes
PATTERN = 1024  # sequences over which a mixture keeps its weights exactly, up to rounding
_PURPOSES = {"shards": 1, "sequences": 2, "shift": 3, "mixture": 4}

Batches = Callable[[int], npt.NDArray[np.int64]]
"""Number of a batch -> its ids (batch, context + 1)."""
OpenShard = Callable[["Shard"], Ids]
"""The ids of a shard, from wherever it is."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Shard(_Part):
    """A file of token ids."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    tokens: Annotated[int, Field(ge=1, le=LARGEST_SHARD)]
    bytes: Annotated[int, Field(ge=0)]
    """Of the text that the tokens stand for."""


class TokenSource(_Part):
    """One text of a mixture. A corpus of one text has one source of weight 1."""

    name: Annotated[str, Field(max_length=256)]
    weight: Annotated[float, Field(gt=0)]
    """Share of the sequences that come from it, relative to the other weights."""
    shards: Annotated[tuple[Shard, ...], Field(min_length=1)]
    valid_tokens: Annotated[int, Field(ge=0)] = 0
    """How many of the valid part, which has its sources one after another. 0: it is the only one,
    or the corpus is of an earlier release."""

    @model_serializer(mode="wrap")
    def _without_unknown(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """So that corpora of one text keep their hash."""
        fields = serialize(self)
        return {k: v for k, v in fields.items() if k != "valid_tokens" or v}


class CorpusIndex(_Part):
    """What a corpus consists of."""

    format: Literal["blocktrain-corpus-1"] = "blocktrain-corpus-1"
    name: Annotated[str, Field(max_length=256)]
    tokenizer: Annotated[str, Field(max_length=64)] = ""
    """Hash of the tokenizer that made the ids; empty for bytes."""
    id_bytes: Literal[1, 2, 4]
    sources: Annotated[tuple[TokenSource, ...], Field(min_length=1, max_length=PATTERN)]
    calibration: Annotated[tuple[Shard, ...], Field(min_length=1)]
    """Where pool weights are fitted and compositions compared. No block trains on it."""
    valid: Annotated[tuple[Shard, ...], Field(min_length=1)]

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        return np.dtype(f"<u{self.id_bytes}")

    @property
    def train_tokens(self) -> int:
        return sum(shard.tokens for source in self.sources for shard in source.shards)

    @property
    def shards(self) -> Iterable[Shard]:
        """All of them."""
        for source in self.sources:
            yield from source.shards
        yield from self.calibration
        yield from self.valid

    def file_bytes(self, shard: Shard) -> int:
        return shard.tokens * self.id_bytes

    def write(self) -> bytes:
        """Canonical JSON: equal corpora have equal bytes, and so an equal hash."""
        return json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":")).encode()

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.write()).hexdigest()


def same_tokens(one: CorpusIndex, other: CorpusIndex) -> bool:
    """Whether two corpora differ in nothing but their names."""

    def without_names(index: CorpusIndex) -> CorpusIndex:
        sources = tuple(source.model_copy(update={"name": ""}) for source in index.sources)
        return index.model_copy(update={"name": "", "sources": sources})

    return without_names(one) == without_names(other)


def read_index(content: bytes) -> CorpusIndex:
    """The index in these bytes; CorpusError says what is wrong with it."""
    if len(content) > LARGEST_INDEX:
        raise CorpusError(f"the index of the corpus has more than {LARGEST_INDEX} bytes")
    try:
        return CorpusIndex.model_validate_json(content)
    except ValidationError as error:
        raise CorpusError(f"the index of the corpus is damaged: {sentence(error)}") from None


class Place(NamedTuple):
    """Where a sequence of context + 1 ids begins."""

    shard: Shard
    offset: int


@dataclass(frozen=True)
class SequenceOrder:
    """The sequences of a corpus in the order of one block. Positions count sequences from 0.

    Every epoch permutes the shards of a source, and the sequences inside each shard, and begins to
    cut them at another token. In a mixture each source has its own epochs, and every PATTERN
    positions hold each source by its weight.
    """

    index: CorpusIndex
    context: int
    seed: int
    block: int

    def places(self, first: int, count: int) -> list[Place]:
        """Where the sequences of positions first, first + 1, ... begin."""
        return [self._place(position) for position in range(first, first + count)]

    def shards(self, first: int, count: int) -> list[Shard]:
        """The shards that these positions read; those of one source in the order of their need."""
        begin, end = self._read_before(first), self._read_before(first + count)
        return list(
            dict.fromkeys(
                shard
                for source, low, high in zip(self._sources, begin, end, strict=True)
                for shard in source.between(low, high)
            )
        )

    @property
    def sequences(self) -> int:
        """How many the whole corpus has: what an epoch of a single source reads."""
        return sum(source.total for source in self._sources)

    @cached_property
    def _sources(self) -> list[_SourceOrder]:
        return [
            _SourceOrder(source.shards, self.context, (self.seed, self.block, number))
            for number, source in enumerate(self.index.sources)
        ]

    def _place(self, position: int) -> Place:
        if len(self._sources) == 1:
            return self._sources[0].place(position)
        number = int(self._pattern(position // PATTERN)[position % PATTERN])
        return self._sources[number].place(self._read_before(position)[number])

    def _read_before(self, position: int) -> list[int]:
        """How many sequences of each source come before a position."""
        if len(self._sources) == 1:
            return [position]
        pattern, slot = divmod(position, PATTERN)
        begun = np.bincount(self._pattern(pattern)[:slot], minlength=len(self._sources))
        return [pattern * quota + int(n) for quota, n in zip(self._quotas, begun, strict=True)]

    @cached_property
    def _quotas(self) -> list[int]:
        return quotas([source.weight for source in self.index.sources], PATTERN)

    def _pattern(self, number: int) -> npt.NDArray[np.int64]:
        return _mixture(tuple(self._quotas), self.seed, self.block, number)


def order_of(index: CorpusIndex, config: Config, block: int) -> SequenceOrder:
    """The order in which a block reads a corpus. 0 is the end-to-end reference."""
    shared = config.data_order == "shared" and block > 0
    return SequenceOrder(index, config.context, config.seed, 1 if shared else block)


def quotas(weights: Sequence[float], size: int) -> list[int]:
    """`size` split by weights into whole numbers, at least one each: largest remainders first."""
    exact = np.array(weights) / sum(weights) * (size - len(weights))
    floor = np.floor(exact).astype(int)
    for number in np.argsort(floor - exact, kind="stable")[: size - len(weights) - floor.sum()]:
        floor[number] += 1
    return [int(quota) + 1 for quota in floor]


@dataclass(frozen=True)
class _SourceOrder:
    """The endless order of one source: epoch after epoch."""

    shards: tuple[Shard, ...]
    context: int
    key: tuple[int, int, int]  # seed, block, number of the source
    _epochs: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = field(
        default_factory=dict, compare=False
    )

    @cached_property
    def counts(self) -> npt.NDArray[np.int64]:
        """Sequences in each shard. One is given up, so that every epoch can cut elsewhere."""
        whole = (np.array([shard.tokens for shard in self.shards]) - 1) // self.context
        return np.maximum(whole - 1, np.minimum(whole, 1))

    @cached_property
    def total(self) -> int:
        return int(self.counts.sum())

    def place(self, position: int) -> Place:
        epoch, rest = self._split(position)
        order, ends = self._epoch(epoch)
        at = int(np.searchsorted(ends, rest, side="right"))
        number = int(order[at])
        begin = int(ends[at - 1]) if at else 0
        count = int(self.counts[number])
        row = int(_permutation(self.key, "sequences", epoch, number, count)[rest - begin])
        return Place(self.shards[number], self._shift(epoch, number) + row * self.context)

    def between(self, first: int, end: int) -> Iterator[Shard]:
        """The shards of positions first to end - 1."""
        while first < end:
            epoch, rest = self._split(first)
            order, ends = self._epoch(epoch)
            at = int(np.searchsorted(ends, rest, side="right"))
            yield self.shards[int(order[at])]
            first += int(ends[at]) - rest

    def _split(self, position: int) -> tuple[int, int]:
        """The epoch of a position, and its place in that epoch."""
        if not self.total:
            raise CorpusError(
                f"no shard of the corpus has {self.context + 1} tokens, which is one sequence; "
                "use a longer text or a smaller --context"
            )
        return divmod(position, self.total)

    def _shift(self, epoch: int, number: int) -> int:
        """The token at which an epoch begins to cut a shard."""
        spare = self.shards[number].tokens - 1 - int(self.counts[number]) * self.context
        return int(_draws(self.key, "shift", epoch, number).integers(0, spare, endpoint=True))

    def _epoch(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The shards in the order of an epoch, and the position at which each one ends."""
        if epoch not in self._epochs:
            order = _permutation(self.key, "shards", epoch, 0, len(self.shards))
            self._epochs.clear()  # one at a time: the next comes after very many positions
            self._epochs[epoch] = order, np.cumsum(self.counts[order])
        return self._epochs[epoch]


@lru_cache(64)
def _permutation(
    key: tuple[int, int, int], purpose: str, epoch: int, shard: int, size: int
) -> npt.NDArray[np.int64]:
    return _draws(key, purpose, epoch, shard).permutation(size)


@lru_cache(64)
def _mixture(sizes: tuple[int, ...], seed: int, block: int, number: int) -> npt.NDArray[np.int64]:
    choice = np.repeat(np.arange(len(sizes)), sizes)
    return _draws((seed, block, 0), "mixture", number, 0).permutation(choice)


def _draws(key: tuple[int, int, int], purpose: str, epoch: int, shard: int) -> np.random.Generator:
    """Random numbers by counter: equal keys give equal numbers, on every machine."""
    entropy = np.random.SeedSequence([*key, _PURPOSES[purpose], epoch, shard])
    return np.random.Generator(np.random.Philox(entropy))


def batches(order: SequenceOrder, batch: int, open_shard: OpenShard) -> Batches:
    """The batches of an order: number n has the sequences of positions n * batch and on."""

    def read(number: int) -> npt.NDArray[np.int64]:
        rows = [
            open_shard(place.shard)[place.offset : place.offset + order.context + 1]
            for place in order.places(number * batch, batch)
        ]
        return np.stack(rows).astype(np.int64)

    return read


def memory_batches(ids: Ids, *, context: int, batch: int, seed: int = 0, block: int = 1) -> Batches:
    """Batches of ids that are in memory, in the order of a corpus of one shard."""
    shard = Shard(sha256="0" * 64, tokens=len(ids), bytes=len(ids))
    source = TokenSource(name="memory", weight=1.0, shards=(shard,))
    index = CorpusIndex(
        name="memory", id_bytes=1, sources=(source,), calibration=(shard,), valid=(shard,)
    )
    return batches(SequenceOrder(index, context, seed, block), batch, lambda _: ids)
