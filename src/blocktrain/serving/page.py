"""The page to write with, and its files."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from blocktrain.serving.openai_messages import ApiError
from blocktrain.web.pages import page_file

FOLDER = Path(__file__).parents[1] / "web" / "writer"


async def page(request: Request, _: Send) -> Response:
    """GET / and GET /page/{name}."""
    found = await page_file(FOLDER, request)
    if found is None:
        raise ApiError(404, "the page has no such file", "not_found")
    return found
