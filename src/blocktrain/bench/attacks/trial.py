"""One run with attackers among its members, in one process.

Coordinator, rounds, judgement, merges and standings are the product's own, on a store in memory and
a clock that stands still. Members take turns, so a result does not depend on the machine. Honest
members read the same batches whether attackers are there or not: what differs is their effect.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from blocktrain.bench.attacks.member import attacking_payload
from blocktrain.bench.attacks.policies import ATTACKS, Attack, HonestUpdate
from blocktrain.clock import SimulatedClock
from blocktrain.config import Config
from blocktrain.coordinator.calls import Coordinator
from blocktrain.coordinator.merging.judge import Judged, Question
from blocktrain.coordinator.policy import Policy
from blocktrain.coordinator.run import TrainingRun
from blocktrain.errors import RunError
from blocktrain.learning.corpus.source import Source
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.evaluate import evaluate_alone
from blocktrain.learning.model import build_independent
from blocktrain.learning.shards import Batches, SequenceOrder, batches
from blocktrain.learning.tokenizer import tokenizer_of
from blocktrain.learning.train import Trainer, put_weights
from blocktrain.protocol import messages as m
from blocktrain.protocol.compression import decompress
from blocktrain.protocol.identity import identity_from_seed, new_nonce
from blocktrain.protocol.refusals import Refused
from blocktrain.protocol.tensors import Tensors, schema_of, unpack
from blocktrain.protocol.transfer import Plan, sha256, split
from blocktrain.runs.prepare import prepare
from blocktrain.store.memory import MemoryStore
from blocktrain.watch.checking.judge import MOST_SEQUENCES, judge_suspects
from blocktrain.watch.checking.judging import as_fields
from blocktrain.worker.task import BlockTraining

BLOCK = 1
PATIENCE = 200  # moments of a second that a round may take to close
Figures = dict[str, Any]


@dataclass(frozen=True)
class AttackTrial:
    """Who is there, and for how long. Attack "" is a clean run."""

    config: Config
    source: Source
    honest: int
    attackers: int
    attack: str
    defended: bool
    task_steps: int
    valid_tokens: int

    @property
    def turns(self) -> int:
        return self.config.steps // self.task_steps


class ProcessorTime:
    """Seconds of this process's processor time, by what they were spent on."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()

    def measure(self, name: str, work: Callable[[], Any]) -> Any:
        began = time.process_time()
        try:
            return work()
        finally:
            self.spent[name] += time.process_time() - began  # type: ignore[assignment]


class LocalJudge:
    """Judges as the coordinator's process does, in this one."""

    def __init__(self, run: TrainingRun, corpus: TokenCorpus, spent: ProcessorTime) -> None:
        self._run, self._corpus, self._spent = run, corpus, spent

    def judge(self, question: Question) -> list[Judged]:
        return self._spent.measure("judging", lambda: self._answer(question))

    def _answer(self, question: Question) -> list[Judged]:
        blobs, config = self._run.store.blobs, self._run.config
        judged = judge_suspects(config, blobs, self._corpus, as_fields(question))
        return [Judged(**verdict) for verdict in judged]

    def close(self) -> None: ...


@dataclass
class Tally:
    """What the ledger says of both kinds of members. An `Observer`."""

    honest: frozenset[str]
    merged: Counter[str] = field(default_factory=Counter)  # updates by kind of member
    left_out: dict[str, Counter[str]] = field(
        default_factory=lambda: {"honest": Counter(), "attackers": Counter()}
    )
    """By kind of member: codes of what did not count."""
    steps: int = 0  # of honest updates that were merged
    shares: list[float] = field(default_factory=list)  # of all attackers together, by version
    canary: int | None = None  # the last one that was revealed
    payloads: dict[str, str] = field(default_factory=dict)  # of the last version: by worker
    _updates: dict[str, tuple[str, int, str]] = field(default_factory=dict)

    def on_commit(self, run: TrainingRun, kind: str, body: Mapping[str, Any]) -> None:
        if kind == "update":
            self._updates[body["id"]] = body["worker"], body["steps"], body["payload"]
        elif kind == "version" and body["version"] > 0:
            self._merged(body)
        if kind in ("version", "round"):
            self.canary = body.get("canary", self.canary)
            for name, reason in body.get("dropped", {}).items():
                worker = self._updates[name][0]
                self.left_out[self.kind(worker)][reason.split(":")[0]] += 1

    def _merged(self, body: Mapping[str, Any]) -> None:
        attacking, self.payloads = 0.0, {}
        for part in body["parts"]:
            worker, steps, payload = self._updates[part["update"]]
            self.merged[self.kind(worker)] += 1
            self.payloads[worker] = payload
            if worker in self.honest:
                self.steps += steps
            else:
                attacking += part["share"]
        self.shares.append(attacking)

    def kind(self, worker: str) -> str:
        return "honest" if worker in self.honest else "attackers"

    def on_start(self, run: TrainingRun) -> None: ...

    def on_leave(self, run: TrainingRun, worker: str) -> None: ...

    def on_refusal(self, error: Refused, worker: str, block: int) -> None: ...

    def look(self, run: TrainingRun, now: float) -> None: ...

    def close(self) -> None: ...


