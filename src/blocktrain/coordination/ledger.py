"""The append-only record: entries of canonical JSON, each naming the hash of the one before it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from blocktrain.errors import Damaged

GENESIS = "0" * 64


def canonical(value: Any) -> str:
    """The one way to write a JSON value: sorted keys, no spaces, ASCII, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


@dataclass(frozen=True)
class Note:
    """What is to be entered: a kind and a JSON object."""

    kind: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One line of the ledger."""

    seq: int  # from 1
    kind: str
    body: str  # canonical JSON
    previous: str
    hash: str

    @property
    def value(self) -> dict[str, Any]:
        """The body, parsed."""
        return json.loads(self.body)


def entry_hash(seq: int, kind: str, body: str, previous: str) -> str:
    """sha256 of the canonical JSON list [seq, kind, previous, body], the body being a string in it."""
    return hashlib.sha256(canonical([seq, kind, previous, body]).encode()).hexdigest()


def link(previous: Entry | None, note: Note) -> Entry:
    """The entry that follows."""
    seq, head = (previous.seq + 1, previous.hash) if previous else (1, GENESIS)
    body = canonical(note.body)
    return Entry(seq, note.kind, body, head, entry_hash(seq, note.kind, body, head))


def verify(entries: Iterable[Entry], previous: Entry | None = None) -> Entry | None:
    """The last entry, after every number, link and hash was found right."""
    for entry in entries:
        seq, head = (previous.seq + 1, previous.hash) if previous else (1, GENESIS)
        if entry.seq != seq or entry.previous != head or entry.hash != entry_hash(seq, entry.kind, entry.body, head):
            raise Damaged(f"the ledger is broken at entry {seq}: it was changed or lost; restore a backup")
        previous = entry
    return previous
