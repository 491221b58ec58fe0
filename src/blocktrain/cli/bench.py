"""Commands that measure: `blocktrain bench ...`. The figures are made in `bench`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from blocktrain.cli.environment import command_line, cores, source
from blocktrain.cli.flags import Json, Varied, at_least, named_settings
from blocktrain.errors import ConfigError


@dataclass(frozen=True)
class RowFlags:
    """Which models `quality` trains."""

    rows: Annotated[
        Literal["all", "ours"],
        Parameter(
            help="all, or ours: only end to end, single blocks, pool and fusion, which is a third "
            "of the time. Seeds after the first have only these in any case."
        ),
    ] = "all"
    tune: Annotated[
        bool,
        Parameter(
            negative=(),
            help="Instead, find the learning rates of reference, blocks and fusion on one grid, by "
            "the loss on the calibration slice.",
        ),
    ] = False
    readings: Annotated[
        list[str] | None,
        Parameter(
            consume_multiple=True,
            negative=(),
            help="Instead, the paper read in every way that its text allows (all, or some by "
            "name), each beside end to end of as many layers: where the path starts, the noise "
            "levels, the depth of a block, and what blocks train on. All take about two hours a "
            "seed at scale standard. What the bench without it has trained in the same folder is "
            "taken from there.",
        ),
    ] = None


def quality(
    *,
    scale: Literal["tiny", "standard", "small", "large"] = "standard",
    data: str | None = None,
    seed: Annotated[list[int], Parameter(consume_multiple=True)] | None = None,
    trained: Annotated[RowFlags | None, Parameter(name="*")] = None,
    out: Path | None = None,
    settings: Varied = None,
    json_: Json = False,
) -> None:
    """Cross entropy of the paper's composition, ours, single blocks and the end-to-end model.

    At equal steps and at equal training time, beside what as many machines could do by averaging
    one model. All from one run, as a table and a plot. Several seeds give means and spreads. An
    interrupted bench continues where it stopped when called again.

    Parameters
    ----------
    scale
        tiny (a minute or two, to see it work), standard (bytes, width 128, 8 layers in 4 blocks,
        1,200 steps: about an hour on 2 cores, 20 minutes for each further seed), large (width 192,
        12 layers in 4 blocks, 1,600 steps: four times the compute of standard) or small (tokens of
        bpe:4096, about 10 million parameters, context 256: hours). The last two have no rows of the
        paper.
    data
        Corpus; by default wikitext2, and stdlib at tiny scale.
    seed
        One or more seeds, e.g. --seed 0 1 2.
    out
        Folder for weights, JSON and plot; by default results/quality-SCALE-CORPUS.
    """
    from blocktrain.bench import commands
    from blocktrain.bench.quality.readings import require_readings

    trained = trained or RowFlags()
    if trained.tune and trained.readings:
        raise ConfigError("--tune and --readings are two benches: call one after the other")
    seeds = tuple(seed or [0])
    if twice := [n for n in set(seeds) if seeds.count(n) > 1]:
        raise ConfigError(
            f"seed {twice[0]} is named twice: means and spreads are of different seeds"
        )
    data = ("stdlib" if scale == "tiny" else "wikitext2") if data is None else data
    folder = out or Path("results") / f"quality-{scale}-{Path(data).stem}"
    options = commands.QualityOptions(
        folder,
        scale,
        source(data),
        seeds,
        named_settings(settings),
        cores(),
        command_line(),
        ours_only=trained.rows == "ours",
    )
    if trained.readings:
        result = commands.readings(options, require_readings(trained.readings))
    else:
        result = commands.tune(options) if trained.tune else commands.quality(options)
    commands.show(result, json_)


def attacks(
    *,
    scale: Literal["tiny", "standard"] = "tiny",
    attacks: Annotated[list[str] | None, Parameter(consume_multiple=True, negative=())] = None,
    shares: Annotated[list[int] | None, Parameter(consume_multiple=True, negative=())] = None,
    runs: Annotated[int, at_least(1, 100)] = 4,
    data: str | None = None,
    seed: int = 0,
    out: Path | None = None,
    json_: Json = False,
) -> None:
    """What members that attack do to a model: each attack by each share of the members.

    Ten members train one block in rounds, with the coordinator's own rounds, judgement, merge and
    standings, in one process. Each run is compared with a clean one, in which as many honest
    members read the same batches, and with the same attack on a run without defences. An
    interrupted bench continues where it stopped when called again.

    Parameters
    ----------
    scale
        tiny (width 32, 20 rounds of 8 steps: 10 s a run) or standard (width 64, rounds of 32 steps:
        a minute a run).
    attacks
        Only these, by name; by default all.
    shares
        Attackers among the members in percent; by default 10 25 40.
    runs
        Of each cell, with seeds from --seed on.
    data
        Corpus; by default wikitext2 at standard scale, stdlib at tiny.
    out
        Folder for results, JSON and plot; by default results/attacks-SCALE-CORPUS.
    """
    from blocktrain.bench import commands
    from blocktrain.bench.attacks.matrix import SCALES, MatrixOptions, require_attacks

    if wrong := [share for share in shares or () if not 1 <= share <= 90]:
        raise ConfigError(f"--shares {wrong[0]}: a share is 1 to 90 percent of the members")
    data = data or ("wikitext2" if scale == "standard" else "stdlib")
    options = MatrixOptions(
        out or Path("results") / f"attacks-{scale}-{Path(data).stem}",
        scale,
        SCALES[scale],
        source(data),
        require_attacks(attacks or []),
        tuple(dict.fromkeys(shares or (10, 25, 40))),
        runs,
        seed,
        cores(),
        command_line(),
    )
    commands.show(commands.attacks(options), json_)


def gaps(*folders: Path, out: Path | None = None, json_: Json = False) -> None:
    """How the gap of every row to end to end moves with compute, as a table and a plot.

    For example `blocktrain bench gaps results/quality-standard-wikitext2 results/longer`, where the
    second is from `blocktrain bench quality --steps 2400 --out results/longer`.

    Parameters
    ----------
    folders
        Of finished calls of `blocktrain bench quality`.
    out
        The plot; by default results/gaps.png.
    """
    from blocktrain.bench import commands

    if not folders:
        raise ConfigError("name the folders of finished calls of `blocktrain bench quality`")
    commands.show(commands.gaps(folders, out or Path("results/gaps.png"), command_line()), json_)


def memory(
    *,
    tokenizer: str = "bytes",
    embedding: Literal["auto", "full", "shared"] = "auto",
    seed: int = 0,
    json_: Json = False,
) -> None:
    """Memory of one worker against the end-to-end trainer, for 2 to 16 blocks.

    Bytes of the optimizer, of the gradients and of the saved activations; and how many parameters
    are in tables of the vocabulary.

    Parameters
    ----------
    tokenizer
        bytes, or bpe:N for any vocabulary of N tokens.
    embedding
        As in train: whether one table of the vocabulary serves all purposes.
    """
    from blocktrain.bench import commands

    settings = {"tokenizer": tokenizer, "embedding": embedding}
    commands.show(commands.memory(command_line(), seed, settings), json_)


def step(
    *,
    repeats: Annotated[int, at_least(1)] = 200,
    seed: int = 0,
    json_: Json = False,
) -> None:
    """Time of a worker's training step against a bare loop.

    Both have the same layers, loss and optimizer; their steps are interleaved.

    Parameters
    ----------
    repeats
        Steps of each kind; the ratio is the median over adjacent pairs.
    """
    from blocktrain.bench import commands

    commands.show(commands.step(command_line(), seed, repeats), json_)


def hardware(*, seed: int = 0, json_: Json = False) -> None:
    """Memory and time of a step with each hardware option, and what it changes in the loss.

    Micro-batches, checkpointed activations, bfloat16 and torch.compile, for an independent block
    and for the fusion block.
    """
    from blocktrain.bench import commands

    commands.show(commands.hardware(command_line(), seed), json_)


@dataclass(frozen=True)
class LinkFlags:
    """The links to the workers of a bench."""

    hosts: Annotated[
        int, at_least(1), Parameter(help="Distant hosts, each behind a link of its own.")
    ] = 3
    rtt_ms: Annotated[float, at_least(0), Parameter(help="Round trip of each link in ms.")] = 80.0
    mbit: Annotated[
        float, at_least(0), Parameter(help="Bandwidth of each link in Mbit/s, each way.")
    ] = 100.0


def transport(
    *,
    scale: Literal["tiny", "standard"] = "standard",
    part: Annotated[
        list[Literal["replay", "workers", "hosts", "ladder", "outer", "participation"]],
        Parameter(consume_multiple=True),
    ]
    | None = None,
    distance: Annotated[LinkFlags | None, Parameter(name="*")] = None,
    data: str | None = None,
    seed: int = 0,
    out: Path | None = None,
    json_: Json = False,
) -> None:
    """Runs over HTTP: by six workers, from distant hosts, with smaller updates, with outer steps.

    One run is replayed to the same hashes. An interrupted bench continues with the first run that
    is not done when called again.

    Parameters
    ----------
    scale
        tiny (a few minutes, to see it work) or standard (up to an hour a part on 2 cores).
    part
        One or more parts instead of all: replay, workers, hosts, ladder, outer, participation.
    data
        Corpus; by default wikitext2 at standard scale, stdlib at tiny.
    seed
        The first seed; the ladder takes the next two as well.
    out
        Folder for results and plot; by default results/transport-SCALE-CORPUS.
    """
    from blocktrain.bench import commands
    from blocktrain.bench.network.shaper import Link
    from blocktrain.bench.transport.transport import PARTS, TransportOptions

    data = data or ("wikitext2" if scale == "standard" else "stdlib")
    folder = out or Path("results") / f"transport-{scale}-{Path(data).stem}"
    far = distance or LinkFlags()
    seeds = (seed, seed + 1, seed + 2)
    link = Link(far.rtt_ms, mbit=far.mbit, seed=seed)
    options = TransportOptions(
        folder, scale, source(data), tuple(part or PARTS), seeds, far.hosts, link
    )
    commands.show(commands.transport(options, command_line()), json_)


def coordinator(
    *,
    workers: Annotated[int, at_least(1)] = 1000,
    seconds: Annotated[float, at_least(1)] = 60.0,
    megabytes: Annotated[float, at_least(1)] = 100.0,
    seed: int = 0,
    out: Path | None = None,
    json_: Json = False,
) -> None:
    """How many workers one coordinator can serve: seconds of each call, errors, memory.

    The workers are simulated, on loopback: a heartbeat every 10 s, a task about every minute; every
    10 s one in a hundred leaves and joins again. Then large transfers, compared with raw TCP.

    Parameters
    ----------
    workers
        How many at a time; they join over the time of a task.
    seconds
        How long to measure with all of them; below 60 they call more often, so that every call is
        made.
    megabytes
        Size of the update that is uploaded and of the corpus that is downloaded, on loopback and
        over 200 Mbit/s with 80 ms.
    out
        Folder for JSON and plot; by default results/coordinator.
    """
    from blocktrain.bench import commands
    from blocktrain.bench.transport.coordinator import SwarmOptions
    from blocktrain.bench.transport.transfers import TransferOptions

    swarm, transfers = SwarmOptions(workers, seconds, seed), TransferOptions(megabytes, seed)
    commands.show(
        commands.coordinator(swarm, transfers, out or Path("results/coordinator"), command_line()),
        json_,
    )


def corpus(
    *,
    gigabytes: Annotated[float, at_least(0.001)] = 4.0,
    tokenizer: str = "bytes",
    seed: int = 0,
    out: Path | None = None,
    json_: Json = False,
) -> None:
    """A corpus that is larger than memory: tokenizing, start, memory, and what a worker fetches.

    The text is generated. Everything is measured at a quarter of the size, too, so that growth can
    be seen. Tokenizing and fetching are killed in the middle, and their hashes are compared.

    Parameters
    ----------
    gigabytes
        Of text. The disk needs about three times as much; all of it is removed at the end.
    tokenizer
        bytes or bpe:N.
    out
        Folder for the text, the shards and the result; by default results/corpus.
    """
    from blocktrain.bench import commands
    from blocktrain.bench.corpus import CorpusOptions

    options = CorpusOptions(out or Path("results/corpus"), gigabytes, tokenizer, seed)
    commands.show(commands.corpus(options, command_line()), json_)


@dataclass(frozen=True)
class HostFlags:
    """The hosts that serve, and the links between them."""

    hosts: Annotated[int, at_least(2), Parameter(help="Hosts, the entry's among them.")] = 3
    rtt_ms: Annotated[str, Parameter(help="Round trips between hosts in ms; each is measured.")] = (
        "1,20,80,150"
    )
    mbit: Annotated[
        float, at_least(0), Parameter(help="Bandwidth of each host's link in Mbit/s, each way.")
    ] = 100.0

    def round_trips(self) -> tuple[float, ...]:
        try:
            times = tuple(float(part) for part in self.rtt_ms.split(","))
        except ValueError:
            times = ()
        if not times or min(times) < 0:
            raise ConfigError(
                f"--rtt-ms {self.rtt_ms!r} is not a list of milliseconds, for example 1,20,80,150"
            )
        return times


@dataclass(frozen=True)
class ShapeFlags:
    """Flags of `serving` for the logical shape of a large model."""

    shape: Annotated[
        str,
        Parameter(
            help="Instead, measure the logical shape of a model with this many parameters, "
            "for example 75.8B."
        ),
    ] = ""
    tokens: Annotated[int, at_least(2), Parameter(help="Tokens of output of --shape.")] = 32


def serving(
    *,
    run: Path | None = None,
    distance: Annotated[HostFlags | None, Parameter(name="*")] = None,
    large: Annotated[ShapeFlags | None, Parameter(name="*")] = None,
    scale: Literal["tiny", "standard"] = "standard",
    data: str | None = None,
    seed: int = 0,
    out: Path | None = None,
    json_: Json = False,
) -> None:
    """Text per second from several hosts, over links of several delays, as a table and a plot.

    Every mode, and the end-to-end model. Also: where exact differs from autoregressive, the
    software time of a hop, eight users at once, the first byte after a long prompt. With --shape:
    the logical shape of a large model as a ring, one traversal for all tokens against one for each.

    Parameters
    ----------
    run
        The run to serve; without one, a model of the scale is trained first, once.
    scale
        tiny (a minute, to see it work) or standard (width 128, 8 layers in 4 blocks, 1,200 steps:
        half an hour, training included).
    data
        Corpus; by default that of the run, else wikitext2 at standard scale and stdlib at tiny.
    out
        Folder for JSON, plot and model; by default results/serving-SCALE.
    """
    from blocktrain.bench import commands
    from blocktrain.bench.network.shaper import Link
    from blocktrain.bench.serving.large import LargeOptions
    from blocktrain.bench.serving.large import large as measure_large
    from blocktrain.bench.serving.report import serving as measure_serving
    from blocktrain.bench.serving.serving import ServingOptions

    far, shape = distance or HostFlags(), large or ShapeFlags()
    round_trips = far.round_trips()
    if shape.shape:
        link = Link(
            round_trips[-1] if distance and len(round_trips) == 1 else 80.0,
            mbit=far.mbit,
            seed=seed,
        )
        folder = out or Path("results") / f"shape-{shape.shape}"
        commands.show(
            measure_large(
                LargeOptions(folder, shape.shape, shape.tokens, far.hosts, link, cores()),
                command_line(),
            ),
            json_,
        )
        return
    folder = out or Path("results") / f"serving-{scale}"
    corpus = source(_corpus(run, data) or ("wikitext2" if scale == "standard" else "stdlib"))
    options = ServingOptions(folder, scale, corpus, far.hosts, round_trips, far.mbit, seed)
    commands.show(measure_serving(options, run, command_line(), cores()), json_)


def failover(
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
    """Kill stages, or cut their links, in the middle of answers.

    Measures how soon that is noticed, and whether the text stays the same.

    Parameters
    ----------
    kills
        Answers during which a stage is killed with signal 9.
    blackholes
        Answers during which a stage's link drops everything.
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
    from blocktrain.bench.network.shaper import Link
    from blocktrain.bench.serving.failover import FailoverOptions
    from blocktrain.bench.serving.failover import failover as measure_failover
    from blocktrain.bench.serving.report import train_run

    folder = out or Path("results") / f"serving-{scale}"
    corpus = source(_corpus(run, data) or ("wikitext2" if scale == "standard" else "stdlib"))
    run = run or train_run(folder / "model", scale, corpus, 0, cores())
    options = FailoverOptions(folder, run, corpus, kills, blackholes, Link(rtt_ms, mbit=100.0))
    commands.show(measure_failover(options, command_line()), json_)


def _corpus(run: Path | None, data: str | None) -> str | None:
    """The corpus that is named, or the one that the run was trained on."""
    from blocktrain.runs.folder import read_manifest

    return read_manifest(run).data if data is None and run else data
