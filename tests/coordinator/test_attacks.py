"""Attacks that worked against the first release, played against a coordinator.

SECURITY.md numbers them and names the test of each. Its docstring begins with the number, here and
in other files.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blocktrain.audit.audit import Auditor, audit
from blocktrain.audit.evidence import open_folder
from blocktrain.bench.attacks.policies import (
    ATTACKS,
    Attack,
    HonestUpdate,
    norm,
    scaled,
    send_honestly,
)
from blocktrain.clock import SimulatedClock
from blocktrain.config import make_config
from blocktrain.coordinator.history import ESTABLISHED, PROBATION, Standing
from blocktrain.coordinator.policy import Policy
from blocktrain.coordinator.run import TrainingRun
from blocktrain.learning.corpus.source import Source
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.shards import read_index
from blocktrain.learning.train import Trainer
from blocktrain.protocol import messages as m
from blocktrain.protocol.compression import compress, open_update
from blocktrain.protocol.identity import open_identity
from blocktrain.protocol.tensors import Tensors, schema_of
from blocktrain.runs.prepare import prepare
from blocktrain.schedule import change_bounds
from blocktrain.store.open import open_store
from blocktrain.watch.checking.judging import ProcessJudge
from blocktrain.watch.checking.retraining import ProcessRetrainer
from blocktrain.watch.feed import EVENTS, Feed, read_events
from blocktrain.watch.narrator import Narrator
from blocktrain.watch.server import WatchedCoordinator
from blocktrain.web.client import LocalClient
from support.fake_worker import CONFIG, FakeWorker, as_task, whole_ledger
from support.waiting import until

ALONE = make_config({**CONFIG.model_dump(), "blocks": 1, "steps": 400})
ROOT = Path(__file__).parents[2]
SECONDS = 5.0  # that a task of an honest member takes


def bodies(coordinator: WatchedCoordinator, kind: str) -> list[dict[str, Any]]:
    """The ledger's entries of one kind."""
    client = LocalClient(coordinator)
    return [json.loads(e.body) for e in whole_ledger(client) if e.kind == kind]


def versions(coordinator: WatchedCoordinator) -> list[dict[str, Any]]:
    """All that were merged."""
    return [body for body in bodies(coordinator, "version") if body["version"] > 0]


Payload = Callable[[FakeWorker, m.Task], bytes]


@dataclass
class Play:
    """A run with its members. Without a judge it has all defences that need no text."""

    coordinator: WatchedCoordinator
    clock: SimulatedClock
    members: list[FakeWorker] = field(default_factory=list)
    tasks: dict[str, m.Task | m.Wait] = field(default_factory=dict)

    def newcomer(self) -> FakeWorker:
        """One more member."""
        worker = FakeWorker(LocalClient(self.coordinator), len(self.members) + 1)
        self.members.append(worker)
        self.tasks[worker.id] = worker.joined()
        return worker

    def answer(
        self, worker: FakeWorker, make: Payload | None = None, seconds: float = SECONDS
    ) -> bool:
        """Send an update, a plausible one by default, if there is a task."""
        if isinstance(self.tasks[worker.id], m.Wait):
            self.tasks[worker.id] = worker.ask()
        task = self.tasks[worker.id]
        if isinstance(task, m.Task):
            payload = (make or plausible)(worker, task)
            self.tasks[worker.id] = worker.send(task, payload, seconds=seconds).next
        return isinstance(task, m.Task)

    def hold(self, worker: FakeWorker) -> None:
        """Keep a task alive, or take the next one, and answer none."""
        task = self.tasks[worker.id]
        if isinstance(task, m.Wait) or not worker.beat(task).go_on:
            self.tasks[worker.id] = worker.ask()

    def pass_time(self, seconds: float = SECONDS) -> None:
        self.clock.now += seconds
        self.coordinator.tick()

    def shares(self, version: dict[str, Any], worker: FakeWorker) -> float:
        """What a member's updates weigh in a version."""
        own = {u["id"] for u in bodies(self.coordinator, "update") if u["worker"] == worker.id}
        return float(sum(part["share"] for part in version["parts"] if part["update"] in own))


