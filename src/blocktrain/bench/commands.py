"""The bench commands. A result begins with command, seed and machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blocktrain.bench import hardware as options_of
from blocktrain.bench.attacks import matrix as attack_matrix
from blocktrain.bench.corpus import CorpusOptions, measure_corpus
from blocktrain.bench.machine import BenchResult, header
from blocktrain.bench.memory import measure_memory
from blocktrain.bench.quality import quality as jobs_of
from blocktrain.bench.quality import table
from blocktrain.bench.quality import tune as tuning
from blocktrain.bench.quality.gaps import plot_gaps, read_gaps
from blocktrain.bench.quality.reading_jobs import reading_jobs
from blocktrain.bench.step import measure_step
from blocktrain.bench.transport.coordinator import SwarmOptions, measure_swarm
from blocktrain.bench.transport.coordinator import plot as plot_coordinator
from blocktrain.bench.transport.transfers import TransferOptions, measure_transfers
from blocktrain.bench.transport.transport import PAPER, TransportOptions, plot_transport, trials
from blocktrain.bench.transport.transport import measure as measure_transport
from blocktrain.config import Config, make_config
from blocktrain.errors import RunError
from blocktrain.learning.corpus.source import Source, training_text
from blocktrain.learning.corpus.token_corpus import unique_names
from blocktrain.learning.tokenizer import tokenizer_of
from blocktrain.learning.vocabulary import resolve
from blocktrain.processes import Job, run_jobs
from blocktrain.runs.folder import read_json, write_json, write_tokenizer
from blocktrain.terminal import JobBars, bar, console, rows_table, warn


@dataclass(frozen=True)
class QualityOptions:
    """Options of `bench quality`."""

    folder: Path
    scale: str
    source: Source
    seeds: tuple[int, ...]
    settings: dict[str, Any]
    slots: int
    command: str
    ours_only: bool = False
    """Leave out the rows that only the first seed has."""

    def config(self, seed: int) -> Config:
        """The scale's settings, overridden by the given ones."""
        config = make_config({**jobs_of.SCALES[self.scale], **self.settings, "seed": seed})
        return resolve(config, lambda: training_text(self.source), self.source.cache_dir)


def quality(options: QualityOptions) -> BenchResult:
    """All rows for all seeds; leaves quality.json and quality.png in the folder."""
    options.source.require_outside(options.folder)
    config = options.config(0)
    options.source.open(tokenizer_of(config)).require(config.context)
    setups: list[jobs_of.Setup] = []
    for seed in options.seeds:
        folder = options.folder / f"seed-{seed}"
        setup = jobs_of.Setup(
            folder,
            options.config(seed),
            options.source,
            jobs_of.VALID_LIMIT[options.scale],
            options.scale == "tiny",
            **jobs_of.ROWS[options.scale],
        )
        if setups or options.ours_only:
            setup = replace(setup, **jobs_of.OUR_ROWS)
        costs = jobs_of.cost_jobs(setup)  # refuses bad settings before anything is written
        _same_settings(folder, setup.base, options.source)
        _run(costs, options.slots, f"costs of seed {seed}")
        _run(jobs_of.jobs(setup), options.slots, f"seed {seed}")
        jobs_of.clear_versions(setup)
        setups.append(setup)
    seeds = [table.seed_rows(setup) for setup in setups]
    result = _quality_result(options, seeds)
    write_json(options.folder / "quality.json", result)
    table.plot(
        options.folder / "quality.png",
        result["rows"],
        _title(result),
        seeds[0]["leakage"],
    )
    console.print(f"wrote {options.folder / 'quality.json'} and quality.png")
    return result


def readings(options: QualityOptions, names: tuple[str, ...]) -> BenchResult:
    """Readings of the paper for all seeds; leaves readings.json and readings.png in the folder."""
    options.source.require_outside(options.folder)
    config = options.config(0)
    options.source.open(tokenizer_of(config)).require(config.context)
    limit = jobs_of.VALID_LIMIT[options.scale]
    setups = []
    for seed in options.seeds:
        folder = options.folder / f"seed-{seed}"
        setup = jobs_of.Setup(folder, options.config(seed), options.source, limit, False, names)
        jobs = reading_jobs(setup)
        _same_settings(folder, setup.base, options.source)
        _run(jobs, options.slots, f"seed {seed}")
        setups.append(setup)
    result = _quality_result(options, [table.reading_rows(setup) for setup in setups])
    title = f"readings of the paper, {_title(result)}"
    write_json(options.folder / "readings.json", result)
    table.plot(options.folder / "readings.png", result["rows"], title)
    console.print(f"wrote {options.folder / 'readings.json'} and readings.png")
    return result


