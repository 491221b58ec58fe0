"""The run as it is now: state, store and decisions kept in step. Commits first, then changes what it knows.

The caller holds `lock`, but not for what takes long: bytes become durable and updates are merged while others are served. After
StorageFailed nothing may be acknowledged any more: the process exits and recovers at its next start.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from blocktrain.config import Config, make_config
from blocktrain.coordinator import state
from blocktrain.coordinator.closing import Closed, close_round, merge_round
from blocktrain.coordinator.merging import Closer, Merging
from blocktrain.coordinator.meter import Meter
from blocktrain.coordinator.policy import Policy, make_policy
from blocktrain.coordinator.recall import Recall
from blocktrain.coordinator.rounds import (
    advanced,
    deadline_after,
    decide,
    decide_round,
    finished,
    round_length,
)
from blocktrain.coordinator.transitions import changes_between
from blocktrain.errors import Conflict, RunError, StorageFailed
from blocktrain.protocol import ledger as facts
from blocktrain.protocol import messages as m
from blocktrain.protocol.identity import Identity
from blocktrain.protocol.refusals import MAX_SENTENCE, Code, Refused
from blocktrain.protocol.tensors import Schema, schema_of, unpack
from blocktrain.store.blobs import PIECE
from blocktrain.store.contract import (
    Changes,
    Store,
    Traffic,
    UpdateRecord,
    VersionRecord,
    WorkerRecord,
)
from blocktrain.store.ledger import Entry, Note

FLUSH_SECONDS = (
    2.0  # at most this much time is lost with a crash: of byte counters, and of every deadline
)
SPEED_MEMORY = 0.7  # share of the old value in a worker's measured overhead


class Observer(Protocol):
    """Who is told what a run does. The run's lock is held, except for `refused`."""

    def started(self, run: LiveRun) -> None: ...

    def committed(self, run: LiveRun, kind: str, body: dict[str, Any]) -> None:
        """An entry of the ledger; the run's state is the one after it."""

    def left(self, run: LiveRun, worker: str) -> None: ...

    def refused(self, error: Refused, worker: str, block: int) -> None: ...

    def look(self, run: LiveRun, now: float) -> None:
        """Called often: for what passes with time alone."""

    def close(self) -> None: ...


