"""What is due: leases expire, rounds are extended and closed.

A closed round makes its updates the next version of the block, without the run's lock.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from blocktrain.clock import Clock
from blocktrain.coordinator import state
from blocktrain.coordinator.checks import Retrainer, UpdateChecks
from blocktrain.coordinator.merging.judge import Judge
from blocktrain.coordinator.merging.round import (
    Round,
    RoundOutcome,
    guard_version,
    merge_round,
    store_outcome,
)
from blocktrain.coordinator.rounds import advance_block, decide, decide_round, round_length
from blocktrain.coordinator.run import Note, TrainingRun, note, short
from blocktrain.errors import BlockTrainError, StorageFailed
from blocktrain.protocol.ledger import ExpireFacts, FinishFacts, Part, RoundFacts
from blocktrain.protocol.messages import Blob
from blocktrain.protocol.refusals import Refused
from blocktrain.store.contract import VersionRecord


class RoundCloser:
    """Does what is due: at once where it is called, or in a thread of its own."""

    def __init__(
        self, run: TrainingRun, judge: Judge | None = None, retrainer: Retrainer | None = None
    ) -> None:
        self._run, self._judge, self.checks = run, judge, UpdateChecks(run, retrainer)
        # One thread for all merges: memory for the updates of one round, and only once.
        self._merger = ThreadPoolExecutor(1, "merger")
        self._worker: ClosingThread | None = None
        self._claimed: set[int] = set()  # blocks whose round is being closed
        self._released = threading.Condition(run.lock)

    def start_thread(self) -> None:
        """From now on no caller waits for a merge."""
        self._worker = ClosingThread(self._close_due, self._run.clock)

    def stop(self) -> None:
        """After the round that is being closed. The caller does not hold the run's lock."""
        if self._worker is not None:
            self._worker.stop()
        with self._run.lock:
            self._run.stop()
            self.wait_released()

    def close(self) -> None:
        self._merger.shutdown(wait=False)
        self.checks.close()
        if self._judge is not None:
            self._judge.close()

    def tick(self) -> None:
        """Do all that is due, or have it done: expire leases, extend and close rounds, finish."""
        if self._worker is None:
            self._close_due()
        else:
            self._worker.wake()

    def settle(self, block: int) -> None:
        """Where callers close rounds themselves: wait until no thread closes one of this block."""
        if self._worker is None:
            self.wait_released(block)

    def wait_released(self, block: int | None = None) -> None:
        """Until the block, or every block, is free. Gives up the run's lock while it waits."""
        self._released.wait_for(
            lambda: block not in self._claimed if block is not None else not self._claimed
        )

    def is_closing(self, block: int) -> bool:
        """Whether the next version of a block is being made, or about to be, in the thread.

        No task should start from the present one any more.
        """
        run = self._run
        if self._worker is None:
            return False
        if block in self._claimed:
            return True
        action, _ = decide_round(run.clock.monotonic(), run.state, run.options, block)
        return isinstance(action, state.CloseRound) and not self.checks.is_held(block)

    def _close_due(self) -> None:
        """One round after another. Only the block that is being merged has to wait.

        Any error is fatal. A coordinator that cannot close rounds must not go on answering.
        """
        try:
            while due := self._claim_due():
                try:
                    self._close(due)
                finally:
                    self._release(due.block)
        except Exception as error:  # also MemoryError, and what is a bug
            if isinstance(error, BlockTrainError) and not isinstance(error, Refused):
                raise
            logging.getLogger(__name__).error("a round could not be closed", exc_info=error)
            raise StorageFailed(
                f"a round could not be closed ({type(error).__name__}: {error}); "
                "every update that was acknowledged is stored: start the coordinator again"
            ) from error

    def _claim_due(self) -> state.CloseRound | None:
        """Do everything that is due, except closing rounds. Gives the first round to close.

        Its block is claimed: no other thread changes it until it is released.
        """
        run = self._run
        with run.lock:
            if not run.ready:
                return None
            self.checks.collect(self._claimed)
            now = run.clock.monotonic()
            actions, run.reason = decide(now, run.state, run.options)
            free = [a for a in actions if getattr(a, "block", None) not in self._claimed]
            for action in free:
                if not isinstance(action, state.CloseRound):
                    self._act(now, action)
            closing = (a for a in free if isinstance(a, state.CloseRound))
            due = next((a for a in closing if not self.checks.hold(now, a)), None)
            if due is not None:
                self._claimed.add(due.block)
                return due
            run.pass_time(now)
            return None

    def _release(self, block: int) -> None:
        with self._run.lock:
            self._claimed.discard(block)
            self._released.notify_all()

    def _act(self, now: float, action: state.Action) -> None:
        run = self._run
        after = state.apply(run.state, action)
        notes = []
        if isinstance(action, state.Expire):
            lease = run.state.leases[action.task]
            expired = ExpireFacts(
                worker=lease.worker, task=lease.task, fence=lease.fence, reason=short(action.reason)
            )
            notes.append(note("expire", expired))
        elif isinstance(action, state.Extend):
            seconds = action.deadline - now
            notes.append(self._round_note(action.block, "extended", seconds, action.reason))
        elif isinstance(action, state.CloseEmpty):
            notes.append(self._round_note(action.block, "empty", action.length, action.reason))
        elif isinstance(action, state.Finish) and not run.state.stopping:
            notes.append(note("finish", FinishFacts(reason=short(action.reason))))
        if after != run.state or notes:
            run.save(after, notes)

    def _round_note(
        self, block: int, event: Literal["extended", "empty"], seconds: float, reason: str
    ) -> Note:
        """A round that made no version."""
        content = RoundFacts(
            block=block,
            version=self._run.state.blocks[block].version,
            event=event,
            seconds=max(0.0, seconds),
            reason=short(reason),
        )
        return note("round", content)

    def _close(self, action: state.CloseRound) -> None:
        run = self._run
        with run.lock:
            parent = run.version(action.block)
            closed = frozenset(action.updates)
            waiting = {name: a for name, a in run.history.waiting.items() if name in closed}
            known = run.history.public
            round_ = Round(
                run.config,
                parent,
                waiting,
                run.state.standings,
                run.merge_options,
                run.history.earlier(action.block),
                frozenset(name for name, (s, _) in waiting.items() if s.payload_sha256 in known),
                dict(run.history.differing),
                self._judge,
                run.history.received.get(action.block, 0),
            )
        method = run.policy.version_compression
        made = self._merger.submit(merge_round, run.store, round_, method).result()
        outcome = store_outcome(run.store, made, waiting)
        outcome = guard_version(run.store, round_, made, outcome)
        with run.lock:
            if outcome.weights is None:
                self._reopen(action, outcome)
            else:
                self._publish(action, outcome, outcome.weights)

    def _reopen(self, action: state.CloseRound, outcome: RoundOutcome) -> None:
        """The same round, without the updates that cannot be merged."""
        run, index, dropped = self._run, action.block, outcome.dropped
        after = state.drop_updates(run.state, index, frozenset(dropped))
        seconds = round_length(run.state.blocks[index], run.options)
        kind, body = self._round_note(index, "empty", seconds, outcome.merged.reason)
        body |= {"dropped": dropped, **outcome.evidence}
        run.save(after, [(kind, body)], dropped)

    def _publish(self, action: state.CloseRound, outcome: RoundOutcome, weights: Blob) -> None:
        run, index, merged = self._run, action.block, outcome.merged
        shares = {c.update.id: c.share for c in merged.used}
        block = advance_block(run.state.blocks[index], shares, outcome.loss, run.options)
        record = VersionRecord(
            block=index,
            version=block.version,
            weights=weights.sha256,
            momentum=None if outcome.momentum is None else outcome.momentum.sha256,
            steps=block.steps,
            tokens=block.tokens,
            loss=outcome.loss,
            norms=merged.norms,
            reason=short(f"{action.reason}; {merged.reason}"),
            delta=None if outcome.delta is None else outcome.delta.sha256,
            residual=None if outcome.residual is None else outcome.residual.sha256,
        )
        parts = (Part(update=c.update.id, share=c.share, scale=c.scale) for c in merged.used)
        body = run.version_body(
            record,
            weights=weights,
            momentum=outcome.momentum,
            delta=outcome.delta,
            residual=outcome.residual,
            parts=tuple(parts),
            features=outcome.features,
        )
        body |= outcome.evidence
        after = state.apply_version(run.state, index, block, run.options.max_staleness)
        run.save_version(after, record, body, sorted(shares), outcome.dropped)


class ClosingThread:
    """Works whenever it is woken. An error that ends it is raised by the next `wake`."""

    def __init__(self, work: Callable[[], None], clock: Clock) -> None:
        self._work, self._clock = work, clock
        self._stopped = False
        self._failure: BaseException | None = None
        self._due = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="closer", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._due.set()

    def stop(self) -> None:
        self._stopped = True
        self._due.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._stopped:
            self._clock.wait(self._due)
            self._due.clear()
            try:
                if not self._stopped:
                    self._work()
            except BaseException as error:
                self._failure = error
                return
