"""The messages of OpenAI's API and its completions, with their limits. No I/O.

The other half, chats, is in openai_chat.py.
"""

from __future__ import annotations

import codecs
import json
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Protocol, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from blocktrain.errors import BlockTrainError
from blocktrain.learning.generate import Tokens, TokenScore
from blocktrain.serving.entry.answer import Piece, Request, Stats
from blocktrain.web.sse import frame

MAX_TOKENS = 8192  # of one choice
MAX_CHOICES = 8  # of one prompt, and at work at the same time
MAX_ANSWERS = 128  # all choices of all prompts of a request
MAX_LOGPROBS = 20
MAX_SCORED = 1 << 18  # log-probabilities of all prompts of a request, for echo
MAX_SWEEPS = 64
MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_SEED = (1 << 63) - 1
DEFAULT_TOKENS, DEFAULT_TEMPERATURE = (
    256,
    0.8,
)  # as `blocktrain generate`: the same seed alone gives the same text

# Fields of the API that are not supported, with the values that ask for nothing.
Harmless = dict[str, tuple[Any, ...]]
HARMLESS: Harmless = {
    "best_of": (None, 1),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
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


_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_BYTES)]
_TokenId = Annotated[int, Field(ge=0)]
_Prompts = str | list[str] | list[_TokenId] | list[list[_TokenId]] | None


