"""The run in this process: its state, its store, and what the ledger says, kept in step.

Every change is committed first; only then does the run know of it. The caller holds `lock`, but not
for anything slow: while payloads become durable and rounds are merged, others are served.
After StorageFailed nothing may be acknowledged any more: the process exits, and the next start
recovers.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from blocktrain.clock import Clock
from blocktrain.config import Config, make_config
from blocktrain.coordinator import state
from blocktrain.coordinator.corpus import RunCorpus, store_corpus
from blocktrain.coordinator.history import Body, RunHistory, UpdateCounts
from blocktrain.coordinator.limits.members import GONE_SECONDS, forget_gone, strangers
from blocktrain.coordinator.limits.quotas import DiskQuotas
from blocktrain.coordinator.merging.merge import MergeOptions
from blocktrain.coordinator.policy import EARLIER_RULES, Policy, make_policy
from blocktrain.coordinator.recovery import recover_state
from blocktrain.coordinator.rounds import end_reason
from blocktrain.coordinator.traffic import TrafficCounter
from blocktrain.errors import RunError, StorageFailed
from blocktrain.protocol import ledger
from blocktrain.protocol import messages as m
from blocktrain.protocol.identity import Identity
from blocktrain.protocol.refusals import MAX_SENTENCE, Refused
from blocktrain.protocol.tensors import Schema, schema_of, unpack
from blocktrain.store.contract import (
    ByteCount,
    Changes,
    NonceRecord,
    Store,
    UpdateRecord,
    VersionRecord,
    WorkerRecord,
    link_entry,
)

FLUSH_SECONDS = 2.0  # a crash loses at most this much of byte counters, and of every deadline
NONCE_SECONDS = state.DAY
"""How long a nonce is kept. Leases end earlier, and a submission that is repeated later is answered
by its task and payload, for ever."""
PRUNE_SECONDS = 600.0  # how often old nonces are removed

Note = tuple[str, Body]  # kind and body of a ledger entry that is not linked yet


class Observer(Protocol):
    """Hooks into a run; decides nothing. The caller holds the lock, except in `on_refusal`."""

    def on_start(self, run: TrainingRun) -> None:
        """This process has taken the run over."""

    def on_commit(self, run: TrainingRun, kind: str, body: Body) -> None:
        """A ledger entry was committed. The run's state is the one after it."""

    def on_leave(self, run: TrainingRun, worker: str) -> None:
        """A worker has left by itself."""

    def on_refusal(self, error: Refused, worker: str, block: int) -> None: ...

    def look(self, run: TrainingRun, now: float) -> None:
        """Called often, for changes that only time causes."""

    def close(self) -> None: ...


