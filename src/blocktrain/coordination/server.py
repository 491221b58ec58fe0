"""The process around `http_api`: sockets, TLS, the event loop, and the way out when a write fails."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from blocktrain.coordination import http_api
from blocktrain.coordination.coordinator import Coordinator
from blocktrain.errors import BlockTrainError, ConfigError

HEADER_SECONDS = 15.0
MAX_HEADERS = 64 << 10  # bytes
MAX_FILES = 1 << 16
BACKLOG = 2048  # connections that wait until they are accepted
STOP_SECONDS = 10.0
KEEP_ALIVE_SECONDS = 75  # well above the client's: it must never send into a connection that is being closed


class DeadlineProtocol(HttpToolsProtocol):
    """uvicorn waits for ever for headers, for the rest of a body that nobody wants, and for readers; this one hangs up."""

    _late: asyncio.TimerHandle | None = None  # until the next headers are complete
    _unread: asyncio.TimerHandle | None = None  # until the other side has read what was sent
    _headers: int | None = None  # bytes of those that are being received

    def connection_made(self, transport: Any) -> None:
        """The clock starts."""
        super().connection_made(transport)
        self._late = self._hang_up_after(HEADER_SECONDS)

    def data_received(self, data: bytes) -> None:
        """Headers have an end, or the connection has."""
        if self._headers is not None:
            self._headers += len(data)
            if self._headers > MAX_HEADERS:
                self.transport.abort()
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        """The clock starts again with every further request on the connection."""
        super().on_message_begin()
        self._headers = 0
        _stop(self._late)
        self._late = self._hang_up_after(HEADER_SECONDS)

    def on_headers_complete(self) -> None:
        """In time."""
        self._headers = None
        _stop(self._late)
        self._late = None
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """The next request must begin in time. uvicorn's own clock stops with any byte, also one that begins nothing."""
        super().on_response_complete()
        if self._late is None and self.cycle.response_complete:
            self._late = self._hang_up_after(KEEP_ALIVE_SECONDS)

    def pause_writing(self) -> None:
        """The other side reads slowly: it must not be slower than those who send."""
        super().pause_writing()
        self._unread = self._hang_up_after(http_api.BODY_SECONDS + self.transport.get_write_buffer_size() / http_api.MIN_RATE)

    def resume_writing(self) -> None:
        """Fast enough."""
        _stop(self._unread)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody to hang up on."""
        _stop(self._late)
        _stop(self._unread)
        super().connection_lost(exc)

    def _hang_up_after(self, seconds: float) -> asyncio.TimerHandle:
        return self.loop.call_later(seconds, self.transport.abort)  # to close would wait until all that was sent is read


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class _Uvicorn(uvicorn.Server):
    """Ends streams before it waits for its connections: they have no end of their own."""

    def __init__(self, config: uvicorn.Config, end_streams: Callable[[], None]) -> None:
        super().__init__(config)
        self._end_streams = end_streams

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """The way out, whatever made it go."""
        self._end_streams()
        await super().shutdown(sockets)


@dataclass(frozen=True)
class Listen:
    """Where and how to listen."""

    host: str = "127.0.0.1"
    port: int = 0
    token: str = ""
    operator_token: str = ""
    certificate: Path | None = None
    key: Path | None = None


class AppServer:
    """An app on a socket. `url` is known before the first request."""

    def __init__(self, app: Starlette, listen: Listen) -> None:
        self.failure: BlockTrainError | None = None
        self._thread: threading.Thread | None = None
        self._socket = _bind(listen.host, listen.port)
        host, port = self._socket.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if listen.certificate else 'http'}://{shown}:{port}"
        config = uvicorn.Config(
            app,
            http=DeadlineProtocol,
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=5,
            ssl_certfile=listen.certificate,
            ssl_keyfile=listen.key,
        )
        try:
            config.load()
        except OSError as error:
            raise ConfigError(f"cannot use the certificate {listen.certificate}: {error.strerror or error}") from None
        self._server = _Uvicorn(config, app.state.end_streams)

    def run(self) -> None:
        """Serve until told to stop; raises what made it stop."""
        self._server.run(sockets=[self._socket])
        if self.failure is not None:
            raise self.failure

    def start(self) -> None:
        """Serve in a thread; connections wait in the socket's queue until its loop runs. What makes it stop is in `failure`."""
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="coordinator", daemon=True)
        self._thread.start()

    def serves(self, seconds: float) -> bool:
        """Wait so long, or until it stops; whether it still serves."""
        if self._thread is not None:
            self._thread.join(timeout=seconds)
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """End what `run` or `start` began."""
        self._server.should_exit = True
        self.serves(STOP_SECONDS)


class Server(AppServer):
    """A coordinator on a socket."""

    def __init__(self, coordinator: Coordinator, listen: Listen) -> None:
        super().__init__(http_api.build_app(coordinator, listen.token, listen.operator_token, self._fail), listen)

    def _fail(self, error: BlockTrainError) -> None:
        """Fail-stop: nothing is acknowledged any more, and the process ends."""
        self.failure = self.failure or error
        self._server.should_exit = True


@contextmanager
def running(coordinator: Coordinator, listen: Listen) -> Iterator[str]:
    """Serve as long as the block lasts; gives the URL. If the server fails, that is the error to tell, not what followed from it."""
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


def allow_connections() -> None:
    """As many open files as the system lets this process have: every worker keeps a connection, and 1,024 are soon used up."""
    with suppress(ImportError, OSError, ValueError):  # not everywhere, and not always
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)  # from now on they wait, and the port is nobody else's
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another with --listen host:port") from None
    return listening
