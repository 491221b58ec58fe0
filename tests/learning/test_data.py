"""Corpora: where text is found, how it is split, batches as pure functions, what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.errors import CorpusError
from blocktrain.learning.data import (
    Corpus,
    Source,
    batch,
    batch_offsets,
    open_corpus,
    rows_without_overlap,
)
from blocktrain.learning.tokenizer import ByteTokenizer
from blocktrain.learning.train import Trainer
from conftest import tiny_config


def numbered_lines(count: int) -> bytes:
    return b"".join(b"line %06d\n" % n for n in range(count))


def parts(corpus: Corpus) -> list[bytes]:
    return [bytes(corpus.train), bytes(corpus.calibration), bytes(corpus.valid)]


def test_a_file_is_split_at_a_line_and_mapped(tmp_path: Path) -> None:
    text = numbered_lines(20000)
    (tmp_path / "text.txt").write_bytes(text)
    corpus = open_corpus(str(tmp_path / "text.txt"), None, tmp_path)
    assert b"".join(parts(corpus)) == text, "no byte is lost or read twice"
    assert len(corpus.valid) / len(text) == pytest.approx(0.05, abs=1e-3)
    assert bytes(corpus.valid).startswith(b"line ") and bytes(corpus.calibration).endswith(b"\n")
    for part in (corpus.train, corpus.calibration, corpus.valid):
        assert isinstance(part, np.memmap) and not part.flags.writeable
    assert list(tmp_path.iterdir()) == [tmp_path / "text.txt"], "a file is read in place"


@pytest.mark.parametrize(
    "text", [b"x" * 10000, b"x" * 9999 + b"\n", b"x" * 9990 + b"\n" + b"x" * 9]
)
def test_a_file_without_lines_is_split_all_the_same(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "text.txt").write_bytes(text)
    assert len(open_corpus(str(tmp_path / "text.txt"), None, tmp_path).valid) == 500


def test_a_folder_with_its_own_split_keeps_it(corpus: Corpus, corpus_folder: Path) -> None:
    train, calibration, valid = parts(corpus)
    assert train + calibration == (corpus_folder / "train.txt").read_bytes()
    assert valid == (corpus_folder / "valid.txt").read_bytes()
    assert isinstance(corpus.train, np.memmap)


def test_a_folder_of_texts_is_gathered_once_and_again_when_it_changes(tmp_path: Path) -> None:
    folder, cache = tmp_path / "texts", tmp_path / "cache"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"a" * 6000 + b"\n")
    (folder / "deep" / "b.py").write_bytes(b"b" * 6000 + b"\n")
    (folder / "image.png").write_bytes(b"\x00" * 6000)
    corpus = open_corpus(str(folder), None, cache)
    assert (
        b"".join(parts(corpus))
        == (folder / "a.txt").read_bytes() + (folder / "deep" / "b.py").read_bytes()
    )
    assert isinstance(corpus.train, np.memmap)
    files = list((cache / "corpora").iterdir())
    open_corpus(str(folder), None, cache)
    assert list((cache / "corpora").iterdir()) == files
    (folder / "a.txt").write_bytes(b"changed\n" * 1000)
    assert b"changed" in b"".join(parts(open_corpus(str(folder), None, cache)))


def test_a_folder_is_read_without_what_is_hidden_and_what_trainings_leave(tmp_path: Path) -> None:
    (tmp_path / "NOTES.TXT").write_text("the one text\n" * 1000)
    before = open_corpus(str(tmp_path), None, tmp_path / "cache").hashes
    run = tmp_path / "runs" / "001-notes"
    (run / "model").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    for path in (
        run / "config.toml",
        run / "result.json",
        run / "model" / "README.md",
        tmp_path / ".git" / "description.txt",
    ):
        path.write_text("another text\n" * 1000)
    assert open_corpus(str(tmp_path), None, tmp_path / "cache").hashes == before


def test_the_standard_library_is_a_corpus(tmp_path: Path) -> None:
    corpus = Source("stdlib", None, tmp_path).open()
    assert len(corpus.train) > 3_000_000
    assert b"import " in bytes(corpus.train[:100_000])


def test_wikitext_is_read_from_the_data_folder(tmp_path: Path) -> None:
    (tmp_path / "wikitext-2").mkdir()
    (tmp_path / "wikitext-2" / "train.txt").write_bytes(numbered_lines(2000))
    (tmp_path / "wikitext-2" / "valid.txt").write_bytes(b"valid\n" * 100)
    corpus = open_corpus("wikitext2", tmp_path, tmp_path / "cache")
    assert corpus.name == "wikitext2"
    assert parts(corpus)[2] == b"valid\n" * 100
    (tmp_path / "wikitext-2" / "valid.txt").unlink()
    with pytest.raises(CorpusError, match=r"cannot read .*valid.txt"):
        open_corpus("wikitext2", tmp_path, tmp_path / "cache")


@pytest.mark.parametrize("name", ["wikitext2", "wikitext103"])
def test_wikitext_that_is_nowhere_names_both_ways_to_get_it(name: str, tmp_path: Path) -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(CorpusError) as refused:
        open_corpus(name, tmp_path, tmp_path)
    sentence = str(refused.value)
    assert (
        name in sentence
        and "BLOCKTRAIN_DATA" in sentence
        and "Hugging Face" in sentence
        and "train.txt" in sentence
    )
    assert not list(tmp_path.rglob("*.txt"))


def test_what_is_no_corpus_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        CorpusError, match="neither a file, nor a folder, nor one of stdlib, wikitext2"
    ):
        open_corpus(str(tmp_path / "nowhere"), None, tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(CorpusError, match="is empty"):
        open_corpus(str(tmp_path / "empty.txt"), None, tmp_path)
    (tmp_path / "bare").mkdir()
    with pytest.raises(CorpusError, match="no text files found"):
        open_corpus(str(tmp_path / "bare"), None, tmp_path)
    (tmp_path / "bare" / "a.txt").write_text("text")
    with pytest.raises(CorpusError, match="cannot gather"):
        open_corpus(str(tmp_path / "bare"), None, tmp_path / "empty.txt")


def test_a_corpus_that_cannot_fill_a_context_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"x\n" * 1000)
    corpus = open_corpus(str(tmp_path / "text.txt"), None, tmp_path)
    corpus.require(64)
    with pytest.raises(CorpusError, match=r"the calibration part has \d+ bytes.*smaller --context"):
        corpus.require(1000)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 256),
    st.integers(0, 2**31),
    st.integers(1, 40),
    st.integers(0, 100),
)
def test_a_batch_is_a_pure_function_of_seed_stream_and_step(
    seed: int, stream: int, step: int, context: int, extra: int
) -> None:
    text = np.arange(context + 1 + extra, dtype=np.uint8)
    key = {"seed": seed, "stream": stream, "step": step, "batch": 5, "context": context}
    tokens = batch(text, **key)
    assert tokens.shape == (5, context + 1) and tokens.dtype == torch.int64
    assert torch.equal(tokens, batch(text.copy(), **key))
    offsets = batch_offsets(len(text), **key)
    assert offsets.min() >= 0 and offsets.max() + context + 1 <= len(text)
    assert torch.equal(tokens[:, 0], torch.from_numpy(text[offsets].astype(np.int64)))


def test_batches_differ_by_seed_stream_and_step_and_reach_the_whole_text() -> None:
    key = {"seed": 1, "stream": 2, "step": 3, "batch": 8, "context": 16}
    offsets = [
        batch_offsets(10**6, **{**key, **other})
        for other in ({}, {"seed": 2}, {"stream": 3}, {"step": 4})
    ]
    assert all(
        not set(a.tolist()) & set(b.tolist()) for n, a in enumerate(offsets) for b in offsets[:n]
    )
    assert set(batch_offsets(20, **{**key, "batch": 200}).tolist()) == {0, 1, 2, 3}


def test_blocks_read_in_their_own_order_or_in_a_shared_one() -> None:
    own, shared = tiny_config(), tiny_config(data_order="shared")
    assert [Trainer(own, n).stream for n in (0, 1, 2)] == [0, 1, 2]
    assert [Trainer(shared, n).stream for n in (1, 2)] == [1, 1]


def test_no_batch_touches_what_pool_weights_are_fitted_on(tmp_path: Path) -> None:
    text = bytes(b"a" * 60_000) + bytes(b"z" * 10_000)
    (tmp_path / "train.txt").write_bytes(text)
    (tmp_path / "valid.txt").write_bytes(b"v" * 100)
    corpus = open_corpus(str(tmp_path), None, tmp_path)
    assert set(corpus.calibration.tolist()) == {ord("z")}
    assert bytes(corpus.train) + bytes(corpus.calibration) == text
    size, context = len(corpus.train), 16
    ends = [
        batch_offsets(size, seed=0, stream=1, step=s, batch=64, context=context).max() + context + 1
        for s in range(200)
    ]
    assert max(ends) <= size
    assert max(ends) > size - 100, "the last training bytes are read"


@given(st.integers(2, 200), st.integers(1, 20), st.integers(1, 7))
def test_every_byte_but_the_first_is_predicted_exactly_once(
    size: int, context: int, rows: int
) -> None:
    text = np.arange(size, dtype=np.uint8)
    walked, predicted = 0, []
    for first, tokens in rows_without_overlap(text, context, rows):
        assert first == walked
        assert tokens.shape[0] <= rows and tokens.shape[1] <= context + 1
        assert (tokens[:, 1:] - tokens[:, :-1] == 1).all()
        predicted += tokens[:, 1:].flatten().tolist()
        walked += tokens.shape[0]
    assert predicted == list(range(1, size))


TEXTS = {
    "utf-8 in Greek": "Ἐν ἀρχῇ ἦν ὁ λόγος\n".encode() * 600,
    "utf-8 in Chinese": "天地玄黃，宇宙洪荒。\n".encode() * 600,
    "latin-1": "Äpfel und Möhren, déjà vu\n".encode("latin-1") * 600,
    "terminal colours": b"\x1b[31mred\x1b[0m and plain\tcolumns\r\n" * 600,
}
BINARIES = {
    "random": (np.random.default_rng(0).bytes(30_000), "NUL bytes"),
    "utf-16": ("plain text\n".encode("utf-16") * 900, "NUL bytes"),
    "zeros at the end": (b"text\n" * 4000 + bytes(20_000), "NUL bytes"),
    "control": (b"\x01\x02abcdefgh" * 3000, "20% control characters"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_in_any_language_is_a_corpus(tmp_path: Path, name: str) -> None:
    (tmp_path / "text.txt").write_bytes(TEXTS[name])
    assert Source(str(tmp_path / "text.txt"), None, tmp_path).open().name == "text.txt"


@pytest.mark.parametrize("name", BINARIES)
def test_a_binary_corpus_is_refused(tmp_path: Path, name: str) -> None:
    content, reason = BINARIES[name]
    (tmp_path / "model.bin").write_bytes(content)
    with pytest.raises(CorpusError, match=rf"model.bin is not text: .*{reason}; give a text file"):
        Source(str(tmp_path / "model.bin"), None, tmp_path).open()


def test_tokens_keep_the_hashes_of_their_text(corpus: Corpus) -> None:
    tokens = corpus.encode(ByteTokenizer())
    assert tokens.train is corpus.train, "bytes stay on the disk"
    assert tokens.hashes == corpus.hashes
    assert tokens.bytes_per_token == 1.0
