"""A stand-in for the Hugging Face hub: models and datasets, as its client expects."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONVERTED_COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
PARQUET_REVISIONS = ("refs/convert/parquet", CONVERTED_COMMIT)


class _Handler(BaseHTTPRequestHandler):
    # "org/model/tokenizer.json" -> content; of datasets "datasets/org/name@REVISION/file",
    # where the revision is "main" or "refs/convert/parquet".
    files: dict[str, bytes]
    cards: dict[str, Any]  # "org/dataset" -> what its card declares
    gated = "org/gated"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/api/datasets/"):
            return self._describe(path.removeprefix("/api/datasets/"))
        self._answer(body=True)

    def _dataset(self, repo: str, revision: str) -> dict[str, bytes]:
        named = "main" if revision == COMMIT else revision
        named = "refs/convert/parquet" if revision == CONVERTED_COMMIT else named
        prefix = f"datasets/{repo}@{named}/"
        return {
            path.removeprefix(prefix): content
            for path, content in self.files.items()
            if path.startswith(prefix)
        }

    def _describe(self, path: str) -> None:
        repo, _, revision = path.partition("/revision/")
        files = self._dataset(repo, revision or "main")
        if not files:
            known = any(name.startswith(f"datasets/{repo}@") for name in self.files)
            return self._refuse(404, "RevisionNotFound" if known else "RepoNotFound")
        self._json(
            {
                "id": repo,
                "sha": CONVERTED_COMMIT if revision in PARQUET_REVISIONS else COMMIT,
                "private": False,
                "downloads": 0,
                "likes": 0,
                "tags": [],
                "cardData": self.cards.get(repo, {}),
                "siblings": [
                    {"rfilename": name, "size": len(content)} for name, content in files.items()
                ],
            }
        )

    def _json(self, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _answer(self, *, body: bool) -> None:
        model, _, name = unquote(self.path).strip("/").partition("/resolve/")
        revision, _, file = name.partition("/")
        if model.startswith("datasets/"):
            content = self._dataset(model.removeprefix("datasets/"), revision).get(file)
        else:
            content = self.files.get(f"{model}/{file}")
        known = any(path.startswith(f"{model}/") for path in self.files)
        if model == self.gated:
            return self._refuse(403, "GatedRepo")
        if content is None:
            return self._refuse(404, "EntryNotFound" if known else "RepoNotFound")
        wanted = self.headers.get("Range", "") if body else ""
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            content = content[int(first) : int(last) + 1 if last else None]
        self.send_response(206 if wanted else 200)
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
def serve_hub(files: dict[str, bytes], cards: dict[str, Any] | None = None) -> Iterator[str]:
    """The address of a hub with these files."""
    handler = type("Handler", (_Handler,), {"files": files, "cards": cards or {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
