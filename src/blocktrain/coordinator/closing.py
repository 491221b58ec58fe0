"""What is due: leases expire, rounds are extended and closed.

A closed round makes its updates the next version of the block, without the run's lock.

numpy only. A payload was checked when it arrived, without decoding it: many small payloads may wait
that decode to much, so nothing decoded is kept. It is opened once, here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal

from blocktrain.clock import Clock
from blocktrain.coordinator import state
from blocktrain.coordinator.merge import (
    Candidate,
    MergeContext,
    MergeOptions,
    MergeResult,
    Update,
    merge,
)
from blocktrain.coordinator.rounds import advance_block, decide, decide_round, round_length
from blocktrain.coordinator.run import Note, TrainingRun, note, short
from blocktrain.errors import BlockTrainError, StorageFailed
from blocktrain.protocol.compression import METHODS, Method, add_delta, compress, open_update
from blocktrain.protocol.ledger import ExpireFacts, FinishFacts, Part, RoundFacts
from blocktrain.protocol.messages import Blob, BlockVersion, Order, Submission
from blocktrain.protocol.refusals import Refused
from blocktrain.protocol.tensors import (
    Schema,
    Tensors,
    check_finite,
    pack,
    schema_of,
    unpack,
)
from blocktrain.store.contract import Blobs, Store, UpdateRecord, VersionRecord

WaitingUpdates = Mapping[str, tuple[Submission, Order]]  # by update


class RoundCloser:
    """Does what is due: at once where it is called, or in a thread of its own."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
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
        action, _ = decide_round(run.clock.monotonic(), run.state, run.options, block)
        return block in self._claimed or isinstance(action, state.CloseRound)

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
            now = run.clock.monotonic()
            actions, run.reason = decide(now, run.state, run.options)
            free = [a for a in actions if getattr(a, "block", None) not in self._claimed]
            for action in free:
                if not isinstance(action, state.CloseRound):
                    self._act(now, action)
            due = next((a for a in free if isinstance(a, state.CloseRound)), None)
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
            waiting = {name: run.history.waiting[name] for name in action.updates}
        method = run.policy.version_compression
        options = (run.merge_options, method)
        merging = self._merger.submit(merge_round, run.store, parent, waiting, *options)
        outcome = store_outcome(run.store, merging.result(), waiting)
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
        run.save(after, [(kind, {**body, "dropped": dropped})], dropped)

    def _publish(self, action: state.CloseRound, outcome: RoundOutcome, weights: Blob) -> None:
        run, index, merged = self._run, action.block, outcome.merged
        used = frozenset(c.update.id for c in merged.used)
        block = advance_block(run.state.blocks[index], used, outcome.loss, run.options)
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
        after = state.apply_version(run.state, index, block, run.options.max_staleness)
        run.save_version(after, record, body, sorted(used), outcome.dropped)


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


@dataclass(frozen=True)
class RoundOutcome:
    """What a merge gave, with its blobs stored. Without weights there is no version."""

    merged: MergeResult
    weights: Blob | None = None
    momentum: Blob | None = None
    delta: Blob | None = None
    residual: Blob | None = None
    loss: float | None = None
    features: tuple[BlockVersion, ...] = ()

    @property
    def dropped(self) -> dict[str, str]:
        """Updates that are not part of the version, and why."""
        reasons = {r.id: f"{r.code}: {r.reason}" for r in self.merged.rejected}
        if self.weights is None:  # a guard refused the result: all that were merged are suspect
            reasons |= {c.update.id: self.merged.reason for c in self.merged.used}
        return reasons


@dataclass(frozen=True)
class MergedRound:
    """What a merge gave. Nothing of it is stored yet."""

    merged: MergeResult
    delta: bytes | None = None  # None: the version is published whole
    residual: Tensors = field(default_factory=dict)  # empty: the delta lacks nothing


