"""Requests and answers between members and the coordinator, with everything that can go wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from blocktrain.errors import BlockTrainError, Unreachable
from blocktrain.protocol import calls
from blocktrain.protocol.calls import Call
from blocktrain.protocol.messages import Message
from blocktrain.protocol.refusals import Refused
from blocktrain.protocol.transfer import sha256
from blocktrain.simulation.scheduler import Scheduler, SimulatedTime
from blocktrain.simulation.tape import PlannedFault, Tape
from blocktrain.web.client import Client

R = TypeVar("R", bound=Message | None)
TIMEOUT = 30.0  # of the real client
LATENCY = (0.005, 0.06)
NO_FAULT = PlannedFault(kind="drop")


@dataclass
class SentRequest:
    """One request on its way. Its answer is a message, bytes, or an error."""

    number: int
    worker: int
    call: Call[Message | None]
    arguments: tuple[int | str, ...]
    message: Message | None
    body: bytes
    served: bool = False
    answered: bool = False
    reply: Message | bytes | None = None
    error: BlockTrainError | None = None
    wake: Callable[[], None] = field(default=lambda: None)


Serve = Callable[[SentRequest], Message | bytes | None]
"""The coordinator's answer. Refused is an answer, too; Unreachable is none."""


class Network:
    def __init__(self, tape: Tape, scheduler: Scheduler, serve: Serve) -> None:
        self._tape, self._scheduler, self._serve = tape, scheduler, serve
        self._faults: Mapping[int, PlannedFault] = {f.message: f for f in tape.faults if f.message}
        self._away: dict[int, float] = {}  # by worker: until when it reaches nobody
        self._waiting: dict[int, SentRequest] = {}  # sent and not served, by number
        self.sent = 0

    def cut_off(self, worker: int, seconds: float) -> None:
        until = self._scheduler.now + seconds
        self._away[worker] = max(until, self._away.get(worker, 0.0))

    def heal(self) -> None:
        """Nothing goes wrong from now on."""
        self._away.clear()

    def ask(
        self,
        worker: int,
        call: Call[Message | None],
        arguments: tuple[int | str, ...],
        message: Message | None,
        body: bytes,
    ) -> Message | bytes | None:
        """Called in a fiber: send a request, and wait for its answer."""
        fiber = self._scheduler.current
        if fiber is None:
            raise RuntimeError("only a fiber can wait for an answer")
        self.sent += 1
        request = SentRequest(self.sent, worker, call, arguments, message, body)
        request.wake = fiber.wake(fiber.pause)
        self._send(request)
        self._scheduler.after(TIMEOUT, lambda: self._give_up(request))
        fiber.wait()
        if request.error is not None:
            raise request.error
        return request.reply

    def serve_early(self, merging: bool) -> None:
        """Serve the first request that is on its way, before its time.

        While a round is merged, none that would wait for the end of that.
        """
        for request in list(self._waiting.values()):
            waits = merging and request.call in (calls.SUBMIT, calls.NEXT_TASK)
            if not waits and not self._is_away(request.worker):
                self._arrive(request, self._fault(request))
                return

    def _is_away(self, worker: int) -> bool:
        return self._away.get(worker, 0.0) > self._scheduler.now

    def _fault(self, request: SentRequest) -> PlannedFault:
        if self._scheduler.now >= self._tape.world.calm:
            return NO_FAULT
        return self._faults.get(request.number, NO_FAULT)

    def _send(self, request: SentRequest) -> None:
        fault = self._fault(request)
        if self._is_away(request.worker) or (fault.message and _is_lost(fault, reply=False)):
            if fault.kind == "cut":  # the connection breaks, and the sender notices
                self._answer(request, Unreachable("the connection was reset"), 0.1)
            return
        draw = random.Random(self._tape.seed * 1_000_003 + request.number)
        seconds = draw.uniform(*LATENCY) + (fault.seconds if fault.kind == "delay" else 0.0)
        self._waiting[request.number] = request
        self._scheduler.after(seconds, lambda: self._arrive(request, fault))
        if fault.kind == "duplicate":
            again = SentRequest(
                request.number,
                request.worker,
                request.call,
                request.arguments,
                request.message,
                request.body,
                answered=True,
            )
            self._scheduler.after(seconds + fault.seconds, lambda: self._arrive(again, fault))

    def _arrive(self, request: SentRequest, fault: PlannedFault) -> None:
        if request.served:
            return
        request.served = True
        self._waiting.pop(request.number, None)
        if fault.kind == "corrupt" and not fault.reply and request.body:
            request.body = _damage(request.body)
        reply: Message | bytes | BlockTrainError | None
        try:
            reply = self._serve(request)
        except (Refused, Unreachable) as error:
            reply = error
        if fault.message and _is_lost(fault, reply=True):
            if fault.kind == "drop":
                return
            reply = Unreachable("the connection was reset")
        if fault.kind == "corrupt" and isinstance(reply, bytes) and reply:
            reply = _damage(reply)
        if not self._is_away(request.worker):
            draw = random.Random(self._tape.seed * 1_000_003 - request.number)
            self._answer(request, reply, draw.uniform(*LATENCY))

    def _answer(
        self, request: SentRequest, reply: Message | bytes | BlockTrainError | None, seconds: float
    ) -> None:
        def arrive() -> None:
            if request.answered:
                return
            request.answered = True
            if isinstance(reply, BlockTrainError):
                request.error = reply
            else:
                request.reply = reply
            request.wake()

        self._scheduler.after(seconds, arrive)

    def _give_up(self, request: SentRequest) -> None:
        if not request.answered:
            request.answered, request.error = True, Unreachable("no answer in time")
            request.wake()


def _is_lost(fault: PlannedFault, *, reply: bool) -> bool:
    return fault.kind in ("drop", "cut") and fault.reply == reply


def _damage(content: bytes) -> bytes:
    place = len(content) // 3
    return content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :]


class SimulatedClient(Client):
    """The calls of one member. Called in its fibers."""

    def __init__(self, network: Network, worker: int, clock: SimulatedTime) -> None:
        self._network, self._worker, self._clock = network, worker, clock

    def _call(
        self,
        call: Call[R],
        *arguments: int | str,
        message: Message | None = None,
        content: bytes = b"",
    ) -> R:
        try:
            reply = self._network.ask(self._worker, call, arguments, message, content)  # type: ignore[arg-type]
        finally:
            self._clock.thaw()
        return reply  # type: ignore[return-value]

    def blob(self, name: str, start: int = 0, worker: str = "") -> Iterator[bytes]:
        """All at once. A connection that breaks in the middle gives nothing of it."""
        content: bytes = self._call(calls.BLOB, name, start, worker)  # type: ignore[assignment]
        yield content


def put_all(
    client: calls.Calls,
    task: int,
    ticket: str,
    chunks: list[bytes],
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """As `web.client.upload`, one chunk after another."""
    have = set(client.upload_state(task, ticket).have)
    for index, chunk in enumerate(chunks):
        if index not in have:
            try:
                client.put_chunk(task, index, ticket, chunk, sha256(chunk))
            except Unreachable:
                client.put_chunk(task, index, ticket, chunk, sha256(chunk))
        progress(len(chunk))
