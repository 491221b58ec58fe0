"""A stand-in for the Hugging Face hub that takes uploads: the calls that its client makes."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_right"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
Reply = tuple[int, Any]


@dataclass
class Hub:
    """What the hub holds, and what was sent to it."""

    url: str = ""
    private: dict[str, bool] = field(default_factory=dict)  # by repository
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)  # by sha256
    uploads: list[str] = field(default_factory=list)
    commits: int = 0
    broken: bool = False  # refuse every commit

    @property
    def environment(self) -> dict[str, str]:
        """What leads the client to it."""
        client = {"HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN}
        return {**client, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}

    def call(self, method: str, path: str, body: bytes) -> Reply:
        for verb, pattern, answer in self._calls():
            match = re.fullmatch(pattern, path)
            if verb == method and match:
                return answer(self, *match.groups(), body)
        return 404, {"error": f"no {method} {path}"}

    @staticmethod
    def _calls() -> tuple[tuple[str, str, Callable[..., Reply]], ...]:
        model = r"/api/models/([^/]+/[^/]+)"
        return (
            ("GET", "/api/whoami-v2", Hub.whoami),
            ("POST", "/api/repos/create", Hub.create),
            ("POST", "/api/validate-yaml", Hub.validate),
            ("GET", model, Hub.info),
            ("GET", model + "/tree/main", Hub.tree),
            ("POST", model + "/preupload/main", Hub.preupload),
            ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", Hub.batch),
            ("PUT", "/lfs/([0-9a-f]{64})", Hub.put),
            ("POST", model + "/commit/main", Hub.commit),
        )

    def whoami(self, _: bytes) -> Reply:
        return 200, {"name": "ada", "type": "user", "orgs": []}

    def create(self, body: bytes) -> Reply:
        wanted = json.loads(body)
        owner = wanted.get("organization") or "ada"
        if owner != "ada":
            return 403, {"error": "You don't have the rights to create a model under this name"}
        name = f"{owner}/{wanted['name']}"
        known = name in self.private
        private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        self.private.setdefault(name, private)
        self.files.setdefault(name, {})
        return (409 if known else 200), {"url": f"{self.url}/{name}", "id": name}

    def validate(self, body: bytes) -> Reply:
        assert json.loads(body)["content"].startswith("---\n")
        return 200, {"errors": [], "warnings": []}

    def info(self, name: str, _: bytes) -> Reply:
        if name not in self.private:
            return 404, {"error": "Repository not found"}
        siblings = [{"rfilename": path} for path in self.files[name]]
        about = {"id": name, "private": self.private[name], "sha": COMMIT}
        return 200, {**about, "siblings": siblings, "tags": []}

    def tree(self, name: str, _: bytes) -> Reply:
        return 200, [
            {"type": "file", "path": path, "size": len(content), "oid": "0" * 40}
            for path, content in self.files[name].items()
        ]

    def preupload(self, name: str, body: bytes) -> Reply:
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(body)["files"]
        ]
        return 200, {"files": modes}

    def batch(self, name: str, body: bytes) -> Reply:
        objects = []
        for wanted in json.loads(body)["objects"]:
            upload = {"upload": {"href": f"{self.url}/lfs/{wanted['oid']}"}}
            objects.append(
                {**wanted, **({} if wanted["oid"] in self.large else {"actions": upload})}
            )
        return 200, {"transfer": "basic", "objects": objects}

    def put(self, oid: str, body: bytes) -> Reply:
        assert hashlib.sha256(body).hexdigest() == oid
        self.large[oid] = body
        self.uploads.append(oid)
        return 200, {}

    def commit(self, name: str, body: bytes) -> Reply:
        if self.broken:
            return 503, {"error": "the hub is being repaired"}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            match line["key"]:
                case "file":
                    self.files[name][value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    self.files[name][value["path"]] = self.large[value["oid"]]
                case "deletedFile":
                    del self.files[name][value["path"]]
        self.commits += 1
        url = f"{self.url}/{name}/commit/{COMMIT}"
        return 200, {"success": True, "commitOid": COMMIT, "commitUrl": url}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        body = self._body()
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        path = self.path.partition("?")[0]
        if token != TOKEN and not path.startswith("/lfs/"):
            status, reply = 401, {"error": "Invalid username or password."}
        else:
            status, reply = self.hub.call(self.command, path, body)
        content = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = _answer

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def serve_uploads() -> Iterator[Hub]:
    """A hub that knows the user ada and her token."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
