"""Figures of serving: text per second by round trip and mode, its quality, and whether it is exact.

The entry is this process; the blocks are in real `blocktrain stage` processes, each behind its own
shaped link. All modes and models use the same frames, warm connections and caches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import torch

from blocktrain.bench.machine import BenchResult
from blocktrain.bench.network.shaper import Link, ShapedLink
from blocktrain.bench.serving.answers import (
    Measurement,
    Prompt,
    Star,
    Way,
    Writer,
    measure_way,
    quantile,
    take_prompts,
    users_at_once,
    write,
)
from blocktrain.bench.serving.costs import (
    Costs,
    draft_cost,
    entry_cost,
    hop_overhead,
    layers_cost,
    stage_cost,
    timed_line,
)
from blocktrain.bench.serving.exactness import Agreement, compare, open_fan_model
from blocktrain.bench.serving.stages import StageProcess, count_bytes, links, names, split, stages
from blocktrain.config import Config
from blocktrain.errors import ConfigError
from blocktrain.learning.corpus.source import Source
from blocktrain.learning.evaluate import text_bits
from blocktrain.learning.generate import Drafter, Sampler
from blocktrain.learning.threads import limited_threads
from blocktrain.learning.tokenizer import tokenizer_of
from blocktrain.learning.train import REFERENCE
from blocktrain.runs.folder import ModelManifest, file_sha256, load_independent, read_manifest
from blocktrain.runs.served import RunModel
from blocktrain.serving.entry.answer import Request
from blocktrain.serving.entry.drafting import DraftBlock
from blocktrain.serving.entry.entry import Entry
from blocktrain.serving.entry.failover import FanModel
from blocktrain.serving.line.stage_line import StageAccess

SWEEPS = (1, 2, 4, 8)
PROMPT, OUTPUT = 32, 96  # bytes, where the context has room for them
FAST_MS = 5.0  # round trips up to which all prompts are written byte by byte too
CPU = torch.device("cpu")
ReportRow = Callable[[str, BenchResult], None]
PARTS = 3  # progress bars, beside one for every link: texts, positions, first bytes


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    prompts: int = 8
    slow_prompts: int = 3  # of rows that make a traversal for every byte
    users: int = 8
    quality_texts: int = 32  # texts of which the quality is the mean
    texts: int = 40  # that are compared position by position ...
    text: int = 512  # ... with this many bytes each
    hops: int = 500
    first_bytes: int = 9


SIZES = {"standard": Sizes(), "tiny": Sizes(2, 1, 4, 2, 2, 40, 40, 2)}


@dataclass(frozen=True)
class ServingOptions:
    """Options of `bench serving`."""

    folder: Path
    scale: str
    source: Source
    hosts: int = 3
    rtt_ms: tuple[float, ...] = (1.0, 20.0, 80.0, 150.0)
    mbit: float = 100.0
    seed: int = 0

    @property
    def sizes(self) -> Sizes:
        """The numbers of the scale."""
        return SIZES[self.scale]

    def link(self, rtt_ms: float) -> Link:
        """A line of this length."""
        return Link(rtt_ms, mbit=self.mbit, seed=self.seed)


@dataclass
class Subject:
    """The run that is served, and what it is asked."""

    options: ServingOptions
    run: Path
    manifest: ModelManifest = field(init=False)

    def __post_init__(self) -> None:
        self.manifest = read_manifest(self.run)
        if self.config.traits.topology == "ring" or self.config.independent < 2:
            raise ConfigError(
                "bench serving asks a fan: give it a run composed by fuse or pool "
                "with two blocks or more beside the fusion"
            )
        if self.options.hosts < 2:
            raise ConfigError("bench serving needs an entry and a stage: give it --hosts 2 or more")

    @property
    def config(self) -> Config:
        """Of the run."""
        return self.manifest.config

    @cached_property
    def reference(self) -> bool:
        """Whether there is an end-to-end model to compare with."""
        return self.manifest.run.weights(REFERENCE).is_file()

    @property
    def fan_groups(self) -> list[tuple[int, ...]]:
        """Blocks of the stages: all but the entry's own."""
        return split(range(2, self.config.independent + 1), self.options.hosts - 1)

    @property
    def ring_groups(self) -> list[tuple[int, ...]]:
        """Layers of the end-to-end model: over all hosts, the entry's too."""
        return split(range(1, self.config.blocks + 1), self.options.hosts) if self.reference else []

    @cached_property
    def prompt(self) -> int:
        """Bytes of a prompt."""
        return min(PROMPT, self.config.context // 4)

    @cached_property
    def output(self) -> int:
        """Bytes of an answer."""
        return min(OUTPUT, self.config.context - self.prompt)

    @cached_property
    def quality_prompts(self) -> list[Prompt]:
        """Prompts that the quality is judged on; the timed ones are among them."""
        count = max(
            self.options.sizes.quality_texts, self.options.sizes.prompts, self.options.sizes.users
        )
        return take_prompts(
            self.options.source.open(tokenizer_of(self.config)).valid,
            count,
            self.prompt,
            self.output,
            self.options.seed,
        )

    def numbers(self, way: Way, rtt_ms: float) -> range:
        """Which prompts a row is measured with."""
        sizes = self.options.sizes
        slow = way.mode == "autoregressive" and rtt_ms > FAST_MS
        return range(
            0, len(self.quality_prompts), max(len(self.quality_prompts) // sizes.prompts, 1)
        )[: sizes.slow_prompts if slow else sizes.prompts]

    @property
    def fan_ways(self) -> list[Way]:
        """The ways to write with the run."""
        model = self.config.compose
        sweeps = [Way(model, "fan", "sweep", k) for k in SWEEPS]
        return [Way(model, "fan", "autoregressive"), *sweeps, Way(model, "fan", "exact")]

    @property
    def reference_ways(self) -> list[Way]:
        """The ways to write with the end-to-end model, if there is one."""
        return (
            [Way("reference", "ring", "autoregressive"), Way("reference", "star", "autoregressive")]
            if self.reference
            else []
        )


@dataclass
class Near:
    """What is measured without shaped links; it holds for all of them."""

    texts: dict[Way, list[bytes]]
    bits: dict[str, float]  # per byte under the end-to-end model, by name
    costs: Costs
    overheads: list[float]
    agreement: Agreement


@dataclass
class Far:
    """What is measured on one link."""

    rows: list[BenchResult]
    users: list[BenchResult]
    histogram: dict[str, int]


def measure_serving(subject: Subject, report: ReportRow) -> BenchResult:
    """All rows, and what does not fit into rows."""
    options = subject.options
    with limited_threads(), ExitStack() as stack:
        fan = stack.enter_context(stages(subject.run, subject.fan_groups))
        ring = (
            stack.enter_context(stages(subject.run, subject.ring_groups, reference=True))
            if subject.reference
            else []
        )
        near = asyncio.run(_near(subject, fan, ring, report))
        far: list[Far] = []
        for rtt_ms in options.rtt_ms:
            link = options.link(rtt_ms)
            with links(fan, link) as fan_lines, links(ring[1:], link) as ring_lines:
                place = LinkSetup(subject, near, fan_lines, ring[:1], ring_lines, link)
                far.append(asyncio.run(_far(place, partial(_share, report, f"{rtt_ms:g} ms"))))
    rows = [row for each in far for row in each.rows]
    agreement = near.agreement
    return {
        "rows": rows,
        "gains": [gain(each.rows) for each in far],
        "users": [row for each in far for row in each.users],
        "acceptance": agreement.acceptance,
        "accepted_per_sweep": {
            f"{rtt:g}": each.histogram for rtt, each in zip(options.rtt_ms, far, strict=True)
        },
        "divergences": agreement.divergences,
        "positions": agreement.positions,
        "near_ties": agreement.near_ties,
        "hop_overhead_ms_p50": 1000 * quantile(near.overheads, 0.5),
        "hop_overhead_ms_p99": 1000 * quantile(near.overheads, 0.99),
        "quality": near.bits,
        "judged_texts": len(subject.quality_prompts),
        "texts_changed": sum(row["texts_changed"] for row in rows),
        "costs": near.costs.as_result(),
    }


def _share(report: ReportRow, name: str, share: float) -> None:
    report(name, {"share": share})


def gain(rows: Sequence[BenchResult]) -> BenchResult:
    """What the modes gain over the best autoregressive row of the same line, whatever its model."""
    best = max(
        (row for row in rows if row["mode"] == "autoregressive"), key=lambda row: row["bytes_per_s"]
    )
    exact = next(row for row in rows if row["mode"] == "exact")
    sweeps = {
        f"sweep_{row['sweeps']}": row["bytes_per_s"] / best["bytes_per_s"]
        for row in rows
        if row["mode"] == "sweep"
    }
    return {
        "rtt_ms": best["rtt_ms"],
        "best_autoregressive": f"{best['model']}, {best['topology']}",
        "best_autoregressive_bytes_per_s": best["bytes_per_s"],
        **sweeps,
        "exact": exact["bytes_per_s"] / best["bytes_per_s"],
        "exact_bytes_per_sweep": exact["bytes_per_sweep"],
    }


# -- without lines


async def _near(
    subject: Subject, fan: Sequence[StageProcess], ring: Sequence[StageProcess], report: ReportRow
) -> Near:
    options = subject.options
    route = [stage.address for stage in fan]
    entry = Entry(RunModel(subject.run), route)
    try:
        await entry.start(30.0)
        async with open_fan_model(subject.run, route) as fan_model:
            texts = await _texts(subject, entry, partial(_share, report, "texts"))
            prompts = take_prompts(
                options.source.open(tokenizer_of(subject.config)).valid,
                options.sizes.texts,
                subject.prompt,
                0,
                options.seed + 1000,
            )
            agreement = await compare(
                entry, fan_model, prompts, options.sizes.text, partial(_share, report, "positions")
            )
            overheads, costs = await _costs(subject, fan_model, fan, ring, agreement.acceptance)
            bits = _judge(subject, texts, fan_model) if subject.reference else {}
    finally:
        await entry.aclose()
    return Near(texts, bits, costs, overheads, agreement)


async def _texts(
    subject: Subject, entry: Entry, progress: Callable[[float], None]
) -> dict[Way, list[bytes]]:
    """What each way writes. It must write the same over every link."""
    texts: dict[Way, list[bytes]] = {}
    ways = subject.fan_ways
    for count, way in enumerate(ways, 1):
        texts[way] = [
            (await write(entry, way.request(prompt, subject.output))).text
            for prompt in subject.quality_prompts
        ]
        progress(count / (len(ways) + subject.reference))
    if subject.reference:
        alone = Entry(RunModel(subject.run, reference=True))
        try:
            await alone.start()
            way = subject.reference_ways[0]
            answers = [
                (await write(alone, way.request(prompt, subject.output))).text
                for prompt in subject.quality_prompts
            ]
        finally:
            await alone.aclose()
        texts |= dict.fromkeys(subject.reference_ways, answers)
        progress(1.0)
    return texts


def _judge(
    subject: Subject, texts: dict[Way, list[bytes]], fan_model: FanModel
) -> dict[str, float]:
    """Bits per byte under the end-to-end model, of real text and of all that was written."""
    reference = (
        load_independent(subject.manifest.run, subject.config, REFERENCE, CPU)
        .requires_grad_(False)
        .eval()
    )
    with torch.inference_mode():
        block, size = DraftBlock(subject.config, fan_model.local), subject.output
        drafts = [
            bytes(Drafter(block.read, Sampler(prompt.seed)).draft(tuple(prompt.text), 0, size))
            for prompt in subject.quality_prompts
        ]
    every = {
        "real": [prompt.real for prompt in subject.quality_prompts],
        "first block alone": drafts,
    }
    every |= {way.name: answers for way, answers in texts.items()}
    return {
        name: sum(
            text_bits(reference, prompt.text, text)
            for prompt, text in zip(subject.quality_prompts, answers, strict=True)
        )
        / len(answers)
        for name, answers in every.items()
    }


async def _costs(
    subject: Subject,
    fan_model: FanModel,
    fan: Sequence[StageProcess],
    ring: Sequence[StageProcess],
    acceptance: float,
) -> tuple[list[float], Costs]:
    """Software time of hops, and the parts of the cost model."""
    config, manifest = subject.config, subject.manifest
    access = StageAccess(config.fingerprint, b"", manifest.model_hash, vocabulary=config.vocabulary)
    async with timed_line(fan[0].address, access) as line:  # the stage with most blocks
        overheads = await hop_overhead(line, config.context, subject.options.sizes.hops)
        stage = await stage_cost(line, config.context)
    layers = None
    if ring:
        weights = file_sha256(manifest.run.weights(REFERENCE))
        async with timed_line(ring[0].address, replace(access, model=weights)) as line:
            layers = await layers_cost(line, config.context, config.width)
    wide = 4.0 * config.width * len(fan[0].blocks)
    entry, draft = entry_cost(fan_model, config.context), draft_cost(config, fan_model)
    return overheads, Costs(
        stage,
        wide,
        entry,
        layers,
        len(ring),
        config.width,
        draft,
        quantile(overheads, 0.5),
        acceptance,
    )


# -- on a line


@dataclass(frozen=True)
class LinkSetup:
    """A link, and the stages behind it."""

    subject: Subject
    near: Near
    fan_lines: Sequence[ShapedLink]
    own: Sequence[StageProcess]  # of the ring: on the entry's host
    ring_lines: Sequence[ShapedLink]
    link: Link


async def _far(place: LinkSetup, progress: Callable[[float], None]) -> Far:
    subject, rtt_ms = place.subject, place.link.rtt_ms
    ways = [*subject.fan_ways, *subject.reference_ways]
    measurements: list[Measurement] = []
    progress(0.0)

    def requests(way: Way) -> list[Request]:
        return [
            way.request(subject.quality_prompts[n], subject.output)
            for n in subject.numbers(way, rtt_ms)
        ]

    entry = Entry(RunModel(subject.run), names(place.fan_lines))
    try:
        await entry.start(30.0)
        warm = subject.fan_ways[-1].request(
            replace(subject.quality_prompts[-1], seed=2**31), subject.output
        )
        await write(entry, warm)
        for way in subject.fan_ways:
            measurements.append(
                await measure_way(
                    way, requests(way), partial(write, entry), partial(count_bytes, place.fan_lines)
                )
            )
            progress(len(measurements) / (len(ways) + 1))
        crowd = subject.quality_prompts[: subject.options.sizes.users]
        users = [
            await users_at_once(entry, way, crowd, subject.output)
            for way in (subject.fan_ways[0], subject.fan_ways[-1])
        ]
    finally:
        await entry.aclose()
    if subject.reference:
        ring = Entry(
            RunModel(subject.run, reference=True),
            [*(stage.address for stage in place.own), *names(place.ring_lines)],
        )
        try:
            await ring.start(30.0)
            star = Star(
                sorted(ring.route.lines, key=lambda line: line.blocks), subject.config.context
            )
            writers: tuple[Writer, ...] = (partial(write, ring), star.write)
            for way, one in zip(subject.reference_ways, writers, strict=True):
                await one(replace(requests(way)[0], max_tokens=2))  # stages connect to each other
                measurements.append(
                    await measure_way(
                        way, requests(way), one, partial(count_bytes, place.ring_lines)
                    )
                )
                progress(len(measurements) / (len(ways) + 1))
        finally:
            await ring.aclose()
    progress(1.0)
    return Far(
        [_row(place, each) for each in measurements],
        [{"rtt_ms": rtt_ms, **each} for each in users],
        _exact(measurements).histogram(),
    )


def _exact(measurements: Sequence[Measurement]) -> Measurement:
    return next(each for each in measurements if each.way.mode == "exact")


def _row(place: LinkSetup, measurement: Measurement) -> BenchResult:
    """With the prediction, the quality, and how many texts differ from those without a link."""
    subject, near, way = place.subject, place.near, measurement.way
    row = measurement.row(place.link.rtt_ms)
    row["predicted"] = near.costs.predict(
        way, place.link.rtt_ms, place.link.mbit, subject.prompt, subject.output, row["traversals"]
    )
    row["quality"] = near.bits.get(way.name)
    expected = [near.texts[way][n] for n in subject.numbers(way, place.link.rtt_ms)]
    row["texts_changed"] = sum(
        a.text != b for a, b in zip(measurement.answers, expected, strict=True)
    )
    return row
