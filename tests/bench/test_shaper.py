"""The link shaper on real sockets: time, bytes, faults, and hosts behind shaped links."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from blocktrain.bench.network.hosts import hosts, namespaces_possible
from blocktrain.bench.network.shaper import (
    BUFFER,
    Counters,
    Fate,
    Link,
    ShapedLink,
    fates,
    shape_link,
)
from blocktrain.errors import ConfigError

SLACK = 0.06  # seconds that a machine may be late; never early
TRIES = 3  # of which one must be in time: the machine may stand still for a while


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    """A port. The first byte of a connection chooses what it does.

    e: echo. s: read all, then send how much. d: never read.
    """

    def answer(line: socket.socket) -> None:
        with line, suppress(OSError):
            kind, total = line.recv(1), 0
            if kind == b"d":
                threading.Event().wait(20)
            while content := line.recv(1 << 20):
                total += len(content)
                if kind == b"e":
                    line.sendall(content)
            line.sendall(str(total).encode())

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)


def connect(line: ShapedLink, kind: bytes) -> socket.socket:
    connection = socket.create_connection((line.host, line.port), timeout=120)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(kind)
    return connection


def echo(connection: socket.socket, content: bytes = b"x") -> float:
    """Seconds until it has all come back."""
    begun, missing = time.monotonic(), len(content)
    connection.sendall(content)
    while missing:
        missing -= len(connection.recv(1 << 16)) or pytest.fail("the line ended")
    return time.monotonic() - begun


def sink(connection: socket.socket, size: int) -> float:
    begun = time.monotonic()
    connection.sendall(bytes(size))
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(100) == str(size).encode()
    return time.monotonic() - begun


@pytest.mark.parametrize("apart", [True, False])
def test_a_round_trip_takes_its_time_and_connecting_one_more(server: int, apart: bool) -> None:
    with shape_link("127.0.0.1", server, Link(rtt_ms=60), apart=apart) as line:
        with connect(line, b"e") as connection:
            took = [echo(connection) for _ in range(6)]
            assert line.counters() == Counters(up=7, down=6, connections=1)
        assert 0.059 <= min(took) <= 0.06 + SLACK / 4
        connecting = []
        for _ in range(TRIES):
            begun = time.monotonic()
            with connect(line, b"e") as connection:
                echo(connection)
                connecting.append(time.monotonic() - begun)
        assert 0.119 <= min(connecting) <= 0.12 + SLACK


def test_jitter_delays_and_never_reorders(server: int) -> None:
    with (
        shape_link("127.0.0.1", server, Link(rtt_ms=4, jitter_ms=10, seed=3), apart=False) as line,
        connect(line, b"e") as connection,
    ):
        took = [echo(connection) for _ in range(12)]
        assert max(took) - min(took) > 0.004
        sent = b"".join(number.to_bytes(4) for number in range(30_000))
        threading.Thread(target=connection.sendall, args=(sent,)).start()
        received = b""
        while len(received) < len(sent):
            received += connection.recv(1 << 16)
        assert received == sent


def test_connections_share_the_bandwidth(server: int) -> None:
    size, mbit = 1_500_000, 40
    with shape_link("127.0.0.1", server, Link(mbit=mbit)) as line:
        least = size * 8 / mbit / 1e6
        alone: list[float] = []
        together: list[list[float]] = []
        for _ in range(TRIES):
            with connect(line, b"s") as connection:
                alone.append(sink(connection, size))
            with (
                connect(line, b"s") as one,
                connect(line, b"s") as other,
                ThreadPoolExecutor(2) as both,
            ):
                together.append(
                    list(both.map(lambda connection: sink(connection, size), (one, other)))
                )
        assert least * 0.97 <= min(alone) <= least + 2 * SLACK
        assert max(map(min, together)) >= 2 * least * 0.75  # neither went ahead of the other
        assert 2 * least * 0.97 <= min(map(max, together)) <= 2 * least + 4 * SLACK


def test_what_befalls_a_segment_is_a_function_of_the_seed() -> None:
    link = Link(loss=0.1, reset=0.02, seed=5)

    def drawn(which: Link, number: int = 1, way: str = "up") -> list[Fate]:
        return list(itertools.islice(fates(which, number, way), 2000))

    assert drawn(link) == drawn(link)
    assert drawn(link) != drawn(Link(loss=0.1, reset=0.02, seed=6))
    assert drawn(link) != drawn(link, 2)
    assert drawn(link) != drawn(link, 1, "down")
    assert 140 <= drawn(link).count(Fate.STALL) <= 260
    assert 15 <= drawn(link).count(Fate.RESET) <= 75
    assert set(drawn(Link())) == {Fate.PASS}
    with pytest.raises(ConfigError, match="probabilities"):
        Link(loss=0.7, reset=0.7)


def test_losses_are_the_same_stalls_every_time(server: int) -> None:
    link, size = Link(loss=0.2, seed=9), 1_000_000
    # The letter that says what the server shall do is the first byte of the stream.
    expected = list(itertools.islice(fates(link, 1, "up"), -(-(size + 1) // 65536))).count(
        Fate.STALL
    )
    assert expected
    for _ in range(2):
        with (
            shape_link("127.0.0.1", server, link, apart=False) as line,
            connect(line, b"s") as connection,
        ):
            took = sink(connection, size)
            below = list(itertools.islice(fates(link, 1, "down"), 1)).count(Fate.STALL)
            assert line.counters().stalls == expected + below
            assert took >= 0.19


def test_resets_come_where_the_seed_says(server: int) -> None:
    link = Link(reset=0.3, seed=1)
    fatal = list(itertools.islice(fates(link, 1, "up"), 100)).index(Fate.RESET)
    with (
        shape_link("127.0.0.1", server, link, apart=False) as line,
        connect(line, b"s") as connection,
    ):
        with pytest.raises((ConnectionError, AssertionError)):
            sink(connection, 8_000_000)
        counters = line.counters()
        assert counters.resets == 1
        assert counters.up <= fatal * 65536
        assert counters.waiting == 0


def test_a_fast_sender_is_pushed_back(server: int) -> None:
    link = Link(rtt_ms=50, mbit=80)
    with shape_link("127.0.0.1", server, link) as line, connect(line, b"d") as connection:
        connection.settimeout(0.5)
        sent, most = 0, 0
        with suppress(TimeoutError):
            while sent < 100_000_000:
                sent += connection.send(bytes(1 << 16))
                most = max(most, line.counters().waiting)
        assert sent < 30_000_000  # what the kernels on the way keep, and a window
        assert most <= link.window + link.piece
        assert link.window < 80e6 / 8 * 0.1 + 2 * BUFFER


def test_a_black_hole_says_nothing_and_can_be_mended(server: int) -> None:
    with shape_link("127.0.0.1", server, Link()) as line, connect(line, b"e") as connection:
        echo(connection)
        line.block()
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            echo(connection)
        line.open()
        connection.settimeout(20)
        assert connection.recv(1) == b"x"  # what was sent into it arrives after all
        line.close()
        with pytest.raises(ConnectionError):
            echo(connection)
            connection.recv(1)
        with pytest.raises(ConnectionError), connect(line, b"e") as refused:
            refused.recv(1) or pytest.fail("closed, not reset")
        line.open()
        with connect(line, b"e") as fresh:
            echo(fresh)


def test_a_missing_server_resets_the_connection(server: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    with (
        shape_link("127.0.0.1", port, Link(), apart=False) as line,
        pytest.raises(ConnectionError),
        connect(line, b"e") as connection,
    ):
        connection.recv(1)


CLIENT = """
import socket, sys, time
line = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=120)
line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
line.sendall(b"e")
took = []
for _ in range(5):
    begun = time.monotonic()
    line.sendall(b"x")
    line.recv(1)
    took.append(time.monotonic() - begun)
