"""A coordinator on a socket, and the way out when a write fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from blocktrain.coordinator import http as http_api
from blocktrain.coordinator.calls import Coordinator
from blocktrain.errors import BlockTrainError
from blocktrain.web.server import AppServer, Where


@dataclass(frozen=True)
class Listen(Where):
    """Where and how to listen, and to whom."""

    token: str = ""
    operator_token: str = ""


class Server(AppServer):
    """What makes it stop is in `failure`."""

    def __init__(self, coordinator: Coordinator, listen: Listen) -> None:
        self.failure: BlockTrainError | None = None
        app = http_api.build_app(coordinator, listen.token, listen.operator_token, self._fail)
        super().__init__(app, listen, app.state.end_streams)

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
