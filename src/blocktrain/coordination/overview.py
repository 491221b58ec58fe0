"""The state of a run as people want to see it. Reads only."""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

from blocktrain.coordination.live import LiveRun
from blocktrain.coordination.recall import Tally
from blocktrain.coordination.rounds import decide_round, is_alive, round_length, target_replicas
from blocktrain.coordination.state import WorkerState, remaining
from blocktrain.protocol.messages import PROTOCOL
from blocktrain.protocol.refusals import MAX_SENTENCE, Code
from blocktrain.protocol.status import BlockStatus, RoundStatus, Status, WorkerStatus

Bytes = dict[str, int]


def status(live: LiveRun, now: float) -> Status:
    """`GET /v1/status`."""
    by_block, by_worker, total = _traffic(live)
    over = live.finished
    return Status(
        protocol=PROTOCOL,
        run=live.run.run,
        fingerprint=live.run.fingerprint,
        state="finished" if over else "stopping" if live.state.stopping else "running",
        reason=(over or live.reason)[:MAX_SENTENCE],
        up_seconds=now - live.began,
        rounds=live.recall.versions,
        tokens=sum(block.tokens for block in live.state.blocks.values()),
        token_budget=live.policy.tokens,
        round_budget=live.policy.rounds,
        blocks=tuple(_block(live, now, index, by_block[index]) for index in sorted(live.state.blocks)),
        workers=tuple(_worker(live, now, name, by_worker[name]) for name in sorted(live.known)),
        refusals={Code(code): count for code, count in sorted(live.recall.refusals.items())},
        bytes_in=total["bytes_in"],
        bytes_out=total["bytes_out"],
    )


def _traffic(live: LiveRun) -> tuple[dict[int, Bytes], dict[str, Bytes], Bytes]:
    """Bytes per block, per worker and in all: what is committed and what is not yet."""
    by_block: dict[int, Bytes] = defaultdict(lambda: {"bytes_in": 0, "bytes_out": 0})
    by_worker: dict[str, Bytes] = defaultdict(lambda: {"bytes_in": 0, "bytes_out": 0})
    total = {"bytes_in": 0, "bytes_out": 0}
    counted = [(t.block, t.worker, t.bytes_in, t.bytes_out) for t in live.store.traffic()]
    counted += [(block, worker, *counts) for (block, worker), counts in live.traffic.items()]  # type: ignore[misc]
    for block, worker, bytes_in, bytes_out in counted:
        for counter in (by_block[block], by_worker[worker], total):
            counter["bytes_in"] += bytes_in
            counter["bytes_out"] += bytes_out
    return by_block, by_worker, total


def _block(live: LiveRun, now: float, index: int, traffic: Bytes) -> BlockStatus:
    block = live.state.blocks[index]
    tally = live.recall.blocks.get(index, Tally())
    _, why = decide_round(now, live.state, live.options, index)
    current = RoundStatus(
        version=block.version,
        updates=len(block.round.updates),
        leased=sum(x.block == index and not x.expired for x in live.state.leases.values()),
        target=target_replicas(now, live.state, live.options, index),
        minimum=live.options.min_replicas,
        extensions=int(block.round.extended),
        open_seconds=max(0.0, round_length(block, live.options) - (remaining(now, block.round.deadline) or 0.0)),
        deadline_seconds=remaining(now, block.round.deadline) or 0.0,
        reason=why[:MAX_SENTENCE],
    )
    newest = live.newest(index)
    return BlockStatus(
        block=index,
        version=newest.version,
        weights=newest.weights,
        steps=block.steps,
        tokens=block.tokens,
        loss=block.loss,
        accepted=tally.accepted,
        refused=tally.refused,
        late=tally.late,
        round=current,
        **traffic,
    )


def _worker(live: LiveRun, now: float, name: str, traffic: Bytes) -> WorkerStatus:
    record = live.known[name]
    found = live.state.workers.get(name)
    tally = live.recall.workers.get(name, Tally())
    lease = next((x for x in live.state.leases.values() if x.worker == name and not x.expired and not x.trained), None)
    said = live.progress.get(name)
    speed = found.seconds_per_step if found else None
    return WorkerStatus(
        worker=name,
        name=record.name,
        device=live.recall.devices.get(name, ""),
        state=_state(live, now, found, lease is not None),
        block=found.block if found else None,
        task=lease.task if lease else None,
        step=lease.done_steps if lease else 0,
        steps=lease.steps if lease else 0,
        loss=said.loss if said and lease and said.task == lease.task else None,
        speed=1 / speed if speed else 0.0,
        accepted=tally.accepted,
        refused=tally.refused,
        tokens=tally.tokens,
        seen_seconds=max(0.0, now - found.seen) if found else 0.0,
        **traffic,
    )


def _state(live: LiveRun, now: float, worker: WorkerState | None, busy: bool) -> Literal["training", "waiting", "lost", "left", "kicked"]:
    if worker is None:
        return "left"
    if worker.kicked:
        return "kicked"
    if not is_alive(now, live.state, live.options, worker.id):
        return "lost"
    return "training" if busy else "waiting"