Playing = Callable[..., AbstractContextManager[Play]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, corpus_folder: Path) -> Path:
    """Version 0 of the only block."""
    folder = tmp_path_factory.mktemp("attacks")
    prepare(ALONE, Source(str(corpus_folder), None, folder), folder / "prepared")
    return folder / "prepared"


@pytest.fixture
def playing(files: Path, tmp_path: Path) -> Playing:
    return partial(play, tmp_path, files)


@contextmanager
def play(
    folder: Path,
    files: Path,
    judge: type[ProcessJudge] | None = None,
    retrainer: Callable[[TrainingRun], ProcessRetrainer] | None = None,
    **policy: Any,
) -> Iterator[Play]:
    clock, store = SimulatedClock(1000.0), open_store(folder)
    identity, feed = open_identity(folder / "coordinator.pem"), Feed(folder / EVENTS)
    parts = (store, identity, clock, Narrator(feed), judge, retrainer)
    with closing(WatchedCoordinator(*parts)) as coordinator:
        chosen = Policy(**{"compression": "int4", "chunk_bytes": 1024, **policy})
        coordinator.feed = feed
        coordinator.begin(ALONE, chosen, "words", files)
        yield Play(coordinator, clock)


def plausible(worker: FakeWorker, task: m.Task) -> bytes:
    """A change in a random direction, as long as honest steps make it."""
    draw = np.random.default_rng([worker.seed, task.task, task.fence])
    noise: Tensors = {
        name: draw.standard_normal(t.shape).astype(np.float32)
        for name, t in worker.weights(task).items()
    }
    made = range(task.start_step, task.start_step + task.steps)
    bounds = change_bounds(ALONE, task.block, made, sum(t.size for t in noise.values()))
    wanted = (bounds[0] * bounds[1]) ** 0.5
    return compress(scaled(noise, wanted / norm(noise)), None, task.compression)[0]


def zeros(worker: FakeWorker, task: m.Task) -> bytes:
    nothing = {name: np.zeros_like(t) for name, t in worker.weights(task).items()}
    return compress(nothing, None, task.compression)[0]


def sparse(worker: FakeWorker, task: m.Task) -> bytes:
    """A plausible length, all of it in one weight: a payload of a few hundred bytes."""
    change = {name: np.zeros_like(t) for name, t in worker.weights(task).items()}
    made = range(task.start_step, task.start_step + task.steps)
    bounds = change_bounds(ALONE, task.block, made, sum(t.size for t in change.values()))
    first = change[min(change)].reshape(-1)
    first[task.task % first.size] = (bounds[0] * bounds[1]) ** 0.5
    return compress(change, None, task.compression)[0]


def stored(coordinator: WatchedCoordinator) -> int:
    """Bytes of all blobs."""
    blobs = coordinator.run.store.blobs
    return sum(blobs.size(name) for name in blobs.names())


def test_sparse_updates_make_no_large_versions(playing: Playing, tmp_path: Path) -> None:
    """A5: when honest members have left, one sends updates of one weight each, 200 bytes long."""
    with playing(task_steps=2) as play:
        honest = [play.newcomer() for _ in range(2)]
        for _ in range(6):  # of two updates a version makes one delta, and leaves a residual
            for worker in honest:
                play.answer(worker)
            play.pass_time()
        for worker in honest:
            worker.ask(leaving=True)
        attacker = play.newcomer()
        for _ in range(8):
            play.answer(attacker, sparse)
            play.pass_time()
        count, before = len(versions(play.coordinator)), stored(play.coordinator)
        received = play.coordinator.run.traffic.by_block[1][0]
        for _ in range(40):
            play.answer(attacker, sparse)
            play.pass_time()
        made = versions(play.coordinator)[count:]
        grown = stored(play.coordinator) - before
        came = play.coordinator.run.traffic.by_block[1][0] - received
        whole = made[0]["weights"]["length"]
        assert len(made) >= 38 and came < 0.1 * whole
        assert grown < whole + 12 * came, "before, it was two whole tensors a version"
        checked = audit(open_folder(tmp_path))
        assert checked.ok, checked.findings


