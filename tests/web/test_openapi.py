"""The description of a coordinator's calls is whole, and a real coordinator keeps to it."""

from __future__ import annotations

import json
from pathlib import Path

import httpx2
from jsonschema_rs import Draft202012Validator

from blocktrain.protocol.calls import CALLS, OPENAPI, WATCH_CALLS
from blocktrain.watch.server import Listen, serve_coordinator
from blocktrain.web.openapi import describe_calls
from support.conformance import try_operations
from support.fake_worker import OPERATOR, TOKEN, beginning, snapshot
from support.protocol_samples import MESSAGES

SENT_FOR_EVER = ("events",)


def test_a_coordinator_answers_as_it_is_described(tmp_path: Path) -> None:
    with (
        beginning(tmp_path) as coordinator,
        serve_coordinator(coordinator, Listen(token=TOKEN, operator_token=OPERATOR)) as url,
    ):
        described = httpx2.get(f"{url}{OPENAPI.path}", timeout=120).json()
        before = snapshot(coordinator)
        headers = {"Authorization": f"Bearer {OPERATOR}"}
        seen = try_operations(described, url, headers, skip=SENT_FOR_EVER)
        assert snapshot(coordinator) == before, "nobody has joined, or sent anything"
    assert seen.keys() == {call.name for call in (*CALLS, *WATCH_CALLS)} - set(SENT_FOR_EVER)
    assert seen["status"] == seen["health"] == seen["manifest"] == {200}
    assert 400 in seen["submit"] and 400 in seen["join"] and 200 in seen["ledger"]


def test_messages_fit_their_descriptions() -> None:
    described = json.loads(describe_calls((*CALLS, *WATCH_CALLS)))
    schemas = described["components"]["schemas"]
    fitting = set()
    for message in MESSAGES:
        name = type(message).__name__
        if name in schemas:
            root = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}}
            Draft202012Validator(root).validate(json.loads(message.model_dump_json()))
            fitting.add(name)
    kinds = {kind.__name__ for call in CALLS for kind in (call.request, call.reply) if kind}
    assert kinds <= fitting
