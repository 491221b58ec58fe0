"""The event log and its stream: after restarts, with a full disk, with slow readers."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from pydantic import ValidationError

from blocktrain.cli.coordinator import EventLines
from blocktrain.clock import SimulatedClock
from blocktrain.protocol import messages as m
from blocktrain.protocol.refusals import Refused
from blocktrain.watch import stream as watch_api
from blocktrain.watch.feed import (
    EVENTS,
    MAX_BEHIND,
    MAX_HISTORY,
    EventLog,
    Feed,
    History,
    Listener,
    event_fields,
    read_events,
)
from blocktrain.watch.server import Listen, WatchedCoordinator, open_coordinator, serve_coordinator
from blocktrain.web import guard, server
from blocktrain.web.client import HttpClient, LocalClient
from support.command import blocktrain, start
from support.event_reader import Reader, fetch, get, parse
from support.fake_worker import (
    OPERATOR,
    TOKEN,
    FakeWorker,
    as_task,
    begin,
    beginning,
    crash,
)
from support.waiting import until

LONG = 200.0  # seconds of the run's clock: nobody who was silent for so long is alive


@contextmanager
def serving(
    folder: Path, clock: SimulatedClock | None = None
) -> Iterator[tuple[WatchedCoordinator, str, HttpClient]]:
    """A run with rounds of one update behind HTTP."""
    with (
        beginning(folder, clock=clock) as coordinator,
        serve_coordinator(coordinator, Listen(token=TOKEN, operator_token=OPERATOR)) as url,
    ):
        client = HttpClient(url, TOKEN)
        try:
            yield coordinator, url, client
        finally:
            client.close()


def stored(folder: Path) -> list[tuple[int, str]]:
    return [(event["seq"], event["kind"]) for event in read_events(folder / EVENTS)]


def test_events_follow_the_run(tmp_path: Path) -> None:
    clock = SimulatedClock(1000.0)
    with serving(tmp_path, clock) as (coordinator, url, client), ExitStack() as stack:
        worker = FakeWorker(client)
        task = worker.joined()
        reader = Reader(url)
        stack.callback(reader.close)
        assert reader.answer.getheader("content-type", "").startswith("text/event-stream")
        reader.wait("ready")
        assert [event for _, event, _ in reader.told[:4]] == ["run", "worker", "task", "ready"]
        run = reader.of("run")[0]
        assert (run["blocks"], run["fusion"], run["compose"], run["corpus"]) == (
            2,
            None,
            "pool",
            "words",
        )
        assert "restart" not in run and run["run"] == worker.run
        told = reader.of("task")[0]
        assert (told["worker"], told["task"], told["target"], told["steps"]) == (
            worker.id,
            task.task,
            1,
            task.steps,
        )
        assert told["deadline"] == pytest.approx(time.time() + task.deadline_seconds, abs=60)

        payload = worker.payload(task)
        worker.send(task, payload)
        update = reader.wait("update")
        assert (update["block"], update["bytes"], update["loss_after"], update["staleness"]) == (
            task.block,
            len(payload),
            2.5,
            0,
        )
        assert update["sentence"] == worker.receipts[-1].sentence
        version = reader.wait("version")
        status = coordinator.status()
        block = status.blocks[task.block - 1]
        assert (version["version"], version["steps"], version["weights"]) == (
            1,
            block.steps,
            block.weights.sha256,
        )
        assert (
            version["length"] == block.weights.length
            and version["updates"] == 1
            and version["dropped"] == {}
        )
        assert 0 < version["bytes_in"] <= status.bytes_in
        assert reader.wait("status")["workers"][0]["worker"] == worker.id

        numbers = [seq for seq, event, _ in reader.told if seq is not None]
        assert numbers == list(range(1, len(numbers) + 1))
        assert all((seq is None) == (event in ("ready", "status")) for seq, event, _ in reader.told)
        assert stored(tmp_path)[: len(numbers)] == [
            (data["seq"], data["kind"]) for seq, _, data in reader.told if seq is not None
        ]


def heartbeat(worker: FakeWorker, task: m.Task) -> m.Heartbeat:
    return m.Heartbeat(
        run=worker.run,
        worker=worker.id,
        task=task.task,
        fence=task.fence,
        step=1,
        bytes=0,
        nonce="0" * 32,
    )


def test_refusals_name_a_worker_only_if_it_signed(tmp_path: Path) -> None:
    with serving(tmp_path) as (coordinator, url, client), ExitStack() as stack:
        worker = FakeWorker(client)
        task = worker.joined()
        worker.send(task)
        reader = Reader(url)
        stack.callback(reader.close)
        for _ in range(3):
            with pytest.raises(Refused):
                client.submit(worker.submission(task, b"another payload"))
        refused = reader.wait("refused", worker=worker.id)
        assert (refused["code"], refused["block"]) == ("task_answered", task.block) and refused[
            "sentence"
        ]
        assert until(
            lambda: sum(e["count"] for e in reader.of("refused")) == 3, "three refusals, folded"
        )
        with pytest.raises(Refused):  # signed by somebody else: nobody is blamed
            client.heartbeat(FakeWorker(client, 9).identity.sign(heartbeat(worker, task)))
        assert reader.wait("refused", code="bad_signature")["worker"] == ""
        assert fetch(url, "/v1/status", "a wrong token")[0] == 401
        assert reader.wait("refused", code="bad_token")["worker"] == ""
        found = coordinator.status()
        assert (found.workers[0].refused, found.blocks[task.block - 1].refused) == (3, 3)


def test_workers_that_come_and_go_are_events(tmp_path: Path) -> None:
    clock = SimulatedClock(1000.0)
    with serving(tmp_path, clock) as (_, url, client), ExitStack() as stack:
        worker, other = FakeWorker(client), FakeWorker(client, 2)
        reader = Reader(url)
        stack.callback(reader.close)
        worker.joined()
        assert reader.wait("worker", worker=worker.id, state="joined")["device"] == "cpu"
        other.joined()
        clock.now += LONG
        assert "nothing heard" in reader.wait("worker", worker=other.id, state="lost")["reason"]
        assert reader.wait("round", outcome="expired", worker=other.id)["block"] == 2
        other.ask()
        clock.now += 2
        reader.wait("worker", worker=other.id, state="back")
        other.ask(leaving=True)
        reader.wait("worker", worker=other.id, state="left")
        operator = HttpClient(url, OPERATOR)
        operator.kick(m.Kick(worker=worker.id, reason="too slow"))
        operator.close()
        assert reader.wait("worker", worker=worker.id, state="kicked")["reason"] == "too slow"


def test_the_history_can_be_asked_for_from_any_point(tmp_path: Path) -> None:
    with serving(tmp_path) as (coordinator, url, client):
        worker = FakeWorker(client)
        task = worker.joined()
        for _ in range(2):
            task = as_task(worker.send(task).next)
        everything = parse(fetch(url, "/v1/events?follow=0")[2].decode())
        seqs = [seq for seq, _, _ in everything if seq is not None]
        assert everything[-1][1:] == ("ready", {"last": len(seqs), "left_out": 0})
        assert seqs == [event["seq"] for event in read_events(tmp_path / EVENTS)]
        for path, headers in (
            ("/v1/events?follow=0&after=4", {}),
            ("/v1/events?follow=0", {"Last_Event_ID": "4"}),
        ):
            assert [seq for seq, _, _ in parse(fetch(url, path, **headers)[2].decode())][
                :-1
            ] == seqs[4:]
        another_log = parse(fetch(url, "/v1/events?follow=0&after=99999")[2].decode())
        assert [seq for seq, _, _ in another_log][:-1] == seqs
        assert fetch(url, "/v1/events?after=x")[0] == 400
        assert fetch(url, "/v1/events", token="")[0] == 401
        assert json.loads(fetch(url, "/v1/replay", token="")[2]) == {"replay": False}
        coordinator.feed.put("score", scores={"pool": 2.0})
        assert coordinator.status().scores == {"pool": 2.0}


def test_a_long_history_is_thinned_of_what_is_frequent(tmp_path: Path) -> None:
    feed = Feed(tmp_path / EVENTS)
    for number in range(MAX_HISTORY + 500):
        feed.put(("update", "task", "refused")[number % 3], block=number)
        if number % 50 == 0:
            feed.put("version", block=number)
    places, left_out, last = feed.listen(Listener())
    kept = list(feed.read(places))
    versions = (MAX_HISTORY + 500) // 50
    assert len(kept) == MAX_HISTORY and left_out == last - MAX_HISTORY
    assert sum(event.kind == "version" for event in kept) == versions
    assert [event.seq for event in kept] == sorted(event.seq for event in kept)
    frequent = [event.value["block"] for event in kept if event.kind != "version"]
    assert frequent == list(range(MAX_HISTORY + 500 - len(frequent), MAX_HISTORY + 500)), (
        "the newest are kept"
    )
    assert feed.listen(Listener(), last - 10)[:2] == (places[-10:], 0)
    feed.close()
    again = History(tmp_path / EVENTS)
    assert sum(1 for _ in again.scan()) == last and again.after(0) == (places, left_out)


def test_numbers_go_on_after_a_crash_and_a_torn_line_is_dropped(tmp_path: Path) -> None:
    coordinator = begin(tmp_path)
    worker = FakeWorker(LocalClient(coordinator))
    worker.send(worker.joined())
    coordinator.feed.put("score", scores={"pool": 1.5})
    crash(coordinator)
    before = stored(tmp_path)
    with (tmp_path / EVENTS).open("a") as log:
        log.write('{"seq": 99, "time": 1.0, "kind": "upd')
    coordinator = open_coordinator(tmp_path)
    try:
        assert coordinator.status().scores == {"pool": 1.5}
        worker.client = LocalClient(coordinator)
        worker.send(as_task(worker.ask()))
    finally:
        coordinator.close()
    after = stored(tmp_path)
    assert after[: len(before)] == before
    assert [seq for seq, _ in after] == list(range(1, len(after) + 1))
    assert after[len(before)][1] == "run"
    assert read_events(tmp_path / EVENTS)[len(before)]["restart"] is True
    assert [kind for _, kind in after].count("worker") == 1, "nobody is told to have joined again"


def test_a_log_from_another_hand_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    lines = [
        '{"kind":"run","seq":1,"run":"x"}',
        "nonsense",
        '{"seq": 2, "time": 1.0, "kind": "worker", broken}',
        '{"seq": 3, "time": 1.0, "kind": "score", "scores": 7}',
        '{"kind":"two words","seq":4}',
        '{"kind":"version","seq":"5"}',
        '{"kind":"version","seq":2}',
        "[]",
        '{"seq": 6, "time": 1.0, "kind": "version"}',
    ]
    (tmp_path / EVENTS).write_text("\n".join(lines) + "\n")
    feed = Feed(tmp_path / EVENTS)
    feed.put("finish")
    places, _, last = feed.listen(Listener())
    assert [(event.seq, event.kind) for event in feed.read(places)] == [
        (1, "run"),
        (2, "worker"),
        (3, "score"),
        (6, "version"),
        (7, "finish"),
    ]
    assert last == 7 and feed.scores == {}
    feed.close()


def test_a_reader_that_stalls_is_disconnected_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        guard, "BODY_SECONDS", 4.0
    )  # one who reads, on a busy machine, has this long for a line's buffer
    monkeypatch.setattr(guard, "MIN_RATE", 1 << 30)
    with serving(tmp_path) as (coordinator, url, _), socket.socket() as deaf, ExitStack() as stack:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = url.removeprefix("http://").split(":")
        deaf.connect((host, int(port)))
        deaf.sendall(
            f"GET /v1/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
        )
        reader = Reader(url)
        stack.callback(reader.close)
        reader.wait("ready")
        until(lambda: b"blocktrain_listeners 2.0" in fetch(url, "/metrics")[2], "two listeners")
        count = 0
        for _ in range(20):  # more than the buffers of a line hold
            for _ in range(60):
                coordinator.feed.put("refused", sentence="x" * 8000, block=(count := count + 1))
            reader.wait("refused", block=count)
        until(
            lambda: b"blocktrain_listeners 1.0" in fetch(url, "/metrics")[2],
            "the end of the one who does not read",
        )
        coordinator.feed.put("refused", sentence="after it", block=(count := count + 1))
        reader.wait("refused", block=count)
        assert [e["block"] for e in reader.of("refused")] == list(range(1, count + 1))
        assert not reader.ended


def test_a_listener_that_leaves_events_lying_gets_no_more() -> None:
    feed = Feed()
    slow, quick = Listener(), Listener(kinds=("version",))
    feed.listen(slow)
    feed.listen(quick)
    for _ in range(MAX_BEHIND + 1):
        feed.put("update")
        feed.put("version")
        assert [event.kind for event in quick.take()] == ["version"]
    assert slow.closed and slow.take() == [] and not quick.closed


def test_only_so_many_may_listen_and_none_of_them_is_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_api, "MAX_LISTENERS", 3)
    monkeypatch.setattr(guard, "MAX_FROM_ONE", 3)
    monkeypatch.setattr(server, "FINISH_SECONDS", 600.0)
    with serving(tmp_path) as (_, url, client), ExitStack() as stack:
        readers = [Reader(url) for _ in range(3)]
        for reader in readers:
            stack.callback(reader.close)
            reader.wait("ready")
        status, _, body = fetch(url, "/v1/events")
        assert (status, json.loads(body)["code"]) == (503, "busy")
        FakeWorker(client).joined()  # from the same address
        for reader in readers:
            reader.wait("task")
        readers[0].close()
        until(lambda: fetch(url, "/v1/events?follow=0")[0] == 200, "a seat that is free again")
        began = time.monotonic()
    assert time.monotonic() - began < 120, "the server waited for streams that have no end"
    assert all(reader.ended for reader in readers[1:])


def test_a_member_with_many_streams_does_not_lock_the_others_out(tmp_path: Path) -> None:
    """A17: one address takes all streams of events, and locks the page out."""
    with serving(tmp_path) as (_, url, _), ExitStack() as stack:
        greedy = [Reader(url, source="127.0.0.9") for _ in range(watch_api.MAX_LISTENERS)]
        for reader in greedy:
            stack.callback(reader.close)
            assert reader.answer.status == 200
        refused, line = get(url, "/v1/events", source="127.0.0.9")
        assert refused.status == 503 and b"pages are listening" in refused.read()
        line.close()
        others = [Reader(url, source=f"127.0.0.{10 + number}") for number in range(3)]
        for reader in others:
            stack.callback(reader.close)
            reader.wait("ready")
        until(lambda: [r.ended for r in greedy] == [True] * 3 + [False] * 61, "the oldest to end")
        assert not any(reader.ended for reader in others)


def test_a_disk_without_room_for_events_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / EVENTS).symlink_to("/dev/full")
    with beginning(tmp_path) as coordinator:
        listener = Listener()
        coordinator.feed.listen(listener)
        lines = EventLines(coordinator, "blocktrain pull", lambda _: None)
        worker = FakeWorker(LocalClient(coordinator))
        assert worker.send(worker.joined()).receipt.accepted
        assert [event.kind for event in listener.take()] == [
            "worker",
            "task",
            "update",
            "version",
            "task",
        ]
        assert coordinator.feed.drop_count >= 5 and "the run goes on" in coordinator.feed.problem
        for _ in range(3):
            lines.print_new()
        said = capsys.readouterr().err
        assert said.replace("\n", " ").count("the run goes on") == 1
        assert (
            "worker fake 1 joined (cpu)" in said
            and "block 1 version 1: 2 steps, loss 2.500" in said
        )


def test_a_line_that_does_not_fit_leaves_nothing_behind(tmp_path: Path) -> None:
    """The disk fills in the middle of a line, and has room again later."""
    code = f"""
