"""What `blocktrain doctor` measures: this machine, and the connection to a coordinator.

The judgement is in `diagnosis`. Torch is imported where it is used: a broken one must not hide
what else is wrong.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import ssl
import tempfile
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import getproxies, proxy_bypass

import httpx2

from blocktrain.clock import Clock
from blocktrain.config import Config
from blocktrain.errors import BlockTrainError
from blocktrain.learning.shards import CorpusIndex
from blocktrain.learning.tokenizer import Tokenizer
from blocktrain.protocol.messages import MAX_REPLY
from blocktrain.worker.doctor.diagnosis import CoordinatorAddress, HttpAnswer

TIMEOUT = 4.0  # seconds for a connection, and for every answer
PINGS = 7
READ_BYTES, READ_SECONDS = 16 * 10**6, 2.0
STEPS, STEP_SECONDS = 30, 2.0
WRITTEN = 1 << 16  # bytes of the file that is tried


class CoordinatorProbe:
    """Connects as a worker does: the same trust, proxies and headers, but no retries."""

    def __init__(
        self, address: CoordinatorAddress, token: str, ca: Path | None, clock: Clock
    ) -> None:
        self.address, self._clock = address, clock
        self._trust = _trust(ca)
        headers = {
            "Accept-Encoding": "identity",
            **({"Authorization": f"Bearer {token}"} if token else {}),
        }
        limits = httpx2.Limits(keepalive_expiry=20.0)
        self._http = httpx2.Client(
            base_url=address.url(),
            headers=headers,
            timeout=TIMEOUT,
            verify=self._trust,
            limits=limits,
        )

    def close(self) -> None:
        self._http.close()

    @property
    def proxy(self) -> str:
        """The proxy that the environment names for this address, or nothing."""
        return "" if proxy_bypass(self.address.host) else getproxies().get(self.address.scheme, "")

    def addresses(self) -> list[str]:
        """The IP addresses of the host."""
        entries = socket.getaddrinfo(self.address.host, self.address.port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(item[4][0]) for item in entries))

    def connect(self) -> str:
        """Connects, and returns the IP address that was reached."""
        with self._open() as connection:
            return str(connection.getpeername()[0])

    def handshake(self) -> tuple[dict[str, Any], str]:
        """A TLS handshake as a worker makes it; returns the certificate and the TLS version."""
        with (
            self._open() as plain,
            self._trust.wrap_socket(plain, server_hostname=self.address.host) as secure,
        ):
            return dict(secure.getpeercert() or {}), secure.version() or "TLS"

    def speaks_tls(self) -> bool:
        """Whether the other side speaks TLS, with any certificate."""
        anyone = ssl.create_default_context()
        anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
        try:
            with (
                self._open() as plain,
                anyone.wrap_socket(plain, server_hostname=self.address.host),
            ):
                return True
        except OSError:
            return False

    def _open(self) -> socket.socket:
        return socket.create_connection((self.address.host, self.address.port), timeout=TIMEOUT)

    def get(self, path: str) -> HttpAnswer:
        """The answer, or the beginning of a large one."""
        sent, began, body = self._clock.time(), self._clock.monotonic(), b""
        with self._http.stream("GET", path) as response:
            for piece in response.iter_raw():
                body += piece
                if len(body) > MAX_REPLY or self._clock.monotonic() - began > TIMEOUT:
                    break
        headers = {name.lower(): value for name, value in response.headers.items()}
        return HttpAnswer(
            response.status_code, headers, body[:MAX_REPLY], sent, self._clock.monotonic() - began
        )

    def round_trips(self) -> list[float]:
        """Seconds of some small calls over an open connection."""
        return [self.get("/healthz").seconds for _ in range(PINGS + 1)][1:]

    def download(self, name: str, length: int) -> tuple[int, float]:
        """Bytes and seconds of a download of the end of a blob, cut off after some time."""
        headers = {"Range": f"bytes={max(0, length - READ_BYTES)}-"}
        received, began = 0, self._clock.monotonic()
        with self._http.stream("GET", f"/v1/blobs/{name}", headers=headers) as response:
            if response.status_code != 206:
                raise BlockTrainError(
                    f"the corpus was answered with HTTP {response.status_code}; "
                    "ask the coordinator's operator"
                )
            for piece in response.iter_raw():
                received += len(piece)
                if self._clock.monotonic() - began > READ_SECONDS:
                    break
        return received, self._clock.monotonic() - began


def _trust(ca: Path | None) -> ssl.SSLContext:
    if ca is None:
        return httpx2.create_ssl_context()
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise BlockTrainError(
            f"cannot use the certificate {ca}: {error.strerror or error}; name a PEM file with --ca"
        ) from None


def find_device(name: str) -> tuple[str, str]:
    """The device and what it is, after it has multiplied two matrices."""
    import torch

    from blocktrain.learning.train import pick_device

    device = pick_device(name)
    ones = torch.ones(64, 64, device=device)
    if float((ones @ ones).sum().item()) != 64.0**3:
        raise BlockTrainError(
            f"{device} multiplies wrongly; use --device cpu, "
            "or install a torch made for this device"
        )
    if device.type == "cuda":
        return str(device), torch.cuda.get_device_name(device)
    cores = f"{os.cpu_count()} cores, a worker uses one"
    return str(device), cores if device.type == "cpu" else "the Apple GPU"


def memory_of(device: str) -> tuple[int, int]:
    """Bytes that a device has, and those that are free now."""
    if device.startswith("cuda"):
        import torch

        free, has = torch.cuda.mem_get_info(device)
        return int(has), int(free)
    has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = has
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
        # The limit of a container.
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        free = min(free, int(limit)) if limit.isdecimal() else free
    except OSError:
        pass  # not on this system
    return has, free


def free_space(folder: Path) -> int:
    """Free bytes where a folder is or will be. Really writes a file there, and removes it."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    with tempfile.TemporaryFile(dir=there) as file:
        file.write(bytes(WRITTEN))
        file.flush()
        os.fsync(file.fileno())
    return shutil.disk_usage(there).free


def cached_shards(cache: Path, index: CorpusIndex) -> list[Path]:
    """The shards of a corpus that are in the cache, the last one that was used first."""
    names = {f"{shard.sha256}.tok" for shard in index.shards}
    found = [path for path in (cache / "shards").glob("*.tok") if path.name in names]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def hash_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def corpus_index(
    spec: str, data_folder: Path | None, cache: Path, tokenizer: Tokenizer
) -> CorpusIndex:
    """The index of a corpus on this machine, as a run would have it."""
    from blocktrain.learning.corpus.source import Source

    return Source(spec, data_folder, cache).open(tokenizer).index


def seconds_per_step(config: Config, device: str, clock: Clock) -> float:
    """The median of some real training steps of block 1 on random text."""
    import numpy as np

    from blocktrain.learning.shards import memory_batches
    from blocktrain.learning.threads import limited_threads
    from blocktrain.learning.train import Trainer

    size = max(1 << 16, 4 * config.context)
    text = np.random.default_rng(0).integers(0, config.vocabulary, size, dtype=np.uint32)
    times: list[float] = []
    with limited_threads() if device == "cpu" else nullcontext():
        batches = memory_batches(text, context=config.context, batch=config.batch)
        steps = Trainer(config.replace(device=device), 1).run(batches, STEPS + 1)
        next(steps)  # the first one sets things up
        began = last = clock.monotonic()
        for _ in islice(steps, STEPS):
            now = clock.monotonic()
            times.append(now - last)
            last = now
            if now - began > STEP_SECONDS:
                break
    return median(times)
