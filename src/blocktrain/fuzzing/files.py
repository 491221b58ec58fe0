"""Parsers of files: keys, settings, corpora, tokenizers, run folders, logs, tapes."""

from __future__ import annotations

import gzip
import io
import json
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from itertools import islice
from pathlib import Path

import tomli_w
import torch
from backports import zstd

from blocktrain.config import make_config, read_new_settings, read_origin
from blocktrain.fuzzing.samples import sample_messages, sample_value
from blocktrain.fuzzing.target import FuzzTarget
from blocktrain.learning.corpus.files import LocalFile
from blocktrain.learning.corpus.mixture import read_mixture
from blocktrain.learning.corpus.pieces import Mark
from blocktrain.learning.corpus.readers import reader_of
from blocktrain.learning.corpus.token_corpus import valid_stretches
from blocktrain.learning.corpus.writer import JOURNAL, Journal, read_journal
from blocktrain.learning.shards import CorpusIndex, SequenceOrder, read_index
from blocktrain.learning.tokenizer import JsonTokenizer
from blocktrain.learning.train import read_state, write_state
from blocktrain.learning.vocabulary import train_bpe
from blocktrain.protocol.identity import load_identity, open_identity
from blocktrain.runs.fleet import read_fleet
from blocktrain.runs.folder import FORMAT, create_run, open_run, read_manifest
from blocktrain.runs.texts import read_texts
from blocktrain.serving.line.address import read_key
from blocktrain.simulation.tape import Tape, draw_tape, read_tape
from blocktrain.watch.feed import as_event, read_events
from blocktrain.web.guard import read_keys
from blocktrain.worker.state import BlockFolder, PendingUpdate, WorkerCache

PIECES = 100  # of a corpus that are read
SETTINGS = {"blocks": 2, "width": 16, "heads": 2, "context": 16, "steps": 10}


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="blocktrain-fuzz-")


def at(name: str) -> Path:
    """A path in a folder that is gone at the end."""
    path = Path(_folder().name) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def as_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """The parser of a file, fed with what the file holds. Only its owner can read it."""

    def feed(content: bytes) -> object:
        path = at(name)
        path.touch(mode=0o600)
        path.write_bytes(content)
        return read(path)

    return feed


def written(name: str, write: Callable[[Path], object]) -> Callable[[], list[bytes]]:
    """What a program of ours writes there."""

    def make() -> list[bytes]:
        path = at(f"seeds/{name}")
        if not path.exists():
            write(path)
        return [path.read_bytes()]

    return make


def read_settings_file(path: Path) -> None:
    settings, about = read_new_settings(path)
    read_origin(about, path)
    make_config(settings)


def read_pieces(path: Path) -> None:
    for _ in islice(reader_of(LocalFile(path)).pieces(Mark()), PIECES):
        pass


def read_corpus_index(content: bytes) -> None:
    """As a worker uses it."""
    index = read_index(content)
    valid_stretches(index)
    SequenceOrder(index, 16, 0, 1).places(0, 2)


def read_log(path: Path) -> None:
    read_events(path)
    for line in path.read_bytes().splitlines():
        as_event(line)


def use_tokenizer(content: bytes) -> None:
    tokenizer = JsonTokenizer(content)
    tokenizer.decode(tokenizer.encode(b"the cat\xff sat  on \xe2\x98\x83"))


def read_pending(path: Path) -> None:
    """The update that a worker finds at its start. One that cannot be read is removed."""
    BlockFolder(path.parent).pending()


def read_last_block(path: Path) -> None:
    """Which block it trained last."""
    WorkerCache(path.parents[1], path.stem, shared=True).held_state()


def manifest_seeds() -> Iterable[bytes]:
    config = make_config(SETTINGS)
    content = {
        "format": FORMAT,
        "settings": config.model_dump(),
        "fingerprint": config.fingerprint,
        "data": "stdlib",
        "pool_weights": [0.5, 0.5][: config.independent],
        "composition": {"name": config.compose, "reason": "", "nats_per_token": {}, "tokens": 0},
        "files": {"block-1.safetensors": "a" * 64},
        "reference": None,
    }
    yield json.dumps(content).encode()


def index_seeds() -> Iterable[bytes]:
    yield sample_messages(CorpusIndex)[0]
    shard = {"sha256": "a" * 64, "tokens": 500, "bytes": 900}
    source = {"name": "a", "weight": 0.5, "shards": [shard, shard], "valid_tokens": 500}
    mixed = sample_value(CorpusIndex, full=True) | {"sources": [source, source]}
    yield json.dumps(mixed | {"valid": [shard, shard], "calibration": [shard]}).encode()


