"""Text to a prepared corpus: `index.json`, and `shards/<sha256>.tok` beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from blocktrain.errors import CorpusError
from blocktrain.files import write_atomic
from blocktrain.learning.corpus.pieces import Mark
from blocktrain.learning.corpus.readers import Input
from blocktrain.learning.corpus.writer import (
    JOURNAL,
    Journal,
    ShardWriter,
    StreamRecord,
    read_journal,
    recut,
    shard_path,
    write_journal,
)
from blocktrain.learning.shards import SHARD_TOKENS, CorpusIndex, Shard, TokenSource, read_index
from blocktrain.learning.tokenizer import Ids, JsonTokenizer, Tokenizer

INDEX, KEY, TOKENIZER = "index.json", "source.sha256", "tokenizer.json"
VALID_SHARE, VALID_MAX = 0.05, 1 << 20  # tokens
CALIBRATION_SHARE, CALIBRATION_LEAST, CALIBRATION_MAX = 1 / 64, 4096, 1 << 18
BATCH = 64  # pieces that are encoded at once


class SourceText(NamedTuple):
    """One text of a corpus. Without a valid part of its own, the end of the train part is that."""

    name: str
    weight: float
    train: tuple[Input, ...]
    valid: tuple[Input, ...]


class TokenizeStatus(NamedTuple):
    """How far tokenizing is."""

    read: int  # bytes of the files
    size: int  # bytes of all files
    tokens: int


OnTokens = Callable[[TokenizeStatus], None]


def tokenize(
    name: str,
    texts: Sequence[SourceText],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    key: str,
    shard_tokens: int = SHARD_TOKENS,
    progress: OnTokens = lambda _: None,
) -> CorpusIndex:
    """Make the corpus of these texts in a folder, or go on where an earlier call stopped.

    `key` is another one when the shards may be others. One process at a time: see `Source`.
    """
    _begin(folder, key)
    if (folder / INDEX).is_file():
        try:
            return read_index((folder / INDEX).read_bytes())
        except CorpusError:  # damaged: its shards are made again
            (folder / INDEX).unlink()
    work = _Tokenizing(texts, tokenizer, folder, shard_tokens, progress)
    try:
        index = work.index(name)
    finally:
        work.writer.close()
    if isinstance(tokenizer, JsonTokenizer):
        write_atomic(folder / TOKENIZER, tokenizer.content)
    write_atomic(folder / INDEX, index.write())
    _remove_unused(folder, index)
    return index


def _begin(folder: Path, key: str) -> None:
    """Refuse a folder that holds something else."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / KEY
    if path.is_file() and path.read_bytes() == key.encode():
        return
    if any(folder.iterdir()):
        raise CorpusError(
            f"{folder} is not empty, and was not made from this text with this tokenizer; "
            "name another folder, or empty it"
        )
    write_atomic(path, key.encode())


def _remove_unused(folder: Path, index: CorpusIndex) -> None:
    (folder / JOURNAL).unlink(missing_ok=True)
    named = {shard_path(folder, shard).name for shard in index.shards}
    for path in (folder / "shards").iterdir():
        if path.name not in named:
            path.unlink()


class _Place(NamedTuple):
    """A piece of text, and what is needed to begin again with it."""

    text: bytes
    number: int  # of the input
    mark: Mark
    separate: bool  # whether a separator comes before it
    read: int  # bytes of the files so far


