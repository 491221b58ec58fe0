"""Files of a corpus as streams of bytes: on this machine or elsewhere, compressed or not."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from backports import zstd

from blocktrain.errors import CorpusError

LARGEST_WINDOW = 27  # log2 of the bytes that a zstd stream may refer back to, and so of the memory
COMPRESSIONS = (".gz", ".zst")


class StoredFile(Protocol):
    """A file, wherever it is."""

    @property
    def name(self) -> str:
        """Its path, for its kind and for messages."""

    @property
    def identity(self) -> tuple[str, ...]:
        """Changes when the content may have changed."""

    @property
    def size(self) -> int:
        """Its bytes, as they are stored."""

    def open(self) -> BinaryIO:
        """Its bytes from the beginning; they can be sought."""


@dataclass(frozen=True)
class LocalFile:
    """A file on this machine."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def identity(self) -> tuple[str, ...]:
        try:
            stat = self.path.stat()
        except OSError as error:
            raise unreadable(self.path, error) from None
        return str(self.path.resolve()), str(stat.st_size), str(stat.st_mtime_ns)

    @property
    def size(self) -> int:
        return int(self.identity[1])

    def open(self) -> BinaryIO:
        return self.path.open("rb")


def compression_of(name: str) -> str:
    """.gz, .zst, or nothing."""
    return next((suffix for suffix in COMPRESSIONS if name.lower().endswith(suffix)), "")


@dataclass
class Unpacked:
    """What a file holds, and how far the stored file was read for it."""

    stream: BinaryIO
    stored: BinaryIO

    @property
    def read(self) -> int:
        return self.stored.tell()


@contextmanager
def unpack_file(file: StoredFile) -> Iterator[Unpacked]:
    """The content of a file without its compression. A bomb is streamed like any other file."""
    kind = compression_of(file.name)
    try:
        with file.open() as stored:
            if kind == ".gz":
                yield Unpacked(gzip.GzipFile(fileobj=stored), stored)  # type: ignore[arg-type]
            elif kind == ".zst":
                options = {int(zstd.DecompressionParameter.window_log_max): LARGEST_WINDOW}
                yield Unpacked(zstd.ZstdFile(stored, options=options), stored)  # type: ignore[arg-type]
            else:
                yield Unpacked(stored, stored)
    except (gzip.BadGzipFile, zlib.error, zstd.ZstdError, EOFError) as error:
        what = "gzip" if kind == ".gz" else "zstd"
        reason = " ".join(str(error).split())
        if "too much memory" in reason:
            raise CorpusError(
                f"{file.name} needs more than {1 << LARGEST_WINDOW - 20} MiB to be decompressed; "
                "compress it again without --long or --ultra"
            ) from None
        raise CorpusError(
            f"{file.name} is damaged or no {what} file ({reason}); fetch or compress it again"
        ) from None
    except OSError as error:
        raise unreadable(file.name, error) from None


def unreadable(name: object, error: OSError) -> CorpusError:
    return CorpusError(f"cannot read {name}: {error.strerror or error}")
