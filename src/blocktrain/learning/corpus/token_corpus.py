"""A prepared corpus on the disk: ids of its parts, and batches in a block's order."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from blocktrain.config import Config
from blocktrain.errors import CorpusError
from blocktrain.learning.corpus.tokenize import INDEX
from blocktrain.learning.corpus.writer import byte_lengths, open_ids, shard_path
from blocktrain.learning.shards import (
    Batches,
    CorpusIndex,
    Shard,
    batches,
    order_of,
    read_index,
)
from blocktrain.learning.tokenizer import Ids, Tokenizer

OPEN_SHARDS = 8  # maps at a time; an order reads one shard of each source at a time


class Stretch(NamedTuple):
    """Tokens of the valid part that come one after another."""

    source: str
    first: int
    tokens: int
    bytes: int


class TokenCorpus:
    """Three parts: what blocks train on, what pool weights are fitted on, what is evaluated.

    Ids are memory-mapped. A shard is compared with its hash when it is first opened.
    """

    def __init__(self, index: CorpusIndex, folder: Path) -> None:
        self.index, self.folder = index, folder
        self._open: OrderedDict[str, Ids] = OrderedDict()
        self._intact: set[str] = set()
        self._evaluated = valid_stretches(index)

    @property
    def name(self) -> str:
        return self.index.name

    def open(self, shard: Shard) -> Ids:
        """The ids of a shard; CorpusError if it is not there or damaged."""
        if shard.sha256 not in self._open:
            ids = open_ids(self.folder, shard, self.index.dtype)
            if shard.sha256 not in self._intact:
                if hashlib.sha256(ids.data).hexdigest() != shard.sha256:
                    raise CorpusError(
                        f"shard {shard_path(self.folder, shard)} is damaged: it has another hash "
                        f"than its name; delete {self.folder} to prepare the corpus again"
                    )
                self._intact.add(shard.sha256)
            self._open[shard.sha256] = ids
            if len(self._open) > OPEN_SHARDS + len(self.index.sources):
                self._open.popitem(last=False)
        self._open.move_to_end(shard.sha256)
        return self._open[shard.sha256]

    @property
    def calibration(self) -> Ids:
        return self._concatenate(self.index.calibration)

    @property
    def valid(self) -> Ids:
        ids = self._concatenate(self.index.valid)
        if self.valid_tokens == len(ids):
            return ids
        return np.concatenate([ids[s.first : s.first + s.tokens] for s in self._evaluated])

    def _concatenate(self, shards: tuple[Shard, ...]) -> Ids:
        if len(shards) == 1:
            return self.open(shards[0])
        return np.concatenate([self.open(shard) for shard in shards])

    @property
    def train_bytes(self) -> int:
        """Of the text that blocks train on."""
        return sum(shard.bytes for source in self.index.sources for shard in source.shards)

    @property
    def valid_bytes(self) -> int:
        """Of the text that is evaluated."""
        return sum(stretch.bytes for stretch in self._evaluated)

    @property
    def valid_tokens(self) -> int:
        """Of the text that is evaluated."""
        return sum(stretch.tokens for stretch in self._evaluated)

    @property
    def bytes_per_token(self) -> float:
        """Of the valid part: turns nats per token into nats per byte."""
        return self.valid_bytes / self.valid_tokens

    def sizes(self) -> dict[str, int | float]:
        """How much there is of it."""
        everything = list(self.index.shards)
        text, tokens = sum(s.bytes for s in everything), _tokens(everything)
        return {
            "tokens": tokens,
            "bytes": text,
            "bytes_per_token": round(text / tokens, 4),
            "shards": len({shard.sha256 for shard in everything}),
            "train_tokens": self.index.train_tokens,
            "calibration_tokens": _tokens(self.index.calibration),
            "valid_tokens": _tokens(self.index.valid),
            "sources": len(self.index.sources),
        }

    def batches(self, config: Config, block: int) -> Batches:
        """In the order of a block."""
        return batches(order_of(self.index, config, block), config.batch, self.open)

    def limit_valid(self, size: int | None, tokenizer: Tokenizer) -> TokenCorpus:
        """This corpus with a valid part of at most `size` bytes; None keeps all of it.

        Of a mixture, each source keeps its share.
        """
        if size is None or size >= self.valid_bytes:
            return self
        share, ids = size / self.valid_bytes, self._concatenate(self.index.valid)
        return self._evaluating(
            [
                _shorten(stretch, int(stretch.bytes * share), ids, tokenizer)
                for stretch in self._evaluated
            ]
        )

    def by_source(self) -> dict[str, TokenCorpus]:
        """Of a mixture: this corpus with the valid part of each source alone."""
        if len(self._evaluated) < 2:
            return {}
        return {s.source: self._evaluating([s]) for s in self._evaluated if s.tokens > 1}

    def _evaluating(self, stretches: Sequence[Stretch]) -> TokenCorpus:
        corpus = TokenCorpus(self.index, self.folder)
        corpus._evaluated = tuple(stretches)
        return corpus

    def require(
        self, context: int, *parts: str, advice: str = "use a longer text or a smaller --context"
    ) -> None:
        """Refuse a corpus whose parts (all, or the named ones) do not fill one context."""
        # A sequence is in one shard, and every source has to have one.
        longest = {s.name: max(shard.tokens for shard in s.shards) for s in self.index.sources}
        shortest = min(longest, key=longest.__getitem__)
        sizes = {
            "train": longest[shortest],
            "calibration": _tokens(self.index.calibration),
            "valid": self.valid_tokens,
        }
        for part in parts or tuple(sizes):
            if sizes[part] < context + 1:
                whose = shortest if part == "train" else self.name
                raise CorpusError(
                    f"{whose}: the {part} part has {sizes[part]} tokens, "
                    f"fewer than one context of {context} + 1; {advice}"
                )


def valid_stretches(index: CorpusIndex) -> tuple[Stretch, ...]:
    """The valid part of each source; the whole, if it is not known where they begin."""
    whole = (Stretch(index.name, 0, _tokens(index.valid), sum(s.bytes for s in index.valid)),)
    if sum(source.valid_tokens for source in index.sources) != _tokens(index.valid):
        return whole
    stretches: list[Stretch] = []
    shards, names = iter(index.valid), unique_names([source.name for source in index.sources])
    for name, source in zip(names, index.sources, strict=True):
        first = stretches[-1].first + stretches[-1].tokens if stretches else 0
        tokens = size = 0
        while tokens < source.valid_tokens:  # a shard has text of one source
            shard = next(shards)
            tokens, size = tokens + shard.tokens, size + shard.bytes
        if tokens != source.valid_tokens:
            return whole
        stretches.append(Stretch(name, first, tokens, size))
    return tuple(stretches)


def unique_names(names: Sequence[str]) -> list[str]:
    """The same names, numbered where one comes again."""
    seen: Counter[str] = Counter()
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return result


def _shorten(stretch: Stretch, size: int, ids: Ids, tokenizer: Tokenizer) -> Stretch:
    """Its first tokens, of at most `size` bytes."""
    lengths = byte_lengths(tokenizer)
    if lengths is None:
        return stretch._replace(tokens=size, bytes=size)
    ends = np.cumsum(lengths[ids[stretch.first : stretch.first + min(size, stretch.tokens)]])
    count = int(np.searchsorted(ends, size, side="right"))
    return stretch._replace(tokens=count, bytes=int(ends[count - 1]) if count else 0)


def _tokens(shards: Iterable[Shard]) -> int:
    return sum(shard.tokens for shard in shards)


def is_prepared(folder: Path) -> bool:
    return (folder / INDEX).is_file() and (folder / "shards").is_dir()


def open_prepared(folder: Path) -> TokenCorpus:
    """The corpus that was prepared in a folder."""
    try:
        content = (folder / INDEX).read_bytes()
    except OSError as error:
        raise CorpusError(f"cannot read {folder / INDEX}: {error.strerror or error}") from None
    try:
        return TokenCorpus(read_index(content), folder)
    except CorpusError as error:
        raise CorpusError(f"{folder}: {error}; delete it to prepare the corpus again") from None