import resource, signal
from pathlib import Path
from blocktrain.watch.feed import Feed
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
feed = Feed(Path({str(tmp_path / EVENTS)!r}))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for number in range(30):
    feed.put("update", block=number)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
feed.put("version", clipped=feed.drop_count)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    *fitted, last = [json.loads(line) for line in (tmp_path / EVENTS).read_text().splitlines()]
    assert [event["block"] for event in fitted] == list(range(len(fitted))) and 5 < len(fitted) < 30
    assert last["seq"] == 31 and last["clipped"] == 30 - len(fitted)


def test_the_page_is_there_for_anyone_and_can_do_little(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, url, _):
        status, headers, body = fetch(url, "/", token="")
        assert status == 200 and body and headers["content-type"] == "text/html; charset=utf-8"
        policy = headers["content-security-policy"]
        assert (
            "default-src 'none'" in policy
            and "script-src 'self'" in policy
            and "unsafe" not in policy
        )
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == (
            "nosniff",
            "no-referrer",
        )
        assert fetch(url, "/", token="", If_None_Match=headers["etag"])[0] == 304
        status, headers, _ = fetch(url, "/page/icon.svg", token="")
        assert (status, headers["content-type"]) == (200, "image/svg+xml; charset=utf-8")
        for name in (
            "nothing.js",
            "..%2fconfig.py",
            "%2e%2e/config.py",
            "LICENSE-uplot.txt",
            "x" * 300 + ".js",
        ):
            assert fetch(url, f"/page/{name}")[0] == 404, name


