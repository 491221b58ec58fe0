"""`bench serving` from a run, which it trains if it must, to its JSON and its plot."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from blocktrain.bench.machine import BenchResult, header
from blocktrain.bench.quality.quality import SCALES
from blocktrain.bench.serving.answers import Way
from blocktrain.bench.serving.first_byte import measure_first_byte
from blocktrain.bench.serving.serving import PARTS, ServingOptions, Subject, measure_serving
from blocktrain.config import make_config
from blocktrain.errors import RunError
from blocktrain.learning.corpus.source import Source
from blocktrain.learning.threads import limited_threads
from blocktrain.learning.tokenizer import tokenizer_of
from blocktrain.runs.folder import create_run, open_run, write_json
from blocktrain.runs.local import train_blocks
from blocktrain.runs.reference import TrainingPlan
from blocktrain.runs.results import fit_and_seal
from blocktrain.terminal import JobBars, StepBars, console

FIRST_BYTE_MS = 80.0
COLORS = {"autoregressive": "#999999", "sweep": "#0072b2", "exact": "#d55e00"}
MARKS = {"fan": "o", "ring": "s", "star": "*"}


def serving(options: ServingOptions, run: Path | None, command: str, slots: int) -> BenchResult:
    """See `serving.serving`; writes JSON, plot, and the model if none was given, to the folder."""
    options.folder.mkdir(parents=True, exist_ok=True)
    subject = Subject(
        options,
        run
        or train_run(options.folder / "model", options.scale, options.source, options.seed, slots),
    )
    with JobBars("serving", len(options.rtt_ms) + PARTS) as bars:
        link = options.link(FIRST_BYTE_MS if options.scale == "standard" else options.rtt_ms[0])
        report = partial(_share, bars, "first bytes")
        first = measure_first_byte(
            options.folder / "untrained", options.scale, link, options.sizes.first_bytes, report
        )
        figures = measure_serving(subject, bars.update)
    result = {
        **header(command, options.seed),
        "scale": options.scale,
        "data": options.source.name,
        "hosts": options.hosts,
        "mbit": options.mbit,
        "prompt_bytes": subject.prompt,
        "output_bytes": subject.output,
        "temperature": 1.0,
        "settings": subject.config.model_dump(),
        "blocks_of_hosts": {
            "fan": [[1, "readout"], *map(list, subject.fan_groups)],
            "reference": list(map(list, subject.ring_groups)),
        },
        **figures,
        **first,
    }
    write_json(options.folder / "serving.json", result)
    plot(options.folder / "serving.png", result)
    console.print(f"wrote {options.folder / 'serving.json'} and serving.png")
    return result


def _share(bars: JobBars, name: str, share: float) -> None:
    bars.update(name, {"share": share})


def train_run(folder: Path, scale: str, source: Source, seed: int, slots: int) -> Path:
    """The run of a scale with its reference, trained once. Continues an interrupted training."""
    config = make_config({**SCALES[scale], "compose": "fuse", "seed": seed})
    if folder.exists():
        before = open_run(folder)
        run = before.run
        if (before.config, before.data) != (config, source.spec):
            raise RunError(
                f"{folder} holds another model; "
                f"name another folder with --out, or serve it with --run {folder}"
            )
    else:
        run = create_run(folder, config, source.spec, reference=True)
    if not (run.model / "config.json").exists():
        plan = TrainingPlan(run, config, source, reference=True, slots=slots)
        with StepBars(config.steps_of) as bars:
            train_blocks(plan, bars.show)
        with limited_threads():
            fit_and_seal(run, config, source.spec, source.open(tokenizer_of(config)).calibration)
    return folder


def plot(path: Path, result: BenchResult) -> None:
    """Bytes per second over the round trip, a line for every way to write."""
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    for way, rows in _by_way(result["rows"]).items():
        strength = (
            {1: 1.0, 2: 0.7, 4: 0.5, 8: 0.35}.get(way.sweeps, 1.0) if way.mode == "sweep" else 1.0
        )
        reach = [row["rtt_ms"] for row in rows]
        axes.plot(
            reach,
            [row["bytes_per_s"] for row in rows],
            color=COLORS[way.mode],
            marker=MARKS[way.topology],
            alpha=strength,
            label=way.name,
        )
        if all(row["predicted"] for row in rows):
            axes.plot(
                reach,
                [row["predicted"] for row in rows],
                color=COLORS[way.mode],
                alpha=0.4 * strength,
                linestyle=":",
                linewidth=1,
            )
    axes.set(
        xscale="log", yscale="log", xlabel="round trip (ms)", ylabel="bytes of text per second"
    )
    axes.set_title(
        f"{result['hosts']} hosts, {result['mbit']:g} Mbit lines; dotted: predicted", fontsize=10
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=130)


def _by_way(rows: Sequence[BenchResult]) -> dict[Way, list[BenchResult]]:
    groups: dict[Way, list[BenchResult]] = {}
    for row in rows:
        way = Way(
            row["model"],
            row["topology"],
            row["mode"],
            row["sweeps"] if row["mode"] == "sweep" else 1,
        )
        groups.setdefault(way, []).append(row)
    return groups
