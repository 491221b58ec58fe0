"""Who counts as gone for good, and what is forgotten then. The ledger keeps everybody.

Anyone with the join token can make any number of keys, so members that never delivered must leave
nothing behind.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import replace

from blocktrain.coordinator.rounds import is_alive
from blocktrain.coordinator.state import Options, RunState

GONE_SECONDS = 3600.0  # without a sign of life; until then a late update may come
MOST_MEMBERS = 4096  # that are present


def forget_gone(now: float, state: RunState, options: Options, patience: float) -> RunState:
    """Without members that were silent for so long, and without their leases that have ended."""
    out = {lease.worker for lease in state.leases.values() if not lease.expired}
    workers = {
        name: worker
        for name, worker in state.workers.items()
        if worker.kicked or name in out or now - worker.seen <= patience
    }
    leases = {
        task: lease
        for task, lease in state.leases.items()
        if not lease.expired
        or options.exclusive  # there is one line of tasks, and another one would split it
        or now - lease.expires <= patience
        or is_alive(now, state, options, lease.worker)
    }
    if len(workers) == len(state.workers) and len(leases) == len(state.leases):
        return state
    return replace(state, workers=workers, leases=leases)


def strangers(state: RunState, known: Iterable[str], delivered: Container[str]) -> set[str]:
    """Members that are gone, and have never delivered anything."""
    busy = {lease.worker for lease in state.leases.values()}
    return {
        name
        for name in known
        if name not in state.workers and name not in busy and name not in delivered
    }
