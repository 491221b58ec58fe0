"""A stand-in for the Hugging Face hub: files of models, answered as the hub's client expects."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Handler(BaseHTTPRequestHandler):
    files: dict[str, bytes]  # "org/model/tokenizer.json" -> content
    gated = "org/gated"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        model, _, name = self.path.strip("/").partition("/resolve/")
        file = name.partition("/")[2]
        content = self.files.get(f"{model}/{file}")
        known = any(path.startswith(f"{model}/") for path in self.files)
        if model == self.gated:
            return self._refuse(403, "GatedRepo")
        if content is None:
            return self._refuse(404, "EntryNotFound" if known else "RepoNotFound")
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def serve_hub(files: dict[str, bytes]) -> Iterator[str]:
    """The address of a hub with these files."""
    handler = type("Handler", (_Handler,), {"files": files})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
