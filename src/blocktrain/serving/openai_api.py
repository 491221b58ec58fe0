"""OpenAI's completions API in front of an entry, with what operators and people look at: status, metrics, health, the page.

Before a body is read: key, type, exact length, size. While it is read: a deadline with a minimum rate. Before anything is done: every
field, within limits. Whoever hangs up is not written for any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from blocktrain.errors import BlockTrainError, ConfigError
from blocktrain.serving import openai_messages as m
from blocktrain.serving.entry.answer import Piece
from blocktrain.serving.entry.entry import Entry
from blocktrain.serving.gate import Keys, Places, Reading, check_name
from blocktrain.serving.metrics import Metrics
from blocktrain.serving.openai_messages import ApiError, Asked, Writing
from blocktrain.serving.page import page
from blocktrain.web.server import body_seconds

MAX_BODY = 1 << 20
ALIVE_SECONDS = (
    10.0  # without text a comment is sent, so that nobody in between takes the line for dead
)
AHEAD = 16  # pieces that are written before a slow reader has them
STREAM_HEADERS = {
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
    "X-Content-Type-Options": "nosniff",
}

Handler = Callable[[Request, Send], Awaitable[Response | None]]


@dataclass(frozen=True)
class Rules:
    """What one server serves, to whom, and how much of it."""

    model: str
    keys: Keys = field(default_factory=Keys)
    defaults: m.Defaults = field(default_factory=m.Defaults)
    max_requests: int = 8
    queue: int = 32
    any_name: bool = False  # answer to any Host: strangers may come in anyway


def build_app(entry: Entry, rules: Rules) -> Starlette:
    """The HTTP face of an entry that was started."""
    api = _Api(entry, rules)
    routes = [
        api.route("POST", "/v1/completions", api.completions),
        api.route("GET", "/v1/models", api.models),
        api.route("GET", "/v1/models/{model:path}", api.one_model),
        api.route("GET", "/v1/status", api.status),
        api.route("GET", "/metrics", api.read_metrics),
        api.route("GET", "/healthz", api.health, anyone=True),
        api.route("GET", "/", page, anyone=True),
        api.route("GET", "/page/{name}", page, anyone=True),
    ]
    return Starlette(
        routes=routes, exception_handlers={HTTPException: _nowhere, Exception: _broken}
    )


class _Api:
    def __init__(self, entry: Entry, rules: Rules) -> None:
        self.entry, self.rules = entry, rules
        self.began = time.time()
        self.places = Places(rules.max_requests, rules.queue)
        self.reading = Reading()
        self.metrics = Metrics(entry.status, self.places)

    def route(self, method: str, path: str, handler: Handler, *, anyone: bool = False) -> Route:
        """The handler behind the gate."""
        return Route(path, _Guarded(self, handler, anyone, path), methods=[method])

    def check(self, request: Request, *, anyone: bool) -> None:
        """Before anything of it is read."""
        if not self.rules.keys.digests and not self.rules.any_name:
            check_name(request.headers.get("host", ""))
        if not anyone:
            self.rules.keys.check(request.headers.get("authorization", ""))

    async def health(self, _: Request, __: Send) -> Response:
        """GET /healthz: whether an answer can be had now, and the blocks that nobody holds; needs no key."""
        missing = missing_blocks(self.entry.status())
        able = not missing or (self.entry.fan and self.rules.defaults.allow_degraded)
        return JSONResponse(
            {"ok": able, "model": self.rules.model, "missing_blocks": missing}, 200 if able else 503
        )

    async def models(self, _: Request, __: Send) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def one_model(self, request: Request, _: Send) -> Response:
        """GET /v1/models/{model}."""
        name = request.path_params["model"]
        if name != self.rules.model:
            raise ApiError(
                404,
                f"there is no model {name[:256]!r} here, only {self.rules.model!r}",
                "model_not_found",
                param="model",
            )
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.rules.model,
            "object": "model",
            "created": int(self.began),
            "owned_by": "blocktrain",
        }

    async def status(self, _: Request, __: Send) -> Response:
        """GET /v1/status: the entry, its hosts, and who is being answered."""
        places = self.places
        requests = {
            "running": places.running,
            "waiting": places.waiting,
            "most": places.most,
            "queue": places.queue,
        }
        limits = {
            "max_tokens": m.MAX_TOKENS,
            "n": m.MAX_CHOICES,
            "sweeps": m.MAX_SWEEPS,
            "body_bytes": MAX_BODY,
        }
        mine = {
            "id": self.rules.model,
            "requests": requests,
            "defaults": asdict(self.rules.defaults),
            "limits": limits,
        }
        return JSONResponse(
            {**self.entry.status(), **mine, "up_seconds": round(time.time() - self.began, 3)}
        )

    async def read_metrics(self, _: Request, __: Send) -> Response:
        """GET /metrics."""
        return Response(self.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def completions(self, request: Request, send: Send) -> Response | None:
        """POST /v1/completions."""
        order = m.asked(
            m.read_completion(await self._body(request)), self.rules.model, self.rules.defaults
        )
        return await _while_connected(request.receive, self._write(order, send), self.metrics.left)

    async def _body(self, request: Request) -> bytes:
        """Exactly the announced bytes, within the limit and in time."""
        length = _announced(request)
        parts: list[bytes] = []
        with self.reading.one(request.client.host if request.client else ""):
            try:
                async with asyncio.timeout(body_seconds(length)):
                    async for part in request.stream():
                        parts.append(part)
            except TimeoutError:
                raise ApiError(
                    408,
                    f"{sum(map(len, parts))} of {length} bytes came in time: send faster",
                    "too_slow",
                ) from None
        return b"".join(parts)

    async def _write(self, order: Asked, send: Send) -> Response | None:
        """All choices of an order, in one piece or as they come."""
        async with self.places.one(), aclosing(_pieces(self.entry, order)) as pieces:
            writings = [Writing(index) for index in range(len(order.requests))]
            try:
                first = await anext(
                    pieces
                )  # what cannot be begun is refused with a status, also in a stream
                if order.stream:
                    await self._stream(order, writings, first, pieces, send)
                    return None
                _take(writings, first)
                async for piece in pieces:
                    _take(writings, piece)
                return JSONResponse(m.completed(order, writings))
            finally:
                for writing in writings:
                    self.metrics.written(writing)

    async def _stream(
        self,
        order: Asked,
        writings: list[Writing],
        first: _Numbered,
        pieces: AsyncGenerator[_Numbered],
        send: Send,
    ) -> None:
        start = Response(headers=STREAM_HEADERS, media_type="text/event-stream")
        headers = [pair for pair in start.raw_headers if pair[0] != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def say(content: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": content, "more_body": more})

        try:
            await say(_told(order, writings, first))
            async for piece in pieces:
                await say(_told(order, writings, piece))
        except BlockTrainError as error:
            failed = _as_api_error(error)
            self.metrics.failed(failed.code)
            await say(m.event(failed.body), more=False)
            return
        ending = m.last_chunk(order, writings) if order.usage else b""
        await say(ending + m.DONE, more=False)


def missing_blocks(status: dict[str, Any]) -> list[int]:
    """Blocks that neither the entry nor a host that is up holds."""
    model, hosts = status["model"], status["hosts"]
    if not hosts:
        return []
    held = {
        *model["local_blocks"],
        *(block for host in hosts if host["alive"] for block in host["blocks"]),
    }
    return [block for block in range(1, model["independent"] + 1) if block not in held]


_Numbered = tuple[int, Piece] | None  # which choice; None: nothing new, still alive


def _take(writings: list[Writing], numbered: _Numbered) -> None:
    if numbered is not None:
        writings[numbered[0]].take(numbered[1])


def _told(order: Asked, writings: list[Writing], numbered: _Numbered) -> bytes:
    """A piece as it is sent; nothing while a character is not whole."""
    if numbered is None:
        return m.ALIVE
    writing = writings[numbered[0]]
    text = writing.take(numbered[1])
    return m.chunk(order, writing, text) if text or writing.finish else b""


async def _pieces(entry: Entry, order: Asked) -> AsyncGenerator[_Numbered]:
    """The pieces of all choices as they come; closing it closes them all. An error of one is the error of all."""
    arrived: asyncio.Queue[tuple[int, Piece] | BaseException | None] = asyncio.Queue(AHEAD)

    async def pump(index: int) -> None:
        try:
            async with aclosing(entry.generate(order.requests[index])) as pieces:
                async for piece in pieces:
                    await arrived.put(
                        (index, replace(piece, stats=replace(piece.stats)))
                    )  # as it is now, not when it is sent
            await arrived.put(None)
        except Exception as error:
            await arrived.put(error)

    pumps = [asyncio.create_task(pump(index)) for index in range(len(order.requests))]
    open_ = len(pumps)
    try:
        while open_:
            try:
                async with asyncio.timeout(ALIVE_SECONDS):
                    found = await arrived.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(found, BaseException):
                raise found
            if found is None:
                open_ -= 1
            else:
                yield found
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)  # sessions are free when this returns


async def _while_connected(
    receive: Receive, work: Coroutine[Any, Any, Response | None], left: Callable[[], None]
) -> Response | None:
    """The work, given up when the other side hangs up."""

    async def hung_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, gone = asyncio.create_task(work), asyncio.create_task(hung_up())
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            left()
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


@dataclass(frozen=True)
class _Guarded:
    """A handler as an ASGI app, with every error as OpenAI's clients know it."""

    api: _Api
    handler: Handler
    anyone: bool
    path: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, began = Request(scope, receive), time.monotonic()
        status = 200
        try:
            self.api.check(request, anyone=self.anyone)
            response = await self.handler(request, send)
        except BlockTrainError as error:
            response = _refusal(_as_api_error(error))
        except ClientDisconnect:
            status, response = 499, None
        except Exception:  # a mistake of ours: `_broken` answers
            self.api.metrics.answered(self.path, 500, time.monotonic() - began)
            raise
        if response is not None:
            status = response.status_code
        self.api.metrics.answered(self.path, status, time.monotonic() - began)
        if response is not None:
            await response(scope, receive, send)


