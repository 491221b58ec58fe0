"""From one state to the next: what of it must be written down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from blocktrain.coordinator.state import Lease, RoundState, RunState, WorkerState
from blocktrain.store.contract import Changes, WorkerRecord

K = TypeVar("K")
V = TypeVar("V")


def changes_between(
    before: RunState, after: RunState, known: Mapping[str, WorkerRecord]
) -> Changes:
    """The rows that differ. Progress and last signs of life are not stored: they are told again after a restart."""
    leases = [
        new
        for _, old, new in _touched(before.leases, after.leases)
        if old is None or _lease(old) != _lease(new)
    ]
    lost = [
        t for t in before.leases.keys() - after.leases.keys() if not _answered(before, after, t)
    ]
    rounds = {
        index: (new.version, new.round)
        for index, old, new in _touched(before.blocks, after.blocks)
        if old is not None and new.version == old.version and _round(new.round) != _round(old.round)
    }
    workers = [
        replace(known[name], state=new)
        for name, old, new in _touched(before.workers, after.workers)
        if old is None or _worker(old) != _worker(new)
    ]
    return Changes(leases=leases, lost=sorted(lost), rounds=rounds, workers=workers)


def _touched(before: Mapping[K, V], after: Mapping[K, V]) -> list[tuple[K, V | None, V]]:
    """What may differ: all else is the same object. Of a thousand leases and workers a call touches one or two."""
    return (
        []
        if after is before
        else [
            (key, before.get(key), new) for key, new in after.items() if before.get(key) is not new
        ]
    )


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
