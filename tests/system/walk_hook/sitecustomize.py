"""Profile hook for `make walk`. Python imports this file at start when its folder is on the path.

Every entry into a function of the package is appended to a log as "nanoseconds file function".
The clock is the machine's monotonic clock, so logs of several processes can be compared. Each
line of JSON that a command prints is logged as a mark, so that the reader can find a window.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from inspect import CO_OPTIMIZED
from types import FrameType
from typing import Any

PACKAGE, LOG = os.environ.get("WALK_PACKAGE", ""), os.environ.get("WALK_LOG", "")


def install(package: str, path: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    process = os.getpid()
    importing = threading.local()  # depth of module bodies: what an import runs is no step

    def write(text: str) -> None:
        if os.getpid() == process:  # forked children (the scoring of versions) are no part of it
            os.write(log, f"{time.monotonic_ns()} {text}\n".encode())

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(package) or event not in ("call", "return"):
            return
        if code.co_filename.endswith("__main__.py"):  # the whole command runs in its body
            return
        if not code.co_flags & CO_OPTIMIZED:  # the body of a module or of a class
            importing.depth = getattr(importing, "depth", 0) + (1 if event == "call" else -1)
        elif event == "call" and not getattr(importing, "depth", 0):
            write(f"{code.co_filename[len(package) + 1 :]} {code.co_qualname}")

    def mark(text: str) -> int:
        if text.startswith("{"):
            write(f"mark {text.strip()}")
        return print_(text)

    print_ = sys.stdout.write
    sys.stdout.write = mark  # type: ignore[method-assign]
    threading.setprofile(profile)
    sys.setprofile(profile)


if LOG:
    install(PACKAGE, LOG)
