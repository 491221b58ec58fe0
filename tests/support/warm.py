"""A process that has loaded the package, and forks one that runs a command for each request.

A command spends two seconds of a processor on loading torch and the like, and tests start hundreds.
What is forked is a process of its own, with its own arguments, environment, folder, files and
signals. This file is the script of the process that forks; `support.command` asks it.
"""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing.process
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from importlib import import_module
from multiprocessing import connection, forkserver
from typing import Any, NoReturn

# What commands load. A module that reads the environment when it is loaded must not be here.
LOADED = (
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
    "blocktrain.audit.audit",
    "blocktrain.bench.commands",
    "blocktrain.bench.quality.quality",
    "blocktrain.bench.serving.report",
    "blocktrain.bench.transport.transport",
    "blocktrain.cli.app",
    "blocktrain.runs.local",
    "blocktrain.runs.prepare",
    "blocktrain.runs.report",
    "blocktrain.serving.entry.entry",
    "blocktrain.serving.openai_api",
    "blocktrain.serving.stage.stage",
    "blocktrain.watch.server",
    "blocktrain.worker.loop",
)
WITH_JOBS = ("train", "bench", "chaos", "worker", "coordinator")  # commands that start processes
LONGEST_REQUEST = 1 << 17
STREAMS = 3  # of a command; a pipe that tells its pid and its end comes after them


def fork_commands(requests: socket.socket) -> None:
    """Fork for each request. Returns in the new process, which is to run the command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends when nobody can ask any more
    for name in LOADED:
        import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for commands
    while True:
        content, files, _, _ = socket.recv_fds(requests, LONGEST_REQUEST, STREAMS + 1)
        if not content:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            command = os.fork()
            if command == 0:
                return become(files, **json.loads(content))
            tell_end(command, files)
        for file in files:
            os.close(file)


def tell_end(command: int, files: list[int]) -> None:
    """Wait for a command on behalf of the one who asked for it, who is not its parent."""
    for file in files[:STREAMS]:
        os.close(file)
    os.write(files[STREAMS], b"%d\n" % command)
    _, status = os.waitpid(command, 0)
    os.write(files[STREAMS], b"%d\n" % status)
    os._exit(0)


def become(files: list[int], words: list[str], folder: str, environment: dict[str, str]) -> None:
    """Take on what a command is started with."""
    for stream in range(STREAMS):
        os.dup2(files[stream], stream)
    for file in files:
        os.close(file)
    os.chdir(folder)
    multiprocessing.process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["blocktrain", *words]
    if words[0] in WITH_JOBS:
        fork_job_server()


def fork_job_server() -> None:
    """The process that forks jobs, as `multiprocessing` would start it, but loaded."""
    server: Any = vars(forkserver)["_forkserver"]
    address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        alive, server._forkserver_alive_fd = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(server._forkserver_alive_fd)
            try:
                forkserver.main(listener.fileno(), alive, ())
            finally:
                os._exit(0)
    os.close(alive)
    server._forkserver_address, server._forkserver_pid = address, process


def end(code: object) -> NoReturn:
    """End as the interpreter does, but do not take apart what is loaded, which takes long."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    fork_commands(socket.socket(fileno=int(sys.argv[1])))
    from blocktrain.__main__ import main

    try:
        main()
    except SystemExit as exit_:
        end(exit_.code)
    end(None)
