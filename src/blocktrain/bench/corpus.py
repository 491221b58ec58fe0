"""A corpus that is much larger than memory: how long tokenizing takes, when a coordinator is ready,
what a worker fetches before its first step, and what both keep in memory.

All at two sizes, so that growth can be seen. Tokenizing and fetching are killed in the middle.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blocktrain.bench.machine import BenchResult
from blocktrain.bench.network.shaper import Link, shape_link
from blocktrain.bench.transport.coordinator import coordinator_process
from blocktrain.errors import RunError
from blocktrain.learning.corpus.source import Source, training_text
from blocktrain.learning.shards import SHARD_TOKENS, read_index
from blocktrain.learning.vocabulary import resolve_tokenizer
from blocktrain.processes import Channel, Job, peak_mb, run_jobs
from blocktrain.worker.shards import PARTIAL, ROOM

LINES, LINE_BYTES, BLOCK_LINES = 1 << 16, 64, 1 << 14
WORDS = 4096
PATIENCE = 600.0  # seconds for anything that a worker does
SLOW = Link(rtt_ms=1.0, mbit=4.0)  # so slow that a shard can be caught in the middle
RUN = (
    "--blocks 1 --compose pool --layers-per-block 1 --width 16 --heads 2 --context 64 --z-width 8 "
    "--batch 8 --steps 40 --task-steps 10 --warmup 1"
)


@dataclass(frozen=True)
class CorpusOptions:
    """How much text, and how it is tokenized."""

    folder: Path
    gigabytes: float
    tokenizer: str = "bytes"
    seed: int = 0
    shard_tokens: int = SHARD_TOKENS

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of text: a quarter, and all of it."""
        whole = int(self.gigabytes * 1e9)
        return whole // 4, whole


def measure_corpus(
    options: CorpusOptions, progress: Callable[[float], None] = lambda _: None
) -> BenchResult:
    """Figures for a quarter of the text and for all of it; what was written is removed."""
    rows, kills = list[dict[str, Any]](), dict[str, Any]()
    for number, size in enumerate(options.sizes):
        folder = options.folder / f"{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            write_text(folder / "text.txt", size, options.seed)
            progress(0.1 + number / 2)
            rows.append(_measure_size(options, folder, size))
            if not number:
                kills = {**_kill_tokenizing(options, folder), **_kill_fetch(folder)}
            progress(0.5 + number / 2)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return {
        "tokenizer": options.tokenizer,
        "rows": rows,
        "coordinator_grows_mb": round(rows[1]["coordinator_mb"] - rows[0]["coordinator_mb"], 1),
        "worker_grows_mb": round(rows[1]["worker_mb"] - rows[0]["worker_mb"], 1),
        **kills,
    }


