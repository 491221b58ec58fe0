"""The audit: an honest run passes, also trained again; every planted fault is found and named."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from blocktrain.audit import recompute
from blocktrain.audit.audit import audit
from blocktrain.audit.evidence import EvidenceSource, RemoteSource, RunRecord, open_folder
from blocktrain.coordinator.merging.merge import MergeContext, MergeOptions, Update, merge
from blocktrain.errors import RunError
from blocktrain.learning.corpus.source import Source as CorpusSource
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.protocol import compression, ledger, tensors
from blocktrain.protocol.identity import canonical_json
from blocktrain.protocol.messages import Blob, Manifest, Submission
from blocktrain.protocol.refusals import Refused
from blocktrain.runs.folder import create_run
from blocktrain.runs.local import train_blocks
from blocktrain.runs.prepare import prepare
from blocktrain.runs.reference import TrainingPlan
from blocktrain.watch.server import WatchedCoordinator
from blocktrain.web.client import LocalClient
from support.manual_worker import CONFIG, IDENTITIES, play
from support.protocol_samples import FACTS

Body = dict[str, Any]
Change = Callable[[list[tuple[str, Body]]], None]


RULES = {
    "average": {"compression": "none", "version_compression": "none", "outer": "average"},
    "nesterov": {"compression": "int4", "version_compression": "none", "outer": "nesterov"},
    "deltas": {"compression": "int4", "version_compression": "int2"},
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, corpus_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    prepare(CONFIG, CorpusSource(str(corpus_folder), None, folder), folder)
    return folder


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, corpus: TokenCorpus, prepared: Path
) -> Iterator[dict[str, WatchedCoordinator]]:
    found = {
        name: play(tmp_path_factory.mktemp(name), corpus, prepared, **policy)
        for name, policy in RULES.items()
    }
    yield found
    for coordinator in found.values():
        coordinator.close()


@pytest.fixture
def folder(runs: dict[str, WatchedCoordinator]) -> Path:
    return Path(runs["nesterov"].run.store.address)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A folder to be damaged."""
    return shutil.copytree(folder, tmp_path / "copy")


@pytest.mark.parametrize("outer", RULES)
def test_honest_run_passes_from_its_folder_and_through_its_calls(
    runs: dict[str, WatchedCoordinator], outer: str, tmp_path: Path
) -> None:
    run = runs[outer]
    seen: list[tuple[str, int, int]] = []
    found = audit(
        open_folder(Path(run.run.store.address)), progress=lambda *step: seen.append(step)
    )
    assert found.findings == () and found.ok
    assert (found.updates, found.versions, found.pending, found.dropped, found.retrained) == (
        9,
        4,
        1,
        0,
        0,
    )
    assert ("entries", found.entries, found.entries) in seen
    assert (
        found.contributions == run.run.store.contributions()
        and sum(n for n, _ in found.contributions.values()) == 8
    )
    through = audit(RemoteSource(LocalClient(run), tmp_path))
    assert through == found, "also without the payload that still waits, which nobody may read yet"
    told = json.loads(json.dumps(found.as_dict()))
    assert told["ok"] and told["head"] == run.manifest().head and len(told["contributions"]) == 3


@pytest.mark.parametrize("outer", RULES)
def test_honest_run_trains_again_to_the_same_bytes(
    runs: dict[str, WatchedCoordinator], outer: str
) -> None:
    torch.set_num_threads(2)
    found = audit(open_folder(Path(runs[outer].run.store.address)), retrain=True)
    assert found.findings == () and found.retrained == found.updates == 9
    assert torch.get_num_threads() == 2


def test_a_folder_of_train_is_audited(tmp_path: Path, corpus_folder: Path) -> None:
    run = create_run(tmp_path / "run", CONFIG, str(corpus_folder))
    train_blocks(
        TrainingPlan(run, CONFIG, CorpusSource(str(corpus_folder), None, tmp_path)), lambda *_: None
    )
    found = audit(open_folder(run.folder), retrain=True)
    assert found.ok and found.versions == found.retrained == CONFIG.blocks


