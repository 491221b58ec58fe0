"""Real processes are killed, stopped, and run out of disk.

What was acknowledged counts once; what failed was never acknowledged.
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from blocktrain.audit.audit import audit
from blocktrain.audit.evidence import open_folder
from blocktrain.cli.evaluate import evaluate
from blocktrain.cli.run import audit as audit_command
from blocktrain.cli.run import pull
from blocktrain.errors import StorageFailed, Unreachable
from blocktrain.protocol import messages as m
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.store.open import read_store
from blocktrain.watch.server import Listen, Server, open_coordinator, serve_coordinator
from blocktrain.web.client import HttpClient, LocalClient
from support.command import environment
from support.fake_worker import CONFIG, FakeWorker, as_task, begin, prepared, whole_ledger

PATIENCE = 180.0  # seconds; this machine may be busy
KILLING = 12.0
pytestmark = pytest.mark.timeout(1200)  # several waits, each as patient as this


class Process:
    """A command of its own, with its output in files; started again it is the same command."""

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self.folder, self.name, self.arguments = folder, name, arguments
        self.starts = 0
        self.started = 0.0
        self.running: subprocess.Popen[bytes] | None = None
        self.program = ("-m", "blocktrain")

    def start(self, before: Callable[[], None] | None = None) -> Process:
        self.starts += 1
        self.started = time.monotonic()
        command = [sys.executable, *self.program, *self.arguments]
        env = environment(self.folder, OMP_NUM_THREADS="1")
        with self.path("out").open("wb") as out, self.path("err").open("wb") as err:
            self.running = subprocess.Popen(
                command,
                cwd=self.folder,
                env=env,
                stdout=out,
                stderr=err,
                preexec_fn=before,  # noqa: PLW1509
            )
        return self

    def path(self, kind: str, number: int | None = None) -> Path:
        return self.folder / f"{self.name}.{number or self.starts}.{kind}"

    def lines(self, number: int | None = None) -> list[dict[str, Any]]:
        """What it printed since its last start, without a line that a kill cut off."""
        whole = self.path("out", number).read_bytes().splitlines(keepends=True)
        return [json.loads(line) for line in whole if line.endswith(b"\n")]

    def all_lines(self) -> list[dict[str, Any]]:
        return [line for number in range(1, self.starts + 1) for line in self.lines(number)]

    def said(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line.get("kind") == kind]

    def tell(self, number: int) -> None:
        assert self.running is not None
        self.running.send_signal(number)

    def end(self, number: int = signal.SIGKILL) -> int:
        """Send a signal and wait; the exit code."""
        if self.running is None:
            return 0
        self.tell(signal.SIGCONT)
        self.tell(number)
        try:
            return self.running.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.running.kill()
            raise

    @property
    def alive(self) -> bool:
        return self.running is not None and self.running.poll() is None

    def errors(self) -> str:
        return self.path("err").read_text(errors="replace")[-2000:]


class Processes:
    """All processes of a test; none survives it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[Process] = []

    def make(self, name: str, *arguments: str) -> Process:
        self.all.append(Process(self.folder, name, *arguments))
        return self.all[-1]

    def coordinator(self, folder: Path, port: int = 0) -> Process:
        return self.make(
            "coordinator",
            "coordinator",
            "--out",
            str(folder),
            "--listen",
            f"127.0.0.1:{port}",
            "--json",
        )

    def worker(self, url: str, number: int = 0) -> Process:
        cache = str(self.folder / f"cache-{number}")
        return self.make(
            f"worker-{number}", "worker", url, "--cache", cache, "--device", "cpu", "--json"
        )


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    found = Processes(tmp_path)
    yield found
    for process in found.all:
        process.end()


