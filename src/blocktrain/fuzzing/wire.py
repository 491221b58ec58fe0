"""Parsers of what others send: messages, ledger, payloads, frames, HTTP, requests for text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

import numpy as np
from backports import zstd
from pydantic import BaseModel
from starlette.requests import Request

from blocktrain.audit.evidence import RunRecord, require_protocol
from blocktrain.config import make_config
from blocktrain.errors import RunError
from blocktrain.fuzzing.samples import sample_messages
from blocktrain.fuzzing.target import BrokenPromise, FuzzTarget
from blocktrain.learning.tokenizer import ByteTokenizer
from blocktrain.protocol import compression, frames, handshake, tensors
from blocktrain.protocol import messages as m
from blocktrain.protocol.calls import CALLS, JSON
from blocktrain.protocol.identity import canonical_json, verify
from blocktrain.protocol.ledger import (
    BEGINNING,
    BODIES,
    EntryKind,
    LedgerEntry,
    LedgerPage,
    RunBody,
    VersionBody,
    entry_hash,
    read_body,
    require_chain,
)
from blocktrain.protocol.refusals import Refused
from blocktrain.serving import openai_messages as texts
from blocktrain.serving.chat_template import DEFAULT, ChatTemplate, default_template
from blocktrain.serving.line.address import parse_address
from blocktrain.serving.openai_api import MAX_BODY, encode_prompts
from blocktrain.serving.openai_chat import ChatCompletion, chat_job, read_chat
from blocktrain.serving.tokenizer_messages import DetokenizeIds, TokenizeText, detokenize, tokenize
from blocktrain.watch.stream import parse_request
from blocktrain.web.door import Door
from blocktrain.web.guard import body_length, keys_of, require_type

KEY, HASH, MODEL = b"k" * 16, "b" * 64, "none"
SCHEMA = {"a": tensors.Spec((3, 5)), "b": tensors.Spec((130,))}
MOST_FRAME = 1 << 16
MOST_SENTENCE = 1000


def read_message(kind: type[m.Message], limit: int, content: bytes) -> None:
    """A message, and all that is done with it before anything is decided."""
    message = m.read(kind, content, limit)
    if isinstance(message, m.Submission):
        message.plan(1 << 20)
    if isinstance(message, m.JoinReply | m.Manifest):
        make_config(dict(message.config))
    if isinstance(message, m.StageNotice):
        handshake.is_proven(KEY, message)
    if isinstance(message, LedgerPage):
        for entry in message.entries:
            read_entry(entry)
        require_chain(message.entries)
    if isinstance(message, m.Signed):
        with suppress(Refused):  # the signature is none; what is signed is written all the same
            verify(message, getattr(message, "public_key", HASH))


def read_entry(entry: LedgerEntry) -> None:
    """The body of a ledger's entry, as an audit reads it."""
    with suppress(RunError):  # of another protocol
        require_protocol(RunRecord((entry,)))
    body = read_body(BODIES[entry.kind], entry)
    if isinstance(body, VersionBody):
        _ = body.step
    if isinstance(body, RunBody):
        _ = body.version_compression


def read_ledger_body(kind: EntryKind, content: bytes) -> None:
    """In the one way in which bodies are written, so that values are looked at, too."""
    try:
        text = canonical_json(json.loads(content))
    except (ValueError, RecursionError):
        text = content.decode("utf-8", "replace")
    digest = entry_hash(1, kind, text, BEGINNING)
    page = {"seq": 1, "kind": kind, "body": text, "previous": BEGINNING, "hash": digest}
    read_entry(m.read(LedgerEntry, json.dumps(page).encode(), m.MAX_REPLY))


def read_payload(content: bytes) -> None:
    """An update. What is let in is finite and has the shapes of the block."""
    compression.check_update(content, SCHEMA)
    update = compression.open_update(content, SCHEMA)
    for name, spec in SCHEMA.items():
        if update.tensors[name].shape != spec.shape or not np.isfinite(update.tensors[name]).all():
            raise BrokenPromise(f"tensor {name} is not finite, or has another shape")


