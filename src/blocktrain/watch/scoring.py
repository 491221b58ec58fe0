"""Scores a run's versions in the background, in a child process of low priority.

Nothing waits for it: if it is slow or dies, scores are missing, never updates.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from blocktrain.errors import BlockTrainError
from blocktrain.watch.child import Child
from blocktrain.watch.feed import Listener
from blocktrain.watch.server import WatchedCoordinator

MODULE = "blocktrain.watch.scorer"
SHARE = 1 / 6  # of the time that scoring may take, at most
MAX_FAILURES = 3  # in a row, before scoring is given up

ScoreRequest = dict[str, Any]


class ScoringThread:
    """Scores at once, then new versions with pauses in between, then the finished run.

    `share` is the part of a processor that it takes, at most: on a busy machine a score takes long,
    but costs the others no more. Without `whole_run` it begins with the first trained version after
    a pause, and leaves out the finished run, which is evaluated anyway.
    """

    def __init__(
        self,
        coordinator: WatchedCoordinator,
        score_bytes: int,
        report: Callable[[str], None] = lambda _: None,
        pause: float = 10.0,
        *,
        share: float = SHARE,
        whole_run: bool = True,
    ) -> None:
        self._coordinator, self._bytes, self._report = coordinator, score_bytes, report
        self._pause, self._share, self._whole_run = pause, share, whole_run
        self._news, self._settled, self._stopped = threading.Event(), threading.Event(), False
        self._listener = Listener(self._news.set, kinds=("version", "finish"))
        self._child = Child(MODULE)
        self._thread = threading.Thread(target=self._work, name="scores", daemon=True)

    @property
    def process(self) -> int | None:
        """The child's process id, if there is one."""
        return self._child.pid

    def start(self) -> None:
        """Start the thread."""
        self._coordinator.feed.listen(self._listener)
        self._thread.start()

    def settle(self, seconds: float) -> None:
        """Wait at most so long until the last versions of a finished run are scored."""
        self._settled.wait(seconds)

    def close(self) -> None:
        """End it and its process."""
        self._listener.closed = True
        self._stopped = True
        self._child.kill()
        self._news.set()
        if self._thread.ident is not None:
            self._thread.join(5)
        self._child.close()

    def _work(self) -> None:
        due, failures = 0.0 if self._whole_run else time.monotonic() + self._pause, 0
        scored: list[str] | None = None
        try:
            while (request := self._next(due, scored)) is not None:
                scored = request["weights"]
                answer = self._child.ask(request["ask"])
                cost = answer.pop("processor_seconds", 0.0)
                failures = failures + 1 if "error" in answer else 0
                if failures >= MAX_FAILURES and not self._stopped:
                    self._report(
                        f"scoring has stopped: {answer['error']}; the run goes on without scores"
                    )
                    return
                if failures:
                    scored = None
                else:
                    self._coordinator.feed.put("score", **answer, **request["event"])
                due = time.monotonic() + max(self._pause, cost / self._share - cost)
        except BlockTrainError:
            pass  # the run is being closed
        finally:
            self._settled.set()

    def _next(self, due: float, scored: list[str] | None) -> ScoreRequest | None:
        """Wait for the next request; None if there is nothing more to score."""
        while not self._stopped:
            self._news.clear()
            self._listener.take()
            over = self._coordinator.finished is not None
            if over and not self._whole_run:
                return None
            delay = due - time.monotonic()
            if delay > 0 and not over:
                self._news.wait(delay)
                continue
            request = self._request()
            untrained = not self._whole_run and not any(request["event"]["versions"].values())
            if request["weights"] != scored and not untrained:
                return request
            if over:
                self._settled.set()
            self._news.wait()
        return None

    def _request(self) -> ScoreRequest:
        run = self._coordinator.run
        with run.lock:
            newest = run.newest_versions()
            features = run.features_of(run.config.fusion) if run.config.fusion else ()
            run.held = tuple(pin.weights.sha256 for pin in (*newest, *features))
        tokenizer = run.facts.corpus.tokenizer
        bytes_in, bytes_out = run.traffic.total
        event: dict[str, Any] = {
            "versions": {str(version.block): version.version for version in newest},
            "steps": {str(block): state.steps for block, state in run.state.blocks.items()},
            "bytes_in": bytes_in,
            "bytes_out": bytes_out,
        }
        if features:
            event["features"] = {str(pin.block): pin.version for pin in features}
        return {
            "ask": {
                "store": run.store.address,
                "config": dict(run.facts.config),
                "index": run.facts.corpus.index.sha256,
                "tokenizer": tokenizer.sha256 if tokenizer else None,
                "bytes": self._bytes,
                "newest": {str(version.block): version.weights.sha256 for version in newest},
                "features": {str(pin.block): pin.weights.sha256 for pin in features},
            },
            "weights": [version.weights.sha256 for version in newest],
            "event": event,
        }
