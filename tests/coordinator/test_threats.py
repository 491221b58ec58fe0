"""Threats that the coordinator wards off itself.

Uploads that die, slow strangers, names that are paths, clocks that jump.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pytest

from blocktrain.clock import SimulatedClock
from blocktrain.coordinator.run import NONCE_SECONDS
from blocktrain.errors import RunError
from blocktrain.protocol import messages as m
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.protocol.transfer import sha256, split
from blocktrain.runs.pull import pull
from blocktrain.watch.server import Listen, WatchedCoordinator, open_coordinator, serve_coordinator
from blocktrain.web import guard
from blocktrain.web.client import HttpClient, LocalClient
from support.fake_worker import (
    OPERATOR,
    TOKEN,
    FakeWorker,
    as_task,
    beginning,
    crash,
    snapshot,
    whole_ledger,
)
from support.waiting import PATIENCE, until

HOUR = 3600.0
Address = tuple[str, int]


def kinds(coordinator: WatchedCoordinator, kind: str) -> list[dict[str, Any]]:
    """The ledger's entries of one kind."""
    return [json.loads(e.body) for e in whole_ledger(LocalClient(coordinator)) if e.kind == kind]


# 1: a worker dies while it uploads


@pytest.mark.parametrize("tenths", range(11))
def test_an_upload_that_ends_early_never_counts(tmp_path: Path, tenths: int) -> None:
    clock = SimulatedClock(1000.0)
    with beginning(tmp_path, clock=clock, compression="fp16") as coordinator:
        dying, other = (FakeWorker(LocalClient(coordinator), seed) for seed in (1, 2))
        task = dying.joined()
        payload = dying.payload(task)
        chunks = split(payload, task.chunk_bytes)
        assert len(chunks) >= 20
        arrived = len(chunks) * tenths // 10
        dying.upload(task, b"".join(chunks[:arrived]))
        assert dying.client.upload_state(task.task, task.ticket).have == tuple(range(arrived))
        before = snapshot(coordinator)
        for _ in range(3):
            clock.now += task.lease_seconds / 4
            coordinator.tick()
            assert snapshot(coordinator) == before, "nothing is made of it while its lease lasts"
        clock.now += task.lease_seconds
        coordinator.tick()
        assert [(e["task"], e["fence"]) for e in kinds(coordinator, "expire")] == [
            (task.task, task.fence)
        ]
        assert snapshot(coordinator).blobs == before.blobs and kinds(coordinator, "update") == []

        taken = other.joined()
        assert (taken.task, taken.fence) == (task.task, task.fence + 1)
        assert other.send(taken).receipt.accepted
        assert [e["worker"] for e in kinds(coordinator, "update")] == [other.id]
        assert coordinator.run.newest(task.block).version == 1
        assert coordinator.run.store.contributions() == {other.id: (1, 64)}
        assert sha256(payload) not in snapshot(coordinator).blobs


