"""Real `blocktrain stage` processes behind shaped links."""

from __future__ import annotations

import itertools
import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from blocktrain.bench.network.shaper import LOCALHOST, Link, ShapedLink, shape_link
from blocktrain.errors import RunError
from blocktrain.serving.line.address import parse_address

START_SECONDS = 120.0
STOP_SECONDS = 10.0


@dataclass(eq=False)
class StageProcess:
    """A stage that can be killed, and started again at the same address."""

    run: Path
    blocks: tuple[int, ...]
    log: IO[str]  # for what it complains about
    reference: bool = False
    address: str = ""
    _process: subprocess.Popen[str] | None = None

    def launch(self) -> None:
        """Begin to start; `wait` until it has."""
        command = [
            sys.executable,
            "-m",
            "blocktrain",
            "stage",
            str(self.run),
            "--blocks",
            ",".join(map(str, self.blocks)),
            "--json",
        ]
        command += [
            "--listen",
            self.address or f"{LOCALHOST}:0",
            *(["--reference"] if self.reference else []),
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self.log, text=True
        )

    def wait(self) -> None:
        """Wait until it listens."""
        if self._process is None or self._process.stdout is None:
            raise RunError("a stage that was not launched cannot be waited for")
        ready, _, _ = select.select([self._process.stdout], [], [], START_SECONDS)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self.kill()
            self.log.seek(0)
            reason = self.log.read()[-500:].strip() or "it said nothing in time"
            raise RunError(f"a stage did not start: {reason}")
        self.address = json.loads(line)["address"]

    @property
    def port(self) -> int:
        return parse_address(self.address)[1]

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def end(self) -> None:
        """Terminate it, or kill it if it does not react."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def restart(self) -> None:
        """Start it again at the same address. It must have been killed before."""
        if self._process is not None:
            self._process.wait(STOP_SECONDS)
            if self._process.stdout is not None:
                self._process.stdout.close()
        self.launch()
        self.wait()


@contextmanager
def stages(
    run: Path, groups: Sequence[Sequence[int]], *, reference: bool = False
) -> Iterator[list[StageProcess]]:
    """A stage process for each group of blocks."""
    with ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
        processes = [StageProcess(run, tuple(group), log, reference) for group in groups]
        for stage in processes:
            stack.callback(stage.end)
            stage.launch()
        for stage in processes:
            stage.wait()
        yield processes


@contextmanager
def links(targets: Sequence[StageProcess], link: Link) -> Iterator[list[ShapedLink]]:
    """A shaped link to each stage."""
    with ExitStack() as stack:
        yield [stack.enter_context(shape_link(LOCALHOST, stage.port, link)) for stage in targets]


def names(lines: Sequence[ShapedLink]) -> list[str]:
    """The addresses of the stages behind their links."""
    return [f"{line.host}:{line.port}" for line in lines]


def count_bytes(lines: Sequence[ShapedLink]) -> int:
    """Bytes that have passed, in both directions."""
    return sum(counters.up + counters.down for counters in (line.counters() for line in lines))


def split(numbers: Sequence[int], hosts: int) -> list[tuple[int, ...]]:
    """Neighbouring blocks for each host, evenly; the first may have one more, none is empty."""
    hosts = min(hosts, len(numbers))
    size, more = divmod(len(numbers), hosts)
    ends = [n * size + min(n, more) for n in range(hosts + 1)]
    return [tuple(numbers[a:b]) for a, b in itertools.pairwise(ends)]
