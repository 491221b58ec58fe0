"""A stage: a TCP server that computes blocks of a model.

It keeps a cache per session, and answers in features or passes state on to the next stage.
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blocktrain.errors import BlockTrainError, ConfigError
from blocktrain.protocol import frames, handshake
from blocktrain.protocol.frames import Buffer, Frame, FrameError, Kind, Why
from blocktrain.serving.blocks import ServedBlocks
from blocktrain.serving.line.address import format_address
from blocktrain.serving.line.connection import StageAccess, tune
from blocktrain.serving.line.stage_line import StageLine
from blocktrain.serving.line.tls import StageTls
from blocktrain.serving.stage.compute import Compute
from blocktrain.serving.stage.sessions import Session, Work, most_payload, open_session

BACKLOG = 1024
CHECK_SECONDS = 0.25  # how often deadlines are checked
PEER_BUFFER = 8192  # bytes; larger payloads are received where they stay


@dataclass(frozen=True)
class StageLimits:
    """What a stage accepts from connections before and after they proved the key."""

    sessions: int = 256
    unproven: int = 512  # connections that have not proved the key
    peers: int = 256  # connections that have
    followers: int = 16  # next stages of rings
    waiting: int = 256  # RUNs of one connection; with more it is not read
    handshake_seconds: float = 5.0
    frame_seconds: float = 5.0  # for a frame that has begun, and to read what was sent ...
    least_rate: float = 65536.0  # ... plus this many bytes per second
    silence_seconds: float = 30.0  # peers PING more often
    idle_seconds: float = 120.0  # of a session
    goodbye_seconds: float = 1.0  # to read why a connection ends


@dataclass(frozen=True)
class StageGuard:
    """The key and the certificates of a stage, for its clients and for the next stage of a ring."""

    key: bytes = b""
    tls: StageTls | None = None
    next_tls: ssl.SSLContext | None = None

    @property
    def certificate(self) -> str:
        """The hash of its own certificate; empty without TLS."""
        return self.tls.certificate if self.tls else ""


class Stage:
    """The server. `start` it inside a running loop; it serves until `aclose`."""

    def __init__(
        self,
        blocks: ServedBlocks,
        guard: StageGuard | None = None,
        limits: StageLimits | None = None,
        *,
        threads: int = 1,
    ) -> None:
        self.blocks, self.guard, self.limits = (
            blocks,
            guard or StageGuard(),
            limits or StageLimits(),
        )
        self.queue = 0  # RUNs that are not answered yet
        self.rings: dict[int, Session] = {}
        self.address = ""
        self._compute = Compute(blocks, self._deliver, threads)
        self._unproven: dict[str, OrderedDict[Peer, None]] = {}
        self._peers: set[Peer] = set()
        self._sessions: set[Session] = set()
        self._followers: dict[str, StageLine] = {}
        self._server: asyncio.Server | None = None
        self._check_task: asyncio.Task[None] | None = None
        self._open_tasks: set[asyncio.Task[None]] = set()
        self._close_tasks: set[asyncio.Task[None]] = (
            set()
        )  # of lines to followers that are not needed any more

    # -- life

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen; returns host:port."""
        self.loop = asyncio.get_running_loop()
        self._compute.start()
        tls: dict[str, Any] = {}
        if self.guard.tls is not None:
            seconds = self.limits.handshake_seconds
            tls = {"ssl": self.guard.tls.context, "ssl_handshake_timeout": seconds}
        try:
            self._server = await self.loop.create_server(
                lambda: Peer(self), host, port, backlog=BACKLOG, **tls
            )
        except OSError as error:
            self._compute.stop()
            reason = error.strerror or error
            raise ConfigError(
                f"cannot listen on {host}:{port}: {reason}; choose another with --listen host:port"
            ) from None
        name = self._server.sockets[0].getsockname()
        self.address = format_address(host, name[1])
        self._check_task = self.loop.create_task(self._check())
        return self.address

    async def aclose(self) -> None:
        """Close all connections and stop computing."""
        if self._check_task is not None:
            self._check_task.cancel()
        for task in self._open_tasks:
            task.cancel()
        if self._server is not None:
            self._server.close()
        for peer in [*self._peers, *self._all_unproven()]:
            peer.transport.abort()
        await asyncio.gather(*self._close_tasks)
        for line in self._followers.values():
            await line.aclose()
        self._compute.stop()
        await asyncio.to_thread(self._compute.join)

    def now(self) -> float:
        """The loop's clock."""
        return self.loop.time()

    async def _check(self) -> None:
        """Deadlines of connections and sessions."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            for peer in [p for p in (*self._peers, *self._all_unproven()) if p.overdue]:
                peer.refuse(FrameError(Why.TOO_SLOW))
            before = self.now() - self.limits.idle_seconds
            for session in [s for s in self._sessions if s.last_use < before and not s.waiting]:
                self.end(session)
            for line in [
                f for f in self._spare_followers() if not f.alive
            ]:  # or it would be dialled forever
                self._let_go(line)

    @property
    def sessions(self) -> int:
        """How many are open."""
        return len(self._sessions)

    # -- connections

    def _all_unproven(self) -> list[Peer]:
        return [peer for group in self._unproven.values() for peer in group]

    def add_unproven(self, peer: Peer) -> None:
        """A new connection. If there are too many, the address with most loses its oldest."""
        self._unproven.setdefault(peer.address, OrderedDict())[peer] = None
        if sum(len(group) for group in self._unproven.values()) > self.limits.unproven:
            crowd = max(self._unproven.values(), key=len)
            oldest, _ = crowd.popitem(last=False)
            oldest.transport.abort()

    def add_peer(self, peer: Peer) -> None:
        if len(self._peers) >= self.limits.peers:
            raise FrameError(Why.BUSY)
        self._forget_unproven(peer)
        self._peers.add(peer)

    def remove(self, peer: Peer) -> None:
        """A connection is over: its sessions are freed."""
        self._forget_unproven(peer)
        self._peers.discard(peer)
        for session in list(peer.sessions.values()):
            self.end(session)

    def _forget_unproven(self, peer: Peer) -> None:
        group = self._unproven.get(peer.address)
        if group is not None:
            group.pop(peer, None)
            if not group:
                del self._unproven[peer.address]

    def welcome(self, challenge: bytes, hello: bytes) -> frames.Welcome:
        """What this stage is, and the proof that it knows the key."""
        f = self.blocks.facts
        welcome = frames.Welcome(
            bytes(32), f.kind, f.blocks, f.width, f.context, f.z_width, f.fingerprint, f.model
        )
        guard = self.guard
        return handshake.prove_welcome(guard.key, challenge, hello, welcome, guard.certificate)

    # -- sessions

    def open(self, number: int, request: frames.Open, owner: Peer) -> Session:
        """A new session; one of a ring first gets a line to the next stage."""
        if len(self._sessions) >= self.limits.sessions:
            raise FrameError(Why.TOO_MANY_SESSIONS, f"{self.limits.sessions} are open")
        if request.topology == "ring" and number in self.rings:
            raise FrameError(Why.DUPLICATED, f"session {number}")
        session = open_session(self.blocks, number, request, owner, self.now())
        if session.next:
            line = self._follower(session.next)
            task = self.loop.create_task(self._open_ring(session, line))
            self._open_tasks.add(task)
            task.add_done_callback(self._open_tasks.discard)
        self._sessions.add(session)
        if session.topology == "ring":
            self.rings[number] = session
        return session

    def _follower(self, name: str) -> StageLine:
        line = self._followers.get(name)
        if line is None:
            if len(self._followers) >= self.limits.followers:
                spare = self._spare_followers()
                if not spare:
                    raise FrameError(
                        Why.NEXT_LOST,
                        f"this stage already passes on to {self.limits.followers} others",
                    )
                self._let_go(spare[0])
            facts = self.blocks.facts
            line = StageLine(
                name,
                StageAccess(
                    facts.fingerprint,
                    self.guard.key,
                    facts.model,
                    "stage",
                    self.guard.next_tls,
                    vocabulary=facts.vocabulary,
                ),
            )
            line.on_change = self._on_follower_change
            line.on_refusal = self._on_follower_refusal
            self._followers[name] = line
        return line

    def _spare_followers(self) -> list[StageLine]:
        """Those that no session passes on to, the oldest first."""
        used = {session.next for session in self.rings.values()}
        return [line for line in self._followers.values() if line.name not in used]

    def _let_go(self, line: StageLine) -> None:
        del self._followers[line.name]
        line.on_change = line.on_refusal = None  # a new line to the same place may be there by then
        task = self.loop.create_task(line.aclose())
        self._close_tasks.add(task)
        task.add_done_callback(self._close_tasks.discard)

    async def _open_ring(self, session: Session, line: StageLine) -> None:
        try:
            if not line.alive:
                await line.ready(self.limits.handshake_seconds)
        except BlockTrainError as error:
            self._end_with(session, FrameError(Why.NEXT_LOST, str(error)))
            return
        if not session.closed:
            session.owner.confirm_open(session)

    def _on_follower_change(self, line: StageLine) -> None:
        if not line.alive:
            for session in [s for s in self.rings.values() if s.next == line.name]:
                self._end_with(session, FrameError(Why.NEXT_LOST, line.name))

    def _on_follower_refusal(self, number: int, refusal: frames.Error) -> None:
        session = self.rings.get(number)
        if session is not None:
            self._end_with(session, FrameError(Why.NEXT_LOST, refusal.sentence))

    def _end_with(self, session: Session, error: FrameError) -> None:
        if not session.closed:
            self.end(session)
            session.owner.refuse(error, session.number)

    def end(self, session: Session) -> None:
        """Free all that belongs to a session; what it still has waiting is not computed."""
        session.closed = True
        session.owner.sessions.pop(session.number, None)
        self._sessions.discard(session)
        if self.rings.get(session.number) is session:
            del self.rings[session.number]

    # -- work

    def put(self, work: Work, peer: Peer) -> None:
        work.peer = peer
        self.queue += 1
        peer.waiting += 1
        peer.flow()
        self._compute.put(work)

    def _deliver(self, works: Sequence[Work]) -> None:
        for work in works:
            session = work.session
            self.queue -= 1
            if work.peer is not None:
                work.peer.waiting -= 1
                work.peer.flow()
            session.waiting.remove(work)
            if session.closed or work.dropped:
                continue
            if work.failed:
                self._end_with(session, FrameError(Why.FAILED))
            elif work.result is not None:
                self._hand_over(session, work, work.result)

    def _hand_over(self, session: Session, work: Work, result: memoryview) -> None:
        run = work.run
        if session.next:
            size = run.count * session.id_bytes
            ids = memoryview(work.payload)[len(work.payload) - size :]
            try:
                self._followers[session.next].forward(
                    session.number, work.sequence, run, [result, ids]
                )
            except BlockTrainError as error:
                self._end_with(session, FrameError(Why.NEXT_LOST, str(error)))
            return
        first = run.start + run.count - work.count
        header = frames.Result(
            run.epoch, first, work.count, self.queue, min(int(1e6 * work.seconds), 2**32 - 1)
        )
        session.owner.send(frames.encode(header, session.number, work.sequence, [result]))


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
        self.last_received = stage.now()
        self._deadline: float | None = None  # of the handshake
        self._began: float | None = None  # the frame that is on its way ...
        self._frame_size = 0  # ... and its bytes
        self._write_deadline: float | None = None

    # -- bytes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A new connection has a deadline to prove the key."""
        self.transport = transport
        tune(transport)
        self.address = str((transport.get_extra_info("peername") or ("",))[0])
        self._deadline = self.stage.now() + self.stage.limits.handshake_seconds
        self.stage.add_unproven(self)
        self.send(frames.encode(frames.Challenge(self.nonce)))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go; after a refusal they are thrown away."""
        return memoryview(bytearray(PEER_BUFFER)) if self.ended else self.decoder.space()

    def buffer_updated(self, nbytes: int) -> None:
        if self.ended:
            return
        error: FrameError | None = None
        try:
            batch = self.decoder.advance(nbytes)
        except FrameError as refused:
            batch, error = refused.before, refused
        self.last_received = self.stage.now()
        for frame in batch:
            if not self.ended:
                self._take(frame)
        if error is not None:
            self.refuse(error)
        if batch:
            self._began, self._frame_size = None, 0
        self._frame_size = max(self._frame_size, self.decoder.needed_bytes)
        if self._frame_size and self._began is None:
            self._began = self.last_received

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True
        self.stage.remove(self)

    def pause_writing(self) -> None:
        """The peer does not read its results: it gets a deadline."""
        limits = self.stage.limits
        size = self.transport.get_write_buffer_size()
        self._write_deadline = self.stage.now() + limits.frame_seconds + size / limits.least_rate
        self._unread = True
        self.flow()

    def resume_writing(self) -> None:
        self._write_deadline = None
        self._unread = False
        self.flow()

    def flow(self) -> None:
        """Stop reading from a peer that does not read, or has too many RUNs waiting."""
        limit = self.stage.limits.waiting
        paused = self._unread or self.waiting >= (limit // 2 if self._paused else limit)
        if paused != self._paused and not self.transport.is_closing():
            self._paused = paused
            if paused:
                self.transport.pause_reading()
            else:
                self.last_received = self.stage.now()  # nothing was read from it meanwhile
                if self._began is not None:
                    self._began = self.last_received
                self.transport.resume_reading()

    @property
    def overdue(self) -> bool:
        """Whether one of its deadlines has passed."""
        if self.ended:  # it was refused already
            return False
        now, limits = self.stage.now(), self.stage.limits
        if self._write_deadline is not None and now > self._write_deadline:
            return True
        if self._paused:
            return False
        if (
            self._began is not None
            and now > self._began + limits.frame_seconds + self._frame_size / limits.least_rate
        ):
            return True
        return now > (
            self.last_received + limits.silence_seconds
            if self._deadline is None
            else self._deadline
        )

    def send(self, buffers: list[Buffer]) -> None:
        """Write without waiting."""
        if self.transport.is_closing():
            return
        self.transport.writelines(buffers)
        if self._write_deadline is not None:
            self._write_deadline += sum(map(len, buffers)) / self.stage.limits.least_rate

    def refuse(self, error: FrameError, session: int = 0) -> None:
        """Say why, and end the connection unless only the session is refused."""
        if self.ended or self.transport.is_closing():
            return
        self.send(frames.refusal(error, session))
        if error.why in frames.SESSION_ONLY:
            return
        self.ended = True
        self.stage.remove(self)
        # Closing while bytes are unread would reset the connection, and the peer might never read
        # why.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.stage.add_unproven(self)  # it counts as a connection until it is closed
        self.stage.loop.call_later(self.stage.limits.goodbye_seconds, self.transport.abort)

    # -- frames

    def _cap(self, kind: Kind, session: int) -> int:
        if self.role is None:
            return 0
        if kind == Kind.RUN and (state := self._session(session)) is not None:
            return state.most_payload
        return most_payload(self.stage.blocks, kind)

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
        facts = stage.blocks.facts
        width = frames.id_width(facts.vocabulary)
        expected = (facts.fingerprint, width, stage.guard.certificate)
        handshake.check_hello(stage.guard.key, self.nonce, header, *expected)
        stage.add_peer(self)
        self.role, self._deadline = header.role, None
        self.send(frames.encode(stage.welcome(self.nonce, header.nonce)))

    def _open(self, frame: Frame, request: frames.Open) -> None:
        if frame.session in self.sessions:
            raise FrameError(Why.DUPLICATED, f"session {frame.session}")
        if frame.sequence:
            raise FrameError(Why.OUT_OF_ORDER, f"OPEN with sequence {frame.sequence}")
        session = self.stage.open(frame.session, request, self)
        self.sessions[frame.session] = session
        if not session.next:
            self.confirm_open(session)

    def confirm_open(self, session: Session) -> None:
        blocks = session.blocks if session.topology == "fan" else session.blocks[-1:]
        self.send(
            frames.encode(frames.Opened(blocks, self.stage.blocks.answer_width()), session.number)
        )

    def _run(self, frame: Frame, run: frames.Run) -> None:
        session = self._session(frame.session)
        if session is None:
            raise FrameError(Why.UNKNOWN_SESSION, f"session {frame.session}")
        session.last_use = self.last_received
        work = session.admit(frame.sequence, run, frame.payload, gaps=self.role == "stage")
        if work is not None:
            self.stage.put(work, self)