def test_many_updates_of_a_fast_member_weigh_no_more(playing: Playing) -> None:
    """A3: one of four members claims a high speed and fills a round with its updates."""
    with playing(replicas=4, min_replicas=4) as play:
        greedy, *honest = [play.newcomer() for _ in range(4)]
        for _ in range(10):
            play.pass_time(0.1)
            play.answer(greedy, seconds=1e-9)
        play.pass_time()
        assert all(play.answer(worker) for worker in honest)
        (version,) = versions(play.coordinator)
        assert len(version["parts"]) > 4
        assert play.shares(version, greedy) <= 0.4, "at most as much as two of the others"


def test_zeros_do_not_shorten_honest_updates(playing: Playing) -> None:
    """A8: two of three members send zeros, until the usual length of an update is zero."""
    with playing(replicas=3, task_steps=2) as play:
        bad, worse, honest = [play.newcomer() for _ in range(3)]
        for _ in range(12):
            for worker in (bad, worse):
                play.answer(worker, zeros)
            play.answer(honest)
            play.pass_time()
        parts = [part for body in versions(play.coordinator) for part in body["parts"]]
        own = {u["id"] for u in bodies(play.coordinator, "update") if u["worker"] == honest.id}
        assert len(parts) > 8 and {part["update"] for part in parts} <= own
        assert {part["scale"] for part in parts} == {1.0}


def test_a_slow_claim_does_not_stop_a_block(playing: Playing) -> None:
    """A7: a quick update, and when its next round is over a task at a claimed 1e-6 steps/s, which
    is only kept alive."""
    with playing(task_steps=2) as play:
        squatter = play.newcomer()
        play.pass_time(0.1)
        play.answer(squatter, seconds=0.05)
        squatter.ask(leaving=True)
        for _ in range(3):
            play.pass_time(2.0)
        task = as_task(squatter.join(speed=1e-6).next)
        assert task.deadline_seconds < 10
        play.tasks[squatter.id], honest = task, play.newcomer()
        for _ in range(12):
            play.pass_time(1.0)
            play.hold(squatter)
            play.answer(honest, seconds=1.0)
        assert len(versions(play.coordinator)) >= 10


def test_members_who_only_hold_tasks_slow_nobody_down(playing: Playing) -> None:
    """A12: three of five members take tasks, keep them alive and never answer."""
    with playing(task_steps=2) as play:
        honest = [play.newcomer() for _ in range(2)]
        squatters = [play.newcomer() for _ in range(3)]
        for _ in range(20):
            play.pass_time()
            for worker in squatters:
                play.hold(worker)
            for worker in honest:
                play.answer(worker)
        assert len(versions(play.coordinator)) >= 15


