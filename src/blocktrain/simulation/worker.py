"""An honest worker: the loop of `worker.loop` without torch, on the real session.

Session, retries, heartbeats, uploads, compression and the way from deltas to weights are real.
Training is a pause and a small random change. One slot of the lane of tags gets exactly one unit,
so that a lost update shows as 0 there and a doubled one as 2.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from blocktrain.config import Config
from blocktrain.errors import WrongBytes
from blocktrain.protocol import messages as m
from blocktrain.protocol.calls import Calls
from blocktrain.protocol.compression import METHODS, add_delta, compress, compress_weights
from blocktrain.protocol.identity import Identity
from blocktrain.protocol.ledger import lineage
from blocktrain.protocol.refusals import Code, Refused, Then
from blocktrain.protocol.tensors import Tensors, pack, unpack
from blocktrain.protocol.transfer import Plan, sha256
from blocktrain.simulation.begin import LANE, TAGS
from blocktrain.simulation.network import put_all
from blocktrain.simulation.scheduler import Fiber, Scheduler, SimulatedTime
from blocktrain.worker.session import (
    HeartbeatThread,
    Surroundings,
    UpdateUpload,
    WorkerSession,
    pause,
)

ANSWER_SECONDS = 0.3  # as in worker.loop: how long to wait for an answer before the next task
REJOIN_SECONDS = 1.0


@dataclass(frozen=True)
class TrainedUpdate:
    """A trained task that has no answer yet. See `worker.state.PendingUpdate`."""

    task: m.Task
    submission: m.Submission
    payload: bytes
    residual: Tensors
    lineage: str


@dataclass(frozen=True)
class Continuation:
    """What the next task of a block continues."""

    optimizer: int | None = None
    lineage: str | None = None
    residual_of: int | None = None
    residual: Tensors = field(default_factory=dict)


@dataclass
class WorkerDisk:
    """What survives a kill. Each write is atomic and durable, as `files.write_atomic`."""

    accepted: dict[int, Continuation] = field(default_factory=dict)  # by block
    pending: dict[int, TrainedUpdate] = field(default_factory=dict)  # by block
    last: int | None = None  # the block that was trained last
    coordinator: str = ""  # its key


class Witness(Protocol):
    """What members tell the invariants, which the coordinator cannot know."""

    def sent(self, payload: str, tags: Tensors) -> None:
        """A payload, by its hash, with what it adds to the lane."""

    def acknowledged(self, worker: str, receipt: m.Receipt, update: str) -> None:
        """An honest worker has a receipt."""

    def repeated(self, first: m.Receipt, again: m.Receipt) -> None:
        """Two answers to the same submission."""

    def refused(self, worker: int, error: Refused, update: str = "") -> None:
        """An honest worker was refused; `update` is what it has submitted."""

    def followed(self, weights: str, made: str) -> None:
        """Deltas were said to lead to these weights, and have led to those, by their hashes."""

    def trespassed(self, what: str) -> None:
        """A call was answered that must be refused."""


@dataclass(frozen=True)
class Outside:
    """What a member needs of its world."""

    scheduler: Scheduler
    clock: SimulatedTime
    client: Calls
    identity: Identity
    config: Config
    witness: Witness
    draw: random.Random


class HonestWorker:
    """One process of an honest worker after the other, on the same disk."""

    honest = True

    def __init__(self, number: int, seconds_per_step: float, outside: Outside) -> None:
        self.number, self.pace, self.outside = number, seconds_per_step, outside
        self.disk = WorkerDisk()
        self.ended = ""  # why it has left for good
        self.leaving = False
        self._fibers: list[Fiber] = []
        self._spawn(self._main, "main")

    @property
    def id(self) -> str:
        return self.outside.identity.worker

    def _spawn(self, work: Callable[[], None], name: str) -> None:
        self._fibers = [fiber for fiber in self._fibers if not fiber.ended]
        fiber = self.outside.scheduler.spawn(work, f"worker {self.number} {name}")
        self._fibers.append(fiber)

    def kill(self) -> None:
        for fiber in self._fibers:
            fiber.kill()
        self._fibers = []

    def restart(self) -> None:
        self.kill()
        if not self.ended:
            self.leaving = False
            self._spawn(self._main, "main")

    def _report(self, error: Refused, update: str = "") -> None:
        if self.honest:
            self.outside.witness.refused(self.number, error, update)

    # One process

    def _main(self) -> None:
        out = self.outside
        surroundings = Surroundings(
            start=self._spawn,
            upload=put_all,
            nonce=lambda: f"{out.draw.getrandbits(128):032x}",
            uniform=out.draw.uniform,
        )
        self.session = WorkerSession(
            out.client, out.identity, lambda *_, **__: None, out.clock, surroundings
        )
        self.states: dict[int, Continuation] = dict(self.disk.accepted)
        self._held: m.Held | None = None
        self._upload: UpdateUpload | None = None
        self._sent: TrainedUpdate | None = None  # what the upload sends
        self._weights: dict[str, Tensors] = {}
        self._refused: set[int] = set()
        while True:
            try:
                self._work(self._join())
                return
            except Refused as error:
                if error.code in (Code.KICKED, Code.RUN_FINISHED):
                    self.ended = str(error)
                    return
                if error.rule.then is not Then.REJOIN:
                    raise
                if self._upload is not None:
                    self._upload.cancel()
                self._upload, self.states, self._held = None, dict(self.disk.accepted), None
                pause(out.clock, REJOIN_SECONDS, lambda: False)

    def _join(self) -> m.JoinReply:
        session, out = self.session, self.outside

        def call() -> m.JoinReply:
            message = m.Join(
                protocol=m.PROTOCOL,
                public_key=out.identity.public_key,
                name=f"worker {self.number}",
                device="cpu",
                memory=1 << 30,
                speed=0.0,
                held=self._held_state(),
                nonce=session.surroundings.nonce(),
                time=session.now_ms(),
            )
            return session.client.join(out.identity.sign(message))

        reply = session.retries.call(call, lambda: False)
        session.run, session.fingerprint, session.key = (
            reply.run,
            reply.fingerprint,
            reply.coordinator,
        )
        return reply

    def _held_state(self) -> m.Held | None:
        """As after a restart: a pending update counts as accepted."""
        block = self.disk.last
        if self._held is not None or block is None:
            return self._held
        state, pending = self.disk.accepted.get(block, Continuation()), self.disk.pending.get(block)
        optimizer = pending.task.task if pending else state.optimizer
        return m.Held(block=block, optimizer=optimizer, residual=state.residual_of)

    def _work(self, reply: m.JoinReply) -> None:
        todo: m.Task | m.Wait | None = self._resend_all() or reply.next
        session = self.session
        while True:
            if self.leaving:
                self._await_answer()
                session.leave()
                return
            if todo is None:
                todo = session.retries.call(
                    lambda: session.next_task(self._held_state(), 0.0), lambda: False
                )
            if isinstance(todo, m.Wait) and todo.code == "finished":
                self._await_answer()
                session.leave()
                self.ended = todo.reason
                return
            try:
                todo = self._idle(todo) if isinstance(todo, m.Wait) else self._do(todo)
            except Refused as error:
                self._report(error)
                if error.rule.then is not Then.NEXT:
                    raise
                self._held, todo = None, None

    def _idle(self, wait: m.Wait) -> m.Task | m.Wait | None:
        end = self.outside.clock.monotonic() + max(wait.seconds, 0.05)
        while (left := end - self.outside.clock.monotonic()) > 0:
            self.outside.clock.sleep(min(left, 0.5))
            if self._upload is not None and self._upload.finished.is_set():
                return self._take_answer()
        return None

    def _do(self, task: m.Task) -> m.Task | m.Wait | None:
        pending = self.disk.pending.get(task.block) if self._upload is None else None
        if pending is not None and _answers(pending, task):
            claimed = pending.submission.model_copy(update={"fence": task.fence})
            self._send(TrainedUpdate(**{**vars(pending), "task": task, "submission": claimed}))
        elif (trained := self._train(task)) is not None:
            self._send(trained)
        else:
            return None
        if self._is_answered_in(ANSWER_SECONDS):
            return self._take_answer()
        session = self.session
        reply = session.retries.call(
            lambda: session.heartbeat(task, task.steps, None, 0), lambda: False
        )
        return None if reply.go_on else self._await_answer()

    # A task

    def _train(self, task: m.Task) -> TrainedUpdate | None:
        """None, if it was abandoned."""
        base = self._fetch_weights(task)
        self.disk.last = task.block
        began = self.outside.clock.monotonic()
        with HeartbeatThread(self.session, task) as heartbeat:
            for step in range(1, task.steps + 1):
                self.outside.clock.sleep(self.pace)
                heartbeat.step, heartbeat.loss = step, 2.0
                if heartbeat.error is not None:
                    raise heartbeat.error
                if heartbeat.cancelled:
                    self._held = None
                    return None
        seconds = self.outside.clock.monotonic() - began
        self._await_answer()
        state = self.states.get(task.block, Continuation())
        if state.optimizer is None or state.optimizer != task.continues.optimizer:
            state = Continuation()
        if state.optimizer in self._refused:
            return None
        return self._finish(task, state, base, seconds)

    def change(self, task: m.Task, base: Tensors) -> tuple[Tensors, Tensors]:
        """(what training adds to each weight, the part of it in the lane)."""
        draw = np.random.default_rng([self.number, task.task, task.fence])
        delta = {
            name: (1e-3 * draw.standard_normal(t.shape)).astype(np.float32)
            for name, t in base.items()
        }
        delta[LANE] = np.zeros(TAGS, np.float32)
        delta[LANE][task.task % TAGS] = unit(task.compression)
        return delta, {LANE: delta[LANE]}

    def _finish(
        self, task: m.Task, state: Continuation, base: Tensors, seconds: float
    ) -> TrainedUpdate:
        delta, tags = self.change(task, base)
        residual: Tensors = {}
        if METHODS[task.compression].exact:
            new = {name: base[name] + delta[name] for name in base}
            payload = compress_weights(new, task.compression)
        else:
            payload, residual = compress(delta, state.residual, task.compression)
        self.outside.witness.sent(sha256(payload), tags)
        continued = m.Lineage(optimizer=state.optimizer, residual=state.residual_of)
        name = lineage(state.lineage, task.order, continued)
        submission = self.submission(task, payload, seconds, continued, name)
        pending = TrainedUpdate(task, submission, payload, residual, name)
        self.disk.pending[task.block] = pending  # durable before it is sent
        self.states[task.block] = Continuation(task.task, name, state.residual_of, state.residual)
        self._held = m.Held(block=task.block, optimizer=task.task, residual=state.residual_of)
        return pending

    def submission(
        self, task: m.Task, payload: bytes, seconds: float, continued: m.Lineage, name: str
    ) -> m.Submission:
        config = self.outside.config
        return m.Submission(
            run=self.session.run,
            worker=self.id,
            task=task.task,
            fence=task.fence,
            block=task.block,
            base=task.base,
            payload_sha256=sha256(payload),
            payload_length=len(payload),
            chunks=Plan(len(payload), task.chunk_bytes).chunks,
            steps=task.steps,
            tokens=task.steps * config.batch * config.context,
            loss_before=3.0,
            loss_after=2.5,
            seconds=seconds,
            continued=continued,
            lineage=name,
            nonce=self.session.surroundings.nonce(),
            time=self.session.now_ms(),
        )

    def _fetch_weights(self, task: m.Task) -> Tensors:
        """Weights out of those of before and deltas, or whole. See `worker.task.Downloads`."""
        name = task.weights.sha256
        path = m.delta_path(name, task.deltas, self._weights.__contains__)
        if path:
            tensors = self._weights[path[0].parent]
            for step in path:
                tensors = add_delta(tensors, self._fetch(step.delta))
            self.outside.witness.followed(name, sha256(pack(tensors)))
            self._weights[name] = tensors
        if name not in self._weights:
            self._weights[name] = unpack(self._fetch(task.weights))
        self._weights = {name: self._weights[name]}
        return self._weights[name]

    def _fetch(self, blob: m.Blob) -> bytes:
        session = self.session

        def attempt() -> bytes:
            content = b"".join(session.client.blob(blob.sha256, 0, self.id))
            if sha256(content) != blob.sha256:
                raise WrongBytes("a blob arrived with wrong bytes")
            return content

        return session.retries.call(attempt, lambda: False)

    # Updates in transit

    def _send(self, pending: TrainedUpdate, *, resend: bool = False) -> None:
        self._sent = pending
        self._upload = UpdateUpload(
            self.session, pending, pending.payload, pending.residual, resend=resend
        )

    def _resend_all(self) -> m.Task | m.Wait | None:
        todo = None
        for _, pending in sorted(self.disk.pending.items()):
            self._send(pending, resend=True)
            todo = self._await_answer()
        return todo

    def _is_answered_in(self, seconds: float) -> bool:
        end = self.outside.clock.monotonic() + seconds
        while self._upload is not None and not self._upload.finished.is_set():
            if self.outside.clock.monotonic() >= end:
                return False
            self.outside.clock.sleep(0.1)
        return True

    def _await_answer(self) -> m.Task | m.Wait | None:
        if self._upload is None:
            return None
        self._is_answered_in(float("inf"))
        return self._take_answer()

    def _take_answer(self) -> m.Task | m.Wait | None:
        upload, self._upload = self._upload, None
        if upload is None or self._sent is None:
            return None
        sent, block = self._sent, self._sent.task.block
        if upload.reply is not None:
            receipt = upload.reply.receipt
            self.outside.witness.acknowledged(self.id, receipt, sent.submission.update)
            self.disk.pending.pop(block, None)
            state = Continuation(sent.task.task, sent.lineage, sent.task.task, sent.residual)
            self.disk.accepted[block] = self.states[block] = state
            self._refused.discard(sent.task.task)
            if self._held is not None and self._held.block == block:
                self._held = m.Held(block=block, optimizer=state.optimizer, residual=sent.task.task)
            return upload.reply.next
        error = upload.error
        if isinstance(error, Refused):
            self._report(error, sent.submission.update)
        if not (isinstance(error, Refused) and error.rule.then is Then.NEXT):
            raise error or RuntimeError("an update ended without an answer")
        self.disk.pending.pop(block, None)
        self._refused.add(sent.task.task)
        self.states[block] = self.disk.accepted.get(block, Continuation())
        self._held = None
        return None


def unit(method: str) -> float:
    """What one update adds to its slot: the method sends it without an error."""
    return float(METHODS[method].levels) if method in ("int8", "int4") else 1.0


def _answers(pending: TrainedUpdate, task: m.Task) -> bool:
    mine = pending.task.order.model_copy(update={"continues": task.continues})
    return mine == task.order