def until(condition: Callable[[], Any], what: str, *watched: Process) -> Any:
    """Wait for something that must happen, however busy the machine is."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if found := condition():
            return found
        for process in watched:
            assert process.alive, f"{process.name} ended: {process.errors()}"
        time.sleep(0.05)
    raise AssertionError(
        f"{what} did not happen; {[(p.name, p.lines()[-3:], p.errors()) for p in watched]}"
    )


def healthy(url: str) -> bool:
    try:
        return bool(httpx2.get(f"{url}/healthz", timeout=10).json()["ready"])
    except httpx2.HTTPError:
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def ledger_updates(folder: Path) -> list[str]:
    """The hash of every entry of an update; the chain is checked on the way."""
    return [entry.hash for entry in read_store(folder).ledger() if entry.kind == "update"]


# Kills


def test_kills_at_random_lose_and_double_nothing(
    tmp_path: Path, processes: Processes, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    begin(
        folder,
        config=CONFIG.replace(steps=100_000),
        replicas=None,
        task_steps=4,
        first_deadline=4.0,
        max_staleness=8,
        version_compression="int2",
    ).close()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    coordinator = processes.coordinator(folder, port).start()
    workers = [processes.worker(url, number).start() for number in range(3)]
    until(lambda: healthy(url), "a start", coordinator)
    until(lambda: any(worker.said("accepted") for worker in workers), "a first update", *workers)
    kills = kill_at_random(coordinator, workers, url, random.Random(7))
    print(f"killed: {dict(kills)}")
    settle(coordinator, workers, url)
    pull(url, out=tmp_path / "pulled", json_=True)
    for worker in workers:
        assert worker.end(signal.SIGTERM) == 0, worker.errors()
    assert coordinator.end(signal.SIGINT) == 0, coordinator.errors()
    recorded = Counter(ledger_updates(folder))
    assert {entry: recorded[entry] for entry in acknowledged(workers)} == dict.fromkeys(
        acknowledged(workers), 1
    )
    capsys.readouterr()
    audit_command(str(folder), json_=True)
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["updates"] == len(recorded) and found["versions"] > 2
    bodies = [json.loads(entry.body) for entry in read_store(folder).ledger()]
    assert sum(bool(body.get("delta")) for body in bodies) == found["versions"]
    evaluate(tmp_path / "pulled", json_=True)
    assert json.loads(capsys.readouterr().out)


def acknowledged(workers: list[Process]) -> list[str]:
    """The entries that workers were told about."""
    return [
        line["entry"]
        for worker in workers
        for line in worker.all_lines()
        if line["kind"] == "accepted"
    ]


def kill_at_random(
    coordinator: Process, workers: list[Process], url: str, draw: random.Random
) -> Counter[str]:
    """For KILLING seconds, and until enough were hit at work. Each is started again at once."""
    kills: Counter[str] = Counter()
    began = time.monotonic()
    while time.monotonic() < began + KILLING or min(kills["coordinator"], kills["worker"]) < 3:
        assert time.monotonic() < began + PATIENCE, kills
        time.sleep(draw.uniform(0.5, 1.5))
        victim = draw.choice([coordinator, coordinator, *workers])
        # One that still starts is killed only now and then, or nobody would ever get to work.
        if (
            not (healthy(url) if victim is coordinator else victim.said("task"))
            and draw.random() < 0.9
        ):
            continue
        assert victim.alive, f"{victim.name} ended by itself: {victim.errors()}"
        victim.end()
        victim.start()
        kills[victim.name.split("-")[0]] += 1
    return kills


def settle(coordinator: Process, workers: list[Process], url: str) -> None:
    """Everyone is back, and has had something accepted after the last kill."""
    until(lambda: healthy(url), "a recovery", coordinator)
    for worker in workers:
        until(
            lambda worker=worker: worker.said("accepted") or worker.said("left"),  # type: ignore[misc]
            f"an update of {worker.name}",
            coordinator,
            worker,
        )
    until(lambda: len(acknowledged(workers)) >= 5, "a fifth update", coordinator)


# A worker that sleeps


def test_a_worker_that_was_stopped_past_its_lease_goes_on(
    tmp_path: Path, processes: Processes
) -> None:
    config = CONFIG.replace(blocks=1, steps=100_000)
    coordinator = begin(
        tmp_path / "run", config=config, replicas=None, task_steps=100, max_staleness=1000
    )
    client = LocalClient(coordinator)
    other = FakeWorker(client, seed=2)
    with serve_coordinator(coordinator, Listen()) as url:
        sleeper = processes.worker(url).start()
        until(
            lambda: len(sleeper.said("accepted")) >= 3, "three updates", sleeper
        )  # so that a lease is no longer than usual
        task = stop_at_work(sleeper)
        until(lambda: task in expired(client), "the end of the lease")
        taken = as_task(other.join(speed=1.0).next)
        assert (taken.task, taken.fence) == (task, 2), "another gets the task"
        before = len(sleeper.said("accepted"))
        sleeper.tell(signal.SIGCONT)
        no = until(
            lambda: sleeper.said("abandoned") + sleeper.said("refused"), "a refusal", sleeper
        )
        reasons = ("stale_fence", "another worker", "somebody else")  # by the call that comes first
        assert no[0]["task"] == task and any(reason in no[0]["reason"] for reason in reasons)
        until(lambda: len(sleeper.said("accepted")) > before, "an update after all", sleeper)
        assert other.send(taken).receipt.accepted
        me = next(w for w in client.status().workers if w.worker != other.id)
        assert me.state in ("training", "waiting") and me.accepted > before, "not penalised"
        updates = [json.loads(e.body) for e in whole_ledger(client) if e.kind == "update"]
        assert [u["worker"] for u in updates if u["task"] == task] == [other.id]
        assert {u["weight"] for u in updates if u["worker"] == me.worker} == {1.0}
        assert sleeper.end(signal.SIGTERM) == 0
    coordinator.close()


def stop_at_work(worker: Process) -> int:
    """SIGSTOP in the middle of a task, after the first; which."""
    while True:
        task = worker.said("task")[-1]["task"]
        until(lambda task=task: worker.said("task")[-1]["task"] > task, "another task", worker)  # type: ignore[misc]
        worker.tell(signal.SIGSTOP)
        at = int(worker.said("task")[-1]["task"])
        if not any(line["task"] == at for line in worker.said("trained")):
            return at
        worker.tell(signal.SIGCONT)


def expired(client: LocalClient) -> set[int]:
    return {json.loads(e.body)["task"] for e in whole_ledger(client) if e.kind == "expire"}


# Disks


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_acknowledges_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    coordinator = begin(tmp_path / "run")
    server = Server(coordinator, Listen())
    server.start()
    client = HttpClient(server.url, timeout=PATIENCE)
    worker = FakeWorker(client)
    first = as_task(worker.send(worker.joined()).next)
    payload = worker.payload(first)
    worker.upload(first, payload)

    def fail(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(Refused) as refused:
        client.submit(worker.submission(first, payload))
    assert refused.value.code == Code.STORAGE_FAILED
    monkeypatch.undo()  # the disk is well again, and this process is still not to be trusted
    for call in (
        lambda: client.submit(worker.submission(first, payload)),
        client.manifest,
        worker.ask,
    ):
        with pytest.raises((Refused, Unreachable)) as no:
            call()
        assert not isinstance(no.value, Refused) or no.value.code == Code.STORAGE_FAILED
    assert not server.serves(PATIENCE)
    assert isinstance(server.failure, StorageFailed) and os.strerror(code) in str(server.failure)
    with pytest.raises(StorageFailed):
        coordinator.submit(worker.submission(first, payload))
    coordinator.close()
    client.close()
    again = open_coordinator(tmp_path / "run")
    worker.client = LocalClient(again)
    assert len([e for e in whole_ledger(worker.client) if e.kind == "update"]) == 1
    receipt = worker.send(as_task(worker.join().next)).receipt
    assert receipt.accepted and again.run.store.contributions()[worker.id][0] == 2
    again.close()


def test_a_full_disk_ends_the_process_and_loses_nothing(
    tmp_path: Path, processes: Processes
) -> None:
    folder = tmp_path / "run"
    begin(folder).close()
    limit = 400_000  # more than a blob, less than a database that grows
    process = processes.coordinator(folder).start(
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    )
    url = until(process.lines, "a start", process)[0]["url"]
    until(lambda: healthy(url), "a start", process)
    worker = FakeWorker(HttpClient(url, timeout=PATIENCE))
    todo: m.Task | m.Wait = worker.joined()
    with pytest.raises((Refused, Unreachable)) as ended:
        while True:
            todo = worker.send(todo).next if isinstance(todo, m.Task) else worker.ask()
    assert not isinstance(ended.value, Refused) or ended.value.code == Code.STORAGE_FAILED
    until(lambda: not process.alive, "its end")
    assert process.running is not None and process.running.returncode == 2
    assert "free space or repair" in " ".join(process.errors().split())
    acknowledged = [receipt.entry for receipt in worker.receipts]
    assert 1 <= len(acknowledged) <= len(ledger_updates(folder)) <= len(acknowledged) + 1
    assert set(acknowledged) <= set(ledger_updates(folder))
    process.start()
    url = until(process.lines, "a new start", process)[0]["url"]
    until(lambda: healthy(url), "a recovery", process)
    worker.client = HttpClient(url, timeout=PATIENCE)
    assert worker.send(as_task(worker.join().next)).receipt.accepted
    assert process.end(signal.SIGINT) == 0, process.errors()
    assert audit(open_folder(folder)).ok


SHORT_OF_MEMORY = """
from blocktrain.__main__ import main
from blocktrain.coordinator import closing

