"""What the coordinator knows, as frozen values, how each decision changes it, and what is stored.

Time is always a parameter. Moments are seconds of a monotonic clock, which restarts with the
machine, so that only `remaining` time may be stored; `until` turns it back into a moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

from blocktrain.coordinator.history import NEWCOMER, Standing
from blocktrain.protocol.positions import Ranges, add_range
from blocktrain.store.contract import (
    Changes,
    LeaseRecord,
    LeaseTimes,
    RoundRecord,
    UpdateRecord,
    WorkerRecord,
)

KEPT_TIMES = 9  # task times of a block that its median is taken from
DAY = 86400.0
K = TypeVar("K")
V = TypeVar("V")


def remaining(now: float, moment: float | None) -> float | None:
    """Seconds left until a moment, for storage; never negative."""
    return None if moment is None else max(0.0, moment - now)


def until(now: float, seconds: float | None) -> float | None:
    """The moment at which stored remaining time runs out."""
    return None if seconds is None else now + seconds


@dataclass(frozen=True)
class Options:
    """Every number a decision depends on. The defaults are the protocol's."""

    target_replicas: int | None = None  # None: as many as work on the block
    min_replicas: int = 1
    first_deadline: float = 60.0  # before any task of the block was timed
    deadline_factor: float = 3.0  # x median task time
    shortest_deadline: float = 2.0
    grace: float = 0.1  # share of the round's length
    reopen_factor: float = 2.0  # longer deadline after an empty round
    longest_deadline: float = DAY
    decay: float = 0.7
    max_staleness: int = 4
    lease: float | None = (
        None  # seconds; None: to the deadline, and at least twice the expected time
    )
    alive: float = 60.0  # a worker not heard of for longer counts as gone
    task_seconds: float = 20.0  # how long a task should take
    fixed_steps: int | None = None  # every task has exactly this size
    first_steps: int = 10  # for a worker of unknown speed
    least_task: float = 0.05  # of task_seconds: instead of a shorter task, a worker waits
    min_steps: int = 1
    max_steps: int = 10_000
    safety: float = 0.8  # share of the time left that a task may be planned to take
    budget_rounds: int | None = None  # of each block
    budget_steps: int | None = None  # of each block: where its learning-rate schedule ends
    fusion_steps: int | None = None  # the same of the fusion block; None: as of the others
    budget_tokens: int | None = None  # of the whole run, shared by its blocks as their steps are
    fusion_start: float = (
        0.5  # share of their budget that the others have spent when the fusion block begins
    )
    max_lag: int | None = (
        8  # versions a block without workers may fall behind before a worker is moved to it
    )
    max_uploading: int = (
        1  # trained but unsubmitted tasks with which a worker still gets the next one
    )
    frozen: frozenset[int] = frozenset()  # blocks that are not trained
    exclusive: bool = (
        False  # one lease per block, each task from the version that the last one made
    )
    poll: float = 5.0  # longest wait before a worker asks again
    defences: bool = False  # nothing that a member claims is believed, and its standing counts
    most_waiting: int | None = None  # updates of one worker in an open round; None: any number
    task_growth: float = 4.0  # steps of a task at most, in those of its worker's longest merged one

    @classmethod
    def exact(cls, task_steps: int, steps: int, fusion_steps: int | None = None) -> Self:
        """For `blocktrain train`: nothing depends on time, so a seed gives the same bytes."""
        return cls(
            target_replicas=1,
            first_deadline=DAY,
            shortest_deadline=DAY,
            lease=DAY,
            fixed_steps=task_steps,
            budget_steps=steps,
            fusion_steps=fusion_steps,
            fusion_start=1.0,
            max_lag=None,
            max_uploading=0,
            exclusive=True,
        )


@dataclass(frozen=True)
class WaitingUpdate:
    """An accepted update that waits for its round to close."""

    id: str
    worker: str
    tokens: int
    steps: int
    staleness: int = 0
    weight: float = 1.0


@dataclass(frozen=True)
class RoundState:
    """The open round of a block. Its clock starts with the first lease or update."""

    deadline: float | None = None
    length: float = 0.0  # 0: by the block's task times
    extended: bool = False
    grace_until: float | None = None
    attempt: int = 0  # how often it was closed empty
    updates: tuple[WaitingUpdate, ...] = ()

    @property
    def replicas(self) -> int:
        """Workers that have answered; a second update of the same one is no second replica."""
        return len({u.worker for u in self.updates})