class _Tokenizing:
    """One call of `tokenize`."""

    def __init__(
        self,
        texts: Sequence[SourceText],
        tokenizer: Tokenizer,
        folder: Path,
        limit: int,
        progress: OnTokens,
    ) -> None:
        self._texts, self._tokenizer, self._folder = texts, tokenizer, folder
        self._progress = progress
        self._size = sum(i.file.size for text in texts for i in (*text.train, *text.valid))
        self._journal = read_journal(folder)
        self.writer = ShardWriter(folder, tokenizer, limit)
        self._separator = (
            tokenizer.encode(b"\n\n")
            if tokenizer.end_of_text is None
            else np.array([tokenizer.end_of_text], tokenizer.dtype)
        )

    def index(self, name: str) -> CorpusIndex:
        train = [self._stream(f"{n}/train", t.train) for n, t in enumerate(self._texts)]
        valid = [self._stream(f"{n}/valid", t.valid) for n, t in enumerate(self._texts)]
        sizes = split_sizes(self._texts, list(map(_tokens, train)), list(map(_tokens, valid)))
        sources, calibration, evaluated = [], [], []
        for text, shards, own, size in zip(self._texts, train, valid, sizes, strict=True):
            if own:
                parts = self._divide(shards, size[:2])
                parts += self._divide(own, [size[2], _tokens(own) - size[2]])[:1]
            else:
                parts = self._divide(shards, size)
            source = TokenSource(
                name=text.name[-256:],
                weight=text.weight,
                shards=tuple(parts[0]),
                valid_tokens=_tokens(parts[2]) if len(self._texts) > 1 else 0,
            )
            sources.append(source)
            calibration += parts[1]
            evaluated += parts[2]
        return CorpusIndex(
            name=name[-256:],
            tokenizer=tokenizer_hash(self._tokenizer),
            id_bytes=self._tokenizer.dtype.itemsize,  # type: ignore[arg-type]
            sources=tuple(sources),
            calibration=tuple(calibration),
            valid=tuple(evaluated),
        )

    def _divide(self, shards: list[Shard], parts: Sequence[int]) -> list[list[Shard]]:
        """Shards of parts of these sizes. Shards that are the same before and after stay."""
        sizes = [shard_sizes(part, self.writer.limit) for part in parts]
        flat = [size for part in sizes for size in part]
        same = [a.tokens == b for a, b in zip(shards, flat, strict=False)]
        kept = same.index(False) if False in same else len(same)
        if kept < len(flat):
            shards = shards[:kept] + recut(self._folder, shards[kept:], flat[kept:], self.writer)
        rest = iter(shards)
        return [list(islice(rest, len(part))) for part in sizes]

    def _stream(self, key: str, inputs: Sequence[Input]) -> list[Shard]:
        """All tokens of some inputs as shards of the same size; only the last may be smaller."""
        record = self._journal.streams.get(key, StreamRecord())
        if record.done or not inputs:
            return list(record.shards)
        skip, read, report = record.skip, record.read, self._reporter(key)
        tokens = _tokens(record.shards)
        for place, whole in self._encode(inputs, record):
            ids, used, skip = whole[skip:], skip, 0
            while len(ids) >= self.writer.room:
                count = self.writer.room
                self.writer.add(ids[:count])
                ids, used = ids[count:], used + count
                record = StreamRecord(
                    shards=(*record.shards, self.writer.finish()),
                    number=place.number,
                    mark=place.mark,
                    skip=used,
                    separate=place.separate,
                    read=read,
                )
                tokens += self.writer.limit
                self._commit(key, record)
            self.writer.add(ids)
            read = place.read
            report(read, tokens + self.writer.tokens)
        last = (self.writer.finish(),) if self.writer.tokens else ()
        record = StreamRecord(shards=(*record.shards, *last), read=read, done=True)
        self._commit(key, record)
        return list(record.shards)

    def _encode(
        self, inputs: Sequence[Input], record: StreamRecord
    ) -> Iterator[tuple[_Place, Ids]]:
        """The pieces from the record on with their ids, many pieces at a time."""
        pieces = self._pieces(inputs, record)
        while batch := list(islice(pieces, BATCH)):
            encoded = self._tokenizer.encode_batch([place.text for place in batch])
            for place, ids in zip(batch, encoded, strict=True):
                whole = np.concatenate([self._separator, ids]) if place.separate else ids
                yield place, whole

    def _pieces(self, inputs: Sequence[Input], record: StreamRecord) -> Iterator[_Place]:
        """Pieces that have text. A separator comes between two documents that have text."""
        mark, separate, begun = Mark(*record.mark), record.separate, False
        before = sum(entry.file.size for entry in inputs[: record.number])
        for number in range(record.number, len(inputs)):
            for piece in inputs[number].pieces(mark):
                if piece.text:
                    yield _Place(piece.text, number, mark, separate, before + piece.read)
                    separate, begun = False, True
                if piece.ends_document and begun:
                    separate, begun = True, False
                mark = piece.after
            mark = Mark()
            before += inputs[number].file.size

    def _commit(self, key: str, record: StreamRecord) -> None:
        self._journal = Journal(streams={**self._journal.streams, key: record})
        write_journal(self._folder, self._journal)

    def _reporter(self, key: str) -> Callable[[int, int], None]:
        """Tells how far a stream is, together with the others."""
        others = [record for name, record in self._journal.streams.items() if name != key]
        before = sum(record.read for record in others)
        tokens_before = sum(_tokens(record.shards) for record in others)

        def report(read: int, tokens: int) -> None:
            done = min(before + read, self._size)
            self._progress(TokenizeStatus(done, self._size, tokens_before + tokens))

        return report


def _tokens(shards: Sequence[Shard]) -> int:
    return sum(shard.tokens for shard in shards)


def split_sizes(
    texts: Sequence[SourceText], train: Sequence[int], valid: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Tokens of the train, calibration and valid part of every text, from what was read of each.

    In a mixture the calibration and valid parts have its weights, as far as the texts allow.
    """
    weights = [text.weight for text in texts]
    ends = [min(int(n * VALID_SHARE), VALID_MAX) or 1 for n in train]
    kept = by_weight([v or e for v, e in zip(valid, ends, strict=True)], weights)
    rest = [n - (0 if v else k) for n, v, k in zip(train, valid, kept, strict=True)]
    reserves = by_weight([calibration_size(n) for n in rest], weights)
    for text, total, left, reserve in zip(texts, train, rest, reserves, strict=True):
        if reserve < 1 or left - reserve < 1:
            raise CorpusError(
                f"{text.name} has only {total} tokens, which is too few to split into a train, "
                "a calibration and a valid part; use a longer text"
            )
    return [(n - r, r, k) for n, r, k in zip(rest, reserves, kept, strict=True)]


def by_weight(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """The most of each that has the weights, and is not more than there is."""
    if len(sizes) == 1:
        return list(sizes)
    unit = min(size / weight for size, weight in zip(sizes, weights, strict=True))
    return [
        min(size, max(int(unit * weight), min(size, 1)))
        for size, weight in zip(sizes, weights, strict=True)
    ]


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """As the index names it: empty for bytes."""
    return "" if tokenizer.name == "bytes" else tokenizer.hash


def calibration_size(train: int) -> int:
    """How many of the last tokens to train on are for fitting pool weights instead."""
    least = max(int(train * CALIBRATION_SHARE), CALIBRATION_LEAST)
    return min(least, CALIBRATION_MAX, train // 4)


def shard_sizes(tokens: int, limit: int) -> list[int]:
    """Whole shards; a rest of less than half a shard belongs to the last one."""
    sizes = [limit] * (tokens // limit)
    rest = tokens % limit
    if sizes and rest < limit / 2:
        sizes[-1] += rest
    elif rest:
        sizes.append(rest)
    return sizes
