"""Speed of large blobs and updates with the worker's client, compared with a raw TCP copy."""

from __future__ import annotations

import math
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from blocktrain.bench.machine import BenchResult, random_text
from blocktrain.bench.network.shaper import Link, shape_link
from blocktrain.bench.transport.coordinator import coordinator_process
from blocktrain.bench.transport.swarm import join_message, submission, task_request
from blocktrain.errors import RunError
from blocktrain.learning.shards import LARGEST_INDEX, read_index
from blocktrain.protocol import compression, tensors
from blocktrain.protocol import messages as m
from blocktrain.protocol.identity import new_identity
from blocktrain.protocol.transfer import split
from blocktrain.web.client import HttpClient, fetch, fetch_bytes, upload

LINK = Link(rtt_ms=80, mbit=200)
PIECE = 1 << 20
PATIENCE = 60.0  # seconds


@dataclass(frozen=True)
class TransferOptions:
    """How many bytes: an update of this size is uploaded, a corpus of this size downloaded."""

    megabytes: float = 100.0  # of either
    seed: int = 0
    link: Link = LINK

    @property
    def width(self) -> int:
        """Of a block with one layer, which has 12 numbers of four bytes per width squared."""
        return max(8, 4 * round(math.sqrt(self.megabytes * 1e6 / 48) / 4))

    @property
    def flags(self) -> list[str]:
        """One large block whose updates are sent as they are; every update makes a version."""
        shape = {
            "blocks": 1,
            "layers-per-block": 1,
            "width": self.width,
            "heads": 2,
            "context": 16,
            "z-width": 8,
            "batch": 1,
        }
        policy = {
            "compose": "pool",
            "steps": 10**9,
            "seed": self.seed,
            "compression": "none",
            "task-steps": 1,
            "replicas": 1,
        }
        return [
            word
            for name, value in {**shape, **policy}.items()
            for word in (f"--{name}", str(value))
        ]


def measure_transfers(
    options: TransferOptions, progress: Callable[[float], None] = lambda _: None
) -> BenchResult:
    """Megabytes per second up and down, and their ratio to a raw copy over the same link."""
    with tempfile.TemporaryDirectory(prefix="blocktrain-transfers-") as path:
        folder = Path(path)
        corpus = folder / "corpus.txt"
        corpus.write_bytes(random_text(options.seed, int(options.megabytes * 1e6)).tobytes())
        with coordinator_process(folder, corpus, options.flags) as running:
            progress(0.1)
            near = _TransferClient(running.url, options.seed)
            up, down, sizes = near.upload(), near.download(folder / "near"), near.sizes
            near.client.close()
            progress(0.4)
            with shape_link(*running.address, options.link) as line:
                far = _TransferClient(line.url, options.seed + 1)
                far_up, far_down = far.upload(), far.download(folder / "far")
                far.client.close()
        progress(0.7)
        raw_up, raw_down = _raw(options.link, *sizes)
    return {
        "upload_mb": round(sizes[0] / 1e6, 1),
        "download_mb": round(sizes[1] / 1e6, 1),
        "upload_mb_s": round(up, 1),
        "download_mb_s": round(down, 1),
        "link": {"mbit": options.link.mbit, "rtt_ms": options.link.rtt_ms},
        "link_upload_mb_s": round(far_up, 2),
        "link_download_mb_s": round(far_down, 2),
        "raw_tcp_mb_s": round(raw_up, 2),
        "raw_tcp_down_mb_s": round(raw_down, 2),
        "upload_ratio": round(far_up / raw_up, 3),
        "download_ratio": round(far_down / raw_down, 3),
    }


class _TransferClient:
    """A worker with the real client that uploads a random update instead of training."""

    def __init__(self, url: str, seed: int) -> None:
        self.client, self._seed, self._me = HttpClient(url), seed, new_identity()
        self._join_reply = self.client.join(join_message(self._me))
        self.sizes = (0, 0)

    def upload(self) -> float:
        """Send the payload of a task; bytes a second, in millions."""
        task = self._task()
        schema = tensors.schema_of(tensors.unpack(b"".join(self.client.blob(task.weights.sha256))))
        draw = np.random.default_rng(self._seed)
        payload = compression.compress_weights(
            {name: draw.standard_normal(s.shape, dtype=np.float32) for name, s in schema.items()}
        )
        chunks = split(payload, task.chunk_bytes)
        self.sizes = (len(payload), sum(blob.length for blob in self._shards()))
        began = time.perf_counter()
        upload(self.client, task.task, task.ticket, chunks)
        took = time.perf_counter() - began
        if not self.client.submit(
            submission(self._me, self._join_reply, task, payload, 0.0)
        ).receipt.accepted:
            raise RunError("the uploaded update was refused")
        return len(payload) / took / 1e6

    def download(self, target: Path) -> float:
        """Fetch the corpus; bytes a second, in millions."""
        shards = self._shards()
        began = time.perf_counter()
        for blob in shards:
            fetch(self.client, blob, target / blob.sha256)
        return sum(blob.length for blob in shards) / (time.perf_counter() - began) / 1e6

    def _shards(self) -> list[m.Blob]:
        index = read_index(fetch_bytes(self.client, self._join_reply.corpus.index, LARGEST_INDEX))
        return [
            m.Blob(sha256=shard.sha256, length=index.file_bytes(shard))
            for shard in dict.fromkeys(index.shards)
        ]

    def _task(self) -> m.Task:
        todo = self._join_reply.next
        end = time.monotonic() + PATIENCE
        while isinstance(todo, m.Wait):  # a version of so large a block takes a moment
            if time.monotonic() > end:
                raise RunError(f"the coordinator has no task to upload for: {todo.reason}")
            time.sleep(min(todo.seconds, 1.0))
            todo = self.client.next_task(task_request(self._me, self._join_reply)).next
        return todo


def _raw(link: Link, up: int, down: int) -> tuple[float, float]:
    """The same numbers of bytes through the same kind of line, with nothing but sockets."""
    with _counter() as port, shape_link("127.0.0.1", port, link) as line:
        return tuple(
            _copy((line.host, line.port), size, upward=upward)
            for size, upward in ((up, True), (down, False))
        )  # type: ignore[return-value]


def _copy(address: tuple[str, int], size: int, *, upward: bool) -> float:
    began = time.perf_counter()
    with closing(socket.create_connection(address)) as line:
        line.sendall(size.to_bytes(8) + (b"u" if upward else b"d"))
        if upward:
            _send(line, size)
            line.recv(1)
        else:
            _receive(line, size)
    return size / (time.perf_counter() - began) / 1e6


@contextmanager
def _counter() -> Iterator[int]:
    """A port that takes a requested number of bytes and confirms it, or gives as many."""

    def serve(line: socket.socket) -> None:
        with closing(line), suppress(OSError):
            head = line.recv(9, socket.MSG_WAITALL)
            size = int.from_bytes(head[:8])
            if head[8:] == b"u":
                _receive(line, size)
                line.sendall(b".")
            else:
                _send(line, size)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)


def _send(line: socket.socket, size: int) -> None:
    content = memoryview(bytes(PIECE))
    for start in range(0, size, PIECE):
        line.sendall(content[: min(PIECE, size - start)])


def _receive(line: socket.socket, size: int) -> None:
    buffer = bytearray(PIECE)
    while size > 0:
        count = line.recv_into(buffer)
        if not count:
            raise RunError("the raw copy ended early")
        size -= count
