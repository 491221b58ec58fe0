"""`blocktrain worker`: its signals, and what it writes for people and for scripts."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blocktrain.clock import SimulatedClock
from blocktrain.coordinator.policy import Policy
from blocktrain.errors import ConfigError
from blocktrain.units import parse_bytes
from blocktrain.watch.server import Listen, serve_coordinator
from blocktrain.worker import command as worker_command
from blocktrain.worker.command import LogOutput, WorkerOptions, run_worker
from support.command import start
from support.waiting import PATIENCE, until
from support.worker_run import WorkerRun, worker_runs

TIMESTAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d "


@pytest.fixture
def place(tmp_path: Path, corpus_folder: Path) -> Iterator[Callable[..., WorkerRun]]:
    with worker_runs(tmp_path, corpus_folder) as make:
        yield make


def test_amounts_of_memory() -> None:
    assert [parse_bytes(text) for text in ("8GB", "1.5 MiB", "300", "2g", "1e9")] == [
        8 * 10**9,
        3 * 2**19,
        300,
        2 * 10**9,
        10**9,
    ]
    for text in ("much", "8XB", "-1GB", "0"):
        with pytest.raises(ConfigError, match="like 8GB"):
            parse_bytes(text)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_leaves_on_a_signal(
    place: Callable[..., WorkerRun],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    monkeypatch.setattr(worker_command, "STOP_SECONDS", 600.0)  # it would end this very process
    here = place(Policy.exact(20), blocks=2, steps=10**6)
    with serve_coordinator(here.coordinator, Listen(token="secret")) as url:

        def signal_later() -> None:
            until(here.updates)
            os.kill(os.getpid(), number)

        threading.Thread(target=signal_later).start()
        cache = tmp_path / "cache"
        options = WorkerOptions(url, "secret", "cpu", "1GB", "here", cache, None, True)
        assert run_worker(options) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [event["kind"] for event in events]
    assert kinds[0] == "joined"
    assert kinds[-1] == "left"
    assert ("leaving" in kinds) == (number == signal.SIGINT)
    if number == signal.SIGINT:
        assert [kind for kind in kinds if kind != "leaving"][-2] == "accepted"


def test_signals_count_also_when_nobody_reads_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C also ends the `tee` that a worker writes to."""

    def emit(kind: str, /, **_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(worker_command, "STOP_SECONDS", 600.0)  # it would end this very process
    with worker_command.stop_signals(emit) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        until(stop.after_task.is_set)
        assert not stop.now.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        until(stop.now.is_set)


def test_the_command_ends_in_a_call_that_nobody_answers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(PATIENCE)
        worker = start(
            "worker",
            f"http://127.0.0.1:{silent.getsockname()[1]}",
            "--device",
            "cpu",
            "--json",
            cwd=tmp_path,
        )
        line, _ = silent.accept()
        with line:
            try:
                worker.terminate()
                assert worker.wait(PATIENCE) == 0
                assert worker.stdout is not None and worker.stdout.read() == "", (
                    "sooner than the call fails"
                )
            finally:
                worker.kill()


def test_without_a_terminal_every_event_is_a_line(
    place: Callable[..., WorkerRun], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    here = place(Policy.exact(5), blocks=2)
    with serve_coordinator(here.coordinator, Listen(token="secret")) as url:
        options = WorkerOptions(url, "secret", "cpu", "", "here", tmp_path / "cache")
        assert run_worker(options) == 0
    out, err = capfd.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert all(re.match(TIMESTAMP, line) for line in lines), err
    text = [re.sub(TIMESTAMP, "", line) for line in lines]
    assert re.fullmatch(r"joined run \w{12} as worker \w{12}: 2 blocks, corpus words", text[0])
    expected = [
        r"block 1 task \d+: 5 steps from version 0, step 0",
        r"block 1 task \d+: trained, loss \d\.\d{4}, [\d,]+ tokens/s, est\. \d+% of peak, "
        r"sending [\d.]+ kB",
        r"block 1 task \d+: accepted, [\d.]+ kB sent; .+",
        r"block 2 task \d+: 5 steps from version 1, step 5",
    ]
    places = [next(n for n, t in enumerate(text) if re.fullmatch(e, t)) for e in expected]
    assert places == sorted(places)
    assert len(text) < 40, "steps have no lines"


def test_lines_of_outages_refusals_and_waits(capfd: pytest.CaptureFixture[str]) -> None:
    clock = SimulatedClock()
    log = LogOutput(clock=clock)
    log.emit("away", reason="no answer from http://far")
    log.emit("back")
    log.emit("refused", block=1, task=7, reason="too late")
    wait: dict[str, Any] = {"seconds": 2.0, "code": "no_task"}
    for number in range(50):  # asked again every two seconds, told once a minute
        log.emit("waiting", reason=f"all tasks are taken for {number} s", **wait)
        clock.sleep(2.0)
    log.emit("task", block=1, task=8, base=3, start=15, steps=5)
    log.emit("waiting", reason="all tasks are taken", **wait)
    text = [re.sub(TIMESTAMP, "", line) for line in capfd.readouterr().err.splitlines()]
    assert text == [
        "lost the coordinator (no answer from http://far); retrying until it is back",
        "the coordinator is back",
        "task 7 refused: too late",
        "waiting: all tasks are taken for 0 s",
        "waiting: all tasks are taken for 30 s",
        "block 1 task 8: 5 steps from version 3, step 15",
        "waiting: all tasks are taken",
    ]