def test_a_submission_without_all_chunks_is_refused(tmp_path: Path) -> None:
    with beginning(
        tmp_path, clock=SimulatedClock(1000.0), compression="fp16", replicas=1000
    ) as coordinator:
        worker = FakeWorker(LocalClient(coordinator))
        task = worker.joined()
        payload = worker.payload(task)
        chunks = split(payload, task.chunk_bytes)
        before = snapshot(coordinator)
        for tenths in range(10):
            worker.upload(task, b"".join(chunks[: len(chunks) * tenths // 10]))
            with pytest.raises(Refused) as caught:
                worker.client.submit(worker.submission(task, payload))
            assert caught.value.code == Code.MISSING_CHUNKS
            assert snapshot(coordinator) == before
        assert worker.send(task, payload).receipt.accepted


# 13: strangers who are slow


@contextmanager
def listening(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **policy: Any
) -> Iterator[tuple[WatchedCoordinator, guard.Occupancy, str]]:
    """A coordinator behind HTTP, and the counters of those who came in."""
    counters: list[guard.Occupancy] = []

    def occupancy() -> guard.Occupancy:
        counters.append(made())
        return counters[-1]

    made = guard.Occupancy
    monkeypatch.setattr(guard, "Occupancy", occupancy)
    with (
        beginning(folder, **policy) as coordinator,
        serve_coordinator(coordinator, Listen(token=TOKEN, operator_token=OPERATOR)) as url,
    ):
        yield coordinator, counters[0], url


def address_of(url: str) -> Address:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


class Crowd:
    """Sockets that send a byte now and then and never read, all in one thread.

    Counts those that the server has closed.
    """

    def __init__(self, target: Address) -> None:
        self.target = target
        self.lines: dict[socket.socket, Iterator[int]] = {}
        self.closed = 0
        self.statuses: list[int] = []  # of the answers that they were given
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def add(self, count: int, source: str, head: bytes, rest: bytes) -> None:
        """More of them, from one address: the head at once, the rest in drops."""
        for _ in range(count):
            line = socket.create_connection(
                self.target, timeout=PATIENCE, source_address=(source, 0)
            )
            with suppress(ConnectionError):  # a busy machine: it was hung up on already
                line.sendall(head)
            line.setblocking(False)
            self.lines[line] = iter(rest)

    def __enter__(self) -> Crowd:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for line in self.lines:
            line.close()

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            for line, rest in list(self.lines.items()):
                if not self._is_open(line, rest):
                    del self.lines[line]
                    line.close()
                    self.closed += 1

    def _is_open(self, line: socket.socket, rest: Iterator[int]) -> bool:
        try:
            line.send(bytes([next(rest)]))
            answer = line.recv(4096)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if answer.startswith(b"HTTP/1.1 "):
            self.statuses.append(int(answer.split()[1]))
        return bool(answer)


SLOW_HEAD = b"GET /v1/run HTTP/1.1\r\nHost: x\r\n"
SLOW_BODY = (
    f"POST /v1/join HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    "Content-Type: application/json\r\nContent-Length: 60000\r\n\r\n"
).encode()


def three_hundred(target: Address) -> Crowd:
    """Half of them never end their headers, the others never their body.

    There are 75 from each of two addresses.
    """
    crowd = Crowd(target)
    crowd.add(150, "127.0.0.2", SLOW_HEAD, b"X-Slow: " + b"x" * 60000)
    for source in ("127.0.0.3", "127.0.0.4"):
        crowd.add(75, source, SLOW_BODY, b" " * 59000)
    return crowd


def test_300_slow_clients_do_not_block_an_honest_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        guard, "MAX_REQUESTS", 32
    )  # bodies that are still on their way take none of these places
    monkeypatch.setattr(guard, "BODY_SECONDS", 600.0)
    monkeypatch.setattr(guard, "HEADER_SECONDS", 600.0)
    with listening(tmp_path, monkeypatch) as (coordinator, counted, url):
        refusals = coordinator.run.refusals
        with (
            three_hundred(address_of(url)) as crowd,
            closing(HttpClient(url, TOKEN, timeout=PATIENCE)) as client,
        ):
            until(lambda: crowd.closed == 22 and counted.transfers.total() == 128, "a full house")
            assert dict(counted.transfers) == {"127.0.0.3": 64, "127.0.0.4": 64}, (
                "nobody takes more than one address may"
            )
            assert refusals == {Code.TOO_MANY_REQUESTS: 22}
            worker = FakeWorker(client)
            task = worker.joined()
            for _ in range(10):
                task = as_task(worker.send(task).next)
            assert len(worker.receipts) == 10 and all(
                receipt.accepted for receipt in worker.receipts
            )
            assert len(crowd.lines) == 278 and counted.transfers.total() >= 128, (
                "they were there all the time"
            )
            assert refusals == {Code.TOO_MANY_REQUESTS: 22}
        until(lambda: not counted.transfers and not counted.requests, "room after they have gone")

        monkeypatch.setattr(guard, "BODY_SECONDS", 0.5)
        monkeypatch.setattr(guard, "MIN_RATE", 1 << 30)
        monkeypatch.setattr(guard, "HEADER_SECONDS", 1.0)
        with three_hundred(address_of(url)) as crowd:
            until(lambda: crowd.closed == 300, "the end of the last of them")
        assert 0 < refusals[Code.TOO_SLOW] <= 150 and set(crowd.statuses) <= {408, 429}
        assert Code.BUSY not in refusals and not counted.transfers and not counted.requests
        assert len(kinds(coordinator, "join")) == 1


def test_bytes_after_an_answer_keep_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of an unwanted body, and empty lines before a request that never comes.

    Neither needs a token.
    """
    with listening(tmp_path, monkeypatch) as (_, _, url):
        monkeypatch.setattr(guard, "KEEP_ALIVE_SECONDS", 0.5)
        crowd = Crowd(address_of(url))
        crowd.add(
            5,
            "127.0.0.2",
            b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n",
            b"x" * 59000,
        )
        crowd.add(5, "127.0.0.2", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", b"\r\n" * 30000)
        with crowd:
            until(lambda: crowd.closed == 10, "the end of the last of them")
        assert crowd.statuses == [200] * 10


def test_headers_without_an_end_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        listening(tmp_path, monkeypatch) as (_, _, url),
        closing(socket.create_connection(address_of(url), timeout=PATIENCE)) as line,
    ):
        line.sendall(SLOW_HEAD)
        sent = 0
        with suppress(ConnectionError):
            while sent < 1 << 26:
                line.sendall(b"X-More: " + b"x" * 8000 + b"\r\n")
                sent += 8010
            pytest.fail("64 MiB of headers were taken")
        assert is_served(url)


def is_served(url: str) -> bool:
    with closing(HttpClient(url, TOKEN, timeout=PATIENCE)) as client:
        return client.status().state == "running"


def test_clients_that_do_not_read_are_counted_and_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "MAX_REQUESTS", 2)
    monkeypatch.setattr(guard, "MAX_FROM_ONE", 3)
    with listening(tmp_path, monkeypatch) as (coordinator, counted, url), ExitStack() as stack:
        large = coordinator.run.store.blobs.put(
            bytes(1 << 24)
        )  # more than the buffers of a line hold
        coordinator.run.history.public[large] = 0
        request = (
            f"GET /v1/blobs/{large} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        ).encode()

        def reader() -> socket.socket:
            line = stack.enter_context(
                closing(socket.create_connection(address_of(url), PATIENCE, ("127.0.0.2", 0)))
            )
            line.sendall(request)
            assert line.recv(9) == b"HTTP/1.1 "
            return line

        lines = [reader() for _ in range(3)]
        assert [line.recv(3) for line in lines] == [b"200"] * 3
        assert reader().recv(3) == b"429", "a download counts until it is over"
        assert is_served(url), "others are served"
        until(lambda: dict(counted.transfers) == {"127.0.0.2": 3}, "three that are still counted")
        for line in lines:
            line.close()
        until(lambda: not counted.transfers and not counted.requests, "room after they have gone")

        monkeypatch.setattr(guard, "BODY_SECONDS", 0.5)
        monkeypatch.setattr(guard, "MIN_RATE", 1 << 30)
        line = reader()
        until(lambda: not counted.transfers and not counted.requests, "the end of it")
        assert len(rest(line)) < 1 << 24


def rest(line: socket.socket) -> bytes:
    """All that still comes, until the other side hangs up."""
    got = bytearray()
    with suppress(ConnectionResetError):
        while piece := line.recv(1 << 16):
            got += piece
    return bytes(got)


# 14: names that are paths, and addresses


WATCHED = """
import json, os, socket, sys, threading
from pathlib import Path

FOLDER = sys.argv[1]
READABLE = (FOLDER, sys.prefix, sys.base_prefix, *sys.path)
ALLOWED = tuple(os.path.realpath(p) + os.sep for p in READABLE if p)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGING = (
    "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate",
    "os.link", "os.symlink", "os.chmod", "sqlite3.connect",
)
NEVER = (
    "socket.connect", "socket.sendto", "socket.sendmsg", "subprocess.Popen",
    "os.system", "os.exec", "os.fork", "os.posix_spawn",
)
found, inside = [], 0

def place(path):
    return os.path.realpath(os.path.join(FOLDER, os.fsdecode(path))) + os.sep

def watch(event, arguments):
    global inside
    if event in NEVER:
        found.append([event, repr(arguments)])
    elif event == "open" and not isinstance(arguments[0], int):
        path, writes = place(arguments[0]), bool(arguments[2] & WRITING)
        inside += path.startswith(ALLOWED[0])
        if not path.startswith(ALLOWED[:1] if writes else ALLOWED):
            found.append(["write" if writes else "read", path])
    elif event in CHANGING:
        for path in arguments[: 2 if event in ("os.rename", "os.link", "os.symlink") else 1]:
            if not isinstance(path, int) and not place(path).startswith(ALLOWED[0]):
                found.append([event, place(path)])

from blocktrain.watch.server import open_coordinator
from blocktrain.watch.server import Listen, Server

sys.addaudithook(watch)
with socket.socket() as other, socket.socket() as dialling:
    other.bind(("127.0.0.1", 0))
    other.listen()
    dialling.connect(other.getsockname())
Path(FOLDER, "..", "canary").write_text("x")
open("/etc/passwd").close()
seen = [event for event, _ in found]
assert seen == ["socket.connect", "write", "read"], found  # the watch sees what it is for
found.clear()
inside = 0

coordinator = open_coordinator(Path(FOLDER))
server = Server(coordinator, Listen(token=sys.argv[2]))
print(server.url, flush=True)
server.start()
sys.stdin.read()
server.stop()
coordinator.close()
print(json.dumps({"found": found, "inside": inside}), flush=True)
"""


@contextmanager
def watched(folder: Path) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """A coordinator in a process whose every file and connection is watched.

    Gives its address, and a function that ends it and tells what it did.
    """
    with (folder.parent / "errors").open("w+") as errors:
        command = [sys.executable, "-c", WATCHED, str(folder), TOKEN]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=folder,
        )
        stdin, stdout = _pipes(process)

        def said() -> str:
            line = stdout.readline()
            errors.seek(0)
            assert line, errors.read()
            return line.strip()

        def end() -> dict[str, Any]:
            stdin.close()
            return dict(json.loads(said()))

        try:
            yield said(), end
        finally:
            process.kill()
            process.wait(PATIENCE)
            stdout.close()


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None and process.stdout is not None
    return process.stdin, process.stdout


UP = ["../", "..%2f", "%2e%2e/", "%2e%2e%2f", "..%5c", "%252e%252e%252f", "....//", "..;/"]
NAMES = [
    *(
        up * depth + target
        for up in UP
        for depth in (1, 4, 12)
        for target in ("canary", "etc/passwd")
    ),
    "/etc/passwd",
    "%2fetc%2fpasswd",
    "//etc/passwd",
    "file:%2f%2f%2fetc%2fpasswd",
    "http:%2f%2f127.0.0.1:1%2f",
    "~root",
    "coordinator.pem",
    "run.sqlite%00",
    "%00",
    "a" * 64 + "%00.pem",
    "a" * 62 + "/.",
    "1.1%2f0",
    "..",
    ".",
    "a" * 5000,
    "%2e%2e%2f" * 2000,
    "%ff%fe",
    "1%0d%0aX-More:%201",
]


def hostile(address: Address) -> int:
    """Every name in every place where a name can be. Gives the number of answers.

    None of them gives anything away.
    """
    answers = 0
    for name in NAMES:
        targets = [
            ("GET", f"/v1/blobs/{name}"),
            ("GET", f"/v1/uploads/{name}"),
            ("PUT", f"/v1/uploads/{name}/0"),
            ("PUT", f"/v1/uploads/1/{name}"),
        ]
        for method, path in [*targets, ("GET", f"/{name}"), ("GET", f"/v1/ledger?after={name}")]:
            answers += _refused(address, f"{method} {path}", "")
        header = name[:4000]
        answers += _refused(address, "GET /v1/uploads/1", f"{m.TICKET_HEADER}: {header}\r\n")
        answers += _refused(
            address,
            "PUT /v1/uploads/1/0",
            f"{m.TICKET_HEADER}: {header}\r\n{m.DIGEST_HEADER}: {header}\r\n",
        )
        answers += _refused(
            address,
            f"GET /v1/blobs/{'0' * 64}",
            f"{m.WORKER_HEADER}: {header}\r\nHost: {header}\r\nX-Forwarded-For: {header}\r\n",
        )
    for target in (
        "http://127.0.0.1:1/v1/run/x",
        "http://169.254.169.254/latest/meta-data",
        "//127.0.0.1:1/x",
    ):
        answers += _refused(address, f"GET {target}", "")
    return answers


def _refused(address: Address, request: str, headers: str) -> bool:
    head = (
        f"{request} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n{headers}"
        "Content-Length: 1\r\nConnection: close\r\n\r\nx"
    )
    with closing(socket.create_connection(address, timeout=PATIENCE)) as line:
        line.sendall(head.encode())
        answer = rest(line)
    assert not answer or answer.split()[1].startswith(b"4"), (request[:200], answer[:200])
    assert b"root:x:" not in answer and b"PRIVATE" not in answer and b"Traceback" not in answer
    return bool(answer)


def test_the_coordinator_opens_nothing_else_and_dials_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "outer" / "run"
    folder.parent.mkdir()
    with beginning(folder):
        pass
    with watched(folder) as (url, end):
        around = sorted(
            path.relative_to(tmp_path) for path in tmp_path.rglob("*") if folder not in path.parents
        )
        with closing(HttpClient(url, TOKEN, timeout=PATIENCE)) as client:
            workers = [FakeWorker(client, seed) for seed in (1, 2)]
            todo = [worker.joined() for worker in workers]
            for _ in range(3):
                todo = [
                    as_task(worker.send(task).next)
                    for worker, task in zip(workers, todo, strict=True)
                ]
            for name in ("../../canary", "/etc/passwd", "http://127.0.0.1:1/"):
                with pytest.raises(Refused):
                    client.join(
                        workers[0].join_message().model_copy(update={"name": name, "device": name})
                    )
            assert hostile(address_of(url)) >= 8 * len(NAMES), (
                "nearly all are answered; some are no HTTP at all"
            )
            assert all(
                worker.send(task).receipt.accepted
                for worker, task in zip(workers, todo, strict=True)
            )
        report = end()
        assert report["found"] == []
        assert report["inside"] > 100, "the run folder itself was used, and watched"
        assert around == sorted(
            path.relative_to(tmp_path) for path in tmp_path.rglob("*") if folder not in path.parents
        )


# 19: clocks


def test_the_clocks_of_workers_change_nothing(tmp_path: Path) -> None:
    now = int(time.time() * 1000)
    stories = []
    for name, skew in (("right", 0), ("fast", HOUR), ("slow", -HOUR), ("since 1970", -now / 1000)):
        clock = SimulatedClock(1000.0)
        with beginning(tmp_path / name, clock=clock, replicas=2) as coordinator:
            workers = [FakeWorker(LocalClient(coordinator), seed) for seed in (1, 2, 3)]
            shown = now + int(skew * 1000)
            todo = [
                as_task(worker.join(time=shown, speed=0.0).next) for worker in workers
            ]  # of unknown speed: none waits for the others
            story: list[Any] = []
            for _ in range(3):
                for index, worker in enumerate(workers):
                    clock.now += 7.0
                    task = todo[index]
                    reply = worker.send(task, time=shown)
                    assert reply.receipt.accepted
                    found = worker.ask(speed=0.0)
                    story.append(
                        (
                            task.task,
                            task.fence,
                            task.lease_seconds,
                            task.deadline_seconds,
                            reply.receipt.weight,
                        )
                    )
                    story.append(
                        (
                            reply.receipt.staleness,
                            reply.receipt.sentence,
                            type(reply.next),
                            type(found),
                        )
                    )
                    todo[index] = as_task(found)
            state = coordinator.run.state
            stories.append((story, snapshot(coordinator).versions, state.blocks, state.leases))
    assert stories[0][1][0][1] >= 1, "rounds were closed"
    assert all(story == stories[0] for story in stories)


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_a_jump_of_the_wall_clock_changes_no_deadline(tmp_path: Path, jump: float) -> None:
    clock = SimulatedClock(1000.0)
    with beginning(tmp_path, clock=clock, replicas=3, max_staleness=0) as coordinator:
        first, second, third = (FakeWorker(LocalClient(coordinator), seed) for seed in (1, 2, 3))
        task, _, late = (worker.joined() for worker in (first, second, third))
        assert task.block == late.block
        clock.now += 20.0
        payload = first.payload(task)
        first.send(task, payload, nonce="ab" * 16)
        before = coordinator.run.state

        clock.epoch += jump
        kept = snapshot(coordinator)
        coordinator.tick()
        assert coordinator.run.state == before and snapshot(coordinator) == kept, (
            "nothing is over, nothing has more time"
        )
        beat = third.beat(late)
        assert beat.go_on and (beat.lease_seconds, beat.deadline_seconds) == (40.0, 40.0)
        again = first.client.submit(first.submission(task, payload))
        assert again.receipt.update == first.receipts[0].update, "the first answer is given again"
        replay = as_task(first.ask())
        with pytest.raises(Refused) as caught:
            first.send(replay, nonce="ab" * 16)
        assert caught.value.code == Code.REPLAYED, "an old nonce stays old"

        clock.now += 39.0
        coordinator.tick()
        assert coordinator.run.newest(task.block).version == 0
        clock.now += 30.0
        coordinator.tick()
        coordinator.tick()
        assert coordinator.run.newest(task.block).version == 1, (
            "the coordinator's own clock closes it"
        )


# 11, 15: what was captured is used later


@pytest.mark.parametrize(("hours", "taken"), [(0, True), (0.9, True), (1.1, False), (100, False)])
def test_an_old_manifest_is_refused(tmp_path: Path, hours: float, taken: bool) -> None:
    """A15: a mirror serves an expired manifest for ever."""
    clock = SimulatedClock(1000.0)
    with (
        beginning(tmp_path, clock=clock) as coordinator,
        serve_coordinator(coordinator, Listen()) as url,
    ):
        expired = coordinator.manifest().expires / 1000
        now = SimulatedClock(0.0, epoch=expired + hours * HOUR)
        with closing(HttpClient(url, timeout=PATIENCE, clock=now)) as client:
            if taken:
                assert client.manifest().number > 0
                return
            for read in (client.manifest, lambda: pull(client, tmp_path / "out")):
                with pytest.raises(RunError, match="hours ago: the clock"):
                    read()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("restart", [False, True])
def test_a_recorded_goodbye_sends_nobody_away(tmp_path: Path, restart: bool) -> None:
    """A15: somebody repeats a captured request to leave, and its worker is thrown out."""
    clock = SimulatedClock(1000.0)
    with ExitStack() as stack:
        coordinator = stack.enter_context(beginning(tmp_path, clock=clock))
        worker = FakeWorker(LocalClient(coordinator))
        worker.join()
        goodbye = worker.request(leaving=True)
        assert isinstance(worker.client.next_task(goodbye).next, m.Wait)
        task = worker.joined()
        clock.now += 2 * NONCE_SECONDS
        coordinator.tick()
        if restart:
            coordinator.close()
            coordinator = stack.enter_context(closing(open_coordinator(tmp_path, clock)))
            worker.client = LocalClient(coordinator)
        task = worker.joined()
        before = snapshot(coordinator)
        with pytest.raises(Refused) as caught:
            worker.client.next_task(goodbye)
        assert caught.value.code == Code.REPLAYED and snapshot(coordinator) == before
        assert worker.send(task).receipt.accepted
        assert isinstance(worker.ask(leaving=True), m.Wait), "with a new nonce it may leave again"


@pytest.mark.parametrize("ending", [WatchedCoordinator.close, crash])
def test_deadlines_survive_a_restart_as_remaining_time(
    tmp_path: Path, ending: Callable[[WatchedCoordinator], None]
) -> None:
    """Of a machine too: its clock begins at 0 again.

    A coordinator that often restarts must not give a round its whole time anew.
    """
    clock = SimulatedClock(1e6)
    with ExitStack() as stack:
        coordinator = stack.enter_context(beginning(tmp_path, clock=clock, replicas=3))
        one, two, three = (FakeWorker(LocalClient(coordinator), seed) for seed in (1, 2, 3))
        task, _, other = (worker.joined() for worker in (one, two, three))
        assert task.block == other.block and other.lease_seconds == other.deadline_seconds == 60.0
        spent = 20.0  # three times as long would be later than the first deadline
        clock.now += spent
        one.send(task)
        for _ in range(3):
            clock.now += 10.0
            spent += 10.0
            coordinator.tick()
            ending(coordinator)
            clock.now = 0.0
            coordinator = stack.enter_context(closing(open_coordinator(tmp_path, clock)))
            three.client = LocalClient(coordinator)
            beat = three.beat(other)
            assert beat.go_on and beat.lease_seconds == beat.deadline_seconds == pytest.approx(
                60.0 - spent
            )
            assert coordinator.run.newest(task.block).version == 0
            (lease,) = (x for x in coordinator.run.state.leases.values() if x.task == other.task)
            assert lease.granted == pytest.approx(-spent), (
                "what it took so far is not forgotten either"
            )
        clock.now += 30.0
        coordinator.tick()
        assert [
            (e["worker"], e["task"])
            for e in kinds(coordinator, "expire")
            if e["task"] == other.task
        ] == [(three.id, other.task)]
        assert coordinator.run.newest(task.block).version == 1, "with what was there"
