"""The commands as a user types them: from training to text, and a sentence for every bad input."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from blocktrain.cli import app as cli
from blocktrain.cli.environment import newest_unfinished
from blocktrain.errors import RunError
from blocktrain.learning.compose import build_block
from blocktrain.learning.corpus.source import Source
from blocktrain.learning.tokenizer import tokenizer_of
from blocktrain.runs.folder import RunFolder, open_run, publish
from conftest import train_model
from support.command import Command, blocktrain, environment, start

TINY = [
    "--blocks",
    "3",
    "--layers-per-block",
    "1",
    "--width",
    "16",
    "--heads",
    "2",
    "--context",
    "16",
    "--batch",
    "4",
    "--steps",
    "12",
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "notes.txt"
    path.write_text(
        "".join(f"line {n} says that {n} and {n + 1} make {2 * n + 1}\n" for n in range(3000))
    )
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "run"
    done = blocktrain(
        "train",
        "--data",
        str(text),
        "--out",
        str(folder),
        "--reference",
        "--json",
        *TINY,
        cwd=folder.parent,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["gap"] == pytest.approx(
        result["valid_ce"]["composed"] - result["valid_ce"]["reference"], abs=1e-4
    )
    return folder


def test_a_run_folder_holds_all_that_is_promised(trained: Path) -> None:
    expected = {
        "config.toml",
        "coordinator",
        "events.jsonl",
        "result.json",
        "report.html",
        "model",
        "reference",
        "state",
    }
    assert expected == {path.name for path in trained.iterdir()}
    assert {p.name for p in (trained / "model").iterdir()} == {
        *(f"block-{n}.safetensors" for n in (1, 2, 3)),
        "chat_template.jinja",
        "config.json",
        "README.md",
    }


def test_evaluate_agrees_with_the_result_of_the_run(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _called(monkeypatch, "evaluate", str(trained), "--json") == 0
    models = json.loads(capsys.readouterr().out)["models"]
    result = json.loads((trained / "result.json").read_text())["valid_ce"]
    assert {name: told["nats_per_byte"] for name, told in models.items()} == pytest.approx(
        result, abs=1e-4
    )
    assert {"composed", "block_1", "block_2", "pool", "fuse", "reference"} == set(models)


def test_the_length_of_an_evaluation_can_be_chosen(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for words in ([], ["--eval-bytes", "500"], ["--eval-bytes", "500", "--threads", "2"]):
        assert _called(monkeypatch, "evaluate", str(trained), "--json", *words) == 0
        found[len(words)] = json.loads(capsys.readouterr().out)
    whole, part, threads = found.values()
    assert whole["evaluated_bytes"] == whole["valid_bytes"] == part["valid_bytes"] > 500
    assert part["evaluated_bytes"] == threads["evaluated_bytes"] == 500
    losses = [told["models"]["composed"]["nats_per_byte"] for told in (whole, part, threads)]
    assert losses[0] != losses[1] == pytest.approx(losses[2], abs=1e-4)
    assert _called(monkeypatch, "evaluate", str(trained), "--eval-bytes", "500") == 0
    shown = " ".join(capsys.readouterr().err.split())
    assert f"the first 500 of {whole['valid_bytes']:,} bytes of the valid split" in shown


def test_train_evaluates_as_much_as_it_is_asked_to(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another length leaves the weights as they are, and the report says what was measured."""
    run = Path(shutil.copytree(trained, tmp_path / "copy"))
    before = json.loads((run / "result.json").read_text())
    words = ("--resume", "--out", str(run), "--eval-bytes", "300")
    assert _called(monkeypatch, "train", *words) == 0
    after = json.loads((run / "result.json").read_text())
    assert after["corpus"] == {**before["corpus"], "evaluated_bytes": 300}
    assert set(after) == set(before) and after["valid_ce"] != before["valid_ce"]
    for name in ("block-1.safetensors", "config.json"):
        assert (run / "model" / name).read_bytes() == (trained / "model" / name).read_bytes()
    assert "first 300 of" in (run / "report.html").read_text()
    assert "first 300 of" in (run / "model" / "README.md").read_text()


