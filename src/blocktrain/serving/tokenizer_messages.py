"""The messages of /tokenize, /detokenize and /tokenizer_info, as vLLM has them. No I/O.

Evaluation harnesses ask them: so they need no tokenizer of their own.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from blocktrain.learning.tokenizer import Tokenizer
from blocktrain.serving.openai_messages import ApiError, read_fields

END_OF_TEXT = "<|endoftext|>"
"""Stands for the end of a text, which has no text of its own."""


class TokenizeText(BaseModel):
    """The body of POST /tokenize."""

    model_config = ConfigDict(strict=True, extra="forbid")
    prompt: str
    model: Annotated[str, Field(max_length=256)] | None = None
    add_special_tokens: bool | None = None  # there are none


class DetokenizeIds(BaseModel):
    """The body of POST /detokenize."""

    model_config = ConfigDict(strict=True, extra="forbid")
    tokens: list[Annotated[int, Field(ge=0)]]
    model: Annotated[str, Field(max_length=256)] | None = None


def end_text(tokenizer: Tokenizer) -> str:
    """What stands for the end of a text here; nothing if the vocabulary has none."""
    return "" if tokenizer.end_of_text is None else END_OF_TEXT


def tokenize(content: bytes, tokenizer: Tokenizer, context: int) -> dict[str, Any]:
    """The ids of a text."""
    text = read_fields(content, TokenizeText, {}).prompt
    is_end = text and text == end_text(tokenizer)
    ids = [tokenizer.first_token] if is_end else tokenizer.encode(text.encode()).tolist()
    return {"count": len(ids), "max_model_len": context, "tokens": ids}


def detokenize(content: bytes, tokenizer: Tokenizer) -> dict[str, Any]:
    """The text of some ids."""
    ids = read_fields(content, DetokenizeIds, {}).tokens
    require_ids(ids, tokenizer, "tokens")
    return {"prompt": tokenizer.decode(ids).decode("utf-8", "replace")}


def require_ids(ids: list[int] | tuple[int, ...], tokenizer: Tokenizer, field: str) -> None:
    """Refuse ids that the model does not have."""
    if ids and (wrong := max(ids)) >= tokenizer.vocabulary:
        raise ApiError(
            400,
            f"{field} has the token id {wrong}, but this model has only 0 to "
            f"{tokenizer.vocabulary - 1}",
            "invalid_value",
            param=field,
        )


def tokenizer_info(tokenizer: Tokenizer, context: int, template: str) -> dict[str, Any]:
    """What a client that has no tokenizer needs to know."""
    return {
        "tokenizer_class": tokenizer.name,
        "vocab_size": tokenizer.vocabulary,
        "bos_token": end_text(tokenizer) or "\n",
        "eos_token": end_text(tokenizer) or None,
        "model_max_length": context,
        "chat_template": template,
    }
