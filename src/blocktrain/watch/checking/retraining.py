"""Has updates trained again in a process beside the coordinator."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any

from blocktrain.coordinator.checks import DrawnUpdate, RetrainResult
from blocktrain.coordinator.run import TrainingRun
from blocktrain.watch.child import Child

MODULE = "blocktrain.watch.checking.retrain"
SECONDS = 3600.0  # that an answer may take
NEAR, FAR = 0.35, 1.0
"""Of the length of a change. Weights that differ by a hundred-thousandth, as roundings of another
machine make them, came out up to 0.01 apart, by a thousandth 0.09, and three quarters of the steps
0.45 (one layer of width 64, 8 and 32 steps, int4). How far apart a GPU or many steps come out is
not measured: there only what has nothing to do with its task is found."""
NEAR_STEPS = 64


class ProcessRetrainer:
    """Asks `watch.checking.retrain`, one update after another."""

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
        try:
            answer = self._child.ask(self._question(check), SECONDS)
        except OSError as error:  # its process cannot be started
            answer = {"error": str(error)}
        last = check.chain[-1].submission
        is_like_here = self._run.history.devices.get(last.worker, "cpu") == "cpu"
        bound = NEAR if is_like_here and last.steps <= NEAR_STEPS else FAR
        result = _result(answer.get("distance"), answer.get("error", ""), bound)
        self._finished.put((check, result))

    def _question(self, check: DrawnUpdate) -> dict[str, Any]:
        run, tokenizer = self._run, self._run.facts.corpus.tokenizer
        return {
            "store": run.store.address,
            "config": dict(run.facts.config),
            "index": run.facts.corpus.index.sha256,
            "tokenizer": tokenizer.sha256 if tokenizer else None,
            "alone": run.policy.exclusive,
            "chain": [answer.model_dump_json() for answer in check.chain],
        }


def _result(distance: float | None, error: str, bound: float) -> RetrainResult:
    if distance is None or not math.isfinite(distance):
        return RetrainResult("unknown", 0.0, error or "it comes out without any change")
    if distance == 0:
        return RetrainResult("same", 0.0, "trained again to the same bytes")
    found = f"trained again, it comes out {distance:.2g} of its length away"
    return RetrainResult("near" if distance <= bound else "differs", distance, found)
