"""Jobs in processes: order, slots, messages, failures, Ctrl-C at any time, and orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from blocktrain import processes
from blocktrain.errors import ConfigError, Interrupted, RunError
from blocktrain.processes import Channel, Job, run_jobs


def say(channel: Channel, word: str) -> None:
    channel.send(word=word, at=time.monotonic())
    channel.send(word=word, at=time.monotonic())


def refuse(channel: Channel) -> None:
    raise ConfigError("this makes no sense")


def stumble(channel: Channel) -> None:
    raise ZeroDivisionError("a bug")


def exhaust(channel: Channel) -> None:
    raise MemoryError


def die(channel: Channel) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_and_save(channel: Channel, path: Path) -> None:
    """Runs until it is told to stop; then says so in a file and to its parent."""
    channel.send(ready=True)
    while not channel.should_stop:
        time.sleep(0.005)
    path.write_text("saved")
    channel.send(saved=True)


def fail_once_ready(channel: Channel, other: Path) -> None:
    while not other.exists():
        time.sleep(0.005)
    raise ConfigError("no")


def touch_then_wait_and_save(channel: Channel, ready: Path, path: Path) -> None:
    ready.touch()
    wait_and_save(channel, path)


def talk_on(channel: Channel) -> None:
    """Never stops, whatever it is told."""
    while True:
        channel.send(pid=os.getpid())
        time.sleep(0.01)


def assert_gone(pid: int) -> None:
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def heard(jobs: list[Job], slots: int) -> list[tuple[str, dict[str, Any]]]:
    messages: list[tuple[str, dict[str, Any]]] = []
    run_jobs(jobs, slots, lambda name, message: messages.append((name, message)))
    return messages


def test_jobs_follow_those_they_wait_for_and_every_message_arrives() -> None:
    messages = heard(
        [
            Job("last", say, ("c",), after=("first", "second")),
            Job("first", say, ("a",)),
            Job("second", say, ("b",)),
        ],
        2,
    )
    assert sorted((name, message["word"]) for name, message in messages) == [
        (n, w) for n, w in (("first", "a"), ("last", "c"), ("second", "b")) for _ in "12"
    ]
    at = {name: message["at"] for name, message in messages}
    assert at["last"] > max(at["first"], at["second"])


def test_one_slot_runs_one_at_a_time() -> None:
    assert [name for name, _ in heard([Job("a", say, ("",)), Job("b", say, ("",))], 1)] == [
        "a",
        "a",
        "b",
        "b",
    ]


@pytest.mark.parametrize(
    ("work", "sentence"),
    [
        (refuse, "^job: this makes no sense$"),
        (stumble, "(?s)Traceback.*a bug"),
        (exhaust, "smaller --batch"),
        (die, "job: .*killed"),
    ],
)
def test_a_failed_job_is_reported_by_name(work: Any, sentence: str) -> None:
    with pytest.raises(RunError, match=sentence):
        heard([Job("job", work)], 1)


def test_when_one_fails_the_others_save_and_end(tmp_path: Path) -> None:
    ready, saved = tmp_path / "ready", tmp_path / "saved"
    with pytest.raises(RunError, match="bad: no"):
        heard(
            [
                Job("good", touch_then_wait_and_save, (ready, saved)),
                Job("bad", fail_once_ready, (ready,)),
            ],
            2,
        )
    assert saved.read_text() == "saved"


def test_one_that_talks_on_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STOP_SECONDS", 0.5)
    pids: list[int] = []

    def stop(_: str, message: dict[str, Any]) -> None:
        pids.append(message["pid"])
        if len(pids) == 1:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="saved: call it again"):
        run_jobs([Job("job", talk_on)], 1, stop, "call it again")
    assert_gone(pids[0])


def test_a_log_that_cannot_be_written_leaves_nobody_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STOP_SECONDS", 0.5)
    handler, pids = signal.getsignal(signal.SIGINT), list[int]()

    def full(_: str, message: dict[str, Any]) -> None:
        pids.append(message["pid"])
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        run_jobs([Job("job", talk_on)], 1, full)
    assert signal.getsignal(signal.SIGINT) == handler
    assert_gone(pids[0])


def test_jobs_that_wait_for_nothing_real_are_refused() -> None:
    with pytest.raises(RunError, match="never run: a"):
        heard([Job("a", say, ("",), after=("nobody",))], 1)


SCRIPT = """
import os, sys
from pathlib import Path
from blocktrain.errors import Interrupted
from blocktrain.processes import Job, run_jobs

if __name__ == "__main__":
    os.environ["MAIN"] = str(os.getpid())
    from {module} import touch_then_wait_and_save
    folder = Path({folder!r})
    try:
        job = Job("job", touch_then_wait_and_save, (folder / "ready", folder / "saved"))
        run_jobs([job], 1, lambda _, m: print(m, flush=True))
    except Interrupted as error:
        sys.exit(str(error))
"""
SLOW = """
import os, time
from pathlib import Path
from ground.test_processes import wait_and_save

def touch_then_wait_and_save(channel, ready, path):
    wait_and_save(channel, path)

parent = os.getppid()
if os.environ["MAIN"] != str(os.getpid()):  # where the job would run: caught before it begins
    (Path(__file__).parent / "ready").touch()
    while os.getppid() == parent:
        time.sleep(0.005)
"""


def start(tmp_path: Path, phase: str) -> subprocess.Popen[str]:
    """A parent with one child, once the child is where `phase` says."""
    script = tmp_path / "script.py"
    (tmp_path / "slow.py").write_text(SLOW)
    module = "slow" if phase == "importing" else "test_processes"
    script.write_text(SCRIPT.format(folder=str(tmp_path), module=module))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parent), *sys.path]),
        },
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "ready").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    if phase == "working":  # the parent knows its child
        assert process.stdout and process.stdout.readline() == "{'ready': True}\n"
    return process


def test_ctrl_c_lets_the_jobs_save(tmp_path: Path) -> None:
    process = start(tmp_path, "working")
    os.killpg(process.pid, signal.SIGINT)
    out, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert said == "stopped; everything up to here is saved: continue with --resume\n"
    assert (tmp_path / "saved").read_text() == "saved"
    assert "{'saved': True}" in out


def test_ctrl_c_while_a_job_still_imports_says_one_sentence(tmp_path: Path) -> None:
    process = start(tmp_path, "importing")
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert said == "stopped; everything up to here is saved: continue with --resume\n"


def test_an_orphan_saves_and_ends_by_itself(tmp_path: Path) -> None:
    process = start(tmp_path, "working")
    process.kill()
    process.communicate(
        timeout=120
    )  # returns when the orphan, which holds the pipes too, has ended
    assert (tmp_path / "saved").read_text() == "saved"


def test_jobs_in_a_thread_can_be_stopped(tmp_path: Path) -> None:
    path, stop = tmp_path / "saved", threading.Event()
    seen: list[dict[str, Any]] = []
    raised: list[BaseException] = []

    def on_message(_: str, message: dict[str, Any]) -> None:
        seen.append(message)
        stop.set()

    def work() -> None:
        try:
            jobs = [Job("job", wait_and_save, (path,))]
            run_jobs(jobs, 1, on_message, stopped=stop.is_set)
        except Interrupted as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(100)
    assert raised and path.read_text() == "saved" and seen == [{"ready": True}, {"saved": True}]