def test_a_closed_folder_stays_as_it_is(copy: Path) -> None:
    with sqlite3.connect(copy / "run.sqlite") as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    before = sorted(path.relative_to(copy) for path in copy.rglob("*"))
    assert not (copy / "run.sqlite-wal").exists() and audit(open_folder(copy)).ok
    assert sorted(path.relative_to(copy) for path in copy.rglob("*")) == before
    with pytest.raises(RunError, match="holds no run"):
        audit(open_folder(copy / "blobs"))


@dataclass
class Forged:
    """A rewritten ledger with a valid chain, over the blobs of an honest run."""

    folder: EvidenceSource
    told: list[tuple[str, Body]]
    whole: ClassVar[bool] = True

    def record(self) -> RunRecord:
        entries: list[ledger.LedgerEntry] = []
        for seq, (kind, value) in enumerate(self.told, start=1):
            previous, body = (
                entries[-1].hash if entries else ledger.BEGINNING,
                canonical_json(value),
            )
            digest = ledger.entry_hash(seq, kind, body, previous)
            entries.append(
                ledger.LedgerEntry(seq=seq, kind=kind, body=body, previous=previous, hash=digest)  # type: ignore[arg-type]
            )
        return RunRecord(tuple(entries))

    def blob(self, blob: Blob) -> bytes:
        return self.folder.blob(blob)

    def verify(self, blob: Blob) -> None:
        self.folder.verify(blob)


def forge(folder: Path, *changes: Change) -> Forged:
    source = open_folder(folder)
    told: list[tuple[str, Body]] = [
        (entry.kind, json.loads(entry.body)) for entry in source.record().entries
    ]
    for change in changes:
        change(told)
    return Forged(source, told)


def names(source: EvidenceSource, *, retrain: bool = False) -> set[str]:
    found = audit(source, retrain=retrain)
    assert found.ok == (not found.findings)
    return {finding.name for finding in found.findings}


def nth(told: list[tuple[str, Body]], kind: str, number: int = 0) -> Body:
    """The body of an entry of a kind; versions are counted without those that a run begins with."""
    return [
        body for found, body in told if found == kind and (kind != "version" or body["version"])
    ][number]


def put(kind: str, number: int, *path: Any) -> Change:
    """Set a field deep in a body: the last of the path is the value."""

    def change(told: list[tuple[str, Body]]) -> None:
        body = nth(told, kind, number)
        for step in path[:-2]:
            body = body[step]
        body[path[-2]] = path[-1]

    return change


def without(kind: str, number: int = 0) -> Change:
    return lambda told: told.remove((kind, nth(told, kind, number)))


def resign(told: list[tuple[str, Body]]) -> None:
    """Every submission is signed again by its worker: it said so itself."""
    for kind, body in told:
        if kind == "update":
            said = Submission.model_validate_json(json.dumps(body["submission"]))
            signed = next(me for me in IDENTITIES.values() if me.worker == said.worker).sign(said)
            body["submission"] = signed.model_dump(mode="json")


def leave_out(told: list[tuple[str, Body]]) -> None:
    """A version that keeps quiet about one of its two updates, and is consistent otherwise."""
    made, update = nth(told, "version"), nth(told, "update")
    made["parts"] = [
        {**part, "share": 1.0} for part in made["parts"] if part["update"] != update["id"]
    ]
    made["applied"], made["norms"] = [part["update"] for part in made["parts"]], made["norms"][:1]


def use_again(told: list[tuple[str, Body]]) -> None:
    nth(told, "version", 1)["parts"].append(nth(told, "version")["parts"][0])


def use_twice(told: list[tuple[str, Body]]) -> None:
    nth(told, "version")["parts"].append(nth(told, "version")["parts"][0])


def use_unknown(told: list[tuple[str, Body]]) -> None:
    nth(told, "version")["parts"][0]["update"] = "0" * 64


def use_of_another_block(told: list[tuple[str, Body]]) -> None:
    nth(told, "version", 3)["parts"].append(nth(told, "version")["parts"][0])


