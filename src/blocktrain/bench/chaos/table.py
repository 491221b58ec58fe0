"""The figures of a chaos run beside their goals, and the plot."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blocktrain.bench.chaos.figures import RUINED, ChaosFigures
from blocktrain.bench.chaos.schedule import FAULTS

ChaosRow = dict[str, Any]
MOST_CE, LEAST_GOODPUT, MOST_RECOVERY, MOST_CHECKING = 0.02, 0.85, 3.0, 0.15
MOST_HARM, MOST_REFUSED = 0.01, 0.03
LEAST_SHARE, LEAST_KINDS = 0.4, 10  # of byzantine members; of their attacks
SHOWN_FAULTS = {"kill-worker": "worker SIGKILLs", "kill-coordinator": "coordinator kill -9"}
"""Whose number is a goal."""


def rows(
    found: ChaosFigures, calm: ChaosFigures | None, members: Mapping[str, int], *, judged: bool
) -> list[ChaosRow]:
    """Figure, goal for the length that was played, what was measured, and whether it is met.

    Without `judged` only what must always hold is: a tiny run is too short for the rest.
    """
    measured = [
        *_faults(found, members),
        *_defences(found),
        *([] if calm is None else _against(found, calm)),
        _recovery(found),
        _checking(found),
    ]
    if not judged:
        measured = [row | {"met": "too short"} for row in measured]
    return [*_safety(found), *measured]


def is_safe(found: ChaosFigures) -> bool:
    """Whether the run kept what must hold whatever happens."""
    return not (
        found["lost"]
        or found["doubled"]
        or found["findings"]
        or found["forgeries_accepted"]
        or found["recomputed"] != found["versions"]
    )


def _row(figure: str, goal: str, measured: str, met: bool | None) -> ChaosRow:
    said = "not measured" if met is None else "yes" if met else "NO"
    return {"figure": figure, "goal": goal, "measured": measured, "met": said}


def _safety(found: ChaosFigures) -> list[ChaosRow]:
    versions, lost, doubled = found["versions"], len(found["lost"]), len(found["doubled"])
    same = found["recomputed"] == versions and not found["findings"]
    forged, accepted = sum(found["forged"].values()), sum(found["forgeries_accepted"].values())
    return [
        _row("acknowledged updates lost", f"0 of {found['receipts']}", str(lost), not lost),
        _row("updates counted twice", f"0 of {found['updates']}", str(doubled), not doubled),
        _row("versions recomputed to the bit", str(versions), str(found["recomputed"]), same),
        _row(
            "forged, replayed, malformed: accepted", f"0 of {forged}", str(accepted), not accepted
        ),
    ]


def _faults(found: ChaosFigures, members: Mapping[str, int]) -> list[ChaosRow]:
    minutes, share = found["minutes_of_faults"], members["byzantine"] / sum(members.values())
    goals = {kind: math.floor(FAULTS[kind].per_minute * minutes) for kind in SHOWN_FAULTS}
    counts = {kind: found["faults"].get(kind, 0) for kind in SHOWN_FAULTS}
    kinds = len(found["attacks"])
    return [
        *(
            _row(title, str(goals[kind]), str(counts[kind]), counts[kind] >= goals[kind])
            for kind, title in SHOWN_FAULTS.items()
        ),
        _row(
            "byzantine members, attacks",
            f"{LEAST_SHARE:.0%}, {LEAST_KINDS}",
            f"{share:.0%}, {kinds}",
            share >= LEAST_SHARE and kinds >= LEAST_KINDS,
        ),
    ]


def _defences(found: ChaosFigures) -> list[ChaosRow]:
    harm, refused = found["harmful_share"], found["honest_refused"]
    return [
        _row(
            "harmful updates merged, of byzantine ones",
            f"<= {MOST_HARM:.0%}",
            f"{harm:.2%}",
            harm <= MOST_HARM,
        ),
        _row(
            "honest updates wrongly refused",
            f"<= {MOST_REFUSED:.0%}",
            f"{refused:.2%}",
            refused <= MOST_REFUSED,
        ),
    ]


def _against(found: ChaosFigures, calm: ChaosFigures) -> list[ChaosRow]:
    difference = found["ce"] - calm["ce"]
    goodput = found["goodput"] / max(calm["goodput"], 1e-9)
    steps = f"{found['honest_steps']} and {calm['honest_steps']} honest steps"
    return [
        _row(
            "final CE above fault-free, nats",
            f"<= {MOST_CE}",
            f"{difference:+.4f} ({steps})",
            difference <= MOST_CE,
        ),
        _row(
            "goodput against fault-free",
            f">= {LEAST_GOODPUT:.0%}",
            f"{goodput:.1%}",
            goodput >= LEAST_GOODPUT,
        ),
    ]


def _recovery(found: ChaosFigures) -> ChaosRow:
    seconds = found["recoveries"]
    name, goal = "coordinator recovery, p99", f"<= {MOST_RECOVERY:g} s"
    if not seconds:
        return _row(name, goal, "-", None)
    p99 = seconds[min(len(seconds) - 1, math.ceil(0.99 * len(seconds)) - 1)]
    return _row(name, goal, f"{p99:.2f} s of {len(seconds)}", p99 <= MOST_RECOVERY)


def _checking(found: ChaosFigures) -> ChaosRow:
    name, goal = "checking, of all processor time", f"<= {MOST_CHECKING:.0%}"
    spent = found["processor_seconds"]
    if not spent:  # this system does not tell what a process has used
        return _row(name, goal, "-", None)
    share = spent.get("checking", 0.0) / max(sum(spent.values()), 1e-9)
    return _row(name, goal, f"{share:.1%}", share <= MOST_CHECKING)


def plot(path: Path, runs: Mapping[str, ChaosFigures], title: str) -> None:
    """Loss over honest steps that were merged: fault-free, chaos, and the undefended control."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {"fault_free": "#009e73", "chaos": "#0072b2", "control": "#d55e00"}
    names = {"fault_free": "fault-free", "chaos": "chaos", "control": "chaos, undefended"}
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for name, found in runs.items():
        steps, losses = zip(*found["curve"], strict=True)
        end = "" if found["ce"] < RUINED else ", not finite"
        label = f"{names[name]}: {found['ce']:.3f}{end}"
        axes.plot(steps, losses, "o-", markersize=3, color=colours[name], label=label)
    axes.set_xlabel("honest steps that were merged")
    axes.set_ylabel("CE on held-out text, nats per token")
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
