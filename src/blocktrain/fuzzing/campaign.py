"""Fuzzing for minutes: every target in turn, what was found as files, and files again as inputs."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blocktrain.errors import ConfigError, RunError
from blocktrain.files import write_atomic
from blocktrain.fuzzing.files import FILES
from blocktrain.fuzzing.guided import guide
from blocktrain.fuzzing.mutate import mutate
from blocktrain.fuzzing.target import FuzzTarget, ParserOutcome, try_input
from blocktrain.fuzzing.wire import WIRE

TARGETS: dict[str, FuzzTarget] = {target.name: target for target in (*WIRE, *FILES)}
SUFFIX = ".input"
SLICE = 0.5  # seconds for a target at a time
FuzzProgress = Callable[[float], None]


@dataclass(frozen=True)
class Crasher:
    """An input that a parser neither reads nor refuses clearly."""

    target: str
    problem: str
    file: str


@dataclass
class FuzzResult:
    """What was tried, and what was found: the first input for each problem of each target."""

    seconds: float = 0.0
    tried: dict[str, int] = field(default_factory=dict)
    crashers: list[Crasher] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {"ok": not self.crashers, **asdict(self)}


def named_targets(names: Sequence[str]) -> list[FuzzTarget]:
    """The targets of these names, or all; ConfigError names those that there are."""
    unknown = [name for name in names if name not in TARGETS]
    if unknown:
        raise ConfigError(f"there is no target {unknown[0]!r}; known: {', '.join(TARGETS)}")
    return [TARGETS[name] for name in names or TARGETS]


def keep_crasher(target: str, content: bytes, problem: str, out: Path) -> Crasher:
    """The input as a file, whose name says for which target it is."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{target}-{hashlib.sha256(content).hexdigest()[:12]}{SUFFIX}"
    write_atomic(path, content)
    return Crasher(target, problem, str(path))


def replay(path: Path) -> tuple[FuzzTarget, ParserOutcome]:
    """The target in the name of a file, and what it makes of the file now."""
    (target,) = named_targets([path.name.removesuffix(SUFFIX).rpartition("-")[0]])
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    return target, try_input(target, content)


class _Findings:
    """What was found so far. Of each problem of a target the first input is kept."""

    def __init__(self, out: Path) -> None:
        self.result, self._out, self._known = FuzzResult(), out, set[tuple[str, str]]()
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def note(self, target: str, content: bytes, problem: str) -> None:
        key = (target, problem.partition(":")[0])  # the same problem comes with many inputs
        if problem and key not in self._known:
            self._known.add(key)
            self.result.crashers.append(keep_crasher(target, content, problem, self._out))

    def end(self) -> FuzzResult:
        self.result.seconds = round(self.seconds, 1)
        return self.result


def fuzz(
    targets: Sequence[FuzzTarget],
    seconds: float,
    seed: int,
    out: Path,
    on_share: FuzzProgress = lambda _: None,
) -> FuzzResult:
    """Changed seeds for every target, in turns, until the time is over. Each gets a turn."""
    findings, draw = _Findings(out), random.Random(seed)
    tried = findings.result.tried
    seeds = {target.name: list(target.seeds()) for target in targets}
    turn = min(SLICE, seconds / len(targets))
    while not tried or findings.seconds < seconds:
        for target in targets:
            until = time.monotonic() + turn
            while time.monotonic() < until or target.name not in tried:
                content = mutate(draw.choice(seeds[target.name]), draw)
                tried[target.name] = tried.get(target.name, 0) + 1
                findings.note(target.name, content, try_input(target, content).problem)
            on_share(min(1.0, findings.seconds / seconds))
    return findings.end()


def fuzz_guided(
    targets: Sequence[FuzzTarget],
    seconds: float,
    seed: int,
    out: Path,
    on_share: FuzzProgress = lambda _: None,
) -> FuzzResult:
    """The same with atheris."""
    findings = _Findings(out)

    def on_line(line: dict[str, Any]) -> None:
        if "problem" in line:
            findings.note(line["target"], bytes.fromhex(line["content"]), line["problem"])
        findings.result.tried.update(line.get("tried", {}))
        on_share(min(1.0, findings.seconds / seconds))

    def on_killed(target: str, content: bytes) -> None:
        findings.note(target, content, "killed the process, or never ended")

    guide([target.name for target in targets], seconds, seed, on_line, on_killed)
    if not findings.result.tried:
        raise RunError("atheris did not start; fuzz with --plain, without it")
    return findings.end()
