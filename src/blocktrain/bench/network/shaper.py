"""A simulated link: a seeded TCP proxy that delays, narrows, stalls and breaks what passes.

It models half a round trip each way, jitter, one bandwidth per direction that all connections
share, lost segments as pauses of one retransmission, resets, one round trip to connect, and a
bounded number of bytes in flight, so that a fast sender is slowed down. It does not model slow
start and congestion control of TCP: figures are those of a warm connection.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import random
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing.connection import Connection

from blocktrain.bench.network.namespaces import inside
from blocktrain.errors import ConfigError, RunError

LOCALHOST = "127.0.0.1"
SEGMENT = 64 << 10  # bytes of a stream that are lost, or break the connection, together
PIECE_SECONDS = 0.002  # the line serves its connections in turns of about this length
QUEUE_SECONDS = 0.05  # that the line's queue holds before senders must wait
BUFFER = 256 << 10  # bytes that wait at either end
UNLIMITED_WINDOW = 16 << 20  # bytes of one connection on the way when the bandwidth sets no bound
RETRANSMISSION_SECONDS = 0.2
START_SECONDS = 60.0
ANSWER_SECONDS = 30.0


@dataclass(frozen=True)
class Link:
    """Properties of a link. Jitter is the most that one way may take longer; 0 Mbit: no limit.

    `loss` and `reset` are probabilities per segment.
    """

    rtt_ms: float = 0.0
    jitter_ms: float = 0.0
    mbit: float = 0.0
    loss: float = 0.0
    reset: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if (
            min(self.rtt_ms, self.jitter_ms, self.mbit, self.loss, self.reset) < 0
            or self.loss + self.reset > 1
        ):
            raise ConfigError(
                "a link has no negative figures, "
                "and its loss and reset are probabilities of at most 1 together"
            )

    @property
    def bytes_per_second(self) -> float:
        """Of either direction."""
        return self.mbit * 1e6 / 8 if self.mbit else math.inf

    @property
    def piece(self) -> int:
        """Bytes that pass without another connection's between them."""
        return (
            int(min(max(self.bytes_per_second * PIECE_SECONDS, 4096), SEGMENT))
            if self.mbit
            else BUFFER
        )

    @property
    def window(self) -> int:
        """Bytes of one connection that may be on the way in one direction."""
        seconds = (self.rtt_ms / 2 + self.jitter_ms) / 1000 + QUEUE_SECONDS
        return BUFFER + int(self.bytes_per_second * seconds) if self.mbit else UNLIMITED_WINDOW

    @property
    def stall(self) -> float:
        """Seconds that a lost segment waits."""
        return max(RETRANSMISSION_SECONDS, self.rtt_ms / 1000)


class Fate(Enum):
    """What happens to a segment."""

    PASS = "pass"
    STALL = "stall"
    RESET = "reset"


def fates(link: Link, connection: int, way: str) -> Iterator[Fate]:
    """What happens to each segment of a connection in one direction. Depends on the seed alone."""
    draws = random.Random(f"{link.seed}/{connection}/{way}")
    while True:
        number = draws.random()
        yield (
            Fate.RESET
            if number < link.reset
            else Fate.STALL
            if number < link.reset + link.loss
            else Fate.PASS
        )


@dataclass
class Counters:
    """What has passed a link so far; bytes count when they are delivered."""

    up: int = 0  # bytes towards the server
    down: int = 0
    connections: int = 0
    stalls: int = 0
    resets: int = 0
    waiting: int = 0  # bytes that are on the way now


class ShapedLink:
    """A running link: its address, its counters, and how to break and repair it."""

    def __init__(self, link: Link, host: str, port: int, control: Connection) -> None:
        self.link, self.host, self.port = link, host, port
        self._control, self._mutex = control, threading.Lock()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def counters(self) -> Counters:
        return self._ask("counters")

    def block(self) -> None:
        """A black hole: nothing arrives any more, in either direction, without an error."""
        self._ask("block")

    def close(self) -> None:
        """Reset all connections, and every new one."""
        self._ask("close")

    def open(self) -> None:
        """Repair it: what waited in the black hole goes on."""
        self._ask("open")

    def _ask(self, what: str) -> Counters:
        with self._mutex:
            self._control.send(what)
            if not self._control.poll(ANSWER_SECONDS):
                raise RunError(
                    f"the link shaper on port {self.port} does not answer; "
                    "the machine may be overloaded"
                )
            return self._control.recv()


