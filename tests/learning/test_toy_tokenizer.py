"""Adding a tokenizer means adding one class: here bytes and some pairs of them, in 16-bit ids.

Nothing else is edited. The run is trained, evaluated, written with and served by the real code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from blocktrain import config as settings
from blocktrain.cli.generate import generate
from blocktrain.config import Config
from blocktrain.learning import tokenizer as tokenizers
from blocktrain.learning.compose import build_block
from blocktrain.learning.corpus.source import Source
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.evaluate import evaluate
from blocktrain.learning.generate import Sampler, write
from blocktrain.learning.tokenizer import Bytes, Ids, Tokenizer, register
from blocktrain.runs import local
from blocktrain.runs.folder import create_run, load_model
from blocktrain.runs.reference import TrainingPlan
from blocktrain.runs.results import complete, evaluate_run
from blocktrain.serving.entry.answer import Request
from conftest import tiny_config, train_model
from support.answers import ask
from support.jobs import run_here

WORDS = (b"th", b"he", b"e ", b" t", b"in", b"er", b"le", b"ea", b"ve", b"s ", b"by", b"y ")


class Pairs(Tokenizer):
    """Ids 0 to 255 are bytes, those above are pairs of bytes; encoding is greedy."""

    name = "pairs"
    vocabulary = 256 + len(WORDS)

    def encode(self, text: bytes | Bytes) -> Ids:
        raw, ids, at = bytes(text), [], 0
        while at < len(raw):
            pair = raw[at : at + 2]
            ids.append(256 + WORDS.index(pair) if pair in WORDS else raw[at])
            at += 2 if ids[-1] >= 256 else 1
        return np.array(ids, self.dtype)

    def token(self, token_id: int) -> bytes:
        return WORDS[token_id - 256] if token_id >= 256 else bytes((token_id,))


@pytest.fixture(autouse=True)
def pairs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pairs]:
    monkeypatch.setattr(tokenizers, "_TABLE", dict(tokenizers._TABLE))
    before = dict(settings.TOKENIZERS)
    tokenizer = Pairs()
    register(tokenizer)
    yield tokenizer
    settings.TOKENIZERS.clear()
    settings.TOKENIZERS.update(before)


def small(blocks: int = 2, **changes: object) -> Config:
    base = {"tokenizer": "pairs", "steps": 60, "learning_rate": 1e-2}
    return tiny_config(blocks=blocks, **base, **changes)


def test_its_ids_are_wider_and_its_runs_have_another_fingerprint(pairs: Pairs) -> None:
    assert (pairs.id_width, pairs.dtype.str) == (2, "<u2")
    assert pairs.decode(pairs.encode("the heath, é".encode()).tolist()) == "the heath, é".encode()
    decoder = pairs.decoder()
    assert decoder.text([256, 0xC3]) + decoder.text([0xA9]) == "thé"
    config = small()
    assert config.model_dump()["tokenizer"] == "pairs"
    assert config.fingerprint != config.replace(tokenizer="bytes").fingerprint
    assert build_block(config, 1).embed.shape[1] == pairs.vocabulary


@pytest.fixture
def tokens(corpus_folder: Path, tmp_path: Path, pairs: Pairs) -> TokenCorpus:
    return Source(str(corpus_folder), None, tmp_path).open(pairs)


@pytest.mark.parametrize("compose", ["fuse", "pool"])
def test_it_trains_evaluates_and_writes(tokens: TokenCorpus, pairs: Pairs, compose: str) -> None:
    config = small(compose=compose)
    assert tokens.bytes_per_token > 1.2
    model = train_model(config, tokens)
    assert evaluate(model, tokens.valid)["composed"] < 0.8 * math.log(pairs.vocabulary)
    prompt = pairs.encode(b"the ").tolist()
    ids = list(write(model, prompt, 40, Sampler(1)))
    assert max(ids) >= 256, "some tokens are pairs"


def test_the_paper_is_written_with_it_too(tokens: TokenCorpus, pairs: Pairs) -> None:
    config = small(objective="denoise", compose="euler")
    model = train_model(config, tokens)
    ids = list(write(model, [256, 257], 20, Sampler(2)))
    assert len(ids) == 20 and max(ids) < pairs.vocabulary


def test_a_run_of_it_is_trained_judged_and_written_with(
    tmp_path: Path,
    corpus_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
    pairs: Pairs,
) -> None:
    """The run folder, the coordinator, the workers and the commands know nothing of it."""
    monkeypatch.setattr(local, "run_jobs", run_here)
    config = small(blocks=3)
    run = create_run(tmp_path / "run", config, str(corpus_folder))
    plan = TrainingPlan(run, config, Source(str(corpus_folder), None, tmp_path))
    local.train_blocks(plan, lambda *_: None)
    result = complete(plan, lambda _: None)
    size = (corpus_folder / "valid.txt").stat().st_size
    assert result["corpus"]["valid_bytes"] == size
    model, tokens = load_model(run.folder, torch.device("cpu")), plan.corpus()
    per_byte = evaluate_run(run.folder, model, tokens, draws=1, progress=lambda _: None).ce
    per_token = evaluate(model, tokens.valid, draws=1)
    ratio = len(tokens.valid) / size
    assert per_byte["composed"] == pytest.approx(ratio * per_token["composed"])
    assert result["valid_ce"]["composed"] == pytest.approx(per_byte["composed"], abs=1e-4)
    prompt = tokens.valid[: config.context // 2].tolist()
    assert result["sample"]["prompt"] == pairs.decode(prompt).decode()
    assert len(result["sample"]["text"]) > 400, "400 tokens, some of them pairs"
    capfdbinary.readouterr()
    generate(run.folder, prompt="the ")
    expected = pairs.decode(write(model, pairs.encode(b"the ").tolist(), 256, Sampler(0, 0.8)))
    assert capfdbinary.readouterr().out == b"the " + expected + b"\n"
    request = Request(b"the ", 256, temperature=0.8)
    assert ask(run.folder, request) == expected
    assert ask(run.folder, request, (1, 2)) == expected, "over TCP, in ids of two bytes"