def merge(*_):
    raise MemoryError

closing.merge_round = merge
main()
"""


def test_a_merge_without_memory_ends_the_process_and_loses_nothing(
    tmp_path: Path, processes: Processes
) -> None:
    """A6: closing a round runs out of memory."""
    folder = tmp_path / "run"
    begin(folder).close()
    process = processes.coordinator(folder)
    process.program = ("-c", SHORT_OF_MEMORY)
    url = until(process.start().lines, "a start", process)[0]["url"]
    until(lambda: healthy(url), "a start", process)
    worker = FakeWorker(HttpClient(url, timeout=PATIENCE))
    task = worker.joined()
    payload = worker.payload(task)
    worker.upload(task, payload)
    sent = worker.submission(task, payload)
    with suppress(Refused, Unreachable):  # it may end before its answer
        worker.client.submit(sent)
    until(lambda: not process.alive, "its end")
    assert process.running is not None and process.running.returncode == 2
    said = " ".join(process.errors().split())
    assert "a round could not be closed (MemoryError" in said
    assert "start the coordinator again" in said
    (recorded,) = ledger_updates(folder)
    process.program = ("-m", "blocktrain")
    url = until(process.start().lines, "a new start", process)[0]["url"]
    until(lambda: healthy(url), "a recovery", process)
    worker.client = HttpClient(url, timeout=PATIENCE)
    worker.join()
    assert worker.client.submit(sent).receipt.entry == recorded
    until(lambda: worker.client.status().rounds == 1, "its version", process)
    assert process.end(signal.SIGINT) == 0, process.errors()
    assert audit(open_folder(folder)).ok


# Starting


def test_a_coordinator_answers_soon_and_never_loads_torch(
    tmp_path: Path, processes: Processes
) -> None:
    prepared()  # for its text
    settings = {
        "blocks": 2,
        "width": 16,
        "heads": 2,
        "context": 16,
        "batch": 2,
        "steps": 40,
        "compose": CONFIG.compose,
    }
    flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    process = processes.coordinator(tmp_path / "run")
    process.arguments += ("--data", str(prepared().parent / "text"), *flags)
    process.start()
    url = until(process.lines, "its address", process)[0]["url"]
    until(lambda: _answers(url), "an answer", process)
    assert process.running is not None
    took = processor_seconds(process.running.pid)
    seconds = time.monotonic() - process.started
    print(f"the first answer came after {seconds:.1f} s, {took:.1f} s of them on a processor")
    assert took < 10, "a few seconds, however busy the machine is"
    until(lambda: healthy(url), "a run", process)
    loaded = Path(f"/proc/{process.running.pid}/maps").read_text()
    assert "python" in loaded and "torch" not in loaded
    worker = FakeWorker(HttpClient(url, timeout=PATIENCE))
    assert worker.joined().base == 0
    assert process.end(signal.SIGINT) == 0, process.errors()


def processor_seconds(pid: int) -> float:
    """Of all threads of a process, so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _answers(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/healthz", timeout=5).status_code == 200
    except httpx2.HTTPError:
        return False
