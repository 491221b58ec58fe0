"""Datasets of the hub, read from a local stand-in over real HTTP by the hub's client."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from blocktrain.errors import CorpusError
from blocktrain.learning.corpus.hub import DatasetName, group_by_split, parse
from blocktrain.learning.corpus.source import absolute
from support.fake_hub import serve_hub


def table(column: str, *texts: str | None) -> bytes:
    out = io.BytesIO()
    parquet.write_table(pyarrow.table({column: list(texts), "n": range(len(texts))}), out)
    return out.getvalue()


def lines(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


TEXT = [f"document {n} of a dataset, and some more words" for n in range(400)]
FILES = {
    "datasets/org/tables@main/README.md": b"no data",
    "datasets/org/tables@main/data/train-00000-of-00002.parquet": table("text", *TEXT[:200]),
    "datasets/org/tables@main/data/train-00001-of-00002.parquet": table("text", None, *TEXT[200:]),
    "datasets/org/tables@main/data/validation-00000-of-00001.parquet": table("text", "valid " * 20),
    "datasets/org/lines@main/en/all.jsonl": lines(*TEXT),
    "datasets/org/lines@main/de/all.jsonl": lines("anders"),
    "datasets/org/script@main/script.py": b"pass",
    "datasets/org/script@refs/convert/parquet/default/train/0000.parquet": table("body", *TEXT),
    "datasets/org/images@main/a.png": b"png",
}
CARDS = {
    "org/lines": {
        "configs": [
            {"config_name": "en", "data_files": [{"split": "train", "path": "en/*.jsonl"}]},
            {"config_name": "de", "data_files": "de/*.jsonl"},
        ]
    }
}


def read(endpoint: str, cache: Path, *specs: str) -> list[dict[str, Any]]:
    """What another process reads: the client looks at its environment once."""
    code = """
import json, sys
from pathlib import Path
from blocktrain.errors import CorpusError
from blocktrain.learning.corpus.source import Source
from blocktrain.learning.tokenizer import ByteTokenizer

def read(spec):
    try:
        corpus = Source(spec, None, Path(sys.argv[1])).open(ByteTokenizer())
    except CorpusError as error:
        return {"error": str(error)}
    shards = [shard for source in corpus.index.sources for shard in source.shards]
    parts = [b"".join(bytes(corpus.open(s)) for s in shards), bytes(corpus.calibration)]
    return {"train": b"".join(parts).decode(), "valid": bytes(corpus.valid).decode()}

print(json.dumps([read(spec) for spec in sys.argv[2:]]))
"""
    env = {**os.environ, "PYTHONPATH": ":".join(sys.path), "HF_ENDPOINT": endpoint}
    env |= {"HF_HOME": str(cache / "hf"), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", code, str(cache), *specs]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: list[dict[str, Any]] = json.loads(done.stdout)
    return result


REFUSED = {
    "hf:org/lines": "several configurations; there are: de, en",
    "hf:org/lines:fr": "no configuration 'fr'; there are: de, en",
    "hf:org/tables::test": "no split 'test'; there are: train, validation",
    "hf:org/tables:::body": "no column 'body'; there are: text, n.",
    "hf:org/script": "no column 'text'; there are: body, n.",
    "hf:org/tables:::n": "the column 'n' holds no text but int64",
    "hf:org/images": "has no parquet or JSON lines files",
    "hf:org/nothing": "the hub does not know it",
}


def test_datasets_are_read_and_later_also_without_the_hub(tmp_path: Path) -> None:
    text = "\n\n".join(TEXT)
    with serve_hub(FILES, CARDS) as hub:
        specs = ("hf:org/tables", "hf:org/lines:en", "hf:org/script:::body")
        tables, named, converted, *refused = read(hub, tmp_path, *specs, *REFUSED)
    assert tables == {"train": text, "valid": "valid " * 20}, "it has its own split"
    assert named["train"] + named["valid"] == converted["train"] + converted["valid"] == text
    for sentence, found in zip(REFUSED.values(), refused, strict=True):
        assert sentence in found["error"]
    again, missing = read("http://127.0.0.1:9", tmp_path, "hf:org/tables", "hf:org/other")
    assert again == tables, "the cache has it, and nothing listens there"
    assert "hub does not answer" in missing["error"]


def test_a_hub_that_does_not_answer_is_a_sentence_in_time(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # it accepts, and says nothing
        began = time.monotonic()
        [found] = read(f"http://127.0.0.1:{deaf.getsockname()[1]}", tmp_path, "hf:org/tables")
    assert "hub does not answer" in found["error"] and "check the connection" in found["error"]
    assert time.monotonic() - began < 60


def test_names() -> None:
    assert parse("hf:gpt/x:a:train:t") == DatasetName("gpt/x", "a", "train", "t")
    assert parse("hf:squad") == DatasetName("squad")
    for wrong in ("hf:", "hf:a b", "hf:a/b/c", "hf:a:b:c:d:e"):
        with pytest.raises(CorpusError, match="is no dataset; write hf:NAME"):
            parse(wrong)


def test_files_are_grouped_by_their_names() -> None:
    assert group_by_split(["a.jsonl", "b.jsonl"], [], "", "x") == {"train": ["a.jsonl", "b.jsonl"]}
    paths = ["one/test/0.parquet", "one/train/0.parquet", "one/train/1.parquet"]
    assert group_by_split(paths, [], "one", "x") == {
        "test": paths[:1],
        "train": paths[1:],
    }
    names = ["dev.jsonl", "train.jsonl"]
    assert group_by_split(names, [], "", "x") == {"dev": names[:1], "train": names[1:]}


def test_a_folder_named_hf_hides_no_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hf").mkdir()
    monkeypatch.chdir(tmp_path)
    assert absolute("hf:org/data") == "hf:org/data"
    assert absolute("hf") == str(tmp_path / "hf")
