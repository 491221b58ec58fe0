"""A worker process of `blocktrain train`: the usual loop, for one block of the local coordinator.

Apart from `local`, so that this process does not load the coordinator.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blocktrain.clock import Clock, SystemClock
from blocktrain.config import Config
from blocktrain.errors import RunError
from blocktrain.learning.threads import use_threads
from blocktrain.learning.train import pick_device
from blocktrain.processes import Channel, peak_mb
from blocktrain.runs.reference import REPORT_SECONDS
from blocktrain.web.client import HttpClient
from blocktrain.worker.loop import Machine, Worker
from blocktrain.worker.state import own_identity

AWAY_SECONDS = 60.0


@dataclass(frozen=True)
class LocalWorker:
    """Where a worker process finds its coordinator, and what it may use."""

    url: str
    token: str
    cache: Path
    threads: int
    config: Config
    corpus: Path  # the prepared one, which is read where it is


def work(channel: Channel, options: LocalWorker) -> None:
    """Train one block, the one that the coordinator gives this process, to its end."""
    use_threads(options.threads)
    machine = Machine(str(pick_device(options.config.device)))
    reporter = ChannelReporter(channel, options.config)
    with (
        closing(HttpClient(options.url, options.token)) as client,
        own_identity(options.cache) as identity,
    ):
        worker = Worker(
            client,
            options.cache,
            identity,
            machine,
            reporter.emit,
            shared=True,
            corpus=options.corpus,
        )
        worker.run(
            lambda: channel.should_stop or reporter.coordinator_is_lost, lambda: reporter.done
        )
    if reporter.coordinator_is_lost:
        raise RunError(
            "the coordinator in the main process no longer answers; continue with --resume"
        )


@dataclass
class ChannelReporter:
    """Passes a worker's events on as those of the run folder."""

    channel: Channel
    config: Config
    clock: Clock = field(default_factory=SystemClock)
    block: int = 0
    last_report: float = 0.0
    losses: list[float] = field(default_factory=list)
    away: float | None = None
    done: bool = False  # the last steps of a block are trained and accepted

    @property
    def coordinator_is_lost(self) -> bool:
        """Whether the coordinator, which is on this very machine, was silent for too long."""
        return self.away is not None and self.clock.monotonic() - self.away > AWAY_SECONDS

    def emit(self, kind: str, /, **fields: Any) -> None:
        """The channel is for one thread: events of other threads are not passed on."""
        if kind in ("away", "back"):
            self.away = self.clock.monotonic() if kind == "away" else None
        elif kind == "fresh":
            self.channel.send(**fields, kind="state_lost")
        elif kind == "task":
            self.block = fields["block"]
        elif kind == "step":
            self._step(fields["step"], fields["loss"], pick_speed(fields))
        elif kind == "trained":
            self.channel.send(
                kind="trained",
                block=self.block,
                step=fields["step"],
                seconds=round(fields["seconds"], 3),
                peak_mb=peak_mb(),
                **pick_speed(fields),
            )
        elif kind == "accepted":
            self.done = fields["step"] == self.config.steps_of(self.block)

    def _step(self, step: int, loss: float, speed: dict[str, float]) -> None:
        self.losses.append(loss)
        now = self.clock.monotonic()
        if now - self.last_report > REPORT_SECONDS or step == self.config.steps_of(self.block):
            mean = sum(self.losses) / len(self.losses)
            self.channel.send(kind="step", block=self.block, step=step, loss=mean, **speed)
            self.last_report, self.losses = now, []


def pick_speed(fields: dict[str, Any]) -> dict[str, float]:
    """Those fields of an event that say how fast a block trains."""
    return {name: fields[name] for name in ("tokens_per_second", "peak_share")}
