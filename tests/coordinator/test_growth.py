"""What nobody needs any more is removed: old nonces, and the chunks of uploads that were left."""

from __future__ import annotations

from pathlib import Path

import pytest

from blocktrain.clock import SimulatedClock
from blocktrain.coordinator.assignment import assign, size_task, steps_left
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
from blocktrain.protocol.refusals import Refused
from blocktrain.protocol.transfer import sha256, split
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
