"""Server-sent events over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

ALIVE = b": alive\n\n"
ALIVE_SECONDS = 10.0  # of silence, then a comment keeps proxies from closing the connection
MEDIA_TYPE = "text/event-stream"
STREAM_HEADERS = {
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
    "X-Content-Type-Options": "nosniff",
}


def frame(data: bytes, kind: str = "", number: int | None = None) -> bytes:
    head = b"" if number is None else b"id: %d\n" % number
    if kind:
        head += b"event: %s\n" % kind.encode()
    return head + b"data: %s\n\n" % data


class EventStream(StreamingResponse):
    """A stream that calls `on_close`, however it ends."""

    def __init__(
        self, content: AsyncIterator[bytes], on_close: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(content, headers=STREAM_HEADERS, media_type=MEDIA_TYPE)
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()
