"""The calls of the protocol on a run: each validates, asks a pure function what to do, commits, and only then answers.

A refusal changes nothing. The control plane never imports torch.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from blocktrain.config import Config
from blocktrain.coordinator import state
from blocktrain.coordinator.assignment import assign
from blocktrain.coordinator.policy import Policy
from blocktrain.coordinator.run import LiveRun, Observer, note
from blocktrain.coordinator.updates import accept, payload_limit
from blocktrain.protocol import ledger as facts
from blocktrain.protocol import messages as m
from blocktrain.protocol.identity import Identity, verify, worker_id
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.protocol.transfer import Plan, require_hash
from blocktrain.store.blobs import PIECE
from blocktrain.store.contract import Store, WorkerRecord

MANIFEST_SECONDS = 600
LEDGER_PAGE = 200
SOON = 0.1  # seconds in which a version is made


class Coordinator:
    """One run, as others call it: all of `protocol.calls.Calls` but `status`."""

    def __init__(
        self,
        store: Store,
        identity: Identity,
        clock: Callable[[], float],
        observer: Observer,
    ) -> None:
        self._live = LiveRun(store, identity, clock, observer)
        self._clock, self._identity = clock, identity

    @property
    def ready(self) -> bool:
        """Whether there is a run."""
        return self._live.ready

    @property
    def finished(self) -> str | None:
        """Why the run is over, or None."""
        return self._live.finished

    @property
    def live(self) -> LiveRun:
        """The run as it is now."""
        return self._live

    def begin(self, config: Config, policy: Policy, corpus: str, prepared: Path) -> None:
        """Create the run from what `prepare` has written."""
        self._live.begin(config, policy, corpus, prepared)

    def tick(self) -> None:
        """Do all that is due."""
        self._live.tick()

    def close(self) -> None:
        """Let go of the folder."""
        self._live.close()

    # What workers call

    def manifest(self) -> m.Manifest:
        """What is current, signed."""
        with self._running() as live:
            head = live.store.head()
            if head is None:
                raise Refused(Code.BUSY, "the ledger is empty")
            now = int(time.time() * 1000)
            manifest = m.Manifest(
                protocol=m.PROTOCOL,
                run=live.run.run,
                coordinator=live.run.coordinator,
                number=head.seq,
                head=head.hash,
                issued=now,
                expires=now + MANIFEST_SECONDS * 1000,
                config=live.run.config,
                fingerprint=live.run.fingerprint,
                corpus=live.run.corpus,
                blocks=tuple(live.newest(index) for index in sorted(live.state.blocks)),
                finished=live.finished is not None,
            )
            return self._identity.sign(manifest)

    def join(self, message: m.Join) -> m.JoinReply:
        """Take a worker in; the same key is the same worker."""
        with self._running() as live:
            if message.protocol != m.PROTOCOL:
                raise Refused(
                    Code.WRONG_PROTOCOL,
                    f"the worker speaks {message.protocol}, the coordinator {m.PROTOCOL}",
                )
            verify(message, message.public_key)
            name = worker_id(message.public_key)
            now = self._clock()
            old = live.state.workers.get(name)
            if old is not None and old.kicked:
                raise Refused(Code.KICKED)
            worker = replace(old or state.WorkerState(name), seen=now)
            if worker.seconds_per_step is None and message.speed > 0:
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
            live.known[name] = WorkerRecord(worker, message.public_key, message.name)
            live.save(now, state.with_worker(live.state, worker), notes)
            return m.JoinReply(
                protocol=m.PROTOCOL,
                run=live.run.run,
                worker=name,
                coordinator=live.run.coordinator,
                config=live.run.config,
                fingerprint=live.run.fingerprint,
                corpus=live.run.corpus,
                next=self._next(now, name, message.held),
            )

    def next_task(self, message: m.TaskRequest) -> m.TaskReply:
        """The next task of a worker, or why it has to wait."""
        with self._running() as live:
            worker = self._verified(message, message.run, message.worker)
            if message.fingerprint != live.run.fingerprint:
                raise Refused(
                    Code.WRONG_FINGERPRINT,
                    f"{message.fingerprint[:12]}... is not {live.run.fingerprint[:12]}...",
                )
            now = self._clock()
            if message.leaving:
                return m.TaskReply(next=self._leave(now, message.worker))
            speed = worker.seconds_per_step if message.speed == 0 else 1 / message.speed
            live.state = state.with_worker(
                live.state, replace(worker, seen=now, seconds_per_step=speed)
            )
        live.tick()
        with self._running():
            return m.TaskReply(next=self._next(self._clock(), message.worker, message.held))

    def heartbeat(self, message: m.Heartbeat) -> m.HeartbeatReply:
        """How far a task is. Extends nothing; says whether going on makes sense."""
        with self._running() as live:
            worker = self._verified(message, message.run, message.worker)
            now = self._clock()
            after = state.with_worker(live.state, replace(worker, seen=now))
            lease = after.leases.get(message.task)
            block = after.blocks.get(lease.block) if lease else None
            if (
                lease is None
                or block is None
                or (lease.fence, lease.worker) != (message.fence, message.worker)
            ):
                live.state = after
                return m.HeartbeatReply(
                    go_on=False, code=Code.STALE_FENCE, lease_seconds=0.0, deadline_seconds=0.0
                )
            trained = lease.trained or message.step >= lease.steps
            after = state.with_lease(
                after, replace(lease, done_steps=min(message.step, lease.steps), trained=trained)
            )
            if trained != lease.trained:
                live.save(now, after)
            live.state = after
            live.progress[message.worker] = message
            stale = block.version - lease.base > live.options.max_staleness
            return m.HeartbeatReply(
                go_on=not stale,
                code=Code.TOO_STALE if stale else None,
                lease_seconds=state.remaining(now, lease.expires) or 0.0,
                deadline_seconds=state.remaining(now, block.round.deadline) or 0.0,
            )

    def heartbeat_at_once(self, message: m.Heartbeat) -> m.HeartbeatReply | None:
        """`heartbeat`, if it need not wait for anybody and commits nothing; otherwise None, and nothing was done."""
        if not self._live.lock.acquire(blocking=False):
            return None
        try:
            lease = self._live.state.leases.get(message.task)
            commits = lease is not None and not lease.trained and message.step >= lease.steps
            return None if commits else self.heartbeat(message)
        finally:
            self._live.lock.release()

    def require_ticket(self, task: int, ticket: str) -> None:
        """Refuse a stranger. Needs no lock: what a run knows is never changed in place, only replaced."""
        self._require_run()
        self._ticketed(task, ticket)

    def upload_state(self, task: int, ticket: str) -> m.UploadState:
        """The chunks of a task that are here."""
        with self._running() as live:
            lease = self._ticketed(task, ticket)
            return m.UploadState(
                task=task, have=tuple(sorted(live.store.blobs.chunks(task, lease.fence)))
            )

    def holder(self, task: int) -> tuple[str, int]:
        """Whose a task is, and of which block; nobody's if it is not out."""
        lease = self._live.state.leases.get(task)
        return (lease.worker, lease.block) if lease else ("", 0)

    def put_chunk(
        self, task: int, index: int, ticket: str, content: bytes, digest: str
    ) -> m.UploadState:
        """Keep one chunk; the last may be shorter than the others."""
        with self._running() as live:
            lease = self._ticketed(task, ticket)
            cap = Plan(payload_limit(live, lease.block), live.policy.chunk_bytes)
            if not 0 <= index < cap.chunks or len(content) > live.policy.chunk_bytes:
                raise Refused(
                    Code.TOO_LARGE,
                    f"chunk {index} with {len(content)} bytes; a payload here has at most {cap.length} bytes",
                )
            require_hash(content, digest, f"chunk {index}")
        live.store.blobs.put_chunk(
            task, lease.fence, index, content
        )  # outside the lock: a slow disk must not stop the others
        with self._running() as live:
            live.count(lease.block, lease.worker, bytes_in=len(content))
            return m.UploadState(
                task=task, have=tuple(sorted(live.store.blobs.chunks(task, lease.fence)))
            )

    def submit(self, message: m.Submission) -> m.SubmitReply:
        """Judge an update, record it, and only then say so. The same (task, payload) gets the same receipt for ever."""
        with self._running() as live:
            worker = self._verified(message, message.run, message.worker)
            live.state = state.with_worker(live.state, replace(worker, seen=self._clock()))
        content = accept(live, message)
        live.tick()
        with self._running() as live:
            live.settle(
                message.block
            )  # a round that somebody else is closing now has this update in it
            receipt = m.read(m.Receipt, content)
            held = m.Held(block=message.block, optimizer=message.task, residual=message.task)
            return m.SubmitReply(
                receipt=receipt, next=self._next(self._clock(), message.worker, held)
            )

    def blob(self, name: str, start: int = 0, worker: str = "") -> Iterator[bytes]:
        """The bytes of a public blob, from `start` on."""
        path, block = self.blob_path(name)
        with path.open("rb") as file:
            file.seek(start)
            while piece := file.read(PIECE):
                self._live.count(block, worker, bytes_out=len(piece))
                yield piece

    def blob_path(self, name: str) -> tuple[Path, int]:
        """Where a public blob is, and which block it belongs to."""
        with self._running() as live:
            if name not in live.recall.public:
                raise Refused(Code.NOT_FOUND, "a blob that is not public, or not here")
            return live.store.blobs.path(name), live.recall.public[name]

    def ledger(self, after: int = 0) -> facts.LedgerPage:
        """A page of the public record."""
        with self._running() as live:
            head = live.store.head()
            found = [
                facts.LedgerEntry(
                    seq=e.seq,
                    kind=e.kind,  # type: ignore[arg-type]
                    body=e.body,
                    previous=e.previous,
                    hash=e.hash,
                )
                for e in live.store.ledger(after=after, limit=LEDGER_PAGE)
            ]
            return facts.LedgerPage(entries=tuple(found), total=head.seq if head else 0)

    # What operators call

    def kick(self, message: m.Kick) -> None:
        """Remove a worker: its open tasks are free, and it cannot come back."""
        with self._running() as live:
            if message.worker not in live.known:
                raise Refused(Code.UNKNOWN_WORKER, f"no worker {message.worker}")
            worker = live.state.workers.get(
                message.worker, live.known[message.worker].state
            )  # also one that has left
            if worker.kicked:
                return
            after = state.without_worker(
                state.with_worker(live.state, replace(worker, kicked=True)), message.worker
            )
            kicked = facts.KickFacts(worker=message.worker, reason=message.reason)
            live.save(self._clock(), after, notes=[note("kick", kicked)])
            live.tick()

    # Inside

    @contextmanager
    def _running(self) -> Iterator[LiveRun]:
        """The lock of a run that is there."""
        with self._live.lock:
            self._require_run()
            yield self._live

    def _require_run(self) -> None:
        if not self._live.ready:
            raise Refused(Code.BUSY, "the run is being prepared")
        self._live.start()
        self._live.store.require_open()

    def _verified(self, message: m.Signed, run: str, worker: str) -> state.WorkerState:
        known = self._live.known.get(worker)
        if run != self._live.run.run:
            raise Refused(
                Code.WRONG_RUN,
                f"the message is for {run[:12]}..., this is {self._live.run.run[:12]}...",
            )
        if known is None:
            raise Refused(Code.UNKNOWN_WORKER)
        verify(message, known.key)
        found = self._live.state.workers.get(worker)
        if found is None:
            raise Refused(Code.UNKNOWN_WORKER)
        if found.kicked:
            raise Refused(Code.KICKED)
        return found

    def _ticket(self, lease: state.Lease) -> str:
        """The secret of a lease: nothing to store, and nothing that another lease's holder could guess."""
        secret = self._live.identity.secret(b"tickets")
        return hmac.digest(
            secret, f"{self._live.run.run}:{lease.task}:{lease.fence}".encode(), "sha256"
        ).hex()[:32]

    def _ticketed(self, task: int, ticket: str) -> state.Lease:
        lease = self._live.state.leases.get(task)
        if lease is None:
            raise Refused(Code.UNKNOWN_TASK, f"task {task}")
        if not hmac.compare_digest(ticket.encode(), self._ticket(lease).encode()):
            raise Refused(
                Code.STALE_FENCE, f"the ticket is not that of the newest lease of task {task}"
            )
        return lease

    def _next(self, now: float, worker: str, held: m.Held | None) -> m.Task | m.Wait:
        """What a worker does next; a granted task is in the ledger before it is handed out."""
        if self._live.options.exclusive:
            self._live.merging.wait()  # what a block makes next starts from what it makes now
        decision = assign(now, self._live.state, self._live.options, worker)
        if isinstance(decision, state.Stop):
            return m.Wait(seconds=0.0, code="finished", reason=decision.reason)
        if isinstance(decision, state.Wait):
            return m.Wait(seconds=decision.seconds, code="no_work", reason=decision.reason)
        lease = decision.lease
        if not decision.resumed and self._live.moves(lease.block):
            return m.Wait(
                seconds=SOON,
                code="no_work",
                reason=f"the next version of block {lease.block} is being made",
            )
        if not decision.resumed or lease.task not in self._live.recall.orders:
            order = self._order(lease, held)
            lent = facts.LeaseFacts(worker=worker, fence=lease.fence, order=order)
            self._live.save(
                now, state.granted(self._live.state, decision), notes=[note("lease", lent)]
            )
        deadline = self._live.state.blocks[lease.block].round.deadline
        return m.Task(
            **dict(self._live.recall.orders[lease.task]),
            fence=lease.fence,
            ticket=self._ticket(lease),
            deadline_seconds=state.remaining(now, deadline) or 0.0,
            lease_seconds=state.remaining(now, lease.expires) or 0.0,
            chunk_bytes=self._live.policy.chunk_bytes,
            payload_limit=payload_limit(self._live, lease.block),
        )

    def _leave(self, now: float, worker: str) -> m.Wait:
        """A worker goes of its own will: nobody waits for it."""
        known = self._live.state.workers[worker]
        self._live.save(
            now, state.with_worker(self._live.state, replace(known, block=None))
        )  # after a restart it is still gone
        self._live.save(now, state.without_worker(self._live.state, worker))
        self._live.observer.left(self._live, worker)
        self._live.tick()
        return m.Wait(seconds=0.0, code="finished", reason="you have left; join again at any time")

    def _order(self, lease: state.Lease, held: m.Held | None) -> m.Order:
        base = self._live.version(lease.block, lease.base)
        continues = (
            m.Lineage(optimizer=held.optimizer, residual=held.residual)
            if held and held.block == lease.block
            else m.Lineage()
        )
        fusion = self._live.state.blocks[lease.block].fusion
        return m.Order(
            task=lease.task,
            number=lease.number,
            block=lease.block,
            base=lease.base,
            weights=self._live.blob(base.weights),
            seed=self._live.config.seed,
            stream=self._live.policy.stream(self._live.config, lease.block, lease.number),
            start_step=lease.start_step,
            steps=lease.steps,
            compression=self._live.policy.compression,
            continues=continues,
            features=tuple(
                self._live.newest(i) for i in sorted(self._live.state.blocks) if i != lease.block
            )
            if fusion
            else (),
        )
