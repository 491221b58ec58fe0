"""What a figure was measured on: the head of every result, one thread to measure with, bytes to train on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blocktrain.learning.tokenizer import Bytes


def header(command: str, seed: int) -> dict[str, Any]:
    """The command that prints the figures, its seed, and the machine, without anything that names a host or a person."""
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
    """The name of the processor as the system tells it."""
    table = Path("/proc/cpuinfo")
    if table.exists():
        for line in table.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def random_bytes(seed: int, size: int) -> Bytes:
    """A corpus from a seed: neither the bytes held nor the time of a step depends on what the text says."""
    return np.random.default_rng(seed).integers(0, 256, size=size, dtype=np.uint8)