def answer_twice(told: list[tuple[str, Body]]) -> None:
    where = told.index(("update", nth(told, "update", 1)))
    told.insert(where, ("update", json.loads(json.dumps(nth(told, "update")))))


def lease_again(told: list[tuple[str, Body]]) -> None:
    where = told.index(("update", nth(told, "update")))
    told.insert(
        where, ("lease", {**nth(told, "lease"), "fence": 2, "worker": IDENTITIES["c"].worker})
    )


def read_again(told: list[tuple[str, Body]]) -> None:
    """Two tasks of a block get the same batches."""
    orders = [body["order"] for kind, body in told if kind in ("lease", "update")]
    one, other = sorted({o["task"] for o in orders if o["block"] == orders[0]["block"]})[:2]
    same = next(order for order in orders if order["task"] == one)
    for order in orders:
        if order["task"] == other:
            order["position"], order["shards"] = same["position"], same["shards"]


def reverse(told: list[tuple[str, Body]]) -> None:
    nth(told, "version")["parts"].reverse()


def say_other_tokens(told: list[tuple[str, Body]]) -> None:
    body = nth(told, "update")
    body["tokens"] = body["submission"]["tokens"] = 3 * body["tokens"]


def kick_first(told: list[tuple[str, Body]]) -> None:
    told.insert(
        told.index(("update", nth(told, "update"))),
        ("kick", {"worker": nth(told, "update")["worker"], "reason": ""}),
    )


