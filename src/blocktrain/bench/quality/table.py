"""The rows of `bench quality`: a table of the jobs' results, means over seeds, and a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from blocktrain.bench.quality.quality import (
    AVERAGED,
    LEAKAGE_SIGMAS,
    Setup,
    leakage_variant,
    results,
    twin,
)
from blocktrain.bench.quality.reading_jobs import depths, plain_name, plain_variant
from blocktrain.bench.quality.readings import CURVES, READINGS
from blocktrain.bench.quality.replicas import TASK_STEPS
from blocktrain.config import Config
from blocktrain.coordinator.policy import Policy
from blocktrain.footprint import PROCESS, training_footprint
from blocktrain.learning.compose import build_block
from blocktrain.learning.model import build_reference
from blocktrain.learning.shards import CorpusIndex, SequenceOrder
from blocktrain.learning.train import REFERENCE
from blocktrain.runs.folder import block_name
from blocktrain.runs.plan import plan_block

Row = dict[str, Any]
PAPER_ROWS = (
    ("paper", "paper", "euler"),
    ("exact_euler", "exact", "euler"),
    ("exact_marginal", "exact", "marginal"),
    ("exact_pool", "exact", "pool"),
)
OTHER_ROWS = (
    ("fuse_equal_steps", "long_fusion", "fuse"),
    ("fuse_same_data", "same", "fuse"),
    ("fuse_beside", "beside", "fuse"),
)


def seed_rows(setup: Setup) -> dict[str, Any]:
    """All rows of one finished seed, and what does not fit into rows."""
    by_job = results(setup)
    ces = {variant: by_job[f"evaluate-{variant}"]["ce"] for variant in setup.variants}
    fuse, pool = ces["fuse"], ces["pool"]
    blocks = [pool[f"block_{n}"] for n in range(1, setup.base.blocks + 1)]
    best = blocks.index(min(blocks)) + 1
    row = partial(_row, setup, by_job, setup.corpus().index)
    rows = [
        row("end_to_end", by_job["evaluate-fuse"]["reference"], "fuse", [REFERENCE]),
        row("single_block", statistics.mean(blocks), "pool", [1]),
        row("best_block", min(blocks), "pool", [best]),
        *(
            row(name, ces[variant][key], variant)
            for name, variant, key in PAPER_ROWS
            if variant in ces
        ),
        row("pool", pool["pool"], "pool"),
        row("fuse", fuse["fuse"], "fuse"),
        *(row(name, ce, "fuse") for name, ce in fuse.items() if name.startswith("fuse_without_")),
        *(row(name, ces[v][key], v) for name, v, key in OTHER_ROWS if v in ces),
    ]
    rows += [*_equal_time_rows(setup, by_job, rows, row), *_averaged_rows(setup, by_job, row)]
    for entry in rows:
        entry["gap"] = entry["valid_ce"] - rows[0]["valid_ce"]
    return {
        "rows": rows,
        "blocks": blocks,
        "pool_of_fuse": fuse["pool"],
        "after_block": {
            name: [ces[name][f"euler_{n}"] for n in range(1, setup.base.blocks + 1)]
            for name in ("paper", "exact")
            if name in ces
        },
        "samples": by_job["samples"]["rows"],
        "leakage": _leakage(setup, by_job),
    }


def reading_rows(setup: Setup) -> dict[str, Any]:
    """The readings of the paper on one seed, each against end to end of as many layers.

    `first_block` is the path after one block: where it is lower, the others only do harm.
    """
    by_job = results(setup)
    make = partial(_reading_row, setup, by_job, bytes_per_token(setup.corpus().index))
    rows: list[Row] = []
    readings = {name: READINGS[name] for name in setup.variants}
    for deep in depths(setup):
        variant, suffix = plain_variant(deep), "_deep" if deep else ""
        against, block = (by_job[f"alone-{plain_name(deep, i)}"]["ce"] for i in (REFERENCE, 1))
        group = [
            make(f"end_to_end{suffix}", against, variant, [REFERENCE]),
            make(f"single_block{suffix}", block, variant, [1]),
        ]
        for name, reading in readings.items():
            for start in reading.starts if reading.deep == deep else ():
                ce = by_job[f"path-{name}"][start]
                row = make(f"{name}_{start}", ce["euler"], name)
                group.append(row | {"first_block": ce["euler_1"], "pooled": ce["pooled"]})
        rows += [
            row | {"gap": row["valid_ce"] - against, "against": f"end_to_end{suffix}"}
            for row in group
        ]
    return {
        "rows": rows,
        "after_block": {
            f"{name}_{start}": [ce for key, ce in ces.items() if key.startswith("euler_")]
            for name in readings
            for start, ces in by_job[f"path-{name}"].items()
        },
        "edges": {name: by_job[name] for name in CURVES if name in by_job},
    }


def _reading_row(
    setup: Setup,
    by_job: dict[str, Row],
    density: float,
    name: str,
    ce: float,
    variant: str,
    indices: Iterable[int] | None = None,
) -> Row:
    config = setup.config(variant)
    numbers = list(indices if indices is not None else range(1, config.blocks + 1))
    jobs = _trainings(config, variant, numbers)
    return {
        "name": name,
        "valid_ce": ce,
        "bits_per_byte": ce / density / math.log(2),
        "steps": config.steps,
        "worker_mb": max(memory_mb(config, i) for i in numbers),
        "seconds": round(sum(by_job[job]["seconds"] for job in jobs), 1),
        "million_parameters": _million_parameters(config, numbers),
    }


def bytes_per_token(index: CorpusIndex) -> float:
    """Of the valid split."""
    return sum(s.bytes for s in index.valid) / sum(s.tokens for s in index.valid)


def _million_parameters(config: Config, indices: Iterable[int]) -> float:
    return round(sum(_count_parameters(config, i) for i in indices) / 1e6, 3)


def _equal_time_rows(
    setup: Setup, by_job: dict[str, Row], others: Sequence[Row], row: Callable[..., Row]
) -> Iterator[Row]:
    """Models whose training takes the same time in all: see `quality.EQUAL_TIME`."""
    for name in setup.equal_time:
        if f"evaluate-equal_{name}" not in by_job:  # its row has equal time as it is
            same = next(other for other in others if other["name"] == name)
            yield same | {"name": f"{name}_equal_time"}
            continue
        ce = by_job[f"evaluate-equal_{name}"]["ce"]
        figures = ce if isinstance(ce, float) else ce[name]
        yield row(f"{name}_equal_time", figures, f"equal_{name}", setup.indices(name))


def _averaged_rows(setup: Setup, by_job: dict[str, Row], row: Callable[..., Row]) -> Iterator[Row]:
    """Models that all machines train together, for the wall-clock time of `fuse`."""
    for name, index in AVERAGED.items() if setup.averaged else ():
        yield row(name, by_job[f"evaluate-{name}"]["ce"], name, [index])


def _row(
    setup: Setup,
    by_job: dict[str, Row],
    index: CorpusIndex,
    name: str,
    ce: float,
    variant: str,
    indices: Iterable[int] | None = None,
) -> Row:
    """Time is of everything that a row is made of, wall-clock with a machine for each of its
    workers, both in the training time of the end-to-end row. Memory and traffic are those of the
    worker that has most."""
    config, density = setup.config(variant), bytes_per_token(index)
    numbers = list(indices if indices is not None else range(1, config.blocks + 1))
    workers = setup.base.blocks if variant in AVERAGED else 1
    together = workers * len(numbers) > 1
    wall_clock = setup.wall_clock(config, numbers, beside=variant == "beside")
    jobs = _trainings(config, variant, numbers)
    return {
        "name": name,
        "valid_ce": ce,
        "bits_per_byte": ce / density / math.log(2),
        "gap": 0.0,
        "steps": config.steps,
        "time": round(setup.work(config, numbers) * workers, 4),
        "wall_clock": round(wall_clock, 4),
        "worker_mb": max(memory_mb(config, i) for i in numbers),
        "traffic_mb": max(traffic_mb(config, i) for i in numbers) if together else 0.0,
        "seconds": round(sum(by_job[job]["seconds"] for job in jobs), 1),
        "million_parameters": _million_parameters(config, numbers),
        "distinct_mb": round(
            _distinct_tokens(setup, index, variant, numbers, workers) * density / 1e6, 3
        ),
    }


def _trainings(config: Config, variant: str, indices: Iterable[int]) -> list[str]:
    """The jobs that trained a row."""
    if variant in AVERAGED:
        return [variant]
    return [
        "end_to_end"
        if i == REFERENCE and variant == "fuse"
        else f"{twin(config, variant, i) or variant}-{block_name(i)}"
        for i in indices
    ]


def _alone(config: Config, index: int) -> tuple[Config, int]:
    """The end-to-end model is a block that has all layers."""
    if index != REFERENCE:
        return config, index
    layers = config.blocks * config.layers_per_block
    return config.replace(compose="pool", blocks=1, layers_per_block=layers), 1


def memory_mb(config: Config, index: int) -> float:
    """What a worker of a block needs at its peak, beside Python and torch."""
    return round((training_footprint(*_alone(config, index)).total - PROCESS) / 1e6, 1)


def traffic_mb(config: Config, index: int) -> float:
    """What a worker of a block sends and fetches over a run, as `blocktrain plan` counts it.

    Every task fetches a version and sends an update. A fusion block, which begins when the others
    have ended, fetches those once.
    """
    alone, number = _alone(config, index)
    block = plan_block(alone, Policy(), number)
    tasks = math.ceil(config.steps_of(index) / TASK_STEPS)
    return round((tasks * (block.weights + block.update) + block.reads) / 1e6, 1)


def _count_parameters(config: Config, index: int) -> int:
    """Parameters of a block, or of the reference."""
    block = build_reference(config) if index == REFERENCE else build_block(config, index)
    return sum(p.numel() for p in block.parameters())


def _distinct_tokens(
    setup: Setup, index: CorpusIndex, variant: str, indices: list[int], workers: int
) -> int:
    """How many different tokens of a corpus were trained on."""
    config = setup.config(variant)
    is_shared = config.data_order == "shared"
    streams = {1 if is_shared and i else i: config.steps_of(i) for i in reversed(indices)}
    shards = [shard for source in index.sources for shard in source.shards]
    ends = np.cumsum([shard.tokens for shard in shards])
    begin = {shard: int(end) - shard.tokens for shard, end in zip(shards, ends, strict=True)}
    starts = np.array(
        [
            begin[place.shard] + place.offset
            for stream, steps in streams.items()
            for place in SequenceOrder(index, config.context, config.seed, stream).places(
                0, steps * config.batch * workers
            )
        ]
    )
    length = config.context + 1
    return int(np.minimum(np.diff(np.sort(starts)), length).sum()) + length


def _leakage(setup: Setup, by_job: dict[str, Row]) -> list[Row]:
    """Training loss of the block with the lowest noise, and the composed one, by sigma_min."""
    if not setup.leakage:
        return []
    rows = []
    for sigma in LEAKAGE_SIGMAS:
        variant = leakage_variant(setup, sigma)
        ce = by_job[f"evaluate-{variant}"]["ce"]
        last = by_job[f"{variant}-{block_name(setup.base.blocks)}"]
        rows.append(
            {
                "sigma_min": sigma,
                "train_ce_last_block": last["train_ce"],
                "composed_ce": ce["euler"],
                "pool_ce": ce["pool"],
            }
        )
    return rows


def _plot_leakage(axes: Any, leakage: Sequence[Row]) -> None:
    """Plot leakage: with less noise the last block's loss falls, the composed model's does not."""
    sigmas = [row["sigma_min"] for row in leakage]
    for key, label, colour in (
        ("composed_ce", "composed, valid", "#d55e00"),
        ("train_ce_last_block", "last block, training", "#555"),
    ):
        axes.plot(sigmas, [row[key] for row in leakage], "o-", color=colour, label=label)
    axes.set_xscale("log")
    axes.set_xticks(sigmas, [f"{sigma:g}" for sigma in sigmas])
    axes.minorticks_off()
    axes.set_xlabel("sigma_min (exact skip, Euler)")
    axes.set_title("leakage, nats per token", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def mean_rows(seeds: list[dict[str, Any]]) -> list[Row]:
    """Means over the seeds that have a row. `spread` is the largest minus the smallest loss."""
    rows = []
    for name in [row["name"] for row in seeds[0]["rows"]]:
        same_name = [row for seed in seeds for row in seed["rows"] if row["name"] == name]
        row: Row = {"name": name, "seeds": len(same_name)}
        row |= {key: same_name[0][key] for key in ("against", "steps") if key in same_name[0]}
        for key in (
            "valid_ce",
            "bits_per_byte",
            "gap",
            "time",
            "wall_clock",
            "worker_mb",
            "traffic_mb",
            "first_block",
            "pooled",
            "seconds",
            "million_parameters",
            "distinct_mb",
        ):
            if key in same_name[0]:
                row[key] = round(statistics.mean(r[key] for r in same_name), 5)
        if len(same_name) > 1:
            row["spread"] = round(
                max(r["valid_ce"] for r in same_name) - min(r["valid_ce"] for r in same_name), 5
            )
            row["gap_spread"] = round(
                max(r["gap"] for r in same_name) - min(r["gap"] for r in same_name), 5
            )
        rows.append(row)
    return rows


def plot(path: Path, rows: list[Row], title: str, leakage: Sequence[Row] = ()) -> None:
    """Cross entropy of every row as dots, the reference as a line; leakage if it was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ordered = sorted(rows, key=lambda row: -row["valid_ce"])
    ratios = (2, 1) if leakage else (1,)
    size = (13 if leakage else 8, 0.34 * len(ordered) + 1.2)
    figure, panels = pyplot.subplots(
        1, len(ratios), squeeze=False, width_ratios=ratios, figsize=size
    )
    axes = panels[0][0]
    reference = next(row["valid_ce"] for row in rows if row["name"] == "end_to_end")
    axes.axvline(reference, color="#888", linewidth=1)
    ours = {"pool", "fuse"}
    for y, row in enumerate(ordered):
        colour = (
            "#0072b2" if row["name"] in ours else "#d55e00" if row["name"] == "paper" else "#555"
        )
        axes.plot(row["valid_ce"], y, "o", color=colour)
        label, beside = (
            f"{row['valid_ce']:.3f} ({row['gap']:+.3f})",
            {"xytext": (7, 0), "textcoords": "offset points"},
        )
        axes.annotate(label, (row["valid_ce"], y), va="center", fontsize=8, color=colour, **beside)
    axes.set_yticks(range(len(ordered)), [row["name"] for row in ordered])
    axes.margins(x=0.18)
    axes.set_xlabel("valid cross entropy, nats per token (gap to end to end)")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    if leakage:
        _plot_leakage(panels[0][1], leakage)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