def test_who_copies_earns_nothing(playing: Playing, tmp_path: Path) -> None:
    """One of three members repeats what another one sent in the round before, with some noise; one
    repeats itself."""
    with playing(replicas=3, task_steps=2) as play:
        honest, copier, lazy = [play.newcomer() for _ in range(3)]
        seen: dict[str, bytes] = {}

        def remember(worker: FakeWorker, task: m.Task) -> bytes:
            return seen.setdefault(worker.id, plausible(worker, task))

        def copied(worker: FakeWorker, task: m.Task) -> bytes:
            schema = schema_of(worker.weights(task))
            values = open_update(seen[honest.id], schema, method=task.compression).tensors
            draw = np.random.default_rng(worker.seed)
            changed: Tensors = {
                name: (t * draw.uniform(0.9, 1.1, t.shape)).astype(np.float32)
                for name, t in values.items()
            }
            return compress(changed, None, task.compression)[0]

        for number in range(4):
            play.answer(honest, None if number else remember)
            play.answer(copier, copied if number else None)
            play.answer(lazy, remember)
            play.pass_time()
        by = {u["id"]: u["worker"] for u in bodies(play.coordinator, "update")}
        first, *others = versions(play.coordinator)
        assert len(first["parts"]) == 3
        assert {by[p["update"]] for version in others for p in version["parts"]} == {honest.id}
        dropped = {u: why for version in others for u, why in version["dropped"].items()}
        assert {why.split(":")[0] for why in dropped.values()} == {"copy"}
        assert sorted(by[u] for u in dropped) == sorted([copier.id, lazy.id] * 2)
        standings = play.coordinator.run.state.standings
        assert [standings[w.id].barred > 0 for w in play.members] == [False, True, True]
        shown = {w.worker: w for w in play.coordinator.status().workers}
        assert [shown[w.id].standing for w in play.members] == [
            "proven",
            "quarantined",
            "quarantined",
        ]
        assert shown[honest.id].share == 1.0 and shown[copier.id].barred > 0
        for _ in range(30):
            play.answer(honest)
            play.pass_time()
        everything, blobs = bodies(play.coordinator, "update"), play.coordinator.run.store.blobs
        left_out = {
            u
            for body in versions(play.coordinator)
            for u, why in body["dropped"].items()
            if why.startswith("copy:")
        }
        bases = [u["order"]["weights"]["sha256"] for u in everything if u["id"] in left_out]
        assert not all(map(blobs.has, bases)), "what some of them started from was removed"
        said = [e for e in read_events(tmp_path / EVENTS) if e["kind"] == "standing"]
        for worker in (copier, lazy):
            own = [e for e in said if e["worker"] == worker.id]
            assert [e["standing"] for e in own] == ["quarantined", "back"]
            assert "sits out 4 rounds of block 1" in own[0]["reason"]
    outcome = audit(open_folder(tmp_path))
    assert outcome.ok and outcome.dropped >= 4, outcome.findings
    assert copies_of(tmp_path, 1.01) == {
        f"update {u[:12]}... was left out as copy, and is not" for u in left_out
    }
    used = "is used, although another worker has sent it"
    assert {sentence.split("... ")[1] for sentence in copies_of(tmp_path, -0.5)} == {used}


def copies_of(folder: Path, alike: float) -> set[str]:
    """What an audit would say if a run had another bound."""
    source = open_folder(folder)
    auditor = Auditor(source)
    for entry in source.record().entries:
        auditor.follow(entry)
        assert auditor.copies is not None
        auditor.copies.alike = alike
    return {finding.sentence for finding in auditor.findings}


def trained(
    corpus: Path, attack: str | None, worker: FakeWorker, task: m.Task, share: float = 1.0
) -> bytes:
    """What real steps (or a share of them) change, or what an attacker makes of that."""
    row = ATTACKS[attack] if attack else Attack("honest", send_honestly)
    text = TokenCorpus(read_index((corpus / "index.json").read_bytes()), corpus)
    read, trainer = (
        text.batches(ALONE, task.block),
        Trainer(ALONE, task.block, step=task.start_step),
    )
    before = worker.weights(task)
    trainer.shift = task.position - task.start_step
    trainer.load_weights(before)
    end = task.start_step + round(share * task.steps)
    for _ in trainer.run(lambda number: row.text(read(number), ALONE.vocabulary), end):
        pass
    delta = {name: np.asarray(new - before[name]) for name, new in trainer.weights().items()}
    changed = row.change(HonestUpdate(delta, 0, np.random.default_rng(worker.seed)))
    return compress(changed, None, task.compression)[0]


