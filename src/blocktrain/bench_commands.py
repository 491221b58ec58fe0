"""The commands that measure serving: `bench serving` and `bench failover`. Parsing and printing only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from blocktrain.errors import ConfigError
from blocktrain.flags import Json, at_least
from blocktrain.places import command_line, cores, source


@dataclass(frozen=True)
class Distance:
    """Where the hosts of a bench are."""

    hosts: Annotated[int, at_least(2), Parameter(help="Hosts, the entry's among them.")] = 3
    rtt_ms: Annotated[str, Parameter(help="Round trips between hosts, one after another.")] = "1,20,80,150"
    mbit: Annotated[float, at_least(0), Parameter(help="Bandwidth of each host's line, in either direction.")] = 100.0

    def round_trips(self) -> tuple[float, ...]:
        """In milliseconds."""
        try:
            found = tuple(float(part) for part in self.rtt_ms.split(","))
        except ValueError:
            found = ()
        if not found or min(found) < 0:
            raise ConfigError(f"--rtt-ms {self.rtt_ms!r} is no list of milliseconds, for example 1,20,80,150")
        return found


@dataclass(frozen=True)
class Large:
    """A model in its logical shape only."""

    shape: Annotated[str, Parameter(help="Measure the logical shape of a model of so many parameters instead, for example 75.8B.")] = ""
    tokens: Annotated[int, at_least(2), Parameter(help="Bytes of output of --shape.")] = 32


def bench_serving(
    *,
    run: Path | None = None,
    distance: Annotated[Distance | None, Parameter(name="*")] = None,
    large: Annotated[Large | None, Parameter(name="*")] = None,
    scale: Literal["tiny", "standard"] = "standard",
    data: str | None = None,
    seed: int = 0,
    out: Path | None = None,
    json_: Json = False,
) -> None:
    """Text per second from several hosts, over lines of several lengths: every mode, the end-to-end model beside, as a table and a plot.

    Also: divergences of exact from autoregressive, software time of a hop, eight users at once, first byte of a long prompt.
    With --shape: a large model's logical shape as a ring, one traversal for all bytes against one for each.

    Parameters
    ----------
    run
        The run to serve; without one, a model of the scale is trained first, once.
    scale
        tiny (a minute, to see it work) or standard (width 128, 8 layers in 4 blocks, 1,200 steps: half an hour, training included).
    data
        Corpus; by default that of the run, else wikitext2 at standard scale and stdlib at tiny.
    out
        Folder for JSON, plot and model; by default results/serving-SCALE.
    """
    from blocktrain.bench import commands
    from blocktrain.bench.large import LargeOptions
    from blocktrain.bench.large import large as measure_large
    from blocktrain.bench.serving import ServingOptions
    from blocktrain.bench.serving_report import serving
    from blocktrain.bench.shaper import Link

    far, shape = distance or Distance(), large or Large()
    round_trips = far.round_trips()
    if shape.shape:
        link = Link(round_trips[-1] if distance and len(round_trips) == 1 else 80.0, mbit=far.mbit, seed=seed)
        folder = out or Path("results") / f"shape-{shape.shape}"
        commands.show(measure_large(LargeOptions(folder, shape.shape, shape.tokens, far.hosts, link, cores()), command_line()), json_)
        return
    folder = out or Path("results") / f"serving-{scale}"
    corpus = source(_corpus(run, data) or ("wikitext2" if scale == "standard" else "stdlib"))
    options = ServingOptions(folder, scale, corpus, far.hosts, round_trips, far.mbit, seed)
    commands.show(serving(options, run, command_line(), cores()), json_)


def bench_failover(
    *,
    kills: Annotated[int, at_least(0)] = 50,
    blackholes: Annotated[int, at_least(0)] = 10,
    run: Path | None = None,
    rtt_ms: Annotated[float, at_least(0)] = 20.0,
    scale: Literal["tiny", "standard"] = "standard",
    data: str | None = None,
    out: Path | None = None,
    json_: Json = False,
) -> None:
    """Kill stages, and black-hole their lines, in the middle of answers: how soon it is noticed, and whether the text is the same.

    Parameters
    ----------
    kills
        Answers during which a stage is killed with signal 9.
    blackholes
        Answers during which nothing passes a stage's line any more.
    run
        The run to serve; without one, a model of the scale is trained first, once.
    rtt_ms
        Round trip between hosts.
    scale
        Of the model that is trained.
    data
        Corpus; by default that of the run, else wikitext2 at standard scale and stdlib at tiny.
    out
        Folder for JSON and model; by default results/serving-SCALE.
    """
    from blocktrain.bench import commands
    from blocktrain.bench.failover import FailoverOptions, failover
    from blocktrain.bench.serving_report import trained
    from blocktrain.bench.shaper import Link

    folder = out or Path("results") / f"serving-{scale}"
    corpus = source(_corpus(run, data) or ("wikitext2" if scale == "standard" else "stdlib"))
    run = run or trained(folder / "model", scale, corpus, 0, cores())
    options = FailoverOptions(folder, run, corpus, kills, blackholes, Link(rtt_ms, mbit=100.0))
    commands.show(failover(options, command_line()), json_)


def _corpus(run: Path | None, data: str | None) -> str | None:
    """What is named, or what the run was trained on."""
    from blocktrain.learning.runs import open_run

    return data or (open_run(run)[2] if run else None)
