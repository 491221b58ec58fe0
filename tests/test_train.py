"""The local loop: the same seed gives the same bits, and so does a run that was killed or stopped on the way."""

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
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.config import Config
from blocktrain.errors import ConfigError, RunError
from blocktrain.events import read_events
from blocktrain.learning.data import Corpus, Source
from blocktrain.learning.local import Plan, complete
from blocktrain.learning.model import build_block
from blocktrain.learning.runs import Run, create_run, load_model, publish, read_json
from blocktrain.learning.train import REFERENCE, Trainer, learning_rate, pick_device
from conftest import tiny_config

KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "next": ({}, 1),
    "reference": ({}, REFERENCE),
    "fusion": ({}, 3),
    "exact": ({"objective": "denoise", "compose": "pool"}, 2),
    "paper": ({"objective": "denoise", "compose": "euler", "skip": "edm"}, 1),
    "tail": ({"objective": "denoise", "compose": "euler", "tail": 5, "tail_share": 0.3}, 3),
    "tail of one": ({"objective": "denoise", "compose": "euler", "tail": 1}, 1),
    "bfloat16": ({"dtype": "bfloat16"}, 1),
    "bfloat16 fusion": ({"dtype": "bfloat16"}, 3),
    "highest seed": ({"objective": "denoise", "compose": "pool", "seed": 2**32 - 1}, 1),
}


def trainer_of(kind: str, **changes: Any) -> Trainer:
    settings, index = KINDS[kind]
    config = tiny_config(**{**settings, **changes})
    reads = config.compose == "fuse" and index == config.blocks
    return Trainer(config, index, [build_block(config, n) for n in (1, 2)] if reads else [])


def run(trainer: Trainer, corpus: Corpus, until: int) -> list[float]:
    return [loss for _, loss in trainer.run(corpus.train, until)]


def same(a: Trainer, b: Trainer) -> bool:
    mine, theirs = a.block.state_dict(), b.block.state_dict()
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_bits_whole_or_resumed(kind: str, corpus: Corpus, tmp_path: Path) -> None:
    whole = trainer_of(kind)
    losses = run(whole, corpus, 12)

    first = trainer_of(kind)
    before = run(first, corpus, 5)
    first.save(tmp_path / "state.safetensors")
    resumed = trainer_of(kind)
    resumed.load(tmp_path / "state.safetensors")
    assert resumed.step == 5
    torch.manual_seed(99)  # the global generator has no say
    assert before + run(resumed, corpus, 12) == losses
    assert same(resumed, whole)


def test_another_seed_or_block_gives_other_weights(corpus: Corpus) -> None:
    trainers = [trainer_of("next"), trainer_of("next", seed=1), trainer_of("exact"), trainer_of("exact", seed=1)]
    for trainer in trainers:
        run(trainer, corpus, 2)
    embeds = [trainer.block.embed for trainer in trainers]
    assert all(not torch.equal(a, b) for n, a in enumerate(embeds) for b in embeds[:n])


def test_noise_differs_between_blocks_and_steps(corpus: Corpus) -> None:
    config = tiny_config(objective="denoise", compose="pool", data_order="shared", gamma=0.0)
    losses = set()
    for index in (1, 2):
        trainer = Trainer(config, index)
        for trainer.step in (0, 1):
            losses.add(trainer._loss(torch.zeros(4, 17, dtype=torch.long)).ce.item())
    assert len(losses) == 4


def test_a_state_is_loaded_only_where_it_belongs(corpus: Corpus, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    trainer_of("next").save(path)
    trainer_of("next").load(path)  # a state before the first step is one too
    for other in (Trainer(tiny_config(), 2), trainer_of("next", steps=13)):
        with pytest.raises(RunError, match="another run or block"):
            other.load(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(RunError, match="damaged"):
        trainer_of("next").load(path)
    with pytest.raises(RunError, match="cannot read"):
        trainer_of("next").load(tmp_path / "nowhere")


def test_training_lowers_the_loss(corpus: Corpus) -> None:
    losses = run(trainer_of("next", steps=60, learning_rate=1e-2), corpus, 60)
    assert losses[0] > 5
    assert sum(losses[-5:]) / 5 < 3


def test_a_loss_that_is_not_finite_is_a_sentence(corpus: Corpus) -> None:
    trainer = trainer_of("next")
    torch.nn.init.constant_(trainer.block.embed, float("nan"))
    with pytest.raises(RunError, match="lower the learning rate"):
        run(trainer, corpus, 1)


def test_a_fusion_trainer_needs_all_it_reads() -> None:
    with pytest.raises(ConfigError, match="reads 2 blocks, 1 were given"):
        Trainer(tiny_config(), 3, [build_block(tiny_config(), 1)])


def test_bfloat16_trains_float32_weights(corpus: Corpus) -> None:
    exact, rounded = trainer_of("next"), trainer_of("bfloat16")
    losses = run(exact, corpus, 3), run(rounded, corpus, 3)
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], abs=0.1)
    assert {p.dtype for p in rounded.block.parameters()} == {torch.float32}


def test_devices_that_are_not_there_are_refused_in_a_sentence() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type in ("cpu", "cuda", "mps")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="use --device cpu"):
            pick_device("cuda:0")
    if not torch.backends.mps.is_available():
        with pytest.raises(ConfigError, match="use --device cpu"):
            pick_device("mps")


