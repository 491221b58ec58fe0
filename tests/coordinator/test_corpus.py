"""The corpus of a run: linked, never sent damaged, and no text is in two tasks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from blocktrain.clock import SimulatedClock
from blocktrain.coordinator.policy import Policy
from blocktrain.errors import CorpusError, RunError
from blocktrain.learning.shards import SequenceOrder, read_index
from blocktrain.protocol.positions import Ranges, add_range, overlap
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.watch.server import open_coordinator
from support.fake_worker import (
    CONFIG,
    FakeWorker,
    as_task,
    begin,
    beginning,
    crash,
    prepared,
    whole_ledger,
)


def linked(folder: Path) -> list[Path]:
    return sorted((folder / "blobs" / "linked").iterdir())


def test_shards_are_linked_and_not_copied(tmp_path: Path) -> None:
    with beginning(tmp_path) as coordinator:
        index = coordinator.run.corpus.index
        for path in linked(tmp_path):
            assert path.samefile(prepared() / "corpus" / "shards" / f"{path.name}.tok")
        assert {path.name for path in linked(tmp_path)} == {s.sha256 for s in index.shards}
        for shard in index.shards:
            content = b"".join(coordinator.blob(shard.sha256))
            assert len(content) == index.file_bytes(shard)


def test_a_damaged_shard_is_not_sent_and_a_missing_one_is_named(tmp_path: Path) -> None:
    coordinator = begin(tmp_path)
    bad, good = linked(tmp_path)[:2]
    content = bad.read_bytes()
    bad.unlink()  # it is the very file of the prepared corpus
    bad.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(Refused, match=f"shard {bad.name}.*restores the file") as refused:
        list(coordinator.blob(bad.name))
    assert refused.value.code is Code.DAMAGED
    assert b"".join(coordinator.blob(good.name))
    bad.write_bytes(content)
    assert b"".join(coordinator.blob(bad.name)) == content
    coordinator.close()
    bad.write_bytes(content[:-1])
    with pytest.raises(RunError, match=f"shard {bad.name} has another size.*restore the file"):
        open_coordinator(tmp_path)
    bad.unlink()
    with pytest.raises(RunError, match=f"{bad.name} is missing.*restore the file"):
        open_coordinator(tmp_path)


def test_a_corpus_that_was_prepared_again_replaces_damaged_shards(tmp_path: Path) -> None:
    begin(tmp_path).close()
    changed, cut = linked(tmp_path)[:2]
    for bad, content in (
        (changed, b"\xff" + changed.read_bytes()[1:]),
        (cut, cut.read_bytes()[:-1]),
    ):
        bad.unlink()  # it is the very file of the prepared corpus
        bad.write_bytes(content)
    other = tmp_path / "other"
    (other / "shards").mkdir(parents=True)
    (other / "index.json").write_text("{}")
    with pytest.raises(RunError, match=f"shard {cut.name} has another size"):
        open_coordinator(tmp_path, corpus=other)
    coordinator = open_coordinator(tmp_path, corpus=prepared() / "corpus")
    for bad in (changed, cut):
        assert b"".join(coordinator.blob(bad.name))
    coordinator.close()


def test_a_prepared_corpus_that_is_damaged_begins_no_run(tmp_path: Path) -> None:
    shutil.copytree(prepared(), tmp_path / "prepared")
    shard = next((tmp_path / "prepared" / "corpus" / "shards").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1])
    coordinator = open_coordinator(tmp_path / "run")
    with pytest.raises(CorpusError, match=f"{shard.stem}.tok is damaged.*prepare the corpus again"):
        coordinator.begin(CONFIG, Policy(), "words", tmp_path / "prepared")
    shard.unlink()
    with pytest.raises(CorpusError, match=r"cannot read .*prepare the corpus again"):
        coordinator.begin(CONFIG, Policy(), "words", tmp_path / "prepared")
    assert not coordinator.ready
    coordinator.close()


def test_replicas_read_different_text_also_after_a_restart(tmp_path: Path) -> None:
    clock = SimulatedClock(100.0)
    coordinator = begin(tmp_path, clock, replicas=3)
    read: dict[int, Ranges] = {}
    for attempt in range(3):
        workers = [FakeWorker(coordinator, seed) for seed in range(1, 5)]
        tasks = [(worker, as_task(worker.join().next)) for worker in workers]
        for worker, task in tasks:
            first, end = task.position, task.position + task.steps
            assert not overlap(read.get(task.block, ()), first, end)
            sequences = SequenceOrder(coordinator.run.corpus.index, 16, CONFIG.seed, task.block)
            shards = sequences.shards(first * CONFIG.batch, task.steps * CONFIG.batch)
            assert [blob.sha256 for blob in task.shards] == [shard.sha256 for shard in shards]
            if attempt == 1 and worker.seed == 2:
                continue  # its lease stays open, and so do its batches
            read[task.block] = add_range(read.get(task.block, ()), first, end)
            worker.send(task)
        crash(coordinator)
        coordinator = open_coordinator(tmp_path, clock)
    assert all(block.read == read.get(n, ()) for n, block in coordinator.run.state.blocks.items())
    assert sum(len(ranges) for ranges in read.values()) >= 2
    coordinator.close()


def test_a_page_of_the_ledger_is_bounded_by_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blocktrain.coordinator.calls.LEDGER_PAGE_BYTES", 3000)
    with beginning(tmp_path) as coordinator:
        worker = FakeWorker(coordinator)
        task = worker.joined()
        for _ in range(3):
            task = as_task(worker.send(task).next)
        page = coordinator.ledger()
        assert 1 <= len(page.entries) < page.total == len(whole_ledger(coordinator))


def test_a_run_of_an_older_protocol_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path).close()
    monkeypatch.setattr("blocktrain.protocol.messages.PROTOCOL", 4)
    with pytest.raises(RunError, match=r"begun with protocol 3.*speaks 4.*version that it began"):
        open_coordinator(tmp_path)


def test_the_index_is_public_and_complete(tmp_path: Path) -> None:
    with beginning(tmp_path) as coordinator:
        blob = coordinator.manifest().corpus.index
        content = b"".join(coordinator.blob(blob.sha256))
        assert len(content) == blob.length
        assert read_index(content) == coordinator.run.corpus.index
        assert json.loads(content)["name"] == "text"
