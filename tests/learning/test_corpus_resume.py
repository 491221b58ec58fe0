"""Tokenizing that is killed goes on to the same hashes; memory does not grow with the text."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from blocktrain.learning.corpus.source import Source
from blocktrain.learning.corpus.tokenize import TokenizeStatus
from blocktrain.learning.corpus.writer import read_journal
from blocktrain.learning.tokenizer import ByteTokenizer, Tokenizer
from blocktrain.learning.vocabulary import resolve_tokenizer

SHARD = 25_000
PREPARE = """
import resource, sys, time
from pathlib import Path
from blocktrain.learning.corpus.source import Source
from blocktrain.learning.tokenizer import ByteTokenizer, load_tokenizer

spec, cache, tokenizer, shard, pause = sys.argv[1:]
vocabulary = load_tokenizer(Path(tokenizer).read_bytes()) if tokenizer else ByteTokenizer()
report = lambda status: time.sleep(float(pause))
corpus = Source(spec, None, Path(cache)).open(
    vocabulary, shard_tokens=int(shard), progress=report
)
print(corpus.index.hash, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def prepare(
    spec: Path, cache: Path, tokenizer: str = "", shard: int = SHARD, pause: float = 0.0
) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PREPARE, str(spec), str(cache), tokenizer, str(shard)]
    env = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    return subprocess.Popen([*command, str(pause)], env=env, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> list[str]:
    out, _ = process.communicate()
    assert process.returncode == 0
    return out.split()


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of documents of all kinds and sizes; shards end anywhere in them."""
    draw, folder = random.Random(3), tmp_path / "texts"
    folder.mkdir()

    def words(count: int) -> str:
        return " ".join(f"word{draw.randrange(500)}" for _ in range(count))

    with (folder / "a.jsonl").open("w") as file:
        for _ in range(300):
            file.write(json.dumps({"text": words(draw.choice((0, 3, 300)))}) + "\n")
    (folder / "b.txt").write_text(words(40_000))
    (folder / "c.txt").write_text("\n".join(words(9) for _ in range(5_000)))
    return folder


@pytest.mark.parametrize("kind", ["bytes", "bpe:300"])
def test_a_killed_process_goes_on_to_the_same_hashes(
    kind: str, texts: Path, tmp_path: Path
) -> None:
    tokenizer: Tokenizer = ByteTokenizer()
    file = ""
    if kind != "bytes":
        sample = (texts / "b.txt").read_bytes()[:20_000]
        resolve_tokenizer(kind, lambda: [sample], tmp_path)
        [path] = (tmp_path / "tokenizers").iterdir()
        tokenizer, file = resolve_tokenizer(str(path), list, tmp_path), str(path)
    whole = Source(str(texts), None, tmp_path / "whole").open(tokenizer, shard_tokens=SHARD)
    cache, kills, every = tmp_path / "cut", 0, 1 + len(whole.index.sources[0].shards) // 5
    for _ in range(100):
        before = committed(cache)
        process = prepare(texts, cache, file, pause=0.02)
        while process.poll() is None and committed(cache) < before + every:
            time.sleep(0.005)
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
    assert process.returncode == 0 and kills >= 3
    assert process.stdout and process.stdout.read().split()[0] == whole.index.hash
    [folder] = [path for path in (cache / "corpora").iterdir() if path.is_dir()]
    names = {path.name for path in (folder / "shards").iterdir()}
    assert names == {f"{shard.sha256}.tok" for shard in whole.index.shards}


def committed(cache: Path) -> int:
    """How many shards the journal names."""
    folders = [path for path in (cache / "corpora").glob("*") if path.is_dir()]
    return sum(len(r.shards) for f in folders for r in read_journal(f).streams.values())


def test_a_damaged_journal_begins_again(texts: Path, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(status: TokenizeStatus) -> None:
        if status.tokens > 5 * SHARD:
            raise Stop

    source = Source(str(texts), None, tmp_path / "cut")
    with pytest.raises(Stop):
        source.open(ByteTokenizer(), shard_tokens=SHARD, progress=stop)
    assert committed(tmp_path / "cut") >= 4
    [journal] = (tmp_path / "cut" / "corpora").glob("*/progress.json")
    journal.write_bytes(journal.read_bytes()[:-9])
    whole = Source(str(texts), None, tmp_path / "whole").open(ByteTokenizer(), shard_tokens=SHARD)
    assert source.open(ByteTokenizer(), shard_tokens=SHARD).index == whole.index


def test_two_processes_make_one_corpus(texts: Path, tmp_path: Path) -> None:
    processes = [prepare(texts, tmp_path / "cache", pause=0.005) for _ in range(2)]
    first, second = (finish(process)[0] for process in processes)
    assert first == second
    assert len([path for path in (tmp_path / "cache" / "corpora").iterdir() if path.is_dir()]) == 1


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """One line without an end, and many shards; nothing of it stays in memory."""
    peaks = []
    for megabytes in (20, 200):
        path = tmp_path / f"{megabytes}.txt"
        block = b"no line break, just words and more words " * 25_600
        with path.open("wb") as file:
            for _ in range(megabytes):
                file.write(block[: 1 << 20])
        process = prepare(path, tmp_path / "cache", shard=1 << 22)
        peaks.append(int(finish(process)[1]))
        path.unlink()
    assert peaks[1] < peaks[0] + 30, f"{peaks} MB"
