"""Looking for bugs: `simulate` plays whole runs, `chaos` real ones, `fuzz` feeds every parser."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from blocktrain.cli.environment import command_line, cores, source
from blocktrain.cli.flags import Json, at_least
from blocktrain.errors import ConfigError, RunError

if TYPE_CHECKING:
    from blocktrain.fuzzing.campaign import FuzzResult
    from blocktrain.simulation.planted import Hunt
    from blocktrain.simulation.seeds import FailedSeed, SeedSummary

SEEDS, SEEDS_PER_BUG = 200, 300
AtLeastOne = Annotated[int | None, at_least(1, 10**9)]


@dataclass(frozen=True)
class PlantedFlags:
    """Bugs that the simulation must find."""

    planted: Annotated[
        bool,
        Parameter(
            negative=(),
            help="Instead, plant one bug after the other in a copy of the package, and see whether "
            f"the simulation finds it within --seeds ({SEEDS_PER_BUG} by default). All take about "
            "5 minutes on 2 cores.",
        ),
    ] = False
    bug: Annotated[
        list[str] | None,
        Parameter(consume_multiple=True, negative=(), help="Of --planted, only these bugs."),
    ] = None


def simulate(
    *,
    seeds: AtLeastOne = None,
    seed: Annotated[int, at_least(0, 10**15)] = 0,
    jobs: AtLeastOne = None,
    minutes: Annotated[float | None, at_least(0.001)] = None,
    tape: Path | None = None,
    planted: Annotated[PlantedFlags | None, Parameter(name="*")] = None,
    out: Path = Path("results/simulate"),
    json_: Json = False,
) -> None:
    """Look for lost, doubled and forged updates in simulated runs. Each seed is one run.

    Coordinator, merge, stores, worker's session and audit are the real ones. Clock, network, disk
    and training are simulated: messages are lost, doubled and overtaken, connections break, the
    coordinator dies at any step of its disk, power fails, workers cheat. After every event nothing
    that was acknowledged may be lost or counted twice, and in the end the run must finish and the
    audit find nothing.

    A seed that fails prints the invariant that does not hold, and leaves its smallest tape: the
    faults that are needed, as JSON. `blocktrain simulate --tape FILE` plays it again.

    Parameters
    ----------
    seeds
        How many; 200 by default, which take about a minute on 2 cores.
    seed
        The first one.
    jobs
        Processes; by default one for each core.
    minutes
        Stop after this time, with the seeds that are done.
    tape
        Instead, play this tape.
    out
        Folder for the tapes of failing seeds.
    """
    planted = planted or PlantedFlags()
    if tape is not None and (planted.planted or planted.bug):
        raise ConfigError("--tape and --planted are two things: call one after the other")
    if tape is not None:
        _play(tape, json_)
    elif planted.planted or planted.bug:
        _plant(planted.bug or [], seed, seeds or SEEDS_PER_BUG, jobs or cores(), json_)
    else:
        _run(seed, seeds or SEEDS, jobs or cores(), minutes, out, json_)


def _run(first: int, count: int, jobs: int, minutes: float | None, out: Path, json_: bool) -> None:
    from blocktrain.simulation.seeds import run_seeds
    from blocktrain.terminal import bar, console

    with bar(f"{count} seeds") as progress:

        def on_seed(share: float, failed: FailedSeed | None) -> None:
            progress(share)
            if failed is not None:
                console.print(
                    f"seed {failed.seed}: {failed.violation}: {failed.sentence}\n"
                    f"  {failed.faults} faults are needed: "
                    f"blocktrain simulate --tape {failed.tape}",
                    highlight=False,
                    markup=False,
                    soft_wrap=True,
                )

        summary = run_seeds(first, count, min(jobs, count), out, on_seed, minutes)
    if json_:
        print(json.dumps(summary.as_dict()))
    else:
        _show(summary)
    if summary.failed:
        raise RunError(f"{len(summary.failed)} of {summary.seeds} seeds break an invariant")


def _show(summary: SeedSummary) -> None:
    from blocktrain.terminal import console

    last = summary.first + summary.seeds - 1
    good = summary.seeds - len(summary.failed)
    console.print(
        f"{good} of {summary.seeds} seeds ({summary.first} to {last}) keep every invariant, "
        f"in {summary.seconds:.0f} s on {summary.jobs} processes\n"
        f"{summary.simulated_hours:.1f} simulated hours, {summary.requests:,} requests, "
        f"{summary.effects:,} effects, {summary.crashes:,} restarts of the coordinator, "
        f"{summary.entries:,} ledger entries\n"
        f"hash {summary.hash}",
        highlight=False,
        soft_wrap=True,
    )


def _play(path: Path, json_: bool) -> None:
    from blocktrain.simulation.tape import read_tape
    from blocktrain.simulation.world import simulate as simulate_tape
    from blocktrain.terminal import console

    outcome = simulate_tape(read_tape(path))
    if json_:
        print(json.dumps({"ok": not outcome.violation, **asdict(outcome)}))
    else:
        console.print(f"hash {outcome.hash}", highlight=False, soft_wrap=True)
    if outcome.violation:
        raise RunError(f"{outcome.violation}: {outcome.sentence}")


def _plant(names: list[str], first: int, seeds: int, jobs: int, json_: bool) -> None:
    from blocktrain.simulation.planted import hunt_all, named_bugs
    from blocktrain.terminal import bar, console, rows_table

    bugs = named_bugs(names)
    with bar(f"{len(bugs)} planted bugs") as progress:

        def on_hunt(share: float, _: Hunt) -> None:
            progress(share)

        hunts = hunt_all(bugs, first, seeds, jobs, on_hunt)
    missed = [hunt.name for hunt in hunts if not hunt.found]
    if json_:
        found = len(hunts) - len(missed)
        result = {"bugs": len(hunts), "found": found, "hunts": [h.as_dict() for h in hunts]}
        print(json.dumps(result))
    else:
        rows = [
            {
                "bug": hunt.name,
                "found by": hunt.violation or "MISSED",
                "seeds": hunt.seeds,
                "file": hunt.file,
            }
            for hunt in hunts
        ]
        title = f"{len(hunts) - len(missed)} of {len(hunts)} planted bugs are found"
        console.print(rows_table(title, rows))
    if missed:
        raise RunError(f"{len(missed)} planted bugs were not found: {', '.join(missed)}")


def fuzz(
    targets: Annotated[list[str] | None, Parameter(negative=())] = None,
    /,
    *,
    minutes: Annotated[float, at_least(0.001)] = 10.0,
    seed: Annotated[int, at_least(0, 10**15)] = 0,
    plain: Annotated[bool, Parameter(negative=())] = False,
    replay: Path | None = None,
    out: Path = Path("results/fuzz"),
    json_: Json = False,
) -> None:
    """Feed every parser with changed inputs: each must be read, or refused in a clear sentence.

    Messages, ledger, payloads, frames, HTTP heads, requests for text, settings, corpora,
    tokenizers, run folders and more; a wrong name lists all. No input may raise another error, take
    5 seconds of processor time, or 256 MB. With atheris (`pip install 'blocktrain[fuzz]'`) the
    inputs that reach new lines of the code are kept and changed again; without it, valid ones are
    changed at random.

    What a parser does not survive is kept as a file. `blocktrain fuzz --replay FILE` feeds it
    again.

    Parameters
    ----------
    targets
        Only these parsers.
    minutes
        How long, for all of them together.
    seed
        Of the changes.
    plain
        Without atheris, also where it is installed.
    replay
        Instead, feed this file to the parser in its name.
    out
        Folder for inputs that a parser does not survive.
    """
    from blocktrain.fuzzing import campaign, guided
    from blocktrain.terminal import bar, console

    if replay is not None:
        _replay(replay, json_)
        return
    chosen = campaign.named_targets(targets or [])
    run = campaign.fuzz_guided if guided.is_available() and not plain else campaign.fuzz
    with bar(f"{len(chosen)} parsers") as progress:
        result = run(chosen, 60 * minutes, seed, out, progress)
    if json_:
        print(json.dumps(result.as_dict()))
    else:
        console.print(_summary(result), highlight=False, markup=False, soft_wrap=True)
    if result.crashers:
        raise RunError(f"{len(result.crashers)} inputs are neither read nor refused clearly")


def _summary(result: FuzzResult) -> str:
    found = (
        f"{each.target}: {each.problem}\n  blocktrain fuzz --replay {shlex.quote(each.file)}"
        for each in result.crashers
    )
    total = f"{sum(result.tried.values()):,} inputs for {len(result.tried)} parsers"
    return "\n".join([*found, f"{total} in {result.seconds:.0f} s"])


def _replay(path: Path, json_: bool) -> None:
    from blocktrain.fuzzing.campaign import replay
    from blocktrain.terminal import console

    target, reading = replay(path)
    if json_:
        print(json.dumps({"target": target.name, "read": reading.read, "problem": reading.problem}))
    elif not reading.problem:
        console.print(f"{target.name}: {'read' if reading.read else 'refused'}, as it should be")
    if reading.problem:
        raise RunError(f"{target.name}: {reading.problem}") from reading.error


def chaos(
    *,
    minutes: Annotated[float, at_least(0.01, 24 * 60)] = 2.0,
    seed: Annotated[int, at_least(0, 2**31)] = 0,
    scale: Literal["tiny", "standard"] = "standard",
    undefended: Annotated[bool, Parameter(negative=())] = False,
    steps: Annotated[int | None, at_least(1, 10**9)] = None,
    data: str | None = None,
    out: Path | None = None,
    json_: Json = False,
) -> None:
    """Train while workers and coordinator are killed, the network breaks, and members lie.

    Real processes, real HTTP, real signals. Three runs: one without faults; one with all of them;
    the same undefended, as a control. Then every receipt is looked for in the ledger, every version
    is recomputed, and the losses are compared. What goes wrong is drawn from the seed before the
    run begins. The command fails if an acknowledged update is lost or counted twice, a version
    cannot be recomputed, a forged submission counts, or the run does not finish.

    Parameters
    ----------
    minutes
        How long faults are played in each of the two runs that have them. Both end soon after.
    seed
        Of all faults, attacks and forgeries, and of the model.
    scale
        tiny (width 16, 5 workers, to see it work) or standard (width 64, 10 workers).
    undefended
        Only the control.
    steps
        Of the run; by default about as many as this machine makes in that time.
    data
        Corpus; by default wikitext2 at standard scale, stdlib at tiny.
    out
        Folder for schedule, JSON, plot and the runs; by default results/chaos-SCALE-SEED.
    """
    from blocktrain.bench.chaos.chaos import ChaosOptions, problems, run_chaos
    from blocktrain.bench.commands import show
    from blocktrain.terminal import JobBars, console

    options = ChaosOptions(
        out or Path("results") / f"chaos-{scale}-{seed}",
        scale,
        source(data or ("wikitext2" if scale == "standard" else "stdlib")),
        seed,
        minutes,
        steps,
        undefended,
        cores(),
        command_line(),
    )
    with JobBars("chaos", 1 if undefended else 3) as bars:
        result = run_chaos(
            options, lambda name, share: bars.update(name.replace("_", "-"), {"share": share})
        )
    console.print(f"wrote {options.folder / 'chaos.json'}, schedule.json and chaos.png")
    show(result, json_)
    if found := problems(result):
        raise RunError("; ".join(found))
