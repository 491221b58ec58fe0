"""Time to the first byte after a long prompt, over two and four hosts, with random weights."""

from __future__ import annotations

import asyncio
import shutil
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from blocktrain.bench.machine import BenchResult, random_text
from blocktrain.bench.network.shaper import Link
from blocktrain.bench.serving.answers import Prompt, Way, write
from blocktrain.bench.serving.stages import links, names, split, stages
from blocktrain.config import Config, Topology, make_config
from blocktrain.learning.compose import build_block
from blocktrain.learning.model import build_reference
from blocktrain.learning.train import REFERENCE
from blocktrain.runs.folder import create_run, publish, read_manifest, seal
from blocktrain.runs.served import RunModel
from blocktrain.serving.entry.entry import Entry

HOSTS = (2, 4)
TOPOLOGIES: dict[str, tuple[Topology, ...]] = {"standard": ("fan", "ring"), "tiny": ("fan",)}
ANSWER = 8  # bytes that are asked for
SHAPES: dict[str, dict[str, int]] = {
    "standard": {"width": 128, "layers_per_block": 2, "blocks": 5, "context": 1024},
    "tiny": {"width": 32, "heads": 2, "layers_per_block": 1, "blocks": 5, "context": 64},
}


def create_untrained(folder: Path, config: Config) -> Path:
    """A run with the weights that training begins with, and its reference; made once."""
    if not (folder / "model" / "config.json").exists() or read_manifest(folder).config != config:
        shutil.rmtree(folder, ignore_errors=True)
        run = create_run(folder, config, "none")
        for number in range(1, config.blocks + 1):
            publish(run, number, build_block(config, number))
        publish(run, REFERENCE, build_reference(config))
        seal(run, config, "none", None)
    return folder


def measure_first_byte(
    folder: Path,
    scale: str,
    link: Link,
    repeats: int,
    progress: Callable[[float], None] = lambda _: None,
) -> BenchResult:
    """Medians for two and for four hosts: of the fan, and of the end-to-end model as a ring."""
    config = make_config(dict(SHAPES[scale]))
    run = create_untrained(folder, config)
    prompt = Prompt(
        bytes(random_text(0, config.context - 3 * ANSWER)), b"", 0
    )  # 1,000 bytes of a context of 1,024
    rows: list[BenchResult] = []
    for topology in TOPOLOGIES[scale]:
        for hosts in HOSTS:
            rows.append(_row(run, config, topology, hosts, link, [prompt] * (repeats + 1)))
            progress(len(rows) / (len(TOPOLOGIES[scale]) * len(HOSTS)))
    few, many = (
        next(
            row["first_byte_ms"]
            for row in rows
            if row["topology"] == "fan" and row["hosts"] == hosts
        )
        for hosts in HOSTS
    )
    return {
        "first_byte_growth": many / few - 1,
        "first_byte": rows,
        "first_byte_prompt": len(prompt.text),
    }


def _row(
    run: Path, config: Config, topology: Topology, hosts: int, link: Link, prompts: Sequence[Prompt]
) -> BenchResult:
    fan = topology == "fan"
    groups = (
        split(range(2, config.independent + 1), hosts - 1)
        if fan
        else split(range(1, config.blocks + 1), hosts)
    )
    with (
        stages(run, groups, reference=not fan) as processes,
        links(processes if fan else processes[1:], link) as lines,
    ):
        route = names(lines) if fan else [processes[0].address, *names(lines)]
        times = asyncio.run(_times(run, route, prompts, fan=fan))
    repeats = times[1:]  # the first answer warms everything up
    return {
        "topology": topology,
        "hosts": hosts,
        "rtt_ms": link.rtt_ms,
        "first_byte_ms": statistics.median(repeats),
        "first_byte_ms_all": [round(value, 1) for value in repeats],
    }


async def _times(
    run: Path, route: Sequence[str], prompts: Sequence[Prompt], *, fan: bool
) -> list[float]:
    entry = Entry(RunModel(run, reference=not fan), route)
    way = Way("", "fan", "exact") if fan else Way("", "ring", "autoregressive")
    try:
        await entry.start(30.0)
        return [
            (await write(entry, way.request(prompt, ANSWER))).first_byte_ms for prompt in prompts
        ]
    finally:
        await entry.aclose()
