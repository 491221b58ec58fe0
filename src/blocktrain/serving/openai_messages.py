"""The messages of the OpenAI completions API, with their limits. No I/O."""

from __future__ import annotations

import codecs
import json
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from blocktrain.errors import BlockTrainError
from blocktrain.serving.entry.answer import Piece, Request, Stats
from blocktrain.web.sse import frame

MAX_TOKENS = 8192  # bytes of one choice
MAX_CHOICES = 8
MAX_SWEEPS = 64
MAX_STOPS = 4
MAX_STOP_BYTES = 256
MAX_SEED = (1 << 63) - 1
DEFAULT_TOKENS, DEFAULT_TEMPERATURE = (
    256,
    0.8,
)  # as `blocktrain generate`: the same seed alone gives the same text

# Fields of the API that are not supported, with the values that ask for nothing.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "logprobs": (None,),
    "presence_penalty": (None, 0),
    "suffix": (None, ""),
}

ModeName = Literal["autoregressive", "sweep", "exact"]
DraftName = Literal["first-block", "none"]


class ApiError(BlockTrainError):
    """A refusal as OpenAI's clients know it: a status, a sentence, and the field."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after = status, code, param, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """As JSON."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("server_error" if self.status >= 500 else "invalid_request_error")
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


class StreamOptions(BaseModel):
    """stream_options."""

    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Completion(BaseModel):
    """The body of POST /v1/completions. null means left out. The last four fields are ours."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    model: Annotated[str, Field(min_length=1, max_length=256)]
    prompt: str | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stop: tuple[str, ...] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    mode: ModeName | None = None
    sweeps: Annotated[int, Field(ge=1, le=MAX_SWEEPS)] | None = None
    draft: DraftName | None = None
    allow_degraded: bool | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_text(cls, value: Any) -> Any:
        """Accept a list that holds one text."""
        if isinstance(value, list):
            if len(value) != 1 or not isinstance(value[0], str):
                raise ValueError(
                    "must be one text, or a list that holds one; send a request for each"
                )
            return value[0]
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _some_texts(cls, value: Any) -> Any:
        """Accept one text in place of a list."""
        texts = [value] if isinstance(value, str) else value
        if texts is None:
            return None
        if (
            not isinstance(texts, list)
            or len(texts) > MAX_STOPS
            or not all(isinstance(text, str) for text in texts)
        ):
            raise ValueError(f"must be a text or a list of at most {MAX_STOPS}")
        if any(not 1 <= len(text.encode()) <= MAX_STOP_BYTES for text in texts):
            raise ValueError(f"must be texts of 1 to {MAX_STOP_BYTES} bytes")
        return tuple(texts)


def read_completion(content: bytes) -> Completion:
    """Parse and check a body; the error names the first wrong field."""
    try:
        fields = pydantic_core.from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", "invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object", "invalid_json")
    for name, harmless in HARMLESS.items():
        value = fields.pop(name, None)
        if value not in harmless and not (name == "best_of" and value == fields.get("n")):
            raise ApiError(
                400, f"{name} is not supported here: leave it out", "unsupported", param=name
            )
    try:
        return Completion.model_validate(fields)
    except ValidationError as error:
        raise _validation_error(error) from None


def _validation_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    names = [str(part) for part in first["loc"] if isinstance(part, str)]
    param = ".".join(names[:2] if names[:1] == ["stream_options"] else names[:1])[:64] or None
    if first["type"] == "extra_forbidden":
        return ApiError(
            400,
            f"{param} is not a field that this server knows: leave it out",
            "unknown_field",
            param=param,
        )
    sentence = first["msg"].removeprefix("Value error, ")
    sentence = sentence if sentence.startswith("must") else sentence[:1].lower() + sentence[1:]
    sentence = sentence.removeprefix("input should be ").removeprefix("field ")
    if first["type"] == "missing":
        sentence = "is required"
    elif not sentence.startswith("must"):
        sentence = f"must be {sentence}"
    return ApiError(400, f"{param} {sentence}", "invalid_value", param=param)


@dataclass(frozen=True)
class Defaults:
    """What a server uses for fields that a request leaves out."""

    mode: ModeName = "exact"
    sweeps: int = 1
    draft: DraftName = "first-block"
    allow_degraded: bool = True
    deadline: float = 600.0


@dataclass(frozen=True)
class CompletionJob:
    """A completion that is to be written: one request to the entry for each choice."""

    model: str
    requests: tuple[Request, ...]
    seed: int
    stream: bool
    usage: bool  # at the end of the stream
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))


def completion_job(completion: Completion, model: str, defaults: Defaults) -> CompletionJob:
    """What the body means on this server. Choice i of several is written with seed + i."""
    if completion.model != model:
        raise ApiError(
            404,
            f"there is no model {completion.model!r} here, only {model!r}",
            "model_not_found",
            param="model",
        )
    if completion.stream_options is not None and not completion.stream:
        raise ApiError(
            400, "stream_options needs stream to be true", "invalid_value", param="stream_options"
        )
    seed = secrets.randbelow(1 << 32) if completion.seed is None else completion.seed
    prompt = (completion.prompt or "\n").encode()
    requests = [
        Request(
            prompt=prompt,
            max_tokens=completion.max_tokens or DEFAULT_TOKENS,
            mode=completion.mode or defaults.mode,
            sweeps=completion.sweeps or defaults.sweeps,
            draft=completion.draft or defaults.draft,
            seed=(seed + number) & MAX_SEED,
            temperature=DEFAULT_TEMPERATURE
            if completion.temperature is None
            else completion.temperature,
            top_p=1.0 if completion.top_p is None else completion.top_p,
            stop=tuple(text.encode() for text in completion.stop or ()),
            allow_degraded=defaults.allow_degraded
            if completion.allow_degraded is None
            else completion.allow_degraded,
            deadline=defaults.deadline,
        )
        for number in range(completion.n or 1)
    ]
    with_usage = bool(completion.stream_options and completion.stream_options.include_usage)
    return CompletionJob(model, tuple(requests), seed, bool(completion.stream), with_usage)


class TextChoice:
    """One choice as it grows: bytes in, whole characters out."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.parts: list[str] = []
        self.bytes = 0
        self.finish: str | None = None
        self.stats: Stats | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def take(self, piece: Piece) -> str:
        """The characters that are complete now. At the end, incomplete ones are replaced."""
        text = self._decoder.decode(piece.text, final=piece.finish is not None)
        self.bytes += len(piece.text)
        self.parts.append(text)
        self.finish, self.stats = piece.finish, piece.stats
        return text

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.parts)


