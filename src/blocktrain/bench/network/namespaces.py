"""Network namespaces for simulated hosts. The machine's own network is not changed."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from blocktrain.errors import RunError

PREFIX = "blocktrain"
NEAR, FAR, CABLE = "198.18.0.1", "198.18.0.2", "cable"  # 198.18.0.0/15 is set aside for benchmarks
CLONE_NEWNET = 0x40000000


@contextmanager
def connect(name: str, discipline: list[str]) -> Iterator[str]:
    """Two namespaces joined by a cable: `name` for the host's processes, and the returned one.

    In the returned one its server listens on NEAR. `discipline` is a queueing discipline for both
    ends, as arguments of tc; without it the cable is as fast as the machine.
    """
    clear_stale()
    near = f"{name}-near"
    try:
        for namespace in (near, name):
            _run("ip", "netns", "add", namespace)
        _run(
            "ip",
            "-n",
            near,
            "link",
            "add",
            CABLE,
            "type",
            "veth",
            "peer",
            "name",
            CABLE,
            "netns",
            name,
        )
        for namespace, address in ((near, NEAR), (name, FAR)):
            _run("ip", "-n", namespace, "addr", "add", f"{address}/30", "dev", CABLE)
            _run("ip", "-n", namespace, "link", "set", CABLE, "up")
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
            if discipline:
                _run("tc", "-n", namespace, "qdisc", "add", "dev", CABLE, "root", *discipline)
        yield near
    finally:
        for command in (
            ["-n", near, "link", "del", CABLE],
            ["netns", "del", near],
            ["netns", "del", name],
        ):
            with suppress(RunError):
                _run("ip", *command)


def possible(discipline: list[str]) -> bool:
    """Whether this process may make namespaces with this queueing discipline."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        return False
    try:
        with connect(f"{PREFIX}-{os.getpid()}-try", discipline):
            return True
    except RunError:
        return False


def enter(namespace: str) -> None:
    """Move this thread, and the threads and processes that it starts from now on, to a network."""
    with Path(f"/run/netns/{namespace}").open() as entrance:
        _move(entrance.fileno(), namespace)


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Move this thread into a network for a while. Sockets that it makes there stay there."""
    with Path("/proc/thread-self/ns/net").open() as back:
        enter(namespace)
        try:
            yield
        finally:
            _move(back.fileno(), "its own")


def clear_stale() -> None:
    """Remove namespaces whose bench was killed before it could; their cables go with them."""
    for name, pid in re.findall(
        rf"^({PREFIX}-(\d+)-[\w-]+)", _run("ip", "netns", "list"), re.MULTILINE
    ):
        if not _alive(int(pid)):
            with suppress(RunError):
                _run("ip", "netns", "del", name)


def _move(descriptor: int, namespace: str) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) != 0:
        raise RunError(f"cannot enter the network {namespace}: {os.strerror(ctypes.get_errno())}")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _run(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        raise RunError(
            f"{' '.join(command[:4])}: {reason.strip()}; "
            "run the bench as root, or with plain processes"
        ) from None
