"""One connection to a stage, from dialling over the handshake to its end. What it means is decided by the line that holds it."""

from __future__ import annotations

import asyncio
import secrets
import ssl
import time
from dataclasses import dataclass
from typing import Any, Protocol

from blocktrain.errors import BlockTrainError
from blocktrain.protocol import frames, handshake
from blocktrain.protocol.frames import Buffer, Frame, FrameError, Kind, Role, Why
from blocktrain.serving.line.address import parse_address
from blocktrain.serving.line.wire import tune

CONNECT_SECONDS = 3.0
HANDSHAKE_SECONDS = 5.0


class StageLost(BlockTrainError):
    """The connection died, or nothing at all arrived although something was due."""


class StageRefused(BlockTrainError):
    """A stage's typed no; `code` is one of `frames.Why`."""

    def __init__(self, code: str, sentence: str) -> None:
        self.code = code
        super().__init__(sentence)


@dataclass(frozen=True)
class Access:
    """What a line needs to be let in. `model` is the hash that the stage's weights must have ("" takes any)."""

    fingerprint: str
    key: bytes = b""
    model: str = ""
    role: Role = "entry"
    tls: ssl.SSLContext | None = None


class Listener(Protocol):
    """Who holds a connection and is told what happens on it."""

    name: str

    def most_payload(self, kind: Kind, session: int) -> int:
        """How much a frame may carry."""

    def begun(self, connection: Connection, welcome: frames.Welcome, rtt: float) -> None:
        """The handshake is done."""

    def received(self, connection: Connection, count: int, found: list[Frame]) -> None:
        """Bytes arrived, and these frames are complete with them."""

    def lost(self, connection: Connection, error: BlockTrainError) -> None:
        """It is over."""


class Connection(asyncio.BufferedProtocol):
    """Bytes <-> frames, and the handshake."""

    def __init__(self, listener: Listener, access: Access) -> None:
        loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[None] = loop.create_future()
        self._listener, self._access = listener, access
        self._decoder = frames.Decoder(listener.most_payload)
        self._transport: Any = None
        self._nonce = secrets.token_bytes(frames.NONCE)
        self._challenge = b""
        self._greeted = 0.0  # when HELLO was sent
        self._welcomed: asyncio.Future[None] = loop.create_future()

    @classmethod
    async def dial(cls, listener: Listener, access: Access) -> Connection:
        """A connection after its handshake, or StageLost or StageRefused."""
        made = cls(listener, access)
        host, port = parse_address(listener.name)
        tls: dict[str, Any] = {}
        if access.tls is not None:
            tls = {
                "ssl": access.tls,
                "server_hostname": host,
                "ssl_handshake_timeout": HANDSHAKE_SECONDS,
            }
        welcomed = False
        try:
            await asyncio.wait_for(
                asyncio.get_running_loop().create_connection(lambda: made, host, port, **tls),
                CONNECT_SECONDS,
            )
            await asyncio.wait_for(made._welcomed, HANDSHAKE_SECONDS)
            welcomed = True
        except ssl.SSLCertVerificationError as error:
            raise StageRefused(
                Why.WRONG_KEY, f"{listener.name} is not vouched for by --ca: {error.verify_message}"
            ) from None
        except (OSError, TimeoutError, ValueError) as error:  # the last: a name that cannot be one
            raise StageLost(f"cannot reach {listener.name}: {error}") from None
        finally:
            if not welcomed:
                made.end(StageLost(f"the handshake with {listener.name} was given up"))
        return made

    def send(self, buffers: list[Buffer]) -> None:
        """Write without waiting."""
        self._transport.writelines(buffers)

    def close(self) -> None:
        """Hang up after what was sent."""
        self._transport.close()

    def end(self, error: BlockTrainError) -> None:
        """Hang up at once, for this reason."""
        if not self._welcomed.done():
            self._welcomed.set_exception(error)
            self._welcomed.exception()  # nobody may be waiting for it
        if self._transport is not None:
            self._transport.abort()
        self._listener.lost(self, error)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The other end is there; it speaks first."""
        self._transport = transport
        tune(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self._decoder.space()

    def buffer_updated(self, nbytes: int) -> None:
        """They are there."""
        error = None
        try:
            found = self._decoder.received(nbytes)
        except FrameError as refused:
            found, error = refused.before, refused
        while found and not self._welcomed.done():
            self._greet(found.pop(0).header)
        self._listener.received(self, nbytes, found)
        if error is not None:
            self.end(StageLost(f"{self._listener.name} sends what cannot be read: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """The other end is gone."""
        self.end(StageLost(f"the connection to the stage {self._listener.name} was lost"))
        if not self.gone.done():
            self.gone.set_result(None)

    def _greet(self, header: frames.Header) -> None:
        access, name = self._access, self._listener.name
        if isinstance(header, frames.Challenge) and not self._challenge:
            self._challenge, self._greeted = header.nonce, time.monotonic()
            self.send(
                frames.encode(
                    handshake.make_hello(
                        access.key, header.nonce, self._nonce, access.role, access.fingerprint
                    )
                )
            )
        elif isinstance(header, frames.Welcome) and self._challenge:
            try:
                handshake.check_welcome(
                    access.key,
                    self._challenge,
                    self._nonce,
                    header,
                    access.fingerprint,
                    access.model,
                )
            except FrameError as error:
                self.end(StageRefused(error.why, f"{name}: {error}"))
                return
            self._welcomed.set_result(None)
            self._listener.begun(self, header, time.monotonic() - self._greeted)
        elif isinstance(header, frames.Error):
            self.end(StageRefused(header.code, f"{name} refuses: {header.sentence}"))
        else:
            self.end(
                StageLost(
                    f"{name} does not speak this protocol; see whether it is a stage of this version"
                )
            )
