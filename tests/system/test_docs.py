"""Every command in README and docs is run, long ones at tiny scale.

Commands that need nothing from each other run at the same time: most of their time is spent on
starting, and on waiting for each other's processes.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from support.command import blocktrain, start
from support.upload_hub import serve_uploads
from support.waiting import PATIENCE, until

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
TINY = shlex.split(
    "--layers-per-block 1 --width 16 --heads 2 --context 16 --batch 2 --steps 4"
)  # and short text
ADDRESS = "http://127.0.0.1:8470"  # what the documents say; the test takes a free port
FIRST = "runs/001-stdlib"  # what `make train` leaves
AT_ONCE = 3
SHORT_BENCHES: dict[str, list[str]] = {
    "memory": [],
    "step": ["--repeats", "3"],
}  # the others have tests of their own
ALONE = (
    *("plan", "train", "data", "evaluate", "generate", "export", "push", "doctor", "bench"),
    "simulate",
    "fuzz",
)
TOGETHER = (
    "coordinator",
    "worker",
    "status",
    "doctor",
    "kick",
    "pull",
    "evaluate",
    "export",
    "audit",
)


def lines_of(page: Path) -> list[str]:
    """The lines of all shell blocks of a page, without comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [
        line.split("   #")[0].strip()
        for block in blocks
        for line in block.splitlines()
        if line.split("#")[0].strip()
    ]


LINES = list(dict.fromkeys(line for page in PAGES for line in lines_of(page)))
COMMANDS = [shlex.split(line)[1:] for line in LINES if line.startswith("blocktrain ")]


def is_together(words: list[str]) -> bool:
    """It belongs to the run that the documents coordinate."""
    return bool({ADDRESS, "runs/together", "runs/pulled"} & set(words))


def is_served(words: list[str]) -> bool:
    return words[0] in ("serve", "stage")


def is_continued(words: list[str]) -> bool:
    """It goes on from the first run."""
    return bool({"--from", "--parent"} & set(words))


def is_alone(words: list[str]) -> bool:
    if words[0] == "bench":
        return words[1] in SHORT_BENCHES
    if words[0] == "chaos":  # it has a test of its own
        return False
    return not is_together(words) and not is_served(words) and not is_continued(words)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a reader has it: text of their own, a corpus folder, and a first run, small."""
    desk = new_desk(tmp_path_factory.mktemp("desk"))
    succeed(desk, ["train", "--data", "my-notes.txt", "--out", FIRST, *TINY])
    return desk


def new_desk(desk: Path) -> Path:
    text = "".join(f"note {n}: the {n % 7} of {n % 11} is a {n * n}\n" for n in range(1000))
    (desk / "data" / "wikitext-2").mkdir(parents=True)
    for name in ("my-notes.txt", "data/wikitext-2/train.txt", "data/wikitext-2/valid.txt"):
        (desk / name).write_text(text)
    shutil.copy(ROOT / "docs" / "guides" / "fleet.toml", desk)
    (desk / "prompts.txt").write_text("note 1\nnote 2\n")
    (desk / "mix.toml").write_text(
        '[[source]]\ndata = "my-notes.txt"\nweight = 0.7\n'
        '[[source]]\ndata = "data/wikitext-2"\nweight = 0.3\n'
    )
    return desk


def succeed(desk: Path, words: list[str], **more: str) -> None:
    environment = {"BLOCKTRAIN_DATA": str(desk / "data"), **more}
    done = blocktrain(*words, cwd=desk, timeout=280, **environment)
    assert done.returncode == 0, f"blocktrain {shlex.join(words)}\n{done.stderr}"


def at_once(work: Iterable[Callable[[], None]]) -> None:
    """All of it, some at a time; the first failure is raised."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in [pool.submit(one) for one in work]:
            done.result()


