"""Every decision of the coordinator as a table: state in, action and reason out. No clock."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from blocktrain.coordinator.assignment import assign
from blocktrain.coordinator.rounds import (
    Claim,
    advance_block,
    deadline_after,
    decide,
    decide_round,
    end_reason,
    judge,
    spent_share,
    staleness_weight,
)
from blocktrain.coordinator.state import (
    BlockState,
    CloseEmpty,
    CloseRound,
    Expire,
    Extend,
    Finish,
    Grace,
    Grant,
    Lease,
    Options,
    RoundState,
    RunState,
    Stop,
    WaitingUpdate,
    WorkerState,
    add_update,
    apply,
    apply_grant,
    apply_version,
    remaining,
    until,
    with_lease,
    with_worker,
    without_worker,
)

DEFAULT = Options()


def equal_shares(action: CloseRound) -> dict[str, float]:
    return dict.fromkeys(action.updates, 1 / len(action.updates))


def lease(task: int = 1, worker: str = "a", **changes: object) -> Lease:
    made = Lease(
        task,
        task - 1,
        1,
        0,
        1,
        worker,
        steps=10,
        start_step=0,
        position=10 * (task - 1),
        granted=0.0,
        expires=200.0,
        expected=10.0,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def came(*workers: str) -> tuple[WaitingUpdate, ...]:
    return tuple(WaitingUpdate(f"u{i}{w}", w, tokens=100, steps=10) for i, w in enumerate(workers))


def one_block(
    current: RoundState, *leases: Lease, seen: float = 100.0, **block: object
) -> RunState:
    names = {x.worker for x in leases} | {u.worker for u in current.updates}
    return RunState(
        blocks={1: replace(BlockState(), round=current, **block)},  # type: ignore[arg-type]
        leases={x.task: x for x in leases},
        workers={n: WorkerState(n, 1, seen, 1.0) for n in names},
        next_task=10,
    )


CLOCK = RoundState(deadline=100.0, length=60.0)

ROUND_TABLE = [
    # name, options, round, leases, now -> kind of action, words of the reason
    ("idle", DEFAULT, RoundState(), [], 50, None, "waits for its first worker"),
    ("running", DEFAULT, CLOCK, [lease()], 50, None, "0 of 1 replicas and 50.0 s"),
    (
        "all seen",
        DEFAULT,
        replace(CLOCK, updates=came("a", "b")),
        [],
        50,
        CloseRound,
        "all 2 replicas",
    ),
    (
        "one still works",
        DEFAULT,
        replace(CLOCK, updates=came("a")),
        [lease(2, "b")],
        50,
        None,
        "1 of 2 replicas",
    ),
    (
        "same worker twice",
        DEFAULT,
        replace(CLOCK, updates=came("a", "a")),
        [lease(2, "b")],
        50,
        None,
        "1 of 2 replicas",
    ),
    (
        "target",
        Options(target_replicas=1),
        replace(CLOCK, updates=came("a")),
        [lease(2, "b")],
        50,
        CloseRound,
        "all 1 replicas",
    ),
    (
        "target below minimum",
        Options(target_replicas=1, min_replicas=2),
        replace(CLOCK, updates=came("a")),
        [],
        50,
        None,
        "1 of 2",
    ),
    (
        "quorum at deadline",
        Options(target_replicas=3),
        replace(CLOCK, updates=came("a")),
        [],
        100,
        CloseRound,
        "at its deadline with 1",
    ),
    (
        "before deadline",
        Options(target_replicas=3),
        replace(CLOCK, updates=came("a")),
        [],
        99.9,
        None,
        "1 of 3",
    ),
    (
        "nearly finished",
        DEFAULT,
        replace(CLOCK, updates=came("a")),
        [lease(2, "b", done_steps=19, steps=20)],
        100,
        Grace,
        "6.0 s more for b",
    ),
    (
        "far from finished",
        DEFAULT,
        replace(CLOCK, updates=came("a")),
        [lease(2, "b", done_steps=2)],
        100,
        CloseRound,
        "nobody else is nearly",
    ),
    (
        "uploading",
        DEFAULT,
        replace(CLOCK, updates=came("a")),
        [lease(2, "b", trained=True)],
        100,
        Grace,
        "for b",
    ),
    (
        "in grace",
        DEFAULT,
        replace(CLOCK, updates=came("a"), grace_until=106.0),
        [lease(2, "b", trained=True)],
        103,
        None,
        "3.0 s left",
    ),
    (
        "grace over",
        DEFAULT,
        replace(CLOCK, updates=came("a"), grace_until=106.0),
        [lease(2, "b", trained=True)],
        106,
        CloseRound,
        "grace window is over",
    ),
    (
        "no grace",
        Options(grace=0.0),
        replace(CLOCK, updates=came("a")),
        [lease(2, "b", trained=True)],
        100,
        CloseRound,
        "grace window is over",
    ),
    (
        "extended",
        DEFAULT,
        CLOCK,
        [lease()],
        100,
        Extend,
        "extended once by 60.0 s: 0 of at least 1",
    ),
    (
        "in extension",
        DEFAULT,
        replace(CLOCK, deadline=160.0, extended=True),
        [lease()],
        120,
        None,
        "0 of 1",
    ),
    (
        "quorum in extension",
        Options(target_replicas=2),
        replace(CLOCK, deadline=160.0, extended=True, updates=came("a")),
        [],
        120,
        CloseRound,
        "1 replicas",
    ),
    (
        "empty",
        DEFAULT,
        replace(CLOCK, deadline=160.0, extended=True),
        [lease()],
        160,
        CloseEmpty,
        "opens again with 120.0 s",
    ),
    (
        "below quorum",
        Options(min_replicas=2),
        replace(CLOCK, deadline=160.0, extended=True, updates=came("a")),
        [],
        160,
        CloseEmpty,
        "1 of at least 2",
    ),
    (
        "clock lost",
        Options(target_replicas=2),
        replace(RoundState(), updates=came("a")),
        [],
        50,
        CloseRound,
        "nobody is working",
    ),
]


@pytest.mark.parametrize(
    ("name", "options", "current", "leases", "now", "kind", "words"),
    ROUND_TABLE,
    ids=[row[0] for row in ROUND_TABLE],
)
def test_round_closes_when_it_should(
    name: str,
    options: Options,
    current: RoundState,
    leases: list[Lease],
    now: float,
    kind: type | None,
    words: str,
) -> None:
    action, reason = decide_round(now, one_block(current, *leases), options, 1)
    assert (type(action) if action else None) is kind, reason
    assert words in reason
    if isinstance(action, CloseRound):
        assert action.updates == tuple(sorted(u.id for u in current.updates))


def test_a_dead_worker_is_not_waited_for() -> None:
    state = one_block(replace(CLOCK, updates=came("a")), lease(2, "b"))
    state = with_worker(state, replace(state.workers["b"], seen=0.0))
    assert decide_round(61.0, state, DEFAULT, 1)[0] == CloseRound(
        1, 0, ("u0a",), "round 0 of block 1 closes: all 1 replicas are here"
    )


def test_the_first_timed_task_ends_the_guess_of_the_first_deadline() -> None:
    state = one_block(CLOCK, lease(1, "a"), lease(2, "b", expected=100.0))
    assert deadline_after(10.0, state.blocks[1], DEFAULT, 4.0) == 22.0
    state = add_update(state, 1, came("a")[0], 22.0, 4.0)
    assert decide_round(21.0, state, DEFAULT, 1)[0] is None
    assert isinstance(decide_round(22.0, state, DEFAULT, 1)[0], CloseRound), (
        "the slow one is not waited for, and will be late"
    )
    timed = replace(state.blocks[1], task_seconds=(4.0, 4.0))
    assert deadline_after(10.0, timed, DEFAULT, 1.0) == 70.0, (
        "later rounds keep the length that they began with"
    )


def test_extension_then_empty_then_longer() -> None:
    state = one_block(CLOCK, lease())
    lengths = []
    now = 100.0
    for _ in range(3):
        (action,), _ = decide(now, with_lease(state, lease(expires=1e9)), DEFAULT)
        assert isinstance(action, Extend)
        state = apply(state, action)
        now = action.deadline
        (action,), _ = decide(now, with_lease(state, lease(expires=1e9)), DEFAULT)
        assert isinstance(action, CloseEmpty)
        state = apply(state, action)
        lengths.append(action.length)
        assert state.blocks[1].round.deadline is None
        state = replace(
            state,
            blocks={
                1: replace(
                    state.blocks[1],
                    round=replace(state.blocks[1].round, deadline=now + action.length),
                )
            },
        )
        now += action.length
    assert lengths == [120.0, 240.0, 480.0]
    assert state.blocks[1].round.attempt == 3


def test_what_arrived_outlives_an_empty_close() -> None:
    state = apply(one_block(replace(CLOCK, updates=came("a"))), CloseEmpty(1, 0, 120.0, ""))
    assert [u.id for u in state.blocks[1].round.updates] == ["u0a"]


def test_leases_expire_and_are_given_again_with_a_higher_fence() -> None:
    state = one_block(replace(CLOCK, deadline=500.0), lease(expires=90.0))
    actions, reason = decide(90.0, state, DEFAULT)
    assert actions == (Expire(1, 1, "the lease of a on task 1 (block 1) ran out"),)
    assert "ran out" in reason
    state = with_worker(apply(state, actions[0]), WorkerState("b", 1, 90.0, 1.0))
    again = assign(90.0, state, DEFAULT, "b")
    assert isinstance(again, Grant)
    assert (again.lease.task, again.lease.number, again.lease.fence, again.lease.worker) == (
        1,
        0,
        2,
        "b",
    )
    assert "again, after the lease of a" in again.reason
    assert apply_grant(state, again).blocks[1].next_number == 1


def test_an_old_expiry_does_not_hit_the_new_lease() -> None:
    state = one_block(CLOCK, lease(fence=2))
    assert apply(state, Expire(1, 1, "")) == state


def test_expired_but_uploading_task_is_left_to_its_living_worker() -> None:
    state = one_block(replace(CLOCK, deadline=500.0), lease(expired=True, trained=True))
    state = with_worker(state, WorkerState("b", 1, 100.0, 1.0))
    other = assign(100.0, state, DEFAULT, "b")
    assert isinstance(other, Grant) and other.lease.task == 10
    dead = with_worker(state, replace(state.workers["a"], seen=0.0))
    taken = assign(100.0, dead, DEFAULT, "b")
    assert isinstance(taken, Grant) and taken.lease.task == 1


def submission(**changes: object) -> Claim:
    return replace(Claim("a", task=1, fence=1, block=1, base=0, steps=10), **changes)  # type: ignore[arg-type]


ADMIT_TABLE = [
    # name, version now, lease, submission, now -> (accepted, code, staleness, weight)
    ("on time", 0, lease(), submission(), 50, (True, "accepted", 0, 1.0)),
    ("fewer steps", 0, lease(), submission(steps=3), 50, (True, "accepted", 0, 1.0)),
    ("staleness 1", 1, lease(), submission(), 50, (True, "late", 1, 1.0)),
    ("staleness 2", 2, lease(), submission(), 50, (True, "late", 2, 0.7**2)),
    ("staleness 4", 4, lease(), submission(), 50, (True, "late", 4, 0.7**4)),
    ("staleness 5", 5, lease(), submission(), 50, (False, "too_stale", 5, 0.0)),
    ("expired, not given again", 0, lease(expired=True), submission(), 250, (True, "late", 0, 1.0)),
    ("past its time", 0, lease(), submission(), 250, (True, "late", 0, 1.0)),
    (
        "given to another",
        0,
        lease(worker="b", fence=2),
        submission(),
        250,
        (False, "stale_fence", 0, 0.0),
    ),
    ("future fence", 0, lease(), submission(fence=2), 50, (False, "not_your_task", 0, 0.0)),
    (
        "someone else's task",
        0,
        lease(worker="b"),
        submission(),
        50,
        (False, "not_your_task", 0, 0.0),
    ),
    ("unknown task", 0, lease(), submission(task=7), 50, (False, "unknown_task", 0, 0.0)),
    ("forgotten and old", 9, lease(), submission(task=7), 50, (False, "too_stale", 9, 0.0)),
    ("wrong base", 2, lease(base=1), submission(base=2), 50, (False, "wrong_base", 0, 0.0)),
    ("wrong block", 0, lease(), submission(block=2), 50, (False, "unknown_block", 0, 0.0)),
    ("too many steps", 0, lease(), submission(steps=11), 50, (False, "wrong_steps", 0, 0.0)),
    ("no steps", 0, lease(), submission(steps=0), 50, (False, "wrong_steps", 0, 0.0)),
]


@pytest.mark.parametrize(
    ("name", "version", "out", "sent", "now", "expected"),
    ADMIT_TABLE,
    ids=[row[0] for row in ADMIT_TABLE],
)
def test_admission(
    name: str,
    version: int,
    out: Lease,
    sent: Claim,
    now: float,
    expected: tuple[bool, str, int, float],
) -> None:
    verdict = judge(now, one_block(CLOCK, out, version=version), DEFAULT, sent)
    assert (verdict.accepted, verdict.code, verdict.staleness, verdict.weight) == expected, (
        verdict.reason
    )
    assert verdict.reason


def test_admission_after_budget_kick_and_with_fixed_steps() -> None:
    state = one_block(CLOCK, lease(), version=3)
    assert judge(1.0, state, Options(budget_rounds=3), submission()).code == "block_finished"
    assert (
        judge(1.0, with_worker(state, WorkerState("a", kicked=True)), DEFAULT, submission()).code
        == "kicked"
    )
    assert (
        judge(1.0, one_block(CLOCK, lease()), Options.exact(10, 100), submission(steps=9)).code
        == "wrong_steps"
    )


def test_staleness_weight_never_rises() -> None:
    weights = [staleness_weight(s, DEFAULT) for s in range(6)]
    assert weights[:2] == [1.0, 1.0] and weights == sorted(weights, reverse=True)


def blocks(*versions: int, fusion: bool = False, **changes: object) -> dict[int, BlockState]:
    made = {i + 1: replace(BlockState(version=v), **changes) for i, v in enumerate(versions)}  # type: ignore[arg-type]
    return {**made, len(made): replace(made[len(made)], fusion=True)} if fusion else made


def workers(*homes: int | None) -> dict[str, WorkerState]:
    return {f"w{i}": WorkerState(f"w{i}", home, 0.0, 1.0) for i, home in enumerate(homes)}


def test_nobody_works_after_the_end() -> None:
    done = RunState(blocks=blocks(2, 2), workers=workers(1))
    assert assign(0.0, done, Options(budget_rounds=2), "w0") == Stop(
        "the run is finished: every block has spent its budget"
    )
    assert isinstance(assign(0.0, replace(done, stopping=True), DEFAULT, "w0"), Stop)
    assert isinstance(assign(0.0, done, DEFAULT, "stranger"), Stop)
    assert isinstance(
        assign(0.0, with_worker(done, WorkerState("w0", kicked=True)), DEFAULT, "w0"), Stop
    )
    (action,), reason = decide(0.0, done, Options(budget_rounds=2))
    assert isinstance(action, Finish) and action.reason == reason


def test_tokens_are_shared_by_the_blocks() -> None:
    options = Options(budget_tokens=200)
    assert (
        end_reason(RunState(blocks={1: BlockState(tokens=100), 2: BlockState(tokens=99)}), options)
        is None
    )
    assert (
        end_reason(RunState(blocks={1: BlockState(tokens=100), 2: BlockState(tokens=100)}), options)
        is not None
    )


def test_a_fusion_block_has_a_budget_of_its_own() -> None:
    options = Options(budget_steps=100, fusion_steps=40)
    last = BlockState(steps=40, fusion=True)
    state = RunState(blocks={1: BlockState(steps=100), 2: last})
    assert end_reason(state, options) is not None
    state = replace(state, blocks={**state.blocks, 2: replace(last, steps=39)})
    assert end_reason(state, options) is None
    late = replace(last, steps=39, round=RoundState(updates=(WaitingUpdate("x", "a", 9, 30),)))
    assert advance_block(late, {"x": 1.0}, None, options).steps == 40
    tokens = Options(budget_steps=100, fusion_steps=40, budget_tokens=700)
    done = {1: BlockState(tokens=500), 2: BlockState(tokens=200, fusion=True)}
    assert [spent_share(RunState(blocks=done), tokens, i) for i in done] == [1.0, 1.0]


def test_coordinated_stop_waits_for_tasks_merges_and_ends() -> None:
    state = replace(one_block(replace(CLOCK, updates=came("a")), lease(2, "b")), stopping=True)
    assert decide(50.0, state, Options(target_replicas=2))[0] == ()
    state = replace(state, leases={})
    (action,), reason = decide(50.0, state, Options(target_replicas=2))
    assert isinstance(action, CloseRound) and "the run stops" in reason
    block = advance_block(state.blocks[1], equal_shares(action), 2.0, Options())
    state = apply_version(state, 1, block, 4)
    (end,), _ = decide(50.0, state, Options(target_replicas=2))
    assert isinstance(end, Finish) and "no task is out" in end.reason


def test_advance_and_forget() -> None:
    updates = (
        WaitingUpdate("x", "a", 300, 30),
        WaitingUpdate("y", "b", 100, 10),
        WaitingUpdate("z", "c", 999, 99),
    )
    block = BlockState(
        version=6, steps=5, tokens=7, round=RoundState(deadline=1.0, updates=updates)
    )
    new = advance_block(block, {"x": 0.75, "y": 0.25}, 1.25, Options())
    assert (new.version, new.steps, new.tokens, new.loss) == (7, 5 + 25, 407, 1.25)
    state = RunState(
        blocks={1: block},
        leases={
            1: lease(base=2, expired=True),
            2: lease(2, base=3, expired=True),
            3: lease(3, base=2),
        },
    )
    after = apply_version(state, 1, new, 4)
    assert set(after.leases) == {2, 3} and after.blocks[1].round == RoundState()


def test_leaving_frees_the_tasks() -> None:
    left = without_worker(one_block(CLOCK, lease(), lease(2, "b")), "a")
    assert left.leases[1].expired and not left.leases[2].expired and set(left.workers) == {"b"}


def test_stored_time_is_remaining_time() -> None:
    assert remaining(90.0, 100.0) == 10.0 and until(5.0, remaining(90.0, 100.0)) == 15.0
    assert (
        remaining(110.0, 100.0) == 0.0 and remaining(1.0, None) is None and until(1.0, None) is None
    )


@pytest.mark.parametrize("seed", range(6))
def test_simulated_run_ends_and_counts_every_task_once(seed: int) -> None:
    """Workers of unequal speed join, die and come back; time is a number.

    Every block reaches its budget, and no task counts twice.
    """
    draw = random.Random(seed)
    options = Options(
        budget_rounds=6, task_seconds=10.0, alive=15.0, min_replicas=draw.choice([1, 2])
    )
    state = RunState(blocks=blocks(0, 0, 0, fusion=True))
    speeds = {f"w{i}": draw.choice([0.05, 0.3, 1.0, 4.0]) for i in range(5)}
    counted: list[int] = []
    now = 0.0
    for _ in range(20_000):
        now += 0.5
        while True:
            actions, reason = decide(now, state, options)
            assert reason
            for action in actions:
                if isinstance(action, CloseRound):
                    block = state.blocks[action.block]
                    assert block.round.replicas >= options.min_replicas
                    state = apply_version(
                        state,
                        action.block,
                        advance_block(block, equal_shares(action), None, options),
                        options.max_staleness,
                    )
                else:
                    state = apply(state, action)
            if not any(isinstance(a, CloseRound) for a in actions):
                break
        if any(isinstance(a, Finish) for a in actions):
            break
        name = draw.choice(sorted(speeds))
        if draw.random() < 0.02:
            continue  # dead for now
        state = with_worker(
            state,
            replace(
                state.workers.get(name, WorkerState(name)), seen=now, seconds_per_step=speeds[name]
            ),
        )
        for out in [
            x
            for x in state.leases.values()
            if x.worker == name and now >= x.granted + x.steps * speeds[name]
        ]:
            verdict = judge(
                now,
                state,
                options,
                Claim(name, out.task, out.fence, out.block, out.base, out.steps),
            )
            if verdict.accepted:
                counted.append(out.task)
                update = WaitingUpdate(
                    f"{out.task}", name, out.steps, out.steps, verdict.staleness, verdict.weight
                )
                state = add_update(state, out.task, update, now + 60.0, now - out.granted)
            else:
                assert verdict.code in ("too_stale", "block_finished"), verdict
                state = replace(
                    state, leases={t: x for t, x in state.leases.items() if t != out.task}
                )
        answer = assign(now, state, options, name)
        assert answer.reason
        if isinstance(answer, Grant) and draw.random() < 0.9:
            old = state.leases.get(answer.lease.task)
            assert answer.resumed or old is None or answer.lease.fence > old.fence
            assert answer.lease.task not in counted
            state = apply_grant(state, answer)
    assert {b.version for b in state.blocks.values()} == {6}
    assert len(counted) == len(set(counted))
