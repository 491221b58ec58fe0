"""The cache of shards: fetched once for all workers, within its limit, and never damaged."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from blocktrain.clock import SystemClock
from blocktrain.errors import RunError
from blocktrain.learning.shards import CorpusIndex, Shard, TokenSource
from blocktrain.protocol.messages import Blob
from blocktrain.protocol.transfer import sha256
from blocktrain.worker.shards import CachedShards, ShardCache
from support.waiting import until

SIZE = 1000
CONTENTS = [bytes([n]) * SIZE for n in range(8)]
SHARDS = [Shard(sha256=sha256(content), tokens=SIZE, bytes=SIZE) for content in CONTENTS]
BLOBS = [Blob(sha256=shard.sha256, length=SIZE) for shard in SHARDS]
INDEX = CorpusIndex(
    name="bytes",
    id_bytes=1,
    sources=(TokenSource(name="bytes", weight=1.0, shards=tuple(SHARDS)),),
    calibration=(SHARDS[0],),
    valid=(SHARDS[0],),
)
CONTENT_OF = dict(zip((blob.sha256 for blob in BLOBS), CONTENTS, strict=True))


class Origin:
    """Where shards come from, and how often each was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.open = threading.Event()
        self.open.set()

    def fetch(self, blob: Blob, target: Path) -> None:
        self.asked.append(blob.sha256)
        assert self.open.wait(30)
        partial = target.with_suffix(".partial")
        partial.write_bytes(CONTENT_OF[blob.sha256])
        partial.replace(target)  # others look at it meanwhile


def reader(folder: Path, origin: Origin, limit: int = 100 * SIZE) -> CachedShards:
    cache = ShardCache(folder, limit)
    return CachedShards(cache, INDEX, origin.fetch, SystemClock(), lambda: False)


def names(folder: Path) -> set[str]:
    return {path.name.removesuffix(".tok") for path in folder.glob("*.tok")}


def test_workers_of_a_machine_fetch_a_shard_once(tmp_path: Path) -> None:
    origin = Origin()
    readers = [reader(tmp_path, origin) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        ids = list(pool.map(lambda one: [one.open(shard) for shard in SHARDS], readers))
    assert sorted(origin.asked) == sorted(shard.sha256 for shard in SHARDS)
    for found in ids:
        assert [bytes(part) for part in found] == CONTENTS
        assert all(isinstance(part, np.memmap) for part in found)
    assert not list(tmp_path.glob("*.room"))


def test_shards_are_fetched_while_the_first_is_read(tmp_path: Path) -> None:
    origin = Origin()
    shards = reader(tmp_path, origin)
    shards.begin(BLOBS[:3], BLOBS[3:5])
    until(lambda: names(tmp_path) == {blob.sha256 for blob in BLOBS[:5]}, "five shards")
    assert origin.asked == [blob.sha256 for blob in BLOBS[:5]]
    shards.open(SHARDS[2])
    assert len(origin.asked) == 5


def test_least_recently_used_shards_make_room_but_none_in_use(tmp_path: Path) -> None:
    origin = Origin()
    mine, other = reader(tmp_path, origin, 4 * SIZE), reader(tmp_path, origin, 4 * SIZE)
    other.open(SHARDS[0])  # the oldest, and in use
    for shard in SHARDS[1:4]:
        mine.open(shard)
    mine.begin(BLOBS[3:4], ())  # lets the others go
    assert mine.open(SHARDS[3])[0] == 3
    reader(tmp_path, origin, 4 * SIZE).open(SHARDS[4])
    assert names(tmp_path) == {BLOBS[n].sha256 for n in (0, 2, 3, 4)}
    other.close()
    last = reader(tmp_path, origin, 4 * SIZE)
    last.open(SHARDS[5])
    last.open(SHARDS[6])
    assert BLOBS[0].sha256 not in names(tmp_path) and BLOBS[3].sha256 in names(tmp_path)


def test_a_limit_that_is_too_small_is_told_in_a_sentence(tmp_path: Path) -> None:
    origin = Origin()
    mine = reader(tmp_path, origin, 2 * SIZE)
    with pytest.raises(RunError, match="one task take 3 kB and --cache-limit allows 2 kB"):
        mine.begin(BLOBS[:3], ())
    mine.open(SHARDS[0])
    mine.open(SHARDS[1])
    with pytest.raises(RunError, match=r"--cache-limit allows 2 kB.*fewer workers"):
        reader(tmp_path, origin, 2 * SIZE).open(SHARDS[2])


def test_a_damaged_copy_is_fetched_again(tmp_path: Path) -> None:
    origin = Origin()
    reader(tmp_path, origin).open(SHARDS[1])
    (tmp_path / f"{SHARDS[1].sha256}.tok").write_bytes(CONTENTS[2])
    (tmp_path / f"{SHARDS[2].sha256}.tok").write_bytes(CONTENTS[2][:-1])
    again = reader(tmp_path, origin)
    assert [bytes(again.open(shard)) for shard in SHARDS[1:3]] == CONTENTS[1:3]
    assert origin.asked == [SHARDS[1].sha256, SHARDS[1].sha256, SHARDS[2].sha256]


def test_room_of_a_worker_that_was_killed_is_free_again(tmp_path: Path) -> None:
    name = SHARDS[0].sha256
    (tmp_path / f"{name}.room").write_bytes(bytes(SIZE))
    (tmp_path / f"{name}.tok.partial").write_bytes(CONTENTS[0][:300])
    (tmp_path / f"{SHARDS[7].sha256}.tok.partial").write_bytes(CONTENTS[7][:900])
    reader(tmp_path, Origin(), 2 * SIZE).open(SHARDS[1])
    other = reader(tmp_path, Origin(), 2 * SIZE)
    other.open(SHARDS[0])
    assert not list(tmp_path.glob("*.room"))
