"""Turns what a run commits into events: ledger entries, workers, refusals. Decides nothing."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blocktrain.coordinator.history import FAULTS, Body
from blocktrain.coordinator.rounds import is_alive, target_replicas
from blocktrain.coordinator.state import standing_of
from blocktrain.protocol.events import Attempt
from blocktrain.protocol.messages import PROTOCOL
from blocktrain.protocol.refusals import Refused
from blocktrain.watch.feed import Feed
from blocktrain.watch.notices import MISSED, REFUSALS, Notices

if TYPE_CHECKING:
    from blocktrain.coordinator.run import TrainingRun

FOLD_SECONDS = 1.0  # refusals of one code and worker within this time are one event
LOOK_SECONDS = 1.0  # between two checks for lost and returned workers
ABSENT = ("left", "lost", "kicked")
EVENT_KINDS = (
    "join",
    "lease",
    "expire",
    "update",
    "version",
    "round",
    "kick",
    "finish",
    "check",
)  # entries of the ledger that are events


@dataclass
class _Fold:
    since: float
    sentence: str
    block: int
    count: int = 0


class Narrator:
    """Observes a run for a feed. The caller holds the run's lock, except for `on_refusal`."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self._notices = Notices()
        self._folds: dict[tuple[str, str], _Fold] = {}
        self._mutex = threading.Lock()  # of the folds: refusals come from other threads
        self._last_look = self._since = 0.0
        self._barred: set[str] = set()  # who sits out some rounds

    def on_start(self, run: TrainingRun) -> None:
        """A run that is new or resumed."""
        config, more = run.config, {} if self.feed.empty else {"restart": True}
        parent = run.facts.parent
        origin = {"parent": parent.run or parent.model} if parent else {}
        self._since, self._barred = run.clock.monotonic(), set(run.history.barred)
        self.feed.put(
            "run",
            run=run.id,
            fingerprint=run.facts.fingerprint,
            corpus=run.facts.corpus.name,
            blocks=config.blocks,
            fusion=config.fusion,
            steps=config.steps,
            fusion_steps=config.steps_of(config.fusion) if config.fusion else None,
            compose=config.compose,
            compression=run.policy.compression,
            version_compression=run.policy.version_compression,
            task_seconds=run.policy.task_seconds,
            protocol=PROTOCOL,
            **origin,
            **more,
        )

    def on_commit(self, run: TrainingRun, kind: str, body: Body) -> None:
        """An entry of the ledger; the run's state is the one after it."""
        if kind in EVENT_KINDS:
            getattr(self, f"_{kind}")(run, body)
        if run.history.barred != self._barred:
            self._tell_standings(run)

    def _tell_standings(self, run: TrainingRun) -> None:
        """Who sits out some rounds from now on, and who does not any more."""
        before, self._barred = self._barred, set(run.history.barred)
        for worker in sorted(before ^ self._barred):
            standing = run.history.standings[worker]
            reason = f"it gets tasks of block {standing.block} again"
            if standing.barred:
                rounds = f"{standing.barred} rounds of block {standing.block}"
                reason = f"{standing.faults} of its updates were left out; it sits out {rounds}"
            name = "quarantined" if standing.barred else "back"
            known = {"worker": worker, "block": standing.block}
            self.feed.put("standing", standing=name, reason=reason, **known)

    def on_leave(self, run: TrainingRun, worker: str) -> None:
        """A worker said that it leaves."""
        self._worker(run, worker, "left")

    def _worker(self, run: TrainingRun, worker: str, state: str, reason: str = "") -> None:
        name, device = run.worker_name(worker), run.device(worker)
        self.feed.put("worker", worker=worker, name=name, device=device, state=state, reason=reason)

    def _join(self, run: TrainingRun, body: Body) -> None:
        self._worker(run, body["worker"], "joined")

    def _kick(self, run: TrainingRun, body: Body) -> None:
        self._worker(run, body["worker"], "kicked", body["reason"])

    def _finish(self, _: TrainingRun, body: Body) -> None:
        self.feed.put("finish", reason=body["reason"])

    def _lease(self, run: TrainingRun, body: Body) -> None:
        order = body["order"]
        now, current = run.clock.monotonic(), run.state.blocks[order["block"]].round
        self.feed.put(
            "task",
            worker=body["worker"],
            block=order["block"],
            task=order["task"],
            base=order["base"],
            steps=order["steps"],
            deadline=None if current.deadline is None else _moment(current.deadline - now),
            target=target_replicas(now, run.state, run.options, order["block"]),
        )

    def _expire(self, run: TrainingRun, body: Body) -> None:
        lease = run.state.leases.get(body["task"])
        block = lease.block if lease else 0
        version = run.state.blocks[block].version if lease else 0
        known = {"worker": body["worker"], "task": body["task"]}
        standing = standing_of(run.state, body["worker"])
        if standing.missed >= MISSED and not standing.proven:
            missed = f"worker {body['worker'][:8]} has taken {standing.missed} tasks in a row"
            sentence = f"{missed} and answered none: no round waits for it"
            self._notice(run.clock.monotonic(), "hold", body["worker"], sentence)
        self.feed.put(
            "round",
            block=block,
            version=version,
            outcome="expired",
            deadline=None,
            reason=body["reason"],
            **known,
        )

    def _update(self, run: TrainingRun, body: Body) -> None:
        submission = body["submission"]
        same = ("worker", "block", "task", "base", "staleness", "weight", "steps", "tokens")
        self.feed.put(
            "update",
            **{name: body[name] for name in same},
            version=run.state.blocks[body["block"]].version,
            bytes=body["size"],
            loss_before=submission["loss_before"],
            loss_after=submission["loss_after"],
            seconds=round(body["seconds"] or 0.0, 3),
            sentence=body.get("sentence", ""),
        )

    def _notice(self, now: float, attempt: Attempt, worker: str, sentence: str) -> None:
        if self._notices.is_due(now, attempt, worker):
            self.feed.put("notice", attempt=attempt, worker=worker, sentence=sentence)

    def _left_out(self, run: TrainingRun, block: int) -> None:
        """Whose updates the round that was just closed did without, and why."""
        for worker, why in run.history.left_out:
            code, _, sentence = why.partition(": ")
            self.feed.put(
                "refused", code=code, sentence=sentence, worker=worker, block=block, count=1
            )
            if code in FAULTS:
                left_out = f"an update of worker {worker[:8]} was left out of block {block}"
                self._notice(run.clock.monotonic(), "harm", worker, f"{left_out}: {sentence}")

    def _check(self, run: TrainingRun, body: Body) -> None:
        """Too late for its round: the update is part of a version. Others are left out of it."""
        if body["result"] != "differs" or body["update"] in run.history.differing:
            return
        sentence = f"{body['reason']}; it was merged before that was known"
        known = {"worker": body["worker"], "block": body["block"]}
        self.feed.put("refused", code="not_trained", sentence=sentence, **known, count=1)

    def _round(self, run: TrainingRun, body: Body) -> None:
        if body.get("dropped"):
            self._left_out(run, body["block"])
        # One that was closed empty has no clock until its next task.
        deadline = _moment(body["seconds"]) if body["event"] == "extended" else None
        self.feed.put(
            "round",
            block=body["block"],
            version=body["version"],
            outcome=body["event"],
            deadline=deadline,
            reason=body["reason"],
        )

    def _version(self, run: TrainingRun, body: Body) -> None:
        self.feed.put(
            "version",
            **{name: body[name] for name in ("block", "version", "steps", "tokens", "loss")},
            updates=len(body["parts"]),
            clipped=sum(part["scale"] < 1 for part in body["parts"]),
            dropped=body["dropped"],
            reason=body["reason"],
            bytes_in=run.traffic.total[0],
            bytes_out=run.traffic.total[1],
            weights=body["weights"]["sha256"],
            length=body["weights"]["length"],
        )
        if body["dropped"]:
            self._left_out(run, body["block"])

    def on_refusal(self, error: Refused, worker: str, block: int) -> None:
        """Count a refusal. It becomes an event later, because anyone may cause many."""
        with self._mutex:
            fold = self._folds.setdefault(
                (error.code, worker), _Fold(time.monotonic(), error.sentence, block)
            )
            fold.count += 1

    def look(self, run: TrainingRun, now: float) -> None:
        """Report lost workers, workers that are back, and refusals."""
        self.flush(FOLD_SECONDS, now)
        if now - self._last_look < LOOK_SECONDS:
            return
        self._last_look = now
        if problem := run.quotas.use.problem:
            self._notice(now, "disk", "", f"no updates are taken: {problem}")
        if len(self.feed.states) > 2 * len(run.known) + 64:
            self.feed.states = {w: s for w, s in self.feed.states.items() if w in run.known}
        for name, worker in run.state.workers.items():
            state = self.feed.states.get(name)
            alive = is_alive(now, run.state, run.options, name)
            # A restart marks all workers as seen just before it.
            if alive and state in ("left", "lost") and worker.seen >= self._since:
                self._worker(run, name, "back")
            elif not alive and not worker.kicked and state not in ABSENT:
                self._worker(run, name, "lost", f"nothing heard for {now - worker.seen:.0f} s")

    def flush(self, older: float = 0.0, now: float | None = None) -> None:
        """Publish the refusals that began so many seconds ago."""
        if not self._folds:
            return
        with self._mutex:
            due = [
                key for key, fold in self._folds.items() if time.monotonic() - fold.since >= older
            ]
            folds = [(*key, self._folds.pop(key)) for key in due]
        for code, worker, fold in folds:
            self.feed.put(
                "refused",
                code=code,
                sentence=fold.sentence,
                worker=worker,
                block=fold.block,
                count=fold.count,
            )
            if now is not None and (attempt := REFUSALS.get(code)):
                self._notice(now, attempt, worker, f"refused: {fold.sentence}")

    def close(self) -> None:
        """Publish the pending refusals and close the log."""
        self.flush()
        self.feed.close()


def _moment(seconds: float) -> float:
    """So many seconds from now, in unix time."""
    return round(time.time() + seconds, 3)