@dataclass(frozen=True)
class BlockState:
    """One block: its newest version, what it has spent, and its open round."""

    version: int = 0
    steps: int = 0  # along the chain of versions: where the schedule continues
    tokens: int = 0
    loss: float | None = None
    fusion: bool = False
    cost: float = 1.0  # time of one of its steps, relative to the others
    task_seconds: tuple[float, ...] = ()  # of its last accepted tasks
    next_number: int = (
        0  # tasks are numbered per block, so that their data does not depend on the other blocks
    )
    read: Ranges = ()  # batches of its order of the corpus that accepted updates have read
    round: RoundState = RoundState()


@dataclass(frozen=True)
class Lease:
    """A task in the hands of a worker. A task that is given to another gets a higher fence."""

    task: int
    number: int
    block: int
    base: int
    fence: int
    worker: str
    steps: int
    start_step: int
    position: int  # the first batch that it reads
    granted: float
    expires: float
    expected: float  # seconds it should take, transfers included
    done_steps: int = 0  # by heartbeat; extends nothing
    trained: bool = False  # being uploaded
    expired: bool = False

    @property
    def batches(self) -> tuple[int, int]:
        """(first, end) of those that it reads."""
        return self.position, self.position + self.steps

    def finish(self, now: float) -> float:
        """When it will probably be here."""
        if self.trained:
            return now
        if self.done_steps:
            return now + (now - self.granted) * (self.steps - self.done_steps) / self.done_steps
        return max(now, self.granted + self.expected)


@dataclass(frozen=True)
class WorkerState:
    """A worker as far as decisions need it."""

    id: str
    block: int | None = None
    seen: float = 0.0
    seconds_per_step: float | None = None  # of a block of cost 1
    overhead: float = 0.0  # seconds a task takes besides its steps: transfers, start
    kicked: bool = False


@dataclass(frozen=True)
class RunState:
    """Everything `rounds` looks at."""

    blocks: Mapping[int, BlockState] = field(default_factory=dict)
    leases: Mapping[int, Lease] = field(
        default_factory=dict
    )  # by task: open ones, and expired ones that may still arrive
    workers: Mapping[str, WorkerState] = field(default_factory=dict)
    next_task: int = 1
    stopping: bool = False
    standings: Mapping[str, Standing] = field(default_factory=dict)  # of all who ever joined


@dataclass(frozen=True)
class Expire:
    """A lease ran out; the task may be given to another."""

    task: int
    fence: int
    reason: str


@dataclass(frozen=True)
class Grace:
    """The quorum is there and someone is nearly finished: wait a little more."""

    block: int
    until: float
    reason: str


@dataclass(frozen=True)
class Extend:
    """The deadline passed without a quorum, for the first time."""

    block: int
    deadline: float
    reason: str


@dataclass(frozen=True)
class CloseRound:
    """Merge these updates into the next version."""

    block: int
    version: int  # the one that the round started from
    updates: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class CloseEmpty:
    """No quorum, even after the extension: the same version again, with more time."""

    block: int
    version: int
    length: float
    reason: str


@dataclass(frozen=True)
class Finish:
    """Nothing is left to do: workers stop."""

    reason: str


Action = Expire | Grace | Extend | CloseRound | CloseEmpty | Finish


@dataclass(frozen=True)
class Grant:
    """A task for a worker; the round's clock starts at `deadline` if it does not run yet."""

    lease: Lease
    deadline: float
    length: float
    resumed: bool
    reason: str
    alone: bool = False  # no other worker has the block from now on


@dataclass(frozen=True)
class Postpone:
    """Nothing now; ask again after some seconds."""

    seconds: float
    reason: str


@dataclass(frozen=True)
class Stop:
    """Nothing any more."""

    reason: str


Assignment = Grant | Postpone | Stop


def standing_of(state: RunState, worker: str) -> Standing:
    """What the ledger says of a worker."""
    return state.standings.get(worker, NEWCOMER)


def with_block(state: RunState, index: int, block: BlockState) -> RunState:
    """The state with one block changed."""
    return replace(state, blocks={**state.blocks, index: block})


