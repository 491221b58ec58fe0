"""Keys of the workers of one machine: each running worker has one of its own, and finds it again at its next start."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blocktrain.errors import IdentityError
from blocktrain.protocol.identity import Identity, open_identity

MAX_SLOTS = 1024


@contextmanager
def own_identity(cache: Path) -> Iterator[Identity]:
    """The first key under cache/identities that no other process uses, as long as the block lasts; made first if need be."""
    folder = cache / "identities"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise IdentityError(
            f"cannot write {folder}: {error.strerror or error}; name another folder with --cache"
        ) from None
    for slot in range(MAX_SLOTS):
        with (folder / f"{slot}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield open_identity(folder / f"{slot}.pem")
            return
    raise IdentityError(
        f"{MAX_SLOTS} workers use {folder} already; name another folder with --cache"
    )
