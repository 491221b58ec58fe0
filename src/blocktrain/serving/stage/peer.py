"""One connection of a stage: bytes -> frames -> what they ask for, and how long it is borne with."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blocktrain.protocol import frames, handshake
from blocktrain.protocol.frames import Buffer, Frame, FrameError, Kind, Why
from blocktrain.serving.line.wire import tune
from blocktrain.serving.stage.sessions import Session, most_payload

if TYPE_CHECKING:
    from blocktrain.serving.stage.stage import Stage

PEER_BUFFER = 8192  # bytes; larger payloads are received where they stay


@dataclass(frozen=True)
class Limits:
    """What a stage takes from strangers and from friends."""

    sessions: int = 256
    strangers: int = 512  # connections that have not proved the key
    peers: int = 256  # connections that have
    followers: int = 16  # next stages of rings
    waiting: int = 256  # RUNs of one connection, beyond which it is not read
    handshake_seconds: float = 5.0
    frame_seconds: float = 5.0  # for a frame that has begun, and to read what was sent ...
    least_rate: float = 65536.0  # ... plus this many bytes per second
    silence_seconds: float = 30.0  # peers PING more often
    idle_seconds: float = 120.0  # of a session
    goodbye_seconds: float = 1.0  # to read why a connection ends


class Peer(asyncio.BufferedProtocol):
    """One connection: bytes -> frames -> what they ask for."""

    transport: Any

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.decoder = frames.Decoder(self._cap, PEER_BUFFER)
        self.nonce = secrets.token_bytes(frames.NONCE)
        self.role: frames.Role | None = None
        self.address = ""
        self.sessions: dict[int, Session] = {}
        self.waiting = 0  # RUNs that are not answered yet
        self.ended = False
        self._paused = self._unread = False
        self.heard = stage.now()
        self._deadline: float | None = None  # of the handshake
        self._began: float | None = None  # the frame that is on its way ...
        self._announced = 0  # ... and its bytes
        self._write_deadline: float | None = None

    # -- bytes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Somebody connected: a stranger, with a clock running."""
        self.transport = transport
        tune(transport)
        self.address = str((transport.get_extra_info("peername") or ("",))[0])
        self._deadline = self.stage.now() + self.stage.limits.handshake_seconds
        self.stage.stranger(self)
        self.send(frames.encode(frames.Challenge(self.nonce)))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go; those after the last word go nowhere."""
        return memoryview(bytearray(PEER_BUFFER)) if self.ended else self.decoder.space()

    def buffer_updated(self, nbytes: int) -> None:
        """They are there."""
        if self.ended:
            return
        error: FrameError | None = None
        try:
            found = self.decoder.received(nbytes)
        except FrameError as refused:
            found, error = refused.before, refused
        self.heard = self.stage.now()
        for frame in found:
            if not self.ended:
                self._take(frame)
        if error is not None:
            self.refuse(error)
        if found:
            self._began, self._announced = None, 0
        self._announced = max(self._announced, self.decoder.announced)
        if self._announced and self._began is None:
            self._began = self.heard

    def connection_lost(self, exc: Exception | None) -> None:
        """Its sessions are over."""
        self.ended = True
        self.stage.left(self)

    def pause_writing(self) -> None:
        """It does not read what it asked for."""
        limits = self.stage.limits
        size = self.transport.get_write_buffer_size()
        self._write_deadline = self.stage.now() + limits.frame_seconds + size / limits.least_rate
        self._unread = True
        self.flow()

    def resume_writing(self) -> None:
        """It does again."""
        self._write_deadline = None
        self._unread = False
        self.flow()

    def flow(self) -> None:
        """Read no more from whoever does not read, or has too much waiting."""
        limit = self.stage.limits.waiting
        paused = self._unread or self.waiting >= (limit // 2 if self._paused else limit)
        if paused != self._paused and not self.transport.is_closing():
            self._paused = paused
            if paused:
                self.transport.pause_reading()
            else:
                self.heard = self.stage.now()  # while nobody read, it could not be heard
                if self._began is not None:
                    self._began = self.heard
                self.transport.resume_reading()

    @property
    def overdue(self) -> bool:
        """Whether it has had more time than it is given."""
        if self.ended:  # it has had its last word
            return False
        now, limits = self.stage.now(), self.stage.limits
        if self._write_deadline is not None and now > self._write_deadline:
            return True
        if self._paused:
            return False
        if (
            self._began is not None
            and now > self._began + limits.frame_seconds + self._announced / limits.least_rate
        ):
            return True
        return now > (
            self.heard + limits.silence_seconds if self._deadline is None else self._deadline
        )

    def send(self, buffers: list[Buffer]) -> None:
        """Write without waiting."""
        if self.transport.is_closing():
            return
        self.transport.writelines(buffers)
        if self._write_deadline is not None:
            self._write_deadline += sum(map(len, buffers)) / self.stage.limits.least_rate

    def refuse(self, error: FrameError, session: int = 0) -> None:
        """Say why; unless it is about the session only, that is the last word."""
        if self.ended or self.transport.is_closing():
            return
        self.send(frames.refusal(error, session))
        if error.why in frames.SESSION_ONLY:
            return
        self.ended = True
        self.stage.left(self)
        # To close at once while bytes are unread would reset the connection, and the peer might never read why.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.stage.stranger(self)  # until it has hung up it takes a place, and those are counted
        self.stage.loop.call_later(self.stage.limits.goodbye_seconds, self.transport.abort)

    # -- frames

    def _cap(self, kind: Kind, session: int) -> int:
        if self.role is None:
            return 0
        if kind == Kind.RUN and (found := self._session(session)) is not None:
            return found.most_payload
        return most_payload(self.stage.holding, kind)

    def _session(self, number: int) -> Session | None:
        return self.stage.rings.get(number) if self.role == "stage" else self.sessions.get(number)

    def _take(self, frame: Frame) -> None:
        header = frame.header
        try:
            if self.role is None:
                self._greet(header)
            elif isinstance(header, frames.Run):
                self._run(frame, header)
            elif isinstance(header, frames.Ping):
                self.send(frames.encode(frames.Pong(header.stamp, self.stage.queue)))
            elif isinstance(header, frames.Open) and self.role == "entry":
                self._open(frame, header)
            elif isinstance(header, frames.Close) and self.role == "entry":
                if session := self.sessions.get(frame.session):
                    self.stage.end(session)
            else:
                raise FrameError(Why.UNEXPECTED, frame.kind.name)
        except FrameError as error:
            session = self._session(frame.session)
            if session is not None and error.why in frames.SESSION_ONLY:
                self.stage.end(session)
                if session.owner is not self:
                    session.owner.refuse(error, frame.session)
            self.refuse(error, frame.session)

    def _greet(self, header: frames.Header) -> None:
        if not isinstance(header, frames.Hello):
            raise FrameError(Why.UNEXPECTED, "something else than HELLO")
        stage = self.stage
        handshake.check_hello(stage.guard.key, self.nonce, header, stage.holding.facts.fingerprint)
        stage.friend(self)
        self.role, self._deadline = header.role, None
        self.send(frames.encode(stage.welcome(self.nonce, header.nonce)))

    def _open(self, frame: Frame, asked: frames.Open) -> None:
        if frame.session in self.sessions:
            raise FrameError(Why.DUPLICATED, f"session {frame.session}")
        if frame.sequence:
            raise FrameError(Why.OUT_OF_ORDER, f"OPEN with sequence {frame.sequence}")
        session = self.stage.open(frame.session, asked, self)
        self.sessions[frame.session] = session
        if not session.next:
            self.opened(session)

    def opened(self, session: Session) -> None:
        """It is ready."""
        answering = session.blocks if session.topology == "fan" else session.blocks[-1:]
        self.send(
            frames.encode(
                frames.Opened(answering, self.stage.holding.answer_width()), session.number
            )
        )

    def _run(self, frame: Frame, run: frames.Run) -> None:
        session = self._session(frame.session)
        if session is None:
            raise FrameError(Why.UNKNOWN_SESSION, f"session {frame.session}")
        session.used = self.heard
        work = session.admit(frame.sequence, run, frame.payload, gaps=self.role == "stage")
        if work is not None:
            self.stage.put(work, self)