def parquet_seeds() -> Iterable[bytes]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        return
    for kind in ("NONE", "SNAPPY"):
        out = io.BytesIO()
        table = pyarrow.table({"text": ["one", None, "three"] * 5, "n": list(range(15))})
        parquet.write_table(table, out, compression=kind)
        yield out.getvalue()


def _event(number: int) -> bytes:
    return b'{"seq":%d,"kind":"step","at":1.5,"block":1,"loss":2.5}\n' % number


FLEET = b"""[[machine]]
name = "box"
count = 3
device = "rtx3060"
[[machine]]
name = "other"
memory = "16 GB"
flops = 1e12
tokens_per_second = 900.0
up = 20
"""
MIXTURE = b'[[source]]\ndata = "stdlib"\nweight = 0.7\n[[source]]\ndata = "a.txt:text"\n'
LINES = (
    b'{"text": "one"}\n\n{"more": [1, {}], "text": "caf\\u00e9 \\ud83d\\ude42"}\n{"text": null}\n'
)
TEXT = b"".join(b"line %d of a text: caf\xc3\xa9\n" % n for n in range(40))

FILES: tuple[FuzzTarget, ...] = (
    FuzzTarget(
        "identity-file", as_file("identity.pem", load_identity), written("i.pem", open_identity)
    ),
    FuzzTarget("stage-key-file", as_file("stage.key", read_key), lambda: [b"0123456789abcdef\n"]),
    FuzzTarget(
        "api-keys-file",
        as_file("keys.txt", read_keys),
        lambda: [b"# ours\n0123456789abcdef\n\nfedcba9876543210\n"],
    ),
    FuzzTarget(
        "settings-file",
        as_file("settings.toml", read_settings_file),
        lambda: [tomli_w.dumps({"from": "a", **make_config({}).model_dump()}).encode()],
    ),
    FuzzTarget("fleet-file", as_file("fleet.toml", read_fleet), lambda: [FLEET]),
    FuzzTarget("mixture-file", as_file("mix.toml", read_mixture), lambda: [MIXTURE]),
    FuzzTarget(
        "run-settings",
        as_file("run/config.toml", lambda path: open_run(path.parent)),
        written("run/config.toml", lambda path: create_run(path.parent, make_config({}), "stdlib")),
    ),
    FuzzTarget(
        "model-manifest",
        as_file(
            "model/model/config.json", lambda path: read_manifest(path.parent.parent).model_hash
        ),
        manifest_seeds,
    ),
    FuzzTarget(
        "state-file",
        as_file("state.safetensors", read_state),
        written("s", lambda path: write_state(path, {"a": torch.ones(2, 3)}, '{"step": 1}')),
    ),
    FuzzTarget(
        "event-log",
        as_file("events.jsonl", read_log),
        lambda: [b"".join(map(_event, range(1, 5))), b'{ "kind": "join", "seq": 3 }'],
    ),
    FuzzTarget(
        "pending-update",
        as_file("block-1/pending.json", read_pending),
        lambda: sample_messages(PendingUpdate),
    ),
    FuzzTarget(
        "last-block",
        as_file("cache/workers/a.json", read_last_block),
        lambda: [b'{"run": "a", "block": 1}'],
    ),
    FuzzTarget("tokenizer", use_tokenizer, lambda: [train_bpe(TEXT, 280)]),
    FuzzTarget("corpus-text", as_file("corpus.txt", read_pieces), lambda: [TEXT]),
    FuzzTarget("corpus-lines", as_file("corpus.jsonl", read_pieces), lambda: [LINES]),
    FuzzTarget(
        "corpus-gzip", as_file("corpus.txt.gz", read_pieces), lambda: [gzip.compress(TEXT, mtime=0)]
    ),
    FuzzTarget(
        "corpus-zstd", as_file("corpus.jsonl.zst", read_pieces), lambda: [zstd.compress(LINES)]
    ),
    FuzzTarget("corpus-parquet", as_file("corpus.parquet", read_pieces), parquet_seeds),
    FuzzTarget("corpus-index", read_corpus_index, index_seeds),
    FuzzTarget(
        "corpus-journal",
        as_file(JOURNAL, lambda path: read_journal(path.parent)),
        lambda: sample_messages(Journal),
    ),
    FuzzTarget("evaluation-texts", as_file("texts.jsonl", read_texts), lambda: [LINES[:16] * 2]),
    FuzzTarget(
        "tape",
        as_file("tape.json", read_tape),
        lambda: [*sample_messages(Tape), draw_tape(3).write().encode()],
    ),
)
