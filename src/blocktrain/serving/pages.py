"""The page and its files over HTTP. Nothing of it comes from elsewhere, and it can load nothing from elsewhere."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from blocktrain.serving.openai_messages import ApiError

FOLDER = Path(__file__).parent / "page"
TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
_FILE = re.compile(r"[a-z]{1,20}\.(html|js|css|svg)\Z")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # kept, but asked for again: a new version of BlockTrain brings a new page
}


async def page(request: Request, _: Send) -> Response:
    """GET / and GET /page/{name}."""
    name = request.path_params.get("name", "index.html")
    found = _FILE.match(name)
    try:
        content = await run_in_threadpool((FOLDER / name).read_bytes) if found else None
    except OSError:
        content = None
    if found is None or content is None:
        raise ApiError(404, "the page has no such file", "not_found")
    headers = {**HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"', "Content-Type": TYPES[found[1]]}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers)