def test_a_log_is_replayed_without_a_coordinator(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with beginning(run) as coordinator:
        worker = FakeWorker(LocalClient(coordinator))
        worker.send(worker.joined())
    process = start("replay", "run", "--json", cwd=tmp_path)
    try:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        assert said["log"] == f"run/{EVENTS}"
        assert json.loads(fetch(said["url"], "/v1/replay")[2]) == {"replay": True}
        events = parse(fetch(said["url"], "/v1/events")[2].decode())
        assert [(seq, kind) for seq, kind, _ in events[:-1]] == stored(run) and events[-1][
            1
        ] == "ready"
        status, headers, _ = fetch(said["url"], "/", token="")
        assert status == 200 and "default-src 'none'" in headers["content-security-policy"]
        assert fetch(said["url"], "/page/nothing.js")[0] == 404
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
    for where, sentence in (
        ("nothing", "cannot read nothing"),
        (f"run/{'coordinator.pem'}", "holds no events"),
    ):
        refused = blocktrain("replay", where, cwd=tmp_path)
        assert refused.returncode == 2 and sentence in refused.stderr


def test_one_may_listen_before_there_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text(
        "".join(f"note {n}: the {n % 7} of {n % 11} is a {n * n}\n" for n in range(2000))
    )
    small = [
        "--layers-per-block",
        "1",
        "--width",
        "16",
        "--heads",
        "2",
        "--context",
        "16",
        "--batch",
        "2",
        "--steps",
        "4",
    ]
    words = [
        "coordinator",
        "--data",
        "notes.txt",
        "--out",
        "run",
        *small,
        "--score-bytes",
        "0",
        "--listen",
        "127.0.0.1:0",
    ]
    process = start(*words, "--token", f"{TOKEN} & more", "--json", cwd=tmp_path)
    try:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        assert said["page"] == f"{said['url']}/#token={TOKEN}%20%26%20more"
        reader = Reader(said["url"], Authorization=f"Bearer {TOKEN} & more")
        assert reader.wait("run")["corpus"] == "notes.txt"
        assert reader.wait("status")["state"] == "running"
        assert until(
            lambda: "steps each" in (tmp_path / "coordinator.err").read_text(),
            "the end of the beginning",
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert until(lambda: reader.ended, "the end of the stream")
        reader.close()
    finally:
        process.kill()
        process.wait()
    assert "page        http" in (tmp_path / "coordinator.err").read_text()


def test_an_event_is_checked_against_its_kind() -> None:
    assert event_fields("refused", code="busy", count=2) == {"code": "busy", "count": 2}
    with pytest.raises(ValidationError):
        event_fields("refused", cod="busy")
    with pytest.raises(ValidationError):
        event_fields("worker", state="asleep")
    with pytest.raises(KeyError):
        event_fields("dance")


def test_a_log_of_another_version_stays_readable(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"time": 1.0, "kind": "dance", "more": 1}\n{"torn')
    log = EventLog(path, SimulatedClock(now=5.0, epoch=100.0))
    log.write("step", block=1, step=2, loss=0.5)
    log.close()
    first, second = read_events(path)
    assert first["kind"] == "dance"
    assert second == {"time": 105.0, "kind": "step", "block": 1, "step": 2, "loss": 0.5}
    assert json.loads(path.read_text().splitlines()[1]) == second
