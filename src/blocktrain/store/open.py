"""Which store an address means. Callers that use it do not depend on the kind of store.

PATH, file:///PATH    SQLite and blobs in a folder, which is made if it is not there
memory:               nothing on the disk, and gone with the process
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from blocktrain.errors import RunError
from blocktrain.store.blobs import FolderBlobReader
from blocktrain.store.contract import BlobReader, Store, StoreReader
from blocktrain.store.memory import MemoryStore
from blocktrain.store.sql import SqlReader, SqlStore

MEMORY = "memory:"


def open_store(address: str | Path, run_id: str | None = None) -> Store:
    """Open a store, or make a new one.

    Refused while another coordinator has it open, or if it holds another run than `run_id`.
    """
    if address == MEMORY:
        return MemoryStore(run_id=run_id)
    return SqlStore(_folder(address), run_id)


def read_store(address: str | Path) -> StoreReader:
    """A run as of its last commit. Takes no lock, and changes nothing."""
    if address == MEMORY:
        raise RunError("a store in memory is read by its own process alone")
    return SqlReader(_folder(address))


def read_blobs(address: str | Path) -> BlobReader:
    """The blobs of a run alone."""
    if address == MEMORY:
        raise RunError("a store in memory is read by its own process alone")
    return FolderBlobReader(_folder(address))


def _folder(address: str | Path) -> Path:
    if isinstance(address, Path) or "://" not in address:
        return Path(address)
    parts = urlsplit(address)
    if parts.scheme != "file" or parts.netloc:
        raise RunError(f"{address} is no address of a store; use a folder, file:///PATH or memory:")
    return Path(unquote(parts.path))
