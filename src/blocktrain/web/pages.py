"""The files of a page over HTTP: its own folder, and the files that all pages share.

The headers keep a page from loading anything from elsewhere.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

COMMON = Path(__file__).parent / "common"
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_FILE = re.compile(r"[a-z]{1,20}\.(html|js|css|svg)\Z")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # revalidate: a new version of BlockTrain has a new page
}


async def page_file(folder: Path, request: Request) -> Response | None:
    """GET / and GET /page/{name}; None if there is no such file."""
    name = request.path_params.get("name", "index.html")
    if (match := _FILE.match(name)) is None or (
        content := await run_in_threadpool(_read, folder, name)
    ) is None:
        return None
    headers = {**HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(
        content, headers={**headers, "Content-Type": f"{TYPES[match[1]]}; charset=utf-8"}
    )


def _read(folder: Path, name: str) -> bytes | None:
    for path in (folder / name, COMMON / name):
        try:
            return path.read_bytes()
        except OSError:
            continue
    return None