class TrainingRun:
    """One run, owned by this process."""

    facts: ledger.RunFacts
    corpus: RunCorpus
    config: Config
    policy: Policy
    options: state.Options
    merge_options: MergeOptions

    def __init__(self, store: Store, identity: Identity, clock: Clock, observer: Observer) -> None:
        self.store, self.identity, self.clock, self.observer = store, identity, clock, observer
        self.lock = threading.RLock()
        self.state = state.RunState()  # replaced as a whole: reading it needs no lock
        self.history = RunHistory()
        self.traffic = TrafficCounter()
        self.quotas = DiskQuotas(store.blobs, self.history)
        self.known: dict[str, WorkerRecord] = {}  # all members that are not forgotten
        self.schemas: dict[int, Schema] = {}  # by block
        self.progress: dict[str, m.Heartbeat] = {}  # by worker: its last one
        self.refusals: Counter[str] = Counter()  # by code, of this process alone
        self.held: tuple[str, ...] = ()  # weights that somebody outside of the run reads now
        self.reason = ""  # what the last decisions were, or what is waited for
        self.ready = self._opened = self._started = False
        self.began = self._last_flush = clock.monotonic()
        self._last_prune = -PRUNE_SECONDS
        self._newest: dict[int, VersionRecord] = {}  # by block
        if (document := store.run()) is not None:
            self._open(document)

    # Beginning and end

    def begin(self, config: Config, policy: Policy, corpus: str, prepared: Path) -> None:
        """Create the run from the files that `prepare` has written.

        These are version 0 of every block, the corpus, and its tokenizer if it has one.
        """
        weights = {
            index: self._store_file(prepared / f"block-{index}.safetensors")
            for index in range(1, config.blocks + 1)
        }
        tokenizer = prepared / "tokenizer.json"
        parts = m.CorpusBlobs(
            name=m.as_name(corpus),
            index=store_corpus(self.store.blobs, prepared / "corpus", config),
            tokenizer=self._store_file(tokenizer) if tokenizer.exists() else None,
        )
        parent = prepared / "parent.json"
        run = ledger.RunFacts(
            protocol=m.PROTOCOL,
            run=self.store.run_id,
            coordinator=self.identity.public_key,
            config=config.model_dump(),
            fingerprint=config.fingerprint,
            corpus=parts,
            blocks=tuple(
                m.BlockVersion(block=index, version=0, weights=blob)
                for index, blob in weights.items()
            ),
            parent=m.read(ledger.ParentRun, parent.read_bytes()) if parent.exists() else None,
        )
        document = {
            **run.model_dump(mode="json", exclude={"run"}),
            "policy": policy.model_dump(mode="json"),
        }
        with self.lock:
            self.store.create_run(document)
            self._open(document)

    def _store_file(self, path: Path) -> m.Blob:
        content = path.read_bytes()
        return m.Blob(sha256=self.store.blobs.put(content), length=len(content))

    def _open(self, document: Body) -> None:
        """Continue a run from its last commit."""
        self._read_document(document)
        self.corpus = RunCorpus(self.store.blobs, self.facts.corpus, self.config)
        self.history.public.update(dict.fromkeys(self.corpus.names, 0))
        while entries := self.store.ledger(self.history.head.seq if self.history.head else 0, 1000):
            for entry in entries:
                self.history.follow(entry)
        for first in self.run_blocks:
            self.schemas[first.block] = schema_of(
                unpack(self.store.blobs.read(first.weights.sha256))
            )
            # The first start, or a crash right after the run was created.
            if self.store.version(first.block) is None:
                name = first.weights.sha256
                record = VersionRecord(first.block, 0, name, None, 0, 0, None, (), "the beginning")
                body = self.version_body(record, features=self._first_features(first.block))
                entry = self._publish(record, body, [], Changes())
                self.history.follow(entry)
        now = self.clock.monotonic()
        stored = self.store.recover(state.KEPT_TIMES)
        recovered = recover_state(stored, now, self.config.fusion)
        self.state = replace(recovered, stopping=self.history.finished)
        self._look_at_standings()
        self.known = {worker.id: worker for worker in self.store.workers()}
        self.history.forget_workers(self.history.devices.keys() - self.known.keys())
        self.history.forget_orders(self.state.leases)
        for index in self.history.retention:
            self._retire(index)  # also what a crash has left
        leases = self.state.leases.values()
        self.quotas.uploads.keep({(x.task, x.fence) for x in leases}, self.policy.chunk_bytes)
        defended = self.options.defences
        self.quotas.begin(self.schemas.values(), self.policy.compression, defended=defended)
        self.traffic.begin(self.store.byte_counts(), self.known)
        self.ready = self._opened = True

    def _first_features(self, index: int) -> tuple[m.BlockVersion, ...]:
        """What version 0 of a block was trained on: of a parent's fusion block, all the others."""
        others = tuple(first for first in self.run_blocks if first.block != index)
        return others if index == self.config.fusion and index in self.facts.taken else ()

    def start(self) -> None:
        """Take the run over, once: with the first call, or the first tick.

        A process that opens the store and is refused (its port is taken, its settings differ) has
        not started the run.
        """
        if self._started or not self.ready:
            return  # without the lock: the event loop asks this before it reads a chunk
        with self.lock:
            if self._started or not self.ready:
                return
            self._started = True
            self.observer.on_start(self)
            self.save(self.state, [note("start", ledger.StartFacts(epoch=self.store.epoch))])

    def _read_document(self, document: Body) -> None:
        if document.get("protocol") != m.PROTOCOL:
            raise RunError(
                f"this run was begun with protocol {document.get('protocol')}, and this version of "
                f"blocktrain speaks {m.PROTOCOL}: continue it with the version that it began with, "
                "or start a new run in another folder"
            )
        fields = {**{k: v for k, v in document.items() if k != "policy"}, "run": self.store.run_id}
        self.facts = ledger.RunFacts.model_validate_json(json.dumps(fields))
        if self.facts.coordinator != self.identity.public_key:
            raise RunError(
                "coordinator.pem is not the key that this run began with; restore it from a backup"
            )
        self.config = make_config(dict(self.facts.config))
        if self.config.fingerprint != self.facts.fingerprint:
            raise RunError(
                "the run's settings mean something else to this version of blocktrain; "
                "use the version that it began with"
            )
        self.policy = make_policy({**EARLIER_RULES, **document["policy"]})
        self.options = replace(self.policy.options(self.config), frozen=self.facts.frozen)
        self.merge_options = self.policy.merge_options()

    def stop(self) -> None:
        """Answer no more calls. `close` follows, when no round is being closed."""
        self.ready = False

    def close(self) -> None:
        """Commit byte counters and the time that has passed, and close the store."""
        with self.lock:
            try:
                opened, self._opened = self._opened, False
                self.stop()
                if opened:
                    self._flush(self.clock.monotonic())
            except StorageFailed:
                pass  # it was reported when it happened, and the next start recovers
            finally:
                self.store.close()
                self.observer.close()

    # Reading

    @property
    def id(self) -> str:
        return self.facts.run

    @property
    def run_blocks(self) -> tuple[m.BlockVersion, ...]:
        """Version 0 of every block."""
        return self.facts.blocks

    @property
    def end_reason(self) -> str | None:
        """Why the run is over, or None."""
        return end_reason(self.state, self.options) if self.ready else None

    def newest(self, index: int) -> m.BlockVersion:
        """The newest version of a block."""
        record = self.version(index)
        return m.BlockVersion(
            block=index, version=record.version, weights=self.blob(record.weights)
        )

    def newest_versions(self) -> tuple[m.BlockVersion, ...]:
        """Of every block, as of one moment."""
        with self.lock:
            return tuple(self.newest(index) for index in sorted(self.state.blocks))

    def features_of(self, index: int) -> tuple[m.BlockVersion, ...]:
        """The versions of other blocks that the newest version of a block was trained on."""
        return self.history.features.get(index, ())

    def delta_chain(self, pin: m.BlockVersion) -> list[m.VersionDelta]:
        """The deltas that lead to a version, as far back as all of them are less than it is."""
        chain: list[m.VersionDelta] = []
        size = 0
        for step in reversed(self.history.deltas.get(pin.block, ())):
            if step.version == pin.version - len(chain):
                size += step.delta.length
                if size >= pin.weights.length:
                    break
                chain.append(step)
        return chain

    def version(self, index: int, number: int | None = None) -> VersionRecord:
        """A version that must be there."""
        newest = self._newest.get(index) or self.store.version(index)
        version = newest
        if newest is not None and number not in (None, newest.version):
            version = self.store.version(index, number)
        if newest is None or version is None:
            raise RunError(
                f"version {number} of block {index} is missing; restore the folder from a backup"
            )
        # Never over a newer one: this thread may have read before another one published.
        self._newest.setdefault(index, newest)
        return version

    def blob(self, name: str) -> m.Blob:
        """A stored blob as messages name it."""
        return m.Blob(sha256=name, length=self.store.blobs.size(name))

    def device(self, worker: str) -> str:
        return self.history.devices.get(worker, "")

    def worker_name(self, worker: str) -> str:
        record = self.known.get(worker)
        return record.name if record else ""

    # Counting

    def count_bytes(self, block: int, worker: str, bytes_in: int = 0, bytes_out: int = 0) -> None:
        """Add to the counters. They are committed with the next transaction."""
        known = worker if worker in self.known else ""
        self.traffic.add(ByteCount(block, known, bytes_in, bytes_out))

    def count_refusal(self, error: Refused, worker: str = "", block: int = 0) -> None:
        """Needs no lock: a stranger may cause many."""
        self.refusals[error.code] += 1
        if worker in self.history.workers or worker in self.history.devices:
            self.history.workers.setdefault(worker, UpdateCounts()).refused += 1
            if block in self.history.blocks:
                self.history.blocks[block].refused += 1
        self.observer.on_refusal(error, worker, block)

    # Changing

    def touch(self, after: state.RunState) -> None:
        """A change that is not stored: who was seen, and how far a task is."""
        self.state = after

    def save(
        self,
        after: state.RunState,
        notes: Sequence[Note] = (),
        dropped: Mapping[str, str] | None = None,
        nonces: Sequence[NonceRecord] = (),
        gone: Sequence[str] = (),
    ) -> None:
        """Commit the way to a new state, with ledger entries. Then it is the state."""
        entries = self._link(notes)
        changes = self._changes(after)
        changes = replace(changes, entries=entries, dropped=dropped or {})
        changes = replace(changes, nonces=nonces, gone=gone)
        if changes:
            self.store.save(changes)
        self._advance(after, changes, entries)

    def next_entry(self, kind: str, body: Body) -> ledger.LedgerEntry:
        """The entry that these facts become if they are committed now."""
        return link_entry(self.history.head, kind, body)

    def save_update(
        self,
        after: state.RunState,
        update: UpdateRecord,
        entry: ledger.LedgerEntry,
        receipt: m.Receipt,
        nonce: str,
    ) -> bytes:
        """Commit an accepted update, its receipt and the state after it. Gives the receipt."""
        nonces = [NonceRecord(update.worker, nonce, self.clock.time())]
        changes = replace(self._changes(after), nonces=nonces)
        answer = self.store.record_update(update, entry, m.write(receipt), changes)
        entries = () if answer.repeated else (entry,)
        self._advance(after, changes, entries, receipt.sentence)
        return answer.receipt

    def save_version(
        self,
        after: state.RunState,
        record: VersionRecord,
        body: Body,
        applied: Sequence[str],
        dropped: Mapping[str, str],
    ) -> None:
        """Commit the next version of a block and the state after it."""
        changes = replace(self._changes(after), dropped=dropped)
        entry = self._publish(record, body, applied, changes)
        self._newest[record.block] = record
        self._advance(after, changes, (entry,))
        self._retire(record.block)

    def _retire(self, index: int) -> None:
        """Remove what nobody needs of a block's older versions."""
        if not self.policy.keep_versions:
            return
        for name in sorted(self.history.retire(index, self.policy.keep_versions, self.held)):
            with suppress(OSError):  # the next start tries again
                self.store.blobs.delete(name)

    def _publish(
        self, record: VersionRecord, body: Body, applied: Sequence[str], changes: Changes
    ) -> ledger.LedgerEntry:
        parent = self.store.version(record.block)
        settled = {"applied": sorted(applied), "dropped": dict(changes.dropped)}
        entry = self.next_entry(
            "version", {**body, **settled, "parent": parent.weights if parent else None}
        )
        self.store.publish_version(record, entry, applied, changes)
        return entry

    def version_body(self, record: VersionRecord, **more: Any) -> Body:
        """What the ledger says of a version. `more` are fields of VersionFacts."""
        options = self.merge_options
        content = {
            "parent": None,
            "weights": self.blob(record.weights),
            "momentum": None,
            "parts": (),
            **more,
        }
        version = ledger.VersionFacts(
            block=record.block,
            version=record.version,
            outer=self.policy.outer,
            outer_learning_rate=options.outer_learning_rate,
            outer_momentum=options.outer_momentum,
            reason=record.reason,
            **content,
        )
        stored = {**vars(record), "norms": list(record.norms)}
        return {**stored, **version.model_dump(mode="json", exclude={"parent"})}

    def _link(self, notes: Sequence[Note]) -> list[ledger.LedgerEntry]:
        entries: list[ledger.LedgerEntry] = []
        for kind, body in notes:
            previous = entries[-1] if entries else self.history.head
            entries.append(link_entry(previous, kind, body))
        return entries

    def _changes(self, after: state.RunState) -> Changes:
        changes = state.changes_between(self.clock.monotonic(), self.state, after, self.known)
        return replace(changes, counts=self.traffic.take())

    def _advance(
        self,
        after: state.RunState,
        changes: Changes,
        entries: Sequence[ledger.LedgerEntry] = (),
        sentence: str = "",
    ) -> None:
        """What was just committed is known from now on."""
        for upload in state.abandoned_uploads(self.state, after):
            self.quotas.uploads.drop(upload)
        self.state = after
        self.traffic.settle()
        self.known.update((worker.id, worker) for worker in changes.workers)
        bodies = [(entry.kind, self.history.follow(entry)) for entry in entries]
        self._look_at_standings()
        if len(self.history.orders) > 2 * len(after.leases) + 64:
            self.history.forget_orders(after.leases)
        for kind, body in bodies:
            # The sentence is for people. The ledger does without.
            self.observer.on_commit(
                self, kind, {**body, "sentence": sentence} if sentence else body
            )

    def _look_at_standings(self) -> None:
        """Decisions see what the ledger says of every member."""
        if self.history.restood:
            self.state = replace(self.state, standings=dict(self.history.standings))
            self.history.restood = False

    def pass_time(self, now: float) -> None:
        """What is due by time alone. Called often."""
        self.observer.look(self, now)
        if now - self._last_flush > FLUSH_SECONDS:
            self._flush(now)

    def _flush(self, now: float) -> None:
        """Commit what changes without an event: byte counters, and the time left of what is out.

        Otherwise a restart would grant that time again.
        """
        self._last_flush = now
        self.quotas.look()
        out = [lease for lease in self.state.leases.values() if not lease.expired]
        rounds = [
            state.round_record(now, index, block)
            for index, block in self.state.blocks.items()
            if block.round.deadline is not None
        ]
        changes = replace(
            self._changes(self.state), times=state.lease_times(now, out), rounds=rounds
        )
        if changes:
            self.store.save(changes)
            self._advance(self.state, changes)
        if now - self._last_prune > PRUNE_SECONDS:
            self._last_prune = now
            self.store.forget_nonces(self.clock.time() - NONCE_SECONDS)
            self.forget_gone(now, GONE_SECONDS)

    def forget_gone(self, now: float, patience: float) -> None:
        """Members that were silent for so long are absent; strangers among them are forgotten."""
        after = forget_gone(now, self.state, self.options, patience)
        gone = strangers(after, self.known, self.history.delivered())
        if after is self.state and not gone:
            return
        self.save(after, gone=sorted(gone))
        self.history.forget_workers(gone)
        self.traffic.forget(gone)
        for worker in gone:
            del self.known[worker]
        absent = self.progress.keys() - after.workers.keys()
        self.progress = {k: v for k, v in self.progress.items() if k not in absent}
        self._look_at_standings()


def note(kind: str, content: m.Message, **more: Any) -> Note:
    """Facts for the ledger."""
    return kind, {**content.model_dump(mode="json"), **more}


def short(reason: str) -> str:
    return reason[:MAX_SENTENCE]
