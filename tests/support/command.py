"""The command line as a user calls it, in a process of its own.

The process is forked from one that has loaded the package (`support.warm`). Tests of how a command
starts begin `python -m blocktrain` themselves.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, AnyStr

from support import warm


def environment(cwd: Path, **more: str) -> dict[str, str]:
    """The environment with the cache in the folder and no network."""
    return {**os.environ, "BLOCKTRAIN_CACHE": str(cwd / "cache"), "HF_HUB_OFFLINE": "1", **more}


def start(*arguments: str, cwd: Path, **more: str) -> subprocess.Popen[str]:
    """Start a command; its stderr goes to a file in the folder."""
    log = (cwd / f"{arguments[0]}.err").open("a")
    with log:
        return Command(
            arguments,
            cwd=cwd,
            env=environment(cwd, **more),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )


def blocktrain(
    *arguments: str, cwd: Path, timeout: float = 280, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run `blocktrain ARGUMENTS` in a folder until it ends."""
    return run(
        arguments,
        timeout,
        cwd=cwd,
        env=environment(cwd, **more),
        text=True,
        errors="backslashreplace",  # an untrained model writes any byte
    )


def run(words: tuple[str, ...], timeout: float, **options: Any) -> subprocess.CompletedProcess[Any]:
    """A command until it ends, as `subprocess.run` with its output captured."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Command(words, **{**pipes, **options}) as process:
        try:
            out, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, out, errors)


class Command(subprocess.Popen[AnyStr]):
    """A command forked by the warm process. This one is not its parent: a pipe tells its end."""

    def _execute_child(self, words: tuple[str, ...], *more: Any) -> None:
        cwd, env, pipes = more[4], more[5], more[9:15]
        request = {"words": words, "folder": str(cwd), "environment": env}
        ends: list[int] = [pipes[0], pipes[3], pipes[5]]  # of the command
        streams: list[int] = [n if file == -1 else file for n, file in enumerate(ends)]
        end, told = os.pipe()
        requests, _ = warm_process()
        socket.send_fds(requests, [json.dumps(request).encode()], [*streams, told])
        os.close(told)
        self._end = os.fdopen(end)
        self.pid = int(self._end.readline())
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if flags & os.WNOHANG and not select.select([self._end], [], [], 0)[0]:
            return 0, 0
        with self._end:
            return self.pid, int(self._end.readline())

    def _internal_poll(self, _deadstate: int | None = None) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None


@cache
def warm_process() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The process that forks commands, and where it takes requests as long as this one lives."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        script = [sys.executable, "-P", warm.__file__, str(theirs.fileno())]
        pipe = theirs.fileno()
        return ours, subprocess.Popen(script, stdin=subprocess.DEVNULL, pass_fds=[pipe])
