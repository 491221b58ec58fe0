"""The run and its server in Prometheus' text format, for GET /metrics."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client import Counter as Counted
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from blocktrain.errors import BlockTrainError
from blocktrain.protocol.status import BlockStatus, Status, WorkerStatus

if TYPE_CHECKING:
    from blocktrain.watch.server import WatchedCoordinator

SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    10.0,
)  # bounds of the latency histogram
STATES = get_args(WorkerStatus.model_fields["state"].annotation)
MESSAGES = "messages"  # in place of a block: bytes that belong to no block


class CoordinatorMetrics:
    """Counts of one server's answers, and the current state of its run."""

    def __init__(self, coordinator: WatchedCoordinator, listeners: Callable[[], int]) -> None:
        disable_created_metrics()  # the time of a counter's first use is of no interest
        self._registry = CollectorRegistry()
        labels = ("method", "route")
        self._requests = Counted(
            "blocktrain_http_requests", "Answers.", (*labels, "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "blocktrain_http_request_seconds",
            "From the first look at a request to its answer; sending that is not counted.",
            labels,
            buckets=SECONDS,
            registry=self._registry,
        )
        self._registry.register(_Run(coordinator, listeners))

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self._requests.labels(method, route, status).inc()
        self._seconds.labels(method, route).observe(seconds)

    def text(self) -> bytes:
        """All of it."""
        return generate_latest(self._registry)


class _Run(Collector):
    def __init__(self, coordinator: WatchedCoordinator, listeners: Callable[[], int]) -> None:
        self._coordinator, self._listeners = coordinator, listeners

    def describe(self) -> Iterable[Metric]:
        """Empty, so that registering does not read the run."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The run as it is now. Without a run there are only metrics of the process."""
        feed = self._coordinator.feed
        yield GaugeMetricFamily(
            "blocktrain_ready", "Whether there is a run.", float(self._coordinator.ready)
        )
        yield GaugeMetricFamily(
            "blocktrain_listeners", "Open streams of events.", self._listeners()
        )
        yield GaugeMetricFamily(
            "process_resident_memory_bytes",
            "Memory of the coordinator's process.",
            resident_bytes(),
        )
        yield CounterMetricFamily(
            "process_cpu_seconds",
            "Processor time of the coordinator's process.",
            time.process_time(),
        )
        yield CounterMetricFamily(
            "blocktrain_events_dropped",
            "Events that the log on the disk has no room for.",
            feed.drop_count,
        )
        try:
            status = self._coordinator.status()
        except BlockTrainError:
            return
        yield from _whole(status)
        yield from _blocks(status)


def resident_bytes() -> int:
    """Memory that this process has now; where that cannot be read, the most it ever had."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )


def _whole(status: Status) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "blocktrain_finished", "Whether the run is over.", float(status.state == "finished")
    )
    yield GaugeMetricFamily(
        "blocktrain_up_seconds", "Since this process took the run up.", status.up_seconds
    )
    yield CounterMetricFamily(
        "blocktrain_rounds", "Rounds that were closed with a new version.", status.rounds
    )
    yield CounterMetricFamily("blocktrain_tokens", "Bytes of text in all versions.", status.tokens)
    waiting = sum(
        block.round is not None and block.round.deadline_seconds > 0 for block in status.blocks
    )
    yield GaugeMetricFamily("blocktrain_rounds_open", "Rounds whose clock is running.", waiting)
    workers = GaugeMetricFamily(
        "blocktrain_workers", "Everyone who ever joined, by state.", labels=("state",)
    )
    counts = Counter(worker.state for worker in status.workers)
    for state in STATES:
        workers.add_metric((state,), counts[state])
    yield workers
    yield from _members(status)
    disk = status.disk
    yield GaugeMetricFamily(
        "blocktrain_disk_bytes", "What the run has on the disk, without the corpus.", disk.used
    )
    yield GaugeMetricFamily("blocktrain_disk_free_bytes", "What the disk has left.", disk.free)
    if disk.limit is not None:
        yield GaugeMetricFamily("blocktrain_disk_limit_bytes", "--disk-limit.", disk.limit)
    held = sum(worker.held for worker in status.workers)
    yield GaugeMetricFamily("blocktrain_held_bytes", "Of updates that no round has taken.", held)
    yield GaugeMetricFamily(
        "blocktrain_paused", "Whether updates are refused for want of disk.", bool(disk.problem)
    )
    refusals = CounterMetricFamily(
        "blocktrain_refusals", "Refusals of this process, by code.", labels=("code",)
    )
    for code, count in status.refusals.items():
        refusals.add_metric((code,), count)
    yield refusals
    scores = GaugeMetricFamily(
        "blocktrain_score", "Cross entropy on the valid part, nats per token.", labels=("model",)
    )
    for name, ce in status.scores.items():
        scores.add_metric((name,), ce)
    yield scores
    bits = GaugeMetricFamily(
        "blocktrain_score_bits_per_byte", "The same in bits per byte.", labels=("model",)
    )
    for name, value in status.bits_per_byte.items():
        bits.add_metric((name,), value)
    yield bits


def _members(status: Status) -> Iterator[Metric]:
    """How far each member is trusted. Who has left is left out."""
    present = [worker for worker in status.workers if worker.state not in ("left", "kicked")]
    for name, text, read in (
        ("barred", "Rounds that a worker still has to sit out.", lambda w: w.barred),
        ("checked", "Updates of a worker that were trained again.", lambda w: w.checked),
        ("share", "Of the last version that a worker was part of.", lambda w: w.share),
    ):
        family = GaugeMetricFamily(f"blocktrain_worker_{name}", text, labels=("worker", "standing"))
        for worker in present:
            family.add_metric((worker.worker, worker.standing), read(worker))
        yield family


_OF_A_BLOCK: tuple[
    tuple[
        str,
        type[GaugeMetricFamily] | type[CounterMetricFamily],
        str,
        Callable[[BlockStatus], float | None],
    ],
    ...,
] = (
    ("block_version", GaugeMetricFamily, "Newest version.", lambda b: b.version),
    ("block_steps", GaugeMetricFamily, "Steps along the chain of versions.", lambda b: b.steps),
    ("block_loss", GaugeMetricFamily, "Training loss of the newest version.", lambda b: b.loss),
    (
        "round_seconds",
        GaugeMetricFamily,
        "Left until the deadline of the round.",
        lambda b: b.round.deadline_seconds if b.round else None,
    ),
    (
        "round_updates",
        GaugeMetricFamily,
        "Updates in the open round.",
        lambda b: b.round.updates if b.round else None,
    ),
    ("updates_accepted", CounterMetricFamily, "Accepted updates.", lambda b: b.accepted),
    (
        "updates_late",
        CounterMetricFamily,
        "Of the accepted ones, those with an older base.",
        lambda b: b.late,
    ),
    ("updates_refused", CounterMetricFamily, "Refusals that name a block.", lambda b: b.refused),
)


def _blocks(status: Status) -> Iterator[Metric]:
    for name, kind, text, read in _OF_A_BLOCK:
        family = kind(f"blocktrain_{name}", text, labels=("block",))
        for block in status.blocks:
            if (value := read(block)) is not None:
                family.add_metric((str(block.block),), value)
        yield family
    for way in ("bytes_in", "bytes_out"):
        family = CounterMetricFamily(
            f"blocktrain_{way}",
            "Body bytes of calls, by the block they are for.",
            labels=("block",),
        )
        for block in status.blocks:
            family.add_metric((str(block.block),), getattr(block, way))
        family.add_metric(
            (MESSAGES,), getattr(status, way) - sum(getattr(block, way) for block in status.blocks)
        )
        yield family