@contextmanager
def shape_link(
    host: str,
    port: int,
    link: Link,
    *,
    listen: str = LOCALHOST,
    network: str = "",
    apart: bool = True,
) -> Iterator[ShapedLink]:
    """A link to a server, in its own process, or with `apart=False` in a thread of this one.

    With a `network`, the clients are in that namespace; the server is where this process is.
    """
    ours, theirs = multiprocessing.Pipe()
    arguments = (theirs, listen, network, (host, port), link)
    context = multiprocessing.get_context("spawn")
    runner = (
        context.Process(target=_serve, args=arguments, name="link", daemon=True)
        if apart
        else threading.Thread(target=_serve, args=arguments, name="link", daemon=True)
    )
    runner.start()
    if apart:
        theirs.close()
    try:
        reply = ours.recv() if ours.poll(START_SECONDS) else "it did not start in time"
        if isinstance(reply, str):
            raise RunError(f"cannot shape a link to {host}:{port}: {reply}")
        yield ShapedLink(link, listen, reply, ours)
    finally:
        with suppress(OSError):
            ours.send("end")
        runner.join(10)
        if not isinstance(runner, threading.Thread) and runner.is_alive():
            runner.kill()
            runner.join()
        ours.close()


def _serve(
    control: Connection, listen: str, network: str, target: tuple[str, int], link: Link
) -> None:
    """Run the proxy until its owner stops it or exits."""
    try:
        with inside(network) if network else nullcontext():
            server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # The kernel must not take more than the line does.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        server.bind((listen, 0))
        server.listen(1024)
    except (OSError, RunError) as error:
        control.send(f"{listen}: {getattr(error, 'strerror', '') or error}")
        return
    # Ctrl-C reaches the whole group; the parent's pipe ends with it.
    with server, suppress(KeyboardInterrupt):
        asyncio.run(_Proxy(server, target, link).run(control))


class _Proxy:
    """Accepts, connects, and answers its owner."""

    def __init__(self, server: socket.socket, target: tuple[str, int], link: Link) -> None:
        self.server, self.target, self.link = server, target, link
        self.counters = Counters()
        self.passable, self.refuses = asyncio.Event(), False
        self.passable.set()
        self.lines = {"up": _Line(link), "down": _Line(link)}
        self._connections: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()

    async def run(self, control: Connection) -> None:
        loop = asyncio.get_running_loop()
        self.server.setblocking(False)
        loop.add_reader(control.fileno(), self._command, control)
        accept = asyncio.create_task(self._accept())
        control.send(self.server.getsockname()[1])
        await self._stop.wait()
        loop.remove_reader(control.fileno())
        await _cancel({accept, *self._connections})

    def _command(self, control: Connection) -> None:
        try:
            what = control.recv()
            if what in ("open", "block", "close"):
                self._switch(what)
            elif what == "end":
                self._stop.set()
                return
            control.send(self.counters)
        except (EOFError, OSError):
            self._stop.set()

    def _switch(self, what: str) -> None:
        self.refuses = what == "close"
        if what == "block":
            self.passable.clear()
        else:
            self.passable.set()
        if self.refuses:
            for connection in self._connections:
                connection.cancel()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(self.server)
            if self.refuses:
                _abort(client)
                continue
            self.counters.connections += 1
            task = asyncio.create_task(self._connect(client, self.counters.connections))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _connect(self, client: socket.socket, number: int) -> None:
        server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        clean = False
        try:
            for end in (client, server):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.sleep(self.link.rtt_ms / 1000)
            await self.passable.wait()
            await asyncio.get_running_loop().sock_connect(server, self.target)
            await _relay(
                _Direction(self, client, server, "up", number),
                _Direction(self, server, client, "down", number),
            )
            clean = True
        except* OSError:
            pass  # broken, or nobody listens there: the client gets a reset
        finally:
            for end in (client, server):
                if clean:
                    end.close()
                else:
                    _abort(end)


