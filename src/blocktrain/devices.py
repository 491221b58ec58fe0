"""Known devices: their peaks and memory, as their makers publish them."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict


class Device(BaseModel):
    """A known device: its peaks in operations a second, and its memory."""

    model_config = ConfigDict(frozen=True)

    float32: float
    bfloat16: float
    memory: int = 0
    """0: not of the device; the fleet must say it."""

    def peak(self, dtype: str) -> float:
        return self.bfloat16 if dtype == "bfloat16" else self.float32


def _gpu(float32: float, bfloat16: float, gigabytes: int) -> Device:
    return Device(float32=float32 * 1e12, bfloat16=bfloat16 * 1e12, memory=gigabytes * 2**30)


DEVICES = {
    "cpu": Device(float32=1e11, bfloat16=1e11),
    "m1": Device(float32=2.6e12, bfloat16=2.6e12),
    "m2": Device(float32=3.6e12, bfloat16=3.6e12),
    "m4": Device(float32=4.3e12, bfloat16=4.3e12),
    "t4": _gpu(8.1, 8.1, 16),
    "rtx3060": _gpu(12.7, 25, 12),
    "rtx3090": _gpu(35.6, 71, 24),
    "rtx4060": _gpu(15.1, 30, 8),
    "rtx4070": _gpu(29.1, 58, 12),
    "rtx4090": _gpu(82.6, 165, 24),
    "rtx5090": _gpu(105, 210, 32),
    "l4": _gpu(30, 121, 24),
    "l40s": _gpu(91.6, 362, 48),
    "a100": _gpu(19.5, 312, 80),
    "h100": _gpu(67, 989, 80),
}
"""Dense peaks as their makers publish them, without TF32; `cpu` is one core, as a worker uses."""


def find_device(name: str) -> Device | None:
    """A device by the name that its driver gives it: NVIDIA GeForce RTX 4090."""
    words = re.sub(r"[^a-z0-9 ]", " ", name.lower()).replace("rtx ", "rtx").split()
    return next((DEVICES[word] for word in words if word in DEVICES and word != "cpu"), None)
