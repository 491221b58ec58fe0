"""The event log of a run: one JSON object a line, appended as things happen, readable while the run goes on."""

from __future__ import annotations

import errno
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

_PIECE = 1 << 16


class EventLog:
    """Appends events to a file; every line carries the time and a kind."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("ab", buffering=0)
        self._size = _whole_lines(path)
        os.ftruncate(
            self._file.fileno(), self._size
        )  # a crash tore the last line: it must not take the next one with it

    def write(self, kind: str, **fields: Any) -> None:
        """One line."""
        self.append(
            json.dumps({"time": round(time.time(), 3), "kind": kind, **fields}).encode() + b"\n"
        )

    def append(self, line: bytes) -> int:
        """A whole line or, with an OSError, nothing of it; gives the place where it begins."""
        begins = self._size
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file.fileno(), begins)
            raise
        self._size += len(line)
        return begins

    def close(self) -> None:
        """Nothing more will be written."""
        self._file.close()


def _whole_lines(path: Path) -> int:
    """Where the last complete line ends."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            begins = max(0, end - _PIECE)
            file.seek(begins)
            if (found := file.read(end - begins).rfind(b"\n")) >= 0:
                return begins + found + 1
            end = begins
    return 0


def read_events(path: Path) -> list[dict[str, Any]]:
    """All complete events; what is none is left out, such as a last line cut off by a crash."""
    events = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError, RecursionError):
            event = json.loads(line)
            if isinstance(event, dict):
                events.append(event)
    return events
