"""OpenAI's API for completions and chats in front of an entry, with status, metrics, health and
the page.

web/guard.py checks keys, lengths and deadlines; here every field is checked before any work. When a
client disconnects, its text is no longer written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Send

from blocktrain.errors import BlockTrainError, ConfigError
from blocktrain.learning.generate import Tokens
from blocktrain.learning.tokenizer import Tokenizer
from blocktrain.protocol.calls import JSON, OPENAPI
from blocktrain.protocol.refusals import RULES, Code, Refused
from blocktrain.serving import openai_messages as m
from blocktrain.serving.blocks import name_blocks
from blocktrain.serving.chat_template import ChatTemplate, default_template
from blocktrain.serving.entry.answer import Piece
from blocktrain.serving.entry.answer import Request as TextRequest
from blocktrain.serving.entry.entry import Entry
from blocktrain.serving.metrics import ServingMetrics
from blocktrain.serving.openai_chat import chat_job, read_chat
from blocktrain.serving.openai_messages import ApiError, TextChoice, TextJob
from blocktrain.serving.openapi import describe_serving
from blocktrain.serving.request_queue import RequestQueue, Slot
from blocktrain.serving.tokenizer_messages import (
    detokenize,
    end_text,
    require_ids,
    tokenize,
    tokenizer_info,
)
from blocktrain.web import sse
from blocktrain.web.door import Door
from blocktrain.web.guard import Access, Front, Keys
from blocktrain.web.pages import page_file
from blocktrain.web.sse import ALIVE, MEDIA_TYPE, STREAM_HEADERS

MAX_BODY = 1 << 20
MAX_TEXT = 8 << 20  # a body of /tokenize or /detokenize
AHEAD = 16  # pieces that are written before a slow reader has them
PAGE = Path(__file__).parents[1] / "web" / "writer"
_UNREAD = (401, 403, 408, 411, 413, 415, 421, 429)  # the connection cannot be used again
_REFUSALS = {  # what the guard refuses, as OpenAI's clients know it
    Code.WRONG_ENCODING: (415, "wrong_encoding", "send the body without Content-Encoding"),
    Code.LENGTH_REQUIRED: (411, "length_required", "send a Content-Length"),
    Code.WRONG_HOST: (421, "wrong_host", RULES[Code.WRONG_HOST].sentence),
    Code.WRONG_ORIGIN: (403, "wrong_origin", RULES[Code.WRONG_ORIGIN].sentence),
    Code.WRONG_TYPE: (
        415,
        "wrong_type",
        "{detail}: send the body as Content-Type: application/json",
    ),
    Code.MALFORMED: (411, "length_required", "send a Content-Length"),
    Code.TOO_LARGE: (413, "too_large", "{detail}: send less"),
    Code.TOO_SLOW: (408, "too_slow", "{detail}: send faster"),
    Code.BUSY: (429, "busy", "too many requests are being received: try again"),
    Code.TOO_MANY_REQUESTS: (429, "busy", "too many requests are being received: try again"),
}


@dataclass(frozen=True)
class ServingRules:
    """The model of a server, its keys and its limits."""

    model: str
    keys: Keys = field(default_factory=Keys)
    defaults: m.Defaults = field(default_factory=m.Defaults)
    template: ChatTemplate = field(default_factory=default_template)
    max_requests: int = 8
    queue: int = 32
    door: Door = field(default_factory=Door)


class ServingFront(Front):
    """API keys, and errors as OpenAI's clients know them."""

    def __init__(self, rules: ServingRules, metrics: ServingMetrics) -> None:
        super().__init__(whole=False)
        self._rules, self._metrics = rules, metrics

    def check(self, request: Request, access: Access) -> None:
        authorization = request.headers.get("authorization", "")
        if access == "anyone" or self._rules.keys.allow(authorization):
            return
        if not authorization.partition(" ")[2].strip():
            raise ApiError(
                401,
                "this server wants an API key: send it as `Authorization: Bearer KEY`",
                "missing_api_key",
            )
        raise ApiError(
            401,
            "this is not an API key of this server: ask its operator for one",
            "invalid_api_key",
        )

    def refuse(self, error: BlockTrainError, request: Request) -> Response:
        return error_response(as_api_error(error))

    def count(self, method: str, path: str, status: int, seconds: float) -> None:
        self._metrics.count_answer(path, status, seconds)