def with_worker(state: RunState, worker: WorkerState) -> RunState:
    """The state with one worker added or changed."""
    return replace(state, workers={**state.workers, worker.id: worker})


def with_lease(state: RunState, lease: Lease) -> RunState:
    """The state with one lease added or changed."""
    return replace(state, leases={**state.leases, lease.task: lease})


def without_worker(state: RunState, worker: str) -> RunState:
    """A worker left or was kicked: its open tasks expire now, its block is free."""
    leases = {
        t: replace(lease, expired=True) if lease.worker == worker else lease
        for t, lease in state.leases.items()
    }
    workers = {name: w for name, w in state.workers.items() if name != worker}
    if (known := state.workers.get(worker)) and known.kicked:
        workers[worker] = replace(known, block=None)
    return replace(state, leases=leases, workers=workers)


def begin_again(state: RunState, worker: str) -> RunState:
    """A worker's process is new: it uploads nothing, and may have lost what it had trained."""
    leases = {
        t: replace(lease, trained=False) if lease.worker == worker and lease.trained else lease
        for t, lease in state.leases.items()
    }
    return replace(state, leases=leases)


def apply_grant(state: RunState, grant: Grant) -> RunState:
    """After a task was handed out."""
    lease = grant.lease
    block = state.blocks[lease.block]
    if not grant.resumed:
        block = replace(block, next_number=max(block.next_number, lease.number + 1))
    if block.round.deadline is None:
        block = replace(
            block, round=replace(block.round, deadline=grant.deadline, length=grant.length)
        )
    state = with_lease(with_block(state, lease.block, block), lease)
    if grant.alone:  # whoever had it before was away, and must not hold it when it comes back
        for other in [w for w in state.workers.values() if w.block == lease.block]:
            state = with_worker(state, replace(other, block=None))
    if worker := state.workers.get(lease.worker):
        state = with_worker(state, replace(worker, block=lease.block))
    return replace(state, next_task=max(state.next_task, lease.task + 1))


def add_update(
    state: RunState, task: int, update: WaitingUpdate, deadline: float, seconds: float | None = None
) -> RunState:
    """After an update was recorded. `deadline` starts the round's clock, if nothing has yet.

    It also replaces a later deadline of a block whose tasks were never timed: that was a guess, for
    which fast workers would wait.
    """
    lease = state.leases[task]
    block = state.blocks[lease.block]
    times = block.task_seconds if seconds is None else (*block.task_seconds, seconds)[-KEPT_TIMES:]
    current = replace(block.round, updates=(*block.round.updates, update))
    if current.deadline is None or (not block.task_seconds and deadline < current.deadline):
        current = replace(current, deadline=deadline)
    read = add_range(block.read, lease.position, lease.position + update.steps)
    block = replace(block, task_seconds=times, read=read, round=current)
    state = with_block(state, lease.block, block)
    return replace(state, leases={t: other for t, other in state.leases.items() if t != task})


def apply_version(state: RunState, index: int, block: BlockState, max_staleness: int) -> RunState:
    """After a version was committed: a new round; tasks that can no longer count are forgotten."""
    state = with_block(state, index, replace(block, round=RoundState()))
    return replace(
        state,
        leases={
            t: x
            for t, x in state.leases.items()
            if not (x.expired and x.block == index and block.version - x.base > max_staleness)
        },
    )


def drop_updates(state: RunState, index: int, updates: frozenset[str]) -> RunState:
    """After a merge left out these updates and made no version: the round goes on."""
    block = state.blocks[index]
    rest = tuple(u for u in block.round.updates if u.id not in updates)
    return with_block(state, index, replace(block, round=replace(block.round, updates=rest)))


def apply(state: RunState, action: Action) -> RunState:
    """After a decision that changes only the state.

    CloseRound changes nothing here: `apply_version` does, when the merge is durable.
    """
    if isinstance(action, Expire):
        lease = state.leases.get(action.task)
        return (
            with_lease(state, replace(lease, expired=True))
            if lease and lease.fence == action.fence
            else state
        )
    if isinstance(action, Finish):
        return replace(state, stopping=True)
    if isinstance(action, CloseRound):
        return state
    block = state.blocks[action.block]
    if isinstance(action, Grace):
        current = replace(block.round, grace_until=action.until)
    elif isinstance(action, Extend):
        current = replace(block.round, deadline=action.deadline, extended=True)
    else:
        current = RoundState(
            length=action.length, attempt=block.round.attempt + 1, updates=block.round.updates
        )
    return with_block(state, action.block, replace(block, round=current))


