"""The calls of the protocol: one body of tests for calls in this process and over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from blocktrain.protocol import messages as m
from blocktrain.protocol.calls import Calls
from blocktrain.protocol.identity import verify
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.protocol.transfer import sha256, split
from blocktrain.watch.server import Listen, WatchedCoordinator, serve_coordinator
from blocktrain.web.client import HttpClient, LocalClient, fetch
from support.fake_worker import (
    CONFIG,
    OPERATOR,
    TOKEN,
    FakeWorker,
    as_task,
    begin,
    whole_ledger,
)

World = Callable[..., tuple[WatchedCoordinator, Calls]]


@pytest.fixture(params=["local", "http"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """A coordinator and a client to it, which has the operator's token."""
    with ExitStack() as stack:

        def start(**policy: Any) -> tuple[WatchedCoordinator, Calls]:
            coordinator = begin(tmp_path / "run", **policy)
            stack.callback(coordinator.close)
            if request.param == "local":
                return coordinator, LocalClient(coordinator)
            url = stack.enter_context(
                serve_coordinator(coordinator, Listen(token=TOKEN, operator_token=OPERATOR))
            )
            client = HttpClient(url, OPERATOR, timeout=120)
            stack.callback(client.close)
            return coordinator, client

        yield start


def test_joining_gives_the_run_and_the_first_task(world: World) -> None:
    coordinator, client = world()
    worker = FakeWorker(client)
    reply = worker.join()
    assert (reply.protocol, reply.worker, reply.coordinator) == (
        m.PROTOCOL,
        worker.id,
        coordinator.run.identity.public_key,
    )
    assert reply.config == CONFIG.model_dump() and reply.fingerprint == CONFIG.fingerprint
    task = as_task(reply.next)
    assert (task.task, task.fence, task.base, task.start_step, task.steps, task.compression) == (
        1,
        1,
        0,
        0,
        2,
        "int4",
    )
    assert task.lease_seconds > 0 and task.deadline_seconds > 0 and task.payload_limit > 10_000
    for part in (reply.corpus.index, *task.shards, task.weights):
        content = b"".join(client.blob(part.sha256))
        assert (sha256(content), len(content)) == (part.sha256, part.length)


def test_the_same_key_is_the_same_worker(world: World) -> None:
    _, client = world()
    worker, other = FakeWorker(client), FakeWorker(client, seed=2)
    first, again, another = worker.join(), worker.join(), other.join()
    assert first.worker == again.worker != another.worker
    assert as_task(first.next).task == as_task(again.next).task, "what it had is still its own"
    assert as_task(another.next).block != as_task(first.next).block
    assert [e.kind for e in whole_ledger(client)].count("join") == 2


def test_the_same_task_again_while_it_is_leased(world: World) -> None:
    _, client = world()
    worker = FakeWorker(client)
    first = worker.joined()
    before = len(whole_ledger(client))
    again = as_task(worker.ask())
    assert (again.order, again.fence, again.ticket) == (first.order, first.fence, first.ticket)
    assert again.lease_seconds <= first.lease_seconds
    assert len(whole_ledger(client)) == before


def test_heartbeats(world: World) -> None:
    _, client = world()
    worker = FakeWorker(client)
    task = worker.joined()
    good = worker.beat(task)
    assert good.go_on and good.code is None and 0 < good.lease_seconds <= task.lease_seconds
    assert worker.beat(task, 2).lease_seconds <= good.lease_seconds, "a heartbeat extends nothing"
    for changes in ({"fence": 2}, {"task": 99}):
        stale = worker.beat(task, **changes)
        assert (stale.go_on, stale.code) == (False, Code.STALE_FENCE)
    (told,) = client.status().workers
    assert (told.worker, told.block) == (worker.id, task.block)


