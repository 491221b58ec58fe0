"""Events: what happens in a run, for people, pages and reports.

One schema for all who write or read them. A log is one JSON object a line, appended as things
happen. Readers skip kinds and lines that they do not know, so logs of other versions stay readable.
"""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from blocktrain.clock import Clock, SystemClock

_PIECE = 1 << 16


class RunEvent(BaseModel):
    """Fields have defaults: only those that were given are written."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RunStarted(RunEvent):
    """A coordinator took the run over."""

    run: str = ""
    fingerprint: str = ""
    corpus: str = ""
    blocks: int = 0
    fusion: int | None = None
    """The block that fuses the others."""
    steps: int = 0
    """Of each block."""
    compose: str = ""
    compression: str = ""
    task_seconds: float = 0.0
    protocol: int = 0
    restart: bool = False


class WorkerChanged(RunEvent):
    worker: str = ""
    name: str = ""
    device: str = ""
    state: Literal["joined", "back", "left", "lost", "kicked"] = "joined"
    reason: str = ""


class TaskLeased(RunEvent):
    worker: str = ""
    block: int = 0
    task: int = 0
    base: int = 0
    steps: int = 0
    deadline: float | None = None
    """Of the round, in seconds since 1970."""
    target: int = 0
    """Updates that close the round."""


class UpdateAccepted(RunEvent):
    worker: str = ""
    block: int = 0
    task: int = 0
    base: int = 0
    version: int = 0
    """The block's version when the update came."""
    staleness: int = 0
    """Versions that were published since the base."""
    weight: float = 0.0
    steps: int = 0
    tokens: int = 0
    bytes: int = 0
    loss_before: float = 0.0
    loss_after: float = 0.0
    seconds: float = 0.0
    sentence: str = ""


class RequestRefused(RunEvent):
    """Refusals with one code and worker within a second are one event."""

    code: str = ""
    sentence: str = ""
    worker: str = ""
    block: int = 0
    count: int = 1


class RoundChanged(RunEvent):
    """A round that made no version, or a lease of it that expired."""

    block: int = 0
    version: int = 0
    outcome: Literal["extended", "empty", "expired"] = "empty"
    deadline: float | None = None
    reason: str = ""
    worker: str = ""
    task: int = 0


class VersionPublished(RunEvent):
    block: int = 0
    version: int = 0
    steps: int = 0
    tokens: int = 0
    loss: float | None = None
    updates: int = 0
    clipped: int = 0
    dropped: dict[str, str] = Field(default_factory=dict)
    """Updates that could not be merged, and why."""
    reason: str = ""
    bytes_in: int = 0
    bytes_out: int = 0
    weights: str = ""
    length: int = 0


class VersionsScored(RunEvent):
    scores: dict[str, float] = Field(default_factory=dict)
    """Cross entropy on the valid part, by what was scored: block-1, pool, fused."""
    versions: dict[str, int] = Field(default_factory=dict)
    features: dict[str, int] = Field(default_factory=dict)
    valid_bytes: int = 0
    seconds: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0


class RunFinished(RunEvent):
    reason: str = ""


class TrainingStarted(RunEvent):
    """`train` began, or went on."""

    fingerprint: str = ""
    blocks: int = 0
    steps: int = 0


class StepDone(RunEvent):
    """Progress of a block in `train`; the loss is a mean since the last one."""

    block: int | str = 0
    step: int = 0
    loss: float = 0.0


class BlockTrained(RunEvent):
    block: int | str = 0
    step: int = 0
    seconds: float = 0.0
    peak_mb: float | None = None


class StateLost(RunEvent):
    """A saved optimizer could not be read; training went on without it."""

    block: int | str = 0
    task: int | None = None


KINDS: dict[str, type[RunEvent]] = {
    "run": RunStarted,
    "worker": WorkerChanged,
    "task": TaskLeased,
    "update": UpdateAccepted,
    "refused": RequestRefused,
    "round": RoundChanged,
    "version": VersionPublished,
    "score": VersionsScored,
    "finish": RunFinished,
    "start": TrainingStarted,
    "step": StepDone,
    "trained": BlockTrained,
    "state_lost": StateLost,
}


def event_fields(kind: str, **fields: Any) -> dict[str, Any]:
    """The fields of an event, checked against its kind."""
    return KINDS[kind](**fields).model_dump(mode="python", exclude_unset=True)


class EventLog:
    """Appends events to a file; every line carries the time and a kind."""

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._file: IO[bytes] = path.open("ab", buffering=0)
        self._size = _whole_lines(path)
        # A crash may have torn the last line. It must not damage the next one too.
        os.ftruncate(self._file.fileno(), self._size)

    def write(self, kind: str, **fields: Any) -> None:
        event = {
            "time": round(self._clock.time(), 3),
            "kind": kind,
            **event_fields(kind, **fields),
        }
        self.append(json.dumps(event).encode() + b"\n")

    def append(self, line: bytes) -> int:
        """A whole line or, with an OSError, nothing of it; gives the position of its start."""
        start = self._size
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file.fileno(), start)
            raise
        self._size += len(line)
        return start

    def close(self) -> None:
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
    """All events of a log. Lines that are none are skipped, such as one torn by a crash."""
    events = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError, RecursionError):
            event = json.loads(line)
            if isinstance(event, dict):
                events.append(event)
    return events
