"""`train` over its own coordinator: the bits of the plain loop, also after kills and stops."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktrain.config import Config
from blocktrain.errors import RunError
from blocktrain.learning.compose import independent
from blocktrain.learning.corpus.source import Source
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.train import REFERENCE, Trainer
from blocktrain.runs import local
from blocktrain.runs.folder import RunFolder, create_run, load_model, publish, read_json
from blocktrain.runs.local import train_blocks
from blocktrain.runs.reference import TrainingPlan
from blocktrain.runs.results import complete
from blocktrain.store.open import read_store
from blocktrain.terminal import score_line
from blocktrain.watch.feed import read_events
from blocktrain.watch.server import open_coordinator
from conftest import tiny_config
from support.jobs import run_here
from support.waiting import until

SCRIPT = """
import sys
from pathlib import Path
from blocktrain.runs import local
from blocktrain.errors import Interrupted
from blocktrain.learning.corpus.source import Source
from blocktrain.runs.reference import TrainingPlan
from blocktrain.runs.folder import open_run

local.TASK_STEPS = int(sys.argv[2])

if __name__ == "__main__":
    run, config, data, *_ = open_run(Path(sys.argv[1]))
    source, reference = Source(data, None, run.folder), sys.argv[3] == "reference"
    plan = TrainingPlan(run, config, source, reference=reference, slots=int(sys.argv[4]))
    try:
        local.train_blocks(plan, lambda *_: None)
    except Interrupted as error:
        sys.exit(f"interrupted: {error}")