def test_blobs_whole_from_an_offset_and_as_a_file(world: World, tmp_path: Path) -> None:
    _, client = world()
    weights = FakeWorker(client).joined().weights
    whole = b"".join(client.blob(weights.sha256))
    assert b"".join(client.blob(weights.sha256, 777)) == whole[777:]
    target = tmp_path / "files" / "weights"
    target.parent.mkdir()
    (tmp_path / "files" / "weights.partial").write_bytes(whole[:1000])
    got: list[int] = []
    assert fetch(client, weights, target, progress=got.append).read_bytes() == whole
    assert sum(got) == len(whole) - 1000, "it goes on where it was interrupted"
    assert (
        fetch(client, weights, target, progress=got.append) == target
        and sum(got) == len(whole) - 1000
    )
    with pytest.raises(Refused) as refused:
        list(client.blob("0" * 64))
    assert refused.value.code == Code.NOT_FOUND


def test_a_chunk_sent_twice_is_one_chunk(world: World) -> None:
    coordinator, client = world()
    worker = FakeWorker(client)
    task = worker.joined()
    chunks = split(worker.payload(task), task.chunk_bytes)
    assert client.upload_state(task.task, task.ticket).have == ()
    for index in (2, 0, 2):
        state = client.put_chunk(
            task.task, index, task.ticket, chunks[index], sha256(chunks[index])
        )
    assert state.have == (0, 2) == client.upload_state(task.task, task.ticket).have
    assert coordinator.run.store.blobs.chunks(task.task, task.fence) == {
        i: sha256(chunks[i]) for i in (0, 2)
    }


def test_an_update_gets_a_signed_receipt_and_the_next_task(world: World) -> None:
    _, client = world()
    worker = FakeWorker(client)
    task = worker.joined()
    payload = worker.payload(task)
    worker.upload(task, payload)
    said = worker.submission(task, payload)
    reply = client.submit(said)
    receipt = reply.receipt
    verify(receipt, worker.coordinator)
    assert (
        receipt.accepted
        and receipt.update == said.update
        and (receipt.weight, receipt.staleness) == (1.0, 0)
    )
    following = as_task(reply.next)
    assert (following.task, following.base, following.start_step) == (2, 1, 2)
    assert following.continues == m.Lineage(optimizer=1, residual=1)
    entries = whole_ledger(client)
    entry = next(e for e in entries if e.hash == receipt.entry)
    assert (
        entry.kind == "update"
        and m.Submission.model_validate_json(json.dumps(json.loads(entry.body)["submission"]))
        == said
    )
    made = [json.loads(e.body) for e in entries if e.kind == "version"]
    assert [v["version"] for v in made] == [0, 0, 1] and [
        p["update"] for p in made[-1]["parts"]
    ] == [said.update]
    manifest = client.manifest()
    assert (manifest.number, manifest.head) == (len(entries), entries[-1].hash)
    verify(manifest, worker.coordinator)
    assert (
        next(b for b in manifest.blocks if b.block == task.block).weights.sha256
        == made[-1]["weights"]["sha256"]
    )


def test_the_same_submission_gets_the_same_receipt(world: World) -> None:
    _, client = world()
    worker = FakeWorker(client)
    task = worker.joined()
    payload = worker.payload(task)
    worker.upload(task, payload)
    first = client.submit(worker.submission(task, payload))
    before = whole_ledger(client)
    again = client.submit(worker.submission(task, payload))
    assert again.receipt == first.receipt
    assert as_task(again.next).task == as_task(first.next).task
    assert whole_ledger(client) == before
    worker.send(as_task(first.next))
    assert client.submit(worker.submission(task, payload)).receipt == first.receipt, (
        "also much later"
    )


