"""The guarded HTTP front of coordinator and serving: limits, keys, deadlines, errors.

Nothing of a request's body is read before the request is allowed. A body has an exact length, a
size limit and a deadline with a minimum rate. So have headers, and readers of what is sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from blocktrain.errors import BlockTrainError, IdentityError
from blocktrain.protocol import calls
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.web.door import Door, Doorkeeper
from blocktrain.web.sse import EventStream

HEADER_SECONDS = 15.0
BODY_SECONDS = 10.0
MIN_RATE = 16 << 10  # bytes a second, in either direction; slower connections are closed
MAX_HEADERS = 64 << 10  # bytes
KEEP_ALIVE_SECONDS = 75  # well above the client's, which must not use a closing connection
MAX_REQUESTS = 256  # requests in progress
MAX_TRANSFERS = 1024  # requests whose bytes are being received or sent
MAX_FROM_ONE = 64  # of both together, from one address
LISTENERS = "listeners"  # stands for the addresses that read a stream of events
LEAST_KEY = 16  # characters
MOST_KEYS = 10_000
MOST_DIGITS = 15  # of a number in a path, a query or a header
CLIENT_CLOSED = 499  # the status that is counted when the client closed the connection

Handler = Callable[[Request, Send], Awaitable[Response | None]]
"""Gives the answer, or None if it has sent the answer itself."""
Access = Literal["anyone", "member", "operator"]


class DeadlineProtocol(HttpToolsProtocol):
    """Closes slow connections. uvicorn alone waits for headers, unread bodies and readers."""

    _late: asyncio.TimerHandle | None = None  # until the next headers are complete
    _unread: asyncio.TimerHandle | None = None  # until the other side has read what was sent
    _headers: int | None = None  # bytes of those that are being received

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._late = self._abort_after(HEADER_SECONDS)

    def data_received(self, data: bytes) -> None:
        """Headers that are too long end the connection."""
        if self._headers is not None:
            self._headers += len(data)
            if self._headers > MAX_HEADERS:
                self.transport.abort()
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._headers = 0
        _stop(self._late)
        self._late = self._abort_after(HEADER_SECONDS)

    def on_headers_complete(self) -> None:
        self._headers = None
        _stop(self._late)
        self._late = None
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """The next request must begin in time. uvicorn's own timer stops with any byte."""
        super().on_response_complete()
        if self._late is None and self.cycle.response_complete:
            self._late = self._abort_after(KEEP_ALIVE_SECONDS)

    def pause_writing(self) -> None:
        """The other side reads slowly: the minimum rate holds for readers too."""
        super().pause_writing()
        self._unread = self._abort_after(body_seconds(self.transport.get_write_buffer_size()))

    def resume_writing(self) -> None:
        _stop(self._unread)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        _stop(self._late)
        _stop(self._unread)
        super().connection_lost(exc)

    def _abort_after(self, seconds: float) -> asyncio.TimerHandle:
        # `close` would wait until everything that was sent is read.
        return self.loop.call_later(seconds, self.transport.abort)


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def body_seconds(length: int) -> float:
    """How long so many bytes of a request may take."""
    return BODY_SECONDS + length / MIN_RATE


@dataclass(frozen=True)
class Keys:
    """Secrets that clients send as `Authorization: Bearer KEY`, kept as digests.

    No keys: everyone is allowed.
    """

    digests: frozenset[bytes] = frozenset()

    def allow(self, authorization: str) -> bool:
        if not self.digests:
            return True
        kind, _, key = authorization.partition(" ")
        digest = _digest(key.strip())
        # All keys are compared, so that the time it takes tells nothing.
        matches = sum(hmac.compare_digest(digest, known) for known in self.digests)
        return kind.lower() == "bearer" and matches > 0

    def client_of(self, request: Request) -> str:
        """Who asks: by the key where there are keys, else by the address."""
        if not self.digests:
            return address_of(request)
        return _digest(request.headers.get("authorization", "").partition(" ")[2].strip()).hex()


