"""The event log of a run: one JSON object a line, appended as things happen, readable while the run goes on."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import IO, Any


class EventLog:
    """Appends events to a file; every line carries the time and a kind."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("a", encoding="utf-8", buffering=1)
        if path.read_bytes()[-1:] not in (b"", b"\n"):  # a crash tore the last line: it must not take the next one with it
            self._file.write("\n")

    def write(self, kind: str, **fields: Any) -> None:
        """One line."""
        self._file.write(json.dumps({"time": round(time.time(), 3), "kind": kind, **fields}) + "\n")

    def close(self) -> None:
        """Nothing more will be written."""
        self._file.close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """All complete events; a last line cut off by a crash is left out."""
    events = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return events