def changes_between(
    now: float, before: RunState, after: RunState, known: Mapping[str, WorkerRecord]
) -> Changes:
    """The records that differ. Progress and last signs of life are not stored.

    Workers report them again after a restart.
    """
    leases = [
        lease_record(now, new)
        for _, old, new in _changed_items(before.leases, after.leases)
        if old is None or _stored_lease(old) != _stored_lease(new)
    ]
    lost = [t for t in _ended_tasks(before, after) if not _has_update(before, after, t)]
    rounds = [
        round_record(now, index, new)
        for index, old, new in _changed_items(before.blocks, after.blocks)
        if old is not None
        and new.version == old.version
        and replace(new.round, updates=()) != replace(old.round, updates=())
    ]
    workers = [
        worker_record(known[name], new)
        for name, old, new in _changed_items(before.workers, after.workers)
        if old is None or replace(old, seen=0.0) != replace(new, seen=0.0)
    ]
    return Changes(leases=leases, lost=sorted(lost), rounds=rounds, workers=workers)


def abandoned_uploads(before: RunState, after: RunState) -> list[tuple[int, int]]:
    """(task, fence) of leases that ended without an update: lost, or given to another worker."""
    lost = [t for t in _ended_tasks(before, after) if not _has_update(before, after, t)]
    passed_on = [
        task
        for task, old, new in _changed_items(before.leases, after.leases)
        if old is not None and old.fence != new.fence
    ]
    return [(task, before.leases[task].fence) for task in (*lost, *passed_on)]


def _changed_items(before: Mapping[K, V], after: Mapping[K, V]) -> list[tuple[K, V | None, V]]:
    """What may differ: all else is the same object. A call touches one or two of a thousand."""
    if after is before:
        return []
    return [(key, before.get(key), new) for key, new in after.items() if before.get(key) is not new]


def _ended_tasks(before: RunState, after: RunState) -> set[int]:
    if before.leases is after.leases:
        return set()
    return before.leases.keys() - after.leases.keys()


def _has_update(before: RunState, after: RunState, task: int) -> bool:
    """Whether a lease ended with an update. Then the update's own transaction marks its task."""
    index = before.leases[task].block
    return len(after.blocks[index].round.updates) > len(before.blocks[index].round.updates)


def _stored_lease(lease: Lease) -> Lease:
    return replace(lease, done_steps=0)


def lease_record(now: float, lease: Lease) -> LeaseRecord:
    return LeaseRecord(
        task=lease.task,
        number=lease.number,
        block=lease.block,
        base=lease.base,
        fence=lease.fence,
        worker=lease.worker,
        steps=lease.steps,
        start_step=lease.start_step,
        position=lease.position,
        age=now - lease.granted,
        remaining=remaining(now, lease.expires) or 0.0,
        expected=lease.expected,
        trained=lease.trained,
        expired=lease.expired,
    )


def lease_times(now: float, leases: Iterable[Lease]) -> list[LeaseTimes]:
    return [
        LeaseTimes(x.task, x.fence, now - x.granted, remaining(now, x.expires) or 0.0)
        for x in leases
    ]


def round_record(now: float, index: int, block: BlockState) -> RoundRecord:
    current = block.round
    return RoundRecord(
        block=index,
        version=block.version,
        attempt=current.attempt,
        length=current.length,
        remaining=remaining(now, current.deadline),
        extended=current.extended,
        grace_remaining=remaining(now, current.grace_until),
    )


def waiting_update(record: UpdateRecord) -> WaitingUpdate:
    return WaitingUpdate(
        record.id, record.worker, record.tokens, record.steps, record.staleness, record.weight
    )


def worker_record(known: WorkerRecord, worker: WorkerState) -> WorkerRecord:
    return replace(
        known,
        block=worker.block,
        seconds_per_step=worker.seconds_per_step,
        overhead=worker.overhead,
        kicked=worker.kicked,
    )


def worker_state(record: WorkerRecord, now: float) -> WorkerState:
    return WorkerState(
        record.id, record.block, now, record.seconds_per_step, record.overhead, record.kicked
    )
