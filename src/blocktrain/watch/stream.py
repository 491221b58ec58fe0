"""The dashboard and the stream of events over HTTP, live or from a log. Reads only."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Send

from blocktrain.errors import BlockTrainError, RunError
from blocktrain.protocol.messages import refusal, write
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.protocol.status import Status
from blocktrain.watch.feed import EVENTS, Event, Feed, History, Listener
from blocktrain.web import sse
from blocktrain.web.door import Door, Doorkeeper
from blocktrain.web.guard import address_of
from blocktrain.web.pages import page_file
from blocktrain.web.sse import ALIVE, MEDIA_TYPE, STREAM_HEADERS, EventStream, frame

MAX_LISTENERS = 64
STATUS_SECONDS = 2.0
SHOWN_WORKERS = 200  # in the status that the page gets
BATCH_BYTES = 1 << 16
PAGE = Path(__file__).parents[1] / "web" / "dashboard"


async def page(request: Request) -> Response:
    """GET / and GET /page/{name}."""
    response = await page_file(PAGE, request)
    if response is None:
        raise Refused(Code.NOT_FOUND, "the page has no such file")
    return response


def as_frame(event: Event) -> bytes:
    return frame(event.line, event.kind, event.seq)


def ready(last: int, left_out: int) -> bytes:
    """The history ends here."""
    return frame(json.dumps({"last": last, "left_out": left_out}).encode(), "ready")


def in_pieces(events: Iterator[Event]) -> Iterator[bytes]:
    """Many small events as few large pieces."""
    some: list[bytes] = []
    size = 0
    for event in events:
        some.append(as_frame(event))
        size += len(some[-1])
        if size >= BATCH_BYTES:
            yield b"".join(some)
            some, size = [], 0
    yield b"".join(some)


def page_status(status: Status) -> bytes:
    """The status as the page gets it: with at most 200 workers, those that were seen last."""
    workers = sorted(status.workers, key=lambda worker: worker.seen_seconds)[:SHOWN_WORKERS]
    return status.model_copy(update={"workers": tuple(workers)}).model_dump_json().encode()


class _Stream:
    """One listener's connection: wakes up for events, for a new status, and for the end."""

    def __init__(self, address: str) -> None:
        loop = asyncio.get_running_loop()
        self.address = address
        self.flag = asyncio.Event()
        self.status: bytes | None = None
        self.ended = False
        self.listener = Listener(lambda: self._wake(loop))

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self.flag.set)

    async def news(self) -> AsyncIterator[bytes]:
        """Data to send, until the stream ends or the reader is too far behind."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(sse.ALIVE_SECONDS):
                    await self.flag.wait()
            self.flag.clear()
            if self.ended or self.listener.closed:
                return
            status, self.status = self.status, None
            yield (
                b"".join(map(as_frame, self.listener.take()))
                + (frame(status, "status") if status else b"")
                or ALIVE
            )


class Streams:
    """GET /v1/events: the listeners of one server."""

    def __init__(self, feed: Feed, status: Callable[[], Status]) -> None:
        self._feed, self._status = feed, status
        self._open: dict[_Stream, None] = {}  # the oldest first
        self._came = asyncio.Event()  # a new listener
        self._ended = False

    @property
    def count(self) -> int:
        """Listeners."""
        return len(self._open)

    async def events(self, request: Request, _: Send) -> Response:
        """GET /v1/events: the history, then live events."""
        after, follow = parse_request(request)
        if self._ended:
            raise Refused(Code.BUSY, "the coordinator stops")
        if request.method == "HEAD":
            return Response(headers=STREAM_HEADERS, media_type=MEDIA_TYPE)
        self._make_room(address_of(request))
        stream = _Stream(address_of(request))
        self._open[stream] = None
        self._came.set()
        return EventStream(self._frames(stream, after, follow), lambda: self._leave(stream))

    def _make_room(self, address: str) -> None:
        """If there are too many, the address with most of them loses its oldest.

        So nobody can lock the others out.
        """
        if len(self._open) < MAX_LISTENERS:
            return
        crowd = Counter(stream.address for stream in self._open)
        largest = max(crowd.values())
        if crowd[address] + 1 >= largest:
            raise Refused(Code.BUSY, f"{len(self._open)} pages are listening")
        oldest = next(stream for stream in self._open if crowd[stream.address] == largest)
        self._leave(oldest)
        oldest.ended = True
        oldest.flag.set()

    def _leave(self, stream: _Stream) -> None:
        self._open.pop(stream, None)
        stream.listener.closed = True

    async def _frames(self, stream: _Stream, after: int, follow: bool) -> AsyncIterator[bytes]:
        places, left_out, last = await run_in_threadpool(self._feed.listen, stream.listener, after)
        async for piece in iterate_in_threadpool(in_pieces(self._feed.read(places))):
            yield piece
        yield ready(last, left_out)
        if follow:
            async for piece in stream.news():
                yield piece

    @asynccontextmanager
    async def broadcast_status(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._send_status())
        try:
            yield
        finally:
            task.cancel()

    async def _send_status(self) -> None:
        """Every two seconds and to every new listener, built once for all of them."""
        while True:
            if not self._open:
                await self._came.wait()
            self._came.clear()
            with suppress(BlockTrainError):  # there is no run yet, or none any more
                status = await run_in_threadpool(lambda: page_status(self._status()))
                for stream in self._open:
                    stream.status = status
                    stream.flag.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(STATUS_SECONDS):
                    await self._came.wait()

    def end(self) -> None:
        """Close all streams; call it in the server's loop."""
        self._ended = True
        for stream in self._open:
            stream.ended = True
            stream.flag.set()


