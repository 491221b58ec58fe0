"""The calls of protocol/calls.py as HTTP routes of a coordinator. Nothing is decided here."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send

from blocktrain.clock import Clock, SystemClock
from blocktrain.coordinator.calls import Coordinator
from blocktrain.errors import BlockTrainError, StorageFailed
from blocktrain.protocol import calls
from blocktrain.protocol import messages as m
from blocktrain.protocol.calls import Argument, Call
from blocktrain.protocol.handshake import is_proven
from blocktrain.protocol.identity import worker_id
from blocktrain.protocol.messages import (
    CLOCK_SKEW,
    MAX_STAGES,
    STAGE_EXPIRY_SECONDS,
    StageList,
    StageNotice,
)
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.store.contract import is_blob_name
from blocktrain.web.guard import Access, Front, Handler, keys_of, number

TICK_SECONDS = 0.2
_RANGE = re.compile(r"bytes=([0-9]{1,16})-([0-9]{0,16})\Z")
_ACCESS: dict[str, Access] = {"nothing": "anyone", "operator": "operator"}
_UNREAD = (  # part of the body may be unread, so the connection cannot be used again
    Code.BAD_TOKEN,
    Code.BUSY,
    Code.TOO_MANY_REQUESTS,
    Code.TOO_LARGE,
    Code.TOO_SLOW,
    Code.LENGTH_REQUIRED,
    Code.WRONG_ENCODING,
    Code.WRONG_HOST,
    Code.WRONG_ORIGIN,
    Code.WRONG_TYPE,
    Code.STALE_FENCE,
    Code.UNKNOWN_TASK,
)
_UNPROVEN = (  # raised before the signature is checked: no worker is blamed
    Code.BAD_SIGNATURE,
    Code.UNKNOWN_WORKER,
    Code.WRONG_RUN,
    Code.WRONG_PROTOCOL,
    Code.BUSY,
)
_RETRY = (
    Code.BUSY,
    Code.TOO_MANY_REQUESTS,
    Code.STORAGE_FAILED,
    Code.OVER_QUOTA,
    Code.DISK_LIMIT,
)

CountRequest = Callable[[str, str, int, float], None]
"""(method, path, status, seconds) of an answer."""


class CoordinatorFront(Front):
    """Tokens, refusals and counters of a coordinator.

    `on_fatal` is called when a write failed: after that nothing may be acknowledged.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        token: str = "",
        operator_token: str = "",
        on_fatal: Callable[[BlockTrainError], None] = lambda _: None,
        on_answer: CountRequest = lambda *_: None,
    ) -> None:
        super().__init__(whole=True)
        self.coordinator, self.on_fatal, self._on_answer = coordinator, on_fatal, on_answer
        self._operator = keys_of(operator_token)
        self._members = keys_of(token, operator_token if token else "")

    def count(self, method: str, path: str, status: int, seconds: float) -> None:
        self._on_answer(method, path, status, seconds)

    def check(self, request: Request, access: Access) -> None:
        """The operator's token opens everything. A run without a join token is open to all."""
        authorization = request.headers.get("authorization", "")
        keys = self._operator if access == "operator" else self._members
        closed = access == "operator" and not keys.digests
        if access != "anyone" and (closed or not keys.allow(authorization)):
            raise Refused(Code.BAD_TOKEN)

    def refuse(self, error: BlockTrainError, request: Request) -> Response:
        """A refusal, counted. A worker is blamed only for what it signed or has a ticket for."""
        if not isinstance(error, Refused):  # a damaged or failing store: only a restart helps
            self.on_fatal(error)
            error = Refused(Code.STORAGE_FAILED)
        worker, block = getattr(request.state, "proven", ("", 0))
        if error.code in _UNPROVEN:
            worker, block = "", 0
        self.coordinator.count_refusal(error, worker, block)
        headers = {"Connection": "close"} if error.code in _UNREAD else {}
        retry = 1.0 if error.code in _RETRY else None
        return json_response(m.refusal(error, retry), error.rule.status, headers)


