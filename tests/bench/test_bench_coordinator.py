"""`bench coordinator`, small: every call is made, nothing fails, the figures are right."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import closing
from pathlib import Path

import pytest

from blocktrain.bench.network.shaper import Link, shape_link
from blocktrain.bench.transport.coordinator import (
    SwarmOptions,
    Vitals,
    stolen_share,
    swarm_result,
    vitals_result,
)
from blocktrain.bench.transport.swarm import Failed, HttpLine, Load, Notes, run_swarm
from blocktrain.bench.transport.transfers import TransferOptions
from blocktrain.protocol.messages import UploadState
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.protocol.transfer import split
from blocktrain.watch.server import Listen, serve_coordinator
from blocktrain.web.client import MOST_IN_FLIGHT, HttpClient, LocalClient, next_room, upload
from support.command import blocktrain
from support.fake_worker import CONFIG, FakeWorker, beginning, whole_ledger
from support.waiting import PATIENCE

CALLS = {
    "join",
    "next_task",
    "heartbeat",
    "upload_state",
    "upload",
    "submit",
    "status",
    "run",
    "blob",
}


def test_the_command_at_tiny_scale(tmp_path: Path) -> None:
    process = blocktrain(
        "bench",
        "coordinator",
        "--workers",
        "24",
        "--seconds",
        "5",
        "--megabytes",
        "1",
        "--json",
        cwd=tmp_path,
    )
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    assert (
        result["command"]
        == "blocktrain bench coordinator --workers 24 --seconds 5 --megabytes 1 --json"
    )
    assert result["machine"]["cores"] >= 1
    assert set(result["calls"]) >= CALLS
    for call in result["calls"].values():
        assert 0 < call["p50_ms"] <= call["p99_ms"] <= call["max_ms"]
    assert result["p99_ms"] == max(call["p99_ms"] for call in result["calls"].values())
    assert (
        result["workers"],
        result["errors"],
        result["error_kinds"],
        result["refused_updates"],
    ) == (24, 0, {}, {})
    assert result["joins"] >= 25 and result["leaves"] >= 1, "they come and go"
    assert result["updates"] >= 15
    assert len(result["memory_mb"]) >= 4 and min(result["memory_mb"]) > 10
    assert isinstance(result["memory_flat"], bool)
    assert 0 <= result["stolen_share"] < 1
    for name in (
        "upload_mb_s",
        "download_mb_s",
        "raw_tcp_mb_s",
        "upload_ratio",
        "download_ratio",
        "cpu_share",
    ):
        assert result[name] > 0, name
    assert result["raw_tcp_mb_s"] <= 25.1, "200 Mbit are 25 MB/s"
    folder = tmp_path / "results" / "coordinator"
    assert json.loads((folder / "coordinator.json").read_text()) == result
    assert (folder / "coordinator.png").stat().st_size > 5000


def test_a_swarm_of_few_against_a_coordinator_here(tmp_path: Path) -> None:
    config = CONFIG.replace(steps=10**6)
    with (
        beginning(tmp_path, config=config, replicas=2, task_steps=None) as coordinator,
        serve_coordinator(coordinator, Listen()) as url,
    ):
        host, port = url.removeprefix("http://").split(":")
        load = Load(host, int(port), 4, 6.0, heartbeat=0.2, task=0.5, churn=0.1)
        notes = asyncio.run(run_swarm(load))
        assert not notes.errors
        kinds = [entry.kind for entry in whole_ledger(LocalClient(coordinator))]
    assert 4 < notes.updates <= kinds.count("update")
    assert 4 < notes.joins <= kinds.count("join"), "new ones come"
    assert notes.leaves >= 1
    assert kinds.count("version") > config.blocks, "rounds close: their updates are real"
    assert set(notes.calls) >= CALLS
    result = swarm_result(load, notes)
    assert result["errors"] == 0 and result["calls"]["submit"]["count"] >= notes.updates


def test_an_answer_that_is_not_the_expected_one_is_an_error(tmp_path: Path) -> None:
    with beginning(tmp_path) as coordinator, serve_coordinator(coordinator, Listen()) as url:
        host, port = url.removeprefix("http://").split(":")
        load, notes = Load(host, int(port), 1, 1.0), Notes()

        async def wrong() -> None:
            line = HttpLine(load, notes, "127.0.0.3")
            with pytest.raises(Failed, match="lost: 404 not_found"):
                await line.call("lost", "GET /v1/nowhere HTTP/1.1")
            line.close()

        asyncio.run(wrong())
    with pytest.raises(Failed, match="gone: ConnectionRefusedError"):
        asyncio.run(HttpLine(load, notes, "127.0.0.3").call("gone", "GET / HTTP/1.1"))


def test_what_the_figures_mean() -> None:
    load = SwarmOptions(1000, 60.0).load("127.0.0.1", 1)
    assert (load.heartbeat, load.task, load.ramp_seconds) == (10.0, 60.0, 60.0)
    assert (SwarmOptions(1000, 60.0).blocks, SwarmOptions(1000, 60.0).replicas) == (32, 16)
    assert SwarmOptions(20, 3.0).load("127.0.0.1", 1).heartbeat == 0.5
    notes = Notes(calls={"join": [(float(n), n / 1000) for n in range(1, 101)]})
    notes.errors["join: 503 busy"] += 3
    result = swarm_result(load, notes)
    assert result["calls"]["join"] == {
        "count": 100,
        "p50_ms": 50.0,
        "p99_ms": 99.0,
        "max_ms": 100.0,
    }
    assert (result["p99_ms"], result["errors"], result["error_kinds"]) == (
        99.0,
        3,
        {"join: 503 busy": 3},
    )
    assert sum(step["count"] for step in result["over_time"]) == 100
    rising = [100.0 + n for n in range(60)]
    assert vitals_result(Vitals(0, [*rising, *[160.0] * 60]), load)["memory_flat"] is True
    assert (
        vitals_result(Vitals(0, [*rising, *[160.0 + n for n in range(60)]]), load)["memory_flat"]
        is False
    )
    before, after = "cpu  100 0 50 800 10 0 5 20 7 0", "cpu  160 0 80 870 10 0 5 60 30 0"
    assert stolen_share(before, after) == 0.2, (
        "40 of 200 ticks; those of guests are already among the first"
    )
    assert stolen_share(before, before) == 0.0
    assert (
        abs(TransferOptions(100.0).width ** 2 * 48 / 1e6 - 100) < 1
        and TransferOptions(1.0).width % 4 == 0
    )


class Counting(HttpClient):
    """Knows how many chunks were on their way at the same time, at most."""

    def __init__(self, url: str) -> None:
        super().__init__(url, timeout=PATIENCE)
        self.most = self._under_way = 0
        self._mutex = threading.Lock()

    def put_chunk(
        self, task: int, index: int, ticket: str, content: bytes, digest: str
    ) -> UploadState:
        with self._mutex:
            self._under_way += 1
            self.most = max(self.most, self._under_way)
        try:
            return super().put_chunk(task, index, ticket, content, digest)
        finally:
            with self._mutex:
                self._under_way -= 1


def test_an_upload_fills_a_long_line(tmp_path: Path) -> None:
    with (
        beginning(tmp_path, compression="fp16") as coordinator,
        serve_coordinator(coordinator, Listen()) as url,
    ):
        host, port = url.removeprefix("http://").split(":")
        with (
            shape_link(host, int(port), Link(rtt_ms=80), apart=False) as line,
            closing(Counting(line.url)) as client,
        ):
            worker = FakeWorker(client)
            task = worker.joined()
            payload = worker.payload(task)
            chunks = split(payload, task.chunk_bytes)
            assert len(chunks) >= 20
            sent: list[int] = []
            upload(client, task.task, task.ticket, chunks, sent.append)
            assert 4 <= client.most <= MOST_IN_FLIGHT, (
                "one after the other would wait for a round trip each"
            )
            assert sorted(sent) == sorted(map(len, chunks))
            assert line.counters().connections <= MOST_IN_FLIGHT + 1
            again: list[int] = []
            upload(client, task.task, task.ticket, chunks, again.append)
            assert sum(again) == len(payload), "what is there counts as sent"
            assert client.submit(worker.submission(task, payload)).receipt.accepted
            with pytest.raises(Refused) as refused:
                upload(client, task.task, "0" * 32, chunks)
            assert refused.value.code == Code.UNKNOWN_TASK


def test_how_many_chunks_are_on_their_way() -> None:
    room = 2
    for _ in range(20):
        room = next_room(room, 0.3)
    assert room == MOST_IN_FLIGHT
    for _ in range(20):
        room = next_room(room, 9.0)
    assert room == 1, "on a slow line they would all be too slow together"
