"""Whole runs in a simulation: clean on the real code, not clean on planted bugs, twice the same."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from blocktrain.errors import ConfigError
from blocktrain.simulation.planted import hunt_all, named_bugs, planted_bugs
from blocktrain.simulation.shrink import shrink
from blocktrain.simulation.tape import MEMBERS, PlannedFault, Tape, draw_tape, read_tape
from blocktrain.simulation.world import Outcome, simulate
from support.command import blocktrain

TAPES = Path(__file__).parent / "tapes"


@pytest.mark.parametrize("seed", range(1, 8))
def test_every_invariant_holds(seed: int) -> None:
    outcome = simulate(draw_tape(seed))
    assert not outcome.violation, outcome.sentence
    assert outcome.entries > 10


@pytest.mark.parametrize("path", sorted(TAPES.glob("*.json")), ids=lambda path: path.stem)
def test_a_bug_that_was_found_stays_fixed(path: Path) -> None:
    tape = read_tape(path)
    assert tape.expected
    outcome = simulate(tape)
    assert not outcome.violation, outcome.sentence


@pytest.mark.parametrize("member", MEMBERS)
def test_a_run_ends_in_spite_of_every_cheat(member: str) -> None:
    tape = draw_tape(0)
    world = {**tape.world.model_dump(), "rounds": 1, "store": "memory", "calm": 5.0}
    world |= {"byzantine": (member,), "honest": (0.5, 0.5)}
    outcome = simulate(Tape.model_validate({"seed": 3, "world": world}))
    assert not outcome.violation, outcome.sentence


def test_a_seed_happens_twice_alike_also_in_another_process() -> None:
    code = (
        "from blocktrain.simulation.tape import draw_tape\n"
        "from blocktrain.simulation.world import simulate\n"
        "print([simulate(draw_tape(seed)).hash for seed in (1, 5)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "17"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str([simulate(draw_tape(seed)).hash for seed in (1, 5)])


def test_a_tape_is_a_file_that_plays_the_same_again(tmp_path: Path) -> None:
    tape, path = draw_tape(5), tmp_path / "tape.json"
    path.write_text(tape.write())
    assert read_tape(path) == tape
    assert simulate(read_tape(path)) == simulate(tape)
    path.write_text('{"seed": 1, "faults": [{"kind": "rain"}]}')
    with pytest.raises(ConfigError, match=r"faults\.0\.kind"):
        read_tape(path)


def test_shrinking_leaves_the_faults_that_are_needed() -> None:
    tape = draw_tape(3).model_copy(
        update={"faults": tuple(PlannedFault(kind="drop", message=n) for n in range(1, 40))}
    )

    def fails_by_two(tape: Tape) -> Outcome:
        lost = {fault.message for fault in tape.faults}
        return Outcome(tape.seed, "", "lost" if {7, 31} <= lost else "")

    smallest = shrink(tape, "lost", fails_by_two)
    assert {fault.message for fault in smallest.faults} == {7, 31}
    assert smallest.expected == "lost" and smallest.world.honest == tape.world.honest[:1]


def test_every_planted_bug_is_one_line_of_the_code_as_it_is() -> None:
    bugs = planted_bugs()
    assert len(bugs) >= 30 and len({bug.name for bug in bugs}) == len(bugs)
    for bug in bugs:
        old, new = bug.old.splitlines(), bug.new.splitlines()
        changed = [line for line in old if line not in new]
        assert len(changed) == 1, bug.name
    with pytest.raises(ConfigError, match="no planted bug is named"):
        named_bugs(["unknown"])


def test_planted_bugs_are_found() -> None:
    names = ["mean-of-the-last", "blob-not-synced", "known-update-judged-again"]
    hunts = hunt_all(named_bugs(names), 0, 3, 2)
    found = {hunt.name: hunt.violation for hunt in hunts}
    assert found == dict(zip(names, ("lost", "durability", "fairness"), strict=True))


def test_the_command_tells_a_hash_and_plays_tapes(tmp_path: Path) -> None:
    done = blocktrain("simulate", "--seeds", "3", "--jobs", "1", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    lines = "".join(f"{seed} {simulate(draw_tape(seed)).hash}\n" for seed in range(3))
    assert summary["hash"] == hashlib.sha256(lines.encode()).hexdigest()
    assert summary["ok"] and summary["seeds"] == 3 and summary["failed"] == []
    tape = TAPES / "damaged-chunk.json"
    done = blocktrain("simulate", "--tape", str(tape), "--json", cwd=tmp_path)
    assert json.loads(done.stdout) == {"ok": True, **asdict(simulate(read_tape(tape)))}
