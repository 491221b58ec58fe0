"""A worker's session with its coordinator: signed calls, heartbeats, uploads of updates."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from blocktrain.clock import Clock
from blocktrain.errors import BlockTrainError, Unreachable
from blocktrain.protocol import messages as m
from blocktrain.protocol.calls import Calls
from blocktrain.protocol.identity import Identity, new_nonce, verify
from blocktrain.protocol.refusals import Code, Refused, Then
from blocktrain.protocol.tensors import Tensors
from blocktrain.protocol.transfer import split
from blocktrain.web.client import retry_later, upload
from blocktrain.worker.retries import EventHandler, Retries
from blocktrain.worker.state import PendingUpdate

T = TypeVar("T")
SHORTEST_INTERVAL, LONGEST_INTERVAL = 2.0, 10.0  # seconds between two heartbeats
HEARTBEATS = 18  # until a task's deadline
RESENDS = 5  # damaged in transit so often: something else is wrong


class WorkerSession:
    """The calls of one worker, each signed with its key."""

    def __init__(self, client: Calls, identity: Identity, emit: EventHandler, clock: Clock) -> None:
        self.client, self.identity, self.emit, self.clock = client, identity, emit, clock
        self.run = self.fingerprint = self.key = ""  # known after joining
        self._retries = Retries(emit, clock)

    def retry(self, call: Callable[[], T], stopped: Callable[[], bool]) -> T:
        return self._retries.call(call, stopped)

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
            nonce=new_nonce(),
        )
        return self.client.next_task(self.identity.sign(message)).next

    def leave(self) -> None:
        """Sign off, so that nobody waits. If it gets lost, the lease's deadline does the same."""
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
            nonce=new_nonce(),
        )
        return self.client.heartbeat(self.identity.sign(message))

    def submit(self, submission: m.Submission) -> m.SubmitReply:
        """Submit once, and check the receipt against the coordinator's key."""
        fresh = submission.model_copy(update={"nonce": new_nonce(), "time": self.now_ms()})
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
        self._thread = threading.Thread(
            target=self._send, name=f"heartbeat-{task.task}", daemon=True
        )

    def __enter__(self) -> HeartbeatThread:
        self._thread.start()
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
        pending: PendingUpdate,
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
        self._session, self._payload = session, payload
        self._uploaded = resend  # perhaps even answered: then submitting again is enough
        self._cancelled = threading.Event()
        threading.Thread(target=self._run, name=f"upload-{pending.task.task}", daemon=True).start()

    def cancel(self) -> None:
        """Stop trying. The update is on the disk, and is sent at the next start."""
        self._cancelled.set()

    def _run(self) -> None:
        try:
            self.reply = self._session.retry(self._attempt, self._cancelled.is_set)
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
            if not self._uploaded:
                self.sent = 0
                chunks = split(self._payload, task.chunk_bytes)
                upload(self._session.client, task.task, task.ticket, chunks, self._count)
                self._uploaded = True
            try:
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
