"""Runs that go on from a trained one: settings, weights, frozen blocks, ledger, audit, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktrain.audit.audit import audit
from blocktrain.audit.evidence import open_folder
from blocktrain.config import Config, Origin
from blocktrain.errors import BlockTrainError, ConfigError, RunError
from blocktrain.learning.corpus.source import Source
from blocktrain.protocol.messages import write
from blocktrain.runs import local
from blocktrain.runs.folder import (
    RunFolder,
    create_run,
    file_sha256,
    load_block,
    open_run,
    parent_of,
    read_manifest,
)
from blocktrain.runs.parent import check_parent, open_parent
from blocktrain.runs.prepare import continue_run
from blocktrain.runs.pull import PullRecord
from blocktrain.runs.reference import TrainingPlan
from blocktrain.runs.results import complete
from conftest import tiny_config
from support.command import blocktrain, start
from support.jobs import run_here
from support.waiting import until

CPU = torch.device("cpu")
TASK_STEPS = 5
Continue = Callable[..., RunFolder]


def train(run: RunFolder, reference: bool = False) -> dict[str, Any]:
    settings = open_run(run.folder)
    plan = TrainingPlan(
        run,
        settings.config,
        Source(settings.data, None, run.folder / "cache"),
        reference=reference,
        origin=settings.origin,
    )
    local.train_blocks(plan, lambda *_: None)
    return complete(plan, lambda _: None)


@pytest.fixture(scope="module", autouse=True)
def _in_this_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "run_jobs", run_here)
        patch.setattr(local, "TASK_STEPS", TASK_STEPS)
        yield


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory, corpus_folder: Path) -> Path:
    """Two blocks and a fusion block, and a reference."""
    config = tiny_config(blocks=3, steps=10, seed=7)
    run = create_run(tmp_path_factory.mktemp("parent") / "run", config, str(corpus_folder))
    train(run, reference=True)
    return run.folder


@pytest.fixture
def go_on(parent: Path, tmp_path: Path) -> Continue:
    def begin(*, freeze: bool = False, new_fusion: bool = False, **named: Any) -> RunFolder:
        origin = Origin(str(parent), freeze, new_fusion)
        run = continue_run(origin, named)
        assert run.data is not None
        return create_run(tmp_path / "new", run.config, run.data, origin=origin)

    return begin


def same_weights(run: RunFolder, other: Path, index: int, config: Config) -> bool:
    blocks = [load_block(r, config, index, CPU) for r in (run, RunFolder(other))]
    return all(
        torch.equal(a, b)
        for a, b in zip(blocks[0].parameters(), blocks[1].parameters(), strict=True)
    )


def test_more_steps(parent: Path, go_on: Continue) -> None:
    run = go_on(steps=5, learning_rate=1e-4)
    config, old = open_run(run.folder).config, open_run(parent).config
    assert config == old.replace(steps=5, learning_rate=1e-4, seed=8)
    result = train(run, reference=True)
    report = audit(open_folder(run.folder), retrain=True)
    assert report.ok and report.retrained == 3
    assert report.facts is not None and check_parent(report.facts, parent) == []
    named = report.parent
    assert named is not None and named.blocks == (1, 2, 3) and named.frozen == ()
    before = audit(open_folder(parent))
    assert (named.run, named.head) == (before.run, before.head)
    assert named.model == read_manifest(parent).model_hash
    assert result["parent"]["sentence"] == named.sentence
    card = (run.model / "README.md").read_text()
    assert f"goes on from run {before.run[:12]}" in card
    # The fusion block of the parent names what it was trained on, so that a model can be pulled.
    entries = open_folder(run.folder).record().entries
    first = [json.loads(e.body) for e in entries if e.kind == "version"][:3]
    assert [len(body["features"]) for body in first] == [0, 0, 2]
    # It begins where the parent ended, the reference too.
    old_ce = json.loads((parent / "result.json").read_text())["valid_ce"]
    for name in ("composed", "reference"):
        assert result["valid_ce"][name] < old_ce[name]


def test_added_blocks_with_the_old_ones_frozen(parent: Path, go_on: Continue) -> None:
    run = go_on(freeze=True, blocks=5)
    config = open_run(run.folder).config
    train(run)
    assert all(same_weights(run, parent, n, config) for n in (1, 2))
    named = parent_of(run.folder)
    assert named is not None and named.blocks == named.frozen == (1, 2)
    report = audit(open_folder(run.folder), retrain=True)
    assert report.ok and report.versions == 6, "two tasks each of two new blocks and the fusion"
    with open_parent(parent) as model:
        sentence = continue_run(Origin(str(parent), freeze=True), {"blocks": 5}).sentence
        assert str(model.folder) in sentence
    assert "blocks 1 and 2" in sentence and "frozen" in sentence
    assert "blocks 3 and 4 new" in sentence and "it reads 4 blocks now instead of 2" in sentence


def test_only_a_new_fusion_block(parent: Path, go_on: Continue) -> None:
    run = go_on(freeze=True, new_fusion=True)
    assert open_run(run.folder).origin == Origin(str(parent), freeze=True, new_fusion=True)
    train(run)
    report = audit(open_folder(run.folder))
    assert report.ok and report.versions == 2
    assert not same_weights(run, parent, 3, open_run(run.folder).config)


def test_another_composition(parent: Path, go_on: Continue) -> None:
    run = go_on(compose="pool", steps=5)
    assert open_run(run.folder).config.blocks == 2
    train(run)
    named = parent_of(run.folder)
    assert named is not None and named.blocks == (1, 2)


@pytest.mark.parametrize(
    ("named", "flags", "sentence"),
    [
        ({"width": 32}, {}, "width=32 does not fit .* whose blocks have width=16"),
        ({"heads": 4}, {}, "heads=4 does not fit"),
        ({"lookback": 2}, {}, "lookback=2 does not fit"),
        ({"layers_per_block": 2}, {}, "layers_per_block=2 does not fit"),
        ({"tokenizer": "bpe:300"}, {}, "tokenizer=bpe:300 does not fit"),
        ({"objective": "denoise", "compose": "pool"}, {}, "objective=denoise does not fit"),
        ({"blocks": 2}, {}, "leaves out blocks of .*: with compose=fuse at least 3"),
        ({"compose": "pool"}, {"freeze": True}, "--freeze leaves nothing to train"),
        ({"compose": "pool"}, {"new_fusion": True}, "compose=pool has no fusion block"),
        ({"size": "2M"}, {}, "--size chooses the shape of a new model"),
        ({"batch": 0}, {}, "batch: must be at least 1"),
    ],
)
def test_what_does_not_fit_is_named(
    parent: Path, named: dict[str, Any], flags: dict[str, bool], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        continue_run(Origin(str(parent), **flags), named)


def test_other_text_context_and_batch_fit(parent: Path) -> None:
    config = continue_run(Origin(str(parent)), {"context": 24, "batch": 2, "steps": 3}).config
    assert (config.context, config.batch, config.steps) == (24, 2, 3)


def test_parents_that_cannot_be_used(parent: Path, tmp_path: Path, corpus_folder: Path) -> None:
    def refuse(folder: Path, sentence: str) -> None:
        with pytest.raises(RunError, match=sentence):
            continue_run(Origin(str(folder)), {})

    refuse(tmp_path, "it is not a run folder")
    unfinished = create_run(tmp_path / "unfinished", tiny_config(), str(corpus_folder))
    refuse(unfinished.folder, "its training is not finished")
    copy = shutil.copytree(parent, tmp_path / "copy")
    weights = copy / "model" / "block-2.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    refuse(copy, "block-2.safetensors is damaged or foreign")
    copy = shutil.copytree(parent, tmp_path / "cut")
    (copy / "coordinator" / "run.sqlite").write_bytes(b"nothing")
    with pytest.raises(BlockTrainError):
        continue_run(Origin(str(copy)), {})


def test_a_pulled_folder_and_a_foreign_parent(parent: Path, tmp_path: Path) -> None:
    """A folder without a ledger says what it knows: its run, and the head if it was recorded."""
    known = audit(open_folder(parent))
    pulled = shutil.copytree(parent, tmp_path / "pulled")
    shutil.rmtree(pulled / "coordinator")
    with open_parent(pulled) as model:
        assert (model.run, model.heads) == (None, ())
    record = PullRecord(run=known.run, head=known.head, blocks={})
    (pulled / "pull.json").write_bytes(write(record))
    origin = Origin(str(pulled))
    run = create_run(
        tmp_path / "new",
        continue_run(origin, {"steps": 5}).config,
        read_manifest(pulled).data,
        origin=origin,
    )
    train(run)
    facts = audit(open_folder(run.folder)).facts
    assert facts is not None and facts.parent is not None
    assert (facts.parent.run, facts.parent.head) == (known.run, known.head)
    assert check_parent(facts, parent) == check_parent(facts, pulled) == []
    findings = [f.sentence for f in check_parent(facts, run.folder)]
    assert f"it goes on from run {known.run}" in findings[0] and len(findings) == 5
    (pulled / "pull.json").write_text("{}")
    with pytest.raises(RunError, match=r"pull.json is damaged"):
        continue_run(origin, {})


def test_the_folder_of_a_coordinator(parent: Path, tmp_path: Path) -> None:
    """It holds versions and no composed model; `train` keeps such a folder inside its own."""
    folder = shutil.copytree(parent / "coordinator", tmp_path / "coordinator")
    with open_parent(folder) as model, open_parent(parent) as same:
        assert (model.run, model.heads) == (same.run, same.heads)
        assert model.manifest.model_hash == same.manifest.model_hash
    run = continue_run(Origin(str(folder)), {})
    assert run.data is None and run.config.seed == 8


def test_a_killed_run_ends_with_the_same_weights(
    parent: Path, go_on: Continue, tmp_path: Path
) -> None:
    go_on(steps=100)
    shutil.copytree(tmp_path / "new", tmp_path / "killed")
    undisturbed = RunFolder(tmp_path / "new")
    command = ("train", "--resume", "--out", "killed")
    process = start(*command, cwd=tmp_path)
    ledger = tmp_path / "killed" / "coordinator"
    until(lambda: count_updates(ledger) > 0, "an update")
    process.kill()
    process.wait()
    assert not (tmp_path / "killed" / "model" / "config.json").exists()
    done = blocktrain(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "TASK_STEPS", 50)
        train(undisturbed)
    for name in ("block-1", "block-2", "block-3"):
        files = [tmp_path / run / "model" / f"{name}.safetensors" for run in ("new", "killed")]
        assert file_sha256(files[0]) == file_sha256(files[1])


def count_updates(folder: Path) -> int:
    try:
        return sum(entry.kind == "update" for entry in open_folder(folder).record().entries)
    except BlockTrainError:  # there is no ledger yet
        return 0


def test_the_command_line(parent: Path, tmp_path: Path) -> None:
    def refuse(sentence: str, *arguments: str) -> None:
        done = blocktrain(*arguments, cwd=tmp_path)
        assert done.returncode == 2 and sentence in " ".join(done.stderr.split()), done.stderr

    refuse("from its own folder", "train", "--from", str(parent), "--out", str(parent))
    refuse("need --from RUN", "train", "--freeze")
    refuse("leave one out", "train", "--resume", "--from", str(parent), "--out", str(parent))
    refuse("blocktrain pull http://127.0.0.1:1", "train", "--from", "http://127.0.0.1:1")
    refuse("width=32 does not fit", "coordinator", "--from", str(parent), "--width", "32")
    assert not (tmp_path / "runs").exists()
