"""Corpora: where text is found, how it becomes shards, how it is split, what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.errors import CorpusError
from blocktrain.learning.corpus.pieces import cut
from blocktrain.learning.corpus.source import Source
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.corpus.tokenize import shard_sizes
from blocktrain.learning.evaluate import rows_without_overlap
from blocktrain.learning.shards import SHARD_TOKENS, SequenceOrder
from blocktrain.learning.tokenizer import ByteTokenizer
from conftest import tiny_config

BYTES = ByteTokenizer()


def open_corpus(spec: object, cache: Path, shard_tokens: int = SHARD_TOKENS) -> TokenCorpus:
    return Source(str(spec), None, cache / "cache").open(BYTES, shard_tokens=shard_tokens)


def numbered_lines(count: int) -> bytes:
    return b"".join(b"line %06d\n" % n for n in range(count))


def parts(corpus: TokenCorpus) -> list[bytes]:
    train = [corpus.open(shard) for source in corpus.index.sources for shard in source.shards]
    return [
        b"".join(bytes(ids) for ids in train),
        bytes(corpus.calibration),
        bytes(corpus.valid),
    ]


@pytest.mark.parametrize("shard_tokens", [SHARD_TOKENS, 10_000, 3_000])
def test_a_file_becomes_shards_and_no_byte_is_lost(tmp_path: Path, shard_tokens: int) -> None:
    text = numbered_lines(20000)
    (tmp_path / "text.txt").write_bytes(text)
    corpus = open_corpus(tmp_path / "text.txt", tmp_path, shard_tokens)
    assert b"".join(parts(corpus)) == text
    assert len(corpus.valid) == len(text) // 20 and corpus.valid_bytes == len(corpus.valid)
    assert len(corpus.calibration) == 4096 and corpus.bytes_per_token == 1.0
    sizes = [shard.tokens for shard in corpus.index.sources[0].shards]
    assert sum(sizes) == corpus.train_bytes and min(sizes) >= min(shard_tokens, sum(sizes)) / 2
    names = {path.name for path in (corpus.folder / "shards").iterdir()}
    assert names == {f"{shard.sha256}.tok" for shard in corpus.index.shards}, "nothing else is left"
    assert isinstance(corpus.open(corpus.index.valid[0]), np.memmap)


@given(st.integers(1, 10_000), st.integers(1, 300))
def test_shard_sizes_add_up(tokens: int, limit: int) -> None:
    sizes = shard_sizes(tokens, limit)
    assert sum(sizes) == tokens
    assert len(sizes) == 1 or (min(sizes) >= limit / 2 and max(sizes) < 1.5 * limit)


@given(st.binary(max_size=400), st.integers(8, 40), st.integers(1, 50))
def test_cuts_depend_on_the_text_alone(text: bytes, size: int, chunk: int) -> None:
    chunks = [text[i : i + chunk] for i in range(0, len(text), chunk)]
    pieces = list(cut(chunks, size))
    assert pieces == list(cut([text], size))
    assert b"".join(piece for piece, _ in pieces) == text
    assert all(0 < len(piece) <= size for piece, _ in pieces[:-1])
    start = 0
    for number, (piece, _) in enumerate(pieces[:-1], start=1):
        start += len(piece)
        assert list(cut([text[start:]], size)) == pieces[number:], "it goes on after any piece"


def test_a_cut_is_between_characters_and_lines_if_it_can() -> None:
    assert [p for p, _ in cut(["äöü".encode() * 5], 7)][:2] == ["äöü".encode(), "äöü".encode()]
    assert [p for p, _ in cut([b"one\n\ntwo three"], 9)] == [b"one\n\n", b"two three"]
    assert [p for p, _ in cut([b"a\nbb\n\nccc ddd"], 7)] == [b"a\nbb\n\n", b"ccc ddd"]
    assert [p for p, _ in cut([b"onetwo three"], 9)] == [b"onetwo", b" three"]


def test_a_second_open_reads_what_the_first_has_written(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(numbered_lines(2000))
    first = open_corpus(path, tmp_path)
    index = (first.folder / "index.json").stat().st_mtime_ns
    assert open_corpus(path, tmp_path).index == first.index
    assert (first.folder / "index.json").stat().st_mtime_ns == index
    path.write_bytes(numbered_lines(3000))
    assert open_corpus(path, tmp_path).folder != first.folder
    assert open_corpus(first.folder, tmp_path).index == first.index, "a prepared folder is a corpus"


def test_a_damaged_shard_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(numbered_lines(2000))
    corpus = open_corpus(tmp_path / "text.txt", tmp_path)
    path = corpus.folder / "shards" / f"{corpus.index.valid[0].sha256}.tok"
    content = path.read_bytes()
    path.write_bytes(b"x" + content[1:])
    with pytest.raises(CorpusError, match=rf"{path.name} is damaged: .*hash.*delete .* prepare"):
        TokenCorpus(corpus.index, corpus.folder).open(corpus.index.valid[0])
    path.write_bytes(content[:-1])
    with pytest.raises(CorpusError, match=r"damaged: it has 1199 bytes instead of 1200"):
        TokenCorpus(corpus.index, corpus.folder).open(corpus.index.valid[0])
    path.unlink()
    with pytest.raises(CorpusError, match=r"cannot read shard .*delete"):
        TokenCorpus(corpus.index, corpus.folder).open(corpus.index.valid[0])


def test_a_damaged_index_is_made_again_or_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(numbered_lines(2000))
    corpus = open_corpus(tmp_path / "text.txt", tmp_path)
    (corpus.folder / "index.json").write_bytes(b"{}")
    with pytest.raises(CorpusError, match=r"the index of the corpus is damaged.*delete it"):
        open_corpus(corpus.folder, tmp_path)
    assert open_corpus(tmp_path / "text.txt", tmp_path).index == corpus.index


def test_a_folder_with_its_own_split_keeps_it(corpus: TokenCorpus, corpus_folder: Path) -> None:
    train, calibration, valid = parts(corpus)
    assert train + calibration == (corpus_folder / "train.txt").read_bytes()
    assert valid == (corpus_folder / "valid.txt").read_bytes()


def test_the_files_of_a_folder_are_documents(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"a" * 6000 + b"\n")
    (folder / "b.txt").touch()
    (folder / "deep" / "b.py").write_bytes(b"b" * 6000 + b"\n")
    (folder / "image.png").write_bytes(b"\x00" * 6000)
    text = (folder / "a.txt").read_bytes() + b"\n\n" + (folder / "deep" / "b.py").read_bytes()
    assert b"".join(parts(open_corpus(folder, tmp_path))) == text
    (folder / "a.txt").write_bytes(b"changed\n" * 1000)
    assert b"changed" in b"".join(parts(open_corpus(folder, tmp_path)))


def test_a_folder_is_read_without_what_is_hidden_and_what_trainings_leave(tmp_path: Path) -> None:
    (tmp_path / "NOTES.TXT").write_text("the one text\n" * 1000)
    before = open_corpus(tmp_path, tmp_path).index
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
    assert open_corpus(tmp_path, tmp_path).index == before


def test_the_standard_library_is_a_corpus(tmp_path: Path) -> None:
    corpus = open_corpus("stdlib", tmp_path)
    assert corpus.name == "stdlib" and corpus.train_bytes > 3_000_000
    assert b"import " in parts(corpus)[0][:100_000]


def test_wikitext_is_read_from_the_data_folder(tmp_path: Path) -> None:
    (tmp_path / "wikitext-2").mkdir()
    (tmp_path / "wikitext-2" / "train.txt").write_bytes(numbered_lines(2000))
    (tmp_path / "wikitext-2" / "valid.txt").write_bytes(b"valid\n" * 100)
    corpus = Source("wikitext2", tmp_path, tmp_path / "cache").open(BYTES)
    assert corpus.name == "wikitext2"
    assert parts(corpus)[2] == b"valid\n" * 100
    (tmp_path / "wikitext-2" / "valid.txt").unlink()
    with pytest.raises(CorpusError, match=r"cannot read .*valid.txt"):
        Source("wikitext2", tmp_path, tmp_path / "cache").open(BYTES)


@pytest.mark.parametrize("name", ["wikitext2", "wikitext103"])
def test_wikitext_that_is_nowhere_names_both_ways_to_get_it(name: str, tmp_path: Path) -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(CorpusError) as refused:
        Source(name, tmp_path, tmp_path).open(BYTES)
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
        CorpusError, match="neither a file, nor a folder, nor hf:NAME, nor one of stdlib, wikitext2"
    ):
        open_corpus(tmp_path / "nowhere", tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(CorpusError, match="is empty"):
        open_corpus(tmp_path / "empty.txt", tmp_path)
    (tmp_path / "tiny.txt").write_text("ab")
    with pytest.raises(CorpusError, match="only 2 tokens, which is too few to split"):
        open_corpus(tmp_path / "tiny.txt", tmp_path)
    (tmp_path / "bare").mkdir()
    with pytest.raises(CorpusError, match="no text files found"):
        open_corpus(tmp_path / "bare", tmp_path)
    (tmp_path / "bare" / "a.txt").write_text("text")
    with pytest.raises(CorpusError, match="cannot write tokens"):
        Source(str(tmp_path / "bare"), None, tmp_path / "empty.txt").open(BYTES)


def test_a_corpus_that_cannot_fill_a_context_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"x\n" * 1000)
    corpus = open_corpus(tmp_path / "text.txt", tmp_path)
    corpus.require(64)
    sentence = r"the calibration part has \d+ tokens.*smaller --context"
    with pytest.raises(CorpusError, match=sentence):
        corpus.require(1000)


def test_blocks_read_in_their_own_order_or_in_a_shared_one(corpus: TokenCorpus) -> None:
    own, shared = tiny_config(), tiny_config(data_order="shared")
    orders = [corpus.batches(shared, n)(3) for n in (1, 2)]
    assert (orders[0] == orders[1]).all() and (corpus.batches(shared, 0)(3) != orders[0]).any()
    one, again, two = (corpus.batches(own, n)(3) for n in (1, 1, 2))
    assert one.shape == (own.batch, own.context + 1) and one.dtype == np.int64
    assert (one == again).all() and (one != two).any()


def test_no_batch_touches_what_pool_weights_are_fitted_on(tmp_path: Path) -> None:
    text = bytes(b"a" * 60_000) + bytes(b"z" * 10_000)
    (tmp_path / "train.txt").write_bytes(text)
    (tmp_path / "valid.txt").write_bytes(b"v" * 100)
    corpus = open_corpus(tmp_path, tmp_path)
    assert set(corpus.calibration.tolist()) == {ord("z")}
    read, *others = parts(corpus)
    assert read + others[0] == text
    order = SequenceOrder(corpus.index, 16, 0, 1)
    ends = [place.offset + 17 for place in order.places(0, order.sequences)]
    assert len(read) - 32 < max(ends) <= len(read), "the last training bytes are read"


def test_a_limit_of_the_valid_part_counts_bytes(corpus: TokenCorpus) -> None:
    some = corpus.limit_valid(100, BYTES)
    assert bytes(some.valid) == bytes(corpus.valid)[:100] and some.valid_bytes == 100
    assert corpus.limit_valid(None, BYTES) is corpus
    assert corpus.limit_valid(1 << 40, BYTES) is corpus


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
    "utf-16": (
        "plain text\n".encode("utf-16") * 900,
        r"NUL bytes \(if it is UTF-16, .* converts it\)",
    ),
    "zeros at the end": (b"text\n" * 4000 + bytes(20_000), "NUL bytes"),
    "zeros in the middle": (b"text\n" * 40_000 + bytes(90_000) + b"text\n" * 40_000, "NUL bytes"),
    "control": (b"\x01\x02abcdefgh" * 3000, "20% control characters"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_in_any_language_is_a_corpus(tmp_path: Path, name: str) -> None:
    (tmp_path / "text.txt").write_bytes(TEXTS[name])
    assert open_corpus(tmp_path / "text.txt", tmp_path).name == "text.txt"


@pytest.mark.parametrize("name", BINARIES)
def test_a_binary_corpus_is_refused(tmp_path: Path, name: str) -> None:
    content, reason = BINARIES[name]
    (tmp_path / "model.bin").write_bytes(content)
    with pytest.raises(CorpusError, match=rf"model.bin is not text: .*{reason}; give a text file"):
        open_corpus(tmp_path / "model.bin", tmp_path)
