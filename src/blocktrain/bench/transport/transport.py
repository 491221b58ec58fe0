"""Figures of transport: replay, workers, hosts, compression, outer steps, late updates.

Every part is made of trials: real runs over HTTP. A trial that is done is not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from matplotlib.figure import Figure

from blocktrain.audit.audit import audit
from blocktrain.audit.evidence import open_folder
from blocktrain.bench.machine import BenchResult
from blocktrain.bench.network.shaper import Link
from blocktrain.bench.transport.trial import (
    Placement,
    ReportTrial,
    Trial,
    goodput,
    run_trial,
    utilisation,
)
from blocktrain.config import Config, make_config
from blocktrain.coordinator.policy import Policy
from blocktrain.learning.corpus.source import Source
from blocktrain.protocol.compression import METHODS

BenchPart = Literal["replay", "workers", "hosts", "ladder", "outer", "participation"]
PARTS: tuple[BenchPart, ...] = get_args(BenchPart)
RUNGS: tuple[str, ...] = tuple(METHODS)
SHARES = (1.0, 0.9, 0.42, 0.0)  # of the updates that come in time
BOUND = 0.005  # nats per byte that a rung of the ladder may cost, on average over the seeds
SLOW = 5.0  # times slower than the others: every fifth worker of the hosts part


@dataclass(frozen=True)
class Scale:
    """How large every part is."""

    model: dict[str, Any]
    valid_bytes: int | None
    replay_steps: int
    worker_steps: int
    task_steps: int
    host_steps: int
    host_task_seconds: float
    ladder_steps: int
    ladder_task: int
    ladder_workers: tuple[int, ...]  # of one block
    ladder_seeds: int
    outer_steps: int
    outer_tasks: tuple[int, int]


_STANDARD = {"width": 128, "layers_per_block": 2, "context": 128, "batch": 16}
_TINY = {"width": 32, "heads": 2, "layers_per_block": 1, "context": 32, "batch": 8, "z_width": 32}
SCALES = {
    "standard": Scale(
        _STANDARD, 1 << 17, 200, 400, 50, 800, 60.0, 400, 20, (2, 1), 3, 200, (10, 50)
    ),
    "tiny": Scale(_TINY, 4096, 12, 20, 5, 60, 1.0, 20, 5, (1,), 1, 20, (5, 10)),
}

PAPER: dict[str, BenchResult] = {
    "replay": {"says": "nothing: no replay of a distributed run is reported"},
    "workers": {
        "valid_ce": {"one_per_block": 1.359, "six_workers": 1.385},
        "six_worker_cost": 0.026,
    },
    "hosts": {
        "start_ce": 5.580,
        "end_ce": 1.811,
        "gb": 15.22,
        "same_node_http": {"end_ce": 1.576, "gb": 10.23},
    },
    "ladder": {"says": "full-precision checkpoints and updates"},
    "outer": {"says": "plain averaging of same-block replicas"},
    "participation": {"valid_ce": {"90": 2.151, "42": 2.595, "0": 5.638}},
    "differs": {
        "says": "byte-level WikiText too, but a larger model, longer training and three public "
        "hosts; here a small model on one machine, WikiText-2, hosts behind shaped links, int4 "
        "updates: compare the differences and the bytes per step, not the levels"
    },
}


@dataclass(frozen=True)
class TransportOptions:
    """Options of `bench transport`."""

    folder: Path
    scale: str
    source: Source
    parts: tuple[BenchPart, ...]
    seeds: tuple[int, ...]
    host_count: int
    link: Link

    @property
    def sizes(self) -> Scale:
        """The numbers of the scale."""
        return SCALES[self.scale]

    def config(self, seed: int, **settings: Any) -> Config:
        """A model of the scale."""
        return make_config({**self.sizes.model, **settings, "seed": seed})

    def trial(
        self, name: str, config: Config, policy: Policy, places: Sequence[Placement]
    ) -> Trial:
        """A run of this bench. To start a process that judges would take longer than a tiny run."""
        policy = policy.model_copy(update={"undefended": self.scale == "tiny"})
        return Trial(
            self.folder / name, config, policy, self.source, tuple(places), self.sizes.valid_bytes
        )


def measure(options: TransportOptions, report: ReportTrial) -> BenchResult:
    """The parts that were asked for, each under its own keys."""
    result: BenchResult = {}
    for part in options.parts:
        result |= _MEASURES[part](options, report)
    return result


def measure_replay(options: TransportOptions, report: ReportTrial) -> BenchResult:
    """Whether a run over HTTP gets the same hashes when its ledger is trained and merged again."""
    config = options.config(options.seeds[0], blocks=4, steps=options.sizes.replay_steps)
    trial = options.trial(
        "replay",
        config,
        Policy(task_seconds=options.sizes.host_task_seconds / 3, version_compression="int4"),
        [Placement()] * 3,
    )

    def replay(finished: Trial) -> BenchResult:
        outcome = audit(
            open_folder(finished.folder / "coordinator"),
            retrain=True,
            progress=lambda _, n, of: report("replay", {"share": n / max(of, 1)}),
        )
        return {
            "equal": outcome.ok and outcome.retrained == outcome.updates,
            "retrained": outcome.retrained,
            "findings": [finding.sentence for finding in outcome.findings],
        }

    result = run_trial(trial, report, replay)
    figures = {
        key: result[key]
        for key in (
            "updates",
            "versions",
            "retrained",
            "late",
            "bytes_in",
            "bytes_out",
            "seconds",
            "findings",
        )
    }
    return {
        "equal_hashes": result["equal"],
        "replay": {**figures, "valid_ce": result["ce"]["composed"]},
    }


def measure_workers(options: TransportOptions, report: ReportTrial) -> BenchResult:
    """Six workers on three blocks against three, at equal steps per worker and at equal text."""
    sizes = options.sizes
    rows = []
    for name, count, steps in (
        ("one_per_block", 3, sizes.worker_steps),
        ("six_workers", 6, sizes.worker_steps),
        ("six_workers_equal_text", 6, sizes.worker_steps // 2),
    ):
        config = options.config(options.seeds[0], blocks=3, compose="pool", steps=steps)
        result = run_trial(
            options.trial(name, config, Policy(task_steps=sizes.task_steps), [Placement()] * count),
            report,
        )
        accepted_steps = sum(w["accepted"] for w in result["workers"])
        costs = {"gb": _gb(result), "seconds": result["seconds"]}
        rows.append(
            {
                "name": name,
                "workers": count,
                "steps": steps,
                "trained_steps": accepted_steps,
                "valid_ce": result["ce"]["pool"],
                **costs,
            }
        )
    base = rows[0]["valid_ce"]
    for row in rows:
        row["cost"] = row["valid_ce"] - base
    return {"six_worker_cost": rows[1]["cost"], "workers": rows}


def measure_hosts(options: TransportOptions, report: ReportTrial) -> BenchResult:
    """Distant hosts behind slow lines, every fifth worker much slower than the rest."""
    sizes = options.sizes
    config = options.config(options.seeds[0], blocks=4, steps=sizes.host_steps)
    policy = Policy(task_seconds=sizes.host_task_seconds)
    places = [
        Placement(n % options.host_count, SLOW if n % 5 == 4 else 1.0)
        for n in range(-(-max(5, options.host_count) // 5) * 5)
    ]
    trial = options.trial(
        f"hosts-{options.host_count}-{options.link.rtt_ms:g}-{options.link.mbit:g}",
        config,
        policy,
        places,
    )
    result = run_trial(replace(trial, link=options.link, from_start=True), report)
    gb = _gb(result)
    return {
        "hosts": {
            "hosts": options.host_count,
            "kind": result["kind"],
            "rtt_ms": options.link.rtt_ms,
            "mbit": options.link.mbit,
            "workers": len(result["workers"]),
            "slow_workers": sum(place.slow > 1 for place in places),
            "start_ce": result["start_ce"],
            "end_ce": result["ce"]["composed"],
            "gb": gb,
            "wire_gb": result["wire_bytes"] / 1e9,
            "ce_per_gb": (result["start_ce"] - result["ce"]["composed"]) / gb,
            "utilisation": utilisation(result["workers"]),
            "goodput": goodput(result["workers"]),
            "updates": result["updates"],
            "late": result["late"],
            "seconds": result["seconds"],
            "curve": result["curve"],
            "per_worker": result["workers"],
        }
    }


def measure_ladder(options: TransportOptions, report: ReportTrial) -> BenchResult:
    """What every compression of updates and versions saves and costs.

    All workers are in step: no update is late, so that rows differ by their compression alone.
    A worker that is alone on its block fetches nothing: the next version is what it sent. So the
    same method moves half as much as with two.
    """
    seeds = options.seeds[: options.sizes.ladder_seeds]
    rows = [
        row
        for workers in options.sizes.ladder_workers
        for row in _ladder_rows(options, report, workers, seeds)
    ]
    return {
        "ladder": rows,
        "ladder_seeds": list(seeds),
        "ladder_default": Policy().compression,
        "ladder_smallest": {
            str(workers): smallest([row for row in rows if row["workers"] == workers])
            for workers in options.sizes.ladder_workers
        },
    }


def _ladder_rows(
    options: TransportOptions, report: ReportTrial, workers: int, seeds: Sequence[int]
) -> list[BenchResult]:
    """The rows of one block with so many workers."""
    results_of = {
        rung: [run_trial(_ladder_trial(options, rung, workers, seed), report) for seed in seeds]
        for rung in RUNGS
    }
    rows = []
    for name, results in results_of.items():
        costs = [
            mine["ce"]["pool"] - plain["ce"]["pool"]
            for mine, plain in zip(results, results_of["none"], strict=True)
        ]
        sent = sum(w["sent"] for result in results for w in result["workers"])
        moved, updates = (sum(r[key] for r in results) for key in ("training_bytes", "updates"))
        rows.append(
            {
                "name": name,
                "workers": workers,
                "bytes_ratio": moved / sum(result["float32_bytes"] for result in results),
                "ce_cost": sum(costs) / len(costs),
                "bytes_per_update": moved // updates,
                "sent_per_update": sent // updates,
                "late": sum(result["late"] for result in results),
                "valid_ce": [result["ce"]["pool"] for result in results],
                "ce_costs": costs,
            }
        )
    return rows


def _ladder_trial(options: TransportOptions, rung: str, workers: int, seed: int) -> Trial:
    sizes = options.sizes
    config = options.config(seed, blocks=1, compose="pool", steps=sizes.ladder_steps)
    policy = Policy(
        compression=rung,
        version_compression=rung,
        replicas=workers,
        min_replicas=workers,
        task_steps=sizes.ladder_task,
        exclusive=workers == 1,
    )
    name = f"ladder-{rung}-{workers}-{seed}"
    return options.trial(name, config, policy, [Placement()] * workers)


def smallest(rows: Sequence[BenchResult], bound: float = BOUND) -> str:
    """The rung with the fewest bytes among those that cost no more than the bound."""
    return min(
        (row for row in rows if row["ce_cost"] <= bound), key=lambda row: row["bytes_ratio"]
    )["name"]


def measure_outer(options: TransportOptions, report: ReportTrial) -> BenchResult:
    """Averaging against an outer Nesterov step: two replicas a block, short and long tasks."""
    sizes = options.sizes
    rows = []
    for steps in sizes.outer_tasks:
        for outer in ("average", "nesterov"):
            config = options.config(
                options.seeds[0], blocks=2, compose="pool", steps=sizes.outer_steps
            )
            policy = Policy(outer=outer, task_steps=steps, replicas=2)
            result = run_trial(
                options.trial(f"outer-{outer}-{steps}", config, policy, [Placement()] * 4), report
            )
            costs = {
                "gb": _gb(result),
                "versions": result["versions"],
                "seconds": result["seconds"],
            }
            rows.append(
                {"outer": outer, "task_steps": steps, "valid_ce": result["ce"]["pool"], **costs}
            )
    return {"outer": rows}


def measure_participation(options: TransportOptions, report: ReportTrial) -> BenchResult:
    """What it costs when updates come late and are dropped: two workers per block, equal steps.

    A dropped update's task is given out again, so the run takes longer. Where all are dropped,
    workers leave after as many tasks as a run without losses has.
    """
    sizes, seed, rows = options.sizes, options.seeds[0], list[BenchResult]()
    workers = max(sizes.ladder_workers)
    config = options.config(seed, blocks=1, compose="pool", steps=sizes.ladder_steps)
    policy = Policy(replicas=workers, task_steps=sizes.ladder_task)
    places = [Placement()] * workers
    for share in SHARES:
        trial = options.trial(f"in-time-{share:g}-{seed}", config, policy, places)
        most = None if share else -(-sizes.ladder_steps // sizes.ladder_task)
        result = run_trial(replace(trial, in_time=share, most_tasks=most), report)
        trained = sum(w["trained"] for w in result["workers"])
        rows.append(
            {
                "in_time": share,
                "valid_ce": result["ce"]["pool"],
                "cost": result["ce"]["pool"] - (rows[0] if rows else {"valid_ce": 0.0})["valid_ce"],
                "updates": result["updates"],
                "dropped": sum(w["refused"] for w in result["workers"]),
                "versions": result["versions"],
                "trained_steps": trained,
                "goodput": goodput(result["workers"]),
                "seconds": result["seconds"],
            }
        )
    rows[0]["cost"] = 0.0
    return {"participation": rows}


def _gb(result: BenchResult) -> float:
    return (result["bytes_in"] + result["bytes_out"]) / 1e9


_MEASURES: dict[BenchPart, Callable[[TransportOptions, ReportTrial], BenchResult]] = {
    "replay": measure_replay,
    "workers": measure_workers,
    "hosts": measure_hosts,
    "ladder": measure_ladder,
    "outer": measure_outer,
    "participation": measure_participation,
}


def trials(options: TransportOptions) -> int:
    """How many bars there will be: runs, and the replay of one."""
    counts = {
        "replay": 2,
        "workers": 3,
        "hosts": 1,
        "ladder": len(RUNGS) * options.sizes.ladder_seeds * len(options.sizes.ladder_workers),
        "outer": 4,
        "participation": len(SHARES),
    }
    return sum(counts[part] for part in options.parts)


def plot_transport(path: Path, result: BenchResult) -> bool:
    """Plot loss over bytes, and the ladder; False if neither was measured."""
    parts = [part for part in ("hosts", "ladder") if part in result]
    if not parts:
        return False
    figure = Figure(figsize=(5.5 * len(parts), 3.6), layout="constrained")
    for part, axes in zip(parts, figure.subplots(1, len(parts), squeeze=False)[0], strict=True):
        axes.grid(alpha=0.3)
        if part == "hosts":
            hosts = result["hosts"]
            axes.plot(
                [size / 1e9 for _, size, _ in hosts["curve"]],
                [loss for *_, loss in hosts["curve"]],
                color="#0072b2",
            )
            axes.set(xlabel="GB moved", ylabel="training loss, mean of blocks")
            axes.set_title(
                f"{hosts['hosts']} hosts, {hosts['rtt_ms']:g} ms, {hosts['mbit']:g} Mbit",
                fontsize=10,
            )
        else:
            for row in result["ladder"]:
                colour = "#d55e00" if row["workers"] > 1 else "#0072b2"
                axes.scatter(row["bytes_ratio"], row["ce_cost"], color=colour)
                axes.annotate(
                    row["name"],
                    (row["bytes_ratio"], row["ce_cost"]),
                    textcoords="offset points",
                    xytext=(6, 4),
                )
            axes.axhline(BOUND, color="#999999", linestyle="--", linewidth=1)
            axes.set(
                xlabel="bytes in and out, float32 both ways = 1",
                ylabel="cost (nats per byte)",
                xlim=(0, 1.15),
            )
            axes.set_title(
                f"updates and versions, {' and '.join(result['ladder_smallest'])} "
                f"worker(s) (seeds {', '.join(map(str, result['ladder_seeds']))})",
                fontsize=10,
            )
    figure.savefig(path, dpi=130)
    return True