class AnswerFields(BaseModel):
    """What all requests for text may say. null means left out. The last four fields are ours."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    model: Annotated[str, Field(min_length=1, max_length=256)]
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

    @field_validator("stop", mode="before", json_schema_input_type=_Stop | list[_Stop] | None)
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


PromptText = str | Tokens


class Completion(AnswerFields):
    """The body of POST /v1/completions."""

    prompt: tuple[PromptText, ...] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @field_validator("prompt", mode="before", json_schema_input_type=_Prompts)
    @classmethod
    def _prompts(cls, value: Any) -> Any:
        """Accept a text, a list of texts, the ids of a text, or a list of those."""
        if value is None or isinstance(value, str):
            return None if value is None else (value,)
        if not isinstance(value, list) or not value:
            raise ValueError("must be a text, a list of texts, a list of ids, or a list of those")
        if len(value) > MAX_ANSWERS and not isinstance(value[0], int):
            raise ValueError(f"must be at most {MAX_ANSWERS} prompts: send several requests")
        if all(isinstance(prompt, str) for prompt in value):
            return tuple(value)
        every = [value] if isinstance(value[0], int) else value
        if not all(isinstance(ids, list) and ids and all(map(_is_id, ids)) for ids in every):
            raise ValueError(
                "must be only texts or only lists of token ids (0 or more), none of them empty"
            )
        return tuple(map(tuple, every))


def _is_id(value: Any) -> bool:
    return type(value) is int and value >= 0


def read_completion(content: bytes) -> Completion:
    """Parse and check a body; the error names the first wrong field."""
    return read_fields(content, Completion, HARMLESS)


Fields = TypeVar("Fields", bound=BaseModel)


def read_fields(content: bytes, kind: type[Fields], harmless: Harmless) -> Fields:
    """Parse and check a body of this kind, without the harmless fields."""
    try:
        fields = pydantic_core.from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", "invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object", "invalid_json")
    for name, values in harmless.items():
        value = fields.pop(name, None)
        if value not in values and not (name == "best_of" and value == fields.get("n")):
            raise ApiError(
                400, f"{name} is not supported here: leave it out", "unsupported", param=name
            )
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _validation_error(error) from None


def _validation_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = _param(first["loc"])
    if first["type"] == "extra_forbidden":
        return ApiError(
            400,
            f"{param} is not a field that this server knows: leave it out",
            "unknown_field",
            param=param,
        )
    sentence = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:  # about several fields: a sentence that begins with one of them
        return ApiError(400, sentence, "invalid_value", param=sentence.split()[0])
    sentence = sentence if sentence.startswith("must") else sentence[:1].lower() + sentence[1:]
    sentence = sentence.removeprefix("input should be ").removeprefix("field ")
    sentence = re.sub(r"^\w+ should have (at \w+ \d+ \w+).*", r"must have \1", sentence)
    if first["type"] == "missing":
        sentence = "is required"
    elif not sentence.startswith("must"):
        sentence = f"must be {sentence}"
    return ApiError(400, f"{param} {sentence}", "invalid_value", param=param)


def _param(place: tuple[int | str, ...]) -> str | None:
    """The field at a place, as n, stream_options.more or messages[2].role."""
    deep = place[:1] in (("stream_options",), ("messages",))
    names = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in place]
    return "".join(names[: 3 if deep else 1]).removeprefix(".")[:64] or None


@dataclass(frozen=True)
class Defaults:
    """What a server uses for fields that a request leaves out."""

    mode: ModeName = "exact"
    sweeps: int = 1
    draft: DraftName = "first-block"
    allow_degraded: bool = True
    deadline: float = 600.0


@dataclass(frozen=True)
class TextJob:
    """Text that is to be written: for each prompt `n` requests to the entry, one a choice."""

    model: str
    requests: tuple[Request, ...]
    n: int
    form: AnswerForm
    stream: bool
    usage: bool  # at the end of the stream
    echo: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))


def text_job(
    fields: AnswerFields,
    asked: Sequence[Request],
    form: AnswerForm,
    model: str,
    defaults: Defaults,
) -> TextJob:
    """What the fields mean on this server, for prompts that are asked like this.

    Choice i of a prompt is written with seed + i.
    """
    if fields.model != model:
        raise ApiError(
            404,
            f"there is no model {fields.model!r} here, only {model!r}",
            "model_not_found",
            param="model",
        )
    if fields.stream_options is not None and not fields.stream:
        raise ApiError(
            400, "stream_options needs stream to be true", "invalid_value", param="stream_options"
        )
    seed = secrets.randbelow(1 << 32) if fields.seed is None else fields.seed
    temperature = DEFAULT_TEMPERATURE if fields.temperature is None else fields.temperature
    degraded = fields.allow_degraded
    n = fields.n or 1
    requests = [
        replace(
            request,
            mode=fields.mode or defaults.mode,
            sweeps=fields.sweeps or defaults.sweeps,
            draft=fields.draft or defaults.draft,
            seed=(seed + number) & MAX_SEED,
            temperature=temperature,
            top_p=1.0 if fields.top_p is None else fields.top_p,
            stop=(*request.stop, *(text.encode() for text in fields.stop or ())),
            allow_degraded=defaults.allow_degraded if degraded is None else degraded,
            deadline=defaults.deadline,
        )
        for request in asked
        for number in range(n)
    ]
    if len(requests) > MAX_ANSWERS:
        raise ApiError(
            400,
            f"prompt and n ask for {len(requests)} choices, but at most {MAX_ANSWERS} fit a "
            "request: send several",
            "invalid_value",
            param="n",
        )
    with_usage = bool(fields.stream_options and fields.stream_options.include_usage)
    return TextJob(model, tuple(requests), n, form, bool(fields.stream), with_usage)


def completion_job(completion: Completion, model: str, defaults: Defaults) -> TextJob:
    """What the body means on this server."""
    echo = bool(completion.echo)
    most = DEFAULT_TOKENS if completion.max_tokens is None else completion.max_tokens
    asked = [
        Request(
            prompt.encode() if isinstance(prompt, str) else prompt,
            most,
            logprobs=completion.logprobs,
            score_prompt=echo,
        )
        for prompt in (text or "\n" for text in completion.prompt or ("",))
    ]
    return replace(text_job(completion, asked, CompletionForm(), model, defaults), echo=echo)


@dataclass(frozen=True)
class PlacedScore:
    """The score of a token, and where its text begins."""

    score: TokenScore
    offset: int  # in characters


@dataclass(frozen=True)
class Fragment:
    """Some text of a choice, and the scores of its tokens if they were asked for."""

    text: str
    scores: tuple[PlacedScore, ...] | None


class TextChoice:
    """One choice as it grows: bytes in, whole characters out. `echo` is shown before all else."""

    def __init__(
        self,
        index: int,
        decode: Callable[[int], bytes] = lambda token: bytes((token,)),
        *,
        echo: bytes = b"",
        scored: bool = False,
    ) -> None:
        self.index, self.decode = index, decode
        self.parts: list[str] = []
        self.bytes = 0
        self.finish: str | None = None
        self.stats: Stats | None = None
        self.sent = 0  # chunks of a stream
        self.scores: list[PlacedScore] | None = [] if scored else None
        self._echo, self._offset = echo, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._place = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def take(self, piece: Piece) -> Fragment:
        """The characters that are complete now. At the end, incomplete ones are replaced."""
        text = self._decoder.decode(self._echo + piece.text, final=piece.finish is not None)
        self._echo = b""
        self.bytes += len(piece.text)
        self.parts.append(text)
        self.finish, self.stats = piece.finish, piece.stats
        if self.scores is None:
            return Fragment(text, None)
        known = len(self.scores)
        for score in piece.scores:
            content, before = self.decode(score.token), self._offset
            self._offset += len(self._place.decode(content))
            own = len(codecs.utf_8_decode(content, "replace")[0])  # not what it ends of others
            self.scores.append(PlacedScore(score, max(before, self._offset - own)))
        return Fragment(text, tuple(self.scores[known:]))

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.parts)

    @property
    def whole(self) -> Fragment:
        """All of it so far, with the scores."""
        return Fragment(self.text, None if self.scores is None else tuple(self.scores))


class AnswerForm(Protocol):
    """How an answer looks: as a completion, or as messages of a chat."""

    id: str  # what its id begins with
    object: str
    chunk: str  # the object of a stream

    def choice(self, choice: TextChoice, fragment: Fragment) -> dict[str, Any]:
        """A choice in one piece."""

    def delta(self, choice: TextChoice, fragment: Fragment) -> dict[str, Any]:
        """A piece of a choice in a stream."""


class CompletionForm:
    """Of /v1/completions: whole and streamed choices look the same."""

    id = "cmpl"
    object = chunk = "text_completion"

    def choice(self, choice: TextChoice, fragment: Fragment) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": fragment.text,
            "logprobs": self._logprobs(choice, fragment.scores),
            "finish_reason": choice.finish,
        }

    delta = choice

    def _logprobs(
        self, choice: TextChoice, scores: Sequence[PlacedScore] | None
    ) -> dict[str, Any] | None:
        if scores is None:
            return None

        def name(token: int) -> str:
            return token_name(choice.decode(token))

        tops = [
            None
            if placed.score.logprob is None
            else {
                **{name(token): logprob for token, logprob in reversed(placed.score.top)},
                name(placed.score.token): placed.score.logprob,
            }
            for placed in scores
        ]
        return {
            "tokens": [name(placed.score.token) for placed in scores],
            "token_logprobs": [placed.score.logprob for placed in scores],
            "top_logprobs": tops,
            "text_offset": [placed.offset for placed in scores],
        }


def token_name(content: bytes) -> str:
    """A token as text. Part of a character has no text: it is written as bytes:\\xe2\\x82."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def facts(stats: Iterable[Stats | None], seed: int, *, whole: bool = True) -> dict[str, Any]:
    """The response's field `blocktrain`: how the text was written, summed over the choices.

    `whole` adds the list of every sweep.
    """
    stats_list = [one for one in stats if one is not None]
    fields: dict[str, Any] = {"mode": stats_list[0].mode if stats_list else None, "seed": seed}
    for name in ("sweeps", "drafted", "accepted", "wire_bytes", "failovers", "near_ties"):
        fields[name] = sum(getattr(one, name) for one in stats_list)
    fields["degraded"] = sorted({block for one in stats_list for block in one.degraded})
    fields["suspects"] = sorted({name for one in stats_list for name in one.suspects})
    if whole:
        fields["accepted_per_sweep"] = [
            count for one in stats_list for count in one.accepted_per_sweep
        ]
        fields["first_byte_ms"] = round(
            min((one.first_byte_ms for one in stats_list), default=0.0), 3
        )
        fields["seconds"] = round(max((one.seconds for one in stats_list), default=0.0), 6)
    return fields