def payload_seeds() -> list[bytes]:
    """One of every method."""
    draw = np.random.default_rng(0)
    delta = {
        name: draw.standard_normal(spec.shape).astype(np.float32) for name, spec in SCHEMA.items()
    }
    made = [compression.compress(delta, None, method)[0] for method in compression.METHODS]
    return [*made, compression.compress_weights(delta)]


def read_packed(content: bytes) -> None:
    """The same behind a good zstd frame, which a changed byte would break."""
    read_payload(zstd.compress(content))


def read_frames(content: bytes) -> None:
    """A stream that arrives in two parts, and the handshake in it."""
    decoder = frames.Decoder(lambda *_: MOST_FRAME)
    half = len(content) // 2
    for part in (content[:half], content[half:]):
        for frame in decoder.feed(part):
            greet(frame.header)


def greet(header: frames.Header) -> None:
    if isinstance(header, frames.Hello):
        handshake.check_hello(KEY, bytes(32), header, HASH, 1)
    if isinstance(header, frames.Welcome):
        handshake.check_welcome(KEY, bytes(32), bytes(32), header, HASH, HASH)
    if isinstance(header, frames.Open) and header.next:
        parse_address(header.next)


def frame_seeds() -> list[bytes]:
    """One of every kind, with honest proofs, alone and after each other."""
    nonce = bytes(32)
    bare = frames.Welcome(nonce, "blocks", (2, 3), 128, 128, 64, HASH, HASH)
    headers: tuple[frames.Header, ...] = (
        frames.Challenge(nonce),
        handshake.make_hello(KEY, nonce, nonce, "entry", HASH, 1),
        handshake.prove_welcome(KEY, nonce, nonce, bare),
        frames.Open("ring", "fp16", 64, 128, "127.0.0.1:8481", (2,)),
        frames.Opened((2, 3), 128),
        frames.Run(3, 40, 5, 1, 0),
        frames.Result(3, 44, 1, 2, 1500),
        frames.Close(),
        frames.Ping(7),
        frames.Pong(7, 1),
        frames.Error("too_large", "no"),
    )
    carry = frames.Run | frames.Result
    made = [
        b"".join(frames.encode(header, 3, 1, [b"abcdef"] if isinstance(header, carry) else []))
        for header in headers
    ]
    return [*made, b"".join(made)]


def read_head(content: bytes) -> None:
    """The head of an HTTP request, as the door and the guard of every server look at it."""
    first, *lines = content.split(b"\r\n")
    pairs = [(name.strip().lower(), value.strip()) for name, _, value in map(_field, lines)]
    _, _, query = first.partition(b"?")
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": query}
    request = Request({**scope, "headers": pairs, "client": ("127.0.0.1", 1)})
    Door(frozenset({"run.example.org"})).check(request)
    keys = keys_of("a key of a client")
    keys.allow(request.headers.get("authorization", ""))
    keys.client_of(request)
    parse_request(request)
    body_length(request, MAX_BODY)
    require_type(request, JSON)


def _field(line: bytes) -> tuple[bytes, bytes, bytes]:
    return line.partition(b":")


HEAD = b"\r\n".join(
    (
        b"/v1/events?after=3&follow=0",
        b"Host: [::1]:8480",
        b"Origin: http://[::1]:8480",
        b"Authorization: Bearer a key of a client",
        b"Content-Type: application/json; charset=utf-8",
        b"Content-Length: 12",
        b"Last-Event-ID: 7",
    )
)


