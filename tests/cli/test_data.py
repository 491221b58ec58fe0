"""`blocktrain data`: shards ahead of time, and training on them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blocktrain.cli.data import data
from blocktrain.errors import CorpusError
from blocktrain.learning.corpus.source import Source
from blocktrain.learning.corpus.token_corpus import open_prepared
from blocktrain.learning.vocabulary import resolve_tokenizer


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "notes.txt"
    path.write_text("".join(f"note {n}: the {n % 7} of {n % 11}\n" for n in range(4000)))
    return path


def test_shards_of_a_text_and_its_tokenizer(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tokens"
    data(str(text), tokenizer="bpe:300", out=out, json_=True)
    result = json.loads(capsys.readouterr().out)
    corpus = open_prepared(out)
    assert result["folder"] == str(out) and result["index"] == corpus.index.hash
    assert result["bytes"] == text.stat().st_size and 1 < result["bytes_per_token"] < 10
    assert result["tokens"] == sum(
        result[f"{part}_tokens"] for part in ("train", "calibration", "valid")
    )
    tokenizer = resolve_tokenizer(str(out / "tokenizer.json"), list, tmp_path)
    assert Source(str(out), None, tmp_path).open(tokenizer).index == corpus.index
    bytes_ = resolve_tokenizer("bytes", list, tmp_path)
    with pytest.raises(CorpusError, match=r"another tokenizer .* --tokenizer .*tokenizer\.json"):
        Source(str(out), None, tmp_path).open(bytes_)


def test_in_the_cache_for_people(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data(str(text))
    shown = capsys.readouterr().out
    assert f"{text.stat().st_size:,}" in shown and "blocktrain train --data" in shown
    with pytest.raises(CorpusError, match="lies inside the corpus"):
        data(str(text.parent), out=text.parent / "inside")
