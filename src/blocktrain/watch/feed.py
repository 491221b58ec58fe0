"""The events of a run, numbered: appended to a log, and sent to listeners at once.

The log is for people: one JSON object a line, appended as things happen. A full disk does not stop
the run: events are dropped and counted. Readers skip kinds and lines that they do not know, so logs
of other versions stay readable.
"""

from __future__ import annotations

import errno
import json
import os
import re
import threading
import time
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from blocktrain.clock import Clock, SystemClock
from blocktrain.protocol.events import KINDS
from blocktrain.protocol.status import MAX_NOTICES

EVENTS = "events.jsonl"  # in the coordinator's folder
MAX_HISTORY = 5000  # events sent to a new listener; of frequent kinds only the newest
FREQUENT = ("update", "task", "refused", "notice")
MAX_BEHIND = 2000  # events that a listener may be behind
_PIECE = 1 << 16  # bytes read at once from the end of a log
_KIND = re.compile(r"[a-z]{1,20}\Z")
_HEAD = re.compile(rb'\{"seq": (\d{1,16}), "time": [^,"]+, "kind": "([a-z]+)"')


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

    def write(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Append an event; gives it back as it was written."""
        event = {
            "time": round(self._clock.time(), 3),
            "kind": kind,
            **event_fields(kind, **fields),
        }
        self.append(json.dumps(event).encode() + b"\n")
        return event

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
            if (newline := file.read(end - begins).rfind(b"\n")) >= 0:
                return begins + newline + 1
            end = begins
    return 0


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events of a log. Lines that cannot be parsed are skipped, such as one torn by a crash."""
    events = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError, RecursionError):
            event = json.loads(line)
            if isinstance(event, dict):
                events.append(event)
    return events


class Event(NamedTuple):
    """One event; the line is its JSON, without the line feed."""

    seq: int
    kind: str
    line: bytes

    @property
    def value(self) -> dict[str, Any]:
        """The line, parsed."""
        return json.loads(self.line)


