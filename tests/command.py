"""The command line as a user calls it, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def blocktrain(*arguments: str, cwd: Path, timeout: float = 280, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `blocktrain ARGUMENTS` in a folder, with its cache there and no network."""
    return subprocess.run(
        [sys.executable, "-m", "blocktrain.cli", *arguments],
        cwd=cwd,
        env={**os.environ, "BLOCKTRAIN_CACHE": str(cwd / "cache"), "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        errors="backslashreplace",  # an untrained model writes any byte
        timeout=timeout,
        check=False,
    )