def usage(job: TextJob, choices: Sequence[TextChoice]) -> dict[str, Any]:
    """Tokens of the run's tokenizer, those of a prompt once for all its choices.

    Of a prompt longer than the context only the end is read to continue it.
    """
    prompt = prompt_cut = completion = 0
    for first in range(0, len(choices), job.n):
        stats_list = [one.stats for one in choices[first : first + job.n] if one.stats is not None]
        prompt += max((stats.prompt_tokens for stats in stats_list), default=0)
        prompt_cut += max((stats.prompt_bytes_cut for stats in stats_list), default=0)
        completion += sum(stats.tokens for stats in stats_list)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_bytes_cut": prompt_cut,
    }


def _head(job: TextJob, kind: str) -> dict[str, Any]:
    return {
        "id": f"{job.form.id}-{job.id}",
        "object": kind,
        "created": job.created,
        "model": job.model,
    }


def response_body(job: TextJob, choices: Sequence[TextChoice]) -> bytes:
    """The answer in one piece, as JSON."""
    content = {
        **_head(job, job.form.object),
        "choices": [job.form.choice(choice, choice.whole) for choice in choices],
        "usage": usage(job, choices),
        "blocktrain": facts([choice.stats for choice in choices], job.requests[0].seed),
    }
    return json.dumps(content, separators=(",", ":")).encode()


def chunk(job: TextJob, choice: TextChoice, fragment: Fragment) -> bytes:
    """A piece of one choice as a server-sent event; the last one has the list of every sweep."""
    details = facts(
        [choice.stats], job.requests[choice.index].seed, whole=choice.finish is not None
    )
    content = {"choices": [job.form.delta(choice, fragment)], "usage": None, "blocktrain": details}
    choice.sent += 1
    return event({**_head(job, job.form.chunk), **content})


def last_chunk(job: TextJob, choices: Sequence[TextChoice]) -> bytes:
    """The usage of a stream that asked for it."""
    return event({**_head(job, job.form.chunk), "choices": [], "usage": usage(job, choices)})


DONE = b"data: [DONE]\n\n"


def event(content: dict[str, Any]) -> bytes:
    """As a server-sent event."""
    return frame(json.dumps(content, separators=(",", ":")).encode())