print(min(took))
took = []
for _ in range(3):
    line = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=120)
    begun = time.monotonic()
    line.sendall(b"s" + bytes(3_000_000))
    line.shutdown(socket.SHUT_WR)
    line.recv(10)
    took.append(time.monotonic() - begun)
print(min(took))
print(len(socket.if_nameindex()))
"""


@pytest.mark.parametrize("kind", ["namespaces", "processes"])
def test_hosts_reach_the_server_through_their_own_link(server: int, kind: str) -> None:
    if kind == "namespaces" and not namespaces_possible():
        pytest.skip("this system allows no network namespaces (root, ip and tc are needed)")
    before = socket.if_nameindex()
    with hosts(2, Link(rtt_ms=30, mbit=40, seed=4), server, kind) as started:  # type: ignore[arg-type]
        assert (
            socket.if_nameindex() == before
        )  # a browser here would break off what it loads, were this machine's own network changed
        assert [(host.kind, host.link.link.seed) for host in started] == [(kind, 4), (kind, 5)]
        running = [
            subprocess.Popen(
                host.command([sys.executable, "-c", CLIENT, host.link.host, str(host.link.port)]),
                stdout=subprocess.PIPE,
                text=True,
            )
            for host in started
        ]
        for process, host in zip(running, started, strict=True):
            round_trip, upload, interfaces = (process.communicate(timeout=180)[0]).split()
            assert process.returncode == 0
            assert 0.029 <= float(round_trip) <= 0.03 + SLACK
            assert 0.5 <= float(upload) <= 1.2  # 0.6 s at 40 Mbit, each for itself, less a burst
            assert host.link.counters().up >= 9_000_000
            if kind == "namespaces":
                assert int(interfaces) == 2  # loopback and the cable


@pytest.mark.skipif(
    not namespaces_possible(),
    reason="this system allows no network namespaces (root, ip and tc are needed)",
)
def test_namespaces_go_also_after_an_error(server: int) -> None:
    def list_namespaces() -> str:
        return subprocess.run(
            ["ip", "netns", "list"], capture_output=True, text=True, check=True
        ).stdout

    with pytest.raises(ZeroDivisionError), hosts(1, Link(), server) as started:
        name = started[0].name
        assert name in list_namespaces()
        raise ZeroDivisionError
    assert name not in list_namespaces()
