"""Calls at the same moment.

What takes long holds nobody up, and what comes twice at once counts once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from blocktrain.coordinator.merging.round import merge_round
from blocktrain.errors import StorageFailed
from blocktrain.protocol.messages import Task, Wait
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.store.blobs import FolderBlobs
from blocktrain.store.contract import VersionRecord
from blocktrain.watch.server import Listen, Server, WatchedCoordinator, open_coordinator
from blocktrain.web.client import LocalClient
from support.fake_worker import FakeWorker, as_task, beginning, whole_ledger
from support.waiting import until

SOON = 20.0
MERGE = "blocktrain.coordinator.closing.merge_round"


class Gate:
    """Work that waits at a gate: whoever comes is counted and kept until it is opened."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def pass_through(self) -> None:
        self.reached.set()
        assert self.open.wait(SOON)


@contextmanager
def slow_merge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Merging waits at a gate."""
    gate = Gate()

    def slowly(*arguments: Any) -> Any:
        gate.pass_through()
        return merge_round(*arguments)

    monkeypatch.setattr(MERGE, slowly)
    try:
        yield gate
    finally:
        gate.open.set()


def kinds(coordinator: WatchedCoordinator, kind: str) -> int:
    return sum(entry.kind == kind for entry in whole_ledger(LocalClient(coordinator)))


def test_the_same_update_many_times_at_once_counts_once(tmp_path: Path) -> None:
    with beginning(tmp_path, replicas=50) as coordinator, ThreadPoolExecutor(8) as pool:
        workers = [FakeWorker(LocalClient(coordinator), seed) for seed in range(1, 5)]
        for worker in workers:
            task = worker.joined()
            payload = worker.payload(task)
            worker.upload(task, payload)
            said = [worker.submission(task, payload) for _ in range(8)]
            replies = list(pool.map(coordinator.submit, said))
            assert len({reply.receipt.signature for reply in replies}) == 1
        assert kinds(coordinator, "update") == 4
        assert not coordinator.intake.in_flight


def test_the_same_bytes_for_two_tasks_stay_when_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with beginning(tmp_path, replicas=50) as coordinator, ThreadPoolExecutor(2) as pool:
        one, two = (FakeWorker(LocalClient(coordinator), seed) for seed in (1, 2))
        first, second = one.joined(), two.joined()
        payload = one.payload(first)
        one.upload(first, payload)
        two.upload(second, payload)
        gate, read = Gate(), FolderBlobs.read

        def slowly(blobs: FolderBlobs, name: str) -> bytes:
            if threading.current_thread().name.startswith("ThreadPool"):
                gate.pass_through()
            return read(blobs, name)

        monkeypatch.setattr(FolderBlobs, "read", slowly)
        waiting = pool.submit(coordinator.submit, one.submission(first, payload))
        assert gate.reached.wait(SOON)
        with pytest.raises(Refused):
            coordinator.submit(two.submission(second, payload, payload_length=len(payload) - 1))
        gate.open.set()
        assert waiting.result(SOON).receipt.accepted
        assert coordinator.run.store.blobs.has(waiting.result().receipt.payload_sha256)


def test_a_merge_holds_up_only_the_updates_of_its_own_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        beginning(tmp_path, replicas=2) as coordinator,
        slow_merge(monkeypatch) as gate,
        ThreadPoolExecutor(4) as pool,
    ):
        people = [
            (worker, worker.joined())
            for worker in (FakeWorker(LocalClient(coordinator), seed) for seed in range(1, 7))
        ]
        (one, two, three), (other, *_) = (
            [pair for pair in people if pair[1].block == index] for index in (1, 2)
        )
        one[0].send(one[1])
        closing = pool.submit(two[0].send, two[1])
        assert gate.reached.wait(SOON)
        assert other[0].beat(other[1]).go_on, "nobody else waits"
        assert three[0].beat(three[1]).go_on
        assert other[0].send(other[1]).receipt.accepted
        assert FakeWorker(LocalClient(coordinator), 9).joined()
        assert coordinator.status().rounds == 0
        late = pool.submit(three[0].send, three[1])
        for waiting in (closing, late):
            with pytest.raises(Late):
                waiting.result(0.2)
        gate.open.set()
        assert as_task(closing.result(SOON).next).base == 1, (
            "who closes a round goes on from what it made"
        )
        receipt = late.result(SOON).receipt
        assert receipt.accepted and receipt.staleness == 1, "it belongs to the next round"
        made = [
            entry.body
            for entry in whole_ledger(LocalClient(coordinator))
            if entry.kind == "version" and '"version":1' in entry.body
        ]
        assert len(made) == 1 and receipt.update not in made[0]


def test_whoever_made_a_version_continues_from_it_also_if_another_merged_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock's own tick may find the round full before the worker's call does."""
    with (
        beginning(tmp_path, replicas=1) as coordinator,
        slow_merge(monkeypatch) as gate,
        ThreadPoolExecutor(2) as pool,
    ):
        worker = FakeWorker(LocalClient(coordinator))
        task = worker.joined()
        payload = worker.payload(task)
        worker.upload(task, payload)
        tick, ticking = coordinator.tick, threading.Event()

        def after_another() -> None:
            if threading.current_thread().name.startswith("ThreadPool") and not ticking.is_set():
                ticking.set()
                pool.submit(tick)
                assert gate.reached.wait(SOON)
            tick()

        monkeypatch.setattr(coordinator, "tick", after_another)
        reply = pool.submit(coordinator.submit, worker.submission(task, payload))
        with pytest.raises(Late):
            reply.result(0.2)
        gate.open.set()
        assert as_task(reply.result(SOON).next).base == 1


