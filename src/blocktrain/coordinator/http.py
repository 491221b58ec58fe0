"""Routes to coordinator methods, errors to status codes, limits at the door. Nothing is decided here.

Before a body is read: token, exact length, no encoding, size, how many are here. While it is read: an absolute deadline with a
minimum rate; answers have one too, in `server`.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from blocktrain.coordinator.calls import Coordinator
from blocktrain.coordinator.stages import Stages
from blocktrain.errors import BlockTrainError
from blocktrain.protocol import messages as m
from blocktrain.protocol.identity import worker_id
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.protocol.stages import StageNotice
from blocktrain.store.blobs import is_name
from blocktrain.watch import stream as watch_api
from blocktrain.watch.metrics import Metrics
from blocktrain.web.server import body_seconds

TICK_SECONDS = 0.2
MAX_SERVED = 256  # requests at a time that the coordinator works on
MAX_MOVING = 1024  # requests at a time whose bytes are on the line, in either direction
MAX_FROM_ONE = 64  # of both together, from one address
LISTENERS = "listeners"  # stands for the addresses of those who read the stream of events
_RANGE = re.compile(r"bytes=([0-9]{1,16})-([0-9]{0,16})\Z")

Handler = Callable[[Request], Awaitable[Response]]
Who = Literal["anyone", "member", "operator"]
"""May come in: anyone at all, whoever has the join token, the operator alone."""


@dataclass
class Door:
    """Who may come in, and how many at a time."""

    token: str = ""
    operator_token: str = ""
    served: Counter[str] = field(default_factory=Counter)
    moving: Counter[str] = field(default_factory=Counter)

    def check(self, request: Request, who: Who) -> None:
        """Refuse a request without its token (to join needs none where none is set); the operator's opens every door."""
        if who == "anyone":
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        is_operator = bool(self.operator_token) and hmac.compare_digest(
            given, self.operator_token.encode()
        )
        if not is_operator and (
            who == "operator"
            or (self.token and not hmac.compare_digest(given, self.token.encode()))
        ):
            raise Refused(Code.BAD_TOKEN)

    def enter(self, address: str) -> None:
        """Refuse when too many are here already."""
        if self.served.total() >= MAX_SERVED or self.moving.total() >= MAX_MOVING:
            raise Refused(Code.BUSY)
        if self.served[address] + self.moving[address] >= MAX_FROM_ONE:
            raise Refused(Code.TOO_MANY_REQUESTS)
        self.served[address] += 1

    def leave(self, address: str) -> None:
        """Make room."""
        _take(self.served, address)

    @contextmanager
    def on_the_line(self, address: str, *, listening: bool = False) -> Iterator[None]:
        """While bytes come or go: a slow line does not take the place of somebody who could be served.

        Whoever only listens stays for hours: then it is nobody's address that is busy.
        """
        name = LISTENERS if listening else address
        _take(self.served, address)
        self.moving[name] += 1
        try:
            yield
        finally:
            _take(self.moving, name)
            self.served[address] += 1


def _take(counter: Counter[str], address: str) -> None:
    counter[address] -= 1
    if not counter[address]:
        del counter[address]


def build_app(
    coordinator: Coordinator,
    token: str = "",
    operator_token: str = "",
    on_fatal: Callable[[BlockTrainError], None] = lambda _: None,
) -> Starlette:
    """The HTTP face of a coordinator. `on_fatal` is told when a write failed: then nothing may be acknowledged any more."""
    api = _Api(coordinator, Door(token, operator_token), on_fatal)
    routes = [
        Route("/healthz", api.health, methods=["GET"]),
        api.route("GET", "/v1/run", api.manifest),
        api.route("POST", "/v1/join", partial(api.call, m.Join, coordinator.join)),
        api.route("POST", "/v1/tasks", partial(api.call, m.TaskRequest, coordinator.next_task)),
        api.route("POST", "/v1/heartbeat", partial(api.call, m.Heartbeat, coordinator.heartbeat)),
        api.route("POST", "/v1/updates", partial(api.call, m.Submission, coordinator.submit)),
        api.route("GET", "/v1/uploads/{task}", api.upload_state),
        api.route("PUT", "/v1/uploads/{task}/{index}", api.put_chunk),
        api.route("GET", "/v1/blobs/{name}", api.blob),
        api.route("GET", "/v1/status", api.status),
        api.route("GET", "/v1/ledger", api.ledger),
        api.route("POST", "/v1/kick", partial(api.call, m.Kick, coordinator.kick), "operator"),
        api.route("POST", "/v1/stages", partial(api.call, StageNotice, api.stages.tell)),
        api.route("GET", "/v1/stages", api.list_stages),
        api.route("GET", "/v1/events", api.streams.events),
        api.route("GET", "/metrics", api.read_metrics),
        api.route("GET", "/v1/replay", watch_api.not_a_replay, "anyone"),
        api.route("GET", "/", watch_api.page, "anyone"),
        api.route("GET", "/page/{name}", watch_api.page, "anyone"),
        api.route("GET POST PUT DELETE PATCH", "/{anything:path}", _nowhere),
    ]
    app = Starlette(routes=routes, lifespan=api.lifespan)
    app.state.end_streams = api.streams.end
    return app


