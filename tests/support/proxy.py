"""A proxy between worker and coordinator that drops answers, cuts connections and counts bytes."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

_UPDATE = re.compile(rb'"payload_sha256":"([0-9a-f]{64})"')


@dataclass
class Proxy:
    """TCP in, TCP out. What it does wrong can be changed at any time."""

    target: tuple[str, int]
    cut_after: int | None = (
        None  # bytes, in both directions together, after which a connection ends
    )
    drop_first_acknowledgement: bool = (
        False  # of every update: the request arrives, the answer does not
    )
    up: int = 0  # bytes to the coordinator
    down: int = 0  # bytes from it
    cuts: int = 0
    dropped: set[bytes] = field(default_factory=set)  # updates whose first answer was lost
    _mutex: threading.Lock = field(default_factory=threading.Lock)

    def forget(self) -> None:
        """Count from zero."""
        with self._mutex:
            self.up = self.down = self.cuts = 0

    def serve(self, listening: socket.socket) -> None:
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self.target, timeout=60)
            except OSError:
                client.close()
                continue
            connection = _Connection(self, client, server)
            for way in (connection.upward, connection.downward):
                threading.Thread(target=way, daemon=True).start()


class _Connection:
    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self.proxy, self.client, self.server = proxy, client, server
        self.passed = 0
        self.request = b""
        self.answering = False

    def upward(self) -> None:
        self._relay(self.client, self.server, up=True)

    def downward(self) -> None:
        self._relay(self.server, self.client, up=False)

    def _relay(self, source: socket.socket, sink: socket.socket, *, up: bool) -> None:
        with suppress(OSError):
            while content := source.recv(16384):
                allowed = self._count(content, up=up)
                if not up and self._lost():
                    break
                sink.sendall(content[:allowed])
                if allowed < len(content):
                    break
        self._end()

    def _count(self, content: bytes, *, up: bool) -> int:
        """How many of these bytes may pass."""
        proxy = self.proxy
        with proxy._mutex:
            allowed = len(content)
            if proxy.cut_after is not None and self.passed + allowed > proxy.cut_after:
                allowed = max(0, proxy.cut_after - self.passed)
                proxy.cuts += 1
            self.passed += allowed
            if up:
                proxy.up += allowed
                if self.answering:
                    self.request, self.answering = b"", False
                self.request += content
            else:
                proxy.down += allowed
                self.answering = True
            return allowed

    def _lost(self) -> bool:
        """Whether this answer is one that never arrives."""
        found = (
            _UPDATE.search(self.request) if self.request.startswith(b"POST /v1/updates") else None
        )
        with self.proxy._mutex:
            if (
                not self.proxy.drop_first_acknowledgement
                or found is None
                or found[1] in self.proxy.dropped
            ):
                return False
            self.proxy.dropped.add(found[1])
            return True

    def _end(self) -> None:
        for line in (self.client, self.server):
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()


@contextmanager
def proxy_to(url: str) -> Iterator[tuple[str, Proxy]]:
    """A proxy before a coordinator, as long as the block lasts; its address and itself."""
    host, port = url.removeprefix("http://").split(":")
    proxy = Proxy((host, int(port)))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=proxy.serve, args=(listening,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", proxy
        finally:
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
