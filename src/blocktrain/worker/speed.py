"""How fast a block trains: tokens a second, and the estimated share of the device's peak.

The peak of a known GPU is its maker's figure. Any other device is measured with one large product
of matrices, on as many threads as train.
"""

from __future__ import annotations

from collections import deque
from functools import cache

import torch

from blocktrain.clock import Clock, SystemClock
from blocktrain.devices import find_device
from blocktrain.learning.train import Trainer
from blocktrain.shapes import flops_per_token

STEPS = 50  # that a figure is the mean of, at most
PROBE_SECONDS = 0.1
SIDES = {"cpu": 512}  # of the matrices that are multiplied; on a GPU larger ones are faster
GPU_SIDE = 4096


class SpeedMeter:
    """Measures one trainer from now on."""

    def __init__(self, trainer: Trainer) -> None:
        c = trainer.config
        self._trainer = trainer
        self._tokens = c.batch * c.context
        self._peak = peak_flops(str(trainer.device), c.dtype)
        self._flops = flops_per_token(c, trainer.index)
        self._marks = deque([(trainer.step, trainer.seconds)], STEPS + 1)

    def after_step(self) -> dict[str, float]:
        """Fields of an event: the speed of the last steps."""
        self._marks.append((self._trainer.step, self._trainer.seconds))
        (first, began), (last, ended) = self._marks[0], self._marks[-1]
        return self.fields((last - first) / max(ended - began, 1e-9))

    def fields(self, steps_per_second: float) -> dict[str, float]:
        rate = steps_per_second * self._tokens
        return {
            "tokens_per_second": round(rate, 1),
            "peak_share": round(rate * self._flops / self._peak, 4),
        }


@cache
def peak_flops(device: str, dtype: str) -> float:
    """Operations a second that a device can do at most, estimated."""
    if device.startswith("cuda"):
        known = find_device(torch.cuda.get_device_name(device))
        if known is not None:
            return known.peak(dtype)
    return measure_peak(torch.device(device), getattr(torch, dtype))


def measure_peak(device: torch.device, dtype: torch.dtype, clock: Clock | None = None) -> float:
    """The fastest of several products: others may use the device at the same time."""
    clock = clock or SystemClock()
    side = SIDES.get(device.type, GPU_SIDE)
    matrix = torch.full((side, side), 0.5, dtype=dtype, device=device)
    fastest, end = float("inf"), clock.monotonic() + PROBE_SECONDS
    with torch.no_grad():
        (matrix @ matrix)[0, 0].item()  # the first one also loads the kernel
        while fastest == float("inf") or clock.monotonic() < end:
            began = clock.monotonic()
            (matrix @ matrix)[0, 0].item()  # waits for the device
            fastest = min(fastest, max(clock.monotonic() - began, 1e-9))
    return 2 * side**3 / fastest
