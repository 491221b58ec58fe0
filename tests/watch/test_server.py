"""A coordinator as it runs: when a start counts, and what the table of calls serves."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from blocktrain.errors import ConfigError
from blocktrain.protocol import calls
from blocktrain.watch.feed import EVENTS, read_events
from blocktrain.watch.server import Listen, Server, open_coordinator, serve_coordinator
from support.fake_worker import OPERATOR, TOKEN, begin, beginning, whole_ledger


def kinds(folder: Path) -> list[str]:
    return [event["kind"] for event in read_events(folder / EVENTS)]


def test_a_refused_start_is_no_restart(tmp_path: Path) -> None:
    begin(tmp_path).close()
    before = kinds(tmp_path)
    with beginning(tmp_path / "other") as other, serve_coordinator(other, Listen()) as url:
        taken = int(url.rpartition(":")[2])
        refused = open_coordinator(tmp_path)
        with pytest.raises(ConfigError, match="cannot listen"):
            Server(refused, Listen(port=taken))
        assert refused.ready, "the run was there"
        refused.close()
    assert kinds(tmp_path) == before
    again = open_coordinator(tmp_path)
    starts = [entry for entry in whole_ledger(again) if entry.kind == "start"]
    again.close()
    assert len(starts) == 2, "the first one, and the one that answered a call"
    assert kinds(tmp_path).count("run") == before.count("run") + 1


def test_every_call_of_the_table_has_a_route_and_its_guard(tmp_path: Path) -> None:
    with (
        beginning(tmp_path) as coordinator,
        serve_coordinator(coordinator, Listen(token=TOKEN, operator_token=OPERATOR)) as url,
    ):
        for call in (*calls.CALLS, *calls.WATCH_CALLS):
            path = call.path.format(task=1, index=0, name="0" * 64)
            answer = httpx2.request(call.method, url + path, timeout=60)
            assert answer.status_code == (200 if call.needs == "nothing" else 401), call
            member = {"Authorization": f"Bearer {TOKEN}"}
            path += "?follow=0" if call is calls.EVENTS else ""
            answer = httpx2.request(call.method, url + path, headers=member, timeout=60)
            if call.needs == "operator":
                assert answer.status_code == 401
            elif answer.status_code == 404:  # no such blob, no such task: but the call is there
                assert "/v1/" not in answer.json()["sentence"], call
            if answer.status_code == 200:
                assert answer.headers["content-type"].startswith(call.content), call
        names = {call.name for call in calls.CALLS}
        assert {name for name in vars(calls.Calls) if not name.startswith("_")} <= names