def test_ledger_comes_in_pages(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blocktrain.coordinator.calls.LEDGER_PAGE", 3)
    _, client = world()
    worker = FakeWorker(client)
    next_ = worker.send(worker.joined()).next
    worker.send(as_task(next_))
    page = client.ledger(1)
    assert [e.seq for e in page.entries] == [2, 3, 4] and page.total == len(
        whole_ledger(client)
    ) > 8
    assert client.ledger(page.total).entries == () and client.ledger(10**9).entries == ()


def test_status_counts_what_happened(world: World) -> None:
    _, client = world(replicas=2)
    worker = FakeWorker(client)
    task = worker.joined()
    payload = worker.payload(task)
    reply = worker.send(task, payload)
    status = client.status()
    block = next(b for b in status.blocks if b.block == task.block)
    assert (status.state, status.rounds, block.version, block.accepted, block.refused) == (
        "running",
        0,
        0,
        1,
        0,
    )
    assert block.round is not None and (block.round.updates, block.round.target) == (1, 2)
    assert block.bytes_in == len(payload) and block.bytes_out == task.weights.length
    (told,) = status.workers
    assert (told.accepted, told.tokens, told.task) == (1, 64, as_task(reply.next).task)


def test_a_kicked_worker_is_out_for_good(world: World) -> None:
    _, client = world()
    worker, other = FakeWorker(client), FakeWorker(client, seed=2)
    task = worker.joined()
    other.join()
    client.kick(m.Kick(worker=worker.id, reason="it was rude"))
    client.kick(m.Kick(worker=worker.id))
    for call in (
        worker.join,
        worker.ask,
        lambda: worker.beat(task),
        lambda: client.submit(worker.submission(task, b"x")),
    ):
        with pytest.raises(Refused, match="removed") as refused:
            call()
        assert refused.value.code == Code.KICKED
    kicks = [json.loads(e.body) for e in whole_ledger(client) if e.kind == "kick"]
    assert kicks == [{"worker": worker.id, "reason": "it was rude"}]
    assert {w.worker: w.state for w in client.status().workers} == {
        worker.id: "kicked",
        other.id: "training",
    }
    with pytest.raises(Refused) as unknown:
        client.kick(m.Kick(worker="0" * 32))
    assert unknown.value.code == Code.UNKNOWN_WORKER


def test_a_run_ends_when_its_budget_is_spent(world: World) -> None:
    coordinator, client = world(rounds=2)
    workers = [FakeWorker(client, seed) for seed in (1, 2)]
    todo = {w.id: w.join().next for w in workers}
    for _ in range(2):
        for worker in workers:
            todo[worker.id] = worker.send(as_task(todo[worker.id])).next
    for worker in workers:
        found = worker.ask()
        assert isinstance(found, m.Wait) and (found.code, found.seconds) == ("finished", 0.0)
    assert (
        coordinator.finished and client.manifest().finished and client.status().state == "finished"
    )
    kinds = [e.kind for e in whole_ledger(client)]
    assert kinds.count("finish") == 1 and kinds.count("version") == 2 + 4
    assert isinstance(todo[workers[1].id], m.Wait), "the last answer says so already"


def test_whoever_leaves_is_not_waited_for(world: World) -> None:
    _, client = world(replicas=None)
    worker, other = FakeWorker(client), FakeWorker(client, seed=3)
    task = worker.joined()
    left = worker.ask(leaving=True)
    assert isinstance(left, m.Wait) and left.code == "finished"
    with pytest.raises(Refused) as refused:
        worker.ask()
    assert refused.value.code == Code.UNKNOWN_WORKER
    taken = as_task(other.join().next)
    assert (taken.task, taken.fence) == (task.task, task.fence + 1), "its task is free at once"
    with pytest.raises(Refused) as stale:
        client.upload_state(task.task, task.ticket)
    assert stale.value.code == Code.STALE_FENCE
    assert other.send(taken).receipt.accepted
    other.ask(leaving=True)
    assert {w.state for w in client.status().workers} == {"left"}
    assert {b.block: b.version for b in client.manifest().blocks}[task.block] == 1, (
        "the round closed without waiting"
    )
    assert worker.joined().task > task.task, "and it may come back"