def parse_request(request: Request) -> tuple[int, bool]:
    """After which event, and whether to go on after the history."""
    after = request.headers.get("last-event-id") or request.query_params.get("after", "0")
    if not (after.isascii() and after.isdecimal() and len(after) <= 15):
        raise Refused(Code.MALFORMED, "after is the number of an event")
    return int(after), request.query_params.get("follow", "1") != "0"


def find_log(where: Path) -> Path:
    """The event log in a coordinator's folder, in a folder of `train`, or named itself."""
    inside = where / "coordinator" / EVENTS  # of `train`, which keeps a log of its own beside it
    log = (inside if inside.is_file() else where / EVENTS) if where.is_dir() else where
    try:
        if next(History(log).scan(), None) is None:
            raise RunError(f"{log} holds no events of a coordinator")
    except OSError as error:
        raise RunError(
            f"cannot read {log}: {error.strerror or error};"
            f" name a coordinator's folder or its {EVENTS}"
        ) from None
    return log


def replay_app(log: Path) -> Starlette:
    """The page and a log, without a run."""

    async def events(request: Request) -> Response:
        after, _ = parse_request(request)
        return EventStream(iterate_in_threadpool(_whole(log, after)))

    async def is_a_replay(_: Request) -> Response:
        return JSONResponse({"replay": True})

    def answer_refusal(_: Request, error: Exception) -> Response:
        if not isinstance(error, Refused):
            raise error
        return Response(write(refusal(error)), error.rule.status, media_type="application/json")

    door = Middleware(Doorkeeper, door=Door(), refuse=lambda e, r: answer_refusal(r, e))

    routes = [
        Route("/", page),
        Route("/page/{name}", page),
        Route("/v1/events", events),
        Route("/v1/replay", is_a_replay),
    ]
    return Starlette(routes=routes, middleware=[door], exception_handlers={Refused: answer_refusal})


def _whole(log: Path, after: int) -> Iterator[bytes]:
    history = History(log)
    for _ in history.scan():
        pass
    places, left_out = history.after(after)
    yield from in_pieces(history.read(places))
    yield ready(history.last, left_out)
