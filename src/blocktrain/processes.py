"""Jobs in processes of their own, some waiting for others, as many at a time as there are slots."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

from blocktrain.errors import (
    OUT_OF_MEMORY,
    BlockTrainError,
    Interrupted,
    RunError,
    broken,
    out_of_memory,
)

STOP_SECONDS = 60


class Channel:
    """A job's line to the process that started it."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._parent, self._told = (
            connection,
            multiprocessing.parent_process(),
            False,
        )
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # Ctrl-C reaches the whole group; the parent decides
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, *_: object) -> None:
        self._told = True

    @property
    def stopped(self) -> bool:
        """Whether to save and end now: told to, or the parent is gone."""
        return self._told or self._parent is None or not self._parent.is_alive()

    def send(self, **fields: Any) -> None:
        """Tell the parent something; one that is gone is noticed by `stopped`."""
        try:
            self._connection.send(fields)
        except (BrokenPipeError, ConnectionResetError):
            self._told = True


@dataclass(frozen=True)
class Job:
    """`work(channel, *arguments)` in a process of its own, after the named jobs have ended well."""

    name: str
    work: Callable[..., None]
    arguments: tuple[Any, ...] = ()
    after: tuple[str, ...] = ()


@dataclass
class _Running:
    process: BaseProcess
    connection: Connection
    error: str | None = None


@dataclass
class _Table:
    waiting: dict[str, Job]
    running: dict[str, _Running] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)


def run_jobs(
    jobs: Iterable[Job],
    slots: int,
    on_message: Callable[[str, dict[str, Any]], None],
    again: str = "continue with --resume",
) -> None:
    """Run all jobs; the first that fails, or Ctrl-C, tells the others to save and end, then raises. `again` says how to go on."""
    table = _Table({job.name: job for job in jobs})
    context = multiprocessing.get_context("forkserver")
    # Jobs are forked from a server that has imported what they need and done nothing else: no second import, no threads.
    context.set_forkserver_preload(sorted({job.work.__module__ for job in table.waiting.values()}))
    try:
        while table.waiting or table.running:
            for job in [j for j in table.waiting.values() if table.done.issuperset(j.after)][
                : slots - len(table.running)
            ]:
                table.running[job.name] = _start(job, context)
                del table.waiting[job.name]
            if not table.running:
                raise RunError(
                    f"jobs wait for something that never comes: {', '.join(table.waiting)}"
                )
            _collect(table, on_message, again)
    except KeyboardInterrupt:
        _end(table, on_message)
        raise Interrupted(f"stopped; everything up to here is saved: {again}") from None
    except BaseException:
        _end(table, on_message)
        raise


def _start(job: Job, context: ForkServerContext) -> _Running:
    """A process that is deaf to Ctrl-C, as the server it is forked from has been since its first instruction."""
    signal_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, signal_handler)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(job, theirs), name=job.name, daemon=True)
    with _no_main():
        process.start()  # waits while the server imports; Ctrl-C still ends the wait
    theirs.close()
    return _Running(process, ours)


@contextmanager
def _no_main() -> Iterator[None]:
    """A process that is started here does not run the command's module again: half a second in every job, which needs nothing of it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _collect(table: _Table, on_message: Callable[[str, dict[str, Any]], None], again: str) -> None:
    """Take what has been said, and bury who has ended."""
    names = {running.connection: name for name, running in table.running.items()}
    for ready in wait(list(names), timeout=1.0):
        name = names[ready]  # type: ignore[index]
        running = table.running[name]
        try:
            message = running.connection.recv()
        except (EOFError, ConnectionResetError):
            running.process.join()
            del table.running[name]
            if running.error or running.process.exitcode:
                raise RunError(
                    f"{name}: {running.error or _obituary(running.process.exitcode, again)}"
                ) from None
            table.done.add(name)
            continue
        if "error" in message:
            running.error = message["error"]
        else:
            on_message(name, message)


def _obituary(code: int | None, again: str) -> str:
    if code == -signal.SIGILL:  # seen on virtual machines that announce AMX and cannot run it
        return "the processor refused an instruction; use --dtype float32, or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
    if code == -signal.SIGKILL:
        return f"the process was killed, perhaps for want of memory; what it had saved is kept: {again}"
    return f"the process died with exit code {code}; what it had saved is kept: {again}"


def _end(table: _Table, on_message: Callable[[str, dict[str, Any]], None]) -> None:
    """Ask all to save and end; kill who has not done so in time."""
    signal_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    for running in table.running.values():
        running.process.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    try:
        for name, running in table.running.items():
            while (
                running.connection.poll(max(0.0, deadline - time.monotonic()))
                and time.monotonic() < deadline
            ):
                try:
                    message = running.connection.recv()
                except (EOFError, ConnectionResetError):
                    break
                if "error" not in message:
                    with suppress(
                        OSError
                    ):  # a log that cannot be written is told by what ended the jobs
                        on_message(name, message)
            running.process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for running in table.running.values():
            if running.process.is_alive():
                running.process.kill()
                running.process.join()
        signal.signal(signal.SIGINT, signal_handler)


def _main(job: Job, connection: Connection) -> None:
    channel = Channel(connection)
    try:
        job.work(channel, *job.arguments)
    except BlockTrainError as error:
        channel.send(error=str(error))
    except OSError as error:
        channel.send(error=f"{broken(error)}; what was saved before is kept")
    except Exception as error:
        channel.send(error=OUT_OF_MEMORY if out_of_memory(error) else traceback.format_exc())
