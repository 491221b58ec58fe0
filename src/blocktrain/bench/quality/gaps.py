"""How the gap of every row moves with compute: several results of `bench quality` in one plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blocktrain.bench.machine import BenchResult
from blocktrain.config import Config, make_config
from blocktrain.errors import RunError
from blocktrain.runs.folder import read_json
from blocktrain.shapes import flops_per_token

SHOWN = (
    "single_block",
    "pool",
    "fuse",
    "fuse_equal_time",
    "fuse_equal_steps",
    "end_to_end_equal_time",
    "averaged_block",
    "averaged_end_to_end",
)
"""The rows of the plot. The JSON has all."""
NAME_HEIGHT = 10.0  # points


def read_gaps(folders: Sequence[Path]) -> list[BenchResult]:
    """One entry for each result, by the compute of its end-to-end row."""
    return sorted(map(_read, folders), key=lambda entry: float(entry["petaflop"]))


def _read(folder: Path) -> BenchResult:
    path = folder / "quality.json"
    if not path.is_file():
        raise RunError(f"{folder} has no quality.json: finish `blocktrain bench quality` there")
    try:
        result = read_json(path)
        config = make_config(result["settings"])
        gaps = {row["name"]: round(float(row["gap"]), 5) for row in result["rows"]}
        return {
            "folder": str(folder),
            "scale": str(result["scale"]),
            "steps": config.steps,
            "petaflop": float(f"{training_flops(config) / 1e15:.4g}"),
            "seeds": len(result["seeds"]),
            "gaps": gaps,
        }
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} is not a result of `blocktrain bench quality` ({error})") from None


def training_flops(config: Config) -> float:
    """Of the end-to-end model."""
    return flops_per_token(config, 0) * config.steps * config.batch * config.context


def plot_gaps(path: Path, entries: Sequence[BenchResult]) -> None:
    """Gap of each row over compute; below zero is better than end to end with equal steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    axes.axhline(0, color="#888", linewidth=1)
    labels: dict[tuple[tuple[float, float], ...], list[str]] = {}
    for name in SHOWN:
        points = tuple((e["petaflop"], e["gaps"][name]) for e in entries if name in e["gaps"])
        if points:  # rows that are one training share a line
            labels.setdefault(points, []).append(name)
    ends = []
    for points, names in labels.items():
        (line,) = axes.plot(*zip(*points, strict=True), "o-")
        ends.append((points[-1], " = ".join(names), line.get_color()))
    axes.set_xscale("log")
    ticks = [entry["petaflop"] for entry in entries]
    runs = [f"{e['scale']}\n{e['steps']:,} steps\n{e['petaflop']:.2g} PFLOP" for e in entries]
    axes.set_xticks(ticks, runs, fontsize=8)
    axes.minorticks_off()
    axes.margins(x=0.3)
    axes.set_ylabel("gap to end to end with equal steps, nats per token")
    axes.set_title("Gap by compute of the end-to-end row", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    _annotate(axes, ends)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _annotate(axes: Any, ends: Sequence[tuple[tuple[float, float], str, Any]]) -> None:
    """Name every line at its last point, and move names apart where lines end close together."""
    pixels_per_point = axes.figure.dpi / 72
    lowest: dict[float, float] = {}  # by column: the height at which the next name may stand
    for point, text, colour in sorted(ends, key=lambda end: end[0]):
        height = axes.transData.transform(point)[1] / pixels_per_point
        shift = max(0.0, lowest.get(point[0], height) - height)
        lowest[point[0]] = height + shift + NAME_HEIGHT
        axes.annotate(
            text,
            point,
            xytext=(7, shift),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=colour,
        )
