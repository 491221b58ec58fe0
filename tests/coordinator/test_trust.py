"""What members cannot do by claiming, by sending rubbish, or by doing nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blocktrain.audit.audit import audit
from blocktrain.audit.evidence import open_folder
from blocktrain.bench.attacks.policies import norm
from blocktrain.clock import SimulatedClock
from blocktrain.config import make_config
from blocktrain.coordinator.assignment import assign
from blocktrain.coordinator.history import PROBATION, Standing
from blocktrain.coordinator.merging.merge import (
    MergeContext,
    MergeOptions,
    MergeResult,
    Update,
    merge,
)
from blocktrain.coordinator.policy import CLIP_BY_STEPS
from blocktrain.coordinator.rounds import decide_round
from blocktrain.coordinator.state import (
    BlockState,
    CloseRound,
    Grant,
    Lease,
    Options,
    Postpone,
    RoundState,
    RunState,
    WaitingUpdate,
    WorkerState,
)
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.shards import read_index
from blocktrain.learning.train import Trainer
from blocktrain.protocol import compression
from blocktrain.protocol import messages as m
from blocktrain.protocol.tensors import Tensors
from blocktrain.schedule import change_bounds, usual_change
from blocktrain.watch.feed import EVENTS, read_events
from blocktrain.watch.server import WatchedCoordinator
from blocktrain.web.client import LocalClient
from support.fake_worker import (
    CONFIG,
    FakeWorker,
    as_task,
    beginning,
    prepared,
    whole_ledger,
)

DEFENDED = Options(defences=True)
OLD = Standing(merged=PROBATION, longest=100)


def change(size: float, seed: int = 0) -> dict[str, Any]:
    return {"w": (size * np.random.default_rng(seed).standard_normal(64)).astype(np.float32)}


def update(name: str, worker: str, size: float = 1.0, /, **more: Any) -> Update:
    return Update(
        name, change(size, sum(map(ord, name))), more.pop("tokens", 100), worker=worker, **more
    )


def defended(*updates: Update, norms: tuple[float, ...] = ()) -> MergeResult:
    current = {"w": np.zeros(64, np.float32)}
    return merge(MergeContext(current, MergeOptions(defences=True), norms=norms), updates)


def shares(result: MergeResult) -> dict[str, float]:
    return {c.update.id: c.share for c in result.used}


# Bounds


def test_bounds_hold_from_the_first_update_on() -> None:
    bounds = (0.1, 20.0)
    result = defended(
        update("good", "a", bounds=bounds),
        update("huge", "b", 100.0, bounds=bounds),
        update("tiny", "c", 1e-3, bounds=bounds),
    )
    assert list(shares(result)) == ["good"]
    assert {r.id: r.code for r in result.rejected} == {"huge": "too_long", "tiny": "no_change"}


def test_a_short_task_may_send_what_a_long_one_has_left_over() -> None:
    config = CONFIG.replace(steps=1000)
    long, short = (change_bounds(config, 1, range(first, 300), 64)[1] for first in (200, 299))
    assert long / 3 < short < long


def test_rubbish_does_not_move_the_running_median() -> None:
    bounds = (0.1, 20.0)
    norms: tuple[float, ...] = (8.0,) * 6
    for n in range(40):
        result = defended(
            update(f"good{n}", "a", bounds=bounds),
            Update(f"zero{n}", {"w": np.zeros(64, np.float32)}, 100, worker="b", bounds=bounds),
            norms=norms,
        )
        norms = result.norms
        assert [c.scale for c in result.used] == [1.0]


def test_an_update_that_does_harm_is_left_out() -> None:
    result = defended(
        update("good", "a", gain=0.1, noise=0.01),
        update("flat", "b", gain=-0.005, noise=0.01),
        update("harm", "c", gain=-0.02, noise=0.01),
        update("nan", "d", gain=float("nan"), noise=0.01),
    )
    assert set(shares(result)) == {"good", "flat"}
    assert {r.code for r in result.rejected} == {"worse"}


def test_long_tasks_make_long_updates_and_short_ones_are_held_against_less() -> None:
    by_steps = MergeOptions(defences=True, clip=2.0, clip_by_steps=True)
    before = MergeContext({"w": np.zeros(64, np.float32)}, by_steps, norms=(1.0,) * 6)
    rows = {"long": (8.0, 8.0), "long-too": (15.0, 8.0), "short": (4.0, 1.0), "tiny": (0.1, 0.1)}
    updates = [
        Update(name, {"w": np.full(64, size / 8, np.float32)}, 100, worker=name, usual=usual)
        for name, (size, usual) in rows.items()
    ]
    result = merge(before, updates)
    scales = {c.update.id: c.scale for c in result.used}
    assert scales == pytest.approx({"long": 1.0, "long-too": 1.0, "short": 0.5, "tiny": 1.0})
    assert sorted(result.norms[6:]) == pytest.approx([1.0, 1.0, 15 / 8, 2.0])


def test_honest_steps_are_never_shortened() -> None:
    """Tasks of many lengths, side by side over a whole schedule."""
    config = make_config({**CONFIG.model_dump(), "blocks": 1, "steps": 120, "warmup": 10})
    folder = prepared() / "corpus"
    corpus = TokenCorpus(read_index((folder / "index.json").read_bytes()), folder)
    trainer, norms = Trainer(config, 1), list[float]()
    parameters = sum(t.size for t in trainer.weights().values())
    for steps in (2, 16, 4, 8, 1, 24, 2, 8, 3, 32, 2, 16, 2):
        before, first = trainer.weights(), trainer.step
        for _ in trainer.run(corpus.batches(config, 1), first + steps):
            pass
        change = {name: new - before[name] for name, new in trainer.weights().items()}
        usual = usual_change(config, 1, range(first, first + steps), parameters)
        norms.append(norm(change) / usual)
    for number, length in enumerate(norms[5:], start=5):
        assert length < CLIP_BY_STEPS * np.median(norms[:number])


def test_who_gains_far_less_than_the_others_is_left_out() -> None:
    more = {"noise": 0.01, "reach": 2.0}
    peers = [update(name, name, gain=0.1 + 0.01 * n, **more) for n, name in enumerate("abc")]
    idle = update("idle", "d", gain=0.0, **more)
    result = defended(
        *peers,
        idle,
        update("short", "e", gain=0.02, noise=0.0, reach=0.4),
        update("long", "h", gain=0.1, noise=0.0, reach=200.0),
        update("late", "f", gain=0.0, late=True, **more),
        update("unclear", "g", gain=0.0, noise=0.1, reach=2.0),
    )
    assert {r.id: r.code for r in result.rejected} == {"idle": "no_gain"}
    assert "others would gain 0.1" in result.rejected[0].reason
    assert not defended(*peers[:1], idle).rejected, "two cannot say what is usual"


# Shares


def test_many_updates_of_one_worker_count_as_one() -> None:
    many = [update(f"many{n}", "a", tokens=10) for n in range(50)]
    result = defended(*many, update("b", "b", tokens=10), update("c", "c", tokens=10))
    own = sum(share for name, share in shares(result).items() if name.startswith("many"))
    assert own == pytest.approx(1 / 3)


def test_nobody_weighs_more_than_twice_the_median() -> None:
    result = defended(
        update("a", "a", tokens=1_000_000), update("b", "b"), update("c", "c"), update("d", "d")
    )
    assert shares(result)["a"] == pytest.approx(2 / 5)


def test_newcomers_share_a_fifth() -> None:
    sybils = [update(f"s{n}", f"s{n}", newcomer=True) for n in range(90)]
    result = defended(*sybils, update("old", "old"))
    assert shares(result)["old"] == pytest.approx(0.8)
    alone = defended(*sybils[:2])
    assert list(shares(alone).values()) == pytest.approx([0.5, 0.5])


def test_two_of_five_workers_cannot_move_a_weight_beyond_the_others() -> None:
    honest = [update(f"h{n}", f"h{n}") for n in range(4)]
    result = defended(*honest, update("bad", "bad", 1000.0))
    assert result.state is not None
    proposals = np.stack([u.values["w"] for u in honest])
    assert (result.state["w"] <= proposals.max(0)).all()
    assert (result.state["w"] >= proposals.min(0)).all()


# Tasks and rounds


def lease(task: int, worker: str, **more: Any) -> Lease:
    fields = {"steps": 10, "start_step": 0, "position": 0, "granted": 0.0, "expires": 300.0}
    return Lease(task, task, 1, 0, 1, worker, expected=10.0, **{**fields, **more})


def state_of(*leases: Lease, answered: str = "", **standings: Standing) -> RunState:
    updates = tuple(WaitingUpdate(name, name, 100, 10) for name in answered)
    names = {*standings, *answered, *(x.worker for x in leases)}
    return RunState(
        blocks={1: BlockState(round=RoundState(deadline=90.0, updates=updates))},
        leases={x.task: x for x in leases},
        workers={name: WorkerState(name, 1, 0.0, 0.01) for name in names},
        standings=standings,
    )


def test_a_task_grows_with_what_its_worker_has_delivered() -> None:
    for longest, steps in ((0, 10), (10, 40), (40, 160)):
        state = state_of(a=Standing(merged=1, longest=longest))
        decision = assign(0.0, state, DEFENDED, "a")
        assert isinstance(decision, Grant) and decision.lease.steps == steps


def test_a_round_waits_only_for_those_who_have_delivered() -> None:
    squatter = lease(9, "s")
    state = state_of(squatter, answered="ab", a=OLD, b=OLD)
    assert isinstance(decide_round(1.0, state, DEFENDED, 1)[0], CloseRound)
    trusting = decide_round(1.0, state, Options(), 1)
    assert trusting[0] is None and "2 of 3" in trusting[1]
    waits = decide_round(
        1.0, state_of(squatter, lease(8, "b"), answered="a", a=OLD, b=OLD), DEFENDED, 1
    )
    assert waits[0] is None and "1 of 2" in waits[1]


def test_at_the_beginning_a_round_waits_for_everybody_once() -> None:
    state = state_of(lease(9, "s"), answered="a")
    assert decide_round(1.0, state, DEFENDED, 1)[0] is None
    missed = replace(state, standings={"s": Standing(missed=1)})
    assert decide_round(1.0, missed, DEFENDED, 1)[0] is None, "there is nobody else to wait for"
    proven = replace(state, standings={"a": OLD, "s": Standing(missed=1)})
    assert isinstance(decide_round(1.0, proven, DEFENDED, 1)[0], CloseRound)


def test_who_harms_sits_out_and_may_come_back() -> None:
    worse = "worse: the loss rose"
    standing = OLD.after_drop(1, worse)
    assert not standing.barred and not standing.proven
    standing = standing.after_drop(1, worse)
    state = state_of(lease(9, "b"), a=standing, b=OLD)
    decision = assign(0.0, state, DEFENDED, "a")
    assert isinstance(decision, Postpone) and "4 more round(s)" in decision.reason
    for others in (standing, replace(OLD, missed=2)):
        alone = state_of(lease(9, "b"), a=standing, b=others)
        assert isinstance(assign(0.0, alone, DEFENDED, "a"), Grant), "nobody else trains the block"
    both = replace(DEFENDED, min_replicas=2)
    needed = state_of(lease(9, "b"), a=standing, b=OLD)
    assert isinstance(assign(0.0, needed, both, "a"), Grant), "no round would close without it"
    for _ in range(4):
        standing = standing.after_version(1)
    assert isinstance(assign(0.0, state_of(lease(9, "b"), a=standing, b=OLD), DEFENDED, "a"), Grant)
    for _ in range(2):
        standing = standing.after_merge(10)
    assert standing.proven
    assert OLD.after_drop(1, "not published: too much together") == OLD


# Against a coordinator


@contextmanager
def untrusting(folder: Path, **policy: Any) -> Iterator[tuple[WatchedCoordinator, LocalClient]]:
    # Its members do not train: whoever is checked would be left out.
    chosen = {"undefended": False, "retrain_share": 0.0, **policy}
    with beginning(folder, **chosen) as coordinator:
        yield coordinator, LocalClient(coordinator)


def payload(worker: FakeWorker, task: m.Task, make: Any) -> bytes:
    delta: Tensors = {name: make(t) for name, t in worker.weights(task).items()}
    return compression.compress(delta, None, task.compression)[0]


def dropped(client: LocalClient) -> list[str]:
    bodies = [json.loads(e.body) for e in whole_ledger(client) if e.kind in ("version", "round")]
    return [reason.split(":")[0] for body in bodies for reason in body.get("dropped", {}).values()]


def test_claims_and_zeros_end_no_run(tmp_path: Path) -> None:
    """A1: a member claims 1e9 steps/s and answers zeros, to end the run with its own loss."""
    with untrusting(tmp_path, task_steps=None, task_seconds=20.0) as (coordinator, client):
        liar = FakeWorker(client)
        task = as_task(liar.join(speed=1e9).next)
        sizes = []
        for _ in range(12):
            sizes.append(task.steps)
            liar.send(task, payload(liar, task, np.zeros_like), seconds=1e-9)
            following = liar.ask(speed=1e9)
            task = following if isinstance(following, m.Task) else task
            if following is not task:
                break
        assert max(sizes) == 10, "its tasks stay small"
        assert set(dropped(client)) == {"no_change"}
        assert [b.version for b in coordinator.run.state.blocks.values()] == [0, 0]
        assert coordinator.finished is None


def test_the_first_update_cannot_be_of_any_length(tmp_path: Path) -> None:
    """A2: a giant first update, before the block knows what is usual."""
    with untrusting(tmp_path) as (coordinator, client):
        worker = FakeWorker(client)
        task = worker.joined()
        worker.send(task, payload(worker, task, lambda t: np.full_like(t, 1e4)))
        assert dropped(client) == ["too_long"]
        assert coordinator.run.newest(task.block).version == 0
        (said,) = [e for e in read_events(tmp_path / EVENTS) if e["kind"] == "refused"]
        assert (said["worker"], said["code"]) == (worker.id, "too_long")
        assert "steps change at most" in said["sentence"]


def test_a_slow_claim_stretches_no_round(tmp_path: Path) -> None:
    clock = SimulatedClock(1000.0)
    with untrusting(tmp_path, clock=clock, task_steps=None, first_deadline=60.0) as (_, client):
        slow = FakeWorker(client)
        slow.join(speed=1e-6)
        slow.ask(leaving=True)
        task = as_task(slow.join(speed=1e-6).next)
        assert task.deadline_seconds <= 120.0


@pytest.mark.parametrize("rules", [{"clip_by_steps": 0.5}, {"clip_by_steps": None, "clip": 0.5}])
def test_the_audit_computes_shares_and_means_of_defended_runs(
    tmp_path: Path, rules: dict[str, Any]
) -> None:
    policy = {"replicas": 6, "min_replicas": 6, "task_steps": 2, "clip_after": 2, **rules}
    with untrusting(tmp_path, **policy) as (coordinator, client):
        workers = [FakeWorker(client, seed) for seed in range(1, 13)]
        first = [(worker, as_task(worker.join().next)) for worker in workers]
        tasks = chain(first, ((worker, as_task(worker.ask())) for worker in workers))
        for worker, task in tasks:
            # Small changes, of a length that two steps can make.
            delta = {
                name: (
                    5e-4 * np.random.default_rng([worker.seed, task.task]).standard_normal(t.shape)
                ).astype(np.float32)
                for name, t in worker.weights(task).items()
            }
            worker.send(task, compression.compress(delta, None, task.compression)[0])
        versions = [json.loads(e.body) for e in whole_ledger(client) if e.kind == "version"]
        assert any(len(v["parts"]) >= 5 for v in versions), dropped(client)
        assert any(part["scale"] < 1 for v in versions for part in v["parts"])
        assert coordinator.run.state.standings
    outcome = audit(open_folder(tmp_path))
    assert outcome.ok, outcome.findings
    assert CONFIG.blocks == 2


def trained(worker: FakeWorker, task: m.Task, steps: int = 8) -> Tensors:
    """What real steps on the corpus change."""
    folder = prepared() / "corpus"
    corpus = TokenCorpus(read_index((folder / "index.json").read_bytes()), folder)
    trainer = Trainer(CONFIG, task.block)
    trainer.shift = task.position
    before = worker.weights(task)
    trainer.load_weights(before)
    for _ in trainer.run(corpus.batches(CONFIG, task.block), steps):
        pass
    return {name: new - before[name] for name, new in trainer.weights().items()}


def test_harm_is_found_on_text_that_was_drawn_after_the_payload(tmp_path: Path) -> None:
    with untrusting(tmp_path, replicas=3, min_replicas=3, task_steps=8) as (coordinator, client):
        workers = [FakeWorker(client, seed) for seed in range(1, 7)]
        tasks = [as_task(worker.join().next) for worker in workers]
        for number, (worker, task) in enumerate(zip(workers, tasks, strict=True)):
            sign = -1.0 if number < 2 else 1.0  # the first of each block climbs
            delta = {name: np.asarray(sign * t) for name, t in trained(worker, task).items()}
            worker.send(task, compression.compress(delta, None, task.compression)[0], tokens=8 * 32)
        bodies = [json.loads(e.body) for e in whole_ledger(client) if e.kind == "version"]
        merged = [body for body in bodies if body["version"] > 0]
        assert len(merged) == 2
        for body in merged:
            assert [r.split(":")[0] for r in body["dropped"].values()] == ["worse"]
            assert len(body["gains"]) == 3 and body["canary"] is not None
            (bad,) = body["dropped"]
            good = [gain for name, (gain, _) in body["gains"].items() if name != bad]
            assert min(good) > 0 > body["gains"][bad][0]
            assert body["loss"] != 2.5, "the loss is measured, not what members say"
        standings = coordinator.run.state.standings
        assert [standings[w.id].faults for w in workers] == [1, 1, 0, 0, 0, 0]
    outcome = audit(open_folder(tmp_path))
    assert outcome.ok, outcome.findings