class TurnMember:
    """A member that takes its turn: a task, its training, its update."""

    def __init__(self, number: int, trial: AttackTrial, corpus: TokenCorpus) -> None:
        self._number, self._trial, self._corpus = number, trial, corpus
        self.identity = identity_from_seed((1 + number).to_bytes(32, "big"))
        self.training = BlockTraining(Trainer(trial.config, BLOCK))
        self._turn = 0

    def join(self, coordinator: Coordinator) -> None:
        hello = m.Join(
            protocol=m.PROTOCOL,
            public_key=self.identity.public_key,
            name=f"member {self._number}",
            device="cpu",
            memory=1 << 30,
            speed=0.0,
            nonce=new_nonce(),
            time=0,
        )
        coordinator.join(self.identity.sign(hello))

    def take(self, coordinator: Coordinator) -> m.Task | None:
        """Its task of this turn; none while it has to wait."""
        request = m.TaskRequest(
            run=coordinator.run.id,
            worker=self.identity.worker,
            fingerprint=self._trial.config.fingerprint,
            speed=0.0,
            nonce=new_nonce(),
        )
        found = coordinator.next_task(self.identity.sign(request)).next
        self._turn += 1
        return found if isinstance(found, m.Task) else None

    def answer(self, coordinator: Coordinator, task: m.Task, tally: Tally) -> None:
        """Train, send, and keep what error feedback needs if the update was accepted."""
        store = coordinator.run.store
        self.training.begin(task, lambda blob: unpack(store.blobs.read(blob.sha256)))
        # The same batches in every trial, whatever else reads the corpus.
        first = (self._turn - 1) * self._trial.honest + self._number
        self.training.trainer.shift = first * self._trial.task_steps - task.start_step
        losses = self.train(task, tally)
        payload, keep = self.payload(coordinator, task, tally)
        for index, chunk in enumerate(split(payload, task.chunk_bytes)):
            coordinator.put_chunk(task.task, index, task.ticket, chunk, sha256(chunk))
        coordinator.intake.accept(self._submission(coordinator.run.id, task, payload, losses))
        keep()

    def train(self, task: m.Task, tally: Tally) -> list[float]:
        trainer = self.training.trainer
        steps = trainer.run(self.batches(task, tally), task.start_step + task.steps)
        return [loss for _, loss in steps]

    def batches(self, task: m.Task, tally: Tally) -> Batches:
        return self._corpus.batches(self._trial.config, BLOCK)

    def payload(
        self, coordinator: Coordinator, task: m.Task, tally: Tally
    ) -> tuple[bytes, Callable[[], None]]:
        """What it sends, and what it does when that was accepted."""
        state, payload = self.training.finish(task)

        def keep() -> None:
            self.training.residual, self.training.origin = state.residual, state.origin

        return payload, keep

    def _submission(
        self, run: str, task: m.Task, payload: bytes, losses: list[float]
    ) -> m.Submission:
        c = self._trial.config
        said = m.Submission(
            run=run,
            worker=self.identity.worker,
            task=task.task,
            fence=task.fence,
            block=task.block,
            base=task.base,
            payload_sha256=sha256(payload),
            payload_length=len(payload),
            chunks=Plan(len(payload), task.chunk_bytes).chunks,
            steps=task.steps,
            tokens=task.steps * c.batch * c.context,
            loss_before=losses[0],
            loss_after=losses[-1],
            continued=m.Lineage(),
            lineage=self.training.origin.lineage or "0" * 64,
            nonce=new_nonce(),
            time=0,
        )
        return self.identity.sign(said)


