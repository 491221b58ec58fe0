"""Every command in README and docs is run, long ones at tiny scale, in the order in which a reader meets them."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.command import blocktrain, start
from support.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TINY = [
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
ROOMS_SHOWN = ("blocktrain", "learning", "coordination")  # with every file
ADDRESS = "http://127.0.0.1:8470"  # what the documents say; the test takes a free port
TINY_BENCH: dict[str, list[str]] = {"memory": [], "step": ["--repeats", "3"]}


def commands(page: Path) -> list[str]:
    """The lines of all shell blocks of a page, without comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [
        line.split("   #")[0].strip()
        for block in blocks
        for line in block.splitlines()
        if line.split("#")[0].strip()
    ]


def shrunk(arguments: list[str]) -> list[str]:
    """The same command on less: fewer steps of a smaller model on shorter text."""
    arguments = ["my-notes.txt" if a == "stdlib" else a for a in arguments]
    if arguments[0] == "train" and "--help" not in arguments and "--resume" not in arguments:
        kept = [
            a for i, a in enumerate(arguments) if a != "--steps" and arguments[i - 1] != "--steps"
        ]
        return [*kept, *TINY, *([] if "--data" in kept else ["--data", "my-notes.txt"])]
    if arguments[0] == "generate":
        return [*arguments, "--max-tokens", "8"]
    if arguments[0] == "bench":
        return [*arguments, *TINY_BENCH[arguments[1]]]
    return arguments


class Network:
    """The coordinator that the documents start, and what they call it."""

    def __init__(self, desk: Path) -> None:
        self.desk = desk
        self.process: subprocess.Popen[str] | None = None
        self.url = self.folder = ""
        self.started: list[subprocess.Popen[str]] = []
        self.staying: list[subprocess.Popen[str]] = []
        self.stages: dict[str, str] = {}

    def start(self, arguments: list[str]) -> None:
        """In the background, small, on a free port."""
        words = [*arguments, *TINY, "--data", "my-notes.txt", "--listen", "127.0.0.1:0", "--json"]
        self.process = start(*words, cwd=self.desk)
        self.started.append(self.process)
        assert self.process.stdout is not None
        said = json.loads(self.process.stdout.readline())
        self.url, self.folder = said["url"], said["folder"]

    def real(self, arguments: list[str]) -> list[str]:
        """The words that stand for something in the documents, replaced by it."""
        known = {ADDRESS: self.url}
        if arguments[0] == "kick":
            status = json.loads(blocktrain("status", self.url, "--json", cwd=self.desk).stdout)
            token = (self.desk / self.folder / "operator.token").read_text()
            known |= {"WORKER": status["workers"][0]["worker"], "OPERATOR": token}
        return [known.get(a, a) for a in arguments]

    def watch(self, arguments: list[str]) -> None:
        """A command that shows something, and stays until Ctrl-C."""
        process = start(*arguments, "--json", cwd=self.desk)
        self.started.append(process)
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130

    def serve(self, arguments: list[str]) -> None:
        """A `serve` or `stage`, on a free port. Stages stay, and are known by the address that the documents gave them."""
        words = list(arguments)
        for named, real in self.stages.items():
            words = [word.replace(named, real) for word in words]
        named = words.pop(words.index("--listen") + 1) if "--listen" in words else ""
        words = [word for word in words if word != "--listen"]
        process = start(*words, "--listen", "127.0.0.1:0", "--json", cwd=self.desk)
        self.started.append(process)
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        if words[0] == "stage":
            self.staying.append(process)
            self.stages[named] = said["address"]
        else:
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE) == 0

    def stop(self) -> None:
        """Ctrl-C."""
        for process in [*self.staying, *([self.process] if self.process else [])]:
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE) == 0


@pytest.fixture
def network(desk: Path) -> Iterator[Network]:
    made = Network(desk)
    yield made
    for process in made.started:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a reader has it: some text of their own, a corpus folder, and a first run, small."""
    desk = tmp_path_factory.mktemp("desk")
    text = "".join(f"note {n}: the {n % 7} of {n % 11} is a {n * n}\n" for n in range(3000))
    (desk / "my-notes.txt").write_text(text)
    (desk / "data" / "wikitext-2").mkdir(parents=True)
    for split in ("train", "valid"):
        (desk / "data" / "wikitext-2" / f"{split}.txt").write_text(text)
    return desk


def run(desk: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return blocktrain(*arguments, cwd=desk, BLOCKTRAIN_DATA=str(desk / "data"))


def unfinished(desk: Path) -> None:
    """Make the newest run look as a crash leaves it: its last block is not published."""
    newest = max(
        (desk / "runs").glob("*/result.json"), key=lambda result: result.parent.name
    ).parent
    for name in ("result.json", "model/config.json", "model/block-4.safetensors"):
        (newest / name).unlink()


@pytest.mark.timeout(1200)  # minutes on two cores, and many waits
def test_every_command_of_the_documents_works(desk: Path, network: Network) -> None:
    first = run(
        desk, ["train", "--data", "my-notes.txt", "--out", "runs/001-stdlib", *TINY]
    )  # what `make train` leaves
    assert first.returncode == 0, first.stderr
    seen = set()
    for page in PAGES:
        for line in commands(page):
            words = shlex.split(line)
            if words[0] == "make":
                assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), (
                    f"{page.name}: {line}"
                )
                continue
            assert words[0] == "blocktrain", f"{page.name}: {line}"
            if line in seen:
                continue
            seen.add(line)
            if "--resume" in words:
                unfinished(desk)
            if words[1] == "bench" and words[2] not in TINY_BENCH:
                there = (ROOT / "tests" / f"test_bench_{words[2]}.py").read_text()
                assert f'blocktrain("bench", "{words[2]}"' in there, (
                    f"{page.name}: {line}"
                )  # it is run there, at tiny scale
                continue
            if words[1] == "coordinator":
                network.start(words[1:])
                continue
            if words[1] in ("serve", "stage"):
                network.serve(words[1:])
                continue
            if "--watch" in words or words[1] == "replay":
                network.watch(network.real(words[1:]))
                continue
            done = run(desk, shrunk(network.real(words[1:])))
            assert done.returncode == 0, f"{page.name}: {line}\n{done.stderr}"
    assert len(seen) >= 20
    network.stop()


def test_the_file_tree_in_the_readme_is_the_one_on_disk() -> None:
    tree = (ROOT / "README.md").read_text().split("## What is where")[1]
    named = set(re.findall(r"\b(\w+\.py)\b", tree))
    there = {
        path.name
        for path in (ROOT / "src" / "blocktrain").rglob("*.py")
        if path.parent.name in ROOMS_SHOWN
    }
    assert named == there - {"__init__.py"}


def test_links_and_pictures_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
