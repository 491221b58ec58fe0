"""Atomic writes: after a crash or a power loss a file has its old content or its new, whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Another name to write under. Afterwards: fsync, rename, fsync of the folder."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_atomic(path: Path, content: bytes) -> None:
    with replace_file(path) as partial:
        partial.write_bytes(content)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