async def _nowhere(request: Request) -> Response:
    raise Refused(Code.NOT_FOUND, f"{request.method} {request.url.path[:80]}")


class _Api:
    def __init__(
        self, coordinator: Coordinator, door: Door, on_fatal: Callable[[BlockTrainError], None]
    ) -> None:
        self.coordinator, self.door, self.on_fatal = coordinator, door, on_fatal
        self.streams = watch_api.Streams(coordinator.feed, coordinator.status)
        self.metrics = Metrics(coordinator, lambda: self.streams.count)
        self.stages = Stages()

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Deadlines pass also when nobody calls."""
        beside = [asyncio.create_task(work) for work in (self._tick(), self.streams.tell_status())]
        try:
            yield
        finally:
            for task in beside:
                task.cancel()

    async def _tick(self) -> None:
        while True:
            try:
                await run_in_threadpool(self.coordinator.tick)
            except BlockTrainError as error:
                self.on_fatal(error)
                return
            await asyncio.sleep(TICK_SECONDS)

    def route(self, methods: str, path: str, handler: Handler, who: Who = "member") -> Route:
        """The handler behind the door."""
        return Route(path, _Guarded(self, handler, who, path), methods=methods.split())

    async def answer(self, handler: Handler, request: Request) -> Response:
        """What a handler says, with every error as a refusal."""
        try:
            return await handler(request)
        except Refused as error:
            return self.refusal(error, *getattr(request.state, "proven", ("", 0)))
        except BlockTrainError as error:  # not stored, damaged on the disk, or not as it was left: only a new start helps
            self.on_fatal(error)
            return self.refusal(Refused(Code.STORAGE_FAILED))
        except ClientDisconnect:
            return Response(status_code=400)

    def refusal(self, error: Refused, worker: str = "", block: int = 0) -> Response:
        """A no, counted and told; `worker` is blamed only for what it has signed, or holds the ticket for."""
        live = self.coordinator.live
        if error.code in _UNPROVEN:
            worker, block = "", 0
        live.recall.refused(error.code, worker, block)
        live.teller.refused(error.code, error.sentence, worker, block)
        retry = (
            1.0 if error.code in (Code.BUSY, Code.TOO_MANY_REQUESTS, Code.STORAGE_FAILED) else None
        )
        # Some of the body may be unread: the connection cannot be used again.
        headers = {"Connection": "close"} if error.code in _UNREAD else {}
        return _json(m.refusal(error, retry), error.rule.status, headers)

    async def health(self, _: Request) -> Response:
        """Up, and whether the run is there; needs no token."""
        return JSONResponse(
            {
                "ok": True,
                "ready": self.coordinator.ready,
                "finished": self.coordinator.finished is not None,
            }
        )

    async def call(
        self, kind: type[m.Message], method: Callable[[Any], m.Message | None], request: Request
    ) -> Response:
        """A message in, a message out."""
        content = await self._body(request, m.MAX_JSON)
        message = m.read(kind, content)
        if isinstance(message, m.Signed):
            worker = (
                worker_id(message.public_key)
                if isinstance(message, m.Join)
                else getattr(message, "worker", "")
            )
            request.state.proven = (worker, getattr(message, "block", 0))
        # Most calls are heartbeats, and to hand one to a thread takes longer than to answer it.
        at_once: m.Message | None = (
            self.coordinator.heartbeat_at_once(message)
            if isinstance(message, m.Heartbeat)
            else None
        )
        reply = at_once or await run_in_threadpool(method, message)
        return self._answer(reply, len(content), getattr(message, "worker", ""))

    async def manifest(self, _: Request) -> Response:
        """GET /v1/run."""
        return self._answer(await run_in_threadpool(self.coordinator.manifest))

    async def status(self, _: Request) -> Response:
        """GET /v1/status."""
        return self._answer(await run_in_threadpool(self.coordinator.status))

    async def ledger(self, request: Request) -> Response:
        """GET /v1/ledger?after=N."""
        after = _number(request.query_params.get("after", "0"), "after")
        return self._answer(await run_in_threadpool(self.coordinator.ledger, after))

    async def list_stages(self, _: Request) -> Response:
        """GET /v1/stages."""
        return self._answer(self.stages.listed())

    async def read_metrics(self, _: Request) -> Response:
        """GET /metrics."""
        return Response(
            await run_in_threadpool(self.metrics.text),
            headers={"Content-Type": CONTENT_TYPE_LATEST},
        )

    async def upload_state(self, request: Request) -> Response:
        """GET /v1/uploads/{task}."""
        task = _number(request.path_params["task"], "task")
        ticket = request.headers.get(m.TICKET_HEADER, "")
        return self._answer(await run_in_threadpool(self.coordinator.upload_state, task, ticket))

    async def put_chunk(self, request: Request) -> Response:
        """PUT /v1/uploads/{task}/{index}."""
        task, index = (_number(request.path_params[name], name) for name in ("task", "index"))
        ticket, digest = (
            request.headers.get(m.TICKET_HEADER, ""),
            request.headers.get(m.DIGEST_HEADER, ""),
        )
        self.coordinator.require_ticket(
            task, ticket
        )  # before the body: a stranger's bytes are not read
        request.state.proven = self.coordinator.holder(task)
        content = await self._body(request, self.coordinator.live.policy.chunk_bytes)
        return self._answer(
            await run_in_threadpool(
                self.coordinator.put_chunk, task, index, ticket, content, digest
            )
        )

    async def blob(self, request: Request) -> Response:
        """GET /v1/blobs/{sha256}, whole or from a byte on."""
        name = request.path_params["name"]
        if not is_name(name):
            raise Refused(Code.NOT_FOUND, "a blob is named by 64 hex digits")
        path, _ = await run_in_threadpool(self.coordinator.blob_path, name)
        size = path.stat().st_size
        headers = {
            "ETag": f'"{name}"',
            "Accept-Ranges": "bytes",
            "Cache-Control": "immutable, max-age=31536000",
        }
        start, status = 0, 200
        if (wanted := request.headers.get("range")) is not None:
            found = _RANGE.match(wanted)
            if found is None or found[2] or int(found[1]) >= max(size, 1):
                raise Refused(Code.MALFORMED, f"Range must be bytes=START- with START below {size}")
            start, status = int(found[1]), 206
            headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
        headers["Content-Length"] = str(size - start)
        pieces = self.coordinator.blob(name, start, request.headers.get(m.WORKER_HEADER, "")[:32])
        return StreamingResponse(
            iterate_in_threadpool(pieces), status, headers, "application/octet-stream"
        )

    async def _body(self, request: Request, limit: int) -> bytes:
        """Exactly the announced bytes, within the limit and in time."""
        length = _announced(request, limit)
        parts: list[bytes] = []
        try:
            with self.door.on_the_line(_address(request)):
                async with asyncio.timeout(body_seconds(length)):
                    async for part in request.stream():
                        parts.append(part)
        except TimeoutError:
            raise Refused(Code.TOO_SLOW, f"{sum(map(len, parts))} of {length} bytes") from None
        content = b"".join(parts)
        if len(content) != length:
            raise Refused(Code.MALFORMED, f"{len(content)} bytes instead of {length}")
        return content

    def _answer(self, reply: m.Message | None, received: int = 0, worker: str = "") -> Response:
        response = _json(reply) if reply is not None else JSONResponse({"ok": True})
        self.coordinator.live.count(0, worker, received, len(response.body))
        return response


@dataclass(frozen=True)
class _Guarded:
    """A handler as an ASGI app: nothing of a request is read before it may come in, and it is here until its answer is sent."""

    api: _Api
    handler: Handler
    who: Who
    path: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, door = Request(scope, receive), self.api.door
        address, began = _address(request), time.monotonic()
        try:
            door.check(request, self.who)
            door.enter(address)
        except Refused as error:
            response = self.api.refusal(error)
            self._count(request, response, began)
            await response(scope, receive, send)
            return
        try:
            response = await self.api.answer(self.handler, request)
            self._count(request, response, began)
            with door.on_the_line(address, listening=isinstance(response, watch_api.Told)):
                await response(scope, receive, send)
        finally:
            door.leave(address)

    def _count(self, request: Request, response: Response, began: float) -> None:
        self.api.metrics.answered(
            request.method, self.path, response.status_code, time.monotonic() - began
        )


_UNREAD = (
    Code.BAD_TOKEN,
    Code.BUSY,
    Code.TOO_MANY_REQUESTS,
    Code.TOO_LARGE,
    Code.TOO_SLOW,
    Code.LENGTH_REQUIRED,
    Code.WRONG_ENCODING,
    Code.STALE_FENCE,
    Code.UNKNOWN_TASK,
)

# Said before a signature is checked:
_UNPROVEN = (
    Code.BAD_SIGNATURE,
    Code.UNKNOWN_WORKER,
    Code.WRONG_RUN,
    Code.WRONG_PROTOCOL,
    Code.BUSY,
)


def _json(message: m.Message, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(m.write(message), status, headers, "application/json")


def _number(text: str, what: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 15:
        raise Refused(Code.MALFORMED, f"{what} is a number")
    return int(text)


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


def _announced(request: Request, limit: int) -> int:
    """The length of a body that may be read."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refused(Code.WRONG_ENCODING)
    announced = request.headers.get("content-length")
    if announced is None:
        raise Refused(Code.LENGTH_REQUIRED)
    length = _number(announced, "Content-Length")
    if length > limit:
        raise Refused(Code.TOO_LARGE, f"a body of {length} bytes, {limit} are allowed")
    return length
