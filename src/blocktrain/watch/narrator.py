"""Turns what a run commits into events: ledger entries, workers, refusals. Decides nothing."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blocktrain.coordinator.rounds import is_alive, target_replicas
from blocktrain.protocol.messages import PROTOCOL
from blocktrain.protocol.refusals import Refused
from blocktrain.watch.feed import Feed

if TYPE_CHECKING:
    from blocktrain.coordinator.run import TrainingRun

FOLD_SECONDS = 1.0  # refusals of one code and worker within this time are one event
LOOK_SECONDS = 1.0  # how often it is looked who is lost or back
GONE = ("left", "lost", "kicked")
TOLD = (
    "join",
    "lease",
    "expire",
    "update",
    "version",
    "round",
    "kick",
    "finish",
)  # entries of the ledger that are events

Body = dict[str, Any]


@dataclass
class _Fold:
    since: float
    sentence: str
    block: int
    count: int = 0


class Narrator:
    """Observes a run for a feed. The caller holds the run's lock, except for `refused`."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self._folds: dict[tuple[str, str], _Fold] = {}
        self._mutex = threading.Lock()  # of the folds: refusals come from the door
        self._looked = self._since = 0.0

    def started(self, run: TrainingRun) -> None:
        """A run, new or taken up again."""
        config, again = run.config, {} if self.feed.empty else {"restart": True}
        self._since = run.clock.monotonic()
        self.feed.put(
            "run",
            run=run.id,
            fingerprint=run.facts.fingerprint,
            corpus=run.facts.corpus.name,
            blocks=config.blocks,
            fusion=config.fusion,
            steps=config.steps,
            compose=config.compose,
            compression=run.policy.compression,
            task_seconds=run.policy.task_seconds,
            protocol=PROTOCOL,
            **again,
        )

    def committed(self, run: TrainingRun, kind: str, body: Body) -> None:
        """An entry of the ledger; the run's state is the one after it."""
        if kind in TOLD:
            getattr(self, f"_{kind}")(run, body)

    def left(self, run: TrainingRun, worker: str) -> None:
        """A worker went of its own will."""
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
        said = body["submission"]
        same = ("worker", "block", "task", "base", "staleness", "weight", "steps", "tokens")
        self.feed.put(
            "update",
            **{name: body[name] for name in same},
            version=run.state.blocks[body["block"]].version,
            bytes=body["size"],
            loss_before=said["loss_before"],
            loss_after=said["loss_after"],
            seconds=round(body["seconds"] or 0.0, 3),
            sentence=body.get("sentence", ""),
        )

    def _round(self, _: TrainingRun, body: Body) -> None:
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

    def refused(self, error: Refused, worker: str, block: int) -> None:
        """Count a refusal. It becomes an event later, because a stranger may cause many."""
        with self._mutex:
            fold = self._folds.setdefault(
                (error.code, worker), _Fold(time.monotonic(), error.sentence, block)
            )
            fold.count += 1

    def look(self, run: TrainingRun, now: float) -> None:
        """Report what passes with time: lost workers, workers that are back, refusals."""
        self.flush(FOLD_SECONDS)
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        for name, worker in run.state.workers.items():
            told = self.feed.states.get(name)
            alive = is_alive(now, run.state, run.options, name)
            if (
                alive and told in ("left", "lost") and worker.seen >= self._since
            ):  # a restart takes all to have been seen just before
                self._worker(run, name, "back")
            elif not alive and not worker.kicked and told not in GONE:
                self._worker(run, name, "lost", f"nothing heard for {now - worker.seen:.0f} s")

    def flush(self, older: float = 0.0) -> None:
        """Tell of the refusals that began so many seconds ago."""
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

    def close(self) -> None:
        """The run is in other hands now."""
        self.flush()
        self.feed.close()


def _moment(seconds: float) -> float:
    """So many seconds from now, in unix time."""
    return round(time.time() + seconds, 3)