class AttackingMember(TurnMember):
    """Trains as its row of `ATTACKS` says, and sends what that makes of the update."""

    def __init__(
        self, number: int, trial: AttackTrial, corpus: TokenCorpus, attack: Attack
    ) -> None:
        super().__init__(number, trial, corpus)
        self._attack, self._sent = attack, 0
        self._draw = np.random.default_rng([trial.config.seed, number])

    def batches(self, task: m.Task, tally: Tally) -> Batches:
        config = self._trial.config
        read = super().batches(task, tally)
        if self._attack.reads_canary and tally.canary is not None:
            order = SequenceOrder(self._corpus.index, config.context, tally.canary, BLOCK)
            known, count = batches(order, config.batch, self._corpus.open), MOST_SEQUENCES
            read = lambda number: known(number % max(1, count // config.batch))  # noqa: E731
        return lambda number: self._attack.text(read(number), config.vocabulary)

    def payload(
        self, coordinator: Coordinator, task: m.Task, tally: Tally
    ) -> tuple[bytes, Callable[[], None]]:
        new, base = self.training.trainer.weights(), self.training.base
        delta: Tensors = {name: np.asarray(new[name] - base[name]) for name in new}
        blobs = coordinator.run.store.blobs
        others = [
            decompress(blobs.read(name), schema_of(delta), method=task.compression)
            for worker, name in tally.payloads.items()
            if worker in tally.honest and self._attack.reads_others
        ]
        update = HonestUpdate(
            delta, self._sent, self._draw, self._trial.config.seed, others, dict(base)
        )
        self._sent += 1
        return attacking_payload(self._attack.change(update), task.compression), lambda: None


def run_trial(trial: AttackTrial, on_turn: Callable[[float], None] = lambda _: None) -> Figures:
    """The figures of one run."""
    corpus, spent = trial.source.open(tokenizer_of(trial.config)), ProcessorTime()
    members = [TurnMember(n, trial, corpus) for n in range(trial.honest)]
    tally = Tally(frozenset(x.identity.worker for x in members))
    for number in range(trial.attackers):
        row = ATTACKS[trial.attack]
        members.append(AttackingMember(trial.honest + number, trial, corpus, row))
    coordinator = Coordinator(
        MemoryStore(),
        identity_from_seed(bytes(32)),
        SimulatedClock(1000.0),
        tally,
        lambda run: LocalJudge(run, corpus, spent),
    )
    policy = Policy(task_steps=trial.task_steps, undefended=not trial.defended)
    with tempfile.TemporaryDirectory(prefix="blocktrain-attacks-") as folder:
        prepare(trial.config, trial.source, Path(folder))
        coordinator.begin(trial.config, policy, corpus.name, Path(folder))
    try:
        for member in members:
            member.join(coordinator)
        ruined = _take_turns(trial, coordinator, members, tally, spent, on_turn)
        return _figures(trial, coordinator, corpus, tally, spent, ruined)
    finally:
        coordinator.close()


def _take_turns(
    trial: AttackTrial,
    coordinator: Coordinator,
    members: list[TurnMember],
    tally: Tally,
    spent: ProcessorTime,
    on_turn: Callable[[float], None],
) -> str:
    """Until honest members have made their steps, or twice as many turns have passed; why it
    ended early, if the model is ruined."""
    wanted = trial.honest * trial.task_steps * trial.turns
    for _ in range(2 * trial.turns):
        if coordinator.finished is not None or tally.steps >= wanted:
            break
        tasks = [(x, spent.measure("coordinator", lambda: x.take(coordinator))) for x in members]  # noqa: B023
        for member, task in tasks:
            if task is None:
                continue
            try:
                spent.measure("training", lambda: member.answer(coordinator, task, tally))  # noqa: B023
            except Refused as error:
                tally.left_out[tally.kind(member.identity.worker)][str(error.code)] += 1
            except RunError as error:  # honest training itself has failed
                if member.identity.worker in tally.honest:
                    return str(error)
        spent.measure("coordinator", lambda: _close_round(coordinator))
        on_turn(tally.steps / wanted)
    return ""


def _close_round(coordinator: Coordinator) -> None:
    """As time passes: a member that was refused must not hold up the others."""
    clock, run = coordinator.run.clock, coordinator.run
    version = run.newest(BLOCK).version
    for _ in range(PATIENCE):
        coordinator.tick()
        if run.newest(BLOCK).version > version or not run.state.blocks[BLOCK].round.updates:
            return
        clock.sleep(1.0)


def _figures(
    trial: AttackTrial,
    coordinator: Coordinator,
    corpus: TokenCorpus,
    tally: Tally,
    spent: ProcessorTime,
    ruined: str,
) -> Figures:
    weights = unpack(coordinator.run.store.blobs.read(coordinator.run.newest(BLOCK).weights.sha256))
    block = build_independent(trial.config, BLOCK)
    put_weights(block, weights)
    ce = evaluate_alone(block, corpus.valid[: trial.valid_tokens], trial.config.context)
    seconds = {name: float(found) for name, found in spent.spent.items()}
    judging = seconds.get("judging", 0.0)
    total = seconds["training"] + seconds["coordinator"]
    return {
        "ce": ce if math.isfinite(ce) else None,
        "ruined": ruined,
        "versions": coordinator.run.newest(BLOCK).version,
        "honest_steps": tally.steps,
        "merged": dict(tally.merged),
        "left_out": {kind: dict(codes) for kind, codes in tally.left_out.items()},
        "attackers_share": float(np.mean(tally.shares)) if tally.shares else 0.0,
        "seconds": {name: round(found, 3) for name, found in seconds.items()},
        "checking": judging / total,
    }
