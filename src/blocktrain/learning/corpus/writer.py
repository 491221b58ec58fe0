"""Writes shards, and keeps on the disk how far a text was tokenized.

A shard is committed together with the place in the input where the next one begins. After a crash
the text is read again from there, and the shards come out with the same hashes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blocktrain.errors import CorpusError
from blocktrain.files import sync_folder, write_atomic
from blocktrain.learning.shards import Shard
from blocktrain.learning.tokenizer import Ids, Tokenizer

COPY_TOKENS = 1 << 20
JOURNAL = "progress.json"
PARTIAL = "partial"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StreamRecord(_Record):
    """How far one stream of inputs was tokenized."""

    shards: tuple[Shard, ...] = ()
    number: Annotated[int, Field(ge=0)] = 0
    """Of the input in which the next shard begins."""
    mark: tuple[int, int, int] = (0, 0, 0)
    """Where in that input the piece begins with which the next shard begins."""
    skip: Annotated[int, Field(ge=0)] = 0
    """Tokens of that piece that are in the last shard."""
    separate: bool = False
    """Whether a separator of documents comes before that piece."""
    read: Annotated[int, Field(ge=0)] = 0
    """Bytes of text before the mark, for the progress bar."""
    done: bool = False

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)


class Journal(_Record):
    """How far all streams were tokenized."""

    streams: dict[str, StreamRecord] = {}


def read_journal(folder: Path) -> Journal:
    """The journal of a folder; an empty one, if there is none or its shards are not there."""
    try:
        journal = Journal.model_validate_json((folder / JOURNAL).read_bytes())
    except (OSError, ValidationError):
        return Journal()
    for record in journal.streams.values():
        for shard in record.shards:
            if not shard_path(folder, shard).is_file():
                return Journal()
    return journal


def write_journal(folder: Path, journal: Journal) -> None:
    write_atomic(folder / JOURNAL, journal.model_dump_json().encode())


def shard_path(folder: Path, shard: Shard) -> Path:
    return folder / "shards" / f"{shard.sha256}.tok"


class ShardWriter:
    """Ids in, files of at most `limit` ids out."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, limit: int) -> None:
        self.limit = limit
        self._folder, self.dtype = folder / "shards", tokenizer.dtype
        self._lengths = byte_lengths(tokenizer)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._partial = self._folder / PARTIAL
        self._begin()

    def _begin(self) -> None:
        self.tokens = self._bytes = 0
        self._digest = hashlib.sha256()
        self._file = self._partial.open("wb")

    def add(self, ids: Ids) -> None:
        """Append ids; not more than there is `room` for."""
        content = ids.astype(self.dtype, copy=False).tobytes()
        self._file.write(content)
        self._digest.update(content)
        self.tokens += len(ids)
        self._bytes += len(ids) if self._lengths is None else int(self._lengths[ids].sum())

    @property
    def room(self) -> int:
        return self.limit - self.tokens

    def finish(self) -> Shard:
        """The shard of what was added, durable under its name."""
        shard = Shard(sha256=self._digest.hexdigest(), tokens=self.tokens, bytes=self._bytes)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._partial.replace(self._folder / f"{shard.sha256}.tok")
        sync_folder(self._folder)
        self._begin()
        return shard

    def close(self) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)


def byte_lengths(tokenizer: Tokenizer) -> npt.NDArray[np.int64] | None:
    """Bytes that each id stands for; None if all are single bytes."""
    return None if (tokenizer.byte_lengths == 1).all() else tokenizer.byte_lengths


def open_ids(folder: Path, shard: Shard, dtype: np.dtype[np.unsignedinteger[Any]]) -> Ids:
    """The ids of a shard, memory-mapped; CorpusError if it is not there or has another size."""
    path = shard_path(folder, shard)
    try:
        size = path.stat().st_size
        if size == shard.tokens * dtype.itemsize:
            return np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        raise CorpusError(
            f"cannot read shard {path}: {error.strerror or error}; "
            f"delete {folder} to prepare the corpus again"
        ) from None
    raise CorpusError(
        f"shard {path} is damaged: it has {size} bytes instead of "
        f"{shard.tokens * dtype.itemsize}; delete {folder} to prepare the corpus again"
    )


def recut(
    folder: Path, shards: Sequence[Shard], sizes: Sequence[int], writer: ShardWriter
) -> list[Shard]:
    """The ids of these shards, one after another, as new shards of these sizes."""
    runs = _runs(folder, shards, writer)
    held: Ids = next(runs)
    result = []
    for size in sizes:
        while writer.tokens < size:
            if not len(held):
                held = next(runs)
            count = min(size - writer.tokens, len(held))
            writer.add(held[:count])
            held = held[count:]
        result.append(writer.finish())
    return result


def _runs(folder: Path, shards: Sequence[Shard], writer: ShardWriter) -> Iterator[Ids]:
    for shard in shards:
        ids = open_ids(folder, shard, writer.dtype)
        for start in range(0, len(ids), COPY_TOKENS):
            yield np.array(ids[start : start + COPY_TOKENS])