def build_app(entry: Entry, rules: ServingRules) -> Starlette:
    """The HTTP API of an entry that was started."""
    api = OpenAIApi(entry, rules)
    route = api.front.route
    routes = [
        route("POST", "/v1/completions", api.completions),
        route("POST", "/v1/chat/completions", api.chat_completions),
        route("POST", "/tokenize", api.tokenize),
        route("POST", "/detokenize", api.detokenize),
        route("GET", "/tokenizer_info", api.tokenizer_info),
        route("GET", "/v1/models", api.models),
        route("GET", "/v1/models/{model:path}", api.one_model),
        route("GET", "/v1/status", api.status),
        route("GET", "/metrics", api.read_metrics),
        route("GET", "/healthz", api.health, "anyone"),
        route("GET", "/readyz", api.ready, "anyone"),
        route("GET", "/", page, "anyone"),
        route("GET", "/page/{name}", page, "anyone"),
        route("GET", OPENAPI.path, api.openapi, "anyone"),
    ]
    return Starlette(
        routes=routes,
        middleware=api.front.behind(rules.door),
        exception_handlers={HTTPException: _unknown, Exception: _internal},
    )


async def page(request: Request, _: Send) -> Response:
    """GET / and GET /page/{name}."""
    response = await page_file(PAGE, request)
    if response is None:
        raise ApiError(404, "the page has no such file", "not_found")
    return response


