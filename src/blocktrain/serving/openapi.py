"""The HTTP API of `serve` as OpenAPI 3.1. Requests are those that it reads."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from blocktrain.protocol.calls import OPENAPI
from blocktrain.serving.openai_chat import HARMLESS as HARMLESS_CHAT
from blocktrain.serving.openai_chat import ChatCompletion
from blocktrain.serving.openai_messages import HARMLESS, Completion, Harmless
from blocktrain.serving.tokenizer_messages import DetokenizeIds, TokenizeText
from blocktrain.web.openapi import Operation, describe, parameter
from blocktrain.web.sse import MEDIA_TYPE


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TokenUsage(_Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_bytes_cut: int


class _Written(_Answer):
    id: str
    created: int
    model: str
    usage: TokenUsage
    blocktrain: dict[str, Any]


class _Choice(_Answer):
    index: int
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class CompletedText(_Choice):
    text: str


class CompletionAnswer(_Written):
    object: Literal["text_completion"]
    choices: list[CompletedText]


class AssistantMessage(_Answer):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Choice):
    message: AssistantMessage


class ChatAnswer(_Written):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TokenizedText(_Answer):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizedIds(_Answer):
    prompt: str


class TokenizerFacts(_Answer):
    tokenizer_class: str
    vocab_size: int
    bos_token: str
    eos_token: str | None
    model_max_length: int
    chat_template: str


class ModelFacts(_Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_length: int


class ServedModels(_Answer):
    object: Literal["list"]
    data: list[ModelFacts]


class ErrorFacts(_Answer):
    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(_Answer):
    error: ErrorFacts


_MODEL = parameter("model", "path", {"type": "string", "minLength": 1}, required=True)
_STATES = (200, 503)
OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "completions",
        "POST",
        "/v1/completions",
        "Texts that continue prompts.",
        CompletionAnswer,
        Completion,
        also=MEDIA_TYPE,
    ),
    Operation(
        "chat_completions",
        "POST",
        "/v1/chat/completions",
        "Answers to a chat.",
        ChatAnswer,
        ChatCompletion,
        also=MEDIA_TYPE,
    ),
    Operation("tokenize", "POST", "/tokenize", "The ids of a text.", TokenizedText, TokenizeText),
    Operation(
        "detokenize", "POST", "/detokenize", "The text of ids.", DetokenizedIds, DetokenizeIds
    ),
    Operation("tokenizer_info", "GET", "/tokenizer_info", "What the tokenizer is.", TokenizerFacts),
    Operation("models", "GET", "/v1/models", "The model.", ServedModels),
    Operation("model", "GET", "/v1/models/{model}", "One model.", ModelFacts, parameters=(_MODEL,)),
    Operation("status", "GET", "/v1/status", "The entry, its hosts, and who is answered."),
    Operation("metrics", "GET", "/metrics", "In Prometheus' text format.", "text/plain"),
    Operation(
        "health",
        "GET",
        "/healthz",
        "Whether it can answer now.",
        needs_key=False,
        statuses=_STATES,
    ),
    Operation(
        "ready",
        "GET",
        "/readyz",
        "Ready, degraded or unavailable, and by which blocks.",
        needs_key=False,
        statuses=_STATES,
    ),
    Operation("page", "GET", "/", "A page to write with.", "text/html", needs_key=False),
    Operation("openapi", "GET", OPENAPI.path, "This description.", needs_key=False),
)


def describe_serving(model: str) -> bytes:
    """The API of a server with this model. Its requests must name it."""
    found = describe(f"BlockTrain serves {model}", OPERATIONS, ErrorAnswer, "1")
    schemas = found["components"]["schemas"]
    for name, harmless in (("Completion", HARMLESS), ("ChatCompletion", HARMLESS_CHAT)):
        schemas[name]["properties"] |= {"model": {"enum": [model]}, **_harmless(harmless)}
    return json.dumps(found).encode()


def _harmless(fields: Harmless) -> dict[str, Any]:
    return {name: {"enum": list(values)} for name, values in fields.items()}
