"""When rounds close, leases end and the run is over, and what a submission is worth.

Pure decisions, each with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from blocktrain.coordinator.state import (
    Action,
    BlockState,
    CloseEmpty,
    CloseRound,
    Expire,
    Extend,
    Finish,
    Grace,
    Lease,
    Options,
    RunState,
    WaitingUpdate,
    standing_of,
)


def decide(now: float, state: RunState, options: Options) -> tuple[tuple[Action, ...], str]:
    """All that is due now. The reason names every action, or what is being waited for."""
    actions: list[Action] = [
        _expiry(lease)
        for lease in state.leases.values()
        if not lease.expired and now >= lease.expires
    ]
    expired_leases = {
        a.task: replace(state.leases[a.task], expired=True)
        for a in actions
        if isinstance(a, Expire)
    }
    current = replace(state, leases={**state.leases, **expired_leases}) if expired_leases else state
    waiting = []
    for index in sorted(current.blocks):
        action, reason = decide_round(now, current, options, index)
        if action is None:
            waiting.append(reason)
        else:
            actions.append(action)
    over = end_reason(current, options)
    if over is not None and not any(isinstance(a, CloseRound) for a in actions):
        actions.append(Finish(over))
    return tuple(actions), "; ".join([a.reason for a in actions] or waiting)


def _expiry(lease: Lease) -> Expire:
    return Expire(
        lease.task,
        lease.fence,
        f"the lease of {lease.worker} on task {lease.task} (block {lease.block}) ran out",
    )


def decide_round(
    now: float, state: RunState, options: Options, index: int
) -> tuple[CloseRound | Grace | Extend | CloseEmpty | None, str]:
    """What happens to the open round of one block, without a look at any other block."""
    block = state.blocks[index]
    current = block.round
    name = f"round {block.version} of block {index}"
    if index in options.frozen:
        return None, f"block {index} is frozen"
    if spent_share(state, options, index) >= 1:
        return None, f"block {index} has spent its budget"
    target, replicas = target_replicas(now, state, options, index), current.replicas
    if replicas >= target:
        return _close(index, block, f"{name} closes: all {target} replicas are here")
    quorum = replicas >= options.min_replicas
    if current.deadline is None:
        if quorum and not _open(state, index):
            return _close(
                index,
                block,
                f"{name} closes with {replicas} replicas: nobody is working on it any more",
            )
        return None, f"{name} waits for its first worker"
    if state.stopping and not _open(state, index):
        if quorum:
            return _close(
                index, block, f"{name} closes: the run stops and nobody is working on it any more"
            )
        return (
            None,
            f"{name} stays open with {replicas} of {options.min_replicas} replicas: the run stops",
        )
    if now < current.deadline and not (quorum and current.extended):
        return (
            None,
            f"{name} has {replicas} of {target} replicas and {current.deadline - now:.1f} s",
        )
    if quorum:
        return _grace_or_close(now, state, options, index)
    came = f"{replicas} of at least {options.min_replicas} replicas"
    length = round_length(block, options)
    if not current.extended:
        reason = f"{name} is extended once by {length:.1f} s: {came} by the deadline"
        return Extend(index, now + length, reason), reason
    longer = min(length * options.reopen_factor, options.longest_deadline)
    reason = (
        f"{name} closes empty and opens again with {longer:.1f} s: {came} even after the extension"
    )
    return CloseEmpty(index, block.version, longer, reason), reason


def _grace_or_close(
    now: float, state: RunState, options: Options, index: int
) -> tuple[CloseRound | Grace | None, str]:
    block = state.blocks[index]
    current = block.round
    name = f"round {block.version} of block {index}"
    window = options.grace * round_length(block, options)
    ends = now + window if current.grace_until is None else current.grace_until
    answered = {u.worker for u in current.updates}
    near = sorted(
        {
            x.worker
            for x in _open(state, index)
            if x.worker not in answered and x.finish(now) <= ends
        }
    )
    if not near:
        return _close(
            index,
            block,
            f"{name} closes at its deadline with {current.replicas} replicas: "
            "nobody else is nearly finished",
        )
    if current.grace_until is None and window > 0:
        reason = f"{name} has its quorum and waits {window:.1f} s more for {', '.join(near)}"
        return Grace(index, ends, reason), reason
    if now < ends:
        return None, f"{name} is in its grace window, {ends - now:.1f} s left for {', '.join(near)}"
    return _close(
        index, block, f"{name} closes with {current.replicas} replicas: the grace window is over"
    )


def _close(index: int, block: BlockState, reason: str) -> tuple[CloseRound, str]:
    return CloseRound(
        index, block.version, tuple(sorted(u.id for u in block.round.updates)), reason
    ), reason


def _open(state: RunState, index: int) -> list[Lease]:
    return [lease for lease in state.leases.values() if lease.block == index and not lease.expired]


def target_replicas(now: float, state: RunState, options: Options, index: int) -> int:
    """Replicas that close a round at once: as configured, or all that work or have answered."""
    if options.target_replicas is not None:
        return max(options.target_replicas, options.min_replicas)
    working = awaited(now, state, options, index)
    return max(
        len(working | {u.worker for u in state.blocks[index].round.updates}), options.min_replicas
    )


def awaited(now: float, state: RunState, options: Options, index: int) -> set[str]:
    """The workers whose tasks a round waits for.

    A lease that is only kept alive must not hold up the others: with defences a round waits for
    those who have delivered before, as long as there are any.
    """
    working = {
        lease.worker for lease in _open(state, index) if is_alive(now, state, options, lease.worker)
    }
    if not options.defences:
        return working
    proven = {worker for worker in working if standing_of(state, worker).proven}
    answered = {u.worker for u in state.blocks[index].round.updates}
    if proven or any(standing_of(state, worker).proven for worker in answered):
        return proven
    return {worker for worker in working if not standing_of(state, worker).missed} or working


def is_alive(now: float, state: RunState, options: Options, worker: str) -> bool:
    """Whether a worker was heard of lately."""
    known = state.workers.get(worker)
    return known is not None and not known.kicked and now - known.seen <= options.alive


def round_length(block: BlockState, options: Options) -> float:
    """Seconds between the first lease of a round and its deadline."""
    if block.round.length > 0:
        return block.round.length
    if not block.task_seconds:
        return options.first_deadline
    return min(
        max(options.deadline_factor * median(block.task_seconds), options.shortest_deadline),
        options.longest_deadline,
    )


def deadline_after(now: float, block: BlockState, options: Options, seconds: float | None) -> float:
    """When a round ends that gets an update now, whose task took so many seconds.

    The first task that is timed replaces the guess `first_deadline`.
    """
    if seconds is not None and not block.task_seconds and not block.round.attempt:
        block = replace(block, task_seconds=(seconds,), round=replace(block.round, length=0.0))
    return now + round_length(block, options)


def spent_share(state: RunState, options: Options, index: int) -> float:
    """Share of its budget that a block has spent: 0 without a budget, 1 or more at the end."""
    block = state.blocks[index]
    if index in options.frozen:
        return 1.0
    share = 0.0
    if options.budget_rounds:
        share = max(share, block.version / options.budget_rounds)
    if steps := step_budget(block, options):
        share = max(share, block.steps / steps)
    if options.budget_tokens:
        trained = [b for i, b in state.blocks.items() if i not in options.frozen]
        part = (step_budget(block, options) or 1) / sum(
            step_budget(b, options) or 1 for b in trained
        )
        share = max(share, block.tokens / (options.budget_tokens * part))
    return share


def step_budget(block: BlockState, options: Options) -> int | None:
    """Where the learning-rate schedule of a block ends; None: nowhere."""
    is_shorter = block.fusion and options.fusion_steps is not None
    return options.fusion_steps if is_shorter else options.budget_steps


def end_reason(state: RunState, options: Options) -> str | None:
    """Why the run is over, or None. A requested stop waits for the tasks that are out."""
    if not state.blocks:
        return None
    if all(spent_share(state, options, index) >= 1 for index in state.blocks):
        return "the run is finished: every block has spent its budget"
    if state.stopping and not any(_open(state, index) for index in state.blocks):
        return "the run has stopped: no task is out any more"
    return None


def advance_block(
    block: BlockState, shares: Mapping[str, float], loss: float | None, options: Options
) -> BlockState:
    """The block after these updates of its open round became its next version, with these shares.

    The steps of a block are its position on its learning-rate schedule. Replicas run side by side,
    so the position moves by their mean, weighted as the merge weights them. It never moves past the
    end of the schedule: a late update repeats steps that others have made in the meantime.
    """
    updates = sorted((u for u in block.round.updates if u.id in shares), key=lambda u: u.id)
    steps = block.steps + max(1, round(sum(u.steps * shares[u.id] for u in updates)))
    if (budget := step_budget(block, options)) is not None:
        steps = max(block.steps, min(steps, budget))
    return replace(
        block,
        version=block.version + 1,
        steps=steps,
        tokens=block.tokens + sum(u.tokens for u in updates),
        loss=block.loss if loss is None else loss,
    )


def mean_steps(updates: Sequence[WaitingUpdate]) -> float:
    """Steps by which these replicas advance their block."""
    weights = [u.tokens * u.weight for u in updates]
    weighted = sum(u.steps * w for u, w in zip(updates, weights, strict=True))
    return weighted / (sum(weights) or 1.0)


@dataclass(frozen=True)
class Claim:
    """What a worker says about its update, as far as the decision needs it."""

    worker: str
    task: int
    fence: int
    block: int
    base: int
    steps: int


@dataclass(frozen=True)
class Verdict:
    """Accepted with a weight, or refused with a stable code; always with a sentence."""

    accepted: bool
    code: str  # accepted, late, or why not
    reason: str
    staleness: int = 0
    weight: float = 0.0


def staleness_weight(staleness: int, options: Options) -> float:
    """decay ** staleness, but 1 for staleness 1.

    A worker that trains while it uploads is always one version behind.
    """
    return 1.0 if staleness <= 1 else options.decay**staleness


def judge(now: float, state: RunState, options: Options, submission: Claim) -> Verdict:
    """Whether an update counts, and how much.

    A repeated submission must have been answered from the store before.
    """
    s = submission
    block = state.blocks.get(s.block)
    if block is None:
        return _refuse("unknown_block", f"block {s.block}")
    if (known := state.workers.get(s.worker)) is not None and known.kicked:
        return _refuse("kicked", f"worker {s.worker}")
    staleness = block.version - s.base
    too_stale = _refuse(
        "too_stale",
        f"the update starts from version {s.base} of block {s.block}, which is {staleness} behind; "
        f"at most {options.max_staleness} count",
        staleness,
    )
    lease = state.leases.get(s.task)
    if lease is None:
        return (
            too_stale
            if staleness > options.max_staleness
            else _refuse("unknown_task", f"task {s.task}")
        )
    if (problem := _mismatch(lease, s, options)) is not None:
        return problem
    if spent_share(state, options, s.block) >= 1:
        return _refuse("block_finished", f"block {s.block}", staleness)
    if staleness > options.max_staleness:
        return too_stale
    weight = staleness_weight(staleness, options)
    if lease.expired or now >= lease.expires:
        return Verdict(
            True,
            "late",
            f"late, but task {s.task} was given to nobody else: weight {weight:.3g}",
            staleness,
            weight,
        )
    if staleness > 0:
        return Verdict(
            True, "late", f"{staleness} versions behind: weight {weight:.3g}", staleness, weight
        )
    return Verdict(
        True, "accepted", f"on time for round {block.version} of block {s.block}", 0, weight
    )


def _mismatch(lease: Lease, s: Claim, options: Options) -> Verdict | None:
    if s.fence < lease.fence:
        return _refuse(
            "stale_fence",
            f"your lease of task {s.task} ran out (this is not held against you)",
        )
    if s.fence > lease.fence or s.worker != lease.worker:
        return _refuse(
            "not_your_task",
            f"task {s.task} with fence {s.fence}",
        )
    if (s.block, s.base) != (lease.block, lease.base):
        return _refuse(
            "wrong_base", f"task {s.task} is for version {lease.base} of block {lease.block}"
        )
    if not 1 <= s.steps <= lease.steps or (
        options.fixed_steps is not None and s.steps != lease.steps
    ):
        return _refuse("wrong_steps", f"task {s.task} has {lease.steps} steps, {s.steps} were made")
    return None


def _refuse(code: str, reason: str, staleness: int = 0) -> Verdict:
    return Verdict(False, code, reason, staleness)