def merge_round(
    store: Store,
    parent: VersionRecord,
    waiting: WaitingUpdates,
    options: MergeOptions,
    method: Method = "none",
) -> MergedRound:
    """The waiting updates of a block, merged. Nothing is written yet.

    Of the updates only names and figures are kept. `method` is the compression of versions.
    """
    current = _read_tensors(store.blobs, parent.weights)
    momentum = None if parent.momentum is None else _read_tensors(store.blobs, parent.momentum)
    records = {u.id: u for u in store.pending(parent.block)}
    base = _Base(current, schema_of(current), parent.version)
    updates = [
        _read_update(store, records[name], order, base) for name, (_, order) in waiting.items()
    ]
    merged = merge(MergeContext(current, options, momentum, parent.norms), updates)
    used = (replace(c, update=replace(c.update, values={}, base=None)) for c in merged.used)
    merged = replace(merged, used=tuple(used))
    if merged.state is None or METHODS[method].exact:
        return MergedRound(merged)
    residual = None if parent.residual is None else _read_tensors(store.blobs, parent.residual)
    own = None
    if residual is None and (name := _own_payload(merged, waiting, options, method)) is not None:
        own = store.blobs.read(name)
    return compress_version(merged, current, residual, method, own)


def _own_payload(
    merged: MergeResult, waiting: WaitingUpdates, options: MergeOptions, method: Method
) -> str | None:
    """The payload of the only update, if that is just what the version adds to its parent.

    Whoever has sent it need not fetch it.
    """
    if options.outer != "average" or len(merged.used) != 1 or merged.used[0].scale != 1:
        return None
    submission, order = waiting[merged.used[0].update.id]
    return submission.payload_sha256 if order.compression == method else None


def compress_version(
    merged: MergeResult,
    current: Tensors,
    residual: Tensors | None,
    method: Method,
    own: bytes | None = None,
) -> MergedRound:
    """The version as its parent plus a delta, and what the delta lacks.

    The next version gets that, so nothing is lost. `own` is a payload that is the delta already.
    """
    try:
        delta, rest = (own, {}) if own else compress(merged.change, residual, method)
        weights = add_delta(current, delta)
        check_finite(weights)
    except Refused as error:
        named = ", ".join(c.update.id for c in merged.used)
        reason = f"not published: {error}; merged were {named}"
        return MergedRound(replace(merged, state=None, momentum=None, reason=reason))
    if not any(tensor.any() for tensor in rest.values()):
        rest = {}
    return MergedRound(replace(merged, state=weights, change={}), delta, rest)


def store_outcome(store: Store, made: MergedRound, waiting: WaitingUpdates) -> RoundOutcome:
    """What a merge gave, made durable."""
    merged = made.merged
    if merged.state is None:
        return RoundOutcome(merged)
    used = [waiting[c.update.id] for c in merged.used]
    features = max(
        (order.features for _, order in used),
        key=lambda pins: [pin.version for pin in pins],
        default=(),
    )
    return RoundOutcome(
        merged,
        weights=_store_tensors(store.blobs, merged.state),
        momentum=None if merged.momentum is None else _store_tensors(store.blobs, merged.momentum),
        delta=None if made.delta is None else _store_bytes(store.blobs, made.delta),
        residual=_store_tensors(store.blobs, made.residual) if made.residual else None,
        loss=_mean_loss(merged.used, used),
        features=features,
    )


@dataclass(frozen=True)
class _Base:
    """The version that is merged into."""

    tensors: Tensors
    schema: Schema
    version: int


def _read_tensors(blobs: Blobs, name: str) -> Tensors:
    return unpack(blobs.read(name))


def _read_update(store: Store, record: UpdateRecord, order: Order, current: _Base) -> Update:
    content = store.blobs.read(record.payload)
    opened = open_update(content, current.schema, method=order.compression)
    base = None
    # Of late weights only the difference to what they started from counts.
    if opened.absolute and record.base != current.version:
        started = store.version(record.block, record.base)
        base = current.tensors if started is None else _read_tensors(store.blobs, started.weights)
    return Update(record.id, opened.tensors, record.tokens, record.weight, opened.absolute, base)


def _store_tensors(blobs: Blobs, tensors: Tensors) -> Blob:
    return _store_bytes(blobs, pack(tensors))


def _store_bytes(blobs: Blobs, content: bytes) -> Blob:
    return Blob(sha256=blobs.put(content), length=len(content))


def _mean_loss(used: Sequence[Candidate], answers: Sequence[tuple[Submission, Order]]) -> float:
    return sum(c.share * s.loss_after for c, (s, _) in zip(used, answers, strict=True))
