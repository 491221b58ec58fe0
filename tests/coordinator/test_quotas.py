"""How much a run and its members may have on the coordinator's disk."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from blocktrain.cli.coordinator import CoordinatorFlags
from blocktrain.clock import SimulatedClock
from blocktrain.coordinator.history import ENTRY_BYTES
from blocktrain.coordinator.limits.quotas import DiskLimits, DiskUse
from blocktrain.errors import ConfigError
from blocktrain.protocol import messages as m
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.protocol.transfer import sha256
from blocktrain.watch.server import WatchedCoordinator, open_coordinator
from blocktrain.web.client import LocalClient, retry_later
from support.fake_worker import FakeWorker, as_task, beginning, whole_ledger

MB = 10**6


def fill(client: LocalClient, task: m.Task, chunks: int) -> None:
    for index in range(chunks):
        content = bytes([index]) * task.chunk_bytes
        client.put_chunk(task.task, index, task.ticket, content, sha256(content))


def on_disk(coordinator: WatchedCoordinator) -> int:
    """Bytes of blobs, without the corpus, and of uploads."""
    folder, blobs = Path(coordinator.run.store.address), coordinator.run.store.blobs
    made = set(blobs.names()) - set(coordinator.run.corpus.names)
    made.discard(coordinator.run.facts.corpus.index.sha256)
    chunks = (path.stat().st_size for path in folder.glob("uploads/*/*"))
    return sum(map(blobs.size, made)) + sum(chunks)


def test_a_worker_that_holds_too_much_is_refused(tmp_path: Path) -> None:
    clock = SimulatedClock(1000.0)
    with beginning(tmp_path, clock=clock, undefended=False) as coordinator:
        client, run = LocalClient(coordinator), coordinator.run
        limit = run.quotas.worker_limit
        assert limit is not None and limit > 6 * len(FakeWorker(client).payload(task_of(client)))
        run.quotas.limits = DiskLimits(worker=5 * run.policy.chunk_bytes)
        worker, other = FakeWorker(client, 2), FakeWorker(client, 3)
        first = worker.joined()
        fill(client, first, 3)
        worker.beat(first, first.steps)  # trained: it gets another task meanwhile
        second = as_task(worker.ask())
        fill(client, second, 2)
        fill(client, second, 2)  # again: that is no more
        with pytest.raises(Refused) as refused:
            fill(client, second, 3)
        assert refused.value.code is Code.OVER_QUOTA and retry_later(refused.value)
        sentence = f"worker {worker.id[:8]} holds 6.14 kB of 5.12 kB"
        assert sentence in refused.value.sentence
        fill(client, other.joined(), 3)
        held = {w.worker: w.held for w in coordinator.status().workers}
        assert held[worker.id] == 5 * 1024 and held[other.id] == 3 * 1024
        worker.ask(leaving=True)
        clock.now += 3 * 3600 + 600
        coordinator.tick()
        assert run.quotas.uploads.total == 0


def task_of(client: LocalClient) -> m.Task:
    return FakeWorker(client).joined()


def test_at_its_limit_a_run_pauses_and_goes_on_with_more(tmp_path: Path) -> None:
    with beginning(tmp_path) as coordinator:
        client, quotas = LocalClient(coordinator), coordinator.run.quotas
        worker = FakeWorker(client)
        sent = as_task(worker.send(worker.joined()).next)
        payload = worker.payload(sent)
        worker.upload(sent, payload)
        quotas.limits = DiskLimits(total=quotas.use.used)
        for call in (
            lambda: client.submit(worker.submission(sent, payload)),
            lambda: fill(client, sent, 1),
        ):
            with pytest.raises(Refused) as refused:
                call()
            assert refused.value.code is Code.DISK_LIMIT and retry_later(refused.value)
        waits = FakeWorker(client, 2).join().next
        assert isinstance(waits, m.Wait) and "--disk-limit" in waits.reason
        problem = coordinator.status().disk.problem
        assert problem.startswith("the run holds") and "--disk-limit" in problem
        quotas.limits = DiskLimits(total=2 * quotas.use.used)
        assert client.submit(worker.submission(sent, payload)).receipt.accepted, "nothing was lost"
        assert not coordinator.status().disk.problem


def test_what_is_counted_is_what_is_stored(tmp_path: Path) -> None:
    with beginning(tmp_path) as coordinator:
        worker = FakeWorker(LocalClient(coordinator))
        task = worker.joined()
        for _ in range(20):
            task = as_task(worker.send(task).next)
        fill(LocalClient(coordinator), task, 2)
        use = coordinator.run.quotas.use
        entries = whole_ledger(LocalClient(coordinator))
        assert use.used == on_disk(coordinator) + sum(len(e.body) + ENTRY_BYTES for e in entries)
    with closing(open_coordinator(tmp_path)) as again:
        assert again.run.quotas.use.used == use.used
        assert again.run.quotas.uploads.total == 2 * 1024


def test_a_disk_that_is_nearly_full_is_a_reason_to_pause() -> None:
    assert not DiskUse(10 * MB, None, 200 * MB, 100 * MB).problem
    problem = DiskUse(0, None, 90 * MB, 100 * MB).problem
    assert "has 90 MB left, of which 100 MB stay free" in problem


def test_limits_are_amounts() -> None:
    assert CoordinatorFlags(disk_limit="2GB").limits() == DiskLimits(2 * 10**9, None)
    with pytest.raises(ConfigError, match="'much' is not an amount of bytes"):
        CoordinatorFlags(worker_disk_limit="much").limits()
