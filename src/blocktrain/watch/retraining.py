"""Has updates trained again in a process beside the coordinator."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue

from blocktrain.coordinator.checks import DrawnUpdate, RetrainResult
from blocktrain.coordinator.run import TrainingRun
from blocktrain.watch.child import Child

MODULE = "blocktrain.watch.retrain"
SECONDS = 3600.0  # that an answer may take
NEAR = 0.35
"""Of the length of a change. Weights that differ by a hundred-thousandth, as roundings of another
machine make them, came out up to 0.01 apart, by a thousandth 0.09, and three quarters of the steps
0.45 (one layer of width 64, 8 and 32 steps, int4)."""


class ProcessRetrainer:
    """Asks `watch.retrain`, one update after another."""

    def __init__(self, run: TrainingRun) -> None:
        self._run, self._child = run, Child(MODULE)
        self._asker = ThreadPoolExecutor(1, "retrainer")
        self._finished: SimpleQueue[tuple[DrawnUpdate, RetrainResult]] = SimpleQueue()

    @property
    def pid(self) -> int | None:
        """Its process, if it runs."""
        return self._child.pid

    def start(self, check: DrawnUpdate) -> None:
        """Ask, after what was asked before."""
        self._asker.submit(self._ask, check)

    def finished(self) -> list[tuple[DrawnUpdate, RetrainResult]]:
        """What was answered since the last call."""
        found: list[tuple[DrawnUpdate, RetrainResult]] = []
        try:
            while True:
                found.append(self._finished.get_nowait())
        except Empty:
            return found

    def close(self) -> None:
        self._child.kill()
        self._asker.shutdown(cancel_futures=True)
        self._child.close()

    def _ask(self, check: DrawnUpdate) -> None:
        run, tokenizer = self._run, self._run.facts.corpus.tokenizer
        question = {
            "store": run.store.address,
            "config": dict(run.facts.config),
            "index": run.facts.corpus.index.sha256,
            "tokenizer": tokenizer.sha256 if tokenizer else None,
            "alone": run.policy.exclusive,
            "chain": [answer.model_dump_json() for answer in check.chain],
        }
        answer = self._child.ask(question, SECONDS)
        self._finished.put((check, _result(answer.get("distance"), answer.get("error", ""))))


def _result(distance: float | None, error: str) -> RetrainResult:
    if distance is None or not math.isfinite(distance):
        return RetrainResult("unknown", 0.0, error or "it comes out without any change")
    if distance == 0:
        return RetrainResult("same", 0.0, "trained again to the same bytes")
    found = f"trained again, it comes out {distance:.2g} of its length away"
    return RetrainResult("near" if distance <= NEAR else "differs", distance, found)