def test_a_coordinator_that_is_closed_lets_a_merge_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        beginning(tmp_path, replicas=1) as coordinator,
        slow_merge(monkeypatch) as gate,
        ThreadPoolExecutor(2) as pool,
    ):
        worker = FakeWorker(LocalClient(coordinator))
        sending = pool.submit(worker.send, worker.joined())
        assert gate.reached.wait(SOON)
        closing = pool.submit(coordinator.close)
        until(lambda: not coordinator.run.ready, "the beginning of the end")
        with pytest.raises(Late):
            closing.result(0.2)
        gate.open.set()
        closing.result(SOON)
        with pytest.raises((StorageFailed, Refused)):
            sending.result(SOON)  # it is recorded, but there was nobody left to say so
    again = open_coordinator(tmp_path)
    assert sorted(block.version for block in again.status().blocks) == [0, 1]
    again.close()


def test_a_merge_that_fails_lets_everyone_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with beginning(tmp_path, replicas=1) as coordinator:
        worker = FakeWorker(LocalClient(coordinator))
        task = worker.joined()

        def broken(*_: Any) -> Any:
            raise StorageFailed("the disk is full")

        monkeypatch.setattr(MERGE, broken)
        with pytest.raises(StorageFailed):
            worker.send(task)
        monkeypatch.undo()
        coordinator.tick()  # as after a new start
        assert coordinator.run.newest(task.block).version == 1
        with pytest.raises(Refused) as refused:
            worker.send(task, b"something else")
        assert refused.value.code in (Code.TASK_ANSWERED, Code.UNKNOWN_TASK)


def test_where_rounds_are_closed_beside_nobody_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with beginning(tmp_path, replicas=1) as coordinator, slow_merge(monkeypatch) as gate:
        coordinator.close_in_background()
        worker = FakeWorker(LocalClient(coordinator))
        task = worker.joined()
        reply = worker.send(task)  # would not come back if it waited for the merge
        assert reply.receipt.accepted
        assert isinstance(reply.next, Wait)
        assert "is being made" in reply.next.reason
        assert gate.reached.wait(SOON)
        assert isinstance(worker.ask(), Wait)
        gate.open.set()
        following = until(
            lambda: (found := worker.ask()) and isinstance(found, Task) and found,
            "the next version",
        )
        assert (following.block, following.base) == (task.block, 1)


def test_a_background_failure_is_raised_to_the_next_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with beginning(tmp_path, replicas=1) as coordinator:
        coordinator.close_in_background()
        worker = FakeWorker(LocalClient(coordinator))
        task = worker.joined()

        def broken(*_: Any) -> Any:
            raise StorageFailed("the disk is full")

        monkeypatch.setattr(MERGE, broken)
        worker.send(task)

        def told() -> bool:
            try:
                coordinator.tick()
            except StorageFailed:
                return True
            return False

        until(told, "the failure")


@pytest.mark.parametrize("background", [True, False])
def test_any_error_while_closing_a_round_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """Not a StorageFailed: memory ran out, or there is a bug."""
    with beginning(tmp_path, replicas=1) as coordinator:
        if background:
            coordinator.close_in_background()
        worker = FakeWorker(LocalClient(coordinator))
        task = worker.joined()

        def broken(*_: Any) -> Any:
            raise MemoryError("64 GiB")

        monkeypatch.setattr(MERGE, broken)
        with suppress(StorageFailed):
            worker.send(task)
        server = Server(coordinator, Listen())
        server.start()  # its ticks find out, without any call
        try:
            until(lambda: not server.serves(0.05), "the end of the server")
        finally:
            server.stop()
        assert isinstance(server.failure, StorageFailed)
        assert "MemoryError: 64 GiB" in str(server.failure)


def test_ticks_that_fail_end_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with beginning(tmp_path) as coordinator:

        def broken() -> None:
            raise KeyError("a bug")

        monkeypatch.setattr(coordinator, "tick", broken)
        server = Server(coordinator, Listen())
        server.start()
        try:
            until(lambda: not server.serves(0.05), "the end of the server")
        finally:
            server.stop()
        assert isinstance(server.failure, StorageFailed)


def test_a_reader_never_brings_back_an_older_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A status reads version 0 from the store while another thread publishes version 2."""
    with beginning(tmp_path, replicas=1) as coordinator:
        run, worker = coordinator.run, FakeWorker(LocalClient(coordinator))
        second = as_task(worker.send(worker.joined()).next)
        read = run.store.version

        def slowly(block: int, number: int | None = None) -> VersionRecord | None:
            if number == 0:
                monkeypatch.undo()
                worker.send(second)
            return read(block, number)

        monkeypatch.setattr(run.store, "version", slowly)
        assert run.version(second.block, 0).version == 0
        assert run.newest(second.block).version == 2


def test_a_ticket_is_checked_while_others_commit(tmp_path: Path) -> None:
    """The event loop does this before it reads a chunk: it must not wait for the lock."""
    with beginning(tmp_path) as coordinator, ThreadPoolExecutor(1) as pool:
        task = FakeWorker(LocalClient(coordinator)).joined()
        with coordinator.run.lock:
            checking = pool.submit(coordinator.require_ticket, task.task, task.ticket)
            checking.result(SOON)
