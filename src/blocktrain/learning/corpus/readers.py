"""Files as pieces of text. Each reader goes on from any mark that it gave."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO, Protocol

import msgspec

from blocktrain.errors import CorpusError
from blocktrain.learning.corpus.files import StoredFile, compression_of, unpack_file
from blocktrain.learning.corpus.pieces import Mark, TextPiece, cut

CHUNK = 1 << 20
LONGEST_LINE = 1 << 28  # bytes of a JSON line
ROWS = 64  # of a table, read at once
CONTROL_BYTES = bytes(b for b in range(32) if chr(b) not in "\t\n\r\f\v\b\x1b")
MOST_CONTROL = 0.02  # share of control bytes in a text
LEAST_SAMPLE = 256
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
COLUMN = "text"
TEXT_SUFFIXES = (
    ".txt",
    ".md",
    ".rst",
    ".py",
    ".json",
    ".csv",
    ".tsv",
    ".html",
    ".xml",
    ".tex",
    ".c",
    ".h",
    ".js",
    ".ts",
    ".java",
    ".go",
    ".rs",
)
LINES_SUFFIXES = (".jsonl", ".ndjson")
PARQUET = ".parquet"


class Input(Protocol):
    """One file of a corpus, as text."""

    @property
    def file(self) -> StoredFile: ...

    @property
    def identity(self) -> tuple[str, ...]:
        """Changes when the text may have changed."""

    def pieces(self, start: Mark) -> Iterator[TextPiece]:
        """The text from a mark on; CorpusError says what cannot be read."""


def suffix_of(name: str) -> str:
    """The suffix that says what a file holds, without that of its compression."""
    plain = name.lower().removesuffix(compression_of(name))
    return plain[plain.rfind(".") :] if "." in plain else ""


def is_known(name: str) -> bool:
    """Whether a file is text, JSON lines or parquet, by its name."""
    return suffix_of(name) in (*TEXT_SUFFIXES, *LINES_SUFFIXES) or name.lower().endswith(PARQUET)


def reader_of(file: StoredFile, column: str = "") -> Input:
    """The reader for a file, by its name. What has no known suffix is text."""
    if file.name.lower().endswith(PARQUET):
        return ParquetFile(file, column or COLUMN)
    if suffix_of(file.name) in LINES_SUFFIXES:
        return JsonLines(file, column or COLUMN)
    return TextFile(file)


@dataclass(frozen=True)
class TextFile:
    """A file of text, which is one document."""

    file: StoredFile

    @property
    def identity(self) -> tuple[str, ...]:
        return self.file.identity

    def pieces(self, start: Mark) -> Iterator[TextPiece]:
        offset = start.offset
        with unpack_file(self.file) as content:
            content.stream.seek(offset)
            for text, last in cut(_chunks(content.stream)):
                require_text(text, self.file.name, first=offset == 0)
                offset += len(text)
                yield TextPiece(text, Mark(offset), last, content.read)


def _chunks(stream: BinaryIO) -> Iterator[bytes]:
    while chunk := stream.read(CHUNK):
        yield chunk


def require_text(text: bytes, name: str, *, first: bool) -> None:
    """Refuse what is not text in any encoding that extends ASCII."""
    share = 1 - len(text.translate(None, CONTROL_BYTES)) / max(len(text), 1)
    too_many = share > MOST_CONTROL and len(text) >= LEAST_SAMPLE
    if too_many or (first and b"\0" in text):
        what = "NUL bytes" if b"\0" in text else f"{share:.0%} control characters"
        if first and text.startswith(UTF16_MARKS):
            what += " (if it is UTF-16, iconv -f UTF-16 -t UTF-8 converts it)"
        raise CorpusError(
            f"{name} is not text: it has {what}; give a text file, for example in UTF-8"
        )


@dataclass(frozen=True)
class _ColumnFile:
    """A file with many documents, of which each is in the same column."""

    file: StoredFile
    column: str

    @property
    def identity(self) -> tuple[str, ...]:
        return (*self.file.identity, self.column)


class JsonLines(_ColumnFile):
    """A file with an object in each line; one of its fields is a document."""

    def pieces(self, start: Mark) -> Iterator[TextPiece]:
        offset, number, skip = start
        with unpack_file(self.file) as content:
            content.stream.seek(offset)
            while line := content.stream.readline(LONGEST_LINE + 1):
                if len(line) > LONGEST_LINE:
                    raise CorpusError(
                        f"{self.file.name}, line {number + 1}: longer than {LONGEST_LINE >> 20} "
                        "MiB; write one document per line"
                    )
                text = self._document(line, number + 1)
                after = Mark(offset + len(line), number + 1)
                place = Mark(offset, number)
                yield from document_pieces(text, place, after, skip, content.read)
                (offset, number, _), skip = after, 0

    def _document(self, line: bytes, number: int) -> bytes:
        if line.isspace():
            return b""
        try:
            return _encode(_decoder(self.column).decode(line).value)
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError):
            return self._read_slowly(line, number)

    def _read_slowly(self, line: bytes, number: int) -> bytes:
        """The document of a line as Python reads it; CorpusError says what is wrong with it."""
        place = f"{self.file.name}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"{place}: not JSON ({error}); repair or remove that line") from None
        if not isinstance(row, dict):
            raise CorpusError(f'{place}: not an object such as {{"{self.column}": "a text"}}')
        if self.column not in row:
            raise CorpusError(f"{place}: {_no_column(self.column, row)}")
        try:
            return _encode(row[self.column])
        except TypeError:
            kind = type(row[self.column]).__name__
            raise CorpusError(
                f"{place}: the field {self.column!r} is no text but {kind}; name another column, "
                "as in data.jsonl:COLUMN"
            ) from None


@lru_cache(8)
def _decoder(column: str) -> Any:
    """Reads one field and skips the others without making objects of them."""
    row = msgspec.defstruct("Row", [("value", Any)], rename={"value": column})
    return msgspec.json.Decoder(row)


def _encode(text: object) -> bytes:
    """The bytes of a document; none for null."""
    if text is None:
        return b""
    if not isinstance(text, str):
        raise TypeError
    return text.encode("utf-8", "surrogatepass")


def _no_column(column: str, columns: Any) -> str:
    names = ", ".join(map(str, columns)) or "none"
    return (
        f"there is no column {column!r}; there are: {names[:300]}. "
        "Name one after the path or dataset, as in data.jsonl:COLUMN"
    )


def document_pieces(
    text: bytes, place: Mark, after: Mark, skip: int, read: int
) -> Iterator[TextPiece]:
    """The pieces of one document, which is a line or row at `place`."""
    for number, (piece, last) in enumerate(cut([text])):
        if number >= skip:
            mark = after if last else place._replace(piece=number + 1)
            yield TextPiece(piece, mark, last, read)


class ParquetFile(_ColumnFile):
    """A table; every row of one of its columns is a document."""

    def pieces(self, start: Mark) -> Iterator[TextPiece]:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise CorpusError(
                f"{self.file.name} is a parquet file, which needs pyarrow: "
                "pip install 'blocktrain[hub]'"
            ) from None
        with unpack_file(self.file) as content:
            try:
                table = parquet.ParquetFile(content.stream, pre_buffer=False)
                self._require_column(table.schema_arrow, pyarrow.types)
                yield from self._rows(table, start)
            except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise  # of the disk, not of pyarrow
                reason = " ".join(str(error).split())[:200]
                raise CorpusError(
                    f"{self.file.name} is damaged or no parquet file ({reason}); fetch it again"
                ) from None

    def _require_column(self, schema: Any, types: Any) -> None:
        if self.column not in schema.names:
            raise CorpusError(f"{self.file.name}: {_no_column(self.column, schema.names)}")
        kind = schema.field(self.column).type
        value = kind.value_type if types.is_dictionary(kind) else kind
        if not (types.is_string(value) or types.is_large_string(value)):
            raise CorpusError(
                f"{self.file.name}: the column {self.column!r} holds no text but {kind}"
            )

    def _rows(self, table: Any, start: Mark) -> Iterator[TextPiece]:
        number, skip, total = 0, start.piece, max(table.metadata.num_rows, 1)
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if number + rows <= start.unit:
                number += rows
                continue
            for batch in table.iter_batches(ROWS, row_groups=[group], columns=[self.column]):
                if number + len(batch) <= start.unit:
                    number += len(batch)
                    continue
                for text in batch.column(0).to_pylist():
                    if number >= start.unit:
                        read = self.file.size * (number + 1) // total
                        place, after = Mark(0, number), Mark(0, number + 1)
                        yield from document_pieces(_encode(text), place, after, skip, read)
                        skip = 0
                    number += 1
