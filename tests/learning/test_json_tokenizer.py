"""Vocabularies of a tokenizer.json: exact for every text, refused in one sentence otherwise."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blocktrain.config import make_config, read_new_settings
from blocktrain.errors import ConfigError
from blocktrain.learning import tokenizer as tokenizers
from blocktrain.learning import vocabulary
from blocktrain.learning.corpus.pieces import PIECE
from blocktrain.learning.tokenizer import (
    JsonTokenizer,
    cut_text,
    load_tokenizer,
    tokenizer_of,
)
from blocktrain.learning.vocabulary import resolve, resolve_tokenizer
from support.fake_hub import serve_hub
from support.tokenizer_files import (
    TEXT,
    byte_level,
    composing,
    edited,
    lowercase,
    metaspace,
    sentencepiece,
    wordpiece,
)

KINDS: dict[str, Callable[[], bytes]] = {
    "bpe": byte_level,
    "sentencepiece": sentencepiece,
    "metaspace": metaspace,
    "nfc": composing,
    "padding": lambda: edited(
        byte_level(),
        padding={
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "!",
        },
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
    ),
}
TRICKY = (
    b"",
    b"a",
    b" leading, and\ttrailing \n\n ",
    b"\x00\xff\xfe broken \xc3",
    "e\u0301 decomposed, ▁ and Ä".encode(),
    b"<|endoftext|> </s> <0x41> [UNK] as plain text",
    "\u2028 \u00a0 \ufeff 👩‍💻".encode(),
    b"\xed\xa0\x80 a surrogate",
)


@pytest.fixture(scope="module")
def loaded() -> dict[str, JsonTokenizer]:
    return {name: JsonTokenizer(make(), name) for name, make in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.one_of(st.sampled_from(TRICKY), st.binary(), st.text().map(str.encode)))
def test_every_text_comes_back_byte_for_byte(
    loaded: dict[str, JsonTokenizer], kind: str, text: bytes
) -> None:
    tokenizer = loaded[kind]
    ids = tokenizer.encode(text)
    assert ids.dtype == tokenizer.dtype and tokenizer.id_width == 2
    assert tokenizer.decode(ids.tolist()) == text
    assert b"".join(map(tokenizer.token, ids.tolist())) == text
    assert tokenizer.count_bytes(ids) == len(text)
    assert (tokenizer.encode(np.frombuffer(text, np.uint8)) == ids).all()


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_longer_than_bytes(loaded: dict[str, JsonTokenizer], kind: str) -> None:
    tokenizer, text = loaded[kind], TEXT.encode()
    assert len(tokenizer.encode(text)) < 0.6 * len(text)
    assert tokenizer.byte_lengths.shape == (tokenizer.vocabulary,)


def test_the_end_of_a_text_stands_for_no_bytes(loaded: dict[str, JsonTokenizer]) -> None:
    bpe = loaded["bpe"]
    assert bpe.end_of_text == bpe.vocabulary - 1 == 399, "the last id"
    assert bpe.token(399) == b"" and bpe.byte_lengths[399] == 0
    assert 399 not in bpe.encode(b"<|endoftext|>")
    assert loaded["sentencepiece"].end_of_text == 2


def test_a_long_text_is_cut_at_lines_and_never_in_a_character() -> None:
    lines = TEXT.encode() * (3 * PIECE // len(TEXT))
    pieces = list(cut_text(lines))
    assert b"".join(pieces) == lines and all(len(piece) <= PIECE for piece in pieces)
    assert all(piece.endswith(b"\n") for piece in pieces)
    one_line = "東".encode() * PIECE
    pieces = list(cut_text(one_line))
    assert b"".join(pieces) == one_line and len(pieces) == 4
    assert all(piece.decode() for piece in pieces)
    junk = b"\x80" * (PIECE + 9)
    assert b"".join(cut_text(junk)) == junk


def test_a_text_of_many_pieces_comes_back(
    loaded: dict[str, JsonTokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizers, "PIECES", 2)
    text = TEXT.encode() * (5 * PIECE // len(TEXT))
    assert loaded["bpe"].decode(loaded["bpe"].encode(text).tolist()) == text


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            lowercase(),
            "x does not give every text back: it turns 'The Quick br' into 'the quick br'",
        ),
        (wordpiece(), "x does not give every text back: it has no tokens for single bytes"),
        (sentencepiece(byte_fallback=False), "it has no tokens for single bytes"),
        (b"", "x is damaged, or no tokenizer.json of the tokenizers library"),
        (b"\xff\xfe", "is damaged"),
        (b"[1, 2]", "is damaged"),
        (b'{"model": 3}', "is damaged"),
        (b'{"model": {"type": "BPE"}}', "is damaged"),
        (b"[" * 100_000, "is damaged"),
        (byte_level()[:-100], "is damaged"),
        (edited(byte_level(), pre_tokenizer={"type": "Nothing"}), "is damaged"),
    ],
)
def test_what_is_no_exact_tokenizer_is_refused_in_one_sentence(
    content: bytes, sentence: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        JsonTokenizer(content, "x")
    assert sentence in str(refused.value) and "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


def test_a_vocabulary_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "LARGEST_VOCABULARY", 300)
    with pytest.raises(ConfigError, match=r"x has 400 tokens; at most 300 fit"):
        JsonTokenizer(byte_level(), "x")
    monkeypatch.setattr(tokenizers, "LARGEST_JSON", 1 << 10)
    with pytest.raises(ConfigError, match="it is no tokenizer"):
        JsonTokenizer(byte_level(), "x")


def test_settings_find_it_by_its_hash(tmp_path: Path) -> None:
    content = byte_level(350)
    (tmp_path / "tokenizer.json").write_bytes(content)
    for name in (str(tmp_path / "tokenizer.json"), str(tmp_path)):
        config = resolve(make_config({"tokenizer": name}), list, tmp_path)
        assert config.tokenizer == "tokenizer.json", "no folder of anybody is in the fingerprint"
        assert config.tokenizer_hash == hashlib.sha256(content).hexdigest()
        assert config.vocabulary == 350
        assert tokenizer_of(config) is load_tokenizer(content)
    with pytest.raises(ConfigError, match=r"has 350 tokens, and the settings say 351"):
        tokenizer_of(config.replace(vocabulary=351))
    assert resolve(make_config({}), list, tmp_path) == make_config({}), "bytes need nothing"


def test_equal_files_of_different_names_are_one_tokenizer(tmp_path: Path) -> None:
    learned = resolve(make_config({"tokenizer": "bpe:400"}), lambda: [TEXT.encode()], tmp_path)
    path = tmp_path / "mine.json"
    path.write_bytes(byte_level())
    given = resolve(make_config({"tokenizer": str(path)}), list, tmp_path)
    assert tokenizer_of(given) is tokenizer_of(learned)
    assert (given.tokenizer, learned.tokenizer) == ("tokenizer.json", "bpe:400")


def test_the_settings_of_a_run_are_good_for_another(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(byte_level(350))
    config = resolve(make_config({"tokenizer": str(tmp_path)}), list, tmp_path)
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(config.model_dump()))
    named, _ = read_new_settings(path)
    assert named["tokenizer"] == str(tmp_path / "tokenizer.json"), "it lies beside the settings"
    assert resolve(make_config(named), list, tmp_path) == config
    other = make_config({**named, "tokenizer": "bytes"})
    assert other.vocabulary == 256 and not other.tokenizer_hash


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the tokenizer .*x\.json: No such file"):
        resolve_tokenizer(str(tmp_path / "x.json"), list, tmp_path)
    with pytest.raises(ConfigError, match=r"cannot read the tokenizer .*tokenizer\.json: No such"):
        resolve_tokenizer(str(tmp_path), list, tmp_path)


def test_a_vocabulary_is_learned_once_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, shares = TEXT.encode(), list[float]()
    whole = resolve_tokenizer("bpe:400", lambda: [text], tmp_path, shares.append)
    assert shares and max(shares) <= 1
    (kept,) = (tmp_path / "tokenizers").iterdir()
    again = resolve_tokenizer(
        "bpe:400", lambda: [text[at : at + 7] for at in range(0, len(text), 7)], tmp_path
    )
    assert again is whole, "pieces do not matter"
    kept.write_bytes(b"{")
    assert resolve_tokenizer("bpe:400", lambda: [text], tmp_path) is whole
    assert hashlib.sha256(kept.read_bytes()).hexdigest() == whole.hash
    assert resolve_tokenizer("bpe:400", lambda: [text + b"more"], tmp_path) is not whole
    monkeypatch.setattr(vocabulary, "SAMPLE_BYTES", 1000)
    short = resolve_tokenizer("bpe:400", lambda: iter([text, text]), tmp_path)
    assert short is resolve_tokenizer("bpe:400", lambda: [text[:1000]], tmp_path)


def test_a_text_without_enough_pairs_gives_a_smaller_vocabulary(tmp_path: Path) -> None:
    config = resolve(make_config({"tokenizer": "bpe:4096"}), lambda: [b"abab " * 9], tmp_path)
    assert 257 < config.vocabulary < 270 and config.tokenizer == "bpe:4096"


def test_learning_is_the_same_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(TEXT.encode() * 3)
    code = (
        "import sys, hashlib; from blocktrain.learning.vocabulary import train_bpe; "
        "text = open(sys.argv[1], 'rb').read(); "
        "print(hashlib.sha256(train_bpe(text, 500)).hexdigest())"
    )
    results = [
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "text")],
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": n},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, n in (("1", "1"), ("2", "4"))
    ]
    assert results[0] == results[1]
    here = hashlib.sha256(vocabulary.train_bpe(TEXT.encode() * 3, 500)).hexdigest()
    assert results[0].strip() == here


def test_a_file_of_random_merges_encodes_always_the_same() -> None:
    rules = json.loads(byte_level())
    rules["model"]["dropout"] = 0.5
    tokenizer = JsonTokenizer(json.dumps(rules).encode())
    first = tokenizer.encode(TEXT.encode()).tolist()
    assert all(tokenizer.encode(TEXT.encode()).tolist() == first for _ in range(3))


HUB = """
import json, sys
from pathlib import Path
from blocktrain.config import make_config, read_new_settings
from blocktrain.errors import ConfigError
from blocktrain.learning.vocabulary import resolve

