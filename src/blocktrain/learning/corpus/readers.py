"""Files as pieces of text. Each reader goes on from any mark that it gave."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from blocktrain.errors import CorpusError
from blocktrain.learning.corpus.pieces import Mark, TextPiece, cut

CHUNK = 1 << 20
CONTROL_BYTES = bytes(b for b in range(32) if chr(b) not in "\t\n\r\f\v\b\x1b")
MOST_CONTROL = 0.02  # share of control bytes in a text
LEAST_SAMPLE = 256


class Input(Protocol):
    """One file of a corpus, or one part of a dataset."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def identity(self) -> tuple[str, ...]:
        """Changes when the content may have changed."""

    @property
    def size(self) -> int:
        """Bytes to read, for the progress bar."""

    def pieces(self, start: Mark) -> Iterator[TextPiece]:
        """The text from a mark on; CorpusError says what cannot be read."""


@dataclass(frozen=True)
class TextFile:
    """A file of text, which is one document."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def identity(self) -> tuple[str, ...]:
        return file_identity(self.path)

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def pieces(self, start: Mark) -> Iterator[TextPiece]:
        offset = start.offset
        for text, last in cut(self._chunks(offset)):
            require_text(text, self.name, first=offset == 0)
            offset += len(text)
            yield TextPiece(text, Mark(offset), last)

    def _chunks(self, offset: int) -> Iterator[bytes]:
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                while chunk := file.read(CHUNK):
                    yield chunk
        except OSError as error:
            raise unreadable(self.path, error) from None


def file_identity(path: Path) -> tuple[str, ...]:
    try:
        stat = path.stat()
    except OSError as error:
        raise unreadable(path, error) from None
    return str(path.resolve()), str(stat.st_size), str(stat.st_mtime_ns)


def unreadable(path: Path, error: OSError) -> CorpusError:
    return CorpusError(f"cannot read {path}: {error.strerror or error}")


def require_text(text: bytes, name: str, *, first: bool) -> None:
    """Refuse what is not text in any encoding that extends ASCII."""
    nul = first and b"\0" in text
    share = 1 - len(text.translate(None, CONTROL_BYTES)) / max(len(text), LEAST_SAMPLE)
    share = share if len(text) >= LEAST_SAMPLE else 0.0
    if nul or share > MOST_CONTROL:
        what = "NUL bytes" if b"\0" in text else f"{share:.0%} control characters"
        raise CorpusError(
            f"{name} is not text: it has {what}; give a text file, for example in UTF-8"
        )
