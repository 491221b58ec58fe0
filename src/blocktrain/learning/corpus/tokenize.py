"""Text to a prepared corpus: `index.json`, and `shards/<sha256>.tok` beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
from blocktrain.learning.tokenizer import Ids, Tokenizer

INDEX = "index.json"
VALID_SHARE, VALID_MAX = 0.05, 1 << 20  # tokens
CALIBRATION_SHARE, CALIBRATION_LEAST, CALIBRATION_MAX = 1 / 64, 4096, 1 << 18
BATCH = 32  # pieces that are encoded at once


class SourceText(NamedTuple):
    """One text of a corpus. Without a valid part of its own, the end of the train part is that."""

    name: str
    weight: float
    train: tuple[Input, ...]
    valid: tuple[Input, ...]


class TokenizeStatus(NamedTuple):
    """How far tokenizing is."""

    read: int  # bytes of text
    size: int  # bytes of all inputs
    tokens: int


OnTokens = Callable[[TokenizeStatus], None]


def tokenize(
    name: str,
    texts: Sequence[SourceText],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    shard_tokens: int = SHARD_TOKENS,
    progress: OnTokens = lambda _: None,
) -> CorpusIndex:
    """Make the corpus of these texts in a folder, or go on where an earlier call stopped.

    One process at a time; `Source.open` has a lock for that.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / INDEX).is_file():
        return read_index((folder / INDEX).read_bytes())
    work = _Tokenizing(texts, tokenizer, folder, shard_tokens, progress)
    try:
        index = work.index(name)
    finally:
        work.writer.close()
    write_atomic(folder / INDEX, index.write())
    _remove_unused(folder, index)
    return index


def _remove_unused(folder: Path, index: CorpusIndex) -> None:
    (folder / JOURNAL).unlink(missing_ok=True)
    named = {shard_path(folder, shard).name for shard in index.shards}
    for path in (folder / "shards").iterdir():
        if path.name not in named:
            path.unlink()


class _Encoded(NamedTuple):
    """The ids of a piece, with what is needed to begin again at that piece."""

    ids: Ids
    number: int
    mark: Mark
    separate: bool
    size: int


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
        self._size = sum(i.size for text in texts for i in (*text.train, *text.valid))
        self._journal = read_journal(folder)
        self.writer = ShardWriter(folder, tokenizer, limit)
        self._separator = (
            tokenizer.encode(b"\n\n")
            if tokenizer.end_of_text is None
            else np.array([tokenizer.end_of_text], tokenizer.dtype)
        )

    def index(self, name: str) -> CorpusIndex:
        sources, calibration, valid = [], [], []
        for number, text in enumerate(self._texts):
            train, *others = self._parts(str(number), text)
            sources.append(
                TokenSource(name=text.name[-256:], weight=text.weight, shards=tuple(train))
            )
            calibration += others[0]
            valid += others[1]
        return CorpusIndex(
            name=name[-256:],
            tokenizer=tokenizer_hash(self._tokenizer),
            id_bytes=self._tokenizer.dtype.itemsize,  # type: ignore[arg-type]
            sources=tuple(sources),
            calibration=tuple(calibration),
            valid=tuple(valid),
        )

    def _parts(self, key: str, text: SourceText) -> list[list[Shard]]:
        """The shards of the train, calibration and valid part of a text."""
        shards = self._stream(f"{key}/train", text.train)
        own_valid = self._stream(f"{key}/valid", text.valid) if text.valid else None
        total = sum(shard.tokens for shard in shards)
        kept = 0 if own_valid else min(int(total * VALID_SHARE), VALID_MAX) or 1
        reserve = calibration_size(total - kept)
        if total - kept - reserve < 1 or reserve < 1 or own_valid == []:
            raise CorpusError(
                f"{text.name} has only {total} tokens, which is too few to split into a train, "
                "a calibration and a valid part; use a longer text"
            )
        sizes = [total - kept - reserve, reserve, *([kept] if kept else [])]
        parts = self._divide(shards, sizes)
        if own_valid:
            parts += self._divide(own_valid, [sum(shard.tokens for shard in own_valid)])
        return parts

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
        read, skip = record.read, record.skip
        while not record.done:
            for piece in self._encode(inputs, record):
                ids, used = piece.ids[skip:], skip
                skip = 0
                while len(ids) >= self.writer.room:
                    count = self.writer.room
                    self.writer.add(ids[:count])
                    ids, used = ids[count:], used + count
                    record = StreamRecord(
                        shards=(*record.shards, self.writer.finish()),
                        number=piece.number,
                        mark=piece.mark,
                        skip=used,
                        separate=piece.separate,
                        read=read,
                    )
                    self._commit(key, record)
                self.writer.add(ids)
                read += piece.size
                self._report(key, read, record.tokens + self.writer.tokens)
            last = (self.writer.finish(),) if self.writer.tokens else ()
            record = StreamRecord(shards=(*record.shards, *last), read=read, done=True)
            self._commit(key, record)
        return list(record.shards)

    def _encode(self, inputs: Sequence[Input], record: StreamRecord) -> Iterator[_Encoded]:
        """The ids of the pieces from the record on, many pieces at a time."""
        pieces = self._pieces(inputs, record)
        while batch := list(islice(pieces, BATCH)):
            encoded = encode_batch(self._tokenizer, [text for text, *_ in batch])
            for (text, number, mark, separate), ids in zip(batch, encoded, strict=True):
                whole = np.concatenate([self._separator, ids]) if separate else ids
                yield _Encoded(whole, number, mark, separate, len(text))

    def _pieces(
        self, inputs: Sequence[Input], record: StreamRecord
    ) -> Iterator[tuple[bytes, int, Mark, bool]]:
        """Pieces that have text, and whether a separator comes before each."""
        mark, separate, begun = Mark(*record.mark), record.separate, False
        for number in range(record.number, len(inputs)):
            for piece in inputs[number].pieces(mark):
                if piece.text:
                    yield piece.text, number, mark, separate
                    separate = False
                    begun = True
                if piece.ends_document and begun:
                    separate, begun = True, False
                mark = piece.after
            mark = Mark()

    def _commit(self, key: str, record: StreamRecord) -> None:
        self._journal = Journal(streams={**self._journal.streams, key: record})
        write_journal(self._folder, self._journal)

    def _report(self, key: str, read: int, tokens: int) -> None:
        others = [record for name, record in self._journal.streams.items() if name != key]
        self._progress(
            TokenizeStatus(
                read + sum(record.read for record in others),
                self._size,
                tokens + sum(record.tokens for record in others),
            )
        )


def encode_batch(tokenizer: Tokenizer, texts: Iterable[bytes]) -> list[Ids]:
    return [tokenizer.encode(text) for text in texts]


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
