"""`make walk`: the files that one real round and one real request pass, in order.

A coordinator and a worker talk over HTTP, `serve` and two stages over TCP, each in a process of
its own under a profile hook (walk_hook/). A round lasts from one receipt to the first task after
the next receipt: fetch, train, upload, submit, merge, new version. A request lasts from the
question to the last byte of the streamed answer. Code that runs while a module is imported does
not count, and neither does start-up.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2] / "src" / "blocktrain"
HOOK = Path(__file__).parent / "walk_hook"
SHAPE = "--blocks 3 --layers-per-block 1 --width 16 --heads 2 --context 32 --batch 4"
POLICY = "--replicas 1 --task-steps 4 --score-bytes 0 --steps 24 --warmup 2"
PATIENCE = 200.0  # seconds that anything may take on a busy machine
ROUND_AIM, REQUEST_AIM = 28, 16
FOR_PEOPLE = ("watch/", "cli/", "terminal.py", "worker/command.py")  # a round needs none of them


@dataclass(frozen=True)
class Call:
    """One entry into a function."""

    time: int  # nanoseconds
    file: str
    function: str
    process: str


class Traced:
    """A command under the hook, with its lines of JSON and its calls."""

    def __init__(self, name: str, folder: Path, *words: str) -> None:
        self.name, self.log = name, folder / f"{name}.walk"
        path = os.pathsep.join([str(HOOK), str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
        self._errors = (folder / f"{name}.err").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "blocktrain", *words, "--json"],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "BLOCKTRAIN_CACHE": str(folder / "cache"),
                "OMP_NUM_THREADS": "1",
                "WALK_PACKAGE": str(PACKAGE),
                "WALK_LOG": str(self.log),
            },
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        if not text:
            self._errors.seek(0)
            raise SystemExit(f"{self.name} ended: {self._errors.read()[-2000:]}")
        return dict(json.loads(text))

    def calls(self, start: int, end: int) -> list[Call]:
        found = []
        for line in self.log.read_text().splitlines():
            time_, file, function = line.split(" ", 2)
            if file != "mark" and start <= int(time_) <= end:
                found.append(Call(int(time_), file, function, self.name))
        return found

    def marks(self, kind: str) -> list[int]:
        """When the command printed lines of this kind."""
        lines = [line.split(" ", 2) for line in self.log.read_text().splitlines()]
        marks = [(int(at), json.loads(text)) for at, what, text in lines if what == "mark"]
        return [at for at, said in marks if said.get("kind") == kind]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._errors.close()


@contextmanager
def traced(name: str, folder: Path, *words: str) -> Iterator[Traced]:
    command = Traced(name, folder, *words)
    try:
        yield command
    finally:
        command.close()


def walk_round(folder: Path) -> list[Call]:
    """The calls of coordinator and worker from a receipt to the task after the next receipt."""
    words = ("coordinator", "--listen", "127.0.0.1:0", "--data", "words.txt", "--out", "shared")
    settings = [*SHAPE.split(), *POLICY.split()]
    with traced("coordinator", folder, *words, *settings) as coordinator:
        url = str(coordinator.line()["url"])
        where = ("--cache", "worker", "--device", "cpu")
        with traced("worker", folder, "worker", url, *where) as worker:
            worker.process.wait(PATIENCE)
        # The third round: by then nothing is done for the first time.
        receipts = worker.marks("accepted")[2:4]
        tasks = [at for at in worker.marks("task") if len(receipts) == 2 and at > receipts[1]]
        if not tasks:
            raise SystemExit("the worker did not do enough rounds")
        window = receipts[0], tasks[0]
        return sorted(
            coordinator.calls(*window) + worker.calls(*window), key=lambda call: call.time
        )


def walk_request(folder: Path) -> list[Call]:
    """The calls of the entry and of two stages for one streamed answer."""
    words = ("train", "--data", "words.txt", "--out", "run", *SHAPE.split(), "--steps", "8")
    train = subprocess.run(
        [sys.executable, "-m", "blocktrain", *words, "--warmup", "2"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    if train.returncode:
        raise SystemExit(train.stderr[-2000:])
    listen = ("--listen", "127.0.0.1:0")
    with ExitStack() as stack:
        stages = [
            stack.enter_context(
                traced(f"stage-{block}", folder, "stage", "run", "--blocks", block, *listen)
            )
            for block in ("1", "2")
        ]
        route = ",".join(str(stage.line()["address"]) for stage in stages)
        words = ("serve", "run", "--route", route, *listen)
        entry = stack.enter_context(traced("entry", folder, *words))
        said = entry.line()
        _answer(said)  # connects, and imports what is imported late
        start = time.monotonic_ns()
        _answer(said)
        end = time.monotonic_ns()
        calls = [call for process in (entry, *stages) for call in process.calls(start, end)]
        return sorted(calls, key=lambda call: call.time)


def _answer(entry: dict[str, Any]) -> None:
    body = {"model": entry["model"], "prompt": "the birch ", "max_tokens": 24, "stream": True}
    request = urllib.request.Request(
        f"{entry['url']}/v1/completions",
        json.dumps({**body, "seed": 1, "temperature": 0.8}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        if b"[DONE]" not in answer.read():
            raise SystemExit("the answer did not end")


def files_of(calls: Sequence[Call]) -> list[str]:
    """Each file once, in order of its first entry."""
    return list(dict.fromkeys(call.file for call in calls))


def show(title: str, calls: Sequence[Call], aim: str) -> None:
    print(f"\n{title}: {aim}")
    entries = Counter(call.file for call in calls)
    for number, file in enumerate(files_of(calls), 1):
        functions = Counter(call.function for call in calls if call.file == file)
        processes = dict.fromkeys(call.process for call in calls if call.file == file)
        counts = f"{entries[file]:5} entries {len(functions):3} functions"
        most = ", ".join(name for name, _ in functions.most_common(3))
        print(f"{number:3} {file:30} {counts}  {' '.join(processes)}: {most}")


def write_words(folder: Path) -> None:
    text = "".join(
        f"the birch {n % 7} meets the cedar {n % 11} by the inlet.\n" for n in range(900)
    )
    (folder / "words.txt").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", choices=["round", "request"])
    part = parser.parse_args().part
    with tempfile.TemporaryDirectory(prefix="blocktrain-walk-") as name:
        folder = Path(name)
        write_words(folder)
        if part != "request":
            calls = walk_round(folder)
            aim = f"{len(files_of(calls))} files, aim {ROUND_AIM}"
            show("One round", calls, aim)
            reports = sum(file.startswith(FOR_PEOPLE) for file in files_of(calls))
            print(f"Of these, {reports} only report to people.")
        if part != "round":
            calls = walk_request(folder)
            of_serving = [file for file in files_of(calls) if file.startswith("serving/")]
            aim = f"{len(of_serving)} files of serving, aim {REQUEST_AIM}"
            show("One request, streamed", calls, f"{aim} ({len(files_of(calls))} in all)")


if __name__ == "__main__":
    main()
