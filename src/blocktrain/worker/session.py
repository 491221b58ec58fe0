"""A worker's session with its coordinator: signed calls, retries, heartbeats, uploads."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from blocktrain.clock import Clock
from blocktrain.errors import BlockTrainError, Interrupted, Unreachable
from blocktrain.protocol import messages as m
from blocktrain.protocol.calls import Calls
from blocktrain.protocol.identity import Identity, new_nonce, verify
from blocktrain.protocol.refusals import Code, Refused, Then
from blocktrain.protocol.tensors import Tensors
from blocktrain.protocol.transfer import split
from blocktrain.web.client import retry_later, upload

T = TypeVar("T")
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 15.0  # seconds
POLL_SECONDS = 0.05  # how soon a stop is noticed
SHORTEST_INTERVAL, LONGEST_INTERVAL = 2.0, 10.0  # seconds between two heartbeats
HEARTBEATS = 18  # until a task's deadline
RESENDS = 5  # damaged in transit so often: something else is wrong


class EventHandler(Protocol):
    """Receives every event of a worker: a kind and its fields. Called from several threads."""

    def __call__(self, kind: str, /, **fields: Any) -> None: ...


def _start_thread(work: Callable[[], None], name: str) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()


class TrainedTask(Protocol):
    """A task and its update, which has no answer yet. See `worker.state.PendingUpdate`."""

    @property
    def task(self) -> m.Task: ...

    @property
    def submission(self) -> m.Submission: ...


class Uploader(Protocol):
    """See `web.client.upload`."""

    def __call__(
        self,
        client: Calls,
        task: int,
        ticket: str,
        chunks: list[bytes],
        progress: Callable[[int], None],
    ) -> None: ...


@dataclass(frozen=True)
class Surroundings:
    """What a session needs of its process besides a clock. A simulation brings its own."""

    start: Callable[[Callable[[], None], str], None] = _start_thread
    upload: Uploader = upload
    nonce: Callable[[], str] = new_nonce
    uniform: Callable[[float, float], float] = random.uniform


def pause(clock: Clock, seconds: float, stopped: Callable[[], bool]) -> None:
    """Sleep, and raise Interrupted as soon as the worker is stopped."""
    end = clock.monotonic() + seconds
    while True:
        if stopped():
            raise Interrupted("stopped; an update without an answer is sent at the next start")
        remaining = end - clock.monotonic()
        if remaining <= 0:
            return
        clock.sleep(min(remaining, POLL_SECONDS))


class Retries:
    """Repeats a call with growing, jittered pauses until it is answered.

    Shared by all threads of a worker, so that an outage is announced once.
    """

    def __init__(
        self,
        emit: EventHandler,
        clock: Clock,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._emit, self._clock, self._uniform = emit, clock, uniform
        self._away = False
        self._mutex = threading.Lock()

    def call(self, call: Callable[[], T], stopped: Callable[[], bool]) -> T:
        """The call's answer, however long it takes; Refused or Interrupted end it."""
        seconds = FIRST_PAUSE
        while True:
            try:
                answer = call()
            except BlockTrainError as error:
                if not retry_later(error):
                    raise
                pause(self._clock, 0.0, stopped)  # a stop is no outage
                self._note(away=isinstance(error, Unreachable), reason=str(error))
                pause(self._clock, seconds * self._uniform(0.5, 1.0), stopped)
                seconds = min(2 * seconds, LONGEST_PAUSE)
            else:
                self._note(away=False)
                return answer

    def _note(self, *, away: bool, reason: str = "") -> None:
        with self._mutex:
            if away and not self._away:
                self._emit("away", reason=reason)
            if self._away and not away:
                self._emit("back")
            self._away = away


