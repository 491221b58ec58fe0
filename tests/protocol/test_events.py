"""Events have one schema: writers are checked against it, and the page reads nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import blocktrain.web.pages
from blocktrain.protocol import ledger
from blocktrain.protocol.events import KINDS

FOLD = Path(blocktrain.web.pages.__file__).parent / "dashboard" / "fold.js"
EVERY = {"seq", "time", "kind"}  # of every stored event


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


def test_every_kind_of_ledger_entry_has_one_body() -> None:
    assert set(ledger.BODIES) == set(get_args(ledger.EntryKind))
    assert len(set(ledger.BODIES.values())) == len(ledger.BODIES)
