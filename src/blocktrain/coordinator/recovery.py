"""The state of a run after a restart, from its records. Here seconds left become moments again."""

from __future__ import annotations

from dataclasses import replace

from blocktrain.coordinator.state import (
    BlockState,
    Lease,
    RoundState,
    RunState,
    until,
    waiting_update,
    worker_state,
)
from blocktrain.store.contract import LeaseRecord, RoundRecord, StoredRun, VersionRecord


def recover_state(stored: StoredRun, now: float, fusion: int | None) -> RunState:
    """The state as of the last commit. What was left of every deadline counts from now."""
    rounds = {record.block: record for record in stored.rounds}
    blocks = {}
    for version in stored.versions:
        index = version.block
        waiting = (waiting_update(u) for u in stored.pending if u.block == index)
        current = replace(_round(now, version, rounds.get(index)), updates=tuple(waiting))
        blocks[index] = BlockState(
            version=version.version,
            steps=version.steps,
            tokens=version.tokens,
            loss=version.loss,
            fusion=index == fusion,
            task_seconds=tuple(stored.task_seconds.get(index, ())),
            next_number=stored.next_numbers.get(index, 0),
            read=stored.read.get(index, ()),
            round=current,
        )
    return RunState(
        blocks=blocks,
        leases={record.task: _lease(now, record) for record in stored.leases},
        # All workers count as seen just now, so that a restart loses none.
        workers={w.id: worker_state(w, now) for w in stored.workers},
        next_task=stored.next_task,
    )


def _lease(now: float, record: LeaseRecord) -> Lease:
    return Lease(
        task=record.task,
        number=record.number,
        block=record.block,
        base=record.base,
        fence=record.fence,
        worker=record.worker,
        steps=record.steps,
        start_step=record.start_step,
        position=record.position,
        granted=now - record.age,
        expires=now + record.remaining,
        expected=record.expected,
        trained=record.trained,
        expired=record.expired,
    )


def _round(now: float, version: VersionRecord, record: RoundRecord | None) -> RoundState:
    if record is None or record.version != version.version:
        return RoundState()
    return RoundState(
        deadline=until(now, record.remaining),
        length=record.length,
        extended=record.extended,
        grace_until=until(now, record.grace_remaining),
        attempt=record.attempt,
    )