for name in sys.argv[1:]:
    try:
        config = resolve(make_config({"tokenizer": name}), list, Path("."))
        print(json.dumps([config.tokenizer, config.tokenizer_hash]))
    except ConfigError as error:
        print(json.dumps([str(error)]))
"""


def from_hub(endpoint: str, home: Path, *names: str) -> list[list[str]]:
    """What the names mean in a process that knows this hub; it reads the address once."""
    env = {"PYTHONPATH": ":".join(sys.path), "HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    job = subprocess.run(
        [sys.executable, "-c", HUB, *names],
        env=env,
        cwd=home,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Retrying" not in job.stderr, "the hub's client would ask again and again, for minutes"
    return [json.loads(line) for line in job.stdout.splitlines()]


def test_a_tokenizer_comes_from_the_hub(tmp_path: Path) -> None:
    files = {
        "org/model/tokenizer.json": byte_level(),
        "org/weights/model.safetensors": b"x",
        "org/words/tokenizer.json": wordpiece(),
    }
    names = ("org/model", "org/model@v1", "org/weights", "org/none", "org/gated", "org/words")
    with serve_hub(files) as endpoint:
        model, revision, *refused = from_hub(endpoint, tmp_path, *names)
    digest = hashlib.sha256(byte_level()).hexdigest()
    assert (model, revision) == (["org/model", digest], ["org/model@v1", digest])
    weights, unknown, gated, words = (sentence for (sentence,) in refused)
    assert weights == "the model org/weights on the hub has no tokenizer.json"
    assert "cannot get the tokenizer 'org/none': the hub does not know it" in unknown
    assert "its owner must let you in first" in gated
    assert words.startswith("org/words does not give every text back")
    kept, missing = from_hub(endpoint, tmp_path, "org/model", "org/other")
    assert kept == ["org/model", digest], "what was downloaded once needs no hub"
    assert "'org/other': the Hugging Face hub does not answer" in missing[0]
