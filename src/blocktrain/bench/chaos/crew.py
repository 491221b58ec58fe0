"""The processes of a chaos run: they are killed, stopped and started again, and none is left."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from blocktrain.bench.chaos.forger import ForgerJob, forge
from blocktrain.bench.chaos.members import MemberJob, train
from blocktrain.bench.network.brake import processor_seconds
from blocktrain.errors import BlockTrainError, RunError
from blocktrain.processes import Job, RunningJob, fork_context, start_job
from blocktrain.web.client import HttpClient

FULL_BYTES = 4096  # that a file may have on a full disk: less than any blob
RESTART_SECONDS = 0.5  # before what ended by itself is started again
ANSWER_SECONDS = 0.05  # between two looks whether a coordinator answers
END_SECONDS = 20.0  # that a process has to end by itself
SAMPLE_SECONDS = 0.2
LAST_WORDS = 5  # lines of the coordinator's log
CAN_FILL = hasattr(resource, "prlimit")
"""Whether this system can take the disk away from a running process."""


class CoordinatorProcess:
    """`blocktrain coordinator` on a folder, as often as it takes."""

    def __init__(self, folder: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "blocktrain", "coordinator", "--out", str(folder)]
        self._command += ["--listen", f"127.0.0.1:{port}", "--score-bytes", "0"]
        self.recoveries: list[float] = []
        """Seconds from each end to the first good answer after it."""
        self.said: deque[str] = deque(maxlen=LAST_WORDS)
        self.full = False
        """Whether its disk is full: it must end soon."""
        self._process: subprocess.Popen[str] | None = None
        self._answered = threading.Event()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def answers(self) -> bool:
        """Whether it has answered since it was started."""
        return self._answered.is_set()

    @property
    def ended(self) -> bool:
        """By itself: a kill is followed by a start at once."""
        return self._process is not None and self._process.poll() is not None

    def start(self, *, again: bool = False) -> None:
        began = time.monotonic()
        self._answered, self.full = threading.Event(), False
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,  # Ctrl-C is not for it
        )
        what = (self._process, self._answered, began if again else None)
        threading.Thread(target=self._await_answer, args=what, daemon=True).start()
        threading.Thread(target=self._listen, args=(self._process,), daemon=True).start()

    def _await_answer(
        self, process: subprocess.Popen[str], answered: threading.Event, began: float | None
    ) -> None:
        with closing(HttpClient(self.url, timeout=5.0)) as client:
            while process.poll() is None:
                try:
                    client.manifest()
                except BlockTrainError:
                    time.sleep(ANSWER_SECONDS)
                    continue
                if began is not None:
                    self.recoveries.append(time.monotonic() - began)
                answered.set()
                return

    def _listen(self, process: subprocess.Popen[str]) -> None:
        """Its log must not fill the pipe, and may not be a file while the disk is full."""
        if process.stderr is not None:
            with process.stderr as lines:
                self.said.extend(line.strip() for line in lines if line.strip())

    def kill(self) -> None:
        """SIGKILL, and a new start at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self.start(again=True)

    def fill_disk(self) -> None:
        """From now on no file of this process grows beyond a page."""
        if self._process is not None and self._process.poll() is None:
            _, hard = resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE)
            with suppress(ProcessLookupError):
                resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (FULL_BYTES, hard))
                self.full = True

    def wait_for_answer(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._answered.wait(ANSWER_SECONDS):
            if self.ended or time.monotonic() > end:
                raise RunError(f"the coordinator does not answer: {' '.join(self.said)}")

    def end(self) -> None:
        """As Ctrl-C ends it; what does not end is killed."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


@dataclass
class ChaosMember:
    """One worker: its key and its cache stay, its processes come and go."""

    name: str
    attacks: Sequence[str] = ()
    """One for each of its processes, in turn; none: it is honest."""
    running: RunningJob | None = None
    workers: set[str] = field(default_factory=set)
    starts: int = 0
    start_at: float = 0.0
    attack: str = ""
    kinds: Counter[str] = field(default_factory=Counter)
    """Updates by attack."""
    receipts: dict[str, str] = field(default_factory=dict)
    """By update: the ledger entry that its receipt names."""
    steps: int = 0
    joined: bool = False
    """The process that runs now."""
    left: bool = False
    """It was told that the run is finished."""
    problem: str = ""

    def on_message(self, message: dict[str, Any]) -> None:
        kind = message.get("kind")
        if "error" in message:
            self.problem = message["error"]
        elif kind == "step":
            self.steps += 1
        elif kind == "joined":
            self.joined = True
            self.workers.add(message["worker"])
        elif kind == "accepted":
            if message["update"] not in self.receipts:
                self.kinds[self.attack] += 1
            self.receipts[message["update"]] = message["entry"]
        elif kind == "left":
            self.left = message["reason"] != "stopped"


class Crew:
    """All members, and the forger, of one run."""

    def __init__(self, members: Sequence[ChaosMember], folder: Path, seed: int) -> None:
        self.members, self._folder, self._seed = members, folder, seed
        self.forged: Counter[str] = Counter()
        """Answers to forgeries, by their code."""
        self.forgeries_accepted: Counter[str] = Counter()
        self._context = fork_context([train, forge])
        self._forger: RunningJob | None = None
        self.url = ""

    def start(self, url: str) -> None:
        self.url = url
        for member in self.members:
            self._start(member)

    def start_forger(self, job: ForgerJob) -> None:
        self._forger = start_job(Job("forger", forge, (job,)), self._context)

    @property
    def forging(self) -> bool:
        return self._forger is not None

    @property
    def pids(self) -> list[int]:
        running = (member.running for member in self.members)
        return [job.process.pid for job in running if job and job.process.pid]

    def kill(self, number: int) -> None:
        """SIGKILL, and a new start at once."""
        member = self.members[number]
        if member.running is not None:
            member.running.process.kill()
            self._reap(member)
            if not member.left:
                self._start(member)

    def signal(self, number: int, what: int) -> None:
        """SIGSTOP or SIGCONT for whoever runs now."""
        job = self.members[number].running
        if job is not None and job.process.pid and job.process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(job.process.pid, what)

    def collect(self, seconds: float) -> None:
        """Read what has come in until then, and start what has ended by itself."""
        for member in self.members:
            if member.running is None and not member.left and time.monotonic() >= member.start_at:
                self._start(member)
        found = {m.running.connection: m for m in self.members if m.running is not None}
        connections = list(found)
        if self._forger is not None:
            connections.append(self._forger.connection)
        if not connections:  # all are about to be started again
            time.sleep(seconds)
        for ready in wait(connections, timeout=seconds):
            if self._forger is not None and ready is self._forger.connection:
                self._hear_forger(self._forger)
            elif not _read(found[ready].running, found[ready].on_message):  # type: ignore[index]
                self._reap(found[ready])  # type: ignore[index]

    def _hear_forger(self, job: RunningJob) -> None:
        def on_message(message: dict[str, Any]) -> None:
            if "error" in message:
                raise RunError(f"the forger: {message['error']}")
            self.forged[message["code"]] += 1
            if message["accepted"]:
                self.forgeries_accepted[message["forgery"]] += 1

        if not _read(job, on_message):
            job.process.join()
            self._forger = None

    def _start(self, member: ChaosMember) -> None:
        number = self.members.index(member)
        if member.attacks:
            member.attack = member.attacks[member.starts % len(member.attacks)]
        member.starts, member.joined = member.starts + 1, False
        job = MemberJob(
            self.url,
            self._folder / member.name,
            member.name,
            member.attack,
            seed=self._seed + 1000 * number + member.starts,
            direction=self._seed,
        )
        member.running = start_job(Job(member.name, train, (job,)), self._context)

    def _reap(self, member: ChaosMember) -> None:
        """Hear the last of a process that has ended."""
        job, member.running = member.running, None
        if job is not None:
            while _read(job, member.on_message, END_SECONDS):
                pass
            job.process.join()
            job.connection.close()
            member.start_at = time.monotonic() + RESTART_SECONDS

    def end(self) -> None:
        """Every process ends: at once if it is told to, and killed if not."""
        running = [member for member in self.members if member.running is not None]
        jobs = [m.running for m in running if m.running is not None]
        jobs += [self._forger] if self._forger else []
        for job in jobs:
            if job.process.pid and job.process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(job.process.pid, signal.SIGCONT)
                job.process.terminate()
        deadline = time.monotonic() + END_SECONDS
        for job in jobs:
            job.process.join(max(0.0, deadline - time.monotonic()))
            if job.process.is_alive():
                job.process.kill()
        for member in running:
            self._reap(member)
        self._forger = None


def _read(
    job: RunningJob | None, on_message: Callable[[dict[str, Any]], None], seconds: float = 0.0
) -> bool:
    """Read all that is there; False at the end of the process."""
    if job is None:
        return False
    try:
        while job.connection.poll(seconds):
            on_message(job.connection.recv())
    except (EOFError, OSError):
        return False
    return True


class ProcessorMeter:
    """Samples the processor time of a run's processes, also of those that are killed."""

    def __init__(self, coordinator: CoordinatorProcess, crew: Crew) -> None:
        self._coordinator, self._crew = coordinator, crew
        self._seconds: dict[tuple[str, int], float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="meter", daemon=True)

    def __enter__(self) -> ProcessorMeter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def spent(self) -> dict[str, float]:
        """Seconds by what they were spent on."""
        found: Counter[str] = Counter()
        for (what, _), seconds in self._seconds.items():
            found[what] += seconds  # type: ignore[assignment]
        return {what: round(float(seconds), 2) for what, seconds in found.items()}

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            for what, pid in self._processes():
                if (seconds := processor_seconds(pid)) is not None:
                    self._seconds[what, pid] = max(seconds, self._seconds.get((what, pid), 0.0))

    def _processes(self) -> Iterator[tuple[str, int]]:
        yield from (("training", pid) for pid in self._crew.pids)
        if (pid := self._coordinator.pid) is not None:
            yield "coordinator", pid
            yield from (("checking", child) for child in _children(pid))


def _children(pid: int) -> list[int]:
    """A coordinator without scores has two at most: they judge updates, and train some again."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, thread.read_text().split())
    return found
