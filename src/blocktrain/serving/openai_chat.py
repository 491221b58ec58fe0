"""The messages of OpenAI's chat API. No I/O. What they share with completions is in
openai_messages.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from blocktrain.serving.chat_template import ChatTemplate
from blocktrain.serving.entry.answer import Request
from blocktrain.serving.openai_messages import (
    DEFAULT_TOKENS,
    MAX_LOGPROBS,
    MAX_TOKENS,
    AnswerFields,
    Defaults,
    Fragment,
    Harmless,
    PlacedScore,
    TextChoice,
    TextJob,
    read_fields,
    text_job,
    token_name,
)

MAX_MESSAGES = 1024

# Fields of the API that are not supported, with the values that ask for nothing.
HARMLESS: Harmless = {
    "audio": (None,),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "metadata": (None, {}),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "reasoning_effort": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
}


class _TextPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message. Only text can be said."""

    model_config = ConfigDict(strict=True, extra="forbid")
    role: Literal["system", "developer", "user", "assistant"]
    content: str
    name: Annotated[str, Field(max_length=64)] | None = None
    refusal: None = None

    @field_validator("content", mode="before", json_schema_input_type=str | list[_TextPart])
    @classmethod
    def _join(cls, value: Any) -> Any:
        """Accept a list of parts."""
        if not isinstance(value, list):
            return value
        if not all(
            isinstance(part, dict)
            and part.keys() == {"type", "text"}
            and part["type"] == "text"
            and isinstance(part["text"], str)
            for part in value
        ):
            raise ValueError('must be a text, or a list of parts {"type": "text", "text": ...}')
        return "".join(part["text"] for part in value)

    def shown(self) -> dict[str, str]:
        """As a template sees it."""
        role = "system" if self.role == "developer" else self.role
        named = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": self.content, **named}


class ChatCompletion(AnswerFields):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[
        tuple[ChatMessage, ...], Field(min_length=1, max_length=MAX_MESSAGES, strict=False)
    ]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _scores(self) -> ChatCompletion:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self


def read_chat(content: bytes) -> ChatCompletion:
    """Parse and check a body; the error names the first wrong field."""
    return read_fields(content, ChatCompletion, HARMLESS)


def chat_job(
    chat: ChatCompletion, template: ChatTemplate, end_of_text: str, model: str, defaults: Defaults
) -> TextJob:
    """What the body means on this server: the template makes one prompt of the messages."""
    prompt = template.render([message.shown() for message in chat.messages], end_of_text)
    asked = Request(
        (prompt.text or "\n").encode(),
        chat.max_completion_tokens or chat.max_tokens or DEFAULT_TOKENS,
        stop=tuple(text.encode() for text in prompt.stop),
        logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
    )
    return text_job(chat, [asked], ChatForm(), model, defaults)


class ChatForm:
    """Of /v1/chat/completions: a message of the assistant, or parts of it."""

    id = "chatcmpl"
    object = "chat.completion"
    chunk = "chat.completion.chunk"

    def choice(self, choice: TextChoice, fragment: Fragment) -> dict[str, Any]:
        message = {"role": "assistant", "content": fragment.text, "refusal": None}
        return {"index": choice.index, "message": message, **self._rest(choice, fragment)}

    def delta(self, choice: TextChoice, fragment: Fragment) -> dict[str, Any]:
        role = {} if choice.sent else {"role": "assistant"}
        text = {"content": fragment.text} if fragment.text or role else {}
        return {"index": choice.index, "delta": role | text, **self._rest(choice, fragment)}

    def _rest(self, choice: TextChoice, fragment: Fragment) -> dict[str, Any]:
        return {
            "logprobs": self._logprobs(choice, fragment.scores),
            "finish_reason": choice.finish,
        }

    def _logprobs(
        self, choice: TextChoice, scores: Sequence[PlacedScore] | None
    ) -> dict[str, Any] | None:
        if scores is None:
            return None

        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            content = choice.decode(token)
            return {"token": token_name(content), "logprob": logprob, "bytes": list(content)}

        content = [
            {
                **entry(placed.score.token, placed.score.logprob),
                "top_logprobs": [entry(*pair) for pair in placed.score.top],
            }
            for placed in scores
        ]
        return {"content": content, "refusal": None}
