"""A run of learned tokens from end to end, in real processes that know only its files.

Its tokens cut characters, one table serves head and embedding, and no process that trains, checks,
writes or serves has seen the text that the vocabulary was learned from.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blocktrain.config import make_config
from blocktrain.errors import RunError
from blocktrain.learning.corpus.source import Source, training_text
from blocktrain.learning.generate import Sampler, write
from blocktrain.learning.tokenizer import tokenizer_of
from blocktrain.learning.vocabulary import resolve
from blocktrain.runs.folder import create_run, load_model, open_run, read_manifest
from blocktrain.runs.local import train_blocks
from blocktrain.runs.reference import TrainingPlan
from blocktrain.runs.results import complete
from blocktrain.runs.served import RunModel
from blocktrain.serving.blocks import serve_blocks
from blocktrain.serving.entry.answer import Output, Request
from blocktrain.serving.stage.stage import Stage
from conftest import tiny_config, write_text
from support.answers import ask, near_and_far, stage_process
from support.command import blocktrain

WORDS = {"the": "die", "amber": "grüne 東京", "birch": "naïve 🙂", "cedar": "Öl"}
PROMPT = "die grüne 東京 "


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    text = write_text(300, seed=3)
    for old, new in WORDS.items():
        text = text.replace(old, new)
    (folder / "text.txt").write_text(text, encoding="utf-8")
    source = Source(str(folder / "text.txt"), None, folder / "cache")
    settings = tiny_config(tokenizer="bpe:400", embedding="shared", steps=60, learning_rate=1e-2)
    config = resolve(settings, lambda: training_text(source), folder / "cache")
    made = create_run(folder / "run", config, source.spec)
    plan = TrainingPlan(made, config, source)
    train_blocks(plan, lambda _: None)
    complete(plan, lambda _: None)
    return made.folder


def test_losses_are_told_per_token_and_per_byte(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    ratio = result["corpus"]["bytes_per_token"]
    assert ratio > 2
    for name, nats in result["valid_ce"].items():
        assert result["nats_per_token"][name] == pytest.approx(nats * ratio, abs=1e-3)
        assert result["bits_per_byte"][name] == pytest.approx(nats / 0.693147, abs=1e-3)
    steps = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert all(0 < step["bits_per_byte"] < step["loss"] for step in steps if step["kind"] == "step")


def test_an_audit_trains_it_again_to_the_same_hashes(run: Path) -> None:
    found = json.loads(blocktrain("audit", "run", "--retrain", "--json", cwd=run.parent).stdout)
    assert found["ok"] and found["retrained"] == found["updates"] > 0


def test_what_generate_writes_is_what_stages_serve(run: Path) -> None:
    written = blocktrain(
        "generate", "run", "--prompt", PROMPT, "--max-tokens", "60", "--seed", "5", cwd=run.parent
    ).stdout
    assert written.startswith(PROMPT)
    model = load_model(run, torch.device("cpu"))
    tokenizer = tokenizer_of(model.config)
    prompt = tokenizer.encode(PROMPT.encode()).tolist()
    expected = tokenizer.decode(write(model, prompt, 60, Sampler(5, 0.8)))
    assert written == PROMPT + expected.decode(errors="backslashreplace") + "\n"
    request = Request(PROMPT.encode(), 60, seed=5, temperature=0.8, mode="autoregressive")
    assert ask(run, request, (1,), (2,)) == expected
    assert ask(run, replace(request, mode="exact"), (1,), (2,)) == expected
    swept = ask(run, replace(request, mode="sweep", sweeps=60), (1,), (2,))
    assert swept == expected, "enough sweeps give the same text"


def test_a_killed_stage_does_not_change_the_text(run: Path) -> None:
    """Cut anywhere, also inside a character: the other holder reads the same ids again."""
    tokenizer = tokenizer_of(open_run(run).config)
    prompt = tokenizer.encode(PROMPT.encode()).tolist()
    model = load_model(run, torch.device("cpu"))
    expected = tokenizer.decode(write(model, prompt, 40, Sampler(5, 0.8)))
    request = Request(PROMPT.encode(), 40, seed=5, temperature=0.8, mode="autoregressive")

    async def answer() -> tuple[bytes, int]:
        text, far = b"", Stage(serve_blocks(RunModel(run), (1, 2)))
        await far.start()
        async with (
            contextlib.aclosing(far),
            stage_process(run, (1, 2)) as killed,
            near_and_far(run, killed.address, far) as entry,
        ):
            async for piece in entry.generate(request):
                text += piece.text
                if text and killed.process.is_alive():
                    killed.process.kill()
                    killed.process.join()
        return text, piece.stats.failovers

    assert asyncio.run(answer()) == (expected, 1)


def test_a_stop_word_is_found_across_tokens_and_characters(run: Path) -> None:
    tokenizer = tokenizer_of(open_run(run).config)
    ids = tokenizer.encode("die grüne 東京 naïve 🙂".encode()).tolist()
    output = Output(tokenizer.token, ["京 na".encode()])
    shown = b""
    for token in ids:
        output.take([token])
        shown += output.show(final=output.stopped)
        if output.stopped:
            break
    assert output.stopped and shown.decode() == "die grüne 東"


@pytest.mark.parametrize("where", ["tokenizer.json", "model/tokenizer.json"])
def test_a_lost_damaged_or_foreign_tokenizer_is_one_sentence(run: Path, where: str) -> None:
    path, open_it = run / where, open_run if where == "tokenizer.json" else read_manifest
    content = path.read_bytes()
    try:
        for wrong in (content[:-1], b'{"model": {}}'):
            path.write_bytes(wrong)
            with pytest.raises(RunError, match=r"tokenizer\.json is damaged or foreign"):
                open_it(run)
        path.unlink()
        with pytest.raises(RunError, match=r"cannot read the tokenizer .*: No such file"):
            open_it(run)
    finally:
        path.write_bytes(content)
    assert open_it(run).config == make_config(open_it(run).config.model_dump())
