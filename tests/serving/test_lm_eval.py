"""The evaluation harness `lm-eval`, as people install it, against `blocktrain serve`."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from blocktrain.learning.tokenizer import load_tokenizer
from blocktrain.learning.vocabulary import settings_with
from blocktrain.runs.texts import evaluate_texts, read_texts
from conftest import random_model, tiny_config, write_text
from support.serving import saved, started
from support.tokenizer_files import byte_level
from support.waiting import PATIENCE

pytestmark = pytest.mark.skipif(find_spec("lm_eval") is None, reason="blocktrain[eval] is not here")
CONTEXT = 24
GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "evaluate.md").read_text()


def block(language: str) -> str:
    """The one block of the guide in a language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
    return str(found)


def test_its_perplexity_is_that_of_evaluate(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level(300))
    config = settings_with(tiny_config(blocks=4, context=CONTEXT, tokenizer="bpe:300"), tokenizer)
    model = random_model(config)
    run = saved(model, tmp_path / "small")
    texts = [write_text(4, seed=3), "naïve 東京 🙂\n" + write_text(7, seed=4), "short"]
    data = tmp_path / "notes.jsonl"  # files as the guide has them
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "notes.yaml").write_text(block("yaml"))
    command = block("bash")
    with started("serve", str(run), "--listen", "127.0.0.1:0", cwd=tmp_path) as served:
        for said, here in {
            "http://127.0.0.1:8480": served.url,
            "001-stdlib": "small",
            "max_length=130": f"max_length={CONTEXT + 2},num_concurrent=2",
        }.items():
            assert said in command
            command = command.replace(said, here)
        told = harness(tmp_path, shlex.split(command))
    expected = evaluate_texts(run, model, read_texts(data)).units("composed")
    for unit in ("bits_per_byte", "byte_perplexity", "word_perplexity"):
        assert told[f"{unit},none"] == pytest.approx(expected[unit], rel=1e-4)


def harness(folder: Path, command: list[str]) -> dict[str, float]:
    """What it says about the task."""
    assert command[0] == "lm-eval"
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    more = ["--batch_size", "4", "--output_path", str(folder / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *command[1:], *more],
        env={**os.environ, **offline},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = (folder / "out").rglob("results_*.json")
    return dict(json.loads(results.read_text())["results"]["notes"])
