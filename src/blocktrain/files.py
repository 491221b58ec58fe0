"""Atomic writes: after a crash or a power loss a file has its old content or its new, whole.

A private file can be read by its owner alone, from its first byte on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