class LiveRun:
    """One run in the hands of this process."""

    run: facts.RunFacts
    config: Config
    policy: Policy
    options: state.Options

    def __init__(
        self, store: Store, identity: Identity, clock: Callable[[], float], observer: Observer
    ) -> None:
        self.store, self.identity, self.clock, self.observer = store, identity, clock, observer
        self.lock = threading.RLock()
        self.merging = Merging(
            self.lock
        )  # no update of a block whose round is being closed is recorded
        self.began = self._flushed = clock()
        self.state = state.RunState()
        self.known: dict[str, WorkerRecord] = {}
        self.recall = Recall()
        self._newest: dict[int, VersionRecord] = {}  # by block; the store knows them all
        self.schemas: dict[int, Schema] = {}
        self.meter = Meter()
        self.arriving: Counter[str] = (
            Counter()
        )  # payloads that are on the disk and not recorded yet
        self.progress: dict[str, m.Heartbeat] = {}  # by worker: what it said last
        self.reason = ""
        self.ready = self._started = False
        self._closer: Closer | None = None
        if (document := store.run()) is not None:
            self._open(document)

    def begin(self, config: Config, policy: Policy, corpus: str, prepared: Path) -> None:
        """Create the run from what `prepare` has written: version 0 of every block, and the two parts of the corpus."""
        blocks = [
            m.BlockVersion(
                block=i, version=0, weights=self._store_file(prepared / f"block-{i}.safetensors")
            )
            for i in range(1, config.blocks + 1)
        ]
        parts = m.Corpus(
            name=m.as_name(corpus),
            train=self._store_file(prepared / "train.txt"),
            valid=self._store_file(prepared / "valid.txt"),
        )
        run = facts.RunFacts(
            protocol=m.PROTOCOL,
            run=self.store.run_id,
            coordinator=self.identity.public_key,
            config=config.model_dump(),
            fingerprint=config.fingerprint,
            corpus=parts,
            blocks=tuple(blocks),
        )
        document = {
            **run.model_dump(mode="json", exclude={"run"}),
            "policy": policy.model_dump(mode="json"),
        }
        with self.lock:
            self.store.create_run(document)
            self._open(document)
        self.start()

    def _store_file(self, path: Path) -> m.Blob:
        """A file as a blob, in pieces: a corpus may be larger than memory."""
        with path.open("rb") as file:
            name = hashlib.file_digest(file, "sha256").hexdigest()
        with path.open("rb") as file:
            self.store.blobs.put_stream(iter(lambda: file.read(PIECE), b""), name)
        return m.Blob(sha256=name, length=path.stat().st_size)

    def _open(self, document: dict[str, Any]) -> None:
        """Take up a run where its last commit left it."""
        fields = {**{k: v for k, v in document.items() if k != "policy"}, "run": self.store.run_id}
        self.run = facts.RunFacts.model_validate_json(json.dumps(fields))
        if self.run.coordinator != self.identity.public_key:
            raise RunError(
                "coordinator.pem is not the key that this run began with; restore it from a backup"
            )
        self.config = make_config(dict(self.run.config))
        if self.config.fingerprint != self.run.fingerprint:
            raise RunError(
                "the run's settings mean something else to this version of blocktrain; use the version that it began with"
            )
        self.policy = make_policy(document["policy"])
        self.options = self.policy.options(self.config)
        now = self.clock()
        for first in self.run.blocks:
            self.schemas[first.block] = schema_of(
                unpack(self.store.blobs.read(first.weights.sha256))
            )
            if (
                self.store.version(first.block) is None
            ):  # the first start, or a crash right after the run was created
                record = VersionRecord(
                    first.block, 0, first.weights.sha256, None, 0, 0, None, (), "the beginning"
                )
                self.store.publish_version(now, record, [], {}, self._version_body(record, None))
        self.recall.catch_up(self.store)
        recovered = self.store.recover(now, self.config.fusion)
        self.state = replace(recovered, stopping=self.recall.finished)
        self.known = {w.state.id: w for w in self.store.workers()}
        self.recall.forget_tasks(set(self.state.leases))
        self.store.blobs.keep_uploads(
            {(lease.task, lease.fence) for lease in self.state.leases.values()}
        )
        self.meter.begin(self.store.traffic())
        self.ready = True
        self.recall.fresh = []  # what was committed before has been told

    def start(self) -> None:
        """Take the run over, once: with the first call, or the first tick.

        A process that opens the folder and is refused (its port is taken, its settings differ)
        has not started the run.
        """
        with self.lock:
            if self._started or not self.ready:
                return
            self._started = True
            self.observer.started(self)
            begun = note("start", facts.StartFacts(epoch=self.store.epoch))
            self.save(self.clock(), self.state, notes=[begun])
        self.tick()

    def close_beside(self) -> None:
        """From now on a thread of its own does what is due: nobody who calls waits for a round to be merged."""
        self._closer = Closer(self._do_due)

    def close(self) -> None:
        """Commit the byte counters and the time that has passed, and let go of the folder."""
        if self._closer is not None:
            self._closer.stop()
        with self.lock:
            try:
                ready, self.ready = self.ready, False
                self.merging.wait()
                if ready:
                    self._flush(self.clock())
            except StorageFailed:
                pass  # it was said when it happened; the next start recovers
            finally:
                self.merging.close()
                self.store.close()
                self.observer.close()

    @property
    def finished(self) -> str | None:
        """Why the run is over, or None."""
        return finished(self.state, self.options) if self.ready else None

    def newest(self, index: int) -> m.BlockVersion:
        """The newest version of a block."""
        found = self.version(index)
        return m.BlockVersion(block=index, version=found.version, weights=self.blob(found.weights))

    def version(self, index: int, number: int | None = None) -> VersionRecord:
        """A version that must be there."""
        newest = self._newest.get(index) or self.store.version(index)
        found = (
            newest
            if newest is None or number in (None, newest.version)
            else self.store.version(index, number)
        )
        if newest is None or found is None:
            raise RunError(
                f"version {number} of block {index} is missing; restore the folder from a backup"
            )
        self._newest[index] = newest
        return found

    def blob(self, name: str) -> m.Blob:
        """A stored blob as messages name it."""
        return m.Blob(sha256=name, length=self.store.blobs.size(name))

    def refused(self, error: Refused, worker: str = "", block: int = 0) -> None:
        """Count a refusal. Needs no lock: any stranger may cause many."""
        self.recall.refused(error.code, worker, block)
        self.observer.refused(error, worker, block)

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes of the whole run, in and out."""
        return self.meter.moved

    def count(self, block: int, worker: str, bytes_in: int = 0, bytes_out: int = 0) -> None:
        """Add to the byte counters; they are committed with the next transaction."""
        self.meter.add(Traffic(block, worker if worker in self.known else "", bytes_in, bytes_out))

    def save(
        self,
        now: float,
        after: state.RunState,
        notes: Sequence[Note] = (),
        nonces: Sequence[tuple[str, str, float]] = (),
    ) -> None:
        """Commit the way to a new state; then it is the state."""
        changes = self._changes(after, notes=notes, nonces=nonces)
        if changes:
            for entry in self.store.save(now, changes):
                self.recall.follow(entry)
        self._became(after, changes)

    def _changes(self, after: state.RunState, **more: Any) -> Changes:
        return replace(
            changes_between(self.state, after, self.known), traffic=self.meter.take(), **more
        )

    def _became(self, after: state.RunState, changes: Changes) -> None:
        """What was just committed is known from now on."""
        self.state = after
        self.meter.settle()
        self.known.update((worker.state.id, worker) for worker in changes.workers)
        if len(self.recall.orders) > 2 * len(after.leases) + 64:
            self.recall.forget_tasks(set(after.leases))
        fresh, self.recall.fresh = self.recall.fresh or (), []
        for kind, body in fresh:
            self.observer.committed(self, kind, body)

    def tick(self) -> None:
        """Do all that is due, or have it done: expire leases, extend and close rounds, finish."""
        self.start()
        if self._closer is None:
            self._do_due()
        else:
            self._closer.wake()

    def settle(self, index: int) -> None:
        """Where those who call close rounds: wait until nobody closes one of this block."""
        if self._closer is None:
            self.merging.wait(index)

    def moves(self, index: int) -> bool:
        """Whether the next version of a block is being made beside, or is about to be: nobody should begin from this one any more."""
        if self._closer is None:
            return False
        return index in self.merging or isinstance(
            decide_round(self.clock(), self.state, self.options, index)[0], state.Close
        )

    def _do_due(self) -> None:
        """One round after another: only the block that is being merged has to wait."""
        while due := self._decide():
            try:
                self._close_round(due)
            finally:
                with self.lock:
                    self.merging.free([due.block])

    def _decide(self) -> state.Close | None:
        """Do what is due but for rounds that close. The first of these is the caller's: nobody else touches its block until it is done."""
        with self.lock:
            if not self.ready:
                return None
            now = self.clock()
            actions, self.reason = decide(now, self.state, self.options)
            free = [
                action for action in actions if getattr(action, "block", None) not in self.merging
            ]
            for action in free:
                if not isinstance(action, state.Close):
                    self._act(now, action)
            due = next((action for action in free if isinstance(action, state.Close)), None)
            if due is not None:
                self.merging.claim([due.block])
                return due
            self.observer.look(self, now)
            if now - self._flushed > FLUSH_SECONDS:
                self._flush(now)
            return None

    def _flush(self, now: float) -> None:
        """Commit what has changed without an event: byte counters, and the time left of what is out, or a restart would give it anew."""
        self._flushed = now
        out = [lease for lease in self.state.leases.values() if not lease.expired]
        rounds = {
            index: (b.version, b.round)
            for index, b in self.state.blocks.items()
            if b.round.deadline is not None
        }
        changes = replace(self._changes(self.state), times=out, rounds=rounds)
        if changes:
            self.store.save(now, changes)
            self._became(self.state, changes)

    def _act(self, now: float, action: state.Action) -> None:
        after = state.apply(self.state, action)
        notes = []
        if isinstance(action, state.Expire):
            lease = self.state.leases[action.task]
            gone = facts.ExpireFacts(
                worker=lease.worker, task=lease.task, fence=lease.fence, reason=_said(action.reason)
            )
            notes.append(note("expire", gone))
        elif isinstance(action, state.Extend | state.CloseEmpty):
            block = self.state.blocks[action.block]
            extended = isinstance(action, state.Extend)
            seconds = action.deadline - now if isinstance(action, state.Extend) else action.length
            notes.append(
                note(
                    "round",
                    round_facts(
                        action.block,
                        block.version,
                        "extended" if extended else "empty",
                        seconds,
                        action.reason,
                    ),
                )
            )
        elif isinstance(action, state.Finish) and not self.state.stopping:
            notes.append(note("finish", facts.FinishFacts(reason=_said(action.reason))))
        if after != self.state or notes:
            self.save(now, after, notes)

    def _close_round(self, action: state.Close) -> None:
        """Merge without the lock, then publish."""
        with self.lock:
            parent = self.version(action.block)
            waiting = {name: self.recall.waiting[name] for name in action.updates}
        merged = self.merging.run(
            merge_round, self.store, parent, waiting, self.policy.merge_options()
        )
        closed = close_round(self.store, merged, waiting)
        with self.lock:
            self._publish(self.clock(), action, parent, closed)

    def _publish(
        self, now: float, action: state.Close, parent: VersionRecord, closed: Closed
    ) -> None:
        """The next version, or the same round without the updates that cannot be merged."""
        index = action.block
        if closed.weights is None:
            after = state.left_out(self.state, index, frozenset(closed.dropped))
            empty = round_facts(
                index,
                parent.version,
                "empty",
                round_length(self.state.blocks[index], self.options),
                closed.merged.reason,
            )
            changes = self._changes(
                after, dropped=closed.dropped, notes=[note("round", empty, dropped=closed.dropped)]
            )
            for entry in self.store.save(now, changes):
                self.recall.follow(entry)
            self._became(after, changes)
            return
        used = frozenset(c.update.id for c in closed.merged.used)
        block = advanced(self.state.blocks[index], used, closed.loss)
        momentum = None if closed.momentum is None else closed.momentum.sha256
        record = VersionRecord(
            index,
            block.version,
            closed.weights.sha256,
            momentum,
            block.steps,
            block.tokens,
            closed.loss,
            closed.merged.norms,
            _said(f"{action.reason}; {closed.merged.reason}"),
        )
        after = state.published(self.state, index, block, self.options.max_staleness)
        body = self._version_body(record, closed)
        changes = self._changes(after)
        entry = self.store.publish_version(now, record, sorted(used), closed.dropped, body, changes)
        self.recall.follow(entry)
        self._newest[index] = record
        self._became(after, changes)

    def _version_body(self, record: VersionRecord, closed: Closed | None) -> dict[str, Any]:
        """VersionFacts; `parent` is added by the store."""
        options = self.policy.merge_options()
        used = closed.merged.used if closed else ()
        made = facts.VersionFacts(
            block=record.block,
            version=record.version,
            parent=None,
            weights=self.blob(record.weights),
            momentum=closed.momentum if closed else None,
            parts=tuple(facts.Part(update=c.update.id, share=c.share, scale=c.scale) for c in used),
            outer=self.policy.outer,
            outer_learning_rate=options.outer_learning_rate,
            outer_momentum=options.outer_momentum,
            features=closed.features if closed else (),
            reason=record.reason,
        )
        return made.model_dump(mode="json", exclude={"parent"})

    def record(
        self,
        now: float,
        message: m.Submission,
        update: UpdateRecord,
        sentence: str,
        receipt_of: Callable[[str], m.Receipt],
    ) -> bytes:
        """Write an accepted update, its receipt (of its entry's hash) and everything that follows from it in one transaction."""
        order = self.recall.orders[message.task]
        arrived = state.Arrived(
            update.id, update.worker, update.tokens, update.steps, update.staleness, update.weight
        )
        deadline = deadline_after(
            now, self.state.blocks[message.block], self.options, update.seconds
        )
        after = state.arrived(
            self._timed(message, update), message.task, arrived, deadline, update.seconds
        )
        body = facts.UpdateFacts(submission=message, order=order).model_dump(mode="json")
        changes = self._changes(after, nonces=[(message.worker, message.nonce, time.time())])
        written: list[Entry] = []

        def receipt(entry: Entry) -> bytes:
            written.append(entry)
            return m.write(receipt_of(entry.hash))

        try:
            answer = self.store.record_update(now, update, receipt, body, changes)
        except Conflict as error:
            raise Refused(Code.REPLAYED, str(error)) from None
        for entry in written:
            self.recall.follow(entry)
        for _, told in self.recall.fresh or ():
            told["sentence"] = sentence  # for people; the ledger does without
        self._became(after, changes)
        return answer.receipt

    def _timed(self, message: m.Submission, update: UpdateRecord) -> state.RunState:
        """What this task says about its worker: how long a step takes, and what time goes into everything else."""
        worker = self.state.workers.get(message.worker)
        if worker is None or update.seconds is None or not 0 < message.seconds <= update.seconds:
            return self.state
        extra = update.seconds - message.seconds
        overhead = min(
            SPEED_MEMORY * worker.overhead + (1 - SPEED_MEMORY) * extra,
            self.options.task_seconds / 2,
        )
        return state.with_worker(
            self.state,
            replace(worker, seconds_per_step=message.seconds / message.steps, overhead=overhead),
        )


def note(kind: str, content: m.Message, **more: Any) -> Note:
    """Facts as an entry of the ledger."""
    return Note(kind, {**content.model_dump(mode="json"), **more})


def round_facts(
    block: int, version: int, event: str, seconds: float, reason: str
) -> facts.RoundFacts:
    """A round that did not make a version."""
    return facts.RoundFacts(
        block=block,
        version=version,
        event=event,  # type: ignore[arg-type]
        seconds=max(0.0, seconds),
        reason=_said(reason),
    )


def _said(reason: str) -> str:
    return reason[:MAX_SENTENCE]
