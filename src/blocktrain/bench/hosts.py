"""Hosts that are not there: each a network namespace behind a link of its own, or plain processes where the system allows no more."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from blocktrain.bench.shaper import BUFFER, QUEUE_SECONDS, Link, Shaped, shaped
from blocktrain.errors import RunError

Kind = Literal["namespaces", "processes"]
NAME = "blocktrain"
NETWORK = (198, 18)  # 198.18.0.0/15 is set aside for benchmarks: no host of this machine is reached there
MOST = 250


@dataclass(frozen=True)
class Host:
    """A place to start processes in, and the link through which they reach the server."""

    name: str
    kind: Kind
    shaped: Shaped

    @property
    def url(self) -> str:
        """The server as it is called from this host."""
        return self.shaped.url

    def command(self, argv: list[str]) -> list[str]:
        """The command that runs this one on the host."""
        return ["ip", "netns", "exec", self.name, *argv] if self.kind == "namespaces" else argv


@contextmanager
def hosts(count: int, link: Link, port: int, kind: Kind | None = None) -> Iterator[list[Host]]:
    """Hosts that reach the server on this machine's loopback port through one such link each; gone when the block ends."""
    if not 1 <= count <= MOST:
        raise RunError(f"between 1 and {MOST} hosts, not {count}")
    kind = kind or ("namespaces" if namespaces_possible() else "processes")
    with ExitStack() as stack:
        found = []
        for index in range(count):
            mine = replace(link, seed=link.seed + index)
            name, listen = f"{NAME}-{os.getpid()}-{index}", "127.0.0.1"
            if kind == "namespaces":
                listen = stack.enter_context(_namespace(name, index, link))
                mine = replace(mine, mbit=0)  # the kernel narrows this one
            found.append(Host(name, kind, stack.enter_context(shaped("127.0.0.1", port, mine, listen=listen))))
        yield found


def enter(host: str) -> None:
    """Move this process, before it has threads, to a host's network."""
    with Path(f"/run/netns/{host}").open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) != 0:
            raise RunError(f"cannot enter the network of {host}: {os.strerror(ctypes.get_errno())}")


def namespaces_possible() -> bool:
    """Whether this process may make network namespaces and narrow their links."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        return False
    try:
        with _namespace(f"{NAME}-{os.getpid()}-try", MOST, Link(mbit=100)):
            return True
    except RunError:
        return False


@contextmanager
def _namespace(name: str, index: int, link: Link) -> Iterator[str]:
    """A namespace with one cable to this one; gives the address at this end of it."""
    clear_stale()
    outside, inside = f"bt{os.getpid() % 10**7}o{index}", f"bt{os.getpid() % 10**7}i{index}"
    ours, theirs = _addresses(index)
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
        for at, end, address in (([], outside, ours), (["-n", name], inside, theirs)):
            _run("ip", *at, "addr", "add", f"{address}/30", "dev", end)
            _run("ip", *at, "link", "set", end, "up")
            if link.mbit:
                burst, queue = str(max(BUFFER // 4, int(link.mbit * 1250))), f"{int(QUEUE_SECONDS * 1000)}ms"
                _run("tc", *at, "qdisc", "add", "dev", end, "root", "tbf", "rate", f"{link.mbit}mbit", "burst", burst, "latency", queue)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        yield ours
    finally:
        for command in (["ip", "link", "del", outside], ["ip", "netns", "del", name]):
            with suppress(RunError):
                _run(*command)


def clear_stale() -> None:
    """Remove namespaces whose bench was killed before it could; their cables go with them."""
    for name, pid in re.findall(rf"^({NAME}-(\d+)-\w+)", _run("ip", "netns", "list"), re.MULTILINE):
        if not _alive(int(pid)):
            with suppress(RunError):
                _run("ip", "netns", "del", name)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _addresses(index: int) -> tuple[str, str]:
    """Two of a small network that nothing here uses yet; benches side by side begin to look in different places."""
    listed = json.loads(_run("ip", "-j", "-4", "addr", "show"))
    used = {info["local"] for interface in listed for info in interface["addr_info"]}
    first, second = NETWORK
    for block in itertools.count(os.getpid() * 7 + index):
        high, low = divmod(block % (1 << 14) * 4, 256)
        ours = f"{first}.{second}.{high}.{low + 1}"
        if ours not in used:
            return ours, f"{first}.{second}.{high}.{low + 2}"
    raise RunError("no free address")  # pragma: no cover


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise RunError(f"{' '.join(command[:4])}: {said.strip()}; run the bench as root, or with plain processes") from None
