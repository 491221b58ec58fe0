"""Which block a free worker gets, and how many steps: pure decisions, each with its reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import floor, inf

from blocktrain.coordinator.history import Standing
from blocktrain.coordinator.rounds import (
    awaited,
    end_reason,
    is_alive,
    mean_steps,
    round_length,
    spent_share,
    step_budget,
)
from blocktrain.coordinator.state import (
    Assignment,
    BlockState,
    Grant,
    Lease,
    Options,
    Postpone,
    RunState,
    Stop,
    WorkerState,
    standing_of,
)
from blocktrain.protocol.positions import first_gap


def assign(
    now: float, state: RunState, options: Options, worker: str, held: int | None = None
) -> Assignment:
    """The next task of a worker that trains nothing now, or why it gets none.

    `held` is the block whose optimizer state the worker has.
    """
    known = state.workers.get(worker)
    if known is None:
        return Stop("this worker has not joined this run: join first")
    if known.kicked:
        return Stop("this worker was removed from the run by its operator")
    if reason := end_reason(state, options):
        return Stop(reason)
    if state.stopping:
        return Stop("the run is stopping: no more tasks")
    mine = sorted(
        (x for x in state.leases.values() if x.worker == worker and not x.expired),
        key=lambda x: x.task,
    )
    for lease in mine:
        block = state.blocks[lease.block]
        if (
            not lease.trained
            and lease.base == block.version
            and now + lease.expected <= lease.expires
        ):
            again = f"task {lease.task} is already yours: it continues"
            return Grant(
                lease, now + round_length(block, options), round_length(block, options), True, again
            )
    uploading = sum(lease.trained for lease in mine)
    if uploading > options.max_uploading:
        return Postpone(
            min(1.0, options.poll),
            f"{uploading} of your updates are not submitted yet: upload first",
        )
    index, reason = choose_block(now, state, options, known, held)
    if index is None:
        return Postpone(options.poll, reason)
    waiting = sum(u.worker == worker for u in state.blocks[index].round.updates)
    if options.most_waiting is not None and waiting >= options.most_waiting:
        others = others_done_in(now, state, options, known, index) or 0.0
        return Postpone(
            min(options.poll, max(others, 0.25)),
            f"{waiting} of your updates wait for round {state.blocks[index].version}",
        )
    rounds = standing_of(state, worker).barred if options.defences else 0
    if rounds and _enough_answer(now, state, options, index):
        return Postpone(
            options.poll,
            "your last updates were left out for what they held: "
            f"your next task comes after {rounds} more round(s) of block {index}",
        )
    return _grant(now, state, options, known, (index, reason))


def choose_block(
    now: float,
    state: RunState,
    options: Options,
    worker: WorkerState,
    held: int | None = None,
) -> tuple[int | None, str]:
    """The worker's own block. One that comes back gets the block whose state it has, if it is free.

    It moves only when that is done, or when a block without workers has fallen far behind.
    """
    staffed = _count_others(now, state, options, worker)
    free = [
        index
        for index in sorted(state.blocks)
        if spent_share(state, options, index) < 1 and fusion_open(state, options, index)
    ]
    if options.exclusive:
        free = [index for index in free if not staffed[index]]
    if not free:
        return None, "every block that can be trained now has its worker"

    def behind(index: int) -> tuple[int, int, float, int]:
        block = state.blocks[index]
        return block.version, staffed[index], -inf if block.loss is None else -block.loss, index

    own = worker.block
    if own not in free:
        if held in free and not staffed[held]:
            return held, f"block {held} has no workers, and this worker has its optimizer state"
        index = min(free, key=behind)
        return (
            index,
            f"block {index} is furthest behind: "
            f"version {state.blocks[index].version}, {staffed[index]} workers",
        )
    lag = inf if options.max_lag is None else state.blocks[own].version - options.max_lag
    alone = [
        i
        for i in free
        if not staffed[i]
        and i != own
        and options.max_lag is not None
        and state.blocks[i].version < lag
    ]
    crowded = staffed[own] > 0 or not any(
        staffed[index] > 1 for index in state.blocks if index != own
    )
    if alone and crowded:
        index = min(alone, key=behind)
        gap = state.blocks[own].version - state.blocks[index].version
        return index, f"block {index} has no workers and is {gap} versions behind block {own}"
    return own, f"block {own} is this worker's block"


def _count_others(
    now: float, state: RunState, options: Options, worker: WorkerState
) -> Counter[int | None]:
    """How many others work on each block."""
    since = now - options.alive  # as `is_alive`, for a thousand at a time
    return Counter(
        w.block
        for w in state.workers.values()
        if w.seen >= since and not w.kicked and w.id != worker.id
    )


def _enough_answer(now: float, state: RunState, options: Options, index: int) -> bool:
    """Whether a block gets on without those who have to sit out. If not, nobody does."""
    answering = sum(
        w.block == index
        and is_alive(now, state, options, w.id)
        and standing_of(state, w.id).answers
        for w in state.workers.values()
    )
    return answering >= max(1, options.min_replicas)


def fusion_open(state: RunState, options: Options, index: int) -> bool:
    """Whether the others are far enough for the fusion block to go on.

    Without a budget they are as soon as each has a version.

    Until they are done it stays behind them by the share at which it began. So the rest of its
    training reads finished blocks.
    """
    if not state.blocks[index].fusion:
        return True
    others = [i for i, block in state.blocks.items() if not block.fusion]
    if not (options.budget_rounds or options.budget_steps or options.budget_tokens):
        return all(state.blocks[i].version > 0 or i in options.frozen for i in others)
    least = min(spent_share(state, options, i) for i in others)
    return least >= 1 or spent_share(state, options, index) <= least - options.fusion_start


@dataclass(frozen=True)
class TaskSize:
    """Steps of a task, and the seconds that it should take. No steps: it would not end in time."""

    steps: int
    seconds: float
    reason: str
    least: int = 1  # fewer are not worth a task


def size_task(
    seconds_left: float, options: Options, block: BlockState, worker: WorkerState
) -> TaskSize:
    """As many steps as this worker can make in the wanted time and before the deadline.

    The deadline is `seconds_left` away.
    """
    end = steps_left(options, block, worker)
    most = options.max_steps if end is None else max(1, min(options.max_steps, end))
    if options.fixed_steps is not None:
        most = min(most, options.fixed_steps)
    least = most if options.fixed_steps is not None else min(options.min_steps, most)
    if worker.seconds_per_step is None:
        steps = most if options.fixed_steps is not None else min(options.first_steps, most)
        reason = f"{steps} steps: the first task of a worker of unknown speed"
        return TaskSize(steps, seconds_left * options.safety, reason)
    step = max(worker.seconds_per_step * block.cost, 1e-9)
    if options.exclusive:
        return TaskSize(most, worker.overhead + most * step, f"{most} steps: fixed")
    affordable = seconds_left * options.safety - worker.overhead
    fitting = min(most, floor(min(affordable, options.task_seconds - worker.overhead) / step))
    if fitting < least <= floor(affordable / step):
        fitting = least  # more than the wanted time, but before the deadline
    needed = worker.overhead + max(fitting, least) * step
    if fitting >= least:
        reason = f"{fitting} steps at {step:.3g} s each fit into {seconds_left:.1f} s"
        return TaskSize(fitting, needed, reason)
    need = "one step needs" if least == 1 else f"{least} steps need"
    reason = f"even {need} {needed:.1f} s and {max(seconds_left, 0.0):.1f} s are left"
    return TaskSize(0, needed, reason, least)


def steps_left(options: Options, block: BlockState, worker: WorkerState) -> int | None:
    """Steps to the end of the block's schedule from where this worker's task counts; None: no end.

    Replicas of a round run side by side. A worker that has answered the open round
    counts in the next one, which begins after the steps that wait for their merge.
    """
    budget = step_budget(block, options)
    if budget is None:
        return None
    steps = budget - block.steps
    if has_answered(block, worker):
        steps -= round(mean_steps(block.round.updates))
    return max(0, steps)


def has_answered(block: BlockState, worker: WorkerState) -> bool:
    """Whether an update of this worker waits in the open round."""
    return any(update.worker == worker.id for update in block.round.updates)


def _grant(
    now: float, state: RunState, options: Options, worker: WorkerState, chosen: tuple[int, str]
) -> Assignment:
    """A task of the chosen block, or why it is better to wait."""
    index, why = chosen
    block = state.blocks[index]
    if steps_left(options, block, worker) == 0:
        reason = f"the updates that wait for their merge are the last of block {index}"
        return Postpone(min(options.poll, 1.0), reason)  # soon another block has time for it
    if not options.exclusive and worker.seconds_per_step is not None:
        others = others_done_in(now, state, options, worker, index)
        if others is not None:
            if _better_waits(others, options, block, worker):
                reason = f"the next version of block {index} is worth waiting for: "
                return Postpone(
                    min(options.poll, max(others, 0.25)), f"{reason}about {others:.1f} s"
                )
            options = replace(options, task_seconds=min(options.task_seconds, others))
        rest = time_to_end(now, state, options, worker, index)
        if rest is not None:
            options = replace(options, task_seconds=min(options.task_seconds, rest))
    if options.defences and options.fixed_steps is None:
        options = _grown(options, standing_of(state, worker.id))
    plan = _plan(now, state, options, worker, index)
    if isinstance(plan, Postpone):
        return plan
    size, deadline, length = plan
    again = _task_to_repeat(now, state, options, worker, index)
    position, end = unread_batches(state, options, index, again, size.steps)
    size = _shorten(size, end - position, block, worker)
    lease = _lease(now, state, options, worker, (index, again, size, position, deadline))
    redo = f"; again, after the lease of {again.worker} ran out" if again else ""
    reason = f"{why}; {size.reason}{redo}"
    return Grant(lease, deadline, length, False, reason, alone=options.exclusive)


def _grown(options: Options, standing: Standing) -> Options:
    """Tasks grow with what their worker has delivered, whatever speed it has."""
    most = max(options.first_steps, round(options.task_growth * standing.longest))
    return replace(options, max_steps=min(options.max_steps, most))


def _plan(
    now: float, state: RunState, options: Options, worker: WorkerState, index: int
) -> tuple[TaskSize, float, float] | Postpone:
    """(size of the task, deadline and length of its round), or why the worker waits."""
    block = state.blocks[index]
    length = round_length(block, options)
    deadline = now + length if block.round.deadline is None else block.round.deadline
    size = size_task(deadline - now, options, block, worker)
    if size.steps:
        return size, deadline, length
    if size_task(length, options, block, worker).steps:
        return Postpone(
            min(options.poll, max(deadline - now, 0.1)),
            f"{size.reason}; the next round of block {index} has time for you",
        )
    alone = not _count_others(now, state, options, worker)[index]
    if block.round.deadline is None and alone:
        longest = options.reopen_factor * length if options.defences else options.longest_deadline
        length = min(size.seconds / options.safety, longest, options.longest_deadline)
        reason = f"{size.least} steps; the deadline is {length:.1f} s for its only worker"
        return replace(size, steps=size.least, reason=reason), now + length, length
    if size.seconds <= deadline - now + options.max_staleness * length:
        reason = f"{size.least} steps; they will be late and count with a staleness weight"
        return replace(size, steps=size.least, reason=reason), deadline, length
    return Postpone(
        options.poll,
        f"{size.reason}; block {index} is faster than this worker "
        f"by more than {options.max_staleness} rounds",
    )


def _task_to_repeat(
    now: float, state: RunState, options: Options, worker: WorkerState, index: int
) -> Lease | None:
    """The oldest task of the current version that its worker will not finish."""
    version = state.blocks[index].version
    current = [x for x in state.leases.values() if x.block == index and x.base == version]
    free = (x for x in current if _takeable(now, state, options, x, worker))
    return min(free, key=lambda x: x.task, default=None)


def unread_batches(
    state: RunState, options: Options, index: int, again: Lease | None, steps: int
) -> tuple[int, int]:
    """(first, end) of the batches that a task of about so many steps reads.

    They are the first ones that no accepted update of the block has read, and that no task which
    may still be answered reads. So no sequence is read twice before all were, by all replicas of
    a block together, and what a lost task did not read comes next. A task that is given to another
    worker keeps its batches.
    """
    if options.exclusive:  # one line of tasks: where the schedule is
        first = state.blocks[index].steps
        return first, first + steps
    if again is not None:
        return again.position, again.position + min(steps, again.steps)
    least = steps if options.fixed_steps is not None else min(options.min_steps, steps)
    out = (lease.batches for lease in state.leases.values() if lease.block == index)
    first, end = first_gap((*state.blocks[index].read, *out), least)
    return first, first + steps if end is None else min(end, first + steps)


def _shorten(size: TaskSize, steps: int, block: BlockState, worker: WorkerState) -> TaskSize:
    """The size of a task that has fewer batches to read than its worker has time for."""
    if steps == size.steps:
        return size
    seconds = size.seconds
    if worker.seconds_per_step is not None:
        seconds = worker.overhead + steps * worker.seconds_per_step * block.cost
    return replace(size, steps=steps, seconds=seconds, reason=f"{steps} steps that were left over")


def _lease(
    now: float,
    state: RunState,
    options: Options,
    worker: WorkerState,
    task: tuple[int, Lease | None, TaskSize, int, float],
) -> Lease:
    index, again, size, position, deadline = task
    block = state.blocks[index]
    ends = max(deadline, now + 2 * size.seconds) if options.lease is None else now + options.lease
    return Lease(
        task=again.task if again else state.next_task,
        number=again.number if again else block.next_number,
        block=index,
        base=block.version,
        fence=again.fence + 1 if again else 1,
        worker=worker.id,
        steps=size.steps,
        start_step=block.steps,
        position=position,
        granted=now,
        # A limit that does not depend on the speed that a worker reports.
        expires=min(ends, now + 2 * options.longest_deadline),
        expected=size.seconds,
    )


def others_done_in(
    now: float, state: RunState, options: Options, worker: WorkerState, index: int
) -> float | None:
    """Seconds until the others who train this version of a block are probably done.

    Then there will be a next version. None: no other worker trains it.

    Tasks of a round that end together are merged together. Another one that begins from the same
    version would be late.
    """
    version, waited_for = state.blocks[index].version, awaited(now, state, options, index)
    of_round = (
        x
        for x in state.leases.values()
        if x.block == index
        and x.base == version
        and x.worker != worker.id
        and (x.worker in waited_for or not options.defences)
    )
    at_work = (
        x
        for x in of_round
        if not x.expired and not x.trained and is_alive(now, state, options, x.worker)
    )
    ends = [min(x.finish(now), x.expires) for x in at_work]  # an upload may take any time
    return max(0.0, max(ends) - now) if ends else None


def time_to_end(
    now: float, state: RunState, options: Options, worker: WorkerState, index: int
) -> float | None:
    """Seconds that the fastest worker of a block needs for the rest of its budget; None: no end.

    No task is longer: all others would wait for a slow worker's last one.
    """
    block = state.blocks[index]
    left = steps_left(options, block, worker)
    if left is None:
        return None
    since = now - options.alive
    times = [
        w.overhead + left * w.seconds_per_step * block.cost
        for w in state.workers.values()
        if w.seconds_per_step is not None
        and (w.id == worker.id or (w.block == index and w.seen >= since and not w.kicked))
    ]
    return min(times, default=None)


def _better_waits(
    seconds_left: float, options: Options, block: BlockState, worker: WorkerState
) -> bool:
    """Whether so little time is left that no task fits in."""
    if options.fixed_steps is None:
        return seconds_left < options.least_task * options.task_seconds
    seconds = options.fixed_steps * (worker.seconds_per_step or 0.0) * block.cost
    return has_answered(block, worker) and seconds_left < worker.overhead + seconds


def _takeable(
    now: float, state: RunState, options: Options, lease: Lease, worker: WorkerState
) -> bool:
    """Whether a task of the current version may be given to this worker.

    Not while a living worker is uploading it: it may still arrive.
    """
    if lease.worker == worker.id and not lease.trained:
        return True  # its worker came back without it, or has too little time left for it
    alive = is_alive(now, state, options, lease.worker)
    if options.exclusive and not alive:
        # Its lease is long, and a second task beside it would split the only line of versions.
        return True
    return lease.expired and not (lease.trained and alive)
