"""What a figure was measured on: the first keys of every result; and random text to train on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blocktrain.learning.tokenizer import Bytes

BenchResult = dict[str, Any]
"""What a bench prints as JSON."""


def header(command: str, seed: int) -> dict[str, Any]:
    """Command, seed and machine. Nothing in it names a host or a person."""
    return {
        "command": command,
        "seed": seed,
        "machine": {
            "cpu": cpu_model(),
            "cores": os.cpu_count() or 1,
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        },
    }


def cpu_model() -> str:
    table = Path("/proc/cpuinfo")
    if table.exists():
        for line in table.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def random_text(seed: int, size: int) -> Bytes:
    """A corpus of printable characters. Memory and time of a step do not depend on it."""
    return np.random.default_rng(seed).integers(32, 127, size=size, dtype=np.uint8)