def as_event(line: bytes) -> Event | None:
    """An event of a log, or None if the line is not an event."""
    line = line.rstrip()
    if (match := _HEAD.match(line)) and line.endswith(b"}"):
        return Event(int(match[1]), match[2].decode(), line)
    try:  # another program wrote it
        value = json.loads(line)
        seq, kind = value["seq"], value["kind"]
        return (
            Event(seq, kind, json.dumps(value).encode())
            if type(seq) is int and seq > 0 and _KIND.match(kind)
            else None
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


class History:
    """The positions of the events in a log: all rare ones, and the newest frequent ones."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seqs, self._places = array("Q"), array("Q")  # of rare events
        self._frequent: deque[tuple[int, int]] = deque(maxlen=MAX_HISTORY)
        self._frequent_count = 0  # frequent events that were ever noted
        self.last = 0  # seq

    def note(self, event: Event, place: int) -> None:
        """Index an event of the log."""
        self.last = event.seq
        if event.kind in FREQUENT:
            self._frequent_count += 1
            self._frequent.append((event.seq, place))
        else:
            self._seqs.append(event.seq)
            self._places.append(place)

    def scan(self) -> Iterator[Event]:
        """Index the whole log; gives every event."""
        place = 0
        with self._path.open("rb") as file:
            for line in file:
                event = as_event(line) if line.endswith(b"\n") else None
                if event is not None and event.seq > self.last:
                    self.note(event, place)
                    yield event
                place += len(line)

    def after(self, seq: int) -> tuple[list[int], int]:
        """(positions of the events after `seq` to send, how many are left out)."""
        first = bisect_right(self._seqs, seq)
        rare = list(zip(self._seqs[first:], self._places[first:], strict=True))
        frequent = [entry for entry in self._frequent if entry[0] > seq]
        count = len(frequent) if len(frequent) < len(self._frequent) else self._frequent_count
        newest = frequent[len(frequent) - min(len(frequent), max(0, MAX_HISTORY - len(rare))) :]
        return [place for _, place in sorted(rare + newest)], count - len(newest)

    def read(self, places: list[int]) -> Iterator[Event]:
        """The events at these positions; none if the log was removed."""
        with suppress(OSError), self._path.open("rb") as file:
            for place in places:
                file.seek(place)
                if (event := as_event(file.readline())) is not None:
                    yield event


class Listener:
    """The events that one reader has not taken yet.

    A reader that is too far behind is `closed` and gets no more.
    """

    def __init__(
        self, wake: Callable[[], None] = lambda: None, kinds: Container[str] | None = None
    ) -> None:
        self._wake, self._kinds = wake, kinds
        self._queue: list[Event] = []
        self._mutex = threading.Lock()
        self.closed = False

    def offer(self, event: Event) -> None:
        """Queue an event; called by the feed."""
        if self.closed or (self._kinds is not None and event.kind not in self._kinds):
            return
        with self._mutex:
            if len(self._queue) >= MAX_BEHIND:
                self.closed = True
                self._queue.clear()
            else:
                self._queue.append(event)
        self._wake()

    def take(self) -> list[Event]:
        """All events in the queue, which is empty afterwards."""
        with self._mutex:
            events, self._queue = self._queue, []
        return events


class Feed:
    """Numbers events, appends them to the log and sends them to listeners.

    A failing disk is counted, never raised.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._mutex = threading.Lock()
        self._listeners: list[Listener] = []
        self._log: EventLog | None = None
        self._history = History(path or Path())
        self._last = 0
        self.drop_count = 0  # events that are not in the log
        self.problem = ""  # why, for people
        self.notices: deque[dict[str, Any]] = deque(maxlen=MAX_NOTICES)  # the newest
        self.states: dict[str, str] = {}  # by worker: its last reported state
        self.scores: dict[str, float] = {}  # the newest, in nats per token
        self.bytes_per_token = 1.0
        self.scores_time: float | None = None  # when, in seconds since 1970
        self._path = path
        if path is not None:
            self._open(path)

    def _open(self, path: Path) -> None:
        try:
            self._log = EventLog(path)
            for event in self._history.scan():
                if event.kind in ("worker", "score", "notice"):
                    # An edited log must not keep the run from starting.
                    with suppress(ValueError, TypeError, AttributeError, KeyError):
                        self._remember(event.value)
        except OSError as error:
            self._drop(error)
        self._last = self._history.last

    def _remember(self, value: dict[str, Any]) -> None:
        if value["kind"] == "worker":
            self.states[value.get("worker", "")] = value.get("state", "")
        elif value["kind"] == "notice":
            self.notices.append(value)
        elif value["kind"] == "score":
            self.scores, self.scores_time = dict(value.get("scores", {})), float(value["time"])
            self.bytes_per_token = float(value.get("bytes_per_token", 1.0))

    def _drop(self, error: OSError) -> None:
        self.drop_count += 1
        self.problem = (
            f"cannot write {self._path}: {error.strerror or error};"
            " the run goes on, but its events are missing in this log"
        )

    @property
    def empty(self) -> bool:
        """Whether there was no event yet."""
        return self._last == 0

    def put(self, kind: str, **fields: Any) -> None:
        """Publish an event."""
        with self._mutex:
            self._last += 1
            moment = round(time.time(), 3)
            checked = event_fields(kind, **fields)
            value = {"seq": self._last, "time": moment, "kind": kind, **checked}
            event = Event(self._last, kind, json.dumps(value).encode())
            self._remember(value)
            self._store(event)
            for listener in self._listeners:
                listener.offer(event)
            self._remove_closed()

    def _store(self, event: Event) -> None:
        if self._log is None:
            self.drop_count += 1
            return
        try:
            self._history.note(event, self._log.append(event.line + b"\n"))
        except OSError as error:
            self._drop(error)

    def listen(self, listener: Listener, after: int = 0) -> tuple[list[int], int, int]:
        """Add a listener; gives (positions of the events it missed, how many are left out, last).

        A number above the last one comes from another log, so it counts as 0.
        """
        with self._mutex:
            self._remove_closed()
            self._listeners.append(listener)
            known = after if after <= self._last else 0
            return *self._history.after(known), self._last

    def _remove_closed(self) -> None:
        if any(listener.closed for listener in self._listeners):
            self._listeners = [listener for listener in self._listeners if not listener.closed]

    def read(self, places: list[int]) -> Iterator[Event]:
        """The events at places that `listen` gave."""
        return self._history.read(places)

    def close(self) -> None:
        """Close the log."""
        with self._mutex:
            if self._log is not None:
                self._log.close()
                self._log = None