class OpenAIApi:
    """The handlers of an entry's routes."""

    def __init__(self, entry: Entry, rules: ServingRules) -> None:
        self.entry, self.rules = entry, rules
        self.began = time.time()
        self.slots = RequestQueue(rules.max_requests, rules.queue)
        self.metrics = ServingMetrics(entry.status, self.slots)
        self.front = ServingFront(rules, self.metrics)

    async def health(self, _: Request, __: Send) -> Response:
        """GET /healthz: whether it can answer now, and the blocks without a holder. No key."""
        able, missing = self._able()
        return JSONResponse(
            {"ok": able, "model": self.rules.model, "missing_blocks": missing}, 200 if able else 503
        )

    async def ready(self, _: Request, __: Send) -> Response:
        """GET /readyz: ready, degraded (200) or unavailable (503), and by which blocks."""
        able, missing = self._able()
        state = "ready" if not missing else "degraded" if able else "unavailable"
        sentence = f"{state}: {name_blocks(missing)}" if missing else state
        body = {"state": state, "status": sentence, "missing_blocks": missing}
        return JSONResponse(body, 200 if able else 503)

    def _able(self) -> tuple[bool, list[int]]:
        """Whether an answer can be written now, and the blocks without a holder."""
        missing = self.entry.missing_blocks()
        return not missing or (self.entry.fan and self.rules.defaults.allow_degraded), missing

    async def models(self, _: Request, __: Send) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def one_model(self, request: Request, _: Send) -> Response:
        """GET /v1/models/{model}."""
        name = request.path_params["model"]
        if name != self.rules.model:
            raise ApiError(
                404,
                f"there is no model {name[:256]!r} here, only {self.rules.model!r}",
                "model_not_found",
                param="model",
            )
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.rules.model,
            "object": "model",
            "created": int(self.began),
            "owned_by": "blocktrain",
            "context_length": self.entry.config.context,
        }

    async def status(self, _: Request, __: Send) -> Response:
        """GET /v1/status: the entry, its hosts, and who is being answered."""
        slots = self.slots
        requests = {
            "running": slots.running,
            "waiting": slots.waiting,
            "most": slots.most,
            "queue": slots.queue,
        }
        limits = {
            "max_tokens": m.MAX_TOKENS,
            "n": m.MAX_CHOICES,
            "choices": m.MAX_ANSWERS,
            "logprobs": m.MAX_LOGPROBS,
            "echo_logprobs": m.MAX_SCORED,
            "sweeps": m.MAX_SWEEPS,
            "body_bytes": MAX_BODY,
        }
        mine = {
            "id": self.rules.model,
            "requests": requests,
            "defaults": asdict(self.rules.defaults),
            "limits": limits,
        }
        return JSONResponse(
            {**self.entry.status(), **mine, "up_seconds": round(time.time() - self.began, 3)}
        )

    async def read_metrics(self, _: Request, __: Send) -> Response:
        """GET /metrics."""
        return Response(self.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def openapi(self, _: Request, __: Send) -> Response:
        """GET /openapi.json. No key."""
        content = await asyncio.to_thread(describe_serving, self.rules.model)
        return Response(content, media_type=JSON)

    async def completions(self, request: Request, send: Send) -> Response | None:
        """POST /v1/completions."""
        fields = m.read_completion(await self._json(request))
        job = m.completion_job(fields, self.rules.model, self.rules.defaults)
        return await self._answer(request, job, send)

    async def chat_completions(self, request: Request, send: Send) -> Response | None:
        """POST /v1/chat/completions."""
        fields, rules = read_chat(await self._json(request)), self.rules
        end = end_text(self.entry.tokenizer)
        job = await asyncio.to_thread(
            chat_job, fields, rules.template, end, rules.model, rules.defaults
        )
        return await self._answer(request, job, send)

    async def tokenize(self, request: Request, _: Send) -> Response:
        """POST /tokenize."""
        content, entry = await self._json(request, MAX_TEXT), self.entry
        body = await asyncio.to_thread(tokenize, content, entry.tokenizer, entry.config.context)
        return JSONResponse(body)

    async def detokenize(self, request: Request, _: Send) -> Response:
        """POST /detokenize."""
        content = await self._json(request, MAX_TEXT)
        return JSONResponse(await asyncio.to_thread(detokenize, content, self.entry.tokenizer))

    async def tokenizer_info(self, _: Request, __: Send) -> Response:
        """GET /tokenizer_info."""
        entry, template = self.entry, self.rules.template
        return JSONResponse(tokenizer_info(entry.tokenizer, entry.config.context, template.source))

    async def _json(self, request: Request, most: int = MAX_BODY) -> bytes:
        return await self.front.read_body(request, most)

    async def _answer(self, request: Request, job: TextJob, send: Send) -> Response | None:
        job = await asyncio.to_thread(encode_prompts, job, self.entry.tokenizer)
        client = self.rules.keys.client_of(request)
        return await _while_connected(
            request.receive, self._write(job, client, send), self.metrics.count_disconnect
        )

    def _choices(self, job: TextJob) -> list[TextChoice]:
        tokenizer = self.entry.tokenizer
        return [
            TextChoice(
                index,
                tokenizer.token,
                echo=prompt_bytes(request, tokenizer) if job.echo else b"",
                scored=request.logprobs is not None,
            )
            for index, request in enumerate(job.requests)
        ]

    async def _write(self, job: TextJob, client: str, send: Send) -> Response | None:
        """All choices of a job, in one piece or as a stream."""
        async with (
            self.slots.slot(client) as slot,
            aclosing(_in_turns(_pieces(self.entry, job), slot)) as pieces,
        ):
            choices = self._choices(job)
            try:
                first = await anext(
                    pieces
                )  # what cannot be begun is refused with a status, also in a stream
                if job.stream:
                    await self._stream(job, choices, first, pieces, send)
                    return None
                _take(choices, first)
                async for piece in pieces:
                    _take(choices, piece)
                missing = {block for one in choices if one.stats for block in one.stats.degraded}
                # In a thread: the log-probabilities of a long prompt are many.
                body = await asyncio.to_thread(m.response_body, job, choices)
                headers = degraded_header(missing)
                return Response(body, headers=headers, media_type="application/json")
            finally:
                for choice in choices:
                    self.metrics.count_choice(choice)

    async def _stream(
        self,
        job: TextJob,
        choices: list[TextChoice],
        first: _IndexedPiece,
        pieces: AsyncGenerator[_IndexedPiece],
        send: Send,
    ) -> None:
        # A block may be lost later, in the stream: its chunks say so too.
        missing = {*self.entry.missing_blocks(), *(first[1].stats.degraded if first else ())}
        stream_headers = STREAM_HEADERS | degraded_header(missing)
        start = Response(headers=stream_headers, media_type=MEDIA_TYPE)
        headers = [pair for pair in start.raw_headers if pair[0] != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def say(content: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": content, "more_body": more})

        try:
            await say(_chunk(job, choices, first))
            async for piece in pieces:
                await say(_chunk(job, choices, piece))
        except BlockTrainError as error:
            api_error = as_api_error(error)
            self.metrics.count_failure(api_error.code)
            await say(m.event(api_error.body), more=False)
            return
        tail = m.last_chunk(job, choices) if job.usage else b""
        await say(tail + m.DONE, more=False)


def degraded_header(missing: Iterable[int]) -> dict[str, str]:
    """A header that names the blocks that were missing, if any."""
    blocks = sorted(missing)
    return {"X-BlockTrain-Degraded": name_blocks(blocks)} if blocks else {}


_IndexedPiece = tuple[int, Piece] | None  # (choice, piece); None: send a keep-alive


def _take(choices: list[TextChoice], item: _IndexedPiece) -> None:
    if item is not None:
        choices[item[0]].take(item[1])


def _chunk(job: TextJob, choices: list[TextChoice], item: _IndexedPiece) -> bytes:
    """A piece as it is sent; empty while a character is incomplete and no scores came with it."""
    if item is None:
        return ALIVE
    choice = choices[item[0]]
    fragment = choice.take(item[1])
    has_news = fragment.text or fragment.scores or choice.finish
    return m.chunk(job, choice, fragment) if has_news else b""


def encode_prompts(job: TextJob, tokenizer: Tokenizer) -> TextJob:
    """The job with ids for prompts; ids that the model does not have are refused."""
    encoded: dict[bytes | Tokens, Tokens] = {}
    for prompt in {request.prompt for request in job.requests}:
        ids = tuple(tokenizer.encode(prompt).tolist()) if isinstance(prompt, bytes) else prompt
        require_ids(ids, tokenizer, "prompt")
        encoded[prompt] = ids
    requests = [replace(request, prompt=encoded[request.prompt]) for request in job.requests]
    scored = sum(
        len(request.prompt) * (1 + request.logprobs)
        for request in requests
        if request.score_prompt and request.logprobs is not None
    )
    if scored > m.MAX_SCORED:
        raise ApiError(
            400,
            f"prompt has {scored} log-probabilities to tell, of its tokens and of the likeliest "
            f"ones, but at most {m.MAX_SCORED} fit a request: send several",
            "invalid_value",
            param="prompt",
        )
    return replace(job, requests=tuple(requests))


def prompt_bytes(request: TextRequest, tokenizer: Tokenizer) -> bytes:
    """The prompt as the model reads it."""
    prompt = request.prompt
    return prompt if isinstance(prompt, bytes) else tokenizer.decode(prompt)


async def _pieces(entry: Entry, job: TextJob) -> AsyncGenerator[_IndexedPiece]:
    """The pieces of all choices as they come.

    Closing it closes all choices, and an error of one ends all.
    """
    arrivals: asyncio.Queue[tuple[int, Piece] | BaseException | None] = asyncio.Queue(AHEAD)
    at_work, loop = asyncio.Semaphore(m.MAX_CHOICES), asyncio.get_running_loop()
    began = loop.time()

    async def pump(index: int) -> None:
        try:
            async with at_work, aclosing(entry.generate(request_now(index))) as pieces:
                async for piece in pieces:
                    await arrivals.put(
                        (index, replace(piece, stats=replace(piece.stats)))
                    )  # as it is now, not when it is sent
            await arrivals.put(None)
        except Exception as error:
            await arrivals.put(error)

    def request_now(index: int) -> TextRequest:
        """The request, whose deadline counts from the beginning of the job."""
        request = job.requests[index]
        return replace(request, deadline=max(0.0, request.deadline - (loop.time() - began)))

    pumps = [asyncio.create_task(pump(index)) for index in range(len(job.requests))]
    open_ = len(pumps)
    try:
        while open_:
            try:
                async with asyncio.timeout(sse.ALIVE_SECONDS):
                    item = await arrivals.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(item, BaseException):
                raise item
            if item is None:
                open_ -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)  # sessions are free when this returns


async def _in_turns(
    pieces: AsyncGenerator[_IndexedPiece], slot: Slot
) -> AsyncGenerator[_IndexedPiece]:
    """The pieces, with pauses in which another client's answer is written."""
    async with aclosing(pieces):
        async for piece in pieces:
            yield piece
            async with aclosing(slot.take_turns()) as turns:
                async for _ in turns:
                    yield None


async def _while_connected(
    receive: Receive, work: Coroutine[Any, Any, Response | None], on_disconnect: Callable[[], None]
) -> Response | None:
    """The result of the work; it is cancelled when the client disconnects."""

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    answer, disconnect = asyncio.create_task(work), asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait((answer, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            on_disconnect()
            raise ClientDisconnect
        return answer.result()
    finally:
        for task in (answer, disconnect):
            task.cancel()
        await asyncio.gather(answer, disconnect, return_exceptions=True)


def as_api_error(error: BlockTrainError) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Refused):
        status, code, sentence = _REFUSALS[error.code]
        retry = 1 if code == "busy" else None
        return ApiError(status, sentence.format(detail=error.detail), code, retry_after=retry)
    if isinstance(error, ConfigError):  # this model cannot do what the request asks for
        return ApiError(400, str(error), "impossible")
    return ApiError(503, str(error), "unavailable", retry_after=1)


def error_response(error: ApiError) -> Response:
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after is not None else {}
    if error.status in _UNREAD:  # some of the body may be: the connection cannot be used again
        headers["Connection"] = "close"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.body, error.status, headers)


async def _unknown(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    sentence = f"there is no {request.method} {request.url.path[:80]} here"
    response = error_response(ApiError(status, sentence, "not_found"))
    response.headers.update(
        (error.headers if isinstance(error, HTTPException) else None) or {}
    )  # Allow
    return response


async def _internal(_: Request, __: Exception) -> Response:
    return error_response(ApiError(500, "internal error; see the server's log", "internal"))
