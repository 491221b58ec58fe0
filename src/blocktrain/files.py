"""Atomic writes: after a crash or a power loss a file has its old content or its new, whole.

A private file can be read by its owner alone, from its first byte on.

`FileSystem` names the single steps of such writes. The system's is one implementation; a simulated
one may lose what was not made durable.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

PIECE = 1 << 20  # bytes that are read from a file at a time


@contextmanager
def replace_file(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Another name to write under. Afterwards: fsync, rename, fsync of the folder."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if private:
            partial.unlink(missing_ok=True)  # of a process that was killed
            os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        yield partial
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_atomic(path: Path, content: bytes, *, private: bool = False) -> None:
    with replace_file(path, private=private) as partial:
        partial.write_bytes(content)


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for their owner alone."""
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class FileSystem(Protocol):
    """Files and folders, one step at a time. Every step may raise OSError."""

    def is_file(self, path: Path) -> bool: ...

    def size(self, path: Path) -> int: ...

    def read(self, path: Path) -> bytes: ...

    def pieces(self, path: Path, start: int) -> Iterator[bytes]:
        """The bytes from `start` on."""

    def find(self, folder: Path, pattern: str) -> list[Path]:
        """As `Path.glob`, in no order."""

    def create(self, folder: Path, pieces: Iterable[bytes]) -> Path:
        """A new file with a name of its own, or none. It is not durable yet."""

    def copy(self, source: Path, folder: Path) -> Path:
        """A new file with the bytes of a file of the system, linked to it where possible.

        Its content is durable.
        """

    def sync(self, path: Path) -> None:
        """Make a file's content durable."""

    def sync_folder(self, folder: Path) -> None:
        """Make the names in a folder durable."""

    def rename(self, path: Path, target: Path) -> None:
        """Also over another file."""

    def delete(self, path: Path) -> None:
        """Nothing, if there is no such file."""

    def make_folder(self, folder: Path) -> None:
        """Also those above it. Nothing, if it is there."""

    def free(self, folder: Path) -> int:
        """Bytes that its disk has left for this user."""

    def delete_tree(self, folder: Path) -> None:
        """A folder with all that is in it, as far as it can be deleted."""


class SystemFiles:
    """See `FileSystem`."""

    def is_file(self, path: Path) -> bool:
        return path.is_file()

    def size(self, path: Path) -> int:
        return path.stat().st_size

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def pieces(self, path: Path, start: int) -> Iterator[bytes]:
        with path.open("rb") as file:
            file.seek(start)
            while piece := file.read(PIECE):
                yield piece

    def find(self, folder: Path, pattern: str) -> list[Path]:
        return list(folder.glob(pattern))

    def create(self, folder: Path, pieces: Iterable[bytes]) -> Path:
        handle, name = tempfile.mkstemp(dir=folder)
        path = Path(name)
        try:
            with os.fdopen(handle, "wb") as out:
                for piece in pieces:
                    out.write(piece)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path

    def copy(self, source: Path, folder: Path) -> Path:
        path = folder / source.name
        path.unlink(missing_ok=True)
        try:
            os.link(source.resolve(), path)
        except FileNotFoundError:
            raise
        except OSError:  # another disk, or one without links
            shutil.copyfile(source, path)
            self.sync(path)
        return path

    def sync(self, path: Path) -> None:
        with path.open("rb") as written:
            os.fsync(written.fileno())

    def sync_folder(self, folder: Path) -> None:
        sync_folder(folder)

    def rename(self, path: Path, target: Path) -> None:
        path.replace(target)

    def delete(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def delete_tree(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def free(self, folder: Path) -> int:
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize
