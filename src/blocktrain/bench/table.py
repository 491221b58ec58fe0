"""The rows of `bench quality`: from what the jobs left to one table, means over seeds, and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from blocktrain.bench.quality import LEAKAGE_SIGMAS, Setup, leakage_variant, results, twin
from blocktrain.learning.data import batch_offsets
from blocktrain.learning.runs import block_name

Row = dict[str, Any]


def seed_rows(setup: Setup) -> dict[str, Any]:
    """All rows of one finished seed, and what does not fit into rows."""
    left = results(setup)
    fuse, pool, same, beside, paper, exact = (left[f"evaluate-{v}"]["ce"] for v in ("fuse", "pool", "same", "beside", "paper", "exact"))
    blocks = [pool[f"block_{n}"] for n in range(1, setup.base.blocks + 1)]
    best = blocks.index(min(blocks)) + 1
    rows = [
        _row(setup, left, "end_to_end", left["evaluate-fuse"]["reference"], "fuse", [0]),
        _row(setup, left, "single_block", statistics.mean(blocks), "pool", [1]),
        _row(setup, left, "best_block", min(blocks), "pool", [best]),
        _row(setup, left, "paper", paper["euler"], "paper"),
        _row(setup, left, "exact_euler", exact["euler"], "exact"),
        _row(setup, left, "exact_marginal", exact["marginal"], "exact"),
        _row(setup, left, "exact_pool", exact["pool"], "exact"),
        _row(setup, left, "pool", pool["pool"], "pool"),
        _row(setup, left, "fuse", fuse["fuse"], "fuse"),
        *(_row(setup, left, name, ce, "fuse") for name, ce in fuse.items() if name.startswith("fuse_without_")),
        _row(setup, left, "fuse_same_data", same["fuse"], "same"),
        _row(setup, left, "fuse_beside", beside["fuse"], "beside"),
    ]
    for row in rows:
        row["gap"] = row["valid_ce"] - rows[0]["valid_ce"]
    return {
        "rows": rows,
        "blocks": blocks,
        "pool_of_fuse": fuse["pool"],
        "after_block": {
            name: [ce[f"euler_{n}"] for n in range(1, setup.base.blocks + 1)] for name, ce in (("paper", paper), ("exact", exact))
        },
        "samples": left["samples"]["rows"],
        "leakage": _leakage(setup, left),
    }


def _row(setup: Setup, left: dict[str, Row], name: str, ce: float, variant: str, indices: Iterable[int] | None = None) -> Row:
    """Training seconds are summed over the blocks a row is made of; memory is that of its largest process."""
    config = setup.config(variant)
    used = list(indices if indices is not None else range(1, config.blocks + 1))
    jobs = [left["end_to_end" if i == 0 else f"{twin(config, variant, i) or variant}-{block_name(i)}"] for i in used]
    return {
        "name": name,
        "valid_ce": ce,
        "gap": 0.0,
        "seconds": round(sum(job["seconds"] for job in jobs), 1),
        "peak_mb": max(job["peak_mb"] for job in jobs),
        "distinct_mb": round(_distinct_bytes(setup, variant, used) / 1e6, 3),
    }


def _distinct_bytes(setup: Setup, variant: str, indices: list[int]) -> int:
    """How many different bytes of the corpus were trained on."""
    config = setup.config(variant)
    size = len(setup.source.open().train)
    seen = np.zeros(size + 1, dtype=np.int32)
    for stream in {1 if config.data_order == "shared" and i else i for i in indices}:
        for step in range(config.steps):
            found = batch_offsets(size, seed=config.seed, stream=stream, step=step, batch=config.batch, context=config.context)
            np.add.at(seen, found, 1)
            np.add.at(seen, found + config.context + 1, -1)
    return int((np.cumsum(seen[:-1]) > 0).sum())


def _leakage(setup: Setup, left: dict[str, Row]) -> list[Row]:
    """Training cross entropy of the block with the lowest noise against the composed one, as sigma_min falls."""
    if not setup.leakage:
        return []
    found = []
    for sigma in LEAKAGE_SIGMAS:
        variant = leakage_variant(setup, sigma)
        ce = left[f"evaluate-{variant}"]["ce"]
        last = left[f"{variant}-{block_name(setup.base.blocks)}"]
        found.append({"sigma_min": sigma, "train_ce_last_block": last["train_ce"], "composed_ce": ce["euler"], "pool_ce": ce["pool"]})
    return found


def mean_rows(seeds: list[dict[str, Any]]) -> list[Row]:
    """Means over seeds; with several, `spread` is the largest minus the smallest cross entropy, `gap_spread` that of the gaps."""
    rows = []
    for same_name in zip(*(seed["rows"] for seed in seeds), strict=True):
        row: Row = {"name": same_name[0]["name"]}
        for key in ("valid_ce", "gap", "seconds", "peak_mb", "distinct_mb"):
            row[key] = round(statistics.mean(r[key] for r in same_name), 5)
        if len(seeds) > 1:
            row["spread"] = round(max(r["valid_ce"] for r in same_name) - min(r["valid_ce"] for r in same_name), 5)
            row["gap_spread"] = round(max(r["gap"] for r in same_name) - min(r["gap"] for r in same_name), 5)
        rows.append(row)
    return rows


def plot(path: Path, rows: list[Row], title: str) -> None:
    """Cross entropy of every row as dots on one axis, the reference as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = sorted(rows, key=lambda row: -row["valid_ce"])
    figure, axes = pyplot.subplots(figsize=(8, 0.34 * len(shown) + 1.2))
    reference = next(row["valid_ce"] for row in rows if row["name"] == "end_to_end")
    axes.axvline(reference, color="#888", linewidth=1)
    ours = {"pool", "fuse"}
    for y, row in enumerate(shown):
        colour = "#0072b2" if row["name"] in ours else "#d55e00" if row["name"] == "paper" else "#555"
        axes.plot(row["valid_ce"], y, "o", color=colour)
        axes.annotate(f" {row['valid_ce']:.3f} ({row['gap']:+.3f})", (row["valid_ce"], y), va="center", fontsize=8, color=colour)
    axes.set_yticks(range(len(shown)), [row["name"] for row in shown])
    axes.margins(x=0.18)
    axes.set_xlabel("valid cross entropy, nats per byte (gap to end to end)")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
