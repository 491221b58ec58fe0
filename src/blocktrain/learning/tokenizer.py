"""Text to token ids and back. Nothing else in the package knows what a token is. Needs no torch.

To add a tokenizer, write one class and `register` an instance; settings name it (`tokenizer=...`).
"""

from __future__ import annotations

import codecs
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from blocktrain.config import TOKENIZERS, Config
from blocktrain.errors import ConfigError

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.unsignedinteger[Any]]
"""Token ids, of the tokenizer's dtype."""


class Tokenizer(ABC):
    """A vocabulary: ids are 0 to `vocabulary` - 1, and each stands for some bytes."""

    name: str
    """What settings call it."""
    vocabulary: int
    """How many ids there are."""

    @abstractmethod
    def encode(self, text: bytes | Bytes) -> Ids:
        """The ids of a text."""

    @abstractmethod
    def token(self, token_id: int) -> bytes:
        """The bytes that an id stands for; they may be part of a UTF-8 character."""

    def decode(self, ids: Iterable[int]) -> bytes:
        return b"".join(self.token(token_id) for token_id in ids)

    def decoder(self) -> TokenDecoder:
        """For ids that arrive one after another."""
        return TokenDecoder(self)

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """The narrowest little-endian type that holds every id, in arrays and on the wire."""
        return np.dtype(np.min_scalar_type(self.vocabulary - 1)).newbyteorder("<")

    @property
    def id_width(self) -> int:
        """Bytes of an id."""
        return self.dtype.itemsize

    @property
    def hash(self) -> str:
        """sha256 of its name and of all its tokens: models only fit the vocabulary they learned."""
        digest = hashlib.sha256(f"{self.name} {self.vocabulary}".encode())
        for token_id in range(self.vocabulary):
            token = self.token(token_id)
            digest.update(len(token).to_bytes(4, "little") + token)
        return digest.hexdigest()


class TokenDecoder:
    """Ids in, what is complete of their text out. Use either `bytes` or `text`, not both."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def bytes(self, ids: Iterable[int]) -> bytes:
        return self._tokenizer.decode(ids)

    def text(self, ids: Iterable[int] = (), *, final: bool = False) -> str:
        """Whole characters only: the bytes of an unfinished one wait for the next call.

        What cannot be UTF-8 becomes U+FFFD, and so does an unfinished character at the end.
        """
        return self._utf8.decode(self._tokenizer.decode(ids), final)


class ByteTokenizer(Tokenizer):
    """Every byte is a token."""

    name = "bytes"
    vocabulary = 256

    def encode(self, text: bytes | Bytes) -> Ids:
        """An array stays the same array, so a memory-mapped corpus stays on the disk."""
        return np.frombuffer(text, np.uint8) if isinstance(text, bytes) else text

    def token(self, token_id: int) -> bytes:
        return bytes((token_id,))

    def decode(self, ids: Iterable[int]) -> bytes:
        return bytes(ids)


_TABLE: dict[str, Tokenizer] = {}


def register(tokenizer: Tokenizer) -> None:
    """Let settings name this tokenizer."""
    _TABLE[tokenizer.name] = tokenizer
    TOKENIZERS.add(tokenizer.name)


def tokenizer_of(config: Config) -> Tokenizer:
    try:
        return _TABLE[config.tokenizer]
    except KeyError:
        raise ConfigError(
            f"there is no tokenizer {config.tokenizer!r} here; known: {', '.join(sorted(_TABLE))}"
        ) from None


register(ByteTokenizer())
