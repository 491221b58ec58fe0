"""Simulated hosts: each a network namespace behind its own link, or plain processes without one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from blocktrain.bench.network import namespaces
from blocktrain.bench.network.shaper import (
    BUFFER,
    LOCALHOST,
    QUEUE_SECONDS,
    Link,
    ShapedLink,
    shape_link,
)
from blocktrain.errors import RunError

HostKind = Literal["namespaces", "processes"]
MOST = 250


@dataclass(frozen=True)
class Host:
    """A place to start processes in, and the link through which they reach the server."""

    name: str
    kind: HostKind
    link: ShapedLink

    @property
    def url(self) -> str:
        """The server as it is called from this host."""
        return self.link.url

    def command(self, argv: list[str]) -> list[str]:
        """The command that runs this one on the host."""
        return ["ip", "netns", "exec", self.name, *argv] if self.kind == "namespaces" else argv


@contextmanager
def hosts(count: int, link: Link, port: int, kind: HostKind | None = None) -> Iterator[list[Host]]:
    """Hosts that reach a loopback port of this machine, each through its own link."""
    if not 1 <= count <= MOST:
        raise RunError(f"between 1 and {MOST} hosts, not {count}")
    kind = kind or ("namespaces" if namespaces_possible() else "processes")
    with ExitStack() as stack:
        started = []
        for index in range(count):
            name, mine = (
                f"{namespaces.PREFIX}-{os.getpid()}-{index}",
                replace(link, seed=link.seed + index),
            )
            if kind == "namespaces":  # the kernel limits the bandwidth of this one
                near = stack.enter_context(namespaces.connect(name, _tc_arguments(link)))
                line = shape_link(
                    LOCALHOST, port, replace(mine, mbit=0), listen=namespaces.NEAR, network=near
                )
            else:
                line = shape_link(LOCALHOST, port, mine)
            started.append(Host(name, kind, stack.enter_context(line)))
        yield started


def namespaces_possible() -> bool:
    """Whether this process may make network namespaces and narrow their links."""
    return namespaces.possible(_tc_arguments(Link(mbit=100)))


def _tc_arguments(link: Link) -> list[str]:
    """The link's bandwidth in tc's words."""
    if not link.mbit:
        return []
    burst, queue = str(max(BUFFER // 4, int(link.mbit * 1250))), f"{int(QUEUE_SECONDS * 1000)}ms"
    return ["tbf", "rate", f"{link.mbit}mbit", "burst", burst, "latency", queue]