ANOTHER = {
    "weights",
    "momentum",
    "rule",
    "contributions",
}  # what a version shows that is made of something else
FAULTS: dict[str, tuple[Change, set[str]]] = {
    "an update left out": (leave_out, {"lost", *ANOTHER}),
    "an update used again": (use_again, {"doubled"}),
    "an update twice in a version": (use_twice, {"doubled"}),
    "an update that nobody sent": (use_unknown, {"unexpected", "lost"}),
    "an update of another block": (use_of_another_block, {"unexpected"}),
    "other shares": (
        put("version", 0, "parts", 0, "share", 0.75),
        {"share", "weights", "momentum"},
    ),
    "an update made smaller": (
        put("version", 0, "parts", 0, "scale", 0.5),
        {"weights", "momentum", "rule"},
    ),
    "another order of adding": (reverse, {"share", "rule"}),
    "another outer step": (put("version", 0, "outer_learning_rate", 0.1), {"weights", "rule"}),
    "other weights": (
        put("version", 3, "weights", "sha256", "0" * 64),
        {"weights", "blob", "lease"},
    ),
    "other momentum": (put("version", 3, "momentum", None), {"momentum"}),
    "a version that is missing": (
        without("version", 1),
        {"sequence", "lost", "lease", "weight", *ANOTHER},
    ),
    "another parent": (put("version", 1, "parent", "0" * 64), {"sequence"}),
    "more tokens than were sent": (put("version", 3, "tokens", 10**6), {"contributions"}),
    "other features": (put("version", 3, "features", []), {"update"}),
    "a changed submission": (put("update", 0, "submission", "loss_after", 0.5), {"signature"}),
    "another id": (put("update", 8, "id", "0" * 64), {"update"}),
    "another order": (put("update", 0, "order", "position", 7), {"lease"}),
    "tokens that were not trained": (
        say_other_tokens,
        {"signature", "update", "share", "contributions"},
    ),
    "more weight than staleness gives": (put("update", 2, "weight", 0.5), {"weight", "share"}),
    "less staleness": (put("update", 4, "staleness", 1), {"weight"}),
    "a worker that never joined": (without("join", 0), {"join"}),
    "a worker that was removed": (kick_first, {"join"}),
    "another key": (put("join", 0, "public_key", "1" * 64), {"join", "signature"}),
    "a task that nobody gave": (without("lease", 0), {"lease", "corpus"}),
    "a task that was given again": (lease_again, {"fence"}),
    "a task with other weights": (
        put("lease", 0, "order", "weights", "sha256", "0" * 64),
        {"lease"},
    ),
    "a task that is answered twice": (answer_twice, {"twice"}),
    "an entry without a field": (
        lambda told: nth(told, "lease").pop("fence"),
        {"malformed", "lease", "corpus"},
    ),
    "a task with other shards": (
        put("lease", 0, "order", "shards", [{"sha256": "0" * 64, "length": 1}]),
        {"corpus", "lease"},
    ),
    "a task that leaves text out": (put("lease", 0, "order", "position", 9), {"corpus", "lease"}),
    "text that is read twice": (read_again, {"corpus"}),
    "another index": (put("run", 0, "corpus", "index", "sha256", "0" * 64), {"blob"}),
    "another fingerprint": (put("run", 0, "fingerprint", "0" * 64), {"run"}),
    "no beginning": (without("run"), {"run", "sequence"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found(folder: Path, fault: str) -> None:
    change, expected = FAULTS[fault]
    assert names(forge(folder, change)) == expected


def swap_deltas(told: list[tuple[str, Body]]) -> None:
    """The first two versions of a block with each other's delta."""
    made = [body for kind, body in told if kind == "version" and body["delta"]]
    one, other = [body for body in made if body["block"] == made[0]["block"]][:2]
    one["delta"], other["delta"] = other["delta"], one["delta"]


def change_version(name: str, value: Any) -> Change:
    def change(told: list[tuple[str, Body]]) -> None:
        next(body for kind, body in told if kind == "version" and body["delta"])[name] = value

    return change


DELTA_FAULTS: dict[str, tuple[Change, set[str]]] = {
    "deltas of other versions": (swap_deltas, {"delta"}),
    "no delta": (change_version("delta", None), {"delta"}),
    "a residual that was dropped": (change_version("residual", None), {"residual"}),
    "rules without deltas": (put("run", 0, "policy", "version_compression", "none"), {"delta"}),
}


@pytest.mark.parametrize("fault", DELTA_FAULTS)
def test_every_fault_of_a_delta_is_found(runs: dict[str, WatchedCoordinator], fault: str) -> None:
    change, expected = DELTA_FAULTS[fault]
    assert expected <= names(forge(Path(runs["deltas"].run.store.address), change))


def test_a_damaged_shard_is_found(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    shard = next((tmp_path / "copy" / "blobs" / "linked").iterdir())
    content = shard.read_bytes()
    for wrong in (content[::-1], content[:-1]):
        shard.write_bytes(wrong)
        found = audit(open_folder(tmp_path / "copy")).findings
        assert [finding.name for finding in found] == ["corpus"]
        assert f"shard {shard.name} of the corpus is missing or damaged" in found[0].sentence


def test_an_entry_that_repeats_another_is_found(folder: Path) -> None:
    assert names(forge(folder)) == set()
    twice = forge(folder, lambda told: told.append(told[0]))
    assert names(twice) == {"run"}

    def drop(told: list[tuple[str, Body]]) -> None:
        closed = {"block": 2, "version": 1, "event": "empty", "seconds": 1.0, "reason": ""}
        told.append(
            (
                "round",
                {**closed, "dropped": {nth(told, "update", 8)["id"]: "worse than its parent"}},
            )
        )

    found = audit(forge(folder, drop))
    assert found.ok and (found.pending, found.dropped) == (0, 1)


def test_a_dropped_update_that_cannot_be_read_is_one_finding(folder: Path) -> None:
    def drop(told: list[tuple[str, Body]]) -> None:
        nth(told, "run")["policy"]["undefended"] = False
        made = nth(told, "version")
        name = made["parts"].pop()["update"]
        made["dropped"] = {name: "no_change: none"}
        made["applied"].remove(name)
        (update,) = (b for kind, b in told if kind == "update" and b["id"] == name)
        update["order"]["weights"]["sha256"] = "0" * 64  # nobody has it

    found = audit(forge(folder, drop)).findings
    assert not [f for f in found if f.name in ("sequence", "doubled", "lost")], "all is settled"
    (unread,) = [f for f in found if f.name == "blob"]
    assert "was left out cannot be checked" in unread.sentence


def test_rules_that_a_run_tells_are_checked(folder: Path) -> None:
    def rules(**more: Any) -> Change:
        return lambda told: nth(told, "run")["policy"].update(more)

    clip = {"clip": 3.0, "clip_after": 5}
    assert names(forge(folder, rules(decay=0.7, **clip))) == set()
    assert names(forge(folder, rules(decay=0.9))) == {"weight"}
    assert names(forge(folder, rules(**{**clip, "clip_by_steps": 0.1, "clip_after": 1}))) == {
        "rule"
    }
    assert names(forge(folder, rules(outer_momentum=0.5))) == {"rule"}


@pytest.mark.parametrize("outer", ["average", "nesterov"])
def test_both_ways_of_merging_agree_to_the_last_bit(outer: str) -> None:
    draw = np.random.default_rng(5)

    def drawn(size: float = 1.0) -> tensors.Tensors:
        return {
            name: (size * draw.standard_normal(shape)).astype(np.float32)
            for name, shape in (("b", (3, 4)), ("a", (7,)))
        }

    current, old, held = drawn(), drawn(), drawn()
    updates = [
        Update("1", drawn(), 10, 1.0, absolute=True),
        Update("2", drawn(), 30, 0.49, absolute=True, base=old),
        Update("3", drawn(), 20, 1.0),
        Update("4", drawn(1e-3), 20, 1.0),
    ]
    merged = merge(
        MergeContext(
            current, MergeOptions(outer=outer, clip=0.5, clip_after=1, changes=True), held, (6.0,)
        ),
        updates,
    )
    assert (
        merged.state is not None
        and min(c.scale for c in merged.used) < max(c.scale for c in merged.used) == 1.0
    )
    mean = None
    for u, candidate in zip(updates, merged.used, strict=True):
        base = old if u.base is old else None
        proposed, norm = recompute.propose(
            current, compression.UpdateTensors(dict(u.values), u.absolute), base, candidate.scale
        )
        assert (norm, recompute.clip_scale(norm, (6.0,), 0.5, 1)) == (
            candidate.norm,
            candidate.scale,
        )
        mean = recompute.add(mean, candidate.share, proposed)
    assert mean is not None
    made = FACTS["version"].model_copy(update={"outer": outer})
    assert isinstance(made, ledger.VersionFacts)
    weights, momentum = recompute.outer_step(current, mean, held, made)
    assert tensors.pack(recompute.narrow(weights)) == tensors.pack(merged.state)
    assert tensors.pack(recompute.narrow(momentum or {})) == tensors.pack(merged.momentum or {})
    assert tensors.pack(recompute.change_of(current, weights)) == tensors.pack(merged.change)


def test_a_ledger_that_was_not_linked_again_is_found_by_its_chain(copy: Path) -> None:
    with sqlite3.connect(copy / "run.sqlite") as db:
        db.execute("DROP TRIGGER ledger_no_update")
        db.execute(
            "UPDATE ledger SET body = replace(body, 'the beginning', 'a beginning') WHERE seq = 2"
        )
    db.close()
    found = audit(open_folder(copy))
    assert [(f.name, f.entry) for f in found.findings] == [("chain", 2)] and found.entries > 30
    with sqlite3.connect(copy / "run.sqlite") as db:
        db.execute("DROP TRIGGER ledger_no_delete")
        db.execute("DELETE FROM ledger WHERE kind = 'start'")
        db.execute("UPDATE updates SET tokens = tokens + 1")
    db.close()
    assert [(f.name, f.entry) for f in audit(open_folder(copy)).findings] == [
        ("chain", 2),
        ("chain", 4),
        ("contributions", 0),
    ]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def stored(folder: Path, name: str) -> Path:
    return folder / "blobs" / name[:2] / name[2:4] / name


def test_damaged_and_missing_blobs_are_found(copy: Path) -> None:
    told = forge(copy).told
    for number in (0, 8):  # merged; still waiting
        flip(stored(copy, nth(told, "update", number)["payload"]))
    stored(copy, nth(told, "version", 3)["weights"]["sha256"]).unlink()
    found = audit(open_folder(copy)).findings
    assert [f.name for f in found] == ["payload", "blob", "payload"]
    assert "does not hold" in found[0].sentence and "cannot be read" in found[1].sentence


def test_a_body_has_one_spelling(folder: Path) -> None:
    entry = open_folder(folder).record().entries[4]
    assert ledger.read_body(ledger.JoinFacts, entry).worker == IDENTITIES["a"].worker
    for body in (
        entry.body.replace(",", ", ", 1),
        "[]",
        "nonsense",
        '{"x":NaN}',
        entry.body[:-1] + ',"worker":"x"}',
    ):
        with pytest.raises(Refused, match="the body of entry 5"):
            ledger.read_body(ledger.JoinFacts, entry.model_copy(update={"body": body}))


TRAINED: dict[str, tuple[Change, set[str]]] = {
    "other losses": (put("update", 0, "submission", "loss_after", 0.5), {"retrain"}),
    "another lineage": (put("update", 0, "submission", "lineage", "0" * 64), {"lineage"}),
    "another state": (
        put("update", 2, "submission", "continued", {"optimizer": None, "residual": 1}),
        {"retrain", "lineage"},
    ),
    "a state that nobody left": (
        put("update", 2, "submission", "continued", "optimizer", 77),
        {"retrain"},
    ),
    "states in a circle": (
        put("update", 0, "submission", "continued", "optimizer", 4),
        {"lineage"},
    ),
}


@pytest.mark.parametrize("fault", TRAINED)
def test_a_worker_that_lies_about_its_training_is_found(folder: Path, fault: str) -> None:
    change, expected = TRAINED[fault]
    source = forge(folder, change, resign)
    assert names(source) == set(), "nothing but the training itself contradicts it"
    assert names(source, retrain=True) == expected


def test_work_on_other_text_is_found_and_may_be_another_machine(folder: Path) -> None:
    def other_text(told: list[tuple[str, Body]]) -> None:
        for kind in ("lease", "update"):
            nth(told, kind)["order"]["position"] = 3

    found = audit(forge(folder, other_text), retrain=True).findings
    first = next(f for f in found if f.name == "retrain")
    assert (
        "differ by up to" in first.sentence
        and "trained on cpu" in first.sentence
        and torch.__version__ in first.sentence
    )


def test_beginnings_that_the_seed_does_not_give_are_found(folder: Path) -> None:
    def other_seed(told: list[tuple[str, Body]]) -> None:
        other = CONFIG.replace(seed=1)
        nth(told, "run").update(config=other.model_dump(), fingerprint=other.fingerprint)

    found = audit(forge(folder, other_seed), retrain=True).findings
    assert {f.name for f in found} == {"lease", "retrain"}
    assert [f.sentence for f in found if "version 0 of block 2 is not" in f.sentence]


def test_a_coordinator_that_signs_one_ledger_and_shows_another_is_found(
    runs: dict[str, WatchedCoordinator], tmp_path: Path
) -> None:
    class TwoFaced(LocalClient):
        def manifest(self) -> Manifest:
            honest = super().manifest()
            return runs["average"].run.identity.sign(honest.model_copy(update={"head": "0" * 64}))

        def blob(self, name: str, start: int = 0, worker: str = "") -> Iterator[bytes]:
            yield from (piece + b"more" for piece in super().blob(name, start, worker))

    assert names(RemoteSource(TwoFaced(runs["average"]), tmp_path)) == {"manifest", "blob"}
    strange = audit(RemoteSource(TwoFaced(runs["nesterov"]), tmp_path)).findings
    assert [f.sentence for f in strange if "signed by" in f.sentence]


def test_the_audit_shares_nothing_with_what_it_checks() -> None:
    code = "import sys, blocktrain.audit.audit; print(*sys.modules)"
    root = Path(__file__).parents[2]
    loaded = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    modules = loaded.stdout.split()
    assert not [name for name in modules if name.startswith("blocktrain.coordinator")]
    assert "torch" not in modules