class CoordinatorRoutes:
    """A route for every row of the table."""

    def __init__(
        self, front: CoordinatorFront, stage_key: bytes = b"", clock: Clock | None = None
    ) -> None:
        self.front, self.coordinator = front, front.coordinator
        self.stages = StageRegistry(stage_key, clock or SystemClock())

    def routes(self) -> list[Route]:
        return [
            Route(calls.HEALTH.path, self.health, methods=["GET"]),
            *(
                self.front.route(
                    call.method, call.path, self._handler(call), _ACCESS.get(call.needs, "member")
                )
                for call in calls.CALLS
            ),
        ]

    def unknown(self) -> Route:
        """For every path that has no route; it comes last."""
        return self.front.route("GET POST PUT DELETE PATCH", "/{anything:path}", self._unknown)

    async def _unknown(self, request: Request, _: Send) -> Response:
        raise Refused(Code.NOT_FOUND, f"{request.method} {request.url.path[:80]}")

    @asynccontextmanager
    async def run_ticks(self) -> AsyncIterator[None]:
        """Ticks in the background: deadlines pass also without calls."""
        task = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            task.cancel()

    async def _tick(self) -> None:
        while True:
            try:
                await run_in_threadpool(self.coordinator.tick)
            except Exception as error:  # without ticks no deadline would ever pass
                if not isinstance(error, BlockTrainError):
                    error = StorageFailed(f"the coordinator stopped ({type(error).__name__})")
                self.front.on_fatal(error)
                return
            await asyncio.sleep(TICK_SECONDS)

    async def health(self, _: Request) -> Response:
        running = self.coordinator
        finished = running.finished is not None
        return JSONResponse({"ok": True, "ready": running.ready, "finished": finished})

    def _handler(self, call: Call[Any]) -> Handler:
        if call is calls.BLOB:
            return self._blob
        target = self.stages if hasattr(self.stages, call.name) else self.coordinator
        return partial(self._answer, call, getattr(target, call.name))

    async def _answer(
        self, call: Call[Any], method: Callable[..., m.Message | None], request: Request, _: Send
    ) -> Response:
        """Arguments and body in, a message out."""
        arguments: dict[str, Any] = {a.name: _argument(a, request) for a in call.arguments}
        worker, received = "", 0
        if call.body == calls.BYTES:
            # The ticket first: the bytes of a stranger are not read.
            self.coordinator.require_ticket(arguments["task"], arguments["ticket"])
            request.state.proven = self.coordinator.holder(arguments["task"])
            limit = self.coordinator.chunk_bytes
            arguments["content"] = await self.front.read_body(request, limit, calls.BYTES)
        elif call.request is not None:
            content = await self.front.read_body(request, m.MAX_JSON)
            message = arguments["message"] = m.read(call.request, content)
            worker, received = getattr(message, "worker", ""), len(content)
            if isinstance(message, m.Signed):
                request.state.proven = (_signer(message), getattr(message, "block", 0))
            if isinstance(message, m.Heartbeat):
                # Most calls are heartbeats, and a thread costs more than the answer.
                at_once = self.coordinator.heartbeat_at_once(message)
                if at_once is not None:
                    return self._reply(at_once, received, worker)
        return self._reply(await run_in_threadpool(method, **arguments), received, worker)

    def _reply(self, reply: m.Message | None, received: int, worker: str) -> Response:
        response = json_response(reply) if reply is not None else JSONResponse({"ok": True})
        self.coordinator.count_bytes(0, worker, received, len(response.body))
        return response

    async def _blob(self, request: Request, _: Send) -> Response:
        """Bytes, whole or from a position on."""
        name = request.path_params["name"]
        if not is_blob_name(name):
            raise Refused(Code.NOT_FOUND, "a blob is named by 64 hex digits")
        size = await run_in_threadpool(self.coordinator.blob_size, name)
        headers = {
            "ETag": f'"{name}"',
            "Accept-Ranges": "bytes",
            "Cache-Control": "immutable, max-age=31536000",
        }
        start, status = 0, 200
        if (range_header := request.headers.get("range")) is not None:
            match = _RANGE.match(range_header)
            if match is None or match[2] or int(match[1]) >= max(size, 1):
                raise Refused(Code.MALFORMED, f"Range must be bytes=START- with START below {size}")
            start, status = int(match[1]), 206
            headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
        headers["Content-Length"] = str(size - start)
        worker = request.headers.get(m.WORKER_HEADER, "")[:32]
        pieces = self.coordinator.blob(name, start, worker)
        return StreamingResponse(iterate_in_threadpool(pieces), status, headers, calls.BYTES)


class StageRegistry:
    """The stages that serve this run's model, as they announce themselves.

    In memory alone: stages announce themselves again, and silent ones are dropped. A notice needs
    the key, and is good for one time.
    """

    def __init__(self, key: bytes, clock: Clock) -> None:
        self._key, self._clock = key, clock
        self._notices: dict[str, tuple[StageNotice, float]] = {}  # by address, with its time
        self._issued: dict[str, int] = {}  # of the last notice of an address
        self._lock = threading.Lock()

    def announce_stage(self, message: StageNotice) -> None:
        if not is_proven(self._key, message):
            raise Refused(Code.WRONG_STAGE_KEY)
        with self._lock:
            self._drop_old()
            if message.address not in self._notices and len(self._notices) >= MAX_STAGES:
                raise Refused(Code.BUSY, f"{MAX_STAGES} stages are listed")
            self._require_new(message)
            self._notices[message.address] = (message, self._clock.monotonic())
            self._issued[message.address] = message.issued

    def _require_new(self, message: StageNotice) -> None:
        now, last = int(1000 * self._clock.time()), self._issued.get(message.address, -1)
        if abs(now - message.issued) > CLOCK_SKEW or message.issued <= last:
            raise Refused(
                Code.REPLAYED,
                sentence="this notice is old or was sent before; set the clock of the stage's "
                "machine, which may be an hour wrong",
            )

    def stages(self) -> StageList:
        with self._lock:
            self._drop_old()
            return StageList(stages=tuple(notice for notice, _ in self._notices.values()))

    def _drop_old(self) -> None:
        oldest = self._clock.monotonic() - STAGE_EXPIRY_SECONDS
        self._notices = {a: entry for a, entry in self._notices.items() if entry[1] >= oldest}
        useful = int(1000 * self._clock.time()) - CLOCK_SKEW  # an older notice is refused anyway
        self._issued = {a: issued for a, issued in self._issued.items() if issued >= useful}


def json_response(
    message: m.Message, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(m.write(message), status, headers, calls.JSON)


def _argument(argument: Argument, request: Request) -> int | str:
    if argument.place == "path":
        text = request.path_params[argument.name]
    elif argument.place == "query":
        text = request.query_params.get(argument.name, str(argument.default))
    else:
        text = request.headers.get(argument.header, "")
    return number(text, argument.name) if argument.kind is int else text


def _signer(message: m.Signed) -> str:
    if isinstance(message, m.Join):
        return worker_id(message.public_key)
    return getattr(message, "worker", "")
