"""The corpus of a run: its index in memory, its shards in the store. Needs no torch.

Shards are linked into the store, not copied, and never read into memory. When the run is opened,
each must be there with its size. Its hash is checked when it is first sent.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from blocktrain.config import Config
from blocktrain.errors import CorpusError, Damaged, RunError
from blocktrain.learning.shards import CorpusIndex, SequenceOrder, order_of, read_index
from blocktrain.protocol.messages import MAX_SHARDS, Blob, CorpusBlobs
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.store.contract import BlobReader, Blobs


def store_corpus(blobs: Blobs, folder: Path, config: Config) -> Blob:
    """Take over a prepared corpus; its index as a blob."""
    content = _read_file(folder / "index.json")
    files = _shard_files(content, folder)
    if config.batch > MAX_SHARDS < len(files):
        raise CorpusError(
            f"a batch of {config.batch} sequences may read more than {MAX_SHARDS} shards; "
            f"use --batch {MAX_SHARDS} or less"
        )
    blobs.link(files)
    return Blob(sha256=blobs.put(content), length=len(content))


def restore_shards(blobs: Blobs, folder: Path) -> None:
    """Link the shards again, if the corpus of the run was prepared again after it was damaged."""
    content = _read_file(folder / "index.json")
    if blobs.has(hashlib.sha256(content).hexdigest()):
        blobs.link(_shard_files(content, folder))


def _shard_files(content: bytes, folder: Path) -> dict[str, Path]:
    """The files of all shards that an index names, by their hashes; each has its size."""
    index = read_index(content)
    files = {shard.sha256: folder / "shards" / f"{shard.sha256}.tok" for shard in index.shards}
    try:
        for shard in index.shards:
            size, path = index.file_bytes(shard), files[shard.sha256]
            if path.stat().st_size != size:
                raise CorpusError(
                    f"shard {path} is damaged: it has {path.stat().st_size} bytes instead of "
                    f"{size}; delete {folder.resolve()} to prepare the corpus again"
                )
    except OSError as error:
        raise _missing(error, folder) from None
    return files


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _missing(error, path.parent) from None


def _missing(error: OSError, folder: Path) -> CorpusError:
    return CorpusError(
        f"cannot read {error.filename}: {error.strerror}; "
        f"delete {folder.resolve()} to prepare the corpus again"
    )


class RunCorpus:
    """The shards of a run, and which of them a task reads."""

    def __init__(self, blobs: BlobReader, corpus: CorpusBlobs, config: Config) -> None:
        self._blobs, self._config = blobs, config
        try:
            self.index: CorpusIndex = read_index(blobs.read(corpus.index.sha256))
            for shard in self.index.shards:
                if blobs.size(shard.sha256) != self.index.file_bytes(shard):
                    raise Damaged(f"the shard {shard.sha256} has another size than the index says")
        except (Damaged, CorpusError) as error:
            raise RunError(
                f"{error}; the run cannot go on without its corpus: restore the file from a "
                "backup, or from the folder `shards` in the cache of a worker"
            ) from None
        self.names = frozenset(shard.sha256 for shard in self.index.shards)
        self._orders: dict[int, SequenceOrder] = {}  # by block
        self._intact: set[str] = set()
        self.shards = lru_cache(64)(self._shards)  # a task may be asked for more than once

    def _shards(self, block: int, first: int, end: int) -> tuple[Blob, ...]:
        """The shards that these batches of a block's order are in."""
        order = self._orders.get(block)
        if order is None:
            order = self._orders[block] = order_of(self.index, self._config, block)
        batch = self._config.batch
        return tuple(
            Blob(sha256=shard.sha256, length=self.index.file_bytes(shard))
            for shard in order.shards(first * batch, (end - first) * batch)
        )

    def most_steps(self, block: int, first: int, end: int) -> int:
        """How many of these steps a task may have, so that it can name all of its shards."""
        while end - first > 1 and len(self.shards(block, first, end)) > MAX_SHARDS:
            end = first + (end - first) // 2
        return end - first

    def verify(self, name: str) -> None:
        """Refuse to send a shard that is damaged. Each is hashed once."""
        if name not in self.names or name in self._intact:
            return
        try:
            self._blobs.verify(name)
        except Damaged:
            raise Refused(Code.DAMAGED, f"shard {name} of the corpus") from None
        self._intact.add(name)
