"""The client's side of frames: a connection to a stage that reconnects by itself, and rings."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from blocktrain.config import Topology
from blocktrain.errors import BlockTrainError
from blocktrain.protocol import frames
from blocktrain.protocol.frames import ITEM, SENTENCES, Buffer, Frame, Why, Wire
from blocktrain.serving.line.address import parse_address
from blocktrain.serving.line.connection import (
    Connection,
    LineHeartbeat,
    StageAccess,
    StageLost,
    StageRefused,
    tensor_bytes,
    tensor_of,
)

PAUSES = (0.05, 1.0)  # seconds between attempts to connect: the first, the longest
REFUSED_PAUSE = 5.0  # after a refusal, which the operator has to fix
MOST_ANSWER = 1 << 30  # bytes, whatever a stage says about its own size

__all__ = ["Ring", "StageAccess", "StageLine", "StageLost", "StageRefused"]


@dataclass
class _Due:
    """A RESULT that a caller waits for."""

    epoch: int
    count: int
    future: asyncio.Future[Tensor]


@dataclass
class _Session:
    """What this end knows of a session."""

    wire: Wire
    most: int
    blocks: tuple[int, ...]
    widths: tuple[int, ...]  # that an answer may have; one, once OPENED has come
    confirmation: asyncio.Future[None]
    sequence: int = 0  # of the last RUN sent
    due: dict[int, _Due] = field(default_factory=dict)  # by sequence
    refusal: StageRefused | None = None  # by the stage, which knows it no longer

    def fail(self, error: BlockTrainError) -> None:
        """Everything that is due raises this error."""
        due, self.due = self.due, {}
        _fail(self.confirmation, error)
        for answer in due.values():
            _fail(answer.future, error)


class StageLine:
    """One warm connection to one stage. After `start()` it connects and reconnects with back-off.

    Sessions live on a connection: after a loss they are gone, and their calls raise StageLost
    until they are opened again.
    """

    def __init__(self, name: str, access: StageAccess) -> None:
        parse_address(name)  # a wrong address is an error at once
        self.name, self.access = name, access
        self.blocks: tuple[int, ...] = ()
        self.facts: frames.Welcome | None = None  # of the last connection
        self.refusal: StageRefused | None = None  # how the last attempt to connect ended
        self.rtt_ms = 0.0  # round trip of the last PINGs, smoothed
        self.queue = 0  # RUNs that wait at the stage, as it last said
        self.failures = 0  # connections that were lost
        self.bytes_in = self.bytes_out = 0
        self.on_change: Callable[[StageLine], None] | None = (
            None  # called when the stage comes or goes
        )
        self.on_refusal: Callable[[int, frames.Error], None] | None = (
            None  # called with refusals of no session of this end
        )
        self._connection: Connection | None = None
        self._sessions: dict[int, _Session] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._attempt = asyncio.Event()  # whether there is an outcome of an attempt to connect
        self._heartbeat = LineHeartbeat()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def alive(self) -> bool:
        """Whether the stage can be asked now."""
        return self._connection is not None

    def start(self) -> None:
        """Connect, and reconnect after each loss."""
        if self._keeper is None:
            self._keeper = asyncio.get_running_loop().create_task(
                self._keep(), name=f"line to {self.name}"
            )

    async def ready(self, seconds: float = 5.0) -> None:
        """Wait until it is alive; StageRefused if the stage refused, StageLost if none is there."""
        self.start()
        deadline = time.monotonic() + seconds
        while not self.alive:
            if self.refusal is not None:
                raise self.refusal
            self._attempt.clear()
            try:
                await asyncio.wait_for(self._attempt.wait(), max(deadline - time.monotonic(), 0))
            except TimeoutError:
                raise StageLost(
                    f"no stage answers at {self.name}; start one there with: blocktrain stage RUN"
                ) from None

    async def aclose(self) -> None:
        """Close the line; it does not reconnect."""
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
            self._keeper = None
        if self._connection is not None:
            connection = self._connection
            self.on_loss(connection, StageLost(f"the line to {self.name} is closed"))
            connection.close()

    # -- sessions

    async def open(
        self,
        session: int,
        wire: Wire = "fp32",
        *,
        blocks: Sequence[int] = (),
        topology: Topology = "fan",
        next: str = "",
        most: int = 0,
    ) -> None:
        """Open a session with these blocks (none: all) for `most` positions (0: the context).

        A fan's session is not waited for: its first RUN may follow at once, and raises if the
        stage refused the session. A session of a ring is confirmed.
        """
        connection, facts = self._alive()
        if session in self._sessions:
            raise StageRefused(Why.DUPLICATED, SENTENCES[Why.DUPLICATED])
        width = facts.z_width if topology == "ring" and facts.kind == "blocks" else facts.width
        header = frames.Open(
            topology, wire, width, most or facts.context, next, tuple(sorted(blocks))
        )
        confirmation: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if topology == "ring":  # its last block answers, in state or in logits
            self._sessions[session] = _Session(
                wire, header.most, facts.blocks[-1:], (width, self.access.vocabulary), confirmation
            )
        else:
            self._sessions[session] = _Session(
                wire, header.most, header.blocks or facts.blocks, (width,), confirmation
            )
        self._send(connection, frames.encode(header, session))
        if topology == "ring":
            await confirmation

    async def run(self, session: int, epoch: int, start: int, ids: Sequence[int]) -> Tensor:
        """Features (blocks, T, W) in float32 of the ids from `start` on; calls may overlap."""
        return await self.submit(session, frames.Run(epoch, start, len(ids)), ids)

    def submit(
        self, session: int, run: frames.Run, ids: Sequence[int], state: Tensor | None = None
    ) -> asyncio.Future[Tensor]:
        """Send a RUN now; the future gets its answer. A ring passes `state` (T, width) on."""
        return _submit([self], session, run, ids, state)

    def expect(self, session: int, run: frames.Run, future: asyncio.Future[Tensor]) -> int:
        """The future gets the answer to the next RUN, or its error; returns the sequence."""
        self._alive()
        known = self._session(session)
        self._heartbeat.on_request(time.monotonic(), self._anything_due())
        known.sequence += 1
        known.due[known.sequence] = _Due(run.epoch, run.wanted or run.count, future)
        return known.sequence

    def forward(
        self, session: int, sequence: int, run: frames.Run, payload: Sequence[Buffer]
    ) -> None:
        """Send a RUN; its answer goes where it is expected."""
        connection, _ = self._alive()
        self._send(connection, frames.encode(run, session, sequence, payload))

    def forget(self, session: int, sequence: int) -> None:
        """Stop waiting for this answer."""
        if known := self._sessions.get(session):
            known.due.pop(sequence, None)

    def wire_of(self, session: int) -> Wire:
        """How tensors of a session are sent."""
        return self._session(session).wire

    async def close(self, session: int) -> None:
        """End a session; what is still due raises StageLost. A session may be closed twice."""
        known = self._sessions.pop(session, None)
        if known is None:
            return
        known.fail(StageLost(f"the session on {self.name} was closed"))
        if self._connection is not None and known.refusal is None:
            self._send(self._connection, frames.encode(frames.Close(), session))

    def _session(self, session: int) -> _Session:
        known = self._sessions.get(session)
        if known is None:
            raise StageLost(
                f"the session is not open on {self.name}, or was lost with its connection"
            )
        if known.refusal is not None:
            raise known.refusal
        return known

    def _alive(self) -> tuple[Connection, frames.Welcome]:
        if self._connection is None or self.facts is None:
            raise StageLost(f"there is no connection to the stage {self.name}")
        return self._connection, self.facts

    def _anything_due(self) -> bool:
        return any(known.due for known in self._sessions.values())

    def _send(self, connection: Connection, buffers: list[Buffer]) -> None:
        size = sum(map(len, buffers))
        self.bytes_out += size
        self._heartbeat.on_sent(size)
        connection.send(buffers)

    # -- the connection

    async def _keep(self) -> None:
        """Connect and reconnect, with pauses that grow while nobody answers."""
        pause = PAUSES[0]
        while True:
            try:
                connection = await Connection.dial(self, self.access)
                pause = PAUSES[0]
                await connection.closed
            except StageRefused as refused:
                self.refusal = refused
                pause = REFUSED_PAUSE
            except StageLost:
                self.refusal = None
            self._attempt.set()
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))
            pause = min(2 * pause, PAUSES[1])

    def on_welcome(self, connection: Connection, welcome: frames.Welcome, rtt: float) -> None:
        """Called by the connection after the handshake."""
        self._connection, self.facts, self.blocks = connection, welcome, welcome.blocks
        self.refusal, self._sessions = None, {}
        self._heartbeat.reset(time.monotonic())
        self._heartbeat.on_round_trip(rtt)
        self.rtt_ms = 1e3 * self._heartbeat.rtt
        self._beat()
        self._attempt.set()
        if self.on_change:
            self.on_change(self)

    def on_loss(self, connection: Connection, error: BlockTrainError) -> None:
        """Called by the connection at its end; everything that is due fails."""
        if connection is not self._connection:
            return
        self._connection = None
        self.failures += self._keeper is not None
        if self._timer:
            self._timer.cancel()
        sessions, self._sessions = self._sessions, {}
        for known in sessions.values():
            known.fail(error)
        if self.on_change:
            self.on_change(self)

    def _beat(self) -> None:
        """PING or give the line up, as the heartbeat says."""
        if self._connection is None:
            return
        beat = self._heartbeat.beat(time.monotonic(), self._anything_due())
        if beat.lost:
            self._connection.end(StageLost(f"the stage {self.name} is silent"))
            return
        if beat.ping is not None:
            self._send(self._connection, frames.encode(frames.Ping(beat.ping)))
        self._timer = asyncio.get_running_loop().call_later(beat.again, self._beat)

    # -- what arrives

    def most_payload(self, kind: frames.Kind, session: int) -> int:
        """Called by the connection: the shape of a session limits its results."""
        if kind != frames.Kind.RESULT or self.facts is None:
            return 0
        known = self._sessions.get(session)
        if known is None:  # a late answer to a closed session is skipped
            width = max(self.facts.width, self.facts.z_width, self.access.vocabulary)
            return min(4 * len(self.facts.blocks) * self.facts.context * width, MOST_ANSWER)
        return min(
            len(known.blocks) * known.most * max(known.widths) * ITEM[known.wire], MOST_ANSWER
        )

    def on_frames(self, connection: Connection, count: int, batch: list[Frame]) -> None:
        """Called by the connection with what arrived."""
        self.bytes_in += count
        self._heartbeat.on_received(time.monotonic())
        for frame in batch:
            if connection is self._connection:
                self._take(connection, frame)

    def _take(self, connection: Connection, frame: Frame) -> None:
        header = frame.header
        known = self._sessions.get(frame.session)
        if isinstance(header, frames.Result):
            self.queue = header.queue
            if known is not None:
                self._handle_result(connection, known, frame, header)
        elif isinstance(header, frames.Pong):
            self.queue = header.queue
            self._heartbeat.on_pong(header.stamp, time.monotonic())
            self.rtt_ms = 1e3 * self._heartbeat.rtt
        elif isinstance(header, frames.Opened):
            if known is not None and not known.confirmation.done():
                self._handle_opened(connection, known, header)
        elif isinstance(header, frames.Error):
            self._handle_refusal(frame.session, header)
        else:
            connection.end(StageLost(f"{self.name} sends a frame that only a client may send"))

    def _handle_opened(
        self, connection: Connection, known: _Session, header: frames.Opened
    ) -> None:
        if header.blocks != known.blocks or header.width not in known.widths:
            connection.end(
                StageLost(f"{self.name} opens a session in another shape than was asked for")
            )
            return
        known.widths = (header.width,)
        known.confirmation.set_result(None)

    def _handle_refusal(self, session: int, header: frames.Error) -> None:
        """One session is refused, or all with their connection."""
        error = StageRefused(header.code, f"{self.name} refuses: {header.sentence}")
        known = self._sessions.get(session)
        if known is not None:
            known.refusal = (
                known.refusal or error
            )  # the first one has the reason; later RUNs only meet an unknown session
            known.fail(error)
        elif self.on_refusal:
            self.on_refusal(session, header)
        if header.code not in frames.SESSION_ONLY and self._connection is not None:
            self._connection.end(error)

    def _handle_result(
        self, connection: Connection, known: _Session, frame: Frame, header: frames.Result
    ) -> None:
        for sequence in [s for s in known.due if s < frame.sequence]:
            _fail(
                known.due.pop(sequence).future,
                StageRefused(Why.OLD_EPOCH, SENTENCES[Why.OLD_EPOCH]),
            )
        due = known.due.pop(frame.sequence, None)
        if due is None or due.future.done():
            return
        shape = (len(known.blocks), due.count, known.widths[0])
        length = shape[0] * shape[1] * shape[2] * ITEM[known.wire]
        if header.count != due.count or header.epoch != due.epoch or len(frame.payload) != length:
            error = StageLost(f"{self.name} answers in another shape than was asked for")
            _fail(due.future, error)
            connection.end(error)
            return
        due.future.set_result(tensor_of(frame.payload, shape, known.wire))


class Ring:
    """Stages in the order of their blocks: each passes its state on, and the last one answers."""

    def __init__(self, lines: Sequence[StageLine]) -> None:
        self.lines = lines

    async def open(self, session: int, wire: Wire = "fp32", *, most: int = 0) -> None:
        """Open the session at every stage, and wait until all have."""
        followers = [*(line.name for line in self.lines[1:]), ""]
        await asyncio.gather(
            *(
                line.open(session, wire, topology="ring", next=name, most=most)
                for line, name in zip(self.lines, followers, strict=True)
            )
        )

    async def run(
        self, session: int, run: frames.Run, ids: Sequence[int], state: Tensor | None = None
    ) -> Tensor:
        """What the last stage makes of it: logits (1, T, V) in float32 of the positions wanted."""
        return await self.submit(session, run, ids, state)

    def submit(
        self, session: int, run: frames.Run, ids: Sequence[int], state: Tensor | None = None
    ) -> asyncio.Future[Tensor]:
        """The same as a future; a line of the ring that is lost, or refuses, ends it."""
        return _submit(self.lines, session, run, ids, state)

    async def close(self, session: int) -> None:
        """End the session everywhere."""
        for line in self.lines:
            await line.close(session)


def _submit(
    lines: Sequence[StageLine],
    session: int,
    run: frames.Run,
    ids: Sequence[int],
    state: Tensor | None,
) -> asyncio.Future[Tensor]:
    """Send a RUN to the first line; the answer comes on the last, and trouble on any."""
    future: asyncio.Future[Tensor] = asyncio.get_running_loop().create_future()
    sequences = [line.expect(session, run, future) for line in lines]
    payload: list[Buffer] = (
        [] if state is None else [tensor_bytes(state, lines[0].wire_of(session))]
    )
    payload.append(frames.pack_ids(ids, lines[0].access.id_bytes))
    lines[0].forward(session, sequences[0], run, payload)
    if len(lines) > 1:
        waiting = list(zip(lines, sequences, strict=True))
        future.add_done_callback(lambda _: _forget(waiting, session))
    return future


def _forget(waiting: Sequence[tuple[StageLine, int]], session: int) -> None:
    for line, sequence in waiting:
        line.forget(session, sequence)


def _fail(future: asyncio.Future[Any], error: BlockTrainError) -> None:
    """Set the error and mark it as seen: asyncio complains about errors that nobody awaits."""
    if not future.done():
        future.set_exception(error)
        future.exception()