def request_for_text(read: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """What is wrong with a request is named in a short sentence, and is not the server's fault."""

    def feed(content: bytes) -> object:
        try:
            return read(content)
        except texts.ApiError as error:
            if error.status >= 500 or len(str(error)) > MOST_SENTENCE:
                raise BrokenPromise(f"status {error.status}, {len(str(error))} letters") from None
            raise

    return feed


def read_completion(content: bytes) -> None:
    job = texts.completion_job(texts.read_completion(content), MODEL, texts.Defaults())
    encode_prompts(job, ByteTokenizer())


def chat(content: bytes) -> None:
    job = chat_job(read_chat(content), default_template(), "", MODEL, texts.Defaults())
    encode_prompts(job, ByteTokenizer())


def ids_of_text(content: bytes) -> None:
    tokenize(content, ByteTokenizer(), 64)


def text_of_ids(content: bytes) -> None:
    detokenize(content, ByteTokenizer())


def render(content: bytes) -> None:
    """A template that comes with a model, with a chat in it."""
    template = ChatTemplate(content.decode("utf-8", "replace"))
    template.render([{"role": "user", "content": "hello"}, {"role": "assistant", "content": ""}])


TEMPLATES = (
    b"{% for m in messages %}{{ m.role + ': ' + m['content'] | trim ~ '\n' * 2 }}{% endfor %}",
    b"{% set ns = namespace(n=0) %}{% for m in messages if m.content %}{% set ns.n = ns.n + 2 ** 3 "
    b"%}{% endfor %}{{ '%05d' % ns.n }}{{ bos_token.join(['a', 'b']) }}{% set stop = ['x'] %}",
    b"{% macro f(x, n=2) %}{{ x[-n:] | upper | replace('A', 'b') }}{% endmacro %}{{ f('abc' * 3) }}"
    b"{% if messages | length > 9 %}{{ raise_exception('no') }}{% endif %}{{ strftime_now('%Y') }}",
)


PROMPTS = b'{"model": "none", "prompt": [[1, 2], [3]], "stop": ["a", "b"], "n": 2, "echo": true}'
PARTS = b"""{"model": "none", "messages": [{"role": "user", "content": [{"type": "text", "text":
"a"}]}], "stop": "b", "max_completion_tokens": 3, "logprobs": true, "top_logprobs": 2}"""


def _of(kind: type[BaseModel], *more: bytes) -> Callable[[], Iterable[bytes]]:
    return lambda: [*sample_messages(kind), *more]


def _messages() -> Iterable[FuzzTarget]:
    """Requests and answers of every call, and the body of every entry of a ledger."""
    for call in CALLS:
        kinds = (("call", call.request, m.MAX_JSON), ("answer", call.reply, m.MAX_REPLY))
        for side, kind, limit in kinds:
            if kind is not None:
                read = partial(read_message, kind, limit)
                yield FuzzTarget(f"{side}-{call.name.replace('_', '-')}", read, _of(kind))
    read = partial(read_message, m.Refusal, m.MAX_JSON)
    yield FuzzTarget("answer-refusal", read, _of(m.Refusal))
    for entry, body in BODIES.items():
        yield FuzzTarget(f"ledger-{entry}", partial(read_ledger_body, entry), _of(body))


WIRE: tuple[FuzzTarget, ...] = (
    *_messages(),
    FuzzTarget("payload", read_payload, payload_seeds),
    FuzzTarget("payload-tensors", read_packed, lambda: map(zstd.decompress, payload_seeds())),
    FuzzTarget(
        "tensors", tensors.unpack, lambda: [tensors.pack({"a": np.ones((2, 3), "<f4")}, "a note")]
    ),
    FuzzTarget("frames", read_frames, frame_seeds),
    FuzzTarget("http-head", read_head, lambda: [HEAD]),
    FuzzTarget("completions", request_for_text(read_completion), _of(texts.Completion, PROMPTS)),
    FuzzTarget("chat-completions", request_for_text(chat), _of(ChatCompletion, PARTS)),
    FuzzTarget("tokenize", request_for_text(ids_of_text), _of(TokenizeText)),
    FuzzTarget("detokenize", request_for_text(text_of_ids), _of(DetokenizeIds)),
    FuzzTarget("chat-template", render, lambda: [DEFAULT.read_bytes(), *TEMPLATES]),
)
