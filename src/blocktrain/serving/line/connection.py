"""One connection to a stage: the socket, the handshake, tensors as bytes, and whether it lives.

What a frame means is decided by the `StageLine` that holds the connection.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from blocktrain.errors import BlockTrainError
from blocktrain.protocol import frames, handshake
from blocktrain.protocol.frames import Buffer, Frame, FrameError, Kind, Role, Why, Wire
from blocktrain.serving.line.address import parse_address
from blocktrain.serving.line.tls import certificate_hash

CONNECT_SECONDS = 3.0
HANDSHAKE_SECONDS = 5.0
DTYPES: dict[Wire, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16}
LARGEST_HALF = 65504.0
SILENCE = 0.85  # seconds beyond a round trip after which a silent line that owes an answer is lost
TICK = 0.25  # seconds between PINGs while an answer is due
IDLE_TICKS = 8  # and this many times as rarely otherwise
SLOWEST = 1e6  # bytes per second that a line may need to send before silence counts
SMOOTHING = 0.2


class StageLost(BlockTrainError):
    """The connection died, or nothing arrived although an answer was due."""


class StageRefused(BlockTrainError):
    """A stage refused; `code` is one of `frames.Why`."""

    def __init__(self, code: str, sentence: str) -> None:
        self.code = code
        super().__init__(sentence)


@dataclass(frozen=True)
class StageAccess:
    """What a line needs to be let in.

    `model` is the hash that the stage's weights must have ("" takes any).
    """

    fingerprint: str
    key: bytes = b""
    model: str = ""
    role: Role = "entry"
    tls: ssl.SSLContext | None = None
    vocabulary: int = field(kw_only=True)

    @property
    def id_bytes(self) -> int:
        """Width of an id on the wire."""
        return frames.id_width(self.vocabulary)


class ConnectionOwner(Protocol):
    """The object that a connection calls when something happens on it."""

    name: str

    def most_payload(self, kind: Kind, session: int) -> int:
        """How much a frame may carry."""

    def on_welcome(self, connection: Connection, welcome: frames.Welcome, rtt: float) -> None:
        """The handshake is done."""

    def on_frames(self, connection: Connection, count: int, batch: list[Frame]) -> None:
        """Bytes arrived, and these frames are complete with them."""

    def on_loss(self, connection: Connection, error: BlockTrainError) -> None:
        """The connection ended."""


class Connection(asyncio.BufferedProtocol):
    """Bytes <-> frames, and the handshake."""

    def __init__(self, owner: ConnectionOwner, access: StageAccess) -> None:
        loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = loop.create_future()
        self._owner, self._access = owner, access
        self._decoder = frames.Decoder(owner.most_payload)
        self._transport: Any = None
        self._nonce = secrets.token_bytes(frames.NONCE)
        self._challenge = b""
        self._hello_at = 0.0  # when HELLO was sent
        self._handshake: asyncio.Future[None] = loop.create_future()

    @classmethod
    async def dial(cls, owner: ConnectionOwner, access: StageAccess) -> Connection:
        """A connection after its handshake, or StageLost or StageRefused."""
        connection = cls(owner, access)
        host, port = parse_address(owner.name)
        tls: dict[str, Any] = {}
        if access.tls is not None:
            tls = {
                "ssl": access.tls,
                "server_hostname": host,
                "ssl_handshake_timeout": HANDSHAKE_SECONDS,
            }
        complete = False
        try:
            await asyncio.wait_for(
                asyncio.get_running_loop().create_connection(lambda: connection, host, port, **tls),
                CONNECT_SECONDS,
            )
            await asyncio.wait_for(connection._handshake, HANDSHAKE_SECONDS)
            complete = True
        except ssl.SSLCertVerificationError as error:
            raise StageRefused(
                Why.WRONG_KEY, f"--ca does not verify {owner.name}: {error.verify_message}"
            ) from None
        except (OSError, TimeoutError, ValueError) as error:  # ValueError: not a host name
            raise StageLost(f"cannot reach {owner.name}: {error}") from None
        finally:
            if not complete:
                connection.end(StageLost(f"the handshake with {owner.name} was not completed"))
        return connection

    def send(self, buffers: list[Buffer]) -> None:
        """Write without waiting."""
        self._transport.writelines(buffers)

    def close(self) -> None:
        """Close after everything was sent."""
        self._transport.close()

    def end(self, error: BlockTrainError) -> None:
        """Close at once, for this reason."""
        if not self._handshake.done():
            self._handshake.set_exception(error)
            self._handshake.exception()  # nobody may be waiting for it
        if self._transport is not None:
            self._transport.abort()
        self._owner.on_loss(self, error)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The other end is there; it speaks first."""
        self._transport = transport
        tune(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self._decoder.space()

    def buffer_updated(self, nbytes: int) -> None:
        """Decode what arrived."""
        error = None
        try:
            batch = self._decoder.advance(nbytes)
        except FrameError as refused:
            batch, error = refused.before, refused
        while batch and not self._handshake.done():
            self._greet(batch.pop(0).header)
        self._owner.on_frames(self, nbytes, batch)
        if error is not None:
            self.end(StageLost(f"{self._owner.name} sends what cannot be read: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """The other end is gone."""
        self.end(StageLost(f"the connection to the stage {self._owner.name} was lost"))
        if not self.closed.done():
            self.closed.set_result(None)

    def _certificate(self) -> str:
        """The hash of the stage's certificate, as it came; empty without TLS."""
        tls = self._transport.get_extra_info("ssl_object")
        return certificate_hash(tls.getpeercert(binary_form=True)) if tls is not None else ""

    def _greet(self, header: frames.Header) -> None:
        access, name = self._access, self._owner.name
        if isinstance(header, frames.Challenge) and not self._challenge:
            self._challenge, self._hello_at = header.nonce, time.monotonic()
            claim = (access.role, access.fingerprint, access.id_bytes, self._certificate())
            hello = handshake.make_hello(access.key, header.nonce, self._nonce, *claim)
            self.send(frames.encode(hello))
        elif isinstance(header, frames.Welcome) and self._challenge:
            try:
                handshake.check_welcome(
                    access.key,
                    self._challenge,
                    self._nonce,
                    header,
                    access.fingerprint,
                    access.model,
                    self._certificate(),
                )
            except FrameError as error:
                self.end(StageRefused(error.why, f"{name}: {error}"))
                return
            self._handshake.set_result(None)
            self._owner.on_welcome(self, header, time.monotonic() - self._hello_at)
        elif isinstance(header, frames.Error):
            self.end(StageRefused(header.code, f"{name} refuses: {header.sentence}"))
        else:
            self.end(
                StageLost(
                    f"{name} does not speak this protocol; "
                    "see whether it is a stage of this version"
                )
            )


@dataclass(frozen=True)
class HeartbeatAction:
    """Send a PING with this stamp (None: none), or give up; call again after `again` seconds."""

    ping: int | None
    lost: bool
    again: float


@dataclass
class LineHeartbeat:
    """Whether the other end is alive: when to PING, and when silence means that it is lost.

    Pure: the clock is an argument.
    """

    rtt: float = 0.0  # seconds, smoothed; 0: not measured
    _received_at: float = 0.0
    _due_since: float = 0.0  # since when an answer has been due without a break
    _next_beat: float = 0.0
    _sent_bytes: int = 0  # since anything was received
    _ticks: int = 0
    _stamp: int = 0
    _pings: dict[int, float] = field(default_factory=dict)  # those without an answer

    def reset(self, now: float) -> None:
        """A new connection."""
        self._received_at = self._due_since = self._next_beat = now
        self._sent_bytes, self._pings = 0, {}

    def on_sent(self, size: int) -> None:
        self._sent_bytes += size

    def on_received(self, now: float) -> None:
        self._received_at, self._sent_bytes = now, 0

    def on_request(self, now: float, due: bool) -> None:
        """An answer is due from now on; `due` says whether one already was."""
        if not due and not self._pings:
            self._due_since = now

    def on_pong(self, stamp: int, now: float) -> None:
        sent_at = self._pings.pop(stamp, None)
        if sent_at is not None:
            self.on_round_trip(now - sent_at)

    def on_round_trip(self, seconds: float) -> None:
        self.rtt += (seconds - self.rtt) * (SMOOTHING if self.rtt else 1.0)

    def beat(self, now: float, due: bool) -> HeartbeatAction:
        """Called when the last action said so."""
        waiting = due or bool(self._pings)
        deadline = (
            max(self._received_at, self._due_since)
            + SILENCE
            + self.rtt
            + self._sent_bytes / SLOWEST
        )
        # A late call means that this process, or the whole machine, stood still: what arrived
        # meanwhile is read first.
        late = now >= self._next_beat + TICK
        if waiting and now >= deadline and not late:
            return HeartbeatAction(None, True, 0.0)
        self._ticks += 1
        ping = None
        if due or self._ticks % IDLE_TICKS == 0:
            self.on_request(now, due)
            self._stamp += 1
            self._pings[self._stamp] = now
            ping = self._stamp
        again = max(0.01, min(TICK, deadline - now)) if waiting and not late else TICK
        self._next_beat = now + again
        return HeartbeatAction(ping, False, again)


def tensor_bytes(tensor: Tensor, wire: Wire) -> memoryview:
    """The values as they are sent, if possible without a copy; fp16 clamps what it cannot hold."""
    if wire == "fp16":
        tensor = tensor.clamp(-LARGEST_HALF, LARGEST_HALF)
    return (
        tensor.detach().to("cpu", DTYPES[wire]).contiguous().view(-1).view(torch.uint8).numpy().data
    )


def tensor_of(payload: Buffer, shape: tuple[int, ...], wire: Wire) -> Tensor:
    """The inverse, in float32; without a conversion the tensor shares the payload's memory."""
    return torch.frombuffer(payload, dtype=DTYPES[wire]).view(shape).float()


def ids_tensor(payload: Buffer, id_bytes: int) -> Tensor:
    """Tokens (T,) out of their bytes."""
    return torch.from_numpy(np.frombuffer(payload, f"<u{id_bytes}").astype(np.int64))


def tune(transport: asyncio.BaseTransport) -> None:
    """Send small frames at once, and let the kernel notice hosts that vanished."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