@given(st.integers(1, 500), st.integers(0, 80), st.sampled_from(["cosine", "linear", "constant"]))
def test_the_learning_rate_rises_to_its_peak_and_falls(steps: int, warmup: int, schedule: str) -> None:
    rates = [learning_rate(step, steps, 2.0, warmup, schedule) for step in range(steps)]
    top = min(warmup, steps // 10)
    assert all(0 < rate <= 2.0 for rate in rates)
    assert rates[top] == 2.0
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    if schedule == "constant":
        assert set(rates[top:]) == {2.0}
    else:
        assert learning_rate(steps, steps, 2.0, warmup, schedule) == pytest.approx(0, abs=1e-9)


# --- real processes ---------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path
from blocktrain.errors import Interrupted
from blocktrain.learning import local
from blocktrain.learning.data import Source
from blocktrain.learning.runs import open_run

local.CHECKPOINT_SECONDS = float(sys.argv[2])

if __name__ == "__main__":
    run, config, data = open_run(Path(sys.argv[1]))
    try:
        local.train_blocks(local.Plan(run, config, Source(data, None, run.folder)), lambda *_: None)
    except Interrupted as error:
        sys.exit(f"interrupted: {error}")
"""


def start(script: Path, folder: Path, checkpoint_seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, str(script), str(folder), str(checkpoint_seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 250
    while not condition():
        assert process.poll() is None, f"ended too early: {process.stderr.read() if process.stderr else ''}"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def saved_step(run: Run) -> int:
    if not run.state(1).exists():
        return 0
    with safetensors.safe_open(run.state(1), framework="pt") as file:
        return int((file.metadata() or {})["step"])


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.timeout(900)  # three starts of two processes: slow where the machine is busy
def test_a_run_that_is_killed_and_interrupted_ends_in_the_same_weights(corpus: Corpus, corpus_folder: Path, tmp_path: Path) -> None:
    config = tiny_config(compose="pool", blocks=1, steps=600)
    undisturbed = Trainer(config, 1)
    for _ in undisturbed.run(corpus.train, config.steps):
        pass
    publish(Run(tmp_path / "undisturbed"), 1, undisturbed.block)

    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = create_run(tmp_path / "run", config, str(corpus_folder))

    def disturb(stop: Callable[[subprocess.Popen[str]], None]) -> tuple[int, str]:
        """Start it, let it get a few steps further than it was, stop it, and wait until all its processes are gone."""
        before = saved_step(run)
        process = start(script, run.folder, checkpoint_seconds=0)
        wait_until(lambda: saved_step(run) >= before + 3, process)
        stop(process)
        _, said = process.communicate(timeout=250)  # ends when the last process that holds the pipes has ended
        assert before + 3 <= saved_step(run) < config.steps
        assert not run.weights(1).exists()
        return process.returncode, said

    code, _ = disturb(lambda process: os.killpg(process.pid, signal.SIGKILL))
    assert code == -signal.SIGKILL
    code, said = disturb(lambda process: os.killpg(process.pid, signal.SIGINT))
    assert code == 1
    assert said.startswith("interrupted: stopped; everything up to here is saved"), said

    process = start(script, run.folder, checkpoint_seconds=1e9)
    _, said = process.communicate(timeout=250)
    assert (process.returncode, said) == (0, "")
    assert sha256(run.weights(1)) == sha256(Run(tmp_path / "undisturbed").weights(1))
    assert not run.state(1).exists()
    assert [event["kind"] for event in read_events(run.events)].count("start") == 3


def test_all_blocks_fusion_and_reference_are_trained_and_judged(corpus: Corpus, corpus_folder: Path, tmp_path: Path) -> None:
    config = tiny_config(blocks=2, steps=4)
    run = create_run(tmp_path / "run", config, str(corpus_folder))
    for index in (REFERENCE, 1):
        publish(run, index, trained_here(config, index, corpus).block)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = start(script, run.folder, checkpoint_seconds=1e9)  # what is published already is not trained again
    _, said = process.communicate(timeout=250)
    assert (process.returncode, said) == (0, "")
    assert {e["block"] for e in read_events(run.events) if e["kind"] == "step"} == {2}

    result = complete(Plan(run, config, Source(str(corpus_folder), None, tmp_path)), lambda _: None)
    assert set(result["valid_ce"]) == {"composed", "block_1", "pool", "fuse", "reference"}
    assert result["valid_ce"]["composed"] == result["valid_ce"]["fuse"]
    assert result["gap"] == pytest.approx(result["valid_ce"]["fuse"] - result["valid_ce"]["reference"], abs=2e-5)
    assert read_json(run.folder / "result.json") == result
    fusion = load_model(run.folder, torch.device("cpu")).fusion
    assert fusion is not None
    alone = trained_here(config, 2, corpus, [trained_here(config, 1, corpus)])
    assert all(torch.equal(t, alone.block.state_dict()[name]) for name, t in fusion.state_dict().items())


def trained_here(config: Config, index: int, corpus: Corpus, read: list[Trainer] | None = None) -> Trainer:
    trainer = Trainer(config, index, [source.block for source in read or []])
    run(trainer, corpus, config.steps)
    return trainer
