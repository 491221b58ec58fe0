"""Events have one schema: writers are checked against it, and the page reads nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

import blocktrain.web.pages
from blocktrain.clock import SimulatedClock
from blocktrain.protocol import ledger
from blocktrain.protocol.events import KINDS, EventLog, event_fields, read_events

FOLD = Path(blocktrain.web.pages.__file__).parent / "dashboard" / "fold.js"
EVERY = {"seq", "time", "kind"}  # of every stored event


def test_an_event_is_checked_against_its_kind() -> None:
    assert event_fields("refused", code="busy", count=2) == {"code": "busy", "count": 2}
    with pytest.raises(ValidationError):
        event_fields("refused", cod="busy")
    with pytest.raises(ValidationError):
        event_fields("worker", state="asleep")
    with pytest.raises(KeyError):
        event_fields("dance")


def test_the_page_reads_only_fields_of_the_schema() -> None:
    table = FOLD.read_text().split("const FOLDS = {")[1].split("\n};")[0]
    folds = re.findall(r"\n  (\w+)\(state, e\) \{\n(.*?)\n  \},", table, re.S)
    assert {name for name, _ in folds} >= {"run", "worker", "update", "version", "score"}
    for name, code in folds:
        if name == "status":  # the message of GET /v1/status
            continue
        used = set(re.findall(r"\be\.(\w+)", code)) - EVERY
        # Budgets are in the events of old logs only.
        assert used <= set(KINDS[name].model_fields) | {"rounds", "tokens"}, name


def test_a_log_of_another_version_stays_readable(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"time": 1.0, "kind": "dance", "more": 1}\n{"torn')
    log = EventLog(path, SimulatedClock(now=5.0, epoch=100.0))
    log.write("step", block=1, step=2, loss=0.5)
    log.close()
    first, second = read_events(path)
    assert first["kind"] == "dance"
    assert second == {"time": 105.0, "kind": "step", "block": 1, "step": 2, "loss": 0.5}
    assert json.loads(path.read_text().splitlines()[1]) == second


def test_every_kind_of_ledger_entry_has_one_body() -> None:
    assert set(ledger.BODIES) == set(get_args(ledger.Kind))
    assert len(set(ledger.BODIES.values())) == len(ledger.BODIES)
