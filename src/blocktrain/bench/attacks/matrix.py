"""The attack matrix: each attack by each share of the members, defended and not, several runs each.

Every run is a job in its own process, which leaves its figures as a file, so that an interrupted
bench continues. A run with attackers is compared with a clean one of the same seed, in which the
honest members are as many and read the same batches.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blocktrain.bench.attacks.policies import ATTACKS
from blocktrain.bench.attacks.trial import AttackTrial, Figures, run_trial
from blocktrain.config import Config, make_config
from blocktrain.errors import ConfigError, Interrupted
from blocktrain.learning.corpus.source import Source
from blocktrain.learning.threads import use_threads
from blocktrain.processes import Channel, Job
from blocktrain.runs.folder import read_json, write_json

MatrixRow = dict[str, Any]
CLEAN = ""
GOAL, MOST_REFUSED, MOST_CHECKING = 0.02, 0.03, 0.15
RUINED = 5.0
"""What the plot shows for a model whose loss is not finite, in nats above clean."""


@dataclass(frozen=True)
class MatrixSizes:
    """What is trained, by how many, and in tasks of how many steps."""

    settings: dict[str, Any]
    members: int
    task_steps: int
    valid_tokens: int


_SHAPE = {"blocks": 1, "compose": "pool", "heads": 2, "layers_per_block": 1, "context": 64}
SCALES = {
    "tiny": MatrixSizes(_SHAPE | {"width": 32, "batch": 4, "steps": 160}, 10, 8, 32_768),
    "standard": MatrixSizes(_SHAPE | {"width": 64, "batch": 8, "steps": 640}, 10, 32, 131_072),
}


@dataclass(frozen=True)
class MatrixOptions:
    """Options of `bench attacks`."""

    folder: Path
    scale: str
    sizes: MatrixSizes
    source: Source
    attacks: tuple[str, ...]
    shares: tuple[int, ...]
    """Attackers among the members, in percent."""
    runs: int
    seed: int
    slots: int
    command: str

    @property
    def seeds(self) -> range:
        return range(self.seed, self.seed + self.runs)

    def config(self, seed: int) -> Config:
        return make_config({**self.sizes.settings, "seed": seed})

    def attackers(self, share: int) -> int:
        return math.ceil(self.sizes.members * share / 100)

    def trial(self, attack: str, share: int, defended: bool, seed: int) -> AttackTrial:
        sizes, attackers = self.sizes, self.attackers(share)
        return AttackTrial(
            config=self.config(seed),
            source=self.source,
            honest=sizes.members - attackers,
            attackers=attackers if attack else 0,
            attack=attack,
            defended=defended,
            task_steps=sizes.task_steps,
            valid_tokens=sizes.valid_tokens,
        )

    def result(self, name: str) -> Path:
        return self.folder / "results" / f"{name}.json"

    def figures(self, attack: str, share: int, defended: bool) -> list[Figures]:
        """Of all runs of a cell."""
        names = (job_name(attack, share, defended, seed) for seed in self.seeds)
        return [read_json(self.result(name)) for name in names]


def require_attacks(names: Sequence[str]) -> tuple[str, ...]:
    """The attacks to try: all, if none is named."""
    if unknown := [name for name in names if name not in ATTACKS]:
        raise ConfigError(f"no attack is named {unknown[0]!r}; known: {', '.join(ATTACKS)}")
    return tuple(dict.fromkeys(names)) or tuple(ATTACKS)


def job_name(attack: str, share: int, defended: bool, seed: int) -> str:
    return f"{attack or 'clean'}-{share}-{'defended' if defended else 'control'}-{seed}"


def cells(options: MatrixOptions) -> Iterator[tuple[str, int, bool, int]]:
    """All that is run; what others are compared with comes first, and whole runs of the matrix."""
    for seed in options.seeds:
        for attack in (CLEAN, *options.attacks):
            for share in options.shares:
                for defended in (True, False):
                    yield attack, share, defended, seed


def jobs(options: MatrixOptions) -> list[Job]:
    """What has no result yet."""
    return [
        Job(job_name(*cell), trial_job, (options, *cell))
        for cell in cells(options)
        if not options.result(job_name(*cell)).exists()
    ]


def trial_job(
    channel: Channel, options: MatrixOptions, attack: str, share: int, defended: bool, seed: int
) -> None:
    """One run."""
    use_threads()

    def on_turn(done: float) -> None:
        channel.send(share=min(done, 0.99))
        if channel.should_stop:
            raise Interrupted("stopped; call the bench again to continue")

    figures = run_trial(options.trial(attack, share, defended, seed), on_turn)
    path = options.result(job_name(attack, share, defended, seed))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, figures)
    channel.send(share=1.0)


def matrix(options: MatrixOptions) -> dict[str, Any]:
    """The rows, what they are compared with, and whether the goals are met."""
    clean = [_clean_row(options, share) for share in options.shares]
    rows = [_row(options, attack, share) for attack in options.attacks for share in options.shares]
    return {
        "rows": rows,
        "clean": clean,
        "worst_difference": max(row["difference"] for row in rows),
        "harmed_cells": sum(row["difference"] > GOAL for row in rows),
        "honest_refused": _refused([f for r in (*clean, *rows) for f in _defended(options, r)]),
        "checking": statistics.mean(row["checking"] for row in (*clean, *rows)),
        "goals": {"difference": GOAL, "honest_refused": MOST_REFUSED, "checking": MOST_CHECKING},
    }


def _defended(options: MatrixOptions, row: MatrixRow) -> list[Figures]:
    attack = CLEAN if row["attack"] == "clean" else row["attack"]
    return options.figures(attack, row["share"], True)


def _clean_row(options: MatrixOptions, share: int) -> MatrixRow:
    found = options.figures(CLEAN, share, True)
    losses = [f["ce"] for f in found]
    control = [f["ce"] for f in options.figures(CLEAN, share, False)]
    return {
        "attack": "clean",
        "share": share,
        "honest": options.sizes.members - options.attackers(share),
        "ce": statistics.mean(losses),
        "spread": max(losses) - min(losses),
        "control_ce": statistics.mean(control),
        "honest_refused": _refused(found),
        "checking": statistics.mean(f["checking"] for f in found),
    }


def _row(options: MatrixOptions, attack: str, share: int) -> MatrixRow:
    found, clean = options.figures(attack, share, True), options.figures(CLEAN, share, True)
    control = options.figures(attack, share, False)
    controls = [_loss(f) for f in control]
    differences = [_loss(f) - _loss(c) for f, c in zip(found, clean, strict=True)]
    merged = sum(f["merged"].get("attackers", 0) for f in found)
    out = sum(sum(f["left_out"]["attackers"].values()) for f in found)
    return {
        "attack": attack,
        "share": share,
        "attackers": options.attackers(share),
        "ce": statistics.mean(_loss(f) for f in found),
        "difference": statistics.mean(differences),
        "worst": max(differences),
        "control_difference": statistics.mean(
            loss - _loss(c) for loss, c in zip(controls, clean, strict=True)
        ),
        "honest_steps": statistics.mean(
            f["honest_steps"] / c["honest_steps"] for f, c in zip(found, clean, strict=True)
        ),
        "honest_refused": _refused(found),
        "attackers_merged": merged / max(merged + out, 1),
        "attackers_share": statistics.mean(f["attackers_share"] for f in found),
        "checking": statistics.mean(f["checking"] for f in found),
    }


def _loss(figures: Figures) -> float:
    """Not a number is shown as a number that is large."""
    ce = figures["ce"]
    return float(ce) if ce is not None and not figures["ruined"] else RUINED + math.log(256)


def _refused(found: Sequence[Figures]) -> float:
    """Share of honest updates that did not count."""
    merged = sum(f["merged"].get("honest", 0) for f in found)
    out = sum(sum(f["left_out"]["honest"].values()) for f in found)
    return out / max(merged + out, 1)


def plot(path: Path, result: dict[str, Any]) -> None:
    """How far each attack moves the loss: defended, and the control beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["attack"] for row in result["rows"]))
    shares = sorted({row["share"] for row in result["rows"]})
    figure, axes = pyplot.subplots(figsize=(10, 5.5))
    axes.axhspan(-GOAL, GOAL, color="#ddd", label=f"within {GOAL} of clean")
    for number, share in enumerate(shares):
        shift = (number - (len(shares) - 1) / 2) * 0.22
        rows = {row["attack"]: row for row in result["rows"] if row["share"] == share}
        places = [names.index(name) + shift for name in rows]
        shade = 0.35 + 0.6 * number / max(len(shares) - 1, 1)
        for kind, field, marker in (
            ("defended", "difference", "o"),
            ("control", "control_difference", "x"),
        ):
            colour = pyplot.get_cmap("Blues" if kind == "defended" else "Reds")(shade)
            heights = [row[field] for row in rows.values()]
            axes.plot(places, heights, marker, color=colour, label=f"{kind}, {share} %")
    axes.set_yscale("symlog", linthresh=0.05)
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=8)
    axes.set_ylabel("final CE above clean, nats per token")
    axes.set_title(
        f"Attacks by share of the members ({result['scale']}, {result['runs']} runs a cell)",
        loc="left",
        fontsize=10,
    )
    axes.legend(fontsize=8, ncols=2, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
