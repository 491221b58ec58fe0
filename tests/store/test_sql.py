"""The embedded store: its folder, its database, and what it finds damaged."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from blocktrain.errors import Conflict, Damaged, RunError, StorageFailed
from blocktrain.protocol.ledger import BEGINNING, require_chain
from blocktrain.protocol.transfer import sha256
from blocktrain.store.blobs import FolderBlobs
from blocktrain.store.contract import Changes
from blocktrain.store.open import open_store, read_store
from blocktrain.store.sql import SqlStore
from support.store_records import entry, publish, record, started, update, version

SOURCE = str(Path(__file__).parents[2] / "src")


def blob_path(folder: Path, name: str) -> Path:
    return folder / "blobs" / name[:2] / name[2:4] / name


def test_the_database_itself_counts_a_task_once(tmp_path: Path) -> None:
    store = started(open_store(tmp_path))
    record(store, update(store, 1, b"one"))
    with (
        sqlite3.connect(tmp_path / "run.sqlite") as db,
        pytest.raises(sqlite3.IntegrityError, match=r"updates\.task"),
    ):
        db.execute("CREATE TEMP TABLE copy AS SELECT * FROM updates")
        db.execute("UPDATE copy SET id = 'x', payload = 'x'")
        db.execute("INSERT INTO updates SELECT * FROM copy")
    db.close()
    store.close()


def test_a_second_coordinator_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    code = f"from blocktrain.store.open import open_store; open_store({str(tmp_path)!r})"
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        other.returncode != 0
        and f"another coordinator (process {os.getpid()}) is using" in other.stderr
    )
    with pytest.raises(RunError, match="another coordinator"):
        open_store(tmp_path)
    assert store.epoch == 1 and store.head() is None
    store.close()
    assert open_store(tmp_path).epoch == 2


def test_one_that_was_overtaken_writes_nothing(tmp_path: Path) -> None:
    store = started(open_store(tmp_path))
    late = entry(store, "finish", reason="late")
    with sqlite3.connect(tmp_path / "run.sqlite") as other:
        other.execute("UPDATE meta SET epoch = epoch + 1")
    other.close()
    with pytest.raises(StorageFailed, match="taken over"):
        store.save(Changes(entries=[late]))
    with pytest.raises(StorageFailed, match="closed"):
        store.head()


def test_swapped_folders_are_noticed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        store = open_store(tmp_path / name)
        started(store)
        store.close()
    with pytest.raises(RunError, match="holds the run"):
        open_store(tmp_path / "a", run_id="0" * 32)
    shutil.rmtree(tmp_path / "a" / "blobs")
    with pytest.raises(RunError, match="missing"):
        open_store(tmp_path / "a")
    shutil.copytree(tmp_path / "b" / "blobs", tmp_path / "a" / "blobs", dirs_exist_ok=True)
    with pytest.raises(RunError, match="another run"):
        open_store(tmp_path / "a")
    with sqlite3.connect(tmp_path / "b" / "run.sqlite") as other:
        other.execute("UPDATE meta SET schema = 99")
    other.close()
    with pytest.raises(RunError, match="another BlockTrain"):
        open_store(tmp_path / "b")


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_flipped_bit_is_found_on_read_and_healed_by_a_new_copy(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    name = blobs.put(b"x" * 1000)
    flip(blob_path(tmp_path, name), 500)
    for reading in (blobs.read, blobs.verify):
        with pytest.raises(Damaged, match="damaged on disk"):
            reading(name)
    assert blobs.put(b"x" * 1000) == name
    blobs.verify(name)


def test_a_blob_on_another_disk_is_exported_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A corpus may be larger than the disk of temporary files."""

    def cross_device(*_: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr("os.link", cross_device)
    blobs = FolderBlobs(tmp_path)
    name, target = blobs.put(b"text"), tmp_path / "exported"
    blobs.export(name, target)
    assert target.read_bytes() == b"text" and target.is_symlink()
    with pytest.raises(Damaged, match="cannot be read"):
        blobs.export(sha256(b"missing"), target)
    assert target.read_bytes() == b"text"


def test_damaged_chunks_are_asked_for_again(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    parts = [bytes([i]) * 100 for i in range(5)]
    names, whole = [sha256(p) for p in parts], sha256(b"".join(parts))
    for index, part in enumerate(parts):
        blobs.put_chunk(7, 1, index, part)
    flip(tmp_path / "uploads" / "7.1" / f"4.{names[4]}", 50)
    with pytest.raises(Conflict, match=r"chunks 4 \(of 5\)"):
        blobs.assemble(7, 1, names, whole)
    blobs.put_chunk(7, 1, 4, parts[4])
    assert blobs.read(blobs.assemble(7, 1, names, whole)) == b"".join(parts)
    assert list((tmp_path / "partial").iterdir()) == []


def test_an_address_names_a_store(tmp_path: Path) -> None:
    store = open_store((tmp_path / "a b").as_uri())
    assert isinstance(store, SqlStore) and (tmp_path / "a b" / "run.sqlite").is_file()
    started(store)
    reader = read_store(store.address)
    assert reader.ledger() == store.ledger() and reader.run() == store.run()
    reader.close()
    store.close()
    memory = open_store("memory:")
    assert memory.address == "" and open_store("memory:").run_id != memory.run_id
    for bad in ("postgresql://host/run", "file://host/run"):
        with pytest.raises(RunError, match="no address of a store"):
            open_store(bad)
    with pytest.raises(RunError, match="its own process"):
        read_store("memory:")


def test_reading_takes_no_lock_and_leaves_nothing_behind(tmp_path: Path) -> None:
    store = started(open_store(tmp_path))
    beside = read_store(tmp_path)  # while it is in use
    sent = update(store, 1)
    record(store, sent)
    publish(store, version(store, 1, b"new"), [sent.id])
    assert len(beside.ledger()) == 2, "as of the moment when it was opened"
    beside.close()
    reader = read_store(tmp_path)
    assert reader.contributions() == {"w": (1, 640)} and len(reader.ledger(after=2)) == 2
    assert reader.blobs.read(sent.payload) == b"payload"
    reader.close()
    store.close()
    before = sorted(tmp_path.iterdir())
    read_store(tmp_path).close()
    assert sorted(tmp_path.iterdir()) == before


def test_ledger_only_grows_and_shows_every_change(tmp_path: Path) -> None:
    store = started(open_store(tmp_path))
    entries = store.ledger()
    store.close()
    assert read_store(tmp_path).ledger() == entries and entries[0].previous == BEGINNING
    db = sqlite3.connect(tmp_path / "run.sqlite")
    for change in ("UPDATE ledger SET kind = 'x'", "DELETE FROM ledger"):
        with pytest.raises(sqlite3.IntegrityError, match="only grows"):
            db.execute(change)
    db.execute("DROP TRIGGER ledger_no_update")
    db.execute("UPDATE ledger SET body = replace(body, 'blocks', 'stocks') WHERE seq = 1")
    db.commit()
    with pytest.raises(Damaged, match="broken at entry 1"):
        require_chain(read_store(tmp_path).ledger())
    db.execute("UPDATE ledger SET kind = 'gossip' WHERE seq = 1")
    db.commit()
    db.close()
    with pytest.raises(RunError, match="newer BlockTrain"):
        read_store(tmp_path).ledger()
    with pytest.raises(RunError, match="holds no run"):
        read_store(tmp_path / "uploads")


@pytest.mark.parametrize("damage", ["UPDATE meta SET document = '{'", "DELETE FROM meta"])
def test_a_damaged_run_document_is_one_sentence(tmp_path: Path, damage: str) -> None:
    started(open_store(tmp_path)).close()
    db = sqlite3.connect(tmp_path / "run.sqlite")
    db.execute(damage)
    db.commit()
    db.close()
    with pytest.raises(Damaged, match="restore it from a backup"):
        read_store(tmp_path).run()


def test_settings_that_durability_rests_on(tmp_path: Path) -> None:
    store = SqlStore(tmp_path)
    with store._transaction() as db:
        found = {
            p: db.exec_driver_sql(f"PRAGMA {p}").scalar()
            for p in ("journal_mode", "synchronous", "foreign_keys")
        }
    assert found == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}


def test_no_torch_in_the_control_plane() -> None:
    code = (
        "import sys, blocktrain.store.sql, blocktrain.coordinator.merging.merge;"
        "sys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONPATH": SOURCE}, check=False
        ).returncode
        == 0
    )


def test_files_of_another_disk_are_copied(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=Path("/dev/shm")) as folder:
        path = Path(folder) / "shard.tok"
        path.write_bytes(b"x" * 100)
        if path.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("there is only one disk")
        store = open_store(tmp_path / "s")
        store.blobs.link({sha256(b"x" * 100): path})
        store.close()
    reader = open_store(tmp_path / "s")
    assert reader.blobs.read(sha256(b"x" * 100)) == b"x" * 100
    reader.close()
