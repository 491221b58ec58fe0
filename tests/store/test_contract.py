"""What every store promises. One body of tests for all: a new store adds a row to `KINDS`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from blocktrain.errors import Conflict, Damaged, StorageFailed
from blocktrain.files import PIECE
from blocktrain.protocol.ledger import BEGINNING, LedgerEntry, require_chain
from blocktrain.protocol.transfer import sha256
from blocktrain.store.contract import (
    ByteCount,
    Changes,
    LeaseTimes,
    NonceRecord,
    RoundRecord,
    Store,
    WorkerRecord,
    link_entry,
)
from blocktrain.store.memory import MemoryDisk, MemoryStore
from blocktrain.store.open import open_store
from support.store_records import entry, lease, publish, record, started, update, version


@dataclass
class Opener:
    """A place for a store, and how it is opened there again and again."""

    open: Callable[[], Store]


def in_folder(folder: Path) -> Opener:
    return Opener(lambda: open_store(folder / "s"))


def in_memory(_: Path) -> Opener:
    disk = MemoryDisk()
    return Opener(lambda: MemoryStore(disk))


KINDS = {"sqlite": in_folder, "memory": in_memory}


@pytest.fixture(params=KINDS.values(), ids=list(KINDS))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    opener: Opener = request.param(tmp_path)
    return opener


@pytest.fixture
def store(place: Opener) -> Iterator[Store]:
    opened = place.open()
    yield opened
    opened.close()


def test_one_run_from_its_start_to_a_version(store: Store) -> None:
    assert store.run() is None and store.head() is None
    started(store)
    assert store.create_run({"fingerprint": "f", "blocks": 1}) is False
    with pytest.raises(Conflict, match="other settings"):
        store.create_run({"blocks": 2})
    sent = update(store, 1)
    answer = record(store, sent)
    assert (answer.update, answer.repeated) == (sent, False)
    assert store.pending(1) == (sent,) and store.answered_block(1) == 1
    made = publish(store, version(store, 1, b"new"), [sent.id])
    newest, first = store.version(1), store.version(1, 0)
    assert newest is not None and newest.version == 1 and newest.norms == (1.0, 2.0)
    assert first is not None and first.weights == sha256(b"weights")
    assert store.version(1, 7) is None and store.version(2) is None
    assert store.pending(1) == () and store.contributions() == {"w": (1, 640)}
    assert [e.kind for e in store.ledger()] == ["run", "version", "update", "version"]
    assert require_chain(store.ledger()) == store.head() == made
    assert [e.seq for e in store.ledger(after=2, limit=1)] == [3]
    assert store.run() == {"blocks": 1, "fingerprint": "f"}
    first_entry = json.loads(store.ledger()[0].body)
    assert first_entry == {"blocks": 1, "fingerprint": "f", "run": store.run_id}


def test_a_restart_knows_which_batches_were_read(place: Opener) -> None:
    store = started(place.open())
    store.save(Changes(leases=[lease(2, position=30), lease(3, position=10), lease(4)]))
    record(store, update(store, 1, b"a", steps=10))
    record(store, update(store, 2, b"b", steps=4))
    record(store, update(store, 3, b"c", steps=10))
    store.close()
    assert place.open().recover(1).read == {1: ((0, 20), (30, 34))}


def test_same_submission_gets_the_same_answer_for_ever(store: Store) -> None:
    sent = update(started(store), 1)
    once = Changes(nonces=[NonceRecord("w", "n", 1.0)])
    first = record(store, sent, once)
    before = len(store.ledger())
    again = store.record_update(replace(sent, fence=9), entry(store, "update"), b"another", once)
    assert again.repeated and again.receipt == first.receipt and again.update == sent
    assert store.answer(1, sent.payload) == again and store.answer(2, sent.payload) is None
    assert len(store.ledger()) == before
    publish(store, version(store, 1, b"new"), [sent.id])
    assert record(store, sent).receipt == first.receipt


def test_a_task_counts_once_even_with_two_payloads(store: Store) -> None:
    started(store)
    record(store, update(store, 1, b"one"))
    with pytest.raises(Conflict, match="not out"):
        record(store, update(store, 1, b"two"))
    assert len(store.pending(1)) == 1


def test_a_refused_update_does_not_use_up_its_task(store: Store) -> None:
    started(store)
    bad = update(store, 1, b"nan", accepted=False, code="not_finite", weight=0.0)
    assert record(store, bad).update.code == "not_finite"
    assert record(store, bad).repeated
    assert store.pending(1) == () and store.answered_block(1) is None
    assert not record(store, update(store, 1, b"good")).repeated


REFUSED: list[dict[str, Any]] = [
    {"fence": 0},
    {"fence": 2},
    {"worker": "x"},
    {"base": 1},
    {"block": 2},
    {"task": 77},
]


@pytest.mark.parametrize("changes", REFUSED, ids=lambda c: "-".join(map(str, *c.items())))
def test_fence_is_checked_in_the_transaction(store: Store, changes: dict[str, Any]) -> None:
    started(store)
    before = store.head()
    with pytest.raises(Conflict, match="not out"):
        record(store, replace(update(store, 1), **changes))
    assert store.head() == before and store.pending(1) == ()


def test_fences_only_rise_and_finished_tasks_stay_finished(store: Store) -> None:
    started(store)
    store.save(Changes(leases=[lease(1, fence=2, worker="x")]))
    for bad in (lease(1), lease(1, fence=2, worker="y")):
        with pytest.raises(Conflict, match="fence 2 of x"):
            store.save(Changes(leases=[bad]))
    with pytest.raises(Conflict, match="not out"):
        record(store, update(store, 1))
    record(store, update(store, 1, fence=2, worker="x"))
    store.save(Changes(lost=[2]))
    for task in (1, 2):
        with pytest.raises(Conflict, match="over"):
            store.save(Changes(leases=[lease(task, fence=3)]))


def test_the_numbers_of_a_blocks_tasks_are_used_once(store: Store) -> None:
    started(store)
    before = store.recover(9)
    for leases in ([lease(3, number=0)], [lease(3, number=2), lease(4, number=2)]):
        with pytest.raises(Conflict):
            store.save(Changes(leases=leases, counts=[ByteCount(1, "w", 1, 1)]))
    assert store.recover(9) == before and store.byte_counts() == []
    store.save(Changes(leases=[lease(3, number=0, block=2)]))


def test_an_update_needs_its_task_and_ends_it(store: Store) -> None:
    started(store)
    before, head = store.recover(9), store.head()
    with pytest.raises(Conflict):
        record(store, update(store, 9, accepted=False, code="not_finite"))
    with pytest.raises(Conflict, match="is over"):
        record(store, update(store, 1), Changes(leases=[lease(1, fence=2)]))
    assert store.recover(9) == before and store.head() == head
    assert store.answer(9, sha256(b"payload")) is None
    assert not record(store, update(store, 1)).repeated


def test_a_version_follows_its_parent_and_settles_every_update(store: Store) -> None:
    sent = update(started(store), 1)
    with pytest.raises(Conflict, match="not stored"):
        record(store, replace(sent, payload="0" * 64))
    record(store, sent)
    before = store.head()
    attempts: list[tuple[int, list[str], dict[str, str]]] = [
        (0, [sent.id], {}),
        (2, [sent.id], {}),
        (1, [], {}),
        (1, [sent.id, "x"], {}),
        (1, [sent.id], {sent.id: "no"}),
    ]
    for number, applied, dropped in attempts:
        with pytest.raises(Conflict):
            publish(store, version(store, number), applied, dropped)
    with pytest.raises(Conflict, match="not stored"):
        publish(store, version(store, 1, weights="1" * 64), [sent.id])
    assert store.head() == before
    publish(store, version(store, 1), [], {sent.id: "not finite"})
    assert store.pending(1) == () and store.contributions() == {}
    second = update(store, 2)
    record(store, second)
    note = entry(store, "round", dropped={second.id: "worse than its parent"})
    store.save(Changes(dropped={second.id: "worse than its parent"}, entries=[note]))
    assert store.pending(1) == ()
    with pytest.raises(Conflict, match="cannot be dropped"):
        store.save(Changes(dropped={second.id: "twice"}))


def test_entries_link_to_the_head_or_nothing_is_committed(store: Store) -> None:
    started(store)
    stale = entry(store, "kick", worker="w")
    after = link_entry(stale, "finish", {"reason": "end"})
    store.save(Changes(entries=[stale, after]))
    counts = [ByteCount(1, "w", 5)]
    for bad in ([stale], [link_entry(stale, "start", {})], [link_entry(None, "run", {})]):
        with pytest.raises(Conflict, match="moved on"):
            store.save(Changes(entries=bad, counts=counts))
    sent = update(store, 1)
    with pytest.raises(Conflict, match="moved on"):
        store.record_update(sent, link_entry(stale, "update", {}), b"receipt")
    with pytest.raises(Conflict, match="moved on"):
        store.publish_version(version(store, 1), link_entry(stale, "version", {}), [])
    assert (
        store.head() == after
        and store.byte_counts() == []
        and store.answer(1, sent.payload) is None
    )
    assert store.pending(1) == ()
    record(store, sent)  # its task is still out


def test_nonces_bytes_and_workers(store: Store) -> None:
    started(store)
    counts = [ByteCount(1, "w", 10, 1), ByteCount(1, "w", 5, 2), ByteCount(2, "w", 1)]
    store.save(Changes(nonces=[NonceRecord("w", "n", 5.0)], counts=counts))
    head = store.head()
    lost = entry(store, "finish", reason="lost")
    with pytest.raises(Conflict):
        store.save(Changes(nonces=[NonceRecord("w", "n", 6.0)], entries=[lost]))
    assert store.head() == head, "a refused change must leave nothing behind"
    store.save(Changes(nonces=[NonceRecord("x", "n", 6.0)]))
    assert store.forget_nonces(5.5) == 1
    store.save(Changes(nonces=[NonceRecord("w", "n", 6.0)]))
    assert store.byte_counts() == [ByteCount(1, "w", 15, 3), ByteCount(2, "w", 1, 0)]
    kicked = WorkerRecord("w", "key", "laptop", 2, 0.25, kicked=True)
    store.save(Changes(workers=[kicked]))
    assert store.workers() == [kicked]
    store.save(Changes(gone=["w", "nobody"]))
    assert store.workers() == [], "who is gone is forgotten; the ledger keeps everybody"


def test_recovery_gives_back_what_was_committed(place: Opener) -> None:
    store = started(place.open())
    current = RoundRecord(1, 0, 2, 60.0, 30.0, True, 35.0)
    sent = update(store, 1)
    record(store, sent, Changes(rounds=[current]))
    moved = lease(2, fence=3, worker="x", expired=True, trained=True)
    store.save(Changes(leases=[moved, lease(3)]))
    passed = [LeaseTimes(3, 1, 50.0, 20.0), LeaseTimes(2, 3, 1.0, 1.0), LeaseTimes(3, 9, 0.0, 0.0)]
    store.save(Changes(times=passed))
    epoch, run_id = store.epoch, store.run_id
    store.close()
    again = place.open()
    assert (again.epoch, again.run_id) == (epoch + 1, run_id)
    stored = again.recover(kept_times=9)
    assert stored.rounds == (current,) and stored.pending == (sent,)
    assert stored.leases == (moved, lease(3, age=50.0, remaining=20.0))
    assert [v.version for v in stored.versions] == [0]
    assert stored.task_seconds == {1: (2.5,)} and stored.next_numbers == {1: 3}
    assert stored.next_task == 4 and [w.id for w in stored.workers] == ["w"]
    publish(again, version(again, 1), [sent.id])
    assert again.recover(kept_times=0).rounds == () and again.recover(0).task_seconds == {1: ()}
    again.close()


def test_one_that_was_overtaken_or_closed_writes_nothing(place: Opener) -> None:
    store = started(place.open())
    store.close()
    with pytest.raises(StorageFailed, match="closed"):
        store.require_open()
    with pytest.raises(StorageFailed, match="closed"):
        store.save(Changes(counts=[ByteCount(1, "w", 1)]))
    with pytest.raises(StorageFailed, match="closed"):
        store.head()
    again = place.open()
    assert again.byte_counts() == []
    again.close()


def test_blobs_by_name(store: Store, tmp_path: Path) -> None:
    content = bytes(range(256)) * (PIECE // 256) + b"the end"
    name = store.blobs.put(content)
    assert name == sha256(content) and store.blobs.has(name) and list(store.blobs.names()) == [name]
    assert store.blobs.read(name) == content and store.blobs.size(name) == len(content)
    store.blobs.verify(name)
    pieces = list(store.blobs.pieces(name))
    assert b"".join(pieces) == content and max(map(len, pieces)) <= PIECE
    for start in (1, PIECE, len(content) - 1, len(content)):
        assert b"".join(store.blobs.pieces(name, start)) == content[start:]
    store.blobs.export(name, tmp_path / "exported")
    assert (tmp_path / "exported").read_bytes() == content
    assert store.blobs.put_stream(iter([content[:9], content[9:]]), name) == name
    store.blobs.delete(name)
    assert not store.blobs.has(name)
    for reading in (store.blobs.read, store.blobs.size, store.blobs.verify):
        with pytest.raises(Damaged):
            reading(name)
    with pytest.raises(Damaged):
        list(store.blobs.pieces(name))


def test_files_are_taken_over_as_blobs(place: Opener, tmp_path: Path) -> None:
    """Two starts: the second one finds what the first one has linked."""
    contents = [bytes([n]) * 1000 for n in range(3)]
    files = {sha256(content): tmp_path / f"{n}.tok" for n, content in enumerate(contents)}
    for path, content in zip(files.values(), contents, strict=True):
        path.write_bytes(content)
    for _ in range(2):
        store = place.open()
        store.blobs.link(files)
        store.close()
    blobs = place.open().blobs
    for path in files.values():
        path.unlink()
    assert list(blobs.names()) == sorted(files)
    for name, content in zip(files, contents, strict=True):
        blobs.verify(name)
        assert blobs.has(name) and blobs.size(name) == 1000 and blobs.read(name) == content
        assert b"".join(blobs.pieces(name, 400)) == content[400:]
        blobs.export(name, tmp_path / "exported")
        assert (tmp_path / "exported").read_bytes() == content
    blobs.delete(next(iter(files)))
    assert len(list(blobs.names())) == 2
    (tmp_path / "wrong").write_bytes(b"other bytes")
    blobs.link({"ab" * 32: tmp_path / "wrong"})
    with pytest.raises(Damaged, match="ab" * 32):
        blobs.verify("ab" * 32)
    with pytest.raises(Conflict, match="64 hex digits"):
        blobs.link({"../x": tmp_path / "wrong"})


def test_blob_names_are_checked(store: Store) -> None:
    for name in ("../../etc/passwd", "A" * 64, "a" * 63, "a" * 64 + "\n", "", "a" * 65):
        with pytest.raises(Conflict, match="64 hex digits"):
            store.blobs.read(name)
    with pytest.raises(Conflict, match="not to"):
        store.blobs.put_stream([b"some", b"thing"], sha256(b"else"))
    assert list(store.blobs.names()) == []
    with pytest.raises(Conflict, match="integers"):
        store.blobs.put_chunk("../x", 1, 0, b"")  # type: ignore[arg-type]


def test_uploads_in_chunks(place: Opener) -> None:
    store = place.open()
    parts = [bytes([i]) * 100 for i in range(5)]
    names, whole = [sha256(p) for p in parts], sha256(b"".join(parts))
    for index in (0, 3, 4, 3):
        assert store.blobs.put_chunk(7, 1, index, parts[index]) == names[index]
    store.blobs.put_chunk(7, 2, 1, b"of another lease")
    with pytest.raises(Conflict, match=r"chunks 1, 2 \(of 5\)"):
        store.blobs.assemble(7, 1, names, whole)
    store.close()
    blobs = place.open().blobs
    assert blobs.chunks(7, 1) == {i: names[i] for i in (0, 3, 4)}
    blobs.put_chunk(7, 1, 1, b"wrong")
    blobs.put_chunk(7, 1, 1, parts[1])
    blobs.put_chunk(7, 1, 2, parts[2])
    blobs.put_chunk(7, 1, 5, b"more than the payload has")
    assert blobs.read(blobs.assemble(7, 1, names, whole)) == b"".join(parts)
    blobs.drop_chunks(7, 1)
    assert blobs.chunks(7, 1) == {} and blobs.chunks(7, 2) != {}
    blobs.put_chunk(8, 1, 0, b"kept")
    blobs.keep_uploads({(8, 1)})
    assert blobs.chunks(7, 2) == {} and blobs.chunks(8, 1) == {0: sha256(b"kept")}
    assert list(blobs.names()) == [whole]


def test_a_link_is_a_pure_function_with_one_spelling() -> None:
    first = link_entry(None, "run", {"b": 1.5, "a": ["é", None, True]})
    assert first.body == '{"a":["\\u00e9",null,true],"b":1.5}' and first.previous == BEGINNING
    # Golden: another implementation must find the same hash.
    text = f'[1,"run","{BEGINNING}",{json.dumps(first.body)}]'
    assert first.hash == sha256(text.encode())
    second = link_entry(first, "start", {"epoch": 1})
    assert (second.seq, second.previous) == (2, first.hash)
    with pytest.raises(ValueError, match="not JSON compliant"):
        link_entry(None, "run", {"x": float("nan")})
    with pytest.raises(ValueError, match="no entries of the kind"):
        link_entry(None, "gossip", {})
    changed: list[list[LedgerEntry]] = [
        [first, second.model_copy(update={"body": "{}"})],
        [second],
        [first.model_copy(update={"kind": "kick"})],
        [first, first],
    ]
    for entries in changed:
        with pytest.raises(Damaged, match="broken"):
            require_chain(entries)
