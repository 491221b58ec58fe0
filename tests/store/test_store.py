"""The store: what was acknowledged is there, once, whatever is killed; what failed is never acknowledged."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blocktrain.coordinator.state import Lease, RoundState, WorkerState
from blocktrain.errors import Conflict, Damaged, RunError, StorageFailed
from blocktrain.protocol.transfer import sha256
from blocktrain.store.blobs import Blobs
from blocktrain.store.contract import (
    Changes,
    Store,
    Traffic,
    UpdateRecord,
    VersionRecord,
    WorkerRecord,
)
from blocktrain.store.ledger import GENESIS, Entry, Note, canonical, link, verify
from blocktrain.store.sql import EmbeddedStore, open_store, read_ledger

SOURCE = str(Path(__file__).parents[2] / "src")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EmbeddedStore]:
    opened = open_store(tmp_path / "s")
    yield opened
    opened.close()


def lease(task: int, **changes: object) -> Lease:
    made = Lease(
        task,
        task - 1,
        1,
        0,
        1,
        "w",
        steps=10,
        start_step=0,
        granted=90.0,
        expires=160.0,
        expected=20.0,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def update(
    store: Store, number: int, content: bytes = b"payload", **changes: object
) -> UpdateRecord:
    payload = store.blobs.put(content)
    made = UpdateRecord(
        number, 1, 1, 0, "w", payload, len(content), 640, 10, 2.5, 0, 1.0, True, "accepted"
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def version(
    store: Store, number: int, content: bytes = b"weights", **changes: object
) -> VersionRecord:
    made = VersionRecord(
        1,
        number,
        store.blobs.put(content),
        None,
        10 * number,
        640 * number,
        2.0,
        (1.0, 2.0),
        "all replicas are here",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def receipt(entry: Entry) -> bytes:
    return canonical({"entry": entry.seq, "hash": entry.hash}).encode()


def started(store: Store) -> Store:
    store.create_run({"blocks": 1, "fingerprint": "f"})
    store.publish_version(100.0, version(store, 0), [], {}, {})
    store.save(
        100.0,
        Changes(
            leases=[lease(1), lease(2)],
            workers=[WorkerRecord(WorkerState("w", 1, 100.0, 0.5, 1.0), "key", "laptop")],
        ),
    )
    return store


def test_one_run_from_its_start_to_a_version(store: Store) -> None:
    started(store)
    assert store.create_run({"fingerprint": "f", "blocks": 1}) is False
    with pytest.raises(Conflict, match="other settings"):
        store.create_run({"blocks": 2})
    sent = update(store, 1)
    answer = store.record_update(101.0, sent, receipt, {"nonce": "n"})
    assert (answer.update, answer.repeated) == (sent, False)
    assert store.pending(1) == (sent,)
    entry = store.publish_version(
        102.0, version(store, 1, b"new"), [sent.id], {}, {"order": [sent.id]}
    )
    assert entry.value["applied"] == [sent.id] and entry.value["parent"] == sha256(b"weights")
    newest, first = store.version(1), store.version(1, 0)
    assert (
        newest is not None
        and newest.version == 1
        and first is not None
        and first.weights == sha256(b"weights")
    )
    assert store.pending(1) == () and store.contributions() == {"w": (1, 640)}
    kinds = [e.kind for e in store.ledger()]
    assert kinds == ["run", "version", "update", "version"]
    assert verify(store.ledger()) == store.head() == entry
    assert [e.seq for e in store.ledger(after=2, limit=1)] == [3]
    assert store.run() == {"blocks": 1, "fingerprint": "f"}


def test_same_submission_gets_the_same_answer_for_ever(store: Store) -> None:
    sent = update(started(store), 1)
    first = store.record_update(101.0, sent, receipt, {}, Changes(nonces=[("w", "n", 1.0)]))
    before = len(store.ledger())
    again = store.record_update(
        300.0, replace(sent, fence=9), lambda _: b"another", {}, Changes(nonces=[("w", "n", 1.0)])
    )
    assert again.repeated and again.receipt == first.receipt and again.update == sent
    assert store.answer(1, sent.payload) == again and store.answer(2, sent.payload) is None
    assert len(store.ledger()) == before
    store.publish_version(102.0, version(store, 1, b"new"), [sent.id], {}, {})
    assert store.record_update(400.0, sent, receipt, {}).receipt == first.receipt


def test_a_task_counts_once_even_with_two_payloads(store: EmbeddedStore) -> None:
    started(store)
    store.record_update(101.0, update(store, 1, b"one"), receipt, {})
    with pytest.raises(Conflict, match="not out"):
        store.record_update(101.0, update(store, 1, b"two"), receipt, {})
    assert len(store.pending(1)) == 1
    with (
        sqlite3.connect(store.folder / "run.sqlite") as db,
        pytest.raises(sqlite3.IntegrityError, match=r"updates\.task"),
    ):
        db.execute("CREATE TEMP TABLE copy AS SELECT * FROM updates")
        db.execute("UPDATE copy SET id = 'x', payload = 'x'")
        db.execute("INSERT INTO updates SELECT * FROM copy")
    db.close()


def test_a_refused_update_does_not_use_up_its_task(store: Store) -> None:
    started(store)
    bad = update(store, 1, b"nan", accepted=False, code="not_finite", weight=0.0)
    assert store.record_update(101.0, bad, receipt, {}).update.code == "not_finite"
    assert store.record_update(101.0, bad, receipt, {}).repeated
    assert store.pending(1) == ()
    assert not store.record_update(102.0, update(store, 1, b"good"), receipt, {}).repeated


REFUSED: list[dict[str, Any]] = [
    {"fence": 0},
    {"fence": 2},
    {"worker": "x"},
    {"base": 1},
    {"block": 2},
    {"task": 77},
]


@pytest.mark.parametrize(
    "changes", REFUSED, ids=[next(iter(c)) + str(next(iter(c.values()))) for c in REFUSED]
)
def test_fence_is_checked_in_the_transaction(store: Store, changes: dict[str, Any]) -> None:
    started(store)
    before = store.head()
    with pytest.raises(Conflict, match="not out"):
        store.record_update(101.0, update(store, 1, **changes), receipt, {})
    assert store.head() == before and store.pending(1) == ()


def test_fences_only_rise_and_finished_tasks_stay_finished(store: Store) -> None:
    started(store)
    store.save(101.0, Changes(leases=[lease(1, fence=2, worker="x")]))
    for bad in (lease(1), lease(1, fence=2, worker="y")):
        with pytest.raises(Conflict, match="fence 2 of x"):
            store.save(102.0, Changes(leases=[bad]))
    with pytest.raises(Conflict, match="not out"):
        store.record_update(103.0, update(store, 1), receipt, {})
    store.record_update(103.0, update(store, 1, fence=2, worker="x"), receipt, {})
    with pytest.raises(Conflict, match="over"):
        store.save(104.0, Changes(leases=[lease(1, fence=3)]))


def test_a_version_follows_its_parent_and_settles_every_update(store: Store) -> None:
    sent = update(started(store), 1)
    with pytest.raises(Conflict, match="not stored"):
        store.record_update(101.0, replace(sent, payload="0" * 64), receipt, {})
    store.record_update(101.0, sent, receipt, {})
    before = store.head()
    for number, applied, dropped in [
        (0, [sent.id], {}),
        (2, [sent.id], {}),
        (1, [], {}),
        (1, [sent.id, "x"], {}),
        (1, [sent.id], {sent.id: "no"}),
    ]:
        with pytest.raises(Conflict):
            store.publish_version(102.0, version(store, number), applied, dropped, {})
    with pytest.raises(Conflict, match="not stored"):
        store.publish_version(102.0, version(store, 1, weights="1" * 64), [sent.id], {}, {})
    assert store.head() == before
    entry = store.publish_version(102.0, version(store, 1), [], {sent.id: "not finite"}, {})
    assert entry.value["dropped"] == {sent.id: "not finite"} and store.contributions() == {}
    second = update(store, 2)
    store.save(103.0, Changes(leases=[lease(2)]))
    store.record_update(103.0, second, receipt, {})
    store.save(
        104.0,
        Changes(
            dropped={second.id: "worse than its parent"},
            notes=[Note("guard", {"update": second.id})],
        ),
    )
    assert store.pending(1) == ()
    with pytest.raises(Conflict, match="cannot be dropped"):
        store.save(104.0, Changes(dropped={second.id: "twice"}))


def test_nonces_traffic_and_workers(store: Store) -> None:
    started(store)
    store.save(
        1.0,
        Changes(
            nonces=[("w", "n", 5.0)],
            traffic=[Traffic(1, "w", 10, 1), Traffic(1, "w", 5, 2), Traffic(2, "w", 1)],
        ),
    )
    head = store.head()
    with pytest.raises(Conflict):
        store.save(1.0, Changes(nonces=[("w", "n", 6.0)], notes=[Note("lost", {})]))
    assert store.head() == head, "a refused change must leave nothing behind"
    assert store.forget_nonces(5.5) == 1
    store.save(1.0, Changes(nonces=[("w", "n", 6.0)]))
    assert store.traffic() == [Traffic(1, "w", 15, 3), Traffic(2, "w", 1, 0)]
    store.save(
        1.0,
        Changes(
            workers=[WorkerRecord(WorkerState("w", 2, 1.0, 0.25, kicked=True), "key", "laptop")]
        ),
    )
    (known,) = store.workers()
    assert known.state.block == 2 and known.state.kicked and known.state.seconds_per_step == 0.25


def test_recovery_counts_remaining_time_from_the_new_clock(tmp_path: Path) -> None:
    store = started(open_store(tmp_path))
    current = RoundState(deadline=150.0, length=60.0, extended=True, grace_until=155.0, attempt=2)
    store.record_update(120.0, update(store, 1), receipt, {}, Changes(rounds={1: (0, current)}))
    store.save(130.0, Changes(leases=[lease(2, fence=3, worker="x", expired=True, trained=True)]))
    store.close()
    state = open_store(tmp_path).recover(now=7.0, fusion=1)
    block = state.blocks[1]
    assert block.round.deadline == 7.0 + 30.0 and block.round.grace_until == 7.0 + 35.0
    assert block.round.extended and block.round.attempt == 2 and block.round.length == 60.0
    assert [(u.worker, u.tokens, u.steps) for u in block.round.updates] == [("w", 640, 10)]
    assert (
        block.fusion
        and block.next_number == 2
        and block.task_seconds == (2.5,)
        and block.version == 0
    )
    assert set(state.leases) == {2} and state.next_task == 3
    out = state.leases[2]
    assert (out.fence, out.worker, out.expired, out.trained, out.expires, out.granted) == (
        3,
        "x",
        True,
        True,
        7.0 + 30.0,
        7.0 - 40.0,
    )
    assert state.workers["w"].seen == 7.0


def test_a_second_coordinator_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    code = f"from pathlib import Path; from blocktrain.store.sql import open_store; open_store(Path({str(tmp_path)!r}))"
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
    with sqlite3.connect(tmp_path / "run.sqlite") as other:
        other.execute("UPDATE meta SET epoch = epoch + 1")
    other.close()
    with pytest.raises(StorageFailed, match="taken over"):
        store.save(1.0, Changes(notes=[Note("late", {})]))
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


def test_flipped_bit_is_found_on_read_and_healed_by_a_new_copy(store: Store) -> None:
    name = store.blobs.put(b"x" * 1000)
    assert store.blobs.read(name) == b"x" * 1000 and store.blobs.size(name) == 1000
    flip(store.blobs.path(name), 500)
    for reading in (store.blobs.read, store.blobs.verify):
        with pytest.raises(Damaged, match="damaged on disk"):
            reading(name)
    assert store.blobs.put(b"x" * 1000) == name
    store.blobs.verify(name)
    store.blobs.delete(name)
    with pytest.raises(Damaged, match="cannot be read"):
        store.blobs.read(name)


def test_blob_names_never_reach_a_path_unchecked(store: Store) -> None:
    for name in ("../../etc/passwd", "A" * 64, "a" * 63, "a" * 64 + "\n", "", "a" * 65):
        with pytest.raises(Conflict, match="64 hex digits"):
            store.blobs.read(name)
    with pytest.raises(Conflict, match="not to"):
        store.blobs.put_stream([b"some", b"thing"], sha256(b"else"))
    assert list(store.blobs.names()) == []
    with pytest.raises(Conflict, match="integers"):
        store.blobs.put_chunk("../x", 1, 0, b"")  # type: ignore[arg-type]


def test_upload_in_chunks_survives_restarts_and_rot(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    parts = [bytes([i]) * 100 for i in range(5)]
    names, whole = [sha256(p) for p in parts], sha256(b"".join(parts))
    for index in (0, 3, 4, 3):
        assert blobs.put_chunk(7, 1, index, parts[index]) == names[index]
    blobs.put_chunk(7, 2, 1, b"of another lease")
    with pytest.raises(Conflict, match=r"chunks 1, 2 \(of 5\)"):
        blobs.assemble(7, 1, names, whole)
    blobs = Blobs(tmp_path)
    assert blobs.chunks(7, 1) == {i: names[i] for i in (0, 3, 4)}
    blobs.put_chunk(7, 1, 1, b"wrong")
    blobs.put_chunk(7, 1, 1, parts[1])
    blobs.put_chunk(7, 1, 2, parts[2])
    flip(tmp_path / "uploads" / "7.1" / f"4.{names[4]}", 50)
    with pytest.raises(Conflict, match=r"chunks 4 \(of 5\)"):
        blobs.assemble(7, 1, names, whole)
    blobs.put_chunk(7, 1, 4, parts[4])
    assert blobs.read(blobs.assemble(7, 1, names, whole)) == b"".join(parts)
    blobs.drop_chunks(7, 1)
    assert blobs.chunks(7, 1) == {} and blobs.chunks(7, 2) != {}
    assert list(blobs.names()) == [whole] and list((tmp_path / "partial").iterdir()) == []


def test_ledger_only_grows_and_shows_every_change(tmp_path: Path) -> None:
    store = started(open_store(tmp_path))
    entries = store.ledger()
    store.close()
    assert read_ledger(tmp_path) == entries and entries[0].previous == GENESIS
    for bad in (
        [entries[0], replace(entries[1], body="{}")],
        entries[1:],
        [replace(entries[0], kind="x")],
        entries[:1] * 2,
    ):
        with pytest.raises(Damaged, match="broken"):
            verify(bad)
    db = sqlite3.connect(tmp_path / "run.sqlite")
    for change in ("UPDATE ledger SET kind = 'x'", "DELETE FROM ledger"):
        with pytest.raises(sqlite3.IntegrityError, match="only grows"):
            db.execute(change)
    db.execute("DROP TRIGGER ledger_no_update")
    db.execute("UPDATE ledger SET body = replace(body, 'blocks', 'stocks') WHERE seq = 1")
    db.commit()
    db.close()
    with pytest.raises(Damaged, match="broken at entry 1"):
        read_ledger(tmp_path)
    with pytest.raises(RunError, match="holds no run"):
        read_ledger(tmp_path / "uploads")


def test_canonical_json_has_one_spelling() -> None:
    assert canonical({"b": 1.5, "a": ["é", None, True]}) == '{"a":["\\u00e9",null,true],"b":1.5}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical(float("nan"))
    # Golden: another implementation must find the same hash.
    assert link(None, Note("run", {"a": 1})).hash == sha256(
        canonical([1, "run", GENESIS, '{"a":1}']).encode()
    )


def test_settings_that_durability_rests_on(store: EmbeddedStore) -> None:
    with store._transaction() as db:
        found = {
            p: db.exec_driver_sql(f"PRAGMA {p}").scalar()
            for p in ("journal_mode", "synchronous", "foreign_keys")
        }
    assert found == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}


def test_no_torch_in_the_control_plane() -> None:
    code = (
        "import sys, blocktrain.store.sql, blocktrain.coordinator.merge;"
        "sys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONPATH": SOURCE}, check=False
        ).returncode
        == 0
    )
