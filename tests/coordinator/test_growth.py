"""What nobody needs any more is removed: old nonces, and the chunks of uploads that were left."""

from __future__ import annotations

import gc
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from blocktrain.clock import SimulatedClock
from blocktrain.coordinator.assignment import assign, size_task, steps_left
from blocktrain.coordinator.limits.members import GONE_SECONDS
from blocktrain.coordinator.rounds import advance_block
from blocktrain.coordinator.run import FLUSH_SECONDS, NONCE_SECONDS, PRUNE_SECONDS
from blocktrain.coordinator.state import (
    BlockState,
    Options,
    Postpone,
    RoundState,
    RunState,
    WaitingUpdate,
    WorkerState,
)
from blocktrain.protocol import messages as m
from blocktrain.protocol.refusals import Refused
from blocktrain.protocol.transfer import sha256, split
from blocktrain.watch.metrics import resident_bytes
from blocktrain.watch.server import WatchedCoordinator, open_coordinator
from blocktrain.web.client import LocalClient
from support.fake_worker import FakeWorker, as_task, beginning


def test_nonces_are_removed_when_no_task_can_need_them(tmp_path: Path) -> None:
    clock = SimulatedClock(1000.0)
    with beginning(tmp_path, clock=clock) as coordinator:
        worker = FakeWorker(LocalClient(coordinator))
        worker.send(worker.joined())
        store = coordinator.run.store
        clock.now += PRUNE_SECONDS + FLUSH_SECONDS + 1
        coordinator.tick()
        assert store.forget_nonces(0.0) == 0, "a nonce of today is kept"
        clock.now += NONCE_SECONDS
        coordinator.tick()
        assert store.forget_nonces(clock.time() + 1) == 0, "all are gone"


def test_chunks_of_an_abandoned_upload_go_with_its_lease(tmp_path: Path) -> None:
    clock = SimulatedClock(1000.0)
    with beginning(tmp_path, clock=clock, replicas=1) as coordinator:
        first, second = (FakeWorker(LocalClient(coordinator), seed) for seed in (1, 2))
        task = first.joined()
        piece = split(first.payload(task), task.chunk_bytes)[0]
        chunks = coordinator.run.store.blobs.chunks
        LocalClient(coordinator).put_chunk(task.task, 0, task.ticket, piece, sha256(piece))
        assert chunks(task.task, task.fence)
        lease = coordinator.run.state.leases[task.task]
        clock.now = lease.expires + coordinator.run.options.alive + 1
        coordinator.tick()
        assert chunks(task.task, task.fence), "it may still arrive: nobody else has the task"
        taken = [as_task(second.join().next)]
        while taken[-1].task != task.task and len(taken) < 4:
            worker = FakeWorker(LocalClient(coordinator), 10 + len(taken))
            taken.append(as_task(worker.join().next))
        assert taken[-1].task == task.task and taken[-1].fence == task.fence + 1
        assert chunks(task.task, task.fence) == {}
        with pytest.raises(Refused):
            LocalClient(coordinator).put_chunk(task.task, 0, task.ticket, piece, sha256(piece))


def weigh(coordinator: WatchedCoordinator) -> dict[str, int]:
    """What a coordinator holds of its members, apart from the ledger."""
    run, blobs = coordinator.run, coordinator.run.store.blobs
    gc.collect()
    return {
        "members": len(run.known) + len(run.state.workers) + len(run.store.workers()),
        "counts": len(run.traffic.by_worker) + len(run.history.workers) + len(run.history.devices),
        "standings": len(run.history.standings) + len(run.progress) + len(run.history._held),
        "leases": len(run.state.leases),
        "events": len(coordinator.feed.states),
        "chunks": sum(1 for _ in Path(run.store.address).glob("uploads/*/*")),
        "blobs": len(list(blobs.names())) + len(run.history.public),
        "memory": resident_bytes(),
    }


def test_members_who_never_deliver_leave_nothing(tmp_path: Path) -> None:
    """A13: 600 members join, take a task, upload a part, and are never heard of again."""
    clock = SimulatedClock(1000.0)
    with beginning(tmp_path, clock=clock) as coordinator:
        client, weights = LocalClient(coordinator), []
        honest = FakeWorker(client)
        honest.send(honest.joined())
        for seed in range(2, 601):
            worker = FakeWorker(client, seed)
            task = worker.join().next
            if isinstance(task, m.Task):
                worker.beat(task)
                client.put_chunk(task.task, 0, task.ticket, b"x" * 900, sha256(b"x" * 900))
            clock.now += GONE_SECONDS / 50
            if seed % 150 == 0:
                for seconds in (3 * GONE_SECONDS, 60.0):
                    clock.now += seconds
                    coordinator.tick()
                weights.append(weigh(coordinator))
        memory = [weight.pop("memory") for weight in weights]
        assert max(memory[1:]) - memory[0] < 4 << 20
        assert all(weight == weights[0] for weight in weights), weights
        assert weights[0]["members"] == 2 and weights[0]["chunks"] == 0
        (left,) = coordinator.status().workers
        assert left.worker == honest.id, "who has delivered is remembered"
    with closing(open_coordinator(tmp_path, clock)) as again:
        assert len(again.run.known) == len(again.run.history.devices) == 1


def test_a_place_is_taken_from_the_silent_only(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("blocktrain.coordinator.calls.MOST_MEMBERS", 3)
    clock = SimulatedClock(1000.0)
    with beginning(tmp_path, clock=clock) as coordinator:
        first, *others = [FakeWorker(LocalClient(coordinator), seed) for seed in range(1, 6)]
        for worker in (first, *others[:2]):
            worker.join()
        with pytest.raises(Refused, match="3 workers are here"):
            others[2].join()
        clock.now += coordinator.run.options.alive + 1
        first.ask()
        others[2].join()
        assert first.id in coordinator.run.state.workers


def test_steps_never_pass_the_end_of_the_schedule() -> None:
    options = Options(budget_steps=400, fixed_steps=20)
    waiting = (WaitingUpdate("x", "a", 100, 20),)
    block = BlockState(version=3, steps=390, round=RoundState(deadline=99.0, updates=waiting))
    after = advance_block(block, {"x": 1.0}, None, options)
    assert after.steps == 400, "a late update of 20 steps does not make 410"
    fresh, answered = WorkerState("b", seconds_per_step=0.1), WorkerState("a", seconds_per_step=0.1)
    assert size_task(60.0, options, block, fresh).steps == 10
    assert steps_left(options, block, answered) == 0
    state = RunState(blocks={1: block}, workers={"a": answered})
    decision = assign(0.0, state, options, "a")
    assert isinstance(decision, Postpone) and "the last of block 1" in decision.reason
