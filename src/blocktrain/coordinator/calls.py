"""The calls of the protocol on a run. Each validates, asks a pure function, commits, then answers.

A refusal changes nothing. Nothing here imports torch.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from blocktrain.clock import Clock
from blocktrain.config import Config
from blocktrain.coordinator import state
from blocktrain.coordinator.assignment import assign
from blocktrain.coordinator.checks import Retrainer
from blocktrain.coordinator.closing import RoundCloser
from blocktrain.coordinator.limits.members import MOST_MEMBERS
from blocktrain.coordinator.merging.judge import Judge
from blocktrain.coordinator.policy import Policy
from blocktrain.coordinator.run import Observer, TrainingRun, note
from blocktrain.coordinator.updates import UpdateIntake, payload_limit
from blocktrain.errors import Conflict, Damaged
from blocktrain.protocol import ledger as facts
from blocktrain.protocol import messages as m
from blocktrain.protocol.identity import Identity, verify, worker_id
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.protocol.transfer import Plan, require_hash
from blocktrain.store.contract import NonceRecord, Store, WorkerRecord

MANIFEST_SECONDS = 600
LEDGER_PAGE, LEDGER_PAGE_BYTES = 200, 1 << 20  # at most; at least one entry
SOON = 0.1  # seconds in which a version is made
GOODBYE_SECONDS = 365 * state.DAY  # no run lasts longer: a goodbye is never taken twice


class Coordinator:
    """One run, as others call it: all of `protocol.calls.Calls` but `status`."""

    def __init__(
        self,
        store: Store,
        identity: Identity,
        clock: Clock,
        observer: Observer,
        judge: Callable[[TrainingRun], Judge] | None = None,
        retrainer: Callable[[TrainingRun], Retrainer] | None = None,
    ) -> None:
        self._clock, self._identity = clock, identity
        self.run = TrainingRun(store, identity, clock, observer)
        self._closer = RoundCloser(
            self.run,
            judge(self.run) if judge else None,
            retrainer(self.run) if retrainer else None,
        )
        self.intake = UpdateIntake(self.run, self._closer)

    @property
    def ready(self) -> bool:
        """Whether there is a run."""
        return self.run.ready

    @property
    def finished(self) -> str | None:
        """Why the run is over, or None."""
        return self.run.end_reason

    def begin(self, config: Config, policy: Policy, corpus: str, prepared: Path) -> None:
        """Create the run from the files that `prepare` has written."""
        self.run.begin(config, policy, corpus, prepared)
        self.tick()

    def tick(self) -> None:
        """Do all that is due."""
        self.run.start()
        self._closer.tick()

    def close_in_background(self) -> None:
        """From now on a thread closes rounds: no caller waits for a merge."""
        self._closer.start_thread()

    def close(self) -> None:
        """Close the store. Another coordinator may open it then."""
        self._closer.stop()
        self.run.close()
        self._closer.close()

    # What the HTTP side asks

    @property
    def chunk_bytes(self) -> int:
        """The longest chunk of an upload."""
        return self.run.policy.chunk_bytes

    def count_bytes(self, block: int, worker: str, bytes_in: int = 0, bytes_out: int = 0) -> None:
        self.run.count_bytes(block, worker, bytes_in, bytes_out)

    def count_refusal(self, error: Refused, worker: str = "", block: int = 0) -> None:
        """`worker` is blamed only for what it has signed, or holds the ticket for."""
        self.run.count_refusal(error, worker, block)

    # What workers call

    def manifest(self) -> m.Manifest:
        """What is current, signed."""
        with self._lock_run() as run:
            head = run.history.head
            if head is None:
                raise Refused(Code.BUSY, "the ledger is empty")
            now = int(self._clock.time() * 1000)
            manifest = m.Manifest(
                protocol=m.PROTOCOL,
                run=run.id,
                coordinator=run.facts.coordinator,
                number=head.seq,
                head=head.hash,
                issued=now,
                expires=now + MANIFEST_SECONDS * 1000,
                config=run.facts.config,
                fingerprint=run.facts.fingerprint,
                corpus=run.facts.corpus,
                blocks=run.newest_versions(),
                finished=run.end_reason is not None,
            )
            return self._identity.sign(manifest)

    def join(self, message: m.Join) -> m.JoinReply:
        """Admit a worker. The same key is the same worker."""
        with self._lock_run() as run:
            if message.protocol != m.PROTOCOL:
                raise Refused(
                    Code.WRONG_PROTOCOL,
                    f"the worker speaks {message.protocol}, the coordinator {m.PROTOCOL}",
                )
            verify(message, message.public_key)
            name = worker_id(message.public_key)
            now = self._clock.monotonic()
            old = run.state.workers.get(name)
            if old is None:
                self._require_place(now)
            if old is not None and old.kicked:
                raise Refused(Code.KICKED)
            worker = replace(old or self._returning(name, now), seen=now)
            believed = message.speed > 0 and not run.options.defences
            if worker.seconds_per_step is None and believed:
                worker = replace(worker, seconds_per_step=1 / message.speed)
            notes = []
            if old is None:
                joined = facts.JoinFacts(
                    worker=name,
                    public_key=message.public_key,
                    name=message.name,
                    device=message.device,
                )
                notes.append(note("join", joined))
            run.known[name] = WorkerRecord(name, message.public_key, message.name)
            after = state.with_worker(run.state, worker)
            if run.options.exclusive:  # its lease is long, and nobody else gets the task meanwhile
                after = state.begin_again(after, name)
            run.save(after, notes)
            return m.JoinReply(
                protocol=m.PROTOCOL,
                run=run.id,
                worker=name,
                coordinator=run.facts.coordinator,
                config=run.facts.config,
                fingerprint=run.facts.fingerprint,
                corpus=run.facts.corpus,
                next=self._next(now, name, message.held),
            )

    def _require_place(self, now: float) -> None:
        """Where too many are present, those that are silent make room."""
        run = self.run
        if len(run.state.workers) >= MOST_MEMBERS:
            run.forget_gone(now, run.options.alive)
        if len(run.state.workers) >= MOST_MEMBERS:
            raise Refused(Code.BUSY, f"{MOST_MEMBERS} workers are here")

    def _returning(self, name: str, now: float) -> state.WorkerState:
        """A worker that is new to this process, with what was measured of it before it left."""
        known = self.run.known.get(name)
        if known is None or not self.run.options.defences:
            return state.WorkerState(name)
        return replace(state.worker_state(known, now), block=None)

    def next_task(self, message: m.TaskRequest) -> m.TaskReply:
        """The next task of a worker, or why it has to wait."""
        with self._lock_run() as run:
            worker = self._verify(message, message.run, message.worker)
            if message.fingerprint != run.facts.fingerprint:
                raise Refused(
                    Code.WRONG_FINGERPRINT,
                    f"{message.fingerprint[:12]}... is not {run.facts.fingerprint[:12]}...",
                )
            now = self._clock.monotonic()
            if message.leaving:
                return m.TaskReply(next=self._leave(message.worker, message.nonce))
            believed = message.speed > 0 and not run.options.defences
            speed = 1 / message.speed if believed else worker.seconds_per_step
            seen = replace(worker, seen=now, seconds_per_step=speed)
            run.touch(state.with_worker(run.state, seen))
        self.tick()
        with self._lock_run():
            now = self._clock.monotonic()
            return m.TaskReply(next=self._next(now, message.worker, message.held))

    def heartbeat(self, message: m.Heartbeat) -> m.HeartbeatReply:
        """How far a task is. Extends nothing; says whether it is worth going on."""
        with self._lock_run() as run:
            worker = self._verify(message, message.run, message.worker)
            now = self._clock.monotonic()
            after = state.with_worker(run.state, replace(worker, seen=now))
            lease = after.leases.get(message.task)
            block = after.blocks.get(lease.block) if lease else None
            holder = (message.fence, message.worker)
            if lease is None or block is None or (lease.fence, lease.worker) != holder:
                run.touch(after)
                return m.HeartbeatReply(
                    go_on=False, code=Code.STALE_FENCE, lease_seconds=0.0, deadline_seconds=0.0
                )
            trained = lease.trained or message.step >= lease.steps
            done_steps = min(message.step, lease.steps)
            after = state.with_lease(after, replace(lease, done_steps=done_steps, trained=trained))
            if trained != lease.trained:
                run.save(after)
            run.touch(after)
            run.progress[message.worker] = message
            stale = block.version - lease.base > run.options.max_staleness
            return m.HeartbeatReply(
                go_on=not stale,
                code=Code.TOO_STALE if stale else None,
                lease_seconds=state.remaining(now, lease.expires) or 0.0,
                deadline_seconds=state.remaining(now, block.round.deadline) or 0.0,
            )

    def heartbeat_at_once(self, message: m.Heartbeat) -> m.HeartbeatReply | None:
        """`heartbeat`, if it need not wait and commits nothing. Otherwise None, and no effect."""
        if not self.run.lock.acquire(blocking=False):
            return None
        try:
            lease = self.run.state.leases.get(message.task)
            commits = lease is not None and not lease.trained and message.step >= lease.steps
            return None if commits else self.heartbeat(message)
        finally:
            self.run.lock.release()

    def require_ticket(self, task: int, ticket: str) -> None:
        """Refuse a stranger. Needs no lock: the run's state is replaced, never changed."""
        self._require_run()
        self._check_ticket(task, ticket)

    def upload_state(self, task: int, ticket: str) -> m.UploadState:
        """The chunks of a task that are here."""
        with self._lock_run():
            return self._upload_state(self._check_ticket(task, ticket))

    def _upload_state(self, lease: state.Lease) -> m.UploadState:
        chunks = self.run.store.blobs.chunks(lease.task, lease.fence)
        return m.UploadState(task=lease.task, have=tuple(sorted(chunks)))

    def holder(self, task: int) -> tuple[str, int]:
        """The worker and the block of a task; ("", 0) if it is not out."""
        lease = self.run.state.leases.get(task)
        return (lease.worker, lease.block) if lease else ("", 0)

    def put_chunk(
        self, task: int, index: int, ticket: str, content: bytes, digest: str
    ) -> m.UploadState:
        """Keep one chunk. The last one may be shorter than the others."""
        with self._lock_run() as run:
            lease = self._check_ticket(task, ticket)
            cap = Plan(payload_limit(run, lease.block), run.policy.chunk_bytes)
            if not 0 <= index < cap.chunks or len(content) > run.policy.chunk_bytes:
                raise Refused(
                    Code.TOO_LARGE,
                    f"chunk {index} with {len(content)} bytes; "
                    f"a payload here has at most {cap.length} bytes",
                )
            require_hash(content, digest, f"chunk {index}")
            run.quotas.require_room(run.state, lease, index, len(content))
        # Without the lock: a slow disk must not stop the others.
        run.quotas.uploads.put((task, lease.fence), index, content)
        with self._lock_run() as run:
            run.count_bytes(lease.block, lease.worker, bytes_in=len(content))
            try:
                return self._upload_state(self._check_ticket(task, ticket))
            except Refused:  # the lease ended while the chunk was written
                run.quotas.uploads.drop((task, lease.fence))
                raise

    def submit(self, message: m.Submission) -> m.SubmitReply:
        """Judge an update, record it, and only then answer.

        The same task and payload get the same receipt for ever.
        """
        with self._lock_run() as run:
            worker = self._verify(message, message.run, message.worker)
            seen = replace(worker, seen=self._clock.monotonic())
            run.touch(state.with_worker(run.state, seen))
        content = self.intake.accept(message)
        self.tick()
        with self._lock_run():
            # A round that another thread is closing now has this update in it.
            self._closer.settle(message.block)
            receipt = m.read(m.Receipt, content)
            held = m.Held(block=message.block, optimizer=message.task, residual=message.task)
            now = self._clock.monotonic()
            return m.SubmitReply(receipt=receipt, next=self._next(now, message.worker, held))

    def blob(self, name: str, start: int = 0, worker: str = "") -> Iterator[bytes]:
        """The bytes of a public blob, from `start` on."""
        block = self._public_blob(name)
        with self._reading(name):
            for piece in self.run.store.blobs.pieces(name, start):
                self.run.count_bytes(block, worker, bytes_out=len(piece))
                yield piece

    def blob_size(self, name: str) -> int:
        """Length of a public blob."""
        self._public_blob(name)
        with self._reading(name):
            return self.run.store.blobs.size(name)

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """What is removed meanwhile is not found; it is not damaged."""
        try:
            yield
        except Damaged:
            self._public_blob(name)
            raise

    def _public_blob(self, name: str) -> int:
        """The block that a public blob belongs to. One of the corpus is known to be intact."""
        with self._lock_run() as run:
            if name not in run.history.public:
                raise Refused(Code.NOT_FOUND, "no public blob has this name")
            block = run.history.public[name]
        run.corpus.verify(name)
        return block

    def ledger(self, after: int = 0) -> facts.LedgerPage:
        """A page of the public record."""
        with self._lock_run() as run:
            entries = run.store.ledger(after=after, limit=LEDGER_PAGE)
            sizes = accumulate(len(entry.body) for entry in entries)
            count = max(1, sum(size <= LEDGER_PAGE_BYTES for size in sizes))
            head = run.history.head
            total = head.seq if head else 0
            return facts.LedgerPage(entries=tuple(entries[:count]), total=total)

    # What operators call

    def kick(self, message: m.Kick) -> None:
        """Remove a worker: its open tasks are free, and it cannot come back."""
        with self._lock_run() as run:
            if message.worker not in run.known:
                raise Refused(Code.UNKNOWN_WORKER, f"no worker {message.worker}")
            now = self._clock.monotonic()
            worker = run.state.workers.get(message.worker)
            if worker is None:  # it has left
                worker = state.worker_state(run.known[message.worker], now)
            if worker.kicked:
                return
            kicked = state.with_worker(run.state, replace(worker, kicked=True))
            after = state.without_worker(kicked, message.worker)
            kick = facts.KickFacts(worker=message.worker, reason=message.reason)
            run.save(after, [note("kick", kick)])
            self.tick()

    # Inside

    @contextmanager
    def _lock_run(self) -> Iterator[TrainingRun]:
        """The run, locked. Refused while there is none."""
        with self.run.lock:
            self._require_run()
            yield self.run

    def _require_run(self) -> None:
        if not self.run.ready:
            raise Refused(Code.BUSY, "the run is being prepared")
        self.run.start()
        self.run.store.require_open()

    def _verify(self, message: m.Signed, run: str, worker: str) -> state.WorkerState:
        known = self.run.known.get(worker)
        if run != self.run.id:
            raise Refused(
                Code.WRONG_RUN, f"the message is for {run[:12]}..., this is {self.run.id[:12]}..."
            )
        if known is None:
            raise Refused(Code.UNKNOWN_WORKER)
        verify(message, known.key)
        member = self.run.state.workers.get(worker)
        if member is None:
            raise Refused(Code.UNKNOWN_WORKER)
        if member.kicked:
            raise Refused(Code.KICKED)
        return member

    def _ticket(self, lease: state.Lease) -> str:
        """The secret of a lease. Derived, so none is stored and none can be guessed."""
        text = f"{self.run.id}:{lease.task}:{lease.fence}".encode()
        return hmac.digest(self._identity.secret(b"tickets"), text, "sha256").hex()[:32]

    def _check_ticket(self, task: int, ticket: str) -> state.Lease:
        lease = self.run.state.leases.get(task)
        if lease is None:
            raise Refused(Code.UNKNOWN_TASK, f"task {task}")
        if not hmac.compare_digest(ticket.encode(), self._ticket(lease).encode()):
            raise Refused(
                Code.STALE_FENCE, f"the ticket is not that of the newest lease of task {task}"
            )
        return lease

    def _next(self, now: float, worker: str, held: m.Held | None) -> m.Task | m.Wait:
        """What a worker does next. A task is in the ledger before it is handed out."""
        run = self.run
        if run.options.exclusive:
            # The next version of a block starts from the one that is being made now.
            self._closer.wait_released()
        decision = assign(now, run.state, run.options, worker, held.block if held else None)
        if isinstance(decision, state.Stop):
            return m.Wait(seconds=0.0, code="finished", reason=decision.reason)
        if isinstance(decision, state.Postpone):
            return m.Wait(seconds=decision.seconds, code="no_work", reason=decision.reason)
        if not decision.resumed and (problem := run.quotas.use.problem):
            reason = f"the run has stopped taking updates: {problem}"
            return m.Wait(seconds=run.options.poll, code="no_work", reason=reason)
        steps = run.corpus.most_steps(decision.lease.block, *decision.lease.batches)
        lease = replace(decision.lease, steps=steps)
        decision = replace(decision, lease=lease)
        if not decision.resumed and self._closer.is_closing(lease.block):
            reason = f"the next version of block {lease.block} is being made"
            return m.Wait(seconds=SOON, code="no_work", reason=reason)
        if not decision.resumed or lease.task not in run.history.orders:
            order = self._order(lease, held)
            lent = facts.LeaseFacts(worker=worker, fence=lease.fence, order=order)
            run.save(state.apply_grant(run.state, decision), [note("lease", lent)])
        deadline = run.state.blocks[lease.block].round.deadline
        order = run.history.orders[lease.task]
        return m.Task(
            **dict(order),
            fence=lease.fence,
            ticket=self._ticket(lease),
            deadline_seconds=state.remaining(now, deadline) or 0.0,
            lease_seconds=state.remaining(now, lease.expires) or 0.0,
            chunk_bytes=run.policy.chunk_bytes,
            payload_limit=payload_limit(run, lease.block),
            alone=run.policy.exclusive,
            deltas=tuple(step for pin in order.versions for step in run.delta_chain(pin)),
        )

    def _leave(self, worker: str, nonce: str) -> m.Wait:
        """A worker leaves by itself: no round waits for it.

        Who has recorded its goodbye cannot send it away again later.
        """
        run = self.run
        known = run.state.workers[worker]
        used = NonceRecord(worker, nonce, self._clock.time() + GOODBYE_SECONDS)
        try:
            # First without its block: then it has left after a restart, too.
            run.save(state.with_worker(run.state, replace(known, block=None)), nonces=[used])
        except Conflict as error:
            raise Refused(Code.REPLAYED, str(error)) from None
        run.save(state.without_worker(run.state, worker))
        run.observer.on_leave(run, worker)
        self.tick()
        return m.Wait(seconds=0.0, code="finished", reason="you have left; join again at any time")

    def _order(self, lease: state.Lease, held: m.Held | None) -> m.Order:
        run = self.run
        base = run.version(lease.block, lease.base)
        continues = m.Lineage()
        if held and held.block == lease.block:
            continues = m.Lineage(optimizer=held.optimizer, residual=held.residual)
        features: Sequence[m.BlockVersion] = ()
        if run.state.blocks[lease.block].fusion:
            features = [run.newest(i) for i in sorted(run.state.blocks) if i != lease.block]
        return m.Order(
            task=lease.task,
            number=lease.number,
            block=lease.block,
            base=lease.base,
            weights=run.blob(base.weights),
            seed=run.config.seed,
            position=lease.position,
            shards=run.corpus.shards(lease.block, *lease.batches),
            start_step=lease.start_step,
            steps=lease.steps,
            compression=run.policy.compression,
            continues=continues,
            features=tuple(features),
        )