@pytest.mark.parametrize("mode", [[], ["--mode", "sweep", "--sweeps", "3"]])
def test_the_same_seed_writes_the_same_bytes(
    trained: Path,
    mode: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    texts = []
    for seed in ("5", "5", "6"):
        words = (
            "generate",
            str(trained),
            "--prompt",
            "line 1",
            "--max-tokens",
            "40",
            "--seed",
            seed,
            *mode,
        )
        assert _called(monkeypatch, *words) == 0
        texts.append(capfdbinary.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith(b"line 1")
    assert len(texts[0]) > 40


@pytest.mark.parametrize("prompt", ["-x", "--json", "-", "-1"])
@pytest.mark.parametrize("joined", [False, True])
def test_a_prompt_may_begin_with_a_dash(
    trained: Path,
    prompt: str,
    joined: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    words = [f"--prompt={prompt}"] if joined else ["--prompt", prompt]
    assert _called(monkeypatch, "generate", str(trained), *words, "--max-tokens", "3") == 0
    assert capfdbinary.readouterr().out.startswith(prompt.encode())


def test_a_terminal_gets_escapes_and_a_pipe_gets_bytes(trained: Path, tmp_path: Path) -> None:
    """An untrained-like model at a high temperature writes any byte."""
    words = ["generate", str(trained), "--prompt", "a\x1b[31mb é ", "--temperature", "50"]
    words += ["--max-tokens", "60"]
    piped = _output(words, tmp_path, terminal=False)
    assert piped.startswith(b"a\x1b[31mb \xc3\xa9 ")
    shown = _output(words, tmp_path, terminal=True).replace(b"\r\n", b"\n")
    assert shown.startswith(b"a\\x1b[31mb \xc3\xa9 ")
    assert not [c for c in shown.decode() if c not in "\n\t" and not c.isprintable()]
    assert b"\\x" in shown[12:]  # the model wrote a byte that is no text, too
    assert _output([*words, "--raw"], tmp_path, terminal=True).startswith(b"a\x1b[31mb")


def _output(words: list[str], cwd: Path, *, terminal: bool) -> bytes:
    """What a command writes to stdout, which is a terminal or a pipe."""
    ours, theirs = os.openpty() if terminal else os.pipe()
    with Command[bytes](
        tuple(words), cwd=cwd, env=environment(cwd), stdout=theirs, stderr=subprocess.DEVNULL
    ) as process:
        os.close(theirs)
        written = b""
        with contextlib.suppress(OSError):  # how a terminal says that nobody writes any more
            while piece := os.read(ours, 4096):
                written += piece
    os.close(ours)
    assert process.returncode == 0
    return written


def test_training_stops_on_ctrl_c_and_resumes_to_the_same_weights(
    tmp_path: Path, text: Path
) -> None:
    settings = ["--data", str(text), *TINY[:-1], "200"]
    process = start("train", "--out", "cut", "--reference", *settings, cwd=tmp_path)
    _until(lambda: '"step"' in _read(tmp_path / "cut" / "events.jsonl"), process)
    process.send_signal(signal.SIGINT)
    assert process.wait(280) == 130
    assert "continue with --resume" in (tmp_path / "train.err").read_text()
    assert not (tmp_path / "cut" / "result.json").exists()
    again = blocktrain("train", "--resume", "--out", "cut", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert (
        json.loads((tmp_path / "cut" / "result.json").read_text())["gap"] is not None
    )  # the reference was not forgotten
    config = open_run(tmp_path / "cut").config
    corpus = Source(str(text), None, tmp_path / "cache").open(tokenizer_of(config))
    blocks = train_model(config, corpus).select((1, 2, 3))
    for index, block in blocks.items():  # as the plain loop leaves them, never stopped
        publish(RunFolder(tmp_path / "whole"), index, block)
        assert (
            RunFolder(tmp_path / "cut").weights(index).read_bytes()
            == RunFolder(tmp_path / "whole").weights(index).read_bytes()
        )


def test_a_run_that_was_stopped_before_its_result_is_the_one_to_resume(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path(shutil.copytree(trained, tmp_path / "runs" / "001-notes"))
    result = (run / "result.json").read_bytes()
    (run / "result.json").unlink()
    assert _called(monkeypatch, "train", "--resume", "--width", "16") == 0
    assert (run / "result.json").read_bytes() == result
    capsys.readouterr()
    assert (
        _called(
            monkeypatch,
            "train",
            "--resume",
            "--out",
            str(run),
            "--data",
            "other.txt",
            "--preset",
            "paper",
            "--width",
            "32",
        )
        == 2
    )
    assert "data, preset, width cannot change on --resume" in capsys.readouterr().err
    path = run / "config.toml"
    path.write_text(path.read_text().replace("seed = 0", "seed = 5"))
    assert _called(monkeypatch, "train", "--resume", "--out", str(run)) == 2
    assert "was changed" in capsys.readouterr().err
    assert (run / "result.json").read_bytes() == result


def _called(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """The exit code of a command in this process."""
    monkeypatch.setattr(sys, "argv", ["blocktrain", *arguments])
    try:
        cli.main()
    except SystemExit as exit_:
        return exit_.code
    return 0


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline or process.poll() is not None:
            pytest.fail(
                f"the process ended with {process.returncode} before it did what was waited for"
            )
        time.sleep(0.02)


BAD_INPUT = [
    (["train", "--data", "nowhere.txt"], "no corpus 'nowhere.txt'"),
    (["train", "--data", "empty.txt"], "is empty"),
    (["train", "--data", "short.txt", "--context", "128"], "smaller --context"),
    (
        ["train", "--data", "notes.txt", "--sigma-min", "10", "--sigma-max", "1"],
        "sigma_min=10.0 must be below sigma_max=1.0",
    ),
    (
        ["train", "--data", "notes.txt", "--width", "30", "--heads", "4"],
        "heads=4 must divide width=30",
    ),
    (["train", "--data", "notes.txt", "--compose", "euler"], "needs objective=denoise"),
    (["train", "--data", "notes.txt", "--compose", "stack"], "must be 'fuse', 'pool' or 'euler'"),
    (["train", "--data", "notes.txt", "--tokenizer", "words"], "cannot get the tokenizer 'words'"),
    (["train", "--data", "image.bin"], "image.bin is not text: it has NUL bytes"),
    (["train", "--data", "notes.txt", "--config", "unknown.toml"], "unknown setting 'colour'"),
    (["train", "--data", "notes.txt", "--config", "damaged.toml"], "not valid TOML"),
    (["train", "--data", "notes.txt", "--config", "missing.toml"], "cannot read the settings file"),
    (["train", "--data", "notes.txt", "--preset", "nonsense"], "known: paper"),
    (["train", "--data", "notes.txt", "--out", "empty.txt/run"], "cannot write the run folder"),
    (["train", "--data", "notes.txt", "--out", "full"], "is not empty"),
    (["train", "--data", "notes.txt", "--device", "cuda"], "no CUDA device"),
    (["train", "--data", "wikitext2"], "BLOCKTRAIN_DATA"),
    (["train", "--optimizer", "magic"], "optimizer: must be 'adamw' or 'muon' (got 'magic')"),
    (["train", "--steps", "many"], "steps: must be a whole number (got 'many')"),
    (["train", "--colour", "blue"], "Unknown option: --colour"),
    (["train", "--data", ""], "no corpus ''"),
    (
        ["train", "--device", "tpu"],
        "device: must be cpu, cuda, cuda:N, mps or auto (got 'tpu')",
    ),
    (["train", "--preset", "paper", "--sigma-data", "1e300"], "sigma_data: must be at most"),
    (["train", "--preset", "paper", "--sigma-max", "1e308"], "sigma_max: must be at most"),
    (
        [
            "train",
            "--preset",
            "paper",
            "--tail",
            "8",
            "--p-std",
            "0.1",
            "--sigma-min",
            "0.01",
            "--tail-sigma-min",
            "1",
        ],
        "leave no noise",
    ),
    (["bench", "quality", "--scale", "tiny", "--data", "."], "lies inside the corpus"),
    (["train", "--data", "notes\udcff.txt"], "no corpus"),
    (
        ["evaluate", "full", "--device", "gpu"],
        "device='gpu' must be cpu, cuda, cuda:N, mps or auto",
    ),
    (["generate", "full", "--max-tokens", "0"], "--max-tokens: must be at least 1 (got 0)"),
    (["generate", "full", "--max-tokens", "3.9"], "--max-tokens: must be a whole number (got 3.9)"),
    (["generate", "full", "--temperature"], "--temperature needs a value"),
    (["evaluate"], "RUN is missing"),
    (["evaluate", "full", "more"], "unexpected argument: more"),
    (["train", "--data", "notes.txt", "--config", "words.toml"], "reference must be true or false"),
    (["train", "--data", "notes.txt", "--config", "/dev/zero"], "not a settings file"),
    (["train", "--data", "hollow"], "all its 1 text files are empty"),
    (["generate", "full", "--sweeps", "2"], "are for --mode sweep"),
    (["generate", "full", "--draft", "none"], "are for --mode sweep"),
    (["bench", "quality", "--scale", "tiny", "--seed", "1", "--seed", "1"], "named twice"),
    (["generate", "full", "--temperature", "nan"], "must be at least 0"),
    (["generate", "full", "--seed", str(2**64)], "must be at most"),
    (
        [
            "bench",
            "quality",
            "--scale",
            "tiny",
            "--out",
            "bench",
            "--sigma-min",
            "0.1",
            "--sigma-max",
            "0.5",
        ],
        "sigma_min=1.0 must be below",
    ),
    (["train", "--data", "notes.txt", "--eval-bytes", "3"], "larger --eval-bytes"),
    (["train", "--eval-bytes", "0"], "--eval-bytes: must be at least 1 (got 0)"),
    (["evaluate", "full", "--threads", "0"], "--threads: must be at least 1 (got 0)"),
    (["evaluate", "full", "--eval-bytes", "1.5"], "--eval-bytes: must be a whole number"),
    (["train", "--resume", "--out", "full"], "not a run folder"),
    (["train", "--resume"], "no unfinished run"),
    (["evaluate", "nothing"], "no finished model"),
    (["generate", "full"], "no finished model"),
]


@pytest.mark.parametrize(
    ("arguments", "sentence"), BAD_INPUT, ids=[" ".join(a) for a, _ in BAD_INPUT]
)
def test_bad_input_gets_one_sentence(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("BLOCKTRAIN_DATA", raising=False)
    (tmp_path / "notes.txt").write_bytes(text.read_bytes())
    (tmp_path / "empty.txt").touch()
    (tmp_path / "image.bin").write_bytes(bytes(range(256)) * 64)
    (tmp_path / "short.txt").write_text("too short\n" * 3)
    (tmp_path / "unknown.toml").write_text('colour = "blue"\n')
    (tmp_path / "damaged.toml").write_text("steps = = 3\n")
    (tmp_path / "words.toml").write_text('reference = "yes"\n')
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow" / "nothing.txt").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious.txt").write_text("mine")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    code = _called(monkeypatch, *arguments)
    said = capsys.readouterr().err
    assert code == 2
    assert sentence in said
    assert said.startswith("blocktrain: ")
    assert len(said.strip().splitlines()) == 1
    kept = {
        path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if "cache" not in path.parts
    }
    assert kept == before


@pytest.mark.parametrize("name", ["model/block-1.safetensors", "reference/model.safetensors"])
def test_a_damaged_model_is_refused(
    trained: Path,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = shutil.copytree(trained, tmp_path / "copy")
    path = copy / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    assert _called(monkeypatch, "evaluate", str(copy)) == 2
    assert "damaged or foreign" in capsys.readouterr().err


def test_a_resumed_run_trusts_its_own_record(
    trained: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Blocks come from the ledger again, a damaged log does no harm, other text is refused."""
    run = RunFolder(Path(shutil.copytree(trained, tmp_path / "copy")))
    good = run.weights(1).read_bytes()
    publish(
        run, 1, build_block(open_run(run.folder).config, 1)
    )  # of this shape, but not of this run
    with run.events.open("ab") as log:
        log.write(b'5\n\xff\xfe\n{"kind": "trained", "block": 1}\n' + b"[" * 100_000 + b"\n")
    result = (run.folder / "result.json").read_bytes()
    assert _called(monkeypatch, "train", "--resume", "--out", str(run.folder)) == 0
    assert run.weights(1).read_bytes() == good
    assert (run.folder / "result.json").read_bytes() == result
    before, was = text.read_bytes(), (run.model / "config.json").read_bytes()
    try:
        text.write_bytes(before.replace(b"a", b"b"))
        capsys.readouterr()
        assert _called(monkeypatch, "train", "--resume", "--out", str(run.folder)) == 2
    finally:
        text.write_bytes(before)
    assert "is not the text that this run began with" in capsys.readouterr().err
    assert (run.model / "config.json").read_bytes() == was


def test_only_what_is_unfinished_is_resumed(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path(shutil.copytree(trained, tmp_path / "runs" / "001-notes"))
    with pytest.raises(RunError, match="no unfinished run"):
        newest_unfinished()
    (run / "report.html").unlink()
    assert newest_unfinished() == Path("runs/001-notes")
    shutil.copy(trained / "report.html", run)
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(
        json.dumps({**result, "gap": None})
    )  # the reference was asked for later
    assert newest_unfinished() == Path("runs/001-notes")
    shutil.rmtree(run / "coordinator")  # as a pulled model is
    with pytest.raises(RunError, match="no unfinished run"):
        newest_unfinished()
    assert _called(monkeypatch, "train", "--resume", "--out", str(run)) == 2
    assert "nothing to resume here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('"heads": 2', '"heads": 4', "was changed"),
        ('"data": "', '"date": "', "lacks data, the corpus of the model"),
        ('"pool_weights": [', '"pool_weights": [NaN, ', "pool_weights must be"),
        ("{", "[" * 100_000, "is not JSON"),
        ('"pool_weights": [', '"pool_weights": [ 0.0, ', "pool_weights must be"),
        ('"pool_weights": [\n    ', '"pool_weights": [\n    7', "was changed"),
    ],
)
def test_a_model_whose_settings_were_changed_is_refused(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    old: str,
    new: str,
    sentence: str,
) -> None:
    path = Path(shutil.copytree(trained, tmp_path / "copy")) / "model" / "config.json"
    path.write_text(path.read_text().replace(old, new, 1))
    assert _called(monkeypatch, "evaluate", str(tmp_path / "copy")) == 2
    said = capsys.readouterr().err
    assert sentence in said and len(said.strip().splitlines()) == 1


def test_ctrl_c_says_nothing_also_while_the_command_is_loaded() -> None:
    code = """
import sys
class Impatient:
    def find_spec(self, name, *_):
        if name == "blocktrain.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Impatient())
from blocktrain.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_help_teaches_and_starts_fast(tmp_path: Path) -> None:
    began = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    command = [sys.executable, "-m", "blocktrain", "train"]
    text = subprocess.check_output([*command, "--help"], cwd=tmp_path, text=True)
    assert "Ctrl-C saves" in text
    shown = set(re.findall(r"--[a-z][a-z-]*", text)) - {"--help-all"}
    assert {"--data", "--size", "--tokenizer", "--steps", "--batch", "--device"} <= shown
    assert len(shown) <= 20, "the settings that people change, no more"
    everything = subprocess.check_output([*command, "--help-all"], cwd=tmp_path, text=True)
    assert all(flag in everything for flag in (*shown, "--feature-dropout", "--width"))
    code = "import sys, blocktrain.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0, (
        "the command line must not load torch to print help"
    )
    assert sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - began < 10, (
        "seconds of a processor"
    )
