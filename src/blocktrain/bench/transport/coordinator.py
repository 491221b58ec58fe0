"""How many workers one coordinator can serve: a real process, and a swarm of simulated workers.

Then large transfers, by the same client that workers use (see `transfers`).
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from blocktrain.bench.machine import BenchResult, random_text
from blocktrain.bench.transport.swarm import Load, Notes, swarm_process
from blocktrain.errors import RunError

# Small blocks that do not wait for each other and never run out of steps.
TINY = (
    "--layers-per-block",
    "1",
    "--width",
    "16",
    "--heads",
    "2",
    "--context",
    "16",
    "--z-width",
    "8",
    "--batch",
    "1",
)
MOST_BLOCKS, WORKERS_PER_BLOCK = 32, 8
CORPUS_BYTES = 1 << 20
SAMPLE_SECONDS = 1.0
START_SECONDS = 120.0
FLAT_SHARE, FLAT_MB = 0.05, 4.0  # growth of memory that counts as none


@dataclass(frozen=True)
class SwarmOptions:
    """How many workers, for how long."""

    workers: int
    seconds: float
    seed: int = 0

    def load(self, host: str, port: int) -> Load:
        """A heartbeat every 10 s and a task every minute; more often if the bench is shorter."""
        return Load(
            host,
            port,
            self.workers,
            self.seconds,
            self.seed,
            min(10.0, self.seconds / 6),
            min(60.0, self.seconds),
        )

    @property
    def blocks(self) -> int:
        """With enough workers each."""
        return max(1, min(MOST_BLOCKS, self.workers // WORKERS_PER_BLOCK))

    @property
    def replicas(self) -> int:
        """Rounds of half a task's time: several close, and no honest update is too stale."""
        return max(1, round(self.workers / self.blocks / 2))

    @property
    def flags(self) -> list[str]:
        """Of the coordinator."""
        task = min(60.0, self.seconds)
        shape = [
            *TINY,
            "--blocks",
            str(self.blocks),
            "--compose",
            "pool",
            "--steps",
            str(10**9),
            "--seed",
            str(self.seed),
        ]
        return [
            *shape,
            "--task-seconds",
            str(task),
            "--first-deadline",
            str(3 * task),
            "--replicas",
            str(self.replicas),
        ]


@dataclass
class Vitals:
    """Samples a process once a second: memory, share of a core; and stolen time of the machine."""

    pid: int
    memory_mb: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    stolen_share: float = 0.0

    def __enter__(self) -> Vitals:
        self._began = _machine_times()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.stolen_share = stolen_share(self._began, _machine_times())

    def _look(self) -> None:
        before = _cpu_seconds(self.pid)
        while not self._stop.wait(SAMPLE_SECONDS):
            spent = _cpu_seconds(self.pid)
            self.cpu.append(round((spent - before) / SAMPLE_SECONDS, 3))
            self.memory_mb.append(round(_memory_mb(self.pid), 1))
            before = spent


def _machine_times() -> str:
    try:
        return Path("/proc/stat").read_text().partition("\n")[0]
    except OSError:
        raise RunError("this bench reads /proc: it needs Linux") from None


def stolen_share(before: str, after: str) -> float:
    """The share of processor time that the hypervisor gave to other machines.

    Takes two first lines of /proc/stat. It tells a slow coordinator from a slow machine.
    """
    # user nice system idle iowait irq softirq steal; the time of guests, which follows, is in user
    ticks = [
        int(new) - int(old)
        for old, new in zip(before.split()[1:9], after.split()[1:9], strict=True)
    ]
    return round(ticks[7] / max(1, sum(ticks)), 4)


def _memory_mb(pid: int) -> float:
    try:
        return (
            int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            * os.sysconf("SC_PAGE_SIZE")
            / 1e6
        )
    except OSError:
        raise RunError(
            "this bench reads /proc: it needs Linux, and its coordinator alive"
        ) from None


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Running:
    """A coordinator process."""

    url: str
    pid: int

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)


@contextmanager
def coordinator_process(folder: Path, corpus: Path, flags: Sequence[str]) -> Iterator[Running]:
    """`blocktrain coordinator` on a fresh folder, ready to be joined; ends with the block."""
    command = [
        sys.executable,
        "-m",
        "blocktrain",
        "coordinator",
        "--out",
        str(folder / "run"),
        "--data",
        str(corpus),
    ]
    command += [
        "--listen",
        "127.0.0.1:0",
        "--score-bytes",
        "0",
        "--json",
    ]  # scoring is another process, and not what is measured
    log = folder / "coordinator.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*command, *flags], stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        line = process.stdout.readline() if process.stdout else ""
        if not line:
            raise RunError(f"the coordinator did not start: {_last_line(log)}")
        url = json.loads(line)["url"]
        _wait_until_ready(url, process, log)
        yield Running(url, process.pid)
        if process.poll() is not None:
            raise RunError(f"the coordinator ended while it was measured: {_last_line(log)}")
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(url: str, process: subprocess.Popen[str], log: Path) -> None:
    from blocktrain.errors import BlockTrainError
    from blocktrain.web.client import HttpClient

    client, end = HttpClient(url), time.monotonic() + START_SECONDS
    try:
        while time.monotonic() < end and process.poll() is None:
            try:
                client.manifest()
                return
            except BlockTrainError:
                time.sleep(0.1)
    finally:
        client.close()
    raise RunError(f"the coordinator was not ready in {START_SECONDS:.0f} s: {_last_line(log)}")


def _last_line(log: Path) -> str:
    return (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]


