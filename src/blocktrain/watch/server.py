"""A coordinator as it runs: with its events, status, metrics and page, on a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Send

from blocktrain.clock import Clock, SystemClock
from blocktrain.coordinator.calls import Coordinator
from blocktrain.coordinator.corpus import restore_shards
from blocktrain.coordinator.http import CoordinatorFront, CoordinatorRoutes
from blocktrain.errors import BlockTrainError
from blocktrain.protocol import calls
from blocktrain.protocol.identity import open_identity
from blocktrain.protocol.status import Status
from blocktrain.store.open import open_store
from blocktrain.watch import stream
from blocktrain.watch.checking.judging import ProcessJudge
from blocktrain.watch.checking.retraining import ProcessRetrainer
from blocktrain.watch.feed import EVENTS, Feed
from blocktrain.watch.metrics import CoordinatorMetrics
from blocktrain.watch.narrator import Narrator
from blocktrain.watch.status import status_of
from blocktrain.web.door import Door, make_door
from blocktrain.web.openapi import describe_calls
from blocktrain.web.server import AppServer, Where


class WatchedCoordinator(Coordinator):
    """A coordinator whose events are logged and whose status can be read."""

    feed: Feed

    def status(self) -> Status:
        with self._lock_run() as run:
            now = self._clock.monotonic()
        return status_of(run, now, self.feed)


def open_coordinator(
    folder: Path, clock: Clock | None = None, corpus: Path | None = None
) -> WatchedCoordinator:
    """The coordinator of a folder, with the run that is in it or with none yet.

    From a prepared corpus it takes the shards of its run, in case its own are damaged.
    """
    store = open_store(folder)
    try:
        if corpus is not None:
            restore_shards(store.blobs, corpus)
        identity, feed = open_identity(folder / "coordinator.pem"), Feed(folder / EVENTS)
        coordinator = WatchedCoordinator(
            store,
            identity,
            clock or SystemClock(),
            Narrator(feed),
            ProcessJudge,
            ProcessRetrainer,
        )
        coordinator.feed = feed
    except BaseException:
        store.close()
        raise
    return coordinator


@dataclass(frozen=True)
class Listen(Where):
    """Where and how to listen, and the tokens to ask for."""

    token: str = ""
    operator_token: str = ""
    allow_host: tuple[str, ...] = ()
    stage_key: bytes = b""
    """Who knows it may announce stages; empty: nobody."""

    @property
    def door(self) -> Door:
        return make_door(self.host, self.allow_host, secret=bool(self.token))


class Server(AppServer):
    """A coordinator on a socket. `failure` is the error that stopped it."""

    def __init__(self, coordinator: WatchedCoordinator, listen: Listen) -> None:
        self.failure: BlockTrainError | None = None
        streams = stream.Streams(coordinator.feed, coordinator.status)
        app = _build_app(coordinator, listen, streams, self._fail)
        super().__init__(app, listen, streams.end)

    def _fail(self, error: BlockTrainError) -> None:
        """Nothing is acknowledged any more, and the process ends."""
        self.failure = self.failure or error
        self._server.should_exit = True


def _build_app(
    coordinator: WatchedCoordinator,
    listen: Listen,
    streams: stream.Streams,
    on_fatal: Callable[[BlockTrainError], None],
) -> Starlette:
    metrics = CoordinatorMetrics(coordinator, lambda: streams.count)
    front = CoordinatorFront(
        coordinator, listen.token, listen.operator_token, on_fatal, metrics.observe
    )
    routes = CoordinatorRoutes(front, listen.stage_key)

    async def read_metrics(_: Request, __: Send) -> Response:
        text = await run_in_threadpool(metrics.text)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def replay(_: Request, __: Send) -> Response:
        return JSONResponse({"replay": False})

    async def openapi(_: Request, __: Send) -> Response:
        rows = (*calls.CALLS, *calls.WATCH_CALLS)
        return Response(await run_in_threadpool(describe_calls, rows), media_type=calls.JSON)

    async def page(request: Request, _: Send) -> Response:
        return await stream.page(request)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with routes.run_ticks(), streams.broadcast_status():
            yield

    watched = [
        front.route("GET", calls.EVENTS.path, streams.events),
        front.route("GET", calls.METRICS.path, read_metrics),
        front.route("GET", calls.REPLAY.path, replay, "anyone"),
        front.route("GET", calls.PAGE.path, page, "anyone"),
        front.route("GET", "/page/{name}", page, "anyone"),
        front.route("GET", calls.OPENAPI.path, openapi, "anyone"),
    ]
    every = [*routes.routes(), *watched, routes.unknown()]
    return Starlette(routes=every, middleware=front.behind(listen.door), lifespan=lifespan)


@contextmanager
def serve_coordinator(coordinator: WatchedCoordinator, listen: Listen) -> Iterator[str]:
    """Serve as long as the block lasts; gives the URL.

    If the server fails, its failure is raised, not an error that followed from it.
    """
    server = Server(coordinator, listen)
    server.start()
    try:
        yield server.url
    except BlockTrainError:
        if server.failure is not None:
            raise server.failure from None
        raise
    finally:
        server.stop()