def facts(stats: Iterable[Stats | None], seed: int, *, whole: bool = True) -> dict[str, Any]:
    """The response's field `blocktrain`: how the text was written, summed over the choices.

    `whole` adds the list of every sweep.
    """
    stats_list = [one for one in stats if one is not None]
    fields: dict[str, Any] = {"mode": stats_list[0].mode if stats_list else None, "seed": seed}
    for name in ("sweeps", "drafted", "accepted", "wire_bytes", "failovers", "near_ties"):
        fields[name] = sum(getattr(one, name) for one in stats_list)
    fields["degraded"] = sorted({block for one in stats_list for block in one.degraded})
    if whole:
        fields["accepted_per_sweep"] = [
            count for one in stats_list for count in one.accepted_per_sweep
        ]
        fields["first_byte_ms"] = round(
            min((one.first_byte_ms for one in stats_list), default=0.0), 3
        )
        fields["seconds"] = round(max((one.seconds for one in stats_list), default=0.0), 6)
    return fields


def usage(job: CompletionJob, choices: Iterable[TextChoice]) -> dict[str, Any]:
    """Tokens of the run's tokenizer. Of a prompt longer than the context only the end is read."""
    stats_list = [one.stats for one in choices if one.stats is not None]
    prompt = max((stats.prompt_tokens for stats in stats_list), default=0)
    completion = sum(stats.tokens for stats in stats_list)
    prompt_cut = max((stats.prompt_bytes_cut for stats in stats_list), default=0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_bytes_cut": prompt_cut,
    }


def _head(job: CompletionJob) -> dict[str, Any]:
    return {
        "id": job.id,
        "object": "text_completion",
        "created": job.created,
        "model": job.model,
    }


def _choice(choice: TextChoice, text: str) -> dict[str, Any]:
    return {"index": choice.index, "text": text, "logprobs": None, "finish_reason": choice.finish}


def response_body(job: CompletionJob, choices: list[TextChoice]) -> dict[str, Any]:
    """The answer in one piece."""
    return {
        **_head(job),
        "choices": [_choice(choice, choice.text) for choice in choices],
        "usage": usage(job, choices),
        "blocktrain": facts([choice.stats for choice in choices], job.seed),
    }


def chunk(job: CompletionJob, choice: TextChoice, text: str) -> bytes:
    """A piece of one choice as a server-sent event; the last one has the list of every sweep."""
    details = facts(
        [choice.stats], (job.seed + choice.index) & MAX_SEED, whole=choice.finish is not None
    )
    return event(
        {**_head(job), "choices": [_choice(choice, text)], "usage": None, "blocktrain": details}
    )


def last_chunk(job: CompletionJob, choices: list[TextChoice]) -> bytes:
    """The usage of a stream that asked for it."""
    return event({**_head(job), "choices": [], "usage": usage(job, choices)})


DONE = b"data: [DONE]\n\n"


def event(content: dict[str, Any]) -> bytes:
    """As a server-sent event."""
    return frame(json.dumps(content, separators=(",", ":")).encode())