class WorkerSession:
    """The calls of one worker, each signed with its key."""

    def __init__(
        self,
        client: Calls,
        identity: Identity,
        emit: EventHandler,
        clock: Clock,
        surroundings: Surroundings | None = None,
    ) -> None:
        self.client, self.identity, self.emit, self.clock = client, identity, emit, clock
        self.surroundings = surroundings or Surroundings()
        self.run = self.fingerprint = self.key = ""  # known after joining
        self.retries = Retries(emit, clock, self.surroundings.uniform)

    def now_ms(self) -> int:
        """This machine's wall clock, in milliseconds since 1970."""
        return int(self.clock.time() * 1000)

    def next_task(
        self, held: m.Held | None, speed: float, *, leaving: bool = False
    ) -> m.Task | m.Wait:
        message = m.TaskRequest(
            run=self.run,
            worker=self.identity.worker,
            fingerprint=self.fingerprint,
            held=held,
            speed=speed,
            leaving=leaving,
            nonce=self.surroundings.nonce(),
        )
        return self.client.next_task(self.identity.sign(message)).next

    def leave(self) -> None:
        """Sign off, so that no round waits. If the call is lost, the lease expires instead."""
        with suppress(Refused, Unreachable):
            self.next_task(None, 0.0, leaving=True)

    def heartbeat(self, task: m.Task, step: int, loss: float | None, sent: int) -> m.HeartbeatReply:
        message = m.Heartbeat(
            run=self.run,
            worker=self.identity.worker,
            task=task.task,
            fence=task.fence,
            step=step,
            loss=loss,
            bytes=sent,
            nonce=self.surroundings.nonce(),
        )
        return self.client.heartbeat(self.identity.sign(message))

    def submit(self, submission: m.Submission) -> m.SubmitReply:
        """Submit once, and check the receipt against the coordinator's key."""
        renewed = {"nonce": self.surroundings.nonce(), "time": self.now_ms()}
        fresh = submission.model_copy(update=renewed)
        reply = self.client.submit(self.identity.sign(fresh))
        verify(reply.receipt, self.key)
        if (reply.receipt.update, reply.receipt.worker) != (submission.update, submission.worker):
            raise Refused(Code.BAD_SIGNATURE, "the receipt is for another update")
        return reply


class HeartbeatThread:
    """Sends the heartbeats of one task while it is trained."""

    def __init__(self, session: WorkerSession, task: m.Task) -> None:
        self.step = 0
        self.loss: float | None = None
        self.cancelled = ""  # why the task is not worth finishing
        self.error: BlockTrainError | None = None
        self._session, self._task = session, task
        self._ended = threading.Event()

    def __enter__(self) -> HeartbeatThread:
        self._session.surroundings.start(self._send, f"heartbeat-{self._task.task}")
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _send(self) -> None:
        # Not more often than needed: a coordinator may have a thousand workers.
        interval = self._task.deadline_seconds / HEARTBEATS
        interval = min(max(interval, SHORTEST_INTERVAL), LONGEST_INTERVAL)
        while not self._session.clock.wait(self._ended, interval):
            try:
                reply = self._session.heartbeat(self._task, self.step, self.loss, 0)
            except BlockTrainError as error:
                if retry_later(error):
                    continue  # training needs no network
                if isinstance(error, Refused) and error.rule.then is Then.NEXT:
                    self.cancelled = str(error)
                else:
                    self.error = error
                return
            if not reply.go_on:
                code = reply.code.value if reply.code else ""
                self.cancelled = code or "the coordinator does not wait for it any more"
                return


class UpdateUpload:
    """Uploads and submits one update in a thread, until it is answered or the worker stops."""

    def __init__(
        self,
        session: WorkerSession,
        pending: TrainedTask,
        payload: bytes,
        residual: Tensors | None,
        *,
        resend: bool,
    ) -> None:
        self.pending, self.residual = pending, residual
        self.reply: m.SubmitReply | None = None
        self.error: BlockTrainError | None = None
        self.sent = 0
        self.finished = threading.Event()  # there is an answer, or an error that ends it
        self._session, self.payload = session, payload
        self._uploaded = resend  # perhaps even answered: then submitting again is enough
        self._cancelled = threading.Event()
        session.surroundings.start(self._run, f"upload-{pending.task.task}")

    def cancel(self) -> None:
        """Stop trying. The update is on the disk, and is sent at the next start."""
        self._cancelled.set()

    def _run(self) -> None:
        try:
            self.reply = self._session.retries.call(self._attempt, self._cancelled.is_set)
        except BlockTrainError as error:
            self.error = error
        except Exception as error:  # else the worker would wait for this thread without end
            self.error = BlockTrainError(f"the update could not be sent: {error!r}")
        finally:
            self.finished.set()

    def _attempt(self) -> m.SubmitReply:
        """Upload the missing chunks, then submit. Both are safe to repeat."""
        task = self.pending.task
        for _ in range(RESENDS):
            try:
                if not self._uploaded:
                    self.sent = 0
                    chunks = split(self.payload, task.chunk_bytes)
                    send = self._session.surroundings.upload
                    send(self._session.client, task.task, task.ticket, chunks, self._count)
                    self._uploaded = True
                return self._session.submit(self.pending.submission)
            except Refused as error:
                if error.rule.then is not Then.RESEND:
                    raise
                self._uploaded = False
        raise Refused(
            Code.MALFORMED, f"task {task.task} was sent {RESENDS} times and never arrived whole"
        )

    def _count(self, sent: int) -> None:
        self.sent += sent
