"""From one state to the next: what of it must be written down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from blocktrain.coordination.records import Changes, WorkerRecord
from blocktrain.coordination.state import Lease, RoundState, RunState, WorkerState


def changes_between(before: RunState, after: RunState, known: Mapping[str, WorkerRecord]) -> Changes:
    """The rows that differ. Progress and last signs of life are not stored: they are told again after a restart."""
    leases = [x for t, x in after.leases.items() if t not in before.leases or _lease(before.leases[t]) != _lease(x)]
    lost = [t for t in before.leases if t not in after.leases and not _answered(before, after, t)]
    rounds = {
        index: (block.version, block.round)
        for index, block in after.blocks.items()
        if index in before.blocks
        and block.version == before.blocks[index].version
        and _round(block.round) != _round(before.blocks[index].round)
    }
    workers = [
        replace(known[name], state=worker)
        for name, worker in after.workers.items()
        if name not in before.workers or _worker(before.workers[name]) != _worker(worker)
    ]
    return Changes(leases=leases, lost=lost, rounds=rounds, workers=workers)


def _answered(before: RunState, after: RunState, task: int) -> bool:
    """Whether a lease ended with an update: then the update's own transaction marks it."""
    index = before.leases[task].block
    return len(after.blocks[index].round.updates) > len(before.blocks[index].round.updates)


def _lease(lease: Lease) -> Lease:
    return replace(lease, done_steps=0)


def _round(current: RoundState) -> RoundState:
    return replace(current, updates=())


def _worker(worker: WorkerState) -> WorkerState:
    return replace(worker, seen=0.0)
