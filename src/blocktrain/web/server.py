"""An ASGI app on a socket: TLS, event loop, start and stop, signals."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from blocktrain.errors import ConfigError
from blocktrain.web.guard import KEEP_ALIVE_SECONDS, DeadlineProtocol

MAX_FILES = 1 << 16
BACKLOG = 2048  # connections that wait until they are accepted
FINISH_SECONDS = 5  # for requests in progress when it stops
STOP_SECONDS = 60.0  # for its threads to end


@dataclass(frozen=True)
class Where:
    """Where and how to listen."""

    host: str = "127.0.0.1"
    port: int = 0
    certificate: Path | None = field(default=None, kw_only=True)
    key: Path | None = field(default=None, kw_only=True)


class _Uvicorn(uvicorn.Server):
    """Ends streams before it waits for connections, and does not raise a signal again."""

    def __init__(self, config: uvicorn.Config, end_streams: Callable[[], None]) -> None:
        super().__init__(config)
        self._end_streams = end_streams
        self.on_start: Callable[[], None] = lambda: None
        self.served_by: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """From here on it answers, and a signal ends it as it should."""
        self.served_by = asyncio.get_running_loop()
        await super().startup(sockets)
        self.on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends the streams first, also after an error."""
        self._end_streams()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """In the main thread, Ctrl-C and SIGTERM mean finish; a second Ctrl-C means at once."""
        ours = threading.current_thread() is threading.main_thread()
        known = {
            number: signal.signal(number, self.handle_exit)
            for number in (signal.SIGINT, signal.SIGTERM)
            if ours
        }
        try:
            yield
        finally:
            for number, handler in known.items():
                signal.signal(number, handler)


class AppServer:
    """An app on a socket. `url` is known before the first request."""

    def __init__(
        self, app: Any, listen: Where, end_streams: Callable[[], None] = lambda: None
    ) -> None:
        self._thread: threading.Thread | None = None
        self._socket = bind(listen.host, listen.port)
        host, port = self._socket.getsockname()[:2]
        address = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if listen.certificate else 'http'}://{address}:{port}"
        config = uvicorn.Config(
            app,
            http=DeadlineProtocol,
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=FINISH_SECONDS,
            ssl_certfile=listen.certificate,
            ssl_keyfile=listen.key,
        )
        try:
            config.load()
        except OSError as error:
            raise ConfigError(
                f"cannot use the certificate {listen.certificate}: {error.strerror or error}"
            ) from None
        self._server = _Uvicorn(config, end_streams)

    async def serve(self, on_start: Callable[[], None] = lambda: None) -> None:
        """Serve until a signal or `stop`, in the main thread's loop.

        `on_start` is called when it answers.
        """
        self._server.on_start = on_start
        await self._server.serve(sockets=[self._socket])

    def start(self) -> None:
        """Serve in a thread; connections wait in the socket's queue until its loop runs."""
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="server", daemon=True
        )
        self._thread.start()

    def serves(self, seconds: float) -> bool:
        """Wait so long, or until the thread stops; whether it still serves."""
        if self._thread is not None:
            self._thread.join(timeout=seconds)
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """Finish what is being answered, and end what `serve` or `start` began."""
        self._server.should_exit = True
        if self._thread is None or self.serves(STOP_SECONDS):
            return
        # The threads of its pool end by themselves, but exiting before they did may crash.
        for thread in threading.enumerate():
            if getattr(thread, "loop", None) is self._server.served_by is not None:
                thread.join(STOP_SECONDS)


def run_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run to its end, on uvloop where that is installed."""
    factory = (
        getattr(importlib.import_module("uvloop"), "new_event_loop")  # noqa: B009
        if importlib.util.find_spec("uvloop")
        else None
    )
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(work)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, or a sentence."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)  # from now on connections queue, and the port is ours
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error};"
            " choose another with --listen host:port"
        ) from None
    return listening


def allow_connections() -> None:
    """Raise the limit of open files: every worker keeps a connection, and 1,024 are too few."""
    with suppress(ImportError, OSError, ValueError):  # not everywhere, and not always
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