def write_text(path: Path, size: int, seed: int) -> None:
    """Lines of words, the same for the same seed; a gigabyte takes seconds."""
    draw = np.random.Generator(np.random.Philox(seed))
    letters = draw.integers(ord("a"), ord("z") + 1, (WORDS, 7), dtype=np.uint8)
    words = [bytes(word[: 2 + n % 6]) for n, word in enumerate(letters)]
    picks = draw.integers(0, WORDS, (LINES, LINE_BYTES // 3))
    lines = [
        b" ".join(words[n] for n in row)[: LINE_BYTES - 1].ljust(LINE_BYTES - 1, b".") + b"\n"
        for row in picks
    ]
    table = np.frombuffer(b"".join(lines), np.uint8).reshape(LINES, LINE_BYTES)
    with path.open("wb") as out:
        while (left := size - out.tell()) > 0:
            out.write(table[draw.integers(0, LINES, BLOCK_LINES)].tobytes()[:left])


def _measure_size(options: CorpusOptions, folder: Path, size: int) -> dict[str, Any]:
    tokenized: dict[str, Any] = {}
    job = Job("tokenize", tokenize_process, (options, folder / "text.txt", folder / "cache"))
    began = time.monotonic()
    run_jobs([job], 1, lambda _, message: tokenized.update(message))
    seconds = time.monotonic() - began
    (folder / "corpus").symlink_to(tokenized["folder"])
    index = read_index((folder / "corpus" / "index.json").read_bytes())
    began = time.monotonic()
    with coordinator_process(folder, folder / "corpus", _flags(options, folder)) as running:
        ready = time.monotonic() - began
        with worker_process(running.url, folder / "worker") as worker:
            names = {shard.sha256 for shard in index.shards}
            fetched = [e for e in worker.until("step") if e.get("sha256") in names]
            worker.until("accepted")
            figures = {
                "first_task_shards": len(fetched),
                "first_step_seconds": round(worker.seconds, 2),
                "worker_mb": highest_mb(worker.process.pid),
                "worker_shards": len(list((folder / "worker" / "shards").glob("*.tok"))),
            }
        coordinator = highest_mb(running.pid)
    return {
        "gigabytes": round(size / 1e9, 3),
        "tokens": index.train_tokens,
        "shards": len(list(index.shards)),
        "tokenize_seconds": round(seconds, 1),
        "tokenize_mb": tokenized["peak_mb"],
        "ready_seconds": round(ready, 2),
        "coordinator_mb": coordinator,
        **figures,
    }


def _flags(options: CorpusOptions, folder: Path) -> list[str]:
    tokenizer = folder / "tokenizer.json"
    named = ["--tokenizer", str(tokenizer)] if tokenizer.exists() else []
    return [*RUN.split(), "--seed", str(options.seed), *named]


def tokenize_process(channel: Channel, options: CorpusOptions, text: Path, cache: Path) -> None:
    """Tokenize a text; tells the folder of the corpus and the peak of memory."""
    source = Source(str(text), None, cache)
    tokenizer = resolve_tokenizer(options.tokenizer, lambda: training_text(source), cache)
    if options.tokenizer != "bytes":
        (text.parent / "tokenizer.json").write_bytes(tokenizer.content)  # type: ignore[attr-defined]
    corpus = source.open(tokenizer, shard_tokens=options.shard_tokens)
    channel.send(folder=str(corpus.folder.resolve()), peak_mb=peak_mb())


def _kill_tokenizing(options: CorpusOptions, folder: Path) -> dict[str, Any]:
    """Tokenize again in another cache, killed after a third and after two thirds."""
    wanted = (folder / "corpus" / "index.json").read_bytes()
    count = len(list(read_index(wanted).shards))
    cache, killed = folder / "killed", 0
    for share in (1 / 3, 2 / 3):
        process = multiprocessing.get_context("spawn").Process(
            target=_tokenize, args=(options, folder / "text.txt", cache), daemon=True
        )
        process.start()
        while (
            process.is_alive() and len(list(cache.glob("corpora/*/shards/*.tok"))) < share * count
        ):
            time.sleep(0.002)
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
            killed += 1
        process.join()
    _tokenize(options, folder / "text.txt", cache)
    (index,) = cache.glob("corpora/*/index.json")
    intact = all(_sha256(path) == path.stem for path in index.parent.glob("shards/*.tok"))
    same = intact and index.read_bytes() == wanted
    shutil.rmtree(cache)
    return {"kills_while_tokenizing": killed, "same_shards_after_kills": same}


def _tokenize(options: CorpusOptions, text: Path, cache: Path) -> None:
    source = Source(str(text), None, cache)
    tokenizer = resolve_tokenizer(options.tokenizer, lambda: training_text(source), cache)
    source.open(tokenizer, shard_tokens=options.shard_tokens)


def _kill_fetch(folder: Path) -> dict[str, Any]:
    """A worker on a slow line, killed in the middle of a shard; the next one continues it."""
    shards = folder / "slow" / "shards"
    with coordinator_process(folder / "again", folder / "corpus", _again(folder)) as running:
        with (
            shape_link(*running.address, SLOW) as line,
            worker_process(line.url, folder / "slow") as worker,
        ):
            partial = _await_partial(shards, worker)
            os.kill(worker.process.pid, signal.SIGKILL)
            worker.process.wait()
        size = partial.stat().st_size
        with worker_process(running.url, folder / "slow") as worker:
            worker.until("accepted")
    same = all(_sha256(path) == path.stem for path in shards.glob("*.tok"))
    whole = (shards / partial.name.removesuffix(".partial")).stat().st_size
    return {
        "killed_at_byte": size,
        "of_a_shard_of": whole,
        "same_bytes_after_the_kill": same,
    }


def _again(folder: Path) -> list[str]:
    tokenizer = folder / "tokenizer.json"
    (folder / "again").mkdir()
    return [*RUN.split(), *(["--tokenizer", str(tokenizer)] if tokenizer.exists() else [])]


def _await_partial(shards: Path, worker: WorkerWatch) -> Path:
    """A shard of which an eighth has arrived."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and worker.process.poll() is None:
        for path in shards.glob("*.partial"):
            room = path.with_name(path.name.replace(PARTIAL, ROOM))
            if room.exists() and path.stat().st_size >= room.stat().st_size / 8:
                return path
        time.sleep(0.002)
    raise RunError("the worker was not caught while it was fetching")


class WorkerWatch:
    """A worker process, and the events that it prints."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self._began = process, time.monotonic()
        self.seconds = 0.0  # from its start to the last event that was waited for

    def until(self, kind: str) -> list[dict[str, Any]]:
        """The events up to the first of a kind."""
        events: list[dict[str, Any]] = []
        late = threading.Timer(PATIENCE, self.process.kill)
        late.start()
        try:
            for line in self.process.stdout or ():
                events.append(json.loads(line))
                if events[-1]["kind"] == kind:
                    self.seconds = time.monotonic() - self._began
                    return events
        finally:
            late.cancel()
        raise RunError(f"the worker ended before its first event {kind!r}; its last: {events[-1:]}")


@contextmanager
def worker_process(url: str, cache: Path) -> Iterator[WorkerWatch]:
    """`blocktrain worker` with a cache of its own; ends with the block."""
    command = [sys.executable, "-m", "blocktrain", "worker", url, "--cache", str(cache)]
    process = subprocess.Popen(
        [*command, "--device", "cpu", "--json"], stdout=subprocess.PIPE, text=True
    )
    try:
        yield WorkerWatch(process)
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def highest_mb(pid: int) -> float:
    """The most memory that a process has had, of its own and of files that it maps."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return round(int(line.split()[1]) * 1024 / 1e6, 1)
    raise RunError("this bench reads /proc: it needs Linux, and its processes alive")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
