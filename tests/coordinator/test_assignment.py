"""Who gets which block and how many steps: state in, assignment and reason out. No clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blocktrain.config import make_config
from blocktrain.coordinator.assignment import assign, choose_block, fusion_open, size_task
from blocktrain.coordinator.policy import Policy
from blocktrain.coordinator.state import (
    Assignment,
    BlockState,
    Grant,
    Lease,
    Options,
    Postpone,
    RoundState,
    RunState,
    Stop,
    WaitingUpdate,
    WorkerState,
    apply_grant,
    begin_again,
    with_lease,
    with_worker,
)

DEFAULT = Options()


def blocks(*versions: int, fusion: bool = False, **changes: object) -> dict[int, BlockState]:
    made = {i + 1: replace(BlockState(version=v), **changes) for i, v in enumerate(versions)}  # type: ignore[arg-type]
    return {**made, len(made): replace(made[len(made)], fusion=True)} if fusion else made


def workers(*homes: int | None) -> dict[str, WorkerState]:
    return {f"w{i}": WorkerState(f"w{i}", home, 0.0, 1.0) for i, home in enumerate(homes)}


CHOICE_TABLE = [
    # name, options, blocks, homes of the workers (w0 asks) -> block, words
    ("new: fewest versions", DEFAULT, blocks(3, 1, 2), [None], 2, "furthest behind"),
    ("new: then fewest replicas", DEFAULT, blocks(1, 1, 1), [None, 1, 1, 2], 3, "furthest behind"),
    ("sticky", DEFAULT, blocks(3, 1, 2), [1], 1, "this worker's block"),
    ("sticky though others are behind", DEFAULT, blocks(9, 1, 2), [1], 1, "this worker's block"),
    (
        "moves to a lonely block far behind",
        DEFAULT,
        blocks(10, 1, 2),
        [1],
        2,
        "no workers and is 9",
    ),
    ("stays: that block has a worker", DEFAULT, blocks(10, 1, 3), [1, 2], 1, "this worker's block"),
    (
        "stays: another block has a spare worker",
        DEFAULT,
        blocks(10, 1, 9),
        [1, 3, 3],
        1,
        "this worker's block",
    ),
    (
        "moves: its own block has a spare worker",
        DEFAULT,
        blocks(10, 1, 9),
        [1, 1, 3],
        2,
        "no workers",
    ),
    ("its block is done", Options(budget_rounds=5), blocks(5, 2, 3), [1], 2, "furthest behind"),
    (
        "fusion waits",
        Options(budget_rounds=10),
        blocks(4, 5, 0, fusion=True),
        [None],
        1,
        "furthest behind",
    ),
    (
        "fusion begins at half",
        Options(budget_rounds=10),
        blocks(5, 5, 0, fusion=True),
        [None],
        3,
        "furthest behind",
    ),
    (
        "fusion without a budget",
        DEFAULT,
        blocks(1, 1, 0, fusion=True),
        [None],
        3,
        "furthest behind",
    ),
    ("exclusive: taken", Options.exact(5, 50), blocks(0, 0), [None, 1], 2, "furthest behind"),
    (
        "exclusive: all taken",
        Options.exact(5, 50),
        blocks(0, 0),
        [None, 1, 2],
        None,
        "has its worker",
    ),
]


@pytest.mark.parametrize(
    ("name", "options", "state", "homes", "block", "words"),
    CHOICE_TABLE,
    ids=[row[0] for row in CHOICE_TABLE],
)
def test_choice_of_block(
    name: str,
    options: Options,
    state: dict[int, BlockState],
    homes: list[int | None],
    block: int | None,
    words: str,
) -> None:
    run = RunState(blocks=state, workers=workers(*homes))
    chosen, reason = choose_block(0.0, run, options, run.workers["w0"])
    assert chosen == block, reason
    assert words in reason


def test_loss_breaks_the_tie() -> None:
    made = {1: BlockState(loss=1.5), 2: BlockState(loss=2.5), 3: BlockState(loss=2.0)}
    run = RunState(blocks=made, workers=workers(None))
    assert choose_block(0.0, run, DEFAULT, run.workers["w0"])[0] == 2


def test_exact_fusion_waits_for_the_others_to_be_done() -> None:
    options = Options.exact(5, 50)
    half = RunState(blocks={1: BlockState(steps=45), 2: BlockState(fusion=True)})
    assert not fusion_open(half, options, 2)
    assert fusion_open(
        replace(half, blocks={1: BlockState(steps=50), 2: BlockState(fusion=True)}), options, 2
    )


@pytest.mark.parametrize(
    ("others", "fusion", "is_open"),
    [
        (49, 0, False),
        (50, 0, True),
        (60, 20, False),
        (75, 20, True),
        (99, 50, False),
        (100, 50, True),
    ],
)
def test_fusion_stays_behind_blocks_that_still_move(
    others: int, fusion: int, is_open: bool
) -> None:
    run = RunState(
        blocks={
            1: BlockState(steps=others),
            2: BlockState(steps=100),
            3: BlockState(steps=fusion, fusion=True),
        }
    )
    assert fusion_open(run, Options(budget_steps=100), 3) == is_open
    shorter = replace(run.blocks[3], steps=fusion // 5)
    run = replace(run, blocks={**run.blocks, 3: shorter})
    assert fusion_open(run, Options(budget_steps=100, fusion_steps=20), 3) == is_open


SIZE_TABLE = [
    # name, options, seconds left, seconds per step, overhead -> steps
    ("wanted time", DEFAULT, 1000.0, 0.5, 0.0, 40),
    ("wanted time less transfers", DEFAULT, 1000.0, 0.5, 5.0, 30),
    ("deadline is near", DEFAULT, 10.0, 0.5, 0.0, 16),
    ("cannot finish", DEFAULT, 1.0, 1.0, 0.0, 0),
    ("cannot finish for its transfers", DEFAULT, 10.0, 0.5, 9.0, 0),
    ("slow, but before the deadline", DEFAULT, 100.0, 50.0, 0.0, 1),
    ("unknown speed", DEFAULT, 1000.0, None, 0.0, 10),
    ("most", Options(max_steps=7), 1000.0, 0.1, 0.0, 7),
    ("end of the schedule", Options(budget_steps=25), 1000.0, 0.5, 0.0, 5),
    ("fixed", Options(fixed_steps=8), 1000.0, 0.5, 0.0, 8),
    ("fixed, cannot finish", Options(fixed_steps=100), 10.0, 0.5, 0.0, 0),
    ("exact does not look at the time", Options.exact(100, 1000), 10.0, 0.5, 0.0, 100),
    ("exact: end of the schedule", Options.exact(100, 110), 10.0, 0.5, 0.0, 90),
]


@pytest.mark.parametrize(
    ("name", "options", "left", "speed", "overhead", "steps"),
    SIZE_TABLE,
    ids=[row[0] for row in SIZE_TABLE],
)
def test_size_of_a_task(
    name: str, options: Options, left: float, speed: float | None, overhead: float, steps: int
) -> None:
    size = size_task(left, options, BlockState(steps=20), WorkerState("a", 1, 0.0, speed, overhead))
    assert size.steps == steps, size.reason
    if steps and speed and not options.exclusive:
        assert size.seconds <= left * options.safety


def test_costlier_block_gets_fewer_steps() -> None:
    assert (
        size_task(
            1000.0, DEFAULT, BlockState(cost=4.0), WorkerState("a", seconds_per_step=0.5)
        ).steps
        == 10
    )


def asks(
    state: RunState, worker: WorkerState, options: Options = DEFAULT, now: float = 0.0
) -> Grant | Postpone | Stop:
    return assign(now, with_worker(state, worker), options, worker.id)


def test_no_work_that_cannot_be_finished() -> None:
    late = RunState(blocks={1: BlockState(round=RoundState(deadline=1.0, length=60.0))})
    wait = asks(late, WorkerState("a", 1, 0.0, 2.0))
    assert isinstance(wait, Postpone) and "next round" in wait.reason and wait.seconds <= 1.0


TOGETHER_TABLE = [
    # name, options, seconds until the other is done, whether this worker has answered
    # -> steps, or None to wait
    ("fits in", DEFAULT, 10.0, True, 20),
    ("fits in for a newcomer", DEFAULT, 10.0, False, 20),
    ("too little left", DEFAULT, 0.9, True, None),
    ("the other is slow", DEFAULT, 50.0, True, 40),
    ("fixed: waits", Options(fixed_steps=20), 9.0, True, None),
    ("fixed: has not answered", Options(fixed_steps=20), 9.0, False, 20),
    ("fixed: time for another one", Options(fixed_steps=20), 11.0, True, 20),
]


@pytest.mark.parametrize(
    ("name", "options", "left", "answered", "steps"),
    TOGETHER_TABLE,
    ids=[row[0] for row in TOGETHER_TABLE],
)
def test_tasks_of_a_round_end_together(
    name: str, options: Options, left: float, answered: bool, steps: int | None
) -> None:
    other = Lease(
        *(1, 0, 1, 0, 1, "b"),
        steps=10,
        start_step=0,
        position=0,
        granted=0.0,
        expires=200.0,
        expected=left,
    )
    current = RoundState(
        deadline=100.0, length=100.0, updates=(WaitingUpdate("u", "a", 10, 10),) if answered else ()
    )
    state = RunState(
        blocks={1: BlockState(round=current)},
        leases={1: other},
        workers={"b": WorkerState("b", 1, 0.0, 1.0)},
        next_task=2,
    )
    found = asks(state, WorkerState("a", 1, 0.0, 0.5), options)
    if steps is None:
        assert (
            isinstance(found, Postpone)
            and found.seconds == pytest.approx(min(left, options.poll))
            and "worth waiting" in found.reason
        )
    else:
        assert isinstance(found, Grant) and found.lease.steps == steps, found.reason


END_TABLE = [
    # name, speed of the fast one (s a step), its last sign of life, steps left, steps of the task
    ("a slow worker's last task ends with the others'", 0.1, 0.0, 50, 5),
    ("one step at least", 0.1, 0.0, 5, 1),
    ("far from the end", 0.1, 0.0, 1000, 20),
    ("the fast one has gone", 0.1, -1000.0, 50, 20),
]


@pytest.mark.parametrize(
    ("name", "speed", "seen", "left", "steps"), END_TABLE, ids=[row[0] for row in END_TABLE]
)
def test_no_task_lasts_longer_than_the_fastest_needs_for_the_rest(
    name: str, speed: float, seen: float, left: int, steps: int
) -> None:
    block = BlockState(steps=1000 - left)
    state = RunState(blocks={1: block}, workers={"b": WorkerState("b", 1, seen, speed)})
    given = asks(state, WorkerState("a", 1, 0.0, 1.0), Options(budget_steps=1000))
    assert isinstance(given, Grant) and given.lease.steps == steps, given.reason


def test_a_dead_worker_is_not_company() -> None:
    other = Lease(
        *(1, 0, 1, 0, 1, "b"),
        steps=10,
        start_step=0,
        position=0,
        granted=0.0,
        expires=200.0,
        expected=0.5,
    )
    state = RunState(
        blocks={1: BlockState()},
        leases={1: other},
        workers={"b": WorkerState("b", 1, -1000.0, 1.0)},
        next_task=2,
    )
    assert isinstance(asks(state, WorkerState("a", 1, 0.0, 0.5)), Grant)


def test_slow_worker_gets_work_it_can_finish() -> None:
    idle = RunState(blocks={1: BlockState()}, workers={"b": WorkerState("b", 1, 0.0, 1.0)})
    alone = asks(replace(idle, workers={}), WorkerState("a", 1, 0.0, 80.0))
    assert (
        isinstance(alone, Grant)
        and alone.deadline == pytest.approx(100.0)
        and "only worker" in alone.reason
    )
    shared = asks(idle, WorkerState("a", 1, 0.0, 80.0))
    assert (
        isinstance(shared, Grant)
        and shared.deadline == 60.0
        and "late" in shared.reason
        and shared.lease.expires > 80.0
    )
    hopeless = asks(idle, WorkerState("a", 1, 0.0, 8000.0))
    assert isinstance(hopeless, Postpone) and "faster than this worker" in hopeless.reason


def test_a_lost_task_is_resumed_and_a_trained_one_is_not() -> None:
    state = RunState(blocks={1: BlockState()}, workers=workers(1))
    first = assign(0.0, state, DEFAULT, "w0")
    assert isinstance(first, Grant)
    state = apply_grant(state, first)
    again = assign(1.0, state, DEFAULT, "w0")
    assert isinstance(again, Grant) and again.resumed and again.lease == first.lease
    assert apply_grant(state, again) == state
    state = with_lease(state, replace(first.lease, trained=True))
    second = assign(1.0, state, DEFAULT, "w0")
    assert isinstance(second, Grant) and (
        second.lease.task,
        second.lease.number,
        second.lease.base,
    ) == (2, 1, 0)
    state = apply_grant(state, second)
    state = with_lease(state, replace(second.lease, trained=True))
    wait = assign(2.0, state, DEFAULT, "w0")
    assert isinstance(wait, Postpone) and "upload first" in wait.reason


def test_exact_waits_for_its_own_version() -> None:
    options = Options.exact(5, 50)
    state = RunState(blocks={1: BlockState()}, workers=workers(1))
    first = assign(0.0, state, options, "w0")
    assert isinstance(first, Grant)
    state = with_lease(apply_grant(state, first), replace(first.lease, trained=True))
    assert isinstance(assign(1.0, state, options, "w0"), Postpone)


def test_exact_takes_over_the_task_of_a_dead_worker_and_never_adds_one() -> None:
    options = Options.exact(5, 50)
    state = RunState(blocks={1: BlockState()}, workers=workers(1, None))
    first = assign(0.0, state, options, "w0")
    assert isinstance(first, Grant)
    state = apply_grant(state, first)
    assert isinstance(assign(1.0, state, options, "w1"), Postpone)
    state = with_worker(state, replace(state.workers["w1"], seen=100.0))
    second = assign(100.0, state, options, "w1")
    assert isinstance(second, Grant) and (
        second.lease.task,
        second.lease.number,
        second.lease.fence,
    ) == (1, 0, 2)


def batches_of(state: RunState, worker: str, options: Options = DEFAULT, now: float = 0.0) -> Grant:
    speed = WorkerState(worker, 1, now, 1.0)
    granted = assign(now, with_worker(state, speed), replace(options, least_task=0.0), worker)
    assert isinstance(granted, Grant), granted
    return granted


def test_tasks_of_a_block_never_read_the_same_batches() -> None:
    state = RunState(blocks={1: BlockState(task_seconds=(20.0,))})
    options = replace(DEFAULT, task_seconds=10.0, poll=0.0)
    ranges = []
    for worker in "abc":
        state = with_worker(state, WorkerState(worker, 1, 0.0, 1.0))
        grant = batches_of(state, worker, options)
        ranges.append(grant.lease.batches)
        state = apply_grant(state, grant)
    assert [first for first, _ in ranges] == [0, ranges[0][1], ranges[1][1]]


def test_what_a_lost_task_did_not_read_is_read_next() -> None:
    read = BlockState(version=9, read=((0, 10), (14, 30)))
    granted = batches_of(RunState(blocks={1: read}), "a")
    assert granted.lease.batches == (10, 14) and "left over" in granted.reason
    assert granted.lease.expected == pytest.approx(4.0)
    fixed = batches_of(RunState(blocks={1: read}), "a", replace(DEFAULT, fixed_steps=8))
    assert fixed.lease.batches == (30, 38)  # all tasks have this size: the gap is too small


def test_a_task_that_is_leased_again_keeps_its_batches() -> None:
    state = RunState(blocks={1: BlockState()})
    first = batches_of(state, "a").lease
    lost = replace(first, position=5, steps=4, expired=True)
    again = batches_of(replace(state, leases={first.task: lost}, next_task=2), "b").lease
    assert (again.task, again.fence, again.batches) == (first.task, 2, (5, 9))


def test_train_reads_where_its_schedule_is() -> None:
    options = Options.exact(50, 1000)
    state = RunState(blocks={1: BlockState(version=3, steps=150, read=((0, 200),))})
    assert batches_of(state, "a", options).lease.batches == (150, 200)


def granted(found: Assignment) -> Grant:
    assert isinstance(found, Grant), found
    return found


def test_exclusive_who_was_away_has_its_block_no_more() -> None:
    options = Options.exact(5, 50)
    state = RunState(blocks=blocks(0), workers=workers(None, None))
    state = apply_grant(state, granted(assign(0.0, state, options, "w0")))
    away = with_worker(state, replace(state.workers["w1"], seen=options.alive + 1))
    first = granted(assign(options.alive + 1, away, options, "w1"))
    assert first.lease.fence == 2
    state = apply_grant(away, first)
    state = with_worker(state, replace(state.workers["w0"], seen=options.alive + 2))
    late = assign(options.alive + 2, state, options, "w0")
    assert isinstance(late, Postpone) and "has its worker" in late.reason
    assert granted(assign(options.alive + 2, state, options, "w1")).resumed, "it goes on"


def test_exclusive_a_new_process_trains_again_what_its_disk_has_lost() -> None:
    options = Options.exact(5, 50)
    state = RunState(blocks=blocks(0), workers=workers(None))
    grant = granted(assign(0.0, state, options, "w0"))
    state = with_lease(apply_grant(state, grant), replace(grant.lease, trained=True))
    assert isinstance(assign(1.0, state, options, "w0"), Postpone), "it uploads"
    again = granted(assign(1.0, begin_again(state, "w0"), options, "w0"))
    assert again.resumed and again.lease.task == grant.lease.task


def test_replicas_in_step_train_one_task_of_each_round() -> None:
    config = make_config({"steps": 100, "blocks": 1, "compose": "pool"})
    options = Policy(task_steps=20, replicas=2, min_replicas=2).options(config)
    waiting = WaitingUpdate("u", "w0", 100, 20)
    state = RunState(
        blocks={1: BlockState(round=RoundState(deadline=60.0, length=60.0, updates=(waiting,)))},
        workers=workers(1, 1),
    )
    decision = assign(0.0, state, options, "w0")
    assert isinstance(decision, Postpone) and "1 of your updates wait" in decision.reason
    assert isinstance(assign(0.0, state, options, "w1"), Grant)
    free = Policy(task_steps=20, replicas=2).options(config)
    assert isinstance(assign(0.0, state, free, "w0"), Grant)
