"""What a run begins with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from blocktrain.learning.corpus.source import Source
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.tokenizer import ByteTokenizer
from blocktrain.runs.prepare import prepare, prepare_in_process
from conftest import tiny_config


def test_prepared_files_are_the_same_corpus(
    tmp_path: Path, corpus: TokenCorpus, corpus_folder: Path
) -> None:
    prepare(tiny_config(), Source(str(corpus_folder), None, tmp_path), tmp_path / "prepared")
    again = Source(str(tmp_path / "prepared"), None, tmp_path).open(ByteTokenizer())
    assert list(again.index.shards) == list(corpus.index.shards)
    assert {path.name for path in (tmp_path / "prepared").iterdir()} == {
        *(f"block-{n}.safetensors" for n in (1, 2, 3)),
        "train.txt",
        "valid.txt",
    }


def test_another_process_writes_the_same_files(tmp_path: Path, corpus_folder: Path) -> None:
    prepare(tiny_config(), Source(str(corpus_folder), None, tmp_path), tmp_path / "here")
    prepare_in_process(tiny_config(), str(corpus_folder), None, tmp_path, tmp_path / "there")
    for path in (tmp_path / "here").iterdir():
        assert path.read_bytes() == (tmp_path / "there" / path.name).read_bytes()


def test_importing_prepare_does_not_load_torch() -> None:
    code = "import sys, blocktrain.runs.prepare; print('torch' in sys.modules)"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout == "False\n"
