"""Connections that lose answers and break: every update counts once, and little is sent twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from blocktrain.errors import BlockTrainError, Unreachable
from blocktrain.protocol import messages as m
from blocktrain.protocol.transfer import sha256, split
from blocktrain.watch.server import Listen, WatchedCoordinator, serve_coordinator
from blocktrain.web.client import HttpClient, LocalClient, fetch, retry_later
from support.fake_worker import FakeWorker, as_task, beginning, whole_ledger
from support.proxy import Proxy, proxy_to


@contextmanager
def bad_line(folder: Path, **policy: Any) -> Iterator[tuple[WatchedCoordinator, HttpClient, Proxy]]:
    """A coordinator, and a client that reaches it through a proxy."""
    with (
        beginning(folder, **policy) as coordinator,
        serve_coordinator(coordinator, Listen()) as url,
        proxy_to(url) as (address, proxy),
        closing(HttpClient(address, timeout=60)) as client,
    ):
        yield coordinator, client, proxy


def insist(call: Callable[[], Any], tries: int = 200) -> Any:
    """As a worker does, without its pauses."""
    for _ in range(tries):
        try:
            return call()
        except BlockTrainError as error:
            assert retry_later(error), error
    raise AssertionError("it never got through")


def test_lost_acknowledgements_count_once(tmp_path: Path) -> None:
    with bad_line(tmp_path) as (coordinator, client, proxy):
        proxy.drop_first_acknowledgement = True
        worker = FakeWorker(client)
        task, receipts = worker.joined(), []
        for _ in range(6):
            payload = worker.payload(task)
            insist(lambda task=task, payload=payload: worker.upload(task, payload))  # type: ignore[misc]
            with pytest.raises(Unreachable):
                client.submit(worker.submission(task, payload))
            known = coordinator.run.store.answer(task.task, sha256(payload))
            assert known is not None, "it was counted, and nobody was told"
            reply = client.submit(worker.submission(task, payload))
            assert reply.receipt == m.read(m.Receipt, known.receipt)
            receipts.append(reply.receipt)
            task = as_task(reply.next)
        assert len(proxy.dropped) == 6
        entries = [e.hash for e in whole_ledger(LocalClient(coordinator)) if e.kind == "update"]
        assert entries == [r.entry for r in receipts]
        assert coordinator.run.store.contributions() == {worker.id: (6, 6 * 64)}


def test_an_upload_over_a_breaking_line_sends_little_twice(tmp_path: Path) -> None:
    with bad_line(tmp_path, compression="fp16") as (coordinator, client, proxy):
        worker = FakeWorker(client)
        task = worker.joined()
        payload = worker.payload(task)
        assert len(split(payload, task.chunk_bytes)) >= 20
        proxy.forget()
        worker.upload(task, payload)
        whole = proxy.up + proxy.down
        task = as_task(client.submit(worker.submission(task, payload)).next)
        payload = worker.payload(task)
        before = _received(coordinator, task.block)
        proxy.forget()
        proxy.cut_after = 9000
        insist(lambda: worker.upload(task, payload))
        proxy.cut_after = None
        assert proxy.cuts >= 5
        assert proxy.up + proxy.down <= 1.2 * whole
        assert _received(coordinator, task.block) - before <= 1.2 * len(payload)
        assert client.submit(worker.submission(task, payload)).receipt.accepted


def _received(coordinator: WatchedCoordinator, block: int) -> int:
    return next(b.bytes_in for b in coordinator.status().blocks if b.block == block)


def test_a_download_over_a_breaking_line_fetches_little_twice(tmp_path: Path) -> None:
    with bad_line(tmp_path / "run") as (_, client, proxy):
        weights = FakeWorker(client).joined().weights
        proxy.forget()
        proxy.cut_after = 5000
        got: list[int] = []
        insist(lambda: fetch(client, weights, tmp_path / "weights", progress=got.append))
        assert proxy.cuts >= 19 and len(got) >= 20
        assert sum(got) == weights.length, "not a byte twice"
        assert proxy.up + proxy.down <= 1.2 * weights.length
        assert sha256((tmp_path / "weights").read_bytes()) == weights.sha256


def _work(worker: FakeWorker, task: m.Task) -> m.Task:
    payload = insist(lambda: worker.payload(task))
    insist(lambda: worker.upload(task, payload))
    reply = insist(lambda: worker.client.submit(worker.submission(task, payload)))
    worker.receipts.append(reply.receipt)
    return as_task(reply.next)


def test_everything_at_once(tmp_path: Path) -> None:
    """Answers are lost and the line breaks, for the whole life of three workers."""
    with bad_line(tmp_path, replicas=None) as (coordinator, client, proxy):
        proxy.drop_first_acknowledgement, proxy.cut_after = True, 120_000
        workers = [FakeWorker(client, seed) for seed in (1, 2, 3)]
        todo = [
            as_task(insist(partial(worker.join, speed=0.0)).next) for worker in workers
        ]  # of unknown speed: none waits for the others
        for _ in range(3):
            for index, worker in enumerate(workers):
                todo[index] = _work(worker, todo[index])
        receipts = [receipt for worker in workers for receipt in worker.receipts]
        entries = [e.hash for e in whole_ledger(LocalClient(coordinator)) if e.kind == "update"]
        assert sorted(entries) == sorted(r.entry for r in receipts) and len(set(entries)) == 9
