"""GET /metrics says what the status says, in a form that Prometheus' own parser reads."""

from __future__ import annotations

import json
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from blocktrain.watch.server import Listen, open_coordinator, serve_coordinator
from blocktrain.web.client import HttpClient
from support.event_reader import fetch
from support.fake_worker import TOKEN, FakeWorker, as_task, beginning

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(url: str) -> Samples:
    status, headers, body = fetch(url, "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(body.decode())
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in families
        for s in family.samples
    }


def test_metrics_agree_with_the_status(tmp_path: Path) -> None:
    with (
        beginning(tmp_path) as coordinator,
        serve_coordinator(coordinator, Listen(token=TOKEN)) as url,
    ):
        client = HttpClient(url, TOKEN)
        worker = FakeWorker(client)
        task = worker.joined()
        for _ in range(3):
            task = as_task(worker.send(task).next)
        coordinator.feed.put("score", scores={"block-1": 2.25, "pool": 2.0})
        assert fetch(url, "/metrics", token="wrong")[0] == 401
        assert fetch(url, "/nowhere")[0] == 404
        status = client.status()
        client.close()
        found = read(url)

    def value(name: str, **labels: str) -> float:
        return found[f"blocktrain_{name}", tuple(sorted(labels.items()))]

    for block in status.blocks:
        index = str(block.block)
        assert value("block_version", block=index) == block.version
        assert value("block_steps", block=index) == block.steps
        assert value("updates_accepted_total", block=index) == block.accepted
        assert value("updates_late_total", block=index) == block.late
        assert value("bytes_in_total", block=index) == block.bytes_in
        assert value("bytes_out_total", block=index) == block.bytes_out
        assert block.loss is None or value("block_loss", block=index) == block.loss
    assert (
        sum(v for (name, _), v in found.items() if name == "blocktrain_bytes_in_total")
        == status.bytes_in
    )
    assert value("rounds_total") == status.rounds == 3
    assert value("rounds_open") == sum(
        block.round is not None and block.round.deadline_seconds > 0 for block in status.blocks
    )
    assert value("workers", state="training") == 1 and value("workers", state="lost") == 0
    assert (
        value("refusals_total", code="bad_token") == 1
        and value("refusals_total", code="not_found") == 1
    )
    assert value("score", model="pool") == 2.0 and value("score", model="block-1") == 2.25
    assert value("ready") == 1 and value("finished") == 0 and value("events_dropped_total") == 0
    assert value("http_requests_total", method="POST", route="/v1/updates", status="200") == 3
    assert value("http_requests_total", method="GET", route="/metrics", status="401") == 1
    assert value("http_request_seconds_count", method="POST", route="/v1/updates") == 3
    assert value("http_request_seconds_bucket", method="POST", route="/v1/updates", le="+Inf") == 3
    assert found["process_resident_memory_bytes", ()] > 1 << 20


def test_a_run_that_is_being_prepared_has_metrics_too(tmp_path: Path) -> None:
    coordinator = open_coordinator(tmp_path)
    try:
        with serve_coordinator(coordinator, Listen(token=TOKEN)) as url:
            found = read(url)
            assert (
                found["blocktrain_ready", ()] == 0 and ("blocktrain_rounds_total", ()) not in found
            )
            assert json.loads(fetch(url, "/healthz", token="")[2])["ready"] is False
    finally:
        coordinator.close()