"""


class Here:
    """A run folder that is trained by processes of their own."""

    def __init__(
        self,
        tmp_path: Path,
        config: Config,
        corpus_folder: Path,
        *,
        task_steps: int,
        reference: bool = False,
        slots: int = 1,
    ) -> None:
        self.config, self.run = config, create_run(tmp_path / "run", config, str(corpus_folder))
        self.script = tmp_path / "script.py"
        self.script.write_text(SCRIPT)
        self.arguments = [
            str(self.run.folder),
            str(task_steps),
            "reference" if reference else "alone",
            str(slots),
        ]

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, str(self.script), *self.arguments]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self) -> None:
        process = self.start()
        _, errors = process.communicate(timeout=250)
        assert (process.returncode, errors) == (0, "")

    def versions(self) -> int:
        """Tasks that were accepted up to now."""
        try:
            return sum(
                entry.kind == "update"
                for entry in read_store(self.run.folder / "coordinator").ledger()
            )
        except RunError:  # there is no ledger yet
            return 0

    def disturb(self, stop: Callable[[subprocess.Popen[str]], None]) -> tuple[int, str]:
        """Start it, let it get a few tasks further, stop it, and wait for all its processes."""
        before, deadline = self.versions(), time.monotonic() + 250
        process = self.start()
        while self.versions() < before + 2:
            assert process.poll() is None, (
                f"ended too early: {process.stderr.read() if process.stderr else ''}"
            )
            assert time.monotonic() < deadline
            time.sleep(0.02)
        stop(process)
        _, errors = process.communicate(
            timeout=250
        )  # ends when the last process that holds the pipes has ended
        assert not self.run.weights(1).exists()
        return process.returncode, errors


def alone(
    config: Config, index: int, corpus: TokenCorpus, read: list[Trainer] | None = None
) -> Trainer:
    """The plain loop."""
    sources = independent({source.index: source.block for source in read or []})
    trainer = Trainer(config, index, sources)
    for _ in trainer.run(corpus.batches(config, trainer.index), config.steps):
        pass
    return trainer


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.timeout(900)  # three starts of two processes: slow where the machine is busy
def test_a_run_that_is_killed_and_interrupted_ends_in_the_same_weights(
    corpus: TokenCorpus, corpus_folder: Path, tmp_path: Path
) -> None:
    config = tiny_config(compose="pool", blocks=1, steps=600)
    here = Here(tmp_path, config, corpus_folder, task_steps=10)
    undisturbed = RunFolder(tmp_path / "undisturbed")
    publish(undisturbed, 1, alone(config, 1, corpus).block)

    code, _ = here.disturb(lambda process: os.killpg(process.pid, signal.SIGKILL))
    assert code == -signal.SIGKILL
    code, errors = here.disturb(lambda process: os.killpg(process.pid, signal.SIGINT))
    assert code == 1
    assert errors.startswith("interrupted: stopped; everything up to here is saved"), errors

    here.finish()
    assert sha256(here.run.weights(1)) == sha256(undisturbed.weights(1))
    assert not list((here.run.folder / "state").iterdir())
    assert [event["kind"] for event in read_events(here.run.events)].count("start") == 3
    assert here.versions() == 60


def test_ctrl_c_in_the_middle_of_a_task_loses_no_step(
    corpus: TokenCorpus, corpus_folder: Path, tmp_path: Path
) -> None:
    config = tiny_config(compose="pool", blocks=1, steps=600)
    here = Here(tmp_path, config, corpus_folder, task_steps=600)

    def steps_since_start() -> list[int]:
        events = read_events(here.run.events)
        last = max((n for n, event in enumerate(events) if event["kind"] == "start"), default=0)
        return [event["step"] for event in events[last:] if event["kind"] == "step"]

    process = here.start()
    until(steps_since_start, "a step")
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=250)
    assert errors.startswith("interrupted: stopped; everything up to here is saved"), errors
    steps = steps_since_start()[-1]
    assert steps < 600 and here.versions() == 0

    here.finish()
    assert steps_since_start()[0] > steps
    plain = RunFolder(tmp_path / "plain")
    publish(plain, 1, alone(config, 1, corpus).block)
    assert sha256(here.run.weights(1)) == sha256(plain.weights(1))
    assert here.versions() == 1


def test_a_second_train_in_the_same_folder_names_the_first(
    corpus_folder: Path, tmp_path: Path
) -> None:
    config = tiny_config(compose="pool", blocks=1, steps=2)
    run = create_run(tmp_path / "run", config, str(corpus_folder))
    plan = TrainingPlan(run, config, Source(str(corpus_folder), None, tmp_path))
    first = open_coordinator(run.folder / "coordinator")
    try:
        with pytest.raises(RunError) as refused:
            train_blocks(plan, lambda *_: None)
    finally:
        first.close()
    sentence = str(refused.value)
    assert f"`blocktrain train` is already running in {run.folder}" in sentence
    assert f"process {os.getpid()}" in sentence and "stop it with Ctrl-C" in sentence
    assert "coordinator" not in sentence


def test_a_lost_optimizer_is_not_passed_over(corpus_folder: Path, tmp_path: Path) -> None:
    config = tiny_config(compose="pool", blocks=1, steps=600)
    here = Here(tmp_path, config, corpus_folder, task_steps=10)
    here.disturb(lambda process: os.killpg(process.pid, signal.SIGKILL))
    for path in (here.run.folder / "state").rglob("*.safetensors"):
        path.write_bytes(b"damaged")
    for path in (here.run.folder / "state").rglob("pending.json"):
        path.unlink()
    warnings: list[str] = []
    train_blocks(
        TrainingPlan(here.run, config, Source(str(corpus_folder), None, tmp_path)),
        lambda *_: None,
        warnings.append,
    )
    assert len(warnings) == 1 and "optimizer of block 1 is lost" in warnings[0]
    assert {e["block"] for e in read_events(here.run.events) if e["kind"] == "state_lost"} == {1}


def test_a_damaged_reference_is_trained_again(
    corpus: TokenCorpus, corpus_folder: Path, tmp_path: Path
) -> None:
    config = tiny_config(compose="pool", blocks=1, steps=4)
    run = create_run(tmp_path / "run", config, str(corpus_folder), reference=True)
    plan = TrainingPlan(run, config, Source(str(corpus_folder), None, tmp_path), reference=True)
    train_blocks(plan, lambda *_: None)
    complete(plan, lambda _: None)
    good = run.weights(REFERENCE).read_bytes()
    run.weights(REFERENCE).write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    warnings: list[str] = []
    train_blocks(plan, lambda *_: None, warnings.append)
    assert len(warnings) == 1 and "the reference is trained again" in warnings[0]
    assert run.weights(REFERENCE).read_bytes() == good


def test_all_blocks_fusion_and_reference_are_trained_and_judged(
    corpus: TokenCorpus, corpus_folder: Path, tmp_path: Path
) -> None:
    config = tiny_config(blocks=3, steps=8)
    here = Here(tmp_path, config, corpus_folder, task_steps=3, reference=True, slots=3)
    here.finish()
    events = read_events(here.run.events)
    assert {e["block"] for e in events if e["kind"] == "step"} == {0, 1, 2, 3}
    reports = {(e["block"], e["step"]): e for e in events if e["kind"] == "trained"}
    assert set(reports) == {(0, 8), *((block, step) for block in (1, 2, 3) for step in (3, 6, 8))}
    assert all(e["seconds"] > 0 and e["peak_mb"] > 0 for e in reports.values())

    here.finish()  # nothing is left to do
    assert here.versions() == 9
    result = complete(
        TrainingPlan(here.run, config, Source(str(corpus_folder), None, tmp_path)), lambda _: None
    )
    assert set(result["valid_ce"]) == {
        "composed",
        "block_1",
        "block_2",
        "pool",
        "fuse",
        "reference",
    }
    assert result["valid_ce"]["composed"] == result["valid_ce"][result["composition"]["name"]]
    assert result["gap"] == pytest.approx(
        result["valid_ce"]["composed"] - result["valid_ce"]["reference"], abs=2e-5
    )
    assert read_json(here.run.folder / "result.json") == result
    for number in (1, 2, 3):
        seconds = sum(e["seconds"] for (of, _), e in reports.items() if of == number)
        assert result["seconds"][f"block-{number}"] == pytest.approx(seconds, abs=0.06), (
            "of all tasks, whatever process had them"
        )

    expected = [alone(config, index, corpus) for index in (1, 2)]
    expected.append(alone(config, 3, corpus, expected))
    expected.append(alone(config, REFERENCE, corpus))
    publish(RunFolder(tmp_path / "plain"), REFERENCE, expected[3].block)
    assert sha256(here.run.weights(REFERENCE)) == sha256(
        RunFolder(tmp_path / "plain").weights(REFERENCE)
    )
    model = load_model(here.run.folder, torch.device("cpu"))
    for block, plain in zip([*model.blocks, model.fusion], expected, strict=False):
        assert block is not None
        assert all(
            torch.equal(t, plain.block.state_dict()[name]) for name, t in block.state_dict().items()
        )


def test_the_valid_part_is_scored_while_training(
    tmp_path: Path, corpus_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(blocks=3, steps=4)
    run = create_run(tmp_path / "run", config, str(corpus_folder))
    log = run.folder / "coordinator" / "events.jsonl"

    def run_after_a_score(jobs: Any, slots: int, on_message: Any, **_: Any) -> None:
        first, *others = jobs
        run_here([first], slots, on_message)  # what is not trained yet is not scored
        until(lambda: any(e["kind"] == "score" for e in read_events(log)), "a score")
        run_here(others, slots, on_message)

    monkeypatch.setattr(local, "run_jobs", run_after_a_score)
    plan = TrainingPlan(
        run,
        config,
        Source(str(corpus_folder), None, tmp_path),
        score_bytes=64,
        score_seconds=0.0,
    )
    seen: list[dict[str, Any]] = []
    local.train_blocks(plan, seen.append)
    (score,) = [event for event in seen if event["kind"] == "score"][:1]
    assert score["scores"].keys() == {"block-1", "block-2", "pool"}
    assert score in read_events(run.events)
    assert "bits/byte" in score_line(score)
