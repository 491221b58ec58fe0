"""Updates that are trained again beside the coordinator: which ones, and what follows from it.

An update is drawn when it is stored, so nobody knows beforehand. Only what is public can be trained
again: its chain of optimizer states must begin with a task that continued nothing. Updates with a
longer chain are left alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Container
from dataclasses import dataclass
from statistics import median
from typing import Literal, Protocol

from blocktrain.coordinator.run import Note, TrainingRun, note, short
from blocktrain.coordinator.state import CloseRound, standing_of
from blocktrain.protocol.ledger import CheckFacts, UpdateBody, read_body

MOST_RUNNING = 8  # checks that have begun; no more are drawn meanwhile
MOST_STEPS = 1000  # of a chain: roundings of another machine add up, and it takes time
PATIENCE = 1.0  # how long a round waits for its checks, in usual lengths of a task


@dataclass(frozen=True)
class DrawnUpdate:
    """An update that was drawn, after the updates whose states it continues."""

    update: str
    seed: int
    chance: float
    chain: tuple[UpdateBody, ...]


@dataclass(frozen=True)
class RetrainResult:
    """How it came out."""

    result: Literal["same", "near", "differs", "unknown"]
    distance: float
    reason: str


class Retrainer(Protocol):
    """Trains updates again, one after another. No call waits."""

    def start(self, check: DrawnUpdate) -> None: ...

    def finished(self) -> list[tuple[DrawnUpdate, RetrainResult]]: ...

    def close(self) -> None: ...


class UpdateChecks:
    """The checks of a run. The caller holds its lock."""

    def __init__(self, run: TrainingRun, retrainer: Retrainer | None) -> None:
        self._run, self._retrainer = run, retrainer
        self._running: dict[str, int] = {}  # block by update
        self._finished: list[tuple[DrawnUpdate, RetrainResult]] = []  # not recorded yet
        self._held: dict[int, float] = {}  # rounds that wait, and since when

    def consider(self, update: str) -> None:
        """Draw whether an update that was just stored is trained again."""
        run = self._run
        answer = run.history.waiting.get(update)
        trusting = not run.options.defences or not run.policy.retrain_share
        if self._retrainer is None or trusting or answer is None:
            return
        if update in self._running or len(self._running) >= MOST_RUNNING:
            return
        chance = standing_of(run.state, answer[0].worker).check_chance(run.policy.retrain_share)
        seed = secrets.randbits(32)
        if seed >= chance * 2**32 or not (chain := self._chain(answer[0].task, answer[0].worker)):
            return
        self._running[update] = answer[0].block
        self._retrainer.start(DrawnUpdate(update, seed, chance, chain))

    def _chain(self, task: int, worker: str) -> tuple[UpdateBody, ...]:
        """The update and all that it continues, oldest first. Empty: not all of it is at hand."""
        store, entries = self._run.store, dict(self._run.history.tasks.get(worker, ()))
        found: dict[int, UpdateBody] = {}
        open_tasks = [task]
        while open_tasks:
            if (wanted := open_tasks.pop()) in found:
                continue
            if wanted not in entries:
                return ()
            (entry,) = store.ledger(entries[wanted] - 1, 1)
            found[wanted] = read_body(UpdateBody, entry)
            continued = found[wanted].submission.continued
            before = (t for t in (continued.optimizer, continued.residual) if t is not None)
            open_tasks += [t for t in before if entries.get(t, 0) < entries[wanted]]
        if sum(answer.submission.steps for answer in found.values()) > MOST_STEPS:
            return ()
        pins = (pin for answer in found.values() for pin in answer.order.versions)
        if any(pin.weights.sha256 not in self._run.history.public for pin in pins):
            return ()  # too old: these weights are not kept whole any more
        return tuple(found[t] for t in sorted(found, key=entries.__getitem__))

    def collect(self, claimed: Container[int]) -> None:
        """Record what has come out, but not while a round that might use it is being closed."""
        if self._retrainer is None:
            return
        notes: list[Note] = []
        self._finished += self._retrainer.finished()
        due = [one for one in self._finished if self._running[one[0].update] not in claimed]
        for check, found in due:
            self._finished.remove((check, found))
            del self._running[check.update]
            last = check.chain[-1].submission
            facts = CheckFacts(
                update=check.update,
                worker=last.worker,
                block=last.block,
                seed=check.seed,
                chance=check.chance,
                result=found.result,
                distance=found.distance,
                reason=short(found.reason),
            )
            notes.append(note("check", facts))
        if notes:
            self._run.save(self._run.state, notes)

    def hold(self, now: float, action: CloseRound) -> bool:
        """Whether a round that is due waits for a check of one of its updates.

        Not if all are of one worker: it would only lose time, and its fault is found afterwards.
        """
        waiting = self._run.history.waiting
        workers = {waiting[update][0].worker for update in action.updates}
        if len(workers) < 2 or not any(update in self._running for update in action.updates):
            self._held.pop(action.block, None)
            return False
        since = self._held.setdefault(action.block, now)
        usual = self._run.state.blocks[action.block].task_seconds
        if usual and now - since < PATIENCE * median(usual):
            return True
        del self._held[action.block]  # it is closed now
        return False

    def is_held(self, block: int) -> bool:
        """Whether a round waits for checks: other tasks go on meanwhile."""
        return block in self._held and block in self._running.values()

    def close(self) -> None:
        if self._retrainer is not None:
            self._retrainer.close()
