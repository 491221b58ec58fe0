"""A stage: a TCP server that holds blocks of a model, keeps a cache per session, and answers in features, or passes state on."""

from __future__ import annotations

import asyncio
import ssl
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blocktrain.errors import BlockTrainError, ConfigError
from blocktrain.protocol import frames, handshake
from blocktrain.protocol.frames import FrameError, Why
from blocktrain.serving.holding import Holding
from blocktrain.serving.line.address import format_address
from blocktrain.serving.line.lines import Access, StageLine
from blocktrain.serving.stage.compute import Compute
from blocktrain.serving.stage.peer import Limits, Peer
from blocktrain.serving.stage.sessions import Session, Work, open_session

BACKLOG = 1024
CHECK_SECONDS = 0.25  # how often deadlines are looked at


@dataclass(frozen=True)
class Guard:
    """Who is let in, and how this stage proves itself, also to the next of a ring."""

    key: bytes = b""
    tls: ssl.SSLContext | None = None
    next_tls: ssl.SSLContext | None = None


class Stage:
    """The server. `start` it inside a running loop; it serves until `aclose`."""

    def __init__(
        self,
        holding: Holding,
        guard: Guard | None = None,
        limits: Limits | None = None,
        *,
        threads: int = 1,
    ) -> None:
        self.holding, self.guard, self.limits = holding, guard or Guard(), limits or Limits()
        self.queue = 0  # RUNs that are not answered yet
        self.rings: dict[int, Session] = {}
        self.address = ""
        self._compute = Compute(holding, self._finished, threads)
        self._strangers: dict[str, OrderedDict[Peer, None]] = {}
        self._friends: set[Peer] = set()
        self._sessions: set[Session] = set()
        self._followers: dict[str, StageLine] = {}
        self._server: asyncio.Server | None = None
        self._checking: asyncio.Task[None] | None = None
        self._openings: set[asyncio.Task[None]] = set()
        self._closings: set[asyncio.Task[None]] = (
            set()
        )  # of lines to followers that are not needed any more

    # -- life

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen; gives host:port."""
        self.loop = asyncio.get_running_loop()
        self._compute.start()
        tls: dict[str, Any] = {}
        if self.guard.tls is not None:
            tls = {"ssl": self.guard.tls, "ssl_handshake_timeout": self.limits.handshake_seconds}
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
        self._checking = self.loop.create_task(self._check())
        return self.address

    async def aclose(self) -> None:
        """Hang up on everybody and stop computing."""
        if self._checking is not None:
            self._checking.cancel()
        for opening in self._openings:
            opening.cancel()
        if self._server is not None:
            self._server.close()
        for peer in [*self._friends, *self._all_strangers()]:
            peer.transport.abort()
        await asyncio.gather(*self._closings)
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
            for peer in [p for p in (*self._friends, *self._all_strangers()) if p.overdue]:
                peer.refuse(FrameError(Why.TOO_SLOW))
            before = self.now() - self.limits.idle_seconds
            for session in [s for s in self._sessions if s.used < before and not s.waiting]:
                self.end(session)
            for line in [
                f for f in self._spare_followers() if not f.alive
            ]:  # else it would be dialled for ever
                self._let_go(line)

    @property
    def sessions(self) -> int:
        """How many are open."""
        return len(self._sessions)

    # -- connections

    def _all_strangers(self) -> list[Peer]:
        return [peer for group in self._strangers.values() for peer in group]

    def stranger(self, peer: Peer) -> None:
        """Somebody connected. When there are too many, the address that has most of them loses its oldest."""
        self._strangers.setdefault(peer.address, OrderedDict())[peer] = None
        if sum(len(group) for group in self._strangers.values()) > self.limits.strangers:
            crowd = max(self._strangers.values(), key=len)
            oldest, _ = crowd.popitem(last=False)
            oldest.transport.abort()

    def friend(self, peer: Peer) -> None:
        """It has proved the key."""
        if len(self._friends) >= self.limits.peers:
            raise FrameError(Why.BUSY)
        self._forget_stranger(peer)
        self._friends.add(peer)

    def left(self, peer: Peer) -> None:
        """A connection is over: its sessions are freed."""
        self._forget_stranger(peer)
        self._friends.discard(peer)
        for session in list(peer.sessions.values()):
            self.end(session)

    def _forget_stranger(self, peer: Peer) -> None:
        group = self._strangers.get(peer.address)
        if group is not None:
            group.pop(peer, None)
            if not group:
                del self._strangers[peer.address]

    def welcome(self, challenge: bytes, hello: bytes) -> frames.Welcome:
        """What this stage is, and the proof that it knows the key."""
        f = self.holding.facts
        said = frames.Welcome(
            bytes(32), f.kind, f.blocks, f.width, f.context, f.z_width, f.fingerprint, f.model
        )
        return handshake.prove_welcome(self.guard.key, challenge, hello, said)

    # -- sessions

    def open(self, number: int, asked: frames.Open, owner: Peer) -> Session:
        """A new session; one of a ring first gets a line to the next stage."""
        if len(self._sessions) >= self.limits.sessions:
            raise FrameError(Why.TOO_MANY_SESSIONS, f"{self.limits.sessions} are open")
        if asked.topology == "ring" and number in self.rings:
            raise FrameError(Why.DUPLICATED, f"session {number}")
        session = open_session(self.holding, number, asked, owner, self.now())
        if session.next:
            line = self._follower(session.next)
            opening = self.loop.create_task(self._open_ring(session, line))
            self._openings.add(opening)
            opening.add_done_callback(self._openings.discard)
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
            facts = self.holding.facts
            line = StageLine(
                name,
                Access(
                    facts.fingerprint, self.guard.key, facts.model, "stage", self.guard.next_tls
                ),
            )
            line.on_change = self._follower_changed
            line.on_refusal = self._follower_refused
            self._followers[name] = line
        return line

    def _spare_followers(self) -> list[StageLine]:
        """Those that no session passes on to, the oldest first."""
        used = {session.next for session in self.rings.values()}
        return [line for line in self._followers.values() if line.name not in used]

    def _let_go(self, line: StageLine) -> None:
        del self._followers[line.name]
        line.on_change = line.on_refusal = None  # a new line to the same place may be there by then
        closing = self.loop.create_task(line.aclose())
        self._closings.add(closing)
        closing.add_done_callback(self._closings.discard)

    async def _open_ring(self, session: Session, line: StageLine) -> None:
        try:
            if not line.alive:
                await line.ready(self.limits.handshake_seconds)
        except BlockTrainError as error:
            self._end_with(session, FrameError(Why.NEXT_LOST, str(error)))
            return
        if not session.closed:
            session.owner.opened(session)

    def _follower_changed(self, line: StageLine) -> None:
        if not line.alive:
            for session in [s for s in self.rings.values() if s.next == line.name]:
                self._end_with(session, FrameError(Why.NEXT_LOST, line.name))

    def _follower_refused(self, number: int, said: frames.Error) -> None:
        session = self.rings.get(number)
        if session is not None:
            self._end_with(session, FrameError(Why.NEXT_LOST, said.sentence))

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
        """Let it be computed; it came by this connection."""
        work.peer = peer
        self.queue += 1
        peer.waiting += 1
        peer.flow()
        self._compute.put(work)

    def _finished(self, works: Sequence[Work]) -> None:
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
            ids = memoryview(work.payload)[len(work.payload) - run.count :]
            try:
                self._followers[session.next].forward(
                    session.number, work.sequence, run, [result, ids]
                )
            except BlockTrainError as error:
                self._end_with(session, FrameError(Why.NEXT_LOST, str(error)))
            return
        first = run.start + run.count - work.count
        said = frames.Result(
            run.epoch, first, work.count, self.queue, min(int(1e6 * work.seconds), 2**32 - 1)
        )
        session.owner.send(frames.encode(said, session.number, work.sequence, [result]))
