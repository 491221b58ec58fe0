"""Planted bugs: the simulation must find each of them, or it would not find others either.

A bug is one changed line of the real code, in `planted.toml`. It is planted in a copy of the
package, which a process of its own loads instead of the real one.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from blocktrain.config import sentence
from blocktrain.errors import ConfigError, RunError
from blocktrain.simulation.tape import draw_tape
from blocktrain.simulation.world import simulate

PACKAGE = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("planted.toml")
SECONDS = 1800.0  # after which a simulation with a bug counts as one that does not end
_CHILD = """
import sys
sys.path.insert(0, {place!r})
from blocktrain.simulation.planted import hunt
hunt({place!r}, {first}, {seeds})
"""


class PlantedBug(BaseModel):
    """One changed line."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    file: str
    why: str
    old: str
    new: str


@dataclass(frozen=True)
class Hunt:
    """Whether a bug was found: by which invariant, and how many seeds it took."""

    name: str
    file: str
    why: str
    found: bool
    violation: str = ""
    sentence: str = ""
    seeds: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def planted_bugs() -> tuple[PlantedBug, ...]:
    """All bugs of the table; ConfigError, if one does not fit the code."""
    try:
        bugs = [PlantedBug(**bug) for bug in tomllib.loads(TABLE.read_text("utf-8"))["bug"]]
    except ValidationError as error:
        raise ConfigError(f"{TABLE}: {sentence(error)}") from None
    for bug in bugs:
        count = (PACKAGE / bug.file).read_text("utf-8").count(bug.old)
        if count != 1:
            raise ConfigError(
                f"planted bug {bug.name}: its old line comes {count} times in {bug.file} and not "
                f"once; write it in {TABLE} as the code is now"
            )
    return tuple(bugs)


def named_bugs(names: Sequence[str]) -> tuple[PlantedBug, ...]:
    """Some of them."""
    bugs = {bug.name: bug for bug in planted_bugs()}
    if unknown := [name for name in names if name not in bugs]:
        raise ConfigError(f"no planted bug is named {unknown[0]}; known: {', '.join(sorted(bugs))}")
    return tuple(bugs[name] for name in names) if names else tuple(bugs.values())


def hunt_all(
    bugs: Sequence[PlantedBug],
    first: int,
    seeds: int,
    jobs: int,
    on_hunt: Callable[[float, Hunt], None] = lambda *_: None,
) -> list[Hunt]:
    """Look for each bug with up to so many seeds, in the order of the table."""
    found: dict[str, Hunt] = {}
    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(_hunt, bug, first, seeds) for bug in bugs]
        try:
            for done in as_completed(waiting):
                result = done.result()
                found[result.name] = result
                on_hunt(len(found) / len(bugs), result)
        except BaseException:
            for job in waiting:
                job.cancel()
            raise
    return [found[bug.name] for bug in bugs]


def _hunt(bug: PlantedBug, first: int, seeds: int) -> Hunt:
    with tempfile.TemporaryDirectory(prefix="blocktrain-planted-") as folder:
        # Its caches are kept: only the changed file is compiled again.
        shutil.copytree(PACKAGE, Path(folder, PACKAGE.name))
        path = Path(folder, PACKAGE.name, bug.file)
        path.write_text(path.read_text("utf-8").replace(bug.old, bug.new), "utf-8")
        child = _CHILD.format(place=folder, first=first, seeds=seeds)
        facts = (bug.name, bug.file, bug.why)
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-c", child],
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Hunt(*facts, found=True, violation="liveness", sentence="it does not end")
    if done.returncode:
        raise RunError(f"planted bug {bug.name}: its process failed: {done.stderr[-300:]}")
    return Hunt(*facts, **json.loads(done.stdout))


def hunt(place: str, first: int, seeds: int) -> None:
    """In the process of a copy: simulate seeds until one breaks an invariant."""
    if not PACKAGE.is_relative_to(place):
        raise RunError(f"{PACKAGE} was loaded, not the copy in {place}")
    result: dict[str, Any] = {"found": False, "seeds": seeds}
    for number in range(seeds):
        outcome = simulate(draw_tape(first + number))
        if outcome.violation:
            result = {
                "found": True,
                "violation": outcome.violation,
                "sentence": outcome.sentence[:200],
                "seeds": number + 1,
            }
            break
    print(json.dumps(result))