def shrunk(words: list[str]) -> list[str]:
    """The same command on less: fewer steps of a smaller model on shorter text."""
    words = ["my-notes.txt" if word == "stdlib" else word for word in words]
    if words[0] == "train" and not {"--help", "--help-all", "--resume"} & set(words):
        kept = [w for i, w in enumerate(words) if "--steps" not in (w, words[i - 1])]
        data = [] if "--data" in kept else ["--data", "my-notes.txt"]
        return [*kept, *TINY, "--blocks", "2", *data]  # a process for each block
    if words[0] == "bench":
        return [*words, *SHORT_BENCHES[words[1]]]
    if words[0] == "simulate":
        return [*words, "--bug", "mean-of-the-last"] if "--planted" in words else [*words[:-1], "2"]
    if words[0] == "fuzz":
        short = ["0.01" if word == "10" else word for word in words]
        return [*short, *(["--plain"] if "--plain" not in short else [])]  # atheris starts slowly
    return [*words, "--max-tokens", "8"] if words[0] == "generate" else words


def test_every_line_is_run_by_one_of_the_tests_below() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for line in LINES:
        words = shlex.split(line)
        assert words[0] in ("make", "blocktrain"), line
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), line
    assert len(COMMANDS) >= 30
    for words in COMMANDS:
        if is_alone(words):
            assert words[0] in ALONE, words
        elif is_together(words):
            assert words[0] in (*TOGETHER, "replay"), words


def test_long_benches_are_run_at_tiny_scale_by_their_own_tests() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "bench").glob("*.py"))
    chaos = [word for words in COMMANDS if words[0] == "chaos" for word in words]
    flags = {word for word in chaos if word.startswith("--")}
    assert '"chaos", "--scale", "tiny"' in tests and all(f'"{flag}"' in tests for flag in flags)
    named = [words[1] for words in COMMANDS if words[0] == "bench" and not is_alone(words)]
    assert named
    assert [name for name in named if not re.search(rf'"bench",\s+"{name}"', tests)] == []


@pytest.mark.timeout(1200)  # a dozen commands, on a busy machine
def test_commands_of_one_machine(desk: Path, tmp_path: Path) -> None:
    def run(number: int, words: list[str]) -> None:
        if words[0] == "push":
            with serve_uploads() as hub:
                return succeed(desk, words, **hub.environment)
        if words[0] != "train":
            return succeed(desk, shrunk(words))
        own = new_desk(tmp_path / str(number))  # a run folder has the next free name
        if "--resume" in words:
            shutil.copytree(desk / FIRST, own / FIRST)
            unfinish(own / FIRST)
        return succeed(own, shrunk(words))

    chosen = [words for words in COMMANDS if is_alone(words)]
    chosen.sort(key=lambda words: words[0] not in ("train", "bench"))  # the longest first
    at_once(partial(run, n, words) for n, words in enumerate(chosen))


def unfinish(run: Path) -> None:
    """Make a run look as a crash leaves it: its last block is not published."""
    for name in ("result.json", "model/config.json", "model/block-4.safetensors"):
        (run / name).unlink()


class Processes:
    """What stays in the background, and is stopped at the end."""

    def __init__(self, desk: Path) -> None:
        self.desk = desk
        self.started: list[subprocess.Popen[str]] = []

    def start(self, words: list[str]) -> tuple[subprocess.Popen[str], dict[str, str]]:
        """The process, once it said in JSON where it is."""
        data = str(self.desk / "data")
        process = start(*words, "--json", cwd=self.desk, BLOCKTRAIN_DATA=data)
        self.started.append(process)
        assert process.stdout is not None
        return process, json.loads(process.stdout.readline())

    def interrupt(self, process: subprocess.Popen[str]) -> None:
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0

    def interrupt_watching(self, process: subprocess.Popen[str]) -> None:
        """Again if need be: Python loses an interrupt in the middle of a weakref callback."""

        def press() -> bool:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            return process.poll() is not None

        assert process.poll() is None
        until(press, "Ctrl-C ends it")
        assert process.returncode == 130


@pytest.fixture
def processes(desk: Path) -> Iterator[Processes]:
    kept = Processes(desk)
    yield kept
    for process in kept.started:
        process.kill()
        process.wait()