def _quality_result(options: QualityOptions, seeds: list[dict[str, Any]]) -> BenchResult:
    """The figures of all seeds and their means, with what they were measured on."""
    config, limit = options.config(options.seeds[0]), jobs_of.VALID_LIMIT[options.scale]
    corpus = options.source.open(tokenizer_of(config))
    return {
        **header(options.command, options.seeds[0]),
        "scale": options.scale,
        "data": corpus.name,
        "valid_tokens": min(len(corpus.valid), limit or len(corpus.valid)),
        "seeds": list(options.seeds),
        "settings": config.model_dump(),
        "rows": table.mean_rows(seeds),
        "per_seed": [
            {"seed": s, **figures} for s, figures in zip(options.seeds, seeds, strict=True)
        ],
    }


def _title(result: BenchResult) -> str:
    return f"{result['scale']}, {result['data']}, {len(result['seeds'])} seed(s)"


def tune(options: QualityOptions) -> BenchResult:
    """The learning-rate grid of one seed; leaves tune.json in the folder."""
    seed = options.seeds[0]
    folder = options.folder / f"tune-{seed}"
    config = options.config(seed).replace(compose="fuse", objective="next")
    options.source.require_outside(options.folder)
    options.source.open(tokenizer_of(config)).require(config.context)
    _same_settings(folder, config, options.source)
    _run(tuning.block_jobs(folder, config, options.source), options.slots, "tuning")
    _run(tuning.fusion_jobs(folder, config, options.source), options.slots, "tuning fusion")
    result = {
        **header(options.command, seed),
        "scale": options.scale,
        "judged_on": "calibration slice",
        "rows": tuning.table(folder),
    }
    write_json(options.folder / "tune.json", result)
    return result


def attacks(options: attack_matrix.MatrixOptions) -> BenchResult:
    """All runs of the matrix; leaves attacks.json and attacks.png in the folder."""
    options.source.require_outside(options.folder)
    config = options.config(options.seed)
    options.source.open(tokenizer_of(config)).require(config.context)
    _same_settings(options.folder, config, options.source)
    _run(attack_matrix.jobs(options), options.slots, "attacks")
    result = {
        **header(options.command, options.seed),
        "scale": options.scale,
        "data": options.source.name,
        "runs": options.runs,
        "members": options.sizes.members,
        "settings": config.model_dump(),
        **attack_matrix.matrix(options),
    }
    write_json(options.folder / "attacks.json", result)
    attack_matrix.plot(options.folder / "attacks.png", result)
    console.print(f"wrote {options.folder / 'attacks.json'} and attacks.png")
    return result


def gaps(folders: Sequence[Path], path: Path, command: str) -> BenchResult:
    """See `bench.quality.gaps`; writes a plot."""
    entries = read_gaps(folders)
    path.parent.mkdir(parents=True, exist_ok=True)
    plot_gaps(path, entries)
    console.print(f"wrote {path}")
    names = dict.fromkeys(name for entry in entries for name in entry["gaps"])
    titles = unique_names([f"{entry['scale']} {entry['steps']}" for entry in entries])
    columns = dict(zip(titles, (entry["gaps"] for entry in entries), strict=True))
    rows = [
        {"name": name, **{column: found.get(name) for column, found in columns.items()}}
        for name in names
    ]
    return {**header(command, 0), "rows": rows, "results": entries}


def memory(command: str, seed: int, settings: dict[str, Any]) -> BenchResult:
    """See `bench.memory`."""
    with bar("measuring memory") as progress:
        result = measure_memory(settings=settings, seed=seed, progress=progress)
        return {**header(command, seed), **result}


def step(command: str, seed: int, repeats: int) -> BenchResult:
    """See `bench.step`."""
    with bar("measuring steps") as progress:
        return {
            **header(command, seed),
            **measure_step(repeats=repeats, seed=seed, progress=progress),
        }


