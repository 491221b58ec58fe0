"""A worker's line to its coordinator: signed calls that wait while nobody answers, heartbeats, and deliveries in the background."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from blocktrain.errors import BlockTrainError, Interrupted, Unreachable
from blocktrain.protocol import messages as m
from blocktrain.protocol.identity import Identity, new_nonce, verify
from blocktrain.protocol.refusals import Code, Refused, Then
from blocktrain.protocol.tensors import Tensors
from blocktrain.protocol.transfer import split
from blocktrain.web.client import Calls, retry_later, upload
from blocktrain.worker.state import Pending

T = TypeVar("T")
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 15.0
OFTENEST, RAREST = 2.0, 10.0  # seconds between two heartbeats
BEATS = 18  # until the deadline
RESENDS = 5  # damaged on the way so often: something else is wrong
LOOK_SECONDS = 0.05  # how fast a stop is noticed


class Told(Protocol):
    """What is called with everything that happens: a kind and its fields. From several threads."""

    def __call__(self, kind: str, /, **fields: Any) -> None:
        """Something happened."""


class Line:
    """Calls that are repeated, with growing pauses, until somebody answers; tells once that nobody does and once that it is over."""

    def __init__(self, client: Calls, identity: Identity, told: Told) -> None:
        self.client, self.identity, self.told = client, identity, told
        self.run = self.fingerprint = self.key = ""  # known after joining
        self._away = False
        self._mutex = threading.Lock()

    def insist(self, call: Callable[[], T], stopped: Callable[[], bool]) -> T:
        """The answer of a call, however long it takes; Refused if it is a no, Interrupted if the user stops it."""
        pause = FIRST_PAUSE
        while True:
            try:
                answer = call()
            except BlockTrainError as error:
                if not retry_later(error):
                    raise
                rest(0.0, stopped)  # who stops is not told that somebody is away
                self._note(away=isinstance(error, Unreachable), reason=str(error))
                rest(pause * random.uniform(0.5, 1.0), stopped)
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                self._note(away=False)
                return answer

    def _note(self, *, away: bool, reason: str = "") -> None:
        with self._mutex:
            if away and not self._away:
                self.told("away", reason=reason)
            if self._away and not away:
                self.told("back")
            self._away = away

    def next_task(
        self, held: m.Held | None, speed: float, *, leaving: bool = False
    ) -> m.Task | m.Wait:
        """Ask once for the next task."""
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
        """Say goodbye, so that nobody waits; whoever does not hear it finds out when the lease ends."""
        with suppress(Refused, Unreachable):
            self.next_task(None, 0.0, leaving=True)

    def heartbeat(self, task: m.Task, step: int, loss: float | None, sent: int) -> m.HeartbeatReply:
        """Say once how far a task is."""
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
        """Submit once; the receipt is checked against the coordinator's key."""
        fresh = submission.model_copy(update={"nonce": new_nonce(), "time": now_ms()})
        reply = self.client.submit(self.identity.sign(fresh))
        verify(reply.receipt, self.key)
        if (reply.receipt.update, reply.receipt.worker) != (submission.update, submission.worker):
            raise Refused(Code.BAD_SIGNATURE, "the receipt is for another update")
        return reply


def now_ms() -> int:
    """This machine's clock in milliseconds since 1970."""
    return int(time.time() * 1000)


def rest(seconds: float, stopped: Callable[[], bool]) -> None:
    """Sleep, but not through a stop."""
    end = time.monotonic() + seconds
    while True:
        if stopped():
            raise Interrupted(
                "stopped; what was trained and not answered is sent at the next start"
            )
        left = end - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, LOOK_SECONDS))


class Pulse:
    """Heartbeats of one task from a thread of their own, while the task is trained."""

    def __init__(self, line: Line, task: m.Task) -> None:
        self.step = 0
        self.loss: float | None = None
        self.over = ""  # why going on makes no sense
        self.error: BlockTrainError | None = None
        self._line, self._task = line, task
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._beat, name=f"heartbeat-{task.task}", daemon=True
        )

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _beat(self) -> None:
        pause = min(
            max(self._task.deadline_seconds / BEATS, OFTENEST), RAREST
        )  # a coordinator may have a thousand workers
        while not self._ended.wait(pause):
            try:
                reply = self._line.heartbeat(self._task, self.step, self.loss, 0)
            except BlockTrainError as error:
                if retry_later(error):
                    continue  # training needs no network
                if isinstance(error, Refused) and error.rule.then is Then.NEXT:
                    self.over = str(error)
                else:
                    self.error = error
                return
            if not reply.go_on:
                self.over = (
                    reply.code.value
                    if reply.code
                    else "the coordinator does not wait for it any more"
                )
                return


class Delivery:
    """One update on its way, in a thread of its own, until it is answered or the worker stops."""

    def __init__(
        self, line: Line, pending: Pending, payload: bytes, residual: Tensors | None, *, again: bool
    ) -> None:
        self.pending, self.residual = pending, residual
        self.reply: m.SubmitReply | None = None
        self.error: BlockTrainError | None = None
        self.sent = 0
        self._line, self._payload = line, payload
        self._there = again  # sent before, perhaps even answered: then the answer is enough
        self._cancelled = threading.Event()
        self._done = threading.Event()
        threading.Thread(
            target=self._deliver, name=f"delivery-{pending.task.task}", daemon=True
        ).start()

    @property
    def done(self) -> bool:
        """Whether there is an answer, or an error that ends it."""
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Give it some time; whether it is done."""
        return self._done.wait(seconds)

    def cancel(self) -> None:
        """Stop trying; what is on the disk is sent at the next start."""
        self._cancelled.set()

    def _deliver(self) -> None:
        try:
            self.reply = self._line.insist(self._attempt, self._cancelled.is_set)
        except BlockTrainError as error:
            self.error = error
        except Exception as error:  # a thread that dies silently would be waited for without end
            self.error = BlockTrainError(f"the update could not be sent: {error!r}")
        finally:
            self._done.set()

    def _attempt(self) -> m.SubmitReply:
        """Upload what is missing, then submit; both may be repeated."""
        task = self.pending.task
        for _ in range(RESENDS):
            if not self._there:
                self.sent = 0
                upload(
                    self._line.client,
                    task.task,
                    task.ticket,
                    split(self._payload, task.chunk_bytes),
                    self._count,
                )
                self._there = True
            try:
                return self._line.submit(self.pending.submission)
            except Refused as error:
                if error.rule.then is not Then.RESEND:
                    raise
                self._there = False
        raise Refused(
            Code.MALFORMED, f"task {task.task} was sent {RESENDS} times and never arrived whole"
        )

    def _count(self, sent: int) -> None:
        self.sent += sent
