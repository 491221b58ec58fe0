"""A client of the event stream: its own connection, read in a thread."""

from __future__ import annotations

import http.client
import json
import threading
from typing import Any

from support.fake_worker import TOKEN
from support.waiting import PATIENCE, until


def get(
    url: str, path: str, token: str = TOKEN, source: str = "", **headers: str
) -> tuple[http.client.HTTPResponse, http.client.HTTPConnection]:
    """An answer; its body is not read yet. `source` is the address to come from."""
    host, port = url.removeprefix("http://").split(":")
    mine = (source, 0) if source else None
    line = http.client.HTTPConnection(host, int(port), timeout=PATIENCE, source_address=mine)
    bearer = {"Authorization": f"Bearer {token}"} if token else {}
    line.request(
        "GET",
        path,
        headers={**bearer, **{name.replace("_", "-"): value for name, value in headers.items()}},
    )
    return line.getresponse(), line


def fetch(
    url: str, path: str, token: str = TOKEN, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    answer, line = get(url, path, token, **headers)
    try:
        return (
            answer.status,
            {name.lower(): value for name, value in answer.getheaders()},
            answer.read(),
        )
    finally:
        line.close()


def parse(text: str) -> list[tuple[int | None, str, dict[str, Any]]]:
    """(id, event, data) of a whole stream, without comments."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(
            line.split(": ", 1) for line in block.splitlines() if line and not line.startswith(":")
        )
        if "event" in fields:
            found.append(
                (
                    int(fields["id"]) if "id" in fields else None,
                    fields["event"],
                    json.loads(fields["data"]),
                )
            )
    return found


class Reader:
    """Reads until it is closed, and keeps all events."""

    def __init__(self, url: str, path: str = "/v1/events", **headers: str) -> None:
        self.answer, self._line = get(url, path, **headers)
        self.told: list[tuple[int | None, str, dict[str, Any]]] = []
        self.ended = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        if self.answer.status == 200:
            self._thread.start()

    def _read(self) -> None:
        block: list[str] = []
        try:
            while line := self.answer.readline().decode():
                block.append(line)
                if line == "\n":
                    self.told += parse("".join(block))
                    block = []
        except (OSError, ValueError, AttributeError, http.client.HTTPException):
            pass
        self.ended = True

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The data of all events of one kind."""
        return [data for _, event, data in list(self.told) if event == kind]

    def wait(self, kind: str, count: int = 1, **fields: Any) -> dict[str, Any]:
        """The last of so many events of a kind with these fields."""

        def enough() -> list[dict[str, Any]]:
            found = [
                data
                for data in self.of(kind)
                if all(data.get(name) == value for name, value in fields.items())
            ]
            return found if len(found) >= count else []

        return until(enough, f"{count} x {kind} {fields}")[count - 1]

    def close(self) -> None:
        if self._line.sock is not None:
            self._line.sock.shutdown(2)
        self._line.close()
        self._thread.join(5)
