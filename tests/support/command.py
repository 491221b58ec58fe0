"""The command line as a user calls it, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def environment(cwd: Path, **more: str) -> dict[str, str]:
    """The environment with the cache in the folder and no network."""
    return {**os.environ, "BLOCKTRAIN_CACHE": str(cwd / "cache"), "HF_HUB_OFFLINE": "1", **more}


def start(*arguments: str, cwd: Path, **more: str) -> subprocess.Popen[str]:
    """Start a command; its stderr goes to a file in the folder."""
    log = (cwd / f"{arguments[0]}.err").open("a")
    with log:
        return subprocess.Popen(
            [sys.executable, "-m", "blocktrain", *arguments],
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
    return subprocess.run(
        [sys.executable, "-m", "blocktrain", *arguments],
        cwd=cwd,
        env=environment(cwd, **more),
        capture_output=True,
        text=True,
        errors="backslashreplace",  # an untrained model writes any byte
        timeout=timeout,
        check=False,
    )
