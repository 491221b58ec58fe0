"""Kinds of text: compressed, JSON lines, tables, folders of all of them, and mixtures."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from backports import zstd
from pyarrow import parquet

from blocktrain.errors import CorpusError
from blocktrain.learning.corpus.files import LocalFile
from blocktrain.learning.corpus.pieces import PIECE, Mark
from blocktrain.learning.corpus.readers import reader_of
from blocktrain.learning.corpus.source import Source, absolute, training_text
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.shards import SHARD_TOKENS, SequenceOrder
from blocktrain.learning.tokenizer import ByteTokenizer

LONG = "one document without a line break " * 5000  # more than a piece
TEXTS = ["a first text\nof two lines", "", "ein zweiter: äöü", LONG, "the last\n"]
WHOLE = "\n\n".join(text for text in TEXTS if text).encode()


def lines(column: str = "text") -> bytes:
    rows = [{"id": n, column: text, "other": [1, {"x": 2}]} for n, text in enumerate(TEXTS)]
    rows.insert(2, {"id": 9, column: None, "other": []})
    return b"\n".join(json.dumps(row).encode() for row in rows) + b"\n\n"


def write_table(path: Path, column: str = "text") -> None:
    table = pyarrow.table(
        {"id": list(range(len(TEXTS) + 1)), column: [*TEXTS[:2], None, *TEXTS[2:]]}
    )
    parquet.write_table(table, path, row_group_size=2)


def open_corpus(spec: object, cache: Path, shard_tokens: int = SHARD_TOKENS) -> TokenCorpus:
    source = Source(str(spec), None, cache / "cache")
    return source.open(ByteTokenizer(), shard_tokens=shard_tokens)


def whole(corpus: TokenCorpus) -> bytes:
    train = [corpus.open(shard) for source in corpus.index.sources for shard in source.shards]
    return b"".join(map(bytes, train)) + bytes(corpus.calibration) + bytes(corpus.valid)


KINDS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda path: path.write_bytes(lines()),
    "a.ndjson.gz": lambda path: path.write_bytes(gzip.compress(lines())),
    "a.jsonl.zst": lambda path: path.write_bytes(zstd.compress(lines())),
    "a.parquet": write_table,
    "a.txt": lambda path: path.write_bytes(WHOLE),
    "a.txt.gz": lambda path: path.write_bytes(gzip.compress(WHOLE[:9]) + gzip.compress(WHOLE[9:])),
    "a.txt.zst": lambda path: path.write_bytes(zstd.compress(WHOLE[:9]) + zstd.compress(WHOLE[9:])),
    "a.gz": lambda path: path.write_bytes(gzip.compress(WHOLE)),
    "noname": lambda path: path.write_bytes(WHOLE),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_gives_the_same_text_from_every_mark(name: str, tmp_path: Path) -> None:
    KINDS[name](tmp_path / name)
    corpus = open_corpus(tmp_path / name, tmp_path)
    assert whole(corpus) == WHOLE
    reader = reader_of(LocalFile(tmp_path / name))
    pieces = list(reader.pieces(Mark()))
    assert max(len(piece.text) for piece in pieces) <= PIECE and pieces[-1].read > 0
    assert [piece.read for piece in pieces] == sorted(piece.read for piece in pieces)
    for number, piece in enumerate(pieces[:-1], start=1):
        rest = list(reader.pieces(piece.after))
        assert [p[:3] for p in rest] == [p[:3] for p in pieces[number:]]


def test_a_folder_may_hold_many_kinds_and_has_a_column(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(lines("body"))
    write_table(folder / "deep" / "b.parquet", "body")
    (folder / "notes.md.gz").write_bytes(gzip.compress(b"# notes"))
    (folder / "image.png").write_bytes(bytes(100))
    assert whole(open_corpus(f"{folder}:body", tmp_path)) == b"\n\n".join(
        [WHOLE, WHOLE, b"# notes"]
    )
    assert absolute(f"{folder}:body") == f"{folder.resolve()}:body"
    with pytest.raises(CorpusError, match=r"a.jsonl, line 1: there is no column 'text'.*id, body"):
        open_corpus(folder, tmp_path)


def test_a_folder_with_train_and_valid_of_any_kind_keeps_its_split(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(lines())
    write_table(folder / "validation-00000-of-00001.parquet")
    (folder / "test.jsonl").write_bytes(b"not read")
    corpus = open_corpus(folder, tmp_path)
    assert bytes(corpus.valid) == WHOLE and whole(corpus) == 2 * WHOLE


BROKEN = {
    "half.txt.gz": (gzip.compress(WHOLE)[:-90], "damaged or no gzip file"),
    "plain.txt.gz": (WHOLE, "damaged or no gzip file"),
    "half.jsonl.zst": (zstd.compress(lines())[:-9], "damaged or no zstd file"),
    "flipped.txt.zst": (b"\x28\xb5\x2f\xfd" + b"\xff" * 90, "damaged or no zstd file"),
    "binary.gz": (gzip.compress(bytes(9000)), "is not text: it has NUL bytes"),
    "cut.jsonl": (lines() + b'{"text": "half', "line 8: not JSON"),
    "words.jsonl": (lines() + b"plain words", "line 8: not JSON"),
    "list.jsonl": (b'["text"]\n', 'line 1: not an object such as {"text"'),
    "number.jsonl": (lines() + b'{"text": 7}', "line 8: the field 'text' is no text but int"),
    "fields.jsonl": (b'{"a": 1, "b": 2}', "line 1: there is no column 'text'; there are: a, b."),
    "random.parquet": (b"PAR1" + b"x" * 90, "damaged or no parquet file"),
    "nothing.jsonl": (b"", "nothing.jsonl is empty"),
    "nulls.jsonl": (b'{"text": null}\n' * 9, "only 0 tokens"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_one_sentence_with_its_file(name: str, tmp_path: Path) -> None:
    content, sentence = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError) as refused:
        open_corpus(tmp_path / name, tmp_path)
    assert name in str(refused.value) and sentence in str(refused.value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500


def test_a_window_larger_than_memory_should_be_is_refused(tmp_path: Path) -> None:
    options = {int(zstd.CompressionParameter.window_log): 28}
    compressor = zstd.ZstdCompressor(options=options)  # the size is not known, so it is not less
    path = tmp_path / "a.txt.zst"
    path.write_bytes(compressor.compress(WHOLE) + compressor.flush())
    with pytest.raises(CorpusError, match="needs more than 128 MiB to be decompressed"):
        open_corpus(path, tmp_path)


def test_columns_of_a_table(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", "body")
    with pytest.raises(CorpusError, match=r"no column 'text'; there are: id, body\. Name one"):
        open_corpus(tmp_path / "a.parquet", tmp_path)
    with pytest.raises(CorpusError, match="the column 'id' holds no text but int64"):
        open_corpus(f"{tmp_path}/a.parquet:id", tmp_path)
    assert whole(open_corpus(f"{tmp_path}/a.parquet:body", tmp_path)) == WHOLE


def test_a_damaged_table_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_table(path, "text")
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 255
    content[len(content) // 3 + 1] ^= 255
    for wrong in (bytes(content), bytes(content[: len(content) // 2])):
        path.write_bytes(wrong)
        with pytest.raises(
            CorpusError, match=r"a\.parquet is damaged or no parquet.*fetch it again"
        ):
            open_corpus(path, tmp_path)


def test_a_lone_surrogate_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "abc \\ud83d def"}\n' * 20)
    assert b"abc \xed\xa0\xbd def" in whole(open_corpus(tmp_path / "a.jsonl", tmp_path))


def test_a_mixture_reads_by_weight(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 200_000)
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": "b" * 100_000}))
    mix = tmp_path / "mix.toml"
    mix.write_text(
        '[[source]]\ndata = "a.txt"\nweight = 0.75\n'
        '[[source]]\ndata = "b.jsonl:body"\nweight = 0.25\n'
    )
    corpus = open_corpus(mix, tmp_path)
    assert [source.weight for source in corpus.index.sources] == [0.75, 0.25]
    for part in (corpus.valid, corpus.calibration):
        assert bytes(part).count(b"a") / len(part) == pytest.approx(0.75, abs=0.01)
    assert len(whole(corpus)) == 300_000, "what is not evaluated is trained on"
    order = SequenceOrder(corpus.index, 16, 0, 1)
    names = [place.shard for place in order.places(0, 1024)]
    assert names.count(corpus.index.sources[0].shards[0]) == 768
    assert b"".join(training_text(Source(str(mix), None, tmp_path), 1000)).count(b"b") in (250, 251)


def test_the_valid_part_of_a_mixture_can_be_cut_and_divided(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 200_000)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a.txt").write_text("b" * 100_000)
    mix = tmp_path / "mix.toml"
    mix.write_text(
        '[[source]]\ndata = "a.txt"\nweight = 3.0\n[[source]]\ndata = "more/a.txt"\nweight = 1.0\n'
    )
    corpus = open_corpus(mix, tmp_path, shard_tokens=2000)
    few = corpus.limit_valid(1000, ByteTokenizer())
    assert bytes(few.valid) == b"a" * 750 + b"b" * 249
    assert few.valid_bytes == few.valid_tokens == len(few.valid)
    (one, other) = few.by_source().values()
    assert bytes(one.valid) + bytes(other.valid) == bytes(few.valid)
    assert list(corpus.by_source()) == ["a.txt", "a.txt (2)"]
    assert sum(part.valid_tokens for part in corpus.by_source().values()) == corpus.valid_tokens
    alone = open_corpus(tmp_path / "a.txt", tmp_path)
    assert alone.by_source() == {} and b"valid_tokens" not in alone.index.write()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "no mixture: source: Field required"),
        ("[[source]]\nweight = 1.0", "source.0.data: Field required"),
        ('[[source]]\ndata = "a.txt"\nweight = 0.0', "weight"),
        ('[[source]]\ndata = "a.txt"\nweight = "much"', "weight"),
        ('[[source]]\ndata = "a.txt"\ncolour = 1', "unknown setting 'source.0.colour'; it has a"),
        ('[[source]]\ndata = "other.toml"', "other.toml is a mixture, too"),
        ('[[source]]\ndata = "nowhere"', "mix.toml: no corpus 'nowhere'"),
        ("[[source", "no TOML file"),
    ],
)
def test_a_wrong_mixture_is_a_sentence(tmp_path: Path, content: str, sentence: str) -> None:
    (tmp_path / "a.txt").write_text("text " * 100)
    (tmp_path / "mix.toml").write_text(content)
    with pytest.raises(CorpusError) as refused:
        open_corpus(tmp_path / "mix.toml", tmp_path)
    assert sentence in str(refused.value)


def test_a_sample_comes_from_all_over_a_large_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"".join(b"line %07d of a text\n" % n for n in range(50_000)))
    source = Source(str(path), None, tmp_path)
    assert b"".join(training_text(source)) == path.read_bytes()
    sample = b"".join(training_text(source, 100_000))
    numbers = [int(line[5:12]) for line in sample.split(b"\n") if len(line) == 22]
    assert len(sample) <= 100_000 and min(numbers) < 1000 and max(numbers) > 49_000
    assert numbers == sorted(numbers)


def test_a_prepared_folder_is_a_corpus_of_its_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(WHOLE)
    source, out = Source(str(tmp_path / "a.txt"), None, tmp_path / "cache"), tmp_path / "out"
    made = source.open(ByteTokenizer(), out, shard_tokens=1 << 16)
    assert made.folder == out and not (tmp_path / "cache").exists()
    assert source.open(ByteTokenizer(), out, shard_tokens=1 << 16).index == made.index
    prepared = Source(str(out), None, tmp_path / "cache")
    assert whole(prepared.open(ByteTokenizer())) == WHOLE
    with pytest.raises(CorpusError, match="not empty, and was not made from this text"):
        source.open(ByteTokenizer(), out, shard_tokens=1 << 17)
    with pytest.raises(CorpusError, match="has no text any more"):
        list(training_text(prepared))