def keys_of(*secrets: str) -> Keys:
    """Keys of the secrets that are not empty."""
    return Keys(frozenset(_digest(secret) for secret in secrets if secret))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(path: Path) -> Keys:
    """One key per line. Empty lines and lines that begin with # are skipped."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise IdentityError(f"cannot read the API keys in {path}: {reason}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not 1 <= len(keys) <= MOST_KEYS:
        raise IdentityError(
            f"{path} holds {len(keys)} API keys;"
            f" put at least one there and at most {MOST_KEYS}, one a line"
        )
    for number, key in enumerate(keys, 1):
        if len(key) < LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
            raise IdentityError(
                f"key {number} in {path} is not {LEAST_KEY} or more printable ASCII characters"
                " without spaces"
            )
    return keys_of(*keys)


@dataclass
class Occupancy:
    """Requests by address: those in progress, and those whose bytes are on their way.

    A slow connection does not take the place of a request that could be answered.
    """

    requests: Counter[str] = field(default_factory=Counter)
    transfers: Counter[str] = field(default_factory=Counter)

    def enter(self, address: str) -> None:
        if self.requests.total() >= MAX_REQUESTS or self.transfers.total() >= MAX_TRANSFERS:
            raise Refused(Code.BUSY)
        if self.requests[address] + self.transfers[address] >= MAX_FROM_ONE:
            raise Refused(Code.TOO_MANY_REQUESTS)
        self.requests[address] += 1

    def leave(self, address: str) -> None:
        _decrement(self.requests, address)

    @contextmanager
    def transfer(self, address: str, *, listening: bool = False) -> Iterator[None]:
        """While the bytes of a request that entered are received or sent.

        A page listens for hours, so it does not count for its address.
        """
        name = LISTENERS if listening else address
        _decrement(self.requests, address)
        self.transfers[name] += 1
        try:
            yield
        finally:
            _decrement(self.transfers, name)
            self.requests[address] += 1

    @contextmanager
    def request(self, address: str) -> Iterator[None]:
        self.enter(address)
        try:
            yield
        finally:
            self.leave(address)


def _decrement(counter: Counter[str], address: str) -> None:
    counter[address] -= 1
    if not counter[address]:
        del counter[address]


class Front(ABC):
    """The routes of one server behind its guard.

    With `whole`, a request counts from its headers to the end of its answer. Otherwise only
    while its body is received: the answers of serving have a queue of their own.
    """

    def __init__(self, *, whole: bool) -> None:
        self.occupancy = Occupancy()
        self.whole = whole

    @abstractmethod
    def check(self, request: Request, access: Access) -> None:
        """Refuse a request that is not allowed, by its headers alone."""

    @abstractmethod
    def refuse(self, error: BlockTrainError, request: Request) -> Response:
        """An error as this server's clients know it."""

    @abstractmethod
    def count(self, method: str, path: str, status: int, seconds: float) -> None:
        """Called once for every answer."""

    def behind(self, door: Door) -> list[Middleware]:
        """What an app of these routes puts before all of them."""
        return [Middleware(Doorkeeper, door=door, refuse=self.refuse)]

    def route(self, methods: str, path: str, handler: Handler, access: Access = "member") -> Route:
        return Route(path, _Guarded(self, handler, access, path), methods=methods.split())

    async def read_body(self, request: Request, limit: int, kind: str = calls.JSON) -> bytes:
        """Exactly the announced bytes of this kind, within the limit and in time."""
        length = body_length(request, limit)
        require_type(request, kind)
        address = address_of(request)
        room = self.occupancy.transfer if self.whole else self.occupancy.request
        parts: list[bytes] = []
        with room(address):
            try:
                async with asyncio.timeout(body_seconds(length)):
                    async for part in request.stream():
                        parts.append(part)
            except TimeoutError:
                raise Refused(
                    Code.TOO_SLOW, f"{sum(map(len, parts))} of {length} bytes came in time"
                ) from None
        content = b"".join(parts)
        if len(content) != length:
            raise Refused(Code.MALFORMED, f"{len(content)} bytes instead of {length}")
        return content


@dataclass(frozen=True)
class _Guarded:
    """A handler as an ASGI app."""

    front: Front
    handler: Handler
    access: Access
    path: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        front, request, began = self.front, Request(scope, receive), time.monotonic()
        address = address_of(request)

        def count(status: int) -> None:
            front.count(request.method, self.path, status, time.monotonic() - began)

        try:
            front.check(request, self.access)
            if front.whole:
                front.occupancy.enter(address)
        except BlockTrainError as error:
            refusal = front.refuse(error, request)
            count(refusal.status_code)
            await refusal(scope, receive, send)
            return
        try:
            response, status = await self._answer(request, send, count)
            count(status)
            if response is None:
                return
            if not front.whole:
                await response(scope, receive, send)
                return
            listening = isinstance(response, EventStream)
            with front.occupancy.transfer(address, listening=listening):
                await response(scope, receive, send)
        finally:
            if front.whole:
                front.occupancy.leave(address)

    async def _answer(
        self, request: Request, send: Send, count: Callable[[int], None]
    ) -> tuple[Response | None, int]:
        try:
            response = await self.handler(request, send)
        except BlockTrainError as error:
            response = self.front.refuse(error, request)
        except ClientDisconnect:
            return None, CLIENT_CLOSED
        except Exception:  # a bug: Starlette answers 500
            count(500)
            raise
        return response, 200 if response is None else response.status_code


def address_of(request: Request) -> str:
    return request.client.host if request.client else ""


def body_length(request: Request, limit: int) -> int:
    """The length of a body that may be read."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refused(Code.WRONG_ENCODING)
    header = request.headers.get("content-length")
    if header is None:
        raise Refused(Code.LENGTH_REQUIRED)
    length = number(header, "Content-Length")
    if length > limit:
        raise Refused(Code.TOO_LARGE, f"a body of {length} bytes, {limit} are allowed")
    return length


def require_type(request: Request, kind: str) -> None:
    """Another's page can send a body without asking first, but not as one of our types."""
    found = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if found != kind:
        raise Refused(Code.WRONG_TYPE, f"Content-Type is {found[:80]!r}, not {kind}")


def number(text: str, name: str) -> int:
    """A decimal number in a path, a query or a header."""
    if not text.isascii() or not text.isdecimal() or len(text) > MOST_DIGITS:
        raise Refused(Code.MALFORMED, f"{name} is a number")
    return int(text)
