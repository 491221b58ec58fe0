"""The commands as a user types them: a run from training to text, and one clear sentence for every kind of bad input."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from blocktrain import cli
from command import blocktrain

TINY = ["--blocks", "3", "--layers-per-block", "1", "--width", "16", "--heads", "2", "--context", "16", "--batch", "4", "--steps", "12"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "notes.txt"
    path.write_text("".join(f"line {n} says that {n} and {n + 1} make {2 * n + 1}\n" for n in range(3000)))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "run"
    done = blocktrain("train", "--data", str(text), "--out", str(folder), "--reference", "--json", *TINY, cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["gap"] == pytest.approx(result["valid_ce"]["fuse"] - result["valid_ce"]["reference"], abs=1e-4)
    return folder


def test_a_run_folder_holds_all_that_is_promised(trained: Path) -> None:
    expected = {"config.toml", "coordinator", "events.jsonl", "result.json", "report.html", "model", "reference", "state"}
    assert expected == {path.name for path in trained.iterdir()}
    assert {p.name for p in (trained / "model").iterdir()} == {*(f"block-{n}.safetensors" for n in (1, 2, 3)), "config.json", "README.md"}


def test_evaluate_agrees_with_the_result_of_the_run(trained: Path) -> None:
    done = blocktrain("evaluate", str(trained), "--json", cwd=trained.parent)
    assert done.returncode == 0, done.stderr
    models = json.loads(done.stdout)["models"]
    result = json.loads((trained / "result.json").read_text())["valid_ce"]
    assert models["composed"]["nats_per_byte"] == pytest.approx(result["composed"], abs=1e-4)
    assert {"block_1", "block_2", "pool", "fuse"} < set(models)


@pytest.mark.parametrize("mode", [[], ["--mode", "sweep", "--sweeps", "3"]])
def test_the_same_seed_writes_the_same_bytes(trained: Path, mode: list[str]) -> None:
    texts = [
        blocktrain("generate", str(trained), "--prompt", "line 1", "--max-tokens", "40", "--seed", seed, *mode, cwd=trained.parent).stdout
        for seed in ("5", "5", "6")
    ]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("line 1")


def test_training_stops_on_ctrl_c_and_resumes_to_the_same_weights(tmp_path: Path, text: Path) -> None:
    settings = ["--data", str(text), *TINY[:-1], "200"]
    whole = blocktrain("train", "--out", "whole", *settings, cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    process = subprocess.Popen(
        [sys.executable, "-m", "blocktrain.cli", "train", "--out", "cut", *settings], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    _until(lambda: '"step"' in _read(tmp_path / "cut" / "events.jsonl"), process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "continue with --resume" in errors
    assert not (tmp_path / "cut" / "result.json").exists()
    again = blocktrain("train", "--resume", "--out", "cut", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    for name in ("block-1", "block-2", "block-3"):
        file = Path("model") / f"{name}.safetensors"
        assert (tmp_path / "cut" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline or process.poll() is not None:
            pytest.fail(f"the process ended with {process.returncode} before it did what was waited for")
        time.sleep(0.02)


BAD_INPUT = [
    (["train", "--data", "nowhere.txt"], "no corpus 'nowhere.txt'"),
    (["train", "--data", "empty.txt"], "is empty"),
    (["train", "--data", "short.txt", "--context", "128"], "smaller --context"),
    (["train", "--data", "notes.txt", "--sigma-min", "10", "--sigma-max", "1"], "sigma_min=10.0 must be below sigma_max=1.0"),
    (["train", "--data", "notes.txt", "--width", "30", "--heads", "4"], "heads=4 must divide width=30"),
    (["train", "--data", "notes.txt", "--compose", "euler"], "needs objective=denoise"),
    (["train", "--data", "notes.txt", "--config", "unknown.toml"], "unknown setting 'colour'"),
    (["train", "--data", "notes.txt", "--config", "damaged.toml"], "not valid TOML"),
    (["train", "--data", "notes.txt", "--config", "missing.toml"], "cannot read the settings file"),
    (["train", "--data", "notes.txt", "--preset", "nonsense"], "known: paper"),
    (["train", "--data", "notes.txt", "--out", "empty.txt/run"], "cannot write the run folder"),
    (["train", "--data", "notes.txt", "--out", "full"], "already holds something"),
    (["train", "--data", "notes.txt", "--device", "cuda"], "no CUDA device"),
    (["train", "--data", "wikitext2"], "BLOCKTRAIN_DATA"),
    (["train", "--resume", "--out", "full"], "not a run folder"),
    (["train", "--resume"], "no unfinished run"),
    (["evaluate", "nothing"], "no finished model"),
    (["generate", "full"], "no finished model"),
]


@pytest.mark.parametrize(("arguments", "sentence"), BAD_INPUT, ids=[" ".join(a) for a, _ in BAD_INPUT])
def test_bad_input_gets_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("BLOCKTRAIN_DATA", raising=False)
    (tmp_path / "notes.txt").write_bytes(text.read_bytes())
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("too short\n" * 3)
    (tmp_path / "unknown.toml").write_text('colour = "blue"\n')
    (tmp_path / "damaged.toml").write_text("steps = = 3\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious.txt").write_text("mine")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    monkeypatch.setattr(sys, "argv", ["blocktrain", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    said = capsys.readouterr().err
    assert exit_.value.code == 2
    assert sentence in said
    assert said.startswith("blocktrain: ")
    assert len(said.strip().splitlines()) == 1
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if "cache" not in path.parts}
    assert kept == before


def test_unknown_flags_and_wrong_types_are_named(tmp_path: Path) -> None:
    for arguments, sentence in (
        (["train", "--colour", "blue"], "--colour"),
        (["train", "--steps", "many"], "many"),
        (["generate", "run", "--max-tokens", "0"], "at least 1"),
    ):
        done = blocktrain(*arguments, cwd=tmp_path)
        assert done.returncode != 0
        assert sentence in done.stdout + done.stderr


def test_a_damaged_model_is_refused(trained: Path, tmp_path: Path) -> None:
    import shutil

    copy = shutil.copytree(trained, tmp_path / "copy")
    path = copy / "model" / "block-1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    done = blocktrain("evaluate", str(copy), cwd=tmp_path)
    assert done.returncode == 2
    assert "damaged or foreign" in done.stderr


def test_help_teaches_and_starts_fast(tmp_path: Path) -> None:
    began = time.monotonic()
    done = blocktrain("train", "--help", cwd=tmp_path)
    assert "Ctrl-C saves" in done.stdout
    assert "--feature-dropout" in done.stdout
    code = "import sys, blocktrain.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0, "the command line must not load torch to print help"
    assert time.monotonic() - began < 30
