"""Runs jobs in processes of their own: some after others, a limited number at a time."""

from __future__ import annotations

import ctypes
import multiprocessing
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from blocktrain.errors import (
    OUT_OF_MEMORY,
    BlockTrainError,
    Interrupted,
    RunError,
    explain_os_error,
    out_of_memory,
)

STOP_SECONDS = 60


def peak_mb() -> float:
    """The peak resident memory of this process in MB, interpreter and libraries included."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss would include the parent's
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return round(int(line.split()[1]) * 1024 / 1e6, 1)
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6, 1)


def return_memory() -> None:
    """Give freed memory back to the system; glibc keeps all pieces below 32 MB for itself."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


class Channel:
    """How a job talks to the process that started it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._parent = multiprocessing.parent_process()
        self._stop_requested = False
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent decides
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, *_: object) -> None:
        self._stop_requested = True

    @property
    def should_stop(self) -> bool:
        """Whether to save and end now: the parent asked for it, or has ended."""
        return self._stop_requested or self._parent is None or not self._parent.is_alive()

    def send(self, **fields: Any) -> None:
        """Send the parent a message. If it has ended, `should_stop` becomes true."""
        try:
            self._connection.send(fields)
        except (BrokenPipeError, ConnectionResetError):
            self._stop_requested = True


@dataclass(frozen=True)
class Job:
    """`work(channel, *arguments)` in a process of its own, after the named jobs have succeeded."""

    name: str
    work: Callable[..., None]
    arguments: tuple[Any, ...] = ()
    after: tuple[str, ...] = ()


@dataclass
class RunningJob:
    """A job that has been started. Its messages arrive at `connection`, and its end as EOFError."""

    process: BaseProcess
    connection: Connection
    error: str | None = None


@dataclass
class _Table:
    waiting: dict[str, Job]
    running: dict[str, RunningJob] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)


def run_jobs(
    jobs: Iterable[Job],
    slots: int,
    on_message: Callable[[str, dict[str, Any]], None],
    again: str = "continue with --resume",
    stopped: Callable[[], bool] = lambda: False,
    on_failure: Callable[[str, str], None] | None = None,
) -> None:
    """Run all jobs. If one fails, or on Ctrl-C, the others save and end, and it raises.

    `again` tells the user how to continue. `stopped` is Ctrl-C for those who run jobs in a thread.
    With `on_failure`, which gets the name of a job that failed and why, the others go on.
    """
    table = _Table({job.name: job for job in jobs})
    context = fork_context(job.work for job in table.waiting.values())
    try:
        while table.waiting or table.running:
            if stopped():
                raise KeyboardInterrupt
            ready = [job for job in table.waiting.values() if table.done.issuperset(job.after)]
            for job in ready[: slots - len(table.running)]:
                table.running[job.name] = start_job(job, context)
                del table.waiting[job.name]
            if not table.running:
                raise RunError(
                    f"these jobs wait for jobs that never run: {', '.join(table.waiting)}"
                )
            _collect(table, on_message, again, on_failure)
    except KeyboardInterrupt:
        _end(table, on_message)
        raise Interrupted(f"stopped; everything up to here is saved: {again}") from None
    except BaseException:
        _end(table, on_message)
        raise


def fork_context(works: Iterable[Callable[..., None]]) -> ForkServerContext:
    """A server forks the jobs: it has imported what they need and done nothing else.

    So no job imports again, and none inherits a thread.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(sorted({work.__module__ for work in works}))
    return context


def start_job(job: Job, context: ForkServerContext) -> RunningJob:
    """Start a job. Neither it nor the server that forks it ever reacts to Ctrl-C."""
    with ignore_interrupts():
        forkserver.ensure_running()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(job, theirs), name=job.name, daemon=True)
    with _no_main():
        process.start()  # waits while the server imports; Ctrl-C still ends the wait
    theirs.close()
    return RunningJob(process, ours)


@contextmanager
def ignore_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C, which only the main thread receives."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


@contextmanager
def _no_main() -> Iterator[None]:
    """Keep a new process from importing the command's module, which costs it half a second."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _collect(
    table: _Table,
    on_message: Callable[[str, dict[str, Any]], None],
    again: str,
    on_failure: Callable[[str, str], None] | None,
) -> None:
    """Receive messages, and remove the jobs that have ended."""
    names = {running.connection: name for name, running in table.running.items()}
    for ready in wait(list(names), timeout=1.0):
        name = names[ready]  # type: ignore[index]
        running = table.running[name]
        try:
            message = running.connection.recv()
        except (EOFError, ConnectionResetError):
            running.process.join()
            del table.running[name]
            if not running.error and not running.process.exitcode:
                table.done.add(name)
                continue
            reason = running.error or _exit_sentence(running.process.exitcode, again)
            if on_failure is None:
                raise RunError(f"{name}: {reason}") from None
            on_failure(name, reason)
            continue
        if "error" in message:
            running.error = message["error"]
        else:
            on_message(name, message)


def _exit_sentence(code: int | None, again: str) -> str:
    if code == -signal.SIGILL:  # seen on virtual machines that announce AMX and cannot run it
        return (
            "the processor refused an instruction; "
            "use --dtype float32, or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
        )
    if code == -signal.SIGKILL:
        return (
            "the process was killed, perhaps because memory ran out; "
            f"everything it saved is kept: {again}"
        )
    return f"the process ended with exit code {code}; everything it saved is kept: {again}"


def _end(table: _Table, on_message: Callable[[str, dict[str, Any]], None]) -> None:
    """Ask all jobs to save and end; kill those that have not ended in time."""
    with ignore_interrupts():
        for running in table.running.values():
            running.process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        try:
            for name, running in table.running.items():
                _drain(name, running, deadline, on_message)
                running.process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for running in table.running.values():
                if running.process.is_alive():
                    running.process.kill()
                    running.process.join()


def _drain(
    name: str,
    running: RunningJob,
    deadline: float,
    on_message: Callable[[str, dict[str, Any]], None],
) -> None:
    """Receive the last messages of a job."""
    while (
        running.connection.poll(max(0.0, deadline - time.monotonic()))
        and time.monotonic() < deadline
    ):
        try:
            message = running.connection.recv()
        except (EOFError, ConnectionResetError):
            return
        if "error" not in message:
            with suppress(OSError):  # a log that cannot be written: that ended the jobs
                on_message(name, message)


def _main(job: Job, connection: Connection) -> None:
    channel = Channel(connection)
    try:
        job.work(channel, *job.arguments)
    except BlockTrainError as error:
        channel.send(error=str(error))
    except OSError as error:
        channel.send(error=f"{explain_os_error(error)}; everything saved before is kept")
    except Exception as error:
        channel.send(error=OUT_OF_MEMORY if out_of_memory(error) else traceback.format_exc())