@pytest.mark.timeout(1200)
def test_commands_that_go_on_from_a_run(desk: Path, processes: Processes) -> None:
    chosen = [words for words in COMMANDS if is_continued(words)]
    page = (ROOT / "docs" / "guides" / "continue.md").read_text()
    (mixture,) = re.findall(r"^```toml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (desk / "mix.toml").write_text(mixture.replace("stdlib", "my-notes.txt"))

    def short(words: list[str]) -> list[str]:
        return [*(w for i, w in enumerate(words) if "--steps" not in (w, words[i - 1])), "--steps"]

    at_once(partial(succeed, desk, [*short(w), "2"]) for w in chosen if w[0] == "train")
    for words in (words for words in chosen if words[0] == "audit"):
        succeed(desk, words)
    (opening,) = [words for words in chosen if words[0] == "coordinator"]
    coordinator, place = processes.start(
        [*opening, "--listen", "127.0.0.1:0", "--score-bytes", "0"]
    )
    until(lambda: parent_of(desk, place["url"]), "a run")
    processes.interrupt(coordinator)


def parent_of(desk: Path, url: str) -> str | None:
    """The run that a coordinator's run goes on from, once it has begun."""
    done = blocktrain("status", url, "--json", cwd=desk)
    return json.loads(done.stdout)["parent"]["run"] if done.returncode == 0 else None


@pytest.mark.timeout(1200)
def test_commands_of_a_run_together(desk: Path, processes: Processes) -> None:
    by_name = {name: [w for w in COMMANDS if is_together(w) and w[0] == name] for name in TOGETHER}
    (opening,) = by_name["coordinator"]
    free = ["--data", "my-notes.txt", "--listen", "127.0.0.1:0"]
    coordinator, place = processes.start([*opening, *TINY, *free])
    known = {ADDRESS: place["url"]}

    def run(words: list[str]) -> None:
        succeed(desk, [known.get(word, word) for word in words])

    def watch(words: list[str]) -> None:
        """A command that shows something, and stays until Ctrl-C."""
        process, _ = processes.start([known.get(word, word) for word in words])
        processes.interrupt_watching(process)

    for words in by_name["worker"]:  # until the run is finished
        run(words)
    staying = [w for w in COMMANDS if is_together(w) and (w[0] == "replay" or "--watch" in w)]
    looking = [
        w
        for name in ("status", "doctor", "audit", "pull")
        for w in by_name[name]
        if w not in staying
    ]
    at_once(
        [*(partial(watch, words) for words in staying), *(partial(run, words) for words in looking)]
    )
    status = json.loads(blocktrain("status", place["url"], "--json", cwd=desk).stdout)
    known["WORKER"] = status["workers"][0]["worker"]
    known["OPERATOR"] = (desk / place["folder"] / "operator.token").read_text()
    last = by_name["kick"] + by_name["evaluate"] + by_name["export"]
    at_once(partial(run, words) for words in last)
    processes.interrupt(coordinator)


@pytest.mark.timeout(1200)
def test_commands_that_serve(desk: Path, processes: Processes) -> None:
    """On free ports. Stages stay, and are known by the address that the documents gave them."""
    chosen = [words for words in COMMANDS if is_served(words)]
    addresses: dict[str, str] = {}
    stages = []
    for words in (words for words in chosen if words[0] == "stage"):
        at = words.index("--listen") + 1
        stage, place = processes.start([*words[:at], "127.0.0.1:0", *words[at + 1 :]])
        addresses[words[at]] = place["address"]
        stages.append(stage)

    def serve(words: list[str]) -> None:
        assert "--listen" not in words
        for named, real in addresses.items():
            words = [word.replace(named, real) for word in words]
        process, _ = processes.start([*words, "--listen", "127.0.0.1:0"])
        processes.interrupt(process)

    at_once(partial(serve, words) for words in chosen if words[0] == "serve")
    for stage in stages:
        processes.interrupt(stage)
