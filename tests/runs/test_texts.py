"""`evaluate --text`: whole texts, in windows that evaluation harnesses use."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.cli.evaluate import evaluate
from blocktrain.errors import ConfigError, CorpusError
from blocktrain.learning.compose import Model
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.evaluate import cross_entropies
from blocktrain.runs.texts import evaluate_texts, read_texts, rolling_rows
from support.serving import saved

TEXT = "the heath leaves the delta by the inlet.\nthe ridge finds the grove: naïve.\n"


@pytest.fixture(scope="module")
def run(trained: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(trained, tmp_path_factory.mktemp("runs") / "trained")


@given(st.integers(2, 700), st.sampled_from([1, 2, 16, 32]))
def test_every_token_counts_once_in_a_full_window(size: int, context: int) -> None:
    ids, counted_ids = np.arange(size, dtype=np.uint16), []
    for tokens, counted in rolling_rows(ids, context):
        assert tokens.shape[1] == min(context + 1, size)
        for row in tokens.tolist():
            assert row == list(range(row[0], row[-1] + 1))
            counted_ids += row[-counted:]
    assert counted_ids == list(range(1, size))


def test_a_text_of_whole_windows_has_the_loss_of_a_split(
    run: Path, trained: Model, corpus: TokenCorpus
) -> None:
    """The same windows: only the token in front differs."""
    text = bytes(corpus.valid[:320])
    losses = evaluate_texts(run, trained, [text])
    ids = np.frombuffer(b"\n" + text, np.uint8)
    (predict,) = trained.composition.predictors(trained)
    ce = cross_entropies(predict, ids, 32)
    assert (losses.tokens, losses.bytes, losses.texts) == (320, 320, 1)
    for name in ("composed", "block_1", "pool"):
        expected = ce[trained.compose if name == "composed" else name]
        assert losses.units(name)["nats_per_token"] == pytest.approx(expected, rel=1e-6)


def test_the_command_tells_all_units(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": t}) + "\n" for t in (TEXT, "", "b"))
    )
    evaluate(run, text=tmp_path / "a.txt", json_=True)
    told = json.loads(capsys.readouterr().out)
    size = len(TEXT.encode())
    assert (told["texts"], told["tokens"], told["bytes"], told["words"]) == (1, size, size, 15)
    composed = told["models"]["composed"]
    assert composed["bits_per_byte"] == pytest.approx(composed["nats_per_byte"] / np.log(2))
    assert composed["word_perplexity"] == pytest.approx(
        np.exp(composed["nats_per_byte"] * size / 15)
    )
    evaluate(run, text=tmp_path / "a.jsonl")
    assert "2 texts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", b"", "no text in it"),
        ("a.bin", b"a\0b", "is not text"),
        ("a.jsonl", b"\n", "no text in it"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 3}\n', "line 2 is not a JSON object"),
        ("a.jsonl", b"[1]\n", "line 1 is not a JSON object"),
    ],
)
def test_files_without_texts(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=sentence):
        read_texts(tmp_path / name)


def test_a_text_is_evaluated_whole(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="cannot read"):
        evaluate(run, text=tmp_path)
    with pytest.raises(ConfigError, match="evaluated whole"):
        evaluate(run, text=tmp_path, eval_bytes=5)
