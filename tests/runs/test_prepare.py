"""What a run begins with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from blocktrain.learning.corpus.source import Source
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.shards import read_index
from blocktrain.learning.tokenizer import ByteTokenizer
from blocktrain.protocol.transfer import sha256
from blocktrain.runs.prepare import prepare, prepare_in_process
from conftest import tiny_config


def test_prepared_files_are_the_same_corpus(
    tmp_path: Path, corpus: TokenCorpus, corpus_folder: Path
) -> None:
    prepare(tiny_config(), Source(str(corpus_folder), None, tmp_path), tmp_path / "prepared")
    again = Source(str(tmp_path / "prepared" / "corpus"), None, tmp_path).open(ByteTokenizer())
    assert again.index == corpus.index
    assert {path.name for path in (tmp_path / "prepared").iterdir()} == {
        *(f"block-{n}.safetensors" for n in (1, 2, 3)),
        "corpus",
        "settings.json",
    }


def test_a_tokenizer_is_learned_and_kept(tmp_path: Path, corpus_folder: Path) -> None:
    config = tiny_config(tokenizer="bpe:300")
    place = (str(corpus_folder), None, tmp_path)
    found = prepare_in_process(config, place, tmp_path / "prepared")
    content = (tmp_path / "prepared" / "tokenizer.json").read_bytes()
    assert found.tokenizer_hash == sha256(content) and found.vocabulary == 300
    index = read_index((tmp_path / "prepared" / "corpus" / "index.json").read_bytes())
    assert index.tokenizer == found.tokenizer_hash and index.id_bytes == 2


def test_another_process_writes_the_same_files(tmp_path: Path, corpus_folder: Path) -> None:
    prepare(tiny_config(), Source(str(corpus_folder), None, tmp_path), tmp_path / "here")
    place = (str(corpus_folder), None, tmp_path)
    prepare_in_process(tiny_config(), place, tmp_path / "there")
    assert (tmp_path / "here/corpus").resolve() == (tmp_path / "there/corpus").resolve()
    for path in (tmp_path / "here").glob("*.*"):
        assert path.read_bytes() == (tmp_path / "there" / path.name).read_bytes()


def test_importing_prepare_does_not_load_torch() -> None:
    code = "import sys, blocktrain.runs.prepare; print('torch' in sys.modules)"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout == "False\n"