def _as_api_error(error: BlockTrainError) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ConfigError):  # what was asked for cannot be had of this model
        return ApiError(400, str(error), "impossible")
    return ApiError(503, str(error), "unavailable", retry_after=1)


_UNREAD = (401, 408, 411, 413, 415, 421, 429)


def _refusal(error: ApiError) -> Response:
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after is not None else {}
    if error.status in _UNREAD:  # some of the body may be: the connection cannot be used again
        headers["Connection"] = "close"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.body, error.status, headers)


async def _nowhere(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    said = f"there is no {request.method} {request.url.path[:80]} here"
    if request.url.path.startswith("/v1/chat"):
        said += ": this model completes text; use /v1/completions"
    response = _refusal(ApiError(status, said, "not_found"))
    response.headers.update(
        (error.headers if isinstance(error, HTTPException) else None) or {}
    )  # Allow
    return response


async def _broken(_: Request, __: Exception) -> Response:
    return _refusal(ApiError(500, "the server made a mistake; its log tells more", "internal"))


def _announced(request: Request) -> int:
    """The length of a body that may be read."""
    if (
        request.headers.get("content-type", "").partition(";")[0].strip().lower()
        != "application/json"
    ):
        raise ApiError(415, "send the body as Content-Type: application/json", "wrong_type")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "send the body without Content-Encoding", "wrong_encoding")
    announced = request.headers.get("content-length", "")
    if not announced.isascii() or not announced.isdecimal() or len(announced) > 15:
        raise ApiError(411, "send a Content-Length", "length_required")
    if int(announced) > MAX_BODY:
        raise ApiError(
            413, f"a body of {announced} bytes is too large, {MAX_BODY} are allowed", "too_large"
        )
    return int(announced)