def test_what_does_not_follow_from_its_task_is_left_out(
    playing: Playing, files: Path, tmp_path: Path
) -> None:
    """One of three members makes half of the steps, one sends noise. All updates are drawn. Then
    the checking process stands still, until the next round has closed."""
    work = partial(trained, files / "corpus", None)
    settings = {"replicas": 3, "min_replicas": 3, "task_steps": 8, "retrain_share": 1.0}
    made: list[ProcessRetrainer] = []

    def make(run: TrainingRun) -> ProcessRetrainer:
        made.append(ProcessRetrainer(run))
        return made[0]

    with playing(retrainer=make, **settings) as play:
        honest, lazy, noisy = [play.newcomer() for _ in range(3)]

        def standing(worker: FakeWorker) -> Standing:
            return play.coordinator.run.state.standings[worker.id]

        def ticked(done: Callable[[], bool]) -> Callable[[], bool]:
            def check() -> bool:
                play.coordinator.tick()
                return done()

            return check

        play.pass_time(SECONDS)
        play.answer(honest, work)
        play.answer(lazy, partial(work, share=0.5))
        assert not versions(play.coordinator)
        play.answer(noisy)
        block = play.coordinator.run.newest
        until(ticked(lambda: block(1).version == 1), patience=600)
        found = {b["worker"]: b["result"] for b in bodies(play.coordinator, "check")}
        assert found == {honest.id: "same", lazy.id: "differs", noisy.id: "differs"}
        (version,) = versions(play.coordinator)
        assert len(version["parts"]) == 1
        assert {why.split(":")[0] for why in version["dropped"].values()} == {"not_trained"}
        assert standing(honest).checked == 1 and not standing(honest).faults
        assert standing(lazy).faults == standing(noisy).faults == 1
        said = [e for e in read_events(tmp_path / EVENTS) if e["kind"] == "refused"]
        assert {(e["worker"], e["code"]) for e in said} == {
            (worker.id, "not_trained") for worker in (lazy, noisy)
        }

        child = made[0].pid or 0
        os.kill(child, signal.SIGSTOP)
        play.pass_time(SECONDS)
        play.answer(honest, work)
        play.answer(noisy)
        play.answer(lazy, work)
        play.coordinator.tick()
        assert len(versions(play.coordinator)) == 1, "it waits"
        play.pass_time(2 * SECONDS)
        assert len(versions(play.coordinator)[-1]["parts"]) == 3, "not for long"
        os.kill(child, signal.SIGCONT)
        until(ticked(lambda: standing(lazy).checked == 1), patience=600)
        assert standing(honest).checked == 2 and standing(noisy).faults == 1
        said = [e for e in read_events(tmp_path / EVENTS) if e["kind"] == "refused"]
        assert "merged before" in said[-1]["sentence"] and said[-1]["worker"] == noisy.id
    outcome = audit(open_folder(tmp_path))
    assert outcome.ok and outcome.dropped == 2, outcome.findings


def test_who_has_delivered_is_checked_less() -> None:
    new, proven = Standing(), Standing(merged=PROBATION)
    old, faulty = Standing(merged=ESTABLISHED), Standing(merged=ESTABLISHED, faults=1)
    chances = [standing.check_chance(0.03) for standing in (old, proven, new, faulty)]
    assert chances == pytest.approx([0.01, 0.03, 0.3, 0.3])
    assert new.check_chance(0.5) == 1.0 and new.check_chance(0.0) == 0.0


HARM = {
    "scale-100": "too_long",
    "flip-100": "too_long",
    "sign-flip": "worse",
    "label-flip": "no_gain",
}


def test_harm_of_any_length_is_left_out(playing: Playing, files: Path) -> None:
    """A4: four of seven members send a hundred times their update, minus that, minus once that, or
    what they learn of text in which every token is another one."""
    everybody = [*HARM, None, None, None]
    with playing(ProcessJudge, replicas=7, min_replicas=7, task_steps=8) as play:
        members = {play.newcomer().id: name for name in everybody}
        for worker in play.members:
            play.answer(worker, partial(trained, files / "corpus", members[worker.id]))
        (version,) = versions(play.coordinator)
        senders = {u["id"]: members[u["worker"]] for u in bodies(play.coordinator, "update")}
        reasons = {senders[u]: why.split(":")[0] for u, why in version["dropped"].items()}
        # At the beginning any text teaches a little; how much of it the judge sees is chance.
        reasons |= {"label-flip": "no_gain"} if reasons["label-flip"] == "worse" else {}
        assert reasons == HARM and len(version["parts"]) == 3


def test_the_table_of_attacks_names_the_test_of_each() -> None:
    rows = re.findall(r"^\| (A\d+) \|.*\| (.*) \|$", (ROOT / "SECURITY.md").read_text(), re.M)
    named = {test: number for number, tests in rows for test in re.findall(r"`(\w+)`", tests)}
    assert set(named.values()) == {number for number, _ in rows}
    numbered = {
        re.findall(r"def (\w+)\(", text[: found.start()])[-1]: found[1]
        for text in (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
        for found in re.finditer(r'^    """(A\d+): ', text, re.M)
    }
    assert numbered == named