class _Line:
    """One direction of the link: all connections share its bandwidth, in turns."""

    def __init__(self, link: Link) -> None:
        self._rate, self._free, self._turn = link.bytes_per_second, 0.0, asyncio.Lock()

    async def carry(self, size: int) -> float:
        """Returns when the last byte will have left; waits while the queue is full."""
        loop = asyncio.get_running_loop()
        if self._rate == math.inf:
            return loop.time()
        async with self._turn:
            full = self._free - loop.time() - QUEUE_SECONDS
            if full > 0:
                await asyncio.sleep(full)
            self._free = max(self._free, loop.time()) + size / self._rate
            return self._free


@dataclass
class _Direction:
    """One direction of one connection: each piece waits its time and is passed on, in order."""

    proxy: _Proxy
    source: socket.socket
    sink: socket.socket
    way: str
    number: int
    _queue: deque[tuple[float, bytes | Fate]] = field(default_factory=deque)
    _in_flight: int = 0
    _offset: int = 0
    _last: float = 0.0  # when the last piece arrives; the next may not overtake it
    _more: asyncio.Event = field(default_factory=asyncio.Event)
    _room: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self) -> None:
        """Read pieces until the source ends, as many at a time as may be on the way."""
        loop, link, line = asyncio.get_running_loop(), self.proxy.link, self.proxy.lines[self.way]
        ahead = fates(link, self.number, self.way)
        jitter = random.Random(f"jitter/{link.seed}/{self.number}/{self.way}")
        while content := await loop.sock_recv(self.source, link.piece):
            self._hold(len(content))
            delay = (link.rtt_ms / 2 + jitter.uniform(0, link.jitter_ms)) / 1000
            arrival = await line.carry(len(content)) + delay
            fate = self._fate(ahead, len(content))
            if fate is Fate.STALL:
                arrival += link.stall
            if fate is Fate.RESET:
                self._put(arrival, fate)
                return
            self._put(arrival, content)
            while self._in_flight > link.window:
                self._room.clear()
                await self._room.wait()
        self._put(loop.time() + link.rtt_ms / 2000, b"")

    def _fate(self, ahead: Iterator[Fate], size: int) -> Fate:
        """The worst of the segments that begin in this piece."""
        count = -(-(self._offset + size) // SEGMENT) - -(-self._offset // SEGMENT)
        self._offset += size
        segments = [next(ahead) for _ in range(count)]
        self.proxy.counters.stalls += segments.count(Fate.STALL)
        if Fate.RESET in segments:
            self.proxy.counters.resets += 1
            return Fate.RESET
        return Fate.STALL if Fate.STALL in segments else Fate.PASS

    def _put(self, arrival: float, content: bytes | Fate) -> None:
        self._last = max(self._last, arrival)
        self._queue.append((self._last, content))
        self._more.set()

    def _hold(self, size: int) -> None:
        self._in_flight += size
        self.proxy.counters.waiting += size

    async def give(self) -> None:
        """Write each piece when its time has come; a reset ends both directions."""
        loop, counters = asyncio.get_running_loop(), self.proxy.counters
        while True:
            while not self._queue:
                self._more.clear()
                await self._more.wait()
            arrival, content = self._queue.popleft()
            if (ahead := arrival - loop.time()) > 0:
                await asyncio.sleep(ahead)
            await self.proxy.passable.wait()
            if isinstance(content, Fate):
                raise ConnectionResetError
            if not content:
                self.sink.shutdown(socket.SHUT_WR)
                return
            await loop.sock_sendall(self.sink, content)
            setattr(counters, self.way, getattr(counters, self.way) + len(content))
            self._hold(-len(content))
            self._room.set()

    def forget(self) -> None:
        """What was on the way is lost."""
        self._hold(-self._in_flight)


async def _relay(up: _Direction, down: _Direction) -> None:
    """Both directions, until both have ended or one breaks."""
    try:
        async with asyncio.TaskGroup() as group:
            for stream in (up, down):
                group.create_task(stream.take())
                group.create_task(stream.give())
    finally:
        up.forget()
        down.forget()


def _abort(end: socket.socket) -> None:
    """Close with a reset."""
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
