"""A worker process of `blocktrain train`: the same loop as everywhere, on this machine's own coordinator, for one block."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from blocktrain.errors import RunError
from blocktrain.learning.train import pick_device
from blocktrain.processes import Channel
from blocktrain.runs.results import REPORT_SECONDS, peak_mb
from blocktrain.web.client import HttpClient
from blocktrain.worker.loop import Machine, Worker
from blocktrain.worker.slots import own_identity

AWAY_SECONDS = 60.0


@dataclass(frozen=True)
class Seat:
    """Where a worker process finds its coordinator, and what it may use."""

    url: str
    token: str
    cache: Path
    device: str
    threads: int
    steps: int  # of each block


def work(channel: Channel, seat: Seat) -> None:
    """The work of one process: the block that the coordinator gives it, to its end. The next block is for another process."""
    torch.set_num_threads(seat.threads)
    client = HttpClient(seat.url, seat.token)
    machine = Machine(str(pick_device(seat.device)))
    reporter = Reporter(channel, seat.steps)
    with own_identity(seat.cache) as identity:
        worker = Worker(client, seat.cache, identity, machine, reporter.told, shared=True)
        worker.run(lambda: channel.stopped or reporter.deserted, lambda: reporter.done)
    if reporter.deserted:
        raise RunError(
            "the coordinator in the main process does not answer any more; continue with --resume"
        )


@dataclass
class Reporter:
    """Turns a worker's events into those of the run folder."""

    channel: Channel
    steps: int
    block: int = 0
    said: float = 0.0
    losses: list[float] = field(default_factory=list)
    away: float | None = None
    done: bool = False  # the last steps of a block are trained and accepted

    @property
    def deserted(self) -> bool:
        """Whether the coordinator, which is on this very machine, was silent for too long."""
        return self.away is not None and time.monotonic() - self.away > AWAY_SECONDS

    def told(self, kind: str, /, **fields: Any) -> None:
        """Something happened. The channel is for one thread: what comes from others is not passed on."""
        if kind in ("away", "back"):
            self.away = time.monotonic() if kind == "away" else None
        elif kind == "fresh":
            self.channel.send(**fields, kind="state_lost")
        elif kind == "task":
            self.block = fields["block"]
        elif kind == "step":
            self.losses.append(fields["loss"])
            now = time.monotonic()
            if now - self.said > REPORT_SECONDS or fields["step"] == self.steps:
                self.channel.send(
                    kind="step",
                    block=self.block,
                    step=fields["step"],
                    loss=sum(self.losses) / len(self.losses),
                )
                self.said, self.losses = now, []
        elif kind == "trained":
            self.channel.send(
                kind="trained",
                block=self.block,
                step=fields["step"],
                seconds=round(fields["seconds"], 3),
                peak_mb=peak_mb(),
            )
        elif kind == "accepted":
            self.done = fields["step"] == self.steps
