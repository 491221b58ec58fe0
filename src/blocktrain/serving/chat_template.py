"""The template that makes one text of the messages of a chat, as it is kept with a model.

It is a Jinja template as Hugging Face's tokenizers have them: it gets `messages`,
`add_generation_prompt`, `bos_token` and `eos_token`, and may call `raise_exception` and
`strftime_now`. One thing is ours: if it sets `stop` to a list of texts, they end an answer.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from blocktrain.errors import ConfigError

DEFAULT = Path(__file__).with_name("chat_template.jinja")
MAX_TEMPLATE = 1 << 18  # bytes of the file
MAX_RENDERED = 1 << 22  # characters
MAX_SECONDS = 5.0
MAX_STOPS = 16


_WIDTH = re.compile(r"%[-#0 +.]*(?:[0-9]*\.)?([0-9]+|\*)")


@dataclass(frozen=True)
class ChatPrompt:
    """A chat as the model reads it, and the texts that end its answer."""

    text: str
    stop: tuple[str, ...]


class _Sandbox(ImmutableSandboxedEnvironment):
    """Also without arithmetic that alone takes hours, or fills the memory."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if _largest_result(operator, left, right) > MAX_RENDERED:
            raise jinja2.TemplateError(f"{operator} makes too large a value")
        return super().call_binop(context, operator, left, right)


def _largest_result(operator: str, left: Any, right: Any) -> int:
    """About how many characters or bits come out."""
    if operator == "%":  # a format may ask for any width
        forms = _WIDTH.findall(left) if isinstance(left, str) else []
        return MAX_RENDERED + 1 if any(form == "*" or len(form) > 6 for form in forms) else 0
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        return bits * abs(right) if operator == "**" else bits + right.bit_length()
    text, count = (right, left) if isinstance(left, int) else (left, right)
    return len(text) * count if isinstance(text, Sized) and isinstance(count, int) else 0


class ChatTemplate:
    """A template, compiled in a sandbox: it can read what it gets, and reach nothing else."""

    def __init__(self, source: str, name: str = "the chat template") -> None:
        self.source, self._name = source, name
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # also of numbers with thousands of digits
            raise ConfigError(f"{name} is not a Jinja template: {_reason(error)}") from None

    def render(self, messages: Sequence[Mapping[str, str]], end_of_text: str = "") -> ChatPrompt:
        """The text that an answer to these messages continues."""
        context = self._template.new_context(
            {
                "messages": [dict(message) for message in messages],
                "add_generation_prompt": True,
                "bos_token": end_of_text,
                "eos_token": end_of_text,
            }
        )
        parts: list[str] = []
        size, late = 0, time.monotonic() + MAX_SECONDS
        try:
            for part in self._template.root_render_func(context):
                parts.append(part)
                size += len(part)
                if size > MAX_RENDERED or time.monotonic() > late:
                    raise ConfigError(f"{self._name} does not come to an end with these messages")
            stop = context.get_exported().get("stop", ())
        except ConfigError:
            raise
        except Exception as error:  # a template may do anything that the sandbox lets it
            raise ConfigError(f"{self._name} refuses these messages: {_reason(error)}") from None
        return ChatPrompt("".join(parts), self._stops(stop))

    def _stops(self, stop: Any) -> tuple[str, ...]:
        if (
            not isinstance(stop, list | tuple)
            or len(stop) > MAX_STOPS
            or not all(isinstance(text, str) and text for text in stop)
        ):
            raise ConfigError(f"{self._name} must set stop to a list of at most {MAX_STOPS} texts")
        return tuple(stop)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def read_template(path: Path) -> ChatTemplate:
    """The template in a file."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TEMPLATE + 1)
        source = content.decode()
    except OSError as error:
        raise ConfigError(
            f"cannot read the chat template {path}: {error.strerror or error}"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no chat template: it is not UTF-8") from None
    if len(content) > MAX_TEMPLATE:
        raise ConfigError(f"{path} is no chat template: it has more than {MAX_TEMPLATE} bytes")
    return ChatTemplate(source, str(path))


def default_template() -> ChatTemplate:
    """Plain roles, for models that were trained on no chats."""
    return read_template(DEFAULT)