def hardware(command: str, seed: int) -> BenchResult:
    """See `bench.hardware`. An option that fails here, as bfloat16 on some processors, is named."""
    base = options_of.BASE.replace(seed=seed)
    names = {f"{kind}, {o}": (o, kind) for kind in ("one", "fusion") for o in options_of.OPTIONS}
    jobs = [
        Job(name, options_of.measure_row, (base, option, kind))
        for name, (option, kind) in names.items()
    ]
    rows: dict[str, dict[str, Any]] = {}
    with JobBars("options", len(jobs)) as bars:

        def on_message(name: str, message: dict[str, Any]) -> None:
            if "row" in message:
                rows[name] = message["row"]
            bars.update(name, message)

        again, never = "call the same command again", lambda: False
        run_jobs(jobs, 1, on_message, again, never, lambda name, why: warn(f"{name}: {why}"))
    shape = ("layers_per_block", "width", "context", "batch", "blocks")
    return {
        **header(command, seed),
        **{name: getattr(base, name) for name in shape},
        "threads": 1,
        "rows": [rows[name] for name in names if name in rows],
    }


def transport(options: TransportOptions, command: str) -> BenchResult:
    """See `bench.transport`; leaves transport.json and transport.png in the folder."""
    options.source.require_outside(options.folder)
    config = options.config(0)
    options.source.open(tokenizer_of(config)).require(config.context)
    with JobBars("transport", trials(options)) as bars:
        figures = measure_transport(options, bars.update)
    result = {
        **header(command, options.seeds[0]),
        "scale": options.scale,
        "data": options.source.name,
        "valid_bytes": options.sizes.valid_bytes,
        **figures,
        "paper": {part: PAPER[part] for part in (*options.parts, "differs")},
    }
    write_json(options.folder / "transport.json", result)
    has_plot = plot_transport(options.folder / "transport.png", result)
    console.print(
        f"wrote {options.folder / 'transport.json'}{' and transport.png' if has_plot else ''}"
    )
    return result


def coordinator(
    swarm: SwarmOptions, transfers: TransferOptions, folder: Path, command: str
) -> BenchResult:
    """See `transport.coordinator` and `transport.transfers`; writes JSON and plot to the folder."""
    with bar(f"{swarm.workers} workers") as progress:
        figures = measure_swarm(swarm, progress)
    with bar("large transfers") as progress:
        result = {
            **header(command, swarm.seed),
            **figures,
            **measure_transfers(transfers, progress),
        }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "coordinator.json", result)
    plot_coordinator(folder / "coordinator.png", result)
    console.print(f"wrote {folder / 'coordinator.json'} and coordinator.png")
    return result


def corpus(options: CorpusOptions, command: str) -> BenchResult:
    """See `bench.corpus`; writes JSON to the folder."""
    with bar(f"{options.gigabytes:g} GB of text") as progress:
        result = {**header(command, options.seed), **measure_corpus(options, progress)}
    write_json(options.folder / "corpus.json", result)
    console.print(f"wrote {options.folder / 'corpus.json'}")
    return result


def show(result: BenchResult, as_json: bool) -> None:
    """JSON on stdout, or the rows as a table and the rest as lines."""
    if as_json:
        print(json.dumps(result))
        return
    machine = result["machine"]
    console.print(
        f"[dim]{result['command']}   {machine['cpu']}, {machine['cores']} cores[/]",
        highlight=False,
    )
    rows = result.get("rows") or [
        {"call": name, **figures} for name, figures in result.get("calls", {}).items()
    ]
    if rows:
        console.print(rows_table("", [_flat(row) for row in rows]))
    for key, value in result.items():
        if isinstance(value, int | float | str) and key not in ("command", "seed"):
            console.print(f"{key}: {value}")


def _flat(row: BenchResult) -> BenchResult:
    return {key: value for key, value in row.items() if not isinstance(value, dict | list)}


def _run(jobs: list[Job], slots: int, title: str) -> None:
    with JobBars(title, len(jobs)) as bars:
        run_jobs(jobs, slots, bars.update, "call the same command again to continue")


def _same_settings(folder: Path, config: Config, source: Source) -> None:
    """A bench folder belongs to one setup: results of another must not be mixed in."""
    folder.mkdir(parents=True, exist_ok=True)
    marker, setup = (
        folder / "setup.json",
        {
            "fingerprint": config.fingerprint,
            "data": source.spec,
            "text": source.open(tokenizer_of(config)).index.hash,
        },
    )
    if not marker.exists():
        write_tokenizer(folder, config)
        write_json(marker, setup)
    elif read_json(marker) != setup:
        raise RunError(
            f"{folder} holds results of other settings or another text; "
            "name another folder with --out, or remove it"
        )
