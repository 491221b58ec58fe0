"""A stream of text, cut into pieces that are encoded one by one.

Where a cut falls depends on nothing but the text since the cut before. So tokenizing may stop after
any piece and go on from there, and a text without a line break needs no more memory than another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

PIECE = 1 << 16  # bytes
_LINE_END = re.compile(rb"\S\n(?=\S)")


class Mark(NamedTuple):
    """How far an input was read."""

    offset: int = 0  # bytes of its text; of JSON lines, those before the line
    unit: int = 0  # lines or rows before
    piece: int = 0  # pieces of that line or row before


class TextPiece(NamedTuple):
    """Some text of an input, and where the rest begins."""

    text: bytes
    after: Mark
    ends_document: bool
    read: int  # bytes of the file so far, for the progress bar


def cut(chunks: Iterable[bytes], size: int = PIECE) -> Iterator[tuple[bytes, bool]]:
    """The text in pieces of at most `size` bytes, each with whether it is the last one."""
    held = b""
    for chunk in chunks:
        held += chunk
        start = 0
        while len(held) - start > size:
            end = start + cut_length(held[start : start + size + 1], size)
            yield held[start:end], False
            start = end
        held = held[start:]
    yield held, True


def cut_length(text: bytes, size: int) -> int:
    """The length of the first piece of a text that is longer than `size`.

    It ends with a line, if possible one that has text around its end, because tokenizers join
    white space; or before a space; or at least between two characters of UTF-8.
    """
    ends = [match.end() for match in _LINE_END.finditer(text, size // 2)]
    if ends and ends[-1] <= size:
        return ends[-1]
    if (line_end := text.rfind(b"\n", 0, size)) > 0:
        return line_end + 1
    if (space := text.rfind(b" ", 1, size)) > 0:
        return space
    end = size
    while end > size - 3 and text[end] & 0xC0 == 0x80:
        end -= 1
    return end
