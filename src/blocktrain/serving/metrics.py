"""A server and its hosts in Prometheus' text format, for GET /metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from blocktrain.serving.openai_messages import TextChoice
from blocktrain.serving.request_queue import RequestQueue

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
PER_SWEEP = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_COUNTERS = (
    ("text_bytes", "Bytes of text that were written."),
    ("sweeps", "Traversals of all blocks."),
    ("drafted", "Tokens that were drafted."),
    ("accepted", "Of the drafted tokens, those that the whole model agreed with."),
    ("wire_bytes", "Bytes to and from the stages, for answers."),
    ("failovers", "Times that an answer went on with another holder of a block."),
    ("near_ties", "Tokens whose two best candidates were as good as equal."),
    ("degraded_answers", "Answers for which a block was missing."),
)


class ServingMetrics:
    """What one server has answered, and the state of its hosts at the moment of asking."""

    def __init__(self, status: Callable[[], dict[str, Any]], queue: RequestQueue) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter(
            "http_requests", "Answers; status 499: the client disconnected.", "route", "status"
        )
        self._request_seconds = self._histogram(
            "http_request_seconds", "From a request to the end of its answer.", SECONDS, "route"
        )
        self._disconnects = self._counter("cancelled", "Answers whose client disconnected.")
        self._failures = self._counter("failed", "Streams that ended with an error.", "code")
        self._answers = self._counter(
            "answers", "Choices that were written, by how.", "mode", "finish"
        )
        self._first = self._histogram(
            "first_byte_seconds", "From the request to the first byte of text.", SECONDS, "mode"
        )
        self._per_sweep = self._histogram(
            "accepted_per_sweep", "Drafted tokens that one sweep accepted.", PER_SWEEP
        )
        self._counters = {name: self._counter(name, text) for name, text in _COUNTERS}
        self._registry.register(_ServingState(status, queue))
        ProcessCollector(registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"blocktrain_{name}", text, labels, registry=self._registry)

    def _histogram(
        self, name: str, text: str, bounds: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(
            f"blocktrain_{name}", text, labels, buckets=bounds, registry=self._registry
        )

    def count_answer(self, route: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self._requests.labels(route, status).inc()
        self._request_seconds.labels(route).observe(seconds)

    def count_disconnect(self) -> None:
        """Count a client that disconnected."""
        self._disconnects.inc()

    def count_failure(self, code: str) -> None:
        """Count a stream that ended with an error."""
        self._failures.labels(code).inc()

    def count_choice(self, choice: TextChoice) -> None:
        """Count a choice, also one that was left unfinished."""
        stats = choice.stats
        if stats is None:
            return
        self._answers.labels(stats.mode, choice.finish or "unfinished").inc()
        if stats.first_byte_ms:
            self._first.labels(stats.mode).observe(stats.first_byte_ms / 1000)
        for count in stats.accepted_per_sweep:
            self._per_sweep.observe(count)
        self._counters["text_bytes"].inc(choice.bytes)
        self._counters["degraded_answers"].inc(bool(stats.degraded))
        for name in ("sweeps", "drafted", "accepted", "wire_bytes", "failovers", "near_ties"):
            self._counters[name].inc(getattr(stats, name))

    def text(self) -> bytes:
        """All of it."""
        return generate_latest(self._registry)


class _ServingState(Collector):
    def __init__(self, status: Callable[[], dict[str, Any]], queue: RequestQueue) -> None:
        self._status, self._queue = status, queue

    def describe(self) -> Iterable[Metric]:
        """Empty, so that registering does not call the entry."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Slots and hosts as they are now."""
        status = self._status()
        yield GaugeMetricFamily(
            "blocktrain_requests_running", "Requests that are being answered.", self._queue.running
        )
        yield GaugeMetricFamily(
            "blocktrain_requests_waiting", "Requests that wait for a slot.", self._queue.waiting
        )
        yield GaugeMetricFamily(
            "blocktrain_sessions", "Open sessions of the entry.", status["sessions"]
        )
        for name, text in _CHECKS.items():
            yield CounterMetricFamily(f"blocktrain_checks_{name}", text, status["checks"][name])
        for name, kind, text, read in _OF_A_HOST:
            family = kind(f"blocktrain_host_{name}", text, labels=("host",))
            for host in status["hosts"]:
                family.add_metric((host["name"],), read(host))
            yield family


_CHECKS = {
    "made": "Answers of stages that another holder computed again.",
    "failed": "Of these, those that differed beyond rounding.",
}
_OF_A_HOST: tuple[
    tuple[
        str, type[GaugeMetricFamily | CounterMetricFamily], str, Callable[[dict[str, Any]], float]
    ],
    ...,
] = (
    (
        "alive",
        GaugeMetricFamily,
        "Whether the connection to it is up.",
        lambda host: float(host["alive"]),
    ),
    (
        "round_trip_seconds",
        GaugeMetricFamily,
        "Smoothed round trip.",
        lambda host: host["rtt_ms"] / 1000,
    ),
    (
        "suspect",
        GaugeMetricFamily,
        "Whether it answered wrongly, or another holder says so.",
        lambda host: float(bool(host["trouble"])),
    ),
    ("queue", GaugeMetricFamily, "Work that waits there.", lambda host: host["queue"]),
    ("blocks", GaugeMetricFamily, "Blocks that it holds.", lambda host: len(host["blocks"])),
    (
        "failures",
        CounterMetricFamily,
        "Times that the line was lost.",
        lambda host: host["failures"],
    ),
    ("bytes_in", CounterMetricFamily, "Bytes from it.", lambda host: host["bytes_in"]),
    ("bytes_out", CounterMetricFamily, "Bytes to it.", lambda host: host["bytes_out"]),
)
