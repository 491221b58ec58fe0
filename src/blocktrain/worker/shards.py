"""Shards of corpora on this machine: fetched once for all its workers, ahead of need.

    shards/SHA256.tok           a whole shard, with the bytes of its name
    shards/SHA256.tok.partial   as much of it as has arrived; continued after a kill
    shards/SHA256.room          as long as the shard, and locked while that is being fetched
    shards/lock                 locked while room is made

A shard that a worker reads is locked, too: it is not deleted to make room for others.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Protocol

import numpy as np

from blocktrain.clock import Clock
from blocktrain.errors import BlockTrainError, RunError
from blocktrain.files import make_private
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.shards import CorpusIndex, Shard
from blocktrain.learning.tokenizer import Ids
from blocktrain.protocol.messages import Blob
from blocktrain.units import amount
from blocktrain.worker.session import pause

CACHE_LIMIT = 20 * 10**9  # bytes
OPEN_SHARDS = 4  # at a time, and one of each source: an order reads one shard after another
WAIT_SECONDS = 0.1  # between two looks at a shard that another worker fetches
SUFFIX, PARTIAL, ROOM = ".tok", ".tok.partial", ".room"

Fetch = Callable[[Blob, Path], object]
"""Gets a blob into a file; it is there once its hash is right."""


class ShardReader(Protocol):
    """Where the shards of a task come from."""

    waited: float
    """Seconds that the current task has waited for its shards."""

    def begin(self, task: Sequence[Blob], likely: Sequence[Blob]) -> None:
        """A task that reads these shards, in this order; others will probably be needed next."""

    def open(self, shard: Shard) -> Ids:
        """The ids of a shard, however long it takes to get them."""

    def close(self) -> None: ...


@dataclass
class PreparedShards:
    """A prepared corpus on the same disk: nothing is fetched."""

    corpus: TokenCorpus
    waited: float = 0.0

    def begin(self, task: Sequence[Blob], likely: Sequence[Blob]) -> None:
        pass

    def open(self, shard: Shard) -> Ids:
        return self.corpus.open(shard)

    def close(self) -> None:
        pass


class ShardCache:
    """A folder of shards with a limit, shared by all workers of a machine."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self.limit = folder, limit
        self._intact: set[str] = set()  # hashed by this process

    def path(self, blob: Blob) -> Path:
        return self._folder / f"{blob.sha256}{SUFFIX}"

    def require_room(self, shards: Iterable[Blob]) -> None:
        """Refuse a task whose shards do not fit."""
        needed = sum(blob.length for blob in shards)
        if needed > self.limit:
            raise RunError(
                f"the shards of one task take {amount(needed)} and --cache-limit allows "
                f"{amount(self.limit)}; allow more"
            )

    def hold(self, blob: Blob) -> BufferedReader | None:
        """A shard that is here and intact, locked as long as the file is open; or None."""
        try:
            file = self.path(blob).open("rb")
        except FileNotFoundError:
            return None
        fcntl.flock(file, fcntl.LOCK_SH)
        here = os.fstat(file.fileno()).st_nlink > 0  # not deleted before it was locked
        if here and self._is_intact(file, blob):
            os.utime(file.fileno())  # the least recently used one is deleted first
            return file
        if here:  # an audit could not repeat what is trained on a damaged copy
            self.path(blob).unlink(missing_ok=True)
        file.close()
        return None

    def _is_intact(self, file: BufferedReader, blob: Blob) -> bool:
        if os.fstat(file.fileno()).st_size != blob.length:
            return False
        if blob.sha256 not in self._intact:
            if hashlib.file_digest(file, "sha256").hexdigest() != blob.sha256:
                return False
            self._intact.add(blob.sha256)
        return True

    def fetch(self, blob: Blob, fetch: Fetch) -> bool:
        """Get a shard that is not here. False: another worker is fetching it right now."""
        room = self._reserve(blob)
        if room is None:
            return False
        try:
            if not self.path(blob).exists():
                fetch(blob, self.path(blob))
                self._intact.add(blob.sha256)
        finally:
            with self._lock():
                (self._folder / f"{blob.sha256}{ROOM}").unlink(missing_ok=True)
                room.close()
        return True

    def _reserve(self, blob: Blob) -> BufferedWriter | None:
        """Make room for a shard, and keep it as long as the file is open."""
        with self._lock():
            path = self._folder / f"{blob.sha256}{ROOM}"
            if _is_locked(path):
                return None
            path.unlink(missing_ok=True)  # of a worker that was killed
            self._make_room(blob)
            room = path.open("wb")
            room.truncate(blob.length)  # takes no space
            fcntl.flock(room, fcntl.LOCK_EX)
            return room

    def _make_room(self, blob: Blob) -> None:
        """Delete what was not used for longest, until a shard fits."""
        files = [_CachedFile.of(path) for path in self._folder.iterdir() if path.name != "lock"]
        used = sum(file.size for file in files if file is not None)
        own = f"{blob.sha256}{PARTIAL}"  # it is continued, and counts as the shard itself
        used -= sum(file.size for file in files if file is not None and file.path.name == own)
        for file in sorted(filter(None, files), key=lambda file: file.used):
            if used + blob.length <= self.limit:
                return
            if file.path.name != own and file.delete():
                used -= file.size
        if used + blob.length > self.limit:
            raise RunError(
                f"the shards that the workers of this machine read take {amount(used)}, and "
                f"--cache-limit allows {amount(self.limit)}: a shard of {amount(blob.length)} "
                "does not fit; allow more, or start fewer workers"
            )

    @contextmanager
    def _lock(self) -> Iterator[None]:
        make_private(self._folder)
        with (self._folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


@dataclass(frozen=True)
class _CachedFile:
    path: Path
    size: int
    used: float  # when it was last used

    @classmethod
    def of(cls, path: Path) -> _CachedFile | None:
        try:
            stat = path.stat()
        except OSError:
            return None
        if path.name.endswith(PARTIAL) and _is_locked(_room_of(path)):
            return None  # it is in the room that is kept for it
        return cls(path, stat.st_size, stat.st_mtime)

    def delete(self) -> bool:
        """Remove the file, unless a worker uses it."""
        if _is_locked(self.path):
            return False
        self.path.unlink(missing_ok=True)
        return True


def _room_of(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(PARTIAL) + ROOM)


def _is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


class CachedShards:
    """The shards of one worker's tasks, through the cache of its machine."""

    def __init__(
        self,
        cache: ShardCache,
        index: CorpusIndex,
        fetch: Fetch,
        clock: Clock,
        stopped: Callable[[], bool],
    ) -> None:
        self._cache, self._index, self._fetch = cache, index, fetch
        self._clock, self._stopped = clock, stopped
        self._open: OrderedDict[str, tuple[BufferedReader, Ids]] = OrderedDict()
        self._cancelled = threading.Event()  # of the thread that fetches ahead
        self.waited = 0.0

    def begin(self, task: Sequence[Blob], likely: Sequence[Blob]) -> None:
        self._cache.require_room(task)
        self.waited = 0.0
        self._cancelled.set()
        self._cancelled = threading.Event()
        names = {blob.sha256 for blob in task}
        for name in [name for name in self._open if name not in names]:
            self._open.pop(name)[0].close()
        threading.Thread(
            target=self._fetch_ahead,
            args=((*task, *likely), self._cancelled),
            name="shards",
            daemon=True,
        ).start()

    def _fetch_ahead(self, shards: Sequence[Blob], cancelled: threading.Event) -> None:
        """What fails here fails again, and is told, when the shard is needed."""
        with suppress(BlockTrainError, OSError):
            for blob in shards:
                if cancelled.is_set() or self._stopped():
                    return
                if not self._cache.path(blob).exists():
                    self._cache.fetch(blob, self._fetch)

    def open(self, shard: Shard) -> Ids:
        if shard.sha256 not in self._open:
            file = self._get(Blob(sha256=shard.sha256, length=self._index.file_bytes(shard)))
            self._open[shard.sha256] = file, np.memmap(file, self._index.dtype, "r")
            if len(self._open) > OPEN_SHARDS + len(self._index.sources):
                self._open.popitem(last=False)[1][0].close()
        self._open.move_to_end(shard.sha256)
        return self._open[shard.sha256][1]

    def _get(self, blob: Blob) -> BufferedReader:
        began = self._clock.monotonic()
        while (file := self._cache.hold(blob)) is None:
            if not self._cache.fetch(blob, self._fetch):
                pause(self._clock, WAIT_SECONDS, self._stopped)
        self.waited += self._clock.monotonic() - began
        return file

    def close(self) -> None:
        self._cancelled.set()
        for file, _ in self._open.values():
            file.close()
        self._open.clear()