def measure_swarm(
    options: SwarmOptions, progress: Callable[[float], None] = lambda _: None
) -> BenchResult:
    """Latencies, errors and memory of a coordinator under a swarm."""
    _allow_connections(options.workers)
    with tempfile.TemporaryDirectory(prefix="blocktrain-swarm-") as path:
        folder = Path(path)
        corpus = folder / "corpus.txt"
        corpus.write_bytes(random_text(options.seed, CORPUS_BYTES).tobytes())
        with coordinator_process(folder, corpus, options.flags) as running:
            load, vitals = options.load(*running.address), Vitals(running.pid)
            notes = _swarm(load, vitals, progress)
    return {
        "blocks": options.blocks,
        "replicas": options.replicas,
        **swarm_result(load, notes),
        **vitals_result(vitals, load),
    }


def _swarm(load: Load, vitals: Vitals, progress: Callable[[float], None]) -> Notes:
    """The notes of the load process; the coordinator is sampled from its first call on."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=swarm_process, args=(theirs, load), daemon=True
    )
    process.start()
    theirs.close()
    try:
        ours.recv()
        with vitals:
            ours.send("go")
            began, whole = time.monotonic(), load.ramp_seconds + load.seconds
            while not ours.poll(0.2):
                progress(min(1.0, (time.monotonic() - began) / whole))
        return ours.recv()
    except (EOFError, OSError):
        raise RunError(
            "the load process ended before it was done; was it killed because memory ran out?"
        ) from None
    finally:
        process.join(5)
        if process.is_alive():
            process.kill()


def _allow_connections(workers: int) -> None:
    """One for each worker, on both sides."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = workers + 256
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise RunError(
            f"{workers} workers need {needed} open files and this system allows {hard}; "
            "raise it with `ulimit -Hn` as root"
        )
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def swarm_result(load: Load, notes: Notes) -> BenchResult:
    """What the swarm saw, in milliseconds."""
    calls = {
        name: _summary([seconds for _, seconds in seen])
        for name, seen in sorted(notes.calls.items())
    }
    return {
        "workers": load.workers,
        "seconds": load.seconds,
        "heartbeat_seconds": load.heartbeat,
        "task_seconds": load.task,
        "calls": calls,
        "calls_per_second": round(
            sum(c["count"] for c in calls.values()) / (load.ramp_seconds + load.seconds), 1
        ),
        "p99_ms": max((c["p99_ms"] for c in calls.values()), default=0.0),
        "over_time": _over_time(load, notes),
        "errors": sum(notes.errors.values()),
        "error_kinds": dict(notes.errors.most_common(10)),
        "updates": notes.updates,
        "late_updates": notes.late,
        "refused_updates": dict(notes.refusals),
        "waits": notes.waits,
        "joins": notes.joins,
        "leaves": notes.leaves,
    }


def _summary(seconds: list[float]) -> BenchResult:
    times = sorted(seconds)

    def at(share: float) -> float:
        return round(1000 * times[min(len(times) - 1, math.ceil(share * len(times)) - 1)], 2)

    return {"count": len(times), "p50_ms": at(0.5), "p99_ms": at(0.99), "max_ms": at(1.0)}


def _over_time(load: Load, notes: Notes) -> list[BenchResult]:
    """All calls together, from the first worker on, in at most sixty steps."""
    seen = sorted(moment for calls in notes.calls.values() for moment in calls)
    width = max(1.0, (load.ramp_seconds + load.seconds) / 60)
    buckets: dict[int, list[float]] = {}
    for began, seconds in seen:
        buckets.setdefault(int((began - seen[0][0]) / width), []).append(seconds)
    return [
        {"second": round(width * index, 1), **_summary(bucket)}
        for index, bucket in sorted(buckets.items())
    ]


def vitals_result(vitals: Vitals, load: Load) -> BenchResult:
    """Memory, and whether it stopped growing in the second half of the time with all workers."""
    whole = vitals.memory_mb
    first = min(len(whole) - 1, math.ceil(load.ramp_seconds / SAMPLE_SECONDS))
    steady = whole[first + (len(whole) - first) // 2 :]
    growth = steady[-1] - steady[0] if steady else 0.0
    return {
        "memory_mb": whole,
        "memory_grown_mb": round(growth, 1),
        "memory_flat": bool(steady) and growth <= FLAT_SHARE * steady[0] + FLAT_MB,
        "cpu_share": round(sum(vitals.cpu) / max(1, len(vitals.cpu)), 3),
        "stolen_share": vitals.stolen_share,
    }


def plot(path: Path, result: BenchResult) -> None:
    """How long callers waited and what the coordinator held, over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 5), sharex=True)
    seconds = [step["second"] for step in result["over_time"]]
    for key, colour in (("p50_ms", "#0072b2"), ("p99_ms", "#d55e00")):
        above.plot(
            seconds,
            [step[key] for step in result["over_time"]],
            color=colour,
            label=key.removesuffix("_ms"),
        )
    above.axhline(100, color="#888", linewidth=1, linestyle=":")
    above.set_ylabel("ms until the answer")
    above.legend(frameon=False)
    below.plot(
        [SAMPLE_SECONDS * (n + 1) for n in range(len(result["memory_mb"]))],
        result["memory_mb"],
        color="#555",
    )
    below.set_ylabel("coordinator, MB")
    below.set_ylim(bottom=0)
    below.set_xlabel(
        f"seconds; all {result['workers']:,} workers are there after {result['task_seconds']:.0f}"
    )
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
