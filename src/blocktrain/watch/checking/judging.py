"""Has updates judged in a process beside the coordinator, on text that nobody could know."""

from __future__ import annotations

from typing import Any

from blocktrain.coordinator.merging.judge import Judged, Question
from blocktrain.coordinator.run import TrainingRun
from blocktrain.errors import StorageFailed
from blocktrain.watch.child import Child

MODULE = "blocktrain.watch.checking.judge"
SECONDS = 600.0  # that an answer may take for the weights before, and for each suspect
TRIES = 3


def as_fields(question: Question) -> dict[str, Any]:
    """A question as the process reads it."""
    return {
        "block": question.block,
        "seed": question.seed,
        "weights": question.weights,
        "features": {str(pin.block): pin.weights.sha256 for pin in question.features},
        "suspects": [vars(suspect) for suspect in question.suspects],
    }


class ProcessJudge:
    """Asks `watch.checking.judge`. Without its answer no round can be closed."""

    def __init__(self, run: TrainingRun) -> None:
        self._run, self._child = run, Child(MODULE)

    def judge(self, question: Question) -> list[Judged]:
        run, tokenizer = self._run, self._run.facts.corpus.tokenizer
        asked: dict[str, Any] = {
            "store": run.store.address,
            "config": dict(run.facts.config),
            "index": run.facts.corpus.index.sha256,
            "tokenizer": tokenizer.sha256 if tokenizer else None,
            **as_fields(question),
        }
        seconds = SECONDS * (1 + len(question.suspects))
        for _ in range(TRIES):
            answer = self._child.ask(asked, seconds)
            if "error" not in answer:
                return [Judged(**verdict) for verdict in answer["judged"]]
        raise StorageFailed(
            f"updates cannot be judged ({answer['error']}); every update that was acknowledged is "
            "stored: start the coordinator again"
        )

    def close(self) -> None:
        self._child.close()
