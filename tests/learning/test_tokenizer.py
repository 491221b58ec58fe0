"""Tokenizers: what every one of them must do, and bytes as the first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.config import Config
from blocktrain.errors import ConfigError
from blocktrain.learning.tokenizer import ByteTokenizer, tokenizer_of

BYTES = ByteTokenizer()


@given(st.binary())
def test_encoding_and_decoding_give_the_text_back(text: bytes) -> None:
    ids = BYTES.encode(text)
    assert ids.dtype == BYTES.dtype and len(ids) == len(text)
    assert BYTES.decode(ids.tolist()) == text
    assert b"".join(BYTES.token(token_id) for token_id in ids.tolist()) == text


@given(st.text(), st.integers(1, 7))
def test_text_comes_out_in_whole_characters(text: str, size: int) -> None:
    ids = BYTES.encode(text.encode()).tolist()
    decoder = BYTES.decoder()
    pieces = [decoder.text(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert "".join(pieces) + decoder.text(final=True) == text
    assert not any("\ufffd" in piece for piece in pieces if "\ufffd" not in text)


def test_an_unfinished_character_waits_and_is_replaced_at_the_end() -> None:
    decoder, (first, second) = BYTES.decoder(), "é".encode()
    assert decoder.text([first]) == ""
    assert decoder.text([second, first]) == "é"
    assert decoder.text(final=True) == "\ufffd"


def test_bytes_come_out_at_once() -> None:
    assert BYTES.decoder().bytes([0xC3]) == b"\xc3"


def test_what_a_tokenizer_says_about_itself() -> None:
    assert (BYTES.name, BYTES.vocabulary, BYTES.id_width, BYTES.dtype) == (
        "bytes",
        256,
        1,
        np.dtype("u1"),
    )
    assert len(BYTES.hash) == 64 and ByteTokenizer().hash == BYTES.hash
    assert tokenizer_of(Config()).hash == BYTES.hash


def test_a_tokenizer_that_was_not_loaded_is_named() -> None:
    with pytest.raises(ConfigError, match=r"the tokenizer 'words' \(sha256 unknown\) is not here"):
        tokenizer_of(Config(tokenizer="words"))
