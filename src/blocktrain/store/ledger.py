"""The append-only record: entries of canonical JSON, each naming the hash of the one before it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from blocktrain.errors import Damaged
from blocktrain.protocol.identity import canonical_json as canonical
from blocktrain.protocol.ledger import BEGINNING as GENESIS
from blocktrain.protocol.ledger import entry_hash

__all__ = ["GENESIS", "Entry", "Note", "canonical", "entry_hash", "link", "verify"]


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


def link(previous: Entry | None, note: Note) -> Entry:
    """The entry that follows."""
    seq, head = (previous.seq + 1, previous.hash) if previous else (1, GENESIS)
    body = canonical(note.body)
    return Entry(seq, note.kind, body, head, entry_hash(seq, note.kind, body, head))


def verify(entries: Iterable[Entry], previous: Entry | None = None) -> Entry | None:
    """The last entry, after every number, link and hash was found right."""
    for entry in entries:
        seq, head = (previous.seq + 1, previous.hash) if previous else (1, GENESIS)
        if (
            entry.seq != seq
            or entry.previous != head
            or entry.hash != entry_hash(seq, entry.kind, entry.body, head)
        ):
            raise Damaged(
                f"the ledger is broken at entry {seq}: it was changed or lost; restore a backup"
            )
        previous = entry
    return previous
