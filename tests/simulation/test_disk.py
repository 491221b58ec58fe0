"""The simulated disk loses what was not made durable, and nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from blocktrain.errors import Damaged, StorageFailed
from blocktrain.simulation.disk import SimulatedFiles
from blocktrain.store.blobs import FolderBlobs

ROOT = Path("/")


def new_files() -> SimulatedFiles:
    files = SimulatedFiles()
    files.make_folder(ROOT / "folder")
    files.sync_folder(ROOT)
    return files


def test_a_power_loss_leaves_old_new_torn_or_nothing_of_what_was_not_synced() -> None:
    found = set()
    for seed in range(60):
        files = new_files()
        path = files.create(ROOT / "folder", [b"content"])
        files.lose_power(random.Random(seed))
        found.add(files.read(path) if files.is_file(path) else None)
    assert {None, b"", b"content", bytes(7)} <= found
    assert any(content and b"content".startswith(content) for content in found - {b"content", None})


def test_what_was_synced_survives_under_its_synced_name() -> None:
    for seed in range(20):
        files = new_files()
        path = files.create(ROOT / "folder", [b"content"])
        files.sync(path)
        assert not files.is_durable(path)
        files.sync_folder(ROOT / "folder")
        assert files.is_durable(path)
        files.rename(path, ROOT / "folder" / "new")
        assert not files.is_durable(ROOT / "folder" / "new")
        files.lose_power(random.Random(seed))
        names = [name for name in (path.name, "new") if files.is_file(ROOT / "folder" / name)]
        assert all(files.read(ROOT / "folder" / name) == b"content" for name in names)


def test_blobs_survive_every_power_loss_once_put_has_returned() -> None:
    for seed in range(20):
        files = SimulatedFiles()
        blobs = FolderBlobs(ROOT, files=files)
        names = [blobs.put(b"%d" % number) for number in range(5)]
        blobs.put_chunk(1, 1, 0, b"a chunk")
        files.lose_power(random.Random(seed))
        again = FolderBlobs(ROOT, files=files)
        assert [again.read(name) for name in names] == [b"%d" % number for number in range(5)]
        chunks = again.chunks(1, 1)
        if chunks:  # perhaps torn: then it is sent again
            try:
                again.assemble(1, 1, [chunks[0]], chunks[0])
            except Exception as error:
                assert "send the chunks 0" in str(error)


def test_a_failed_sync_is_told_and_what_it_lost_stays_lost() -> None:
    files, failures = SimulatedFiles(), list[str]()
    blobs = FolderBlobs(ROOT, failures.append, files)
    files.effect = lambda step, _: step == "sync"
    with pytest.raises(StorageFailed, match="Input/output error"):
        blobs.put(b"content")
    assert failures
    path = files.create(ROOT / "partial", [b"content"])
    with pytest.raises(OSError, match="Input/output error"):
        files.sync(path)
    files.effect = lambda *_: False
    files.sync(path)  # as on Linux: no error, and no effect
    files.sync_folder(ROOT / "partial")
    assert not files.is_durable(path)


def test_a_blob_that_is_not_there_is_damaged() -> None:
    with pytest.raises(Damaged):
        FolderBlobs(ROOT, files=SimulatedFiles()).read("0" * 64)
