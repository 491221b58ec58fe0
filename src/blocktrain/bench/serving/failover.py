"""Stages that fail during an answer: time to notice, time to the next byte, and the same text.

Every remote block is on two stages. One that the answer uses is killed with signal 9, or its link
becomes a black hole. It is back before the other one is touched.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from blocktrain.bench.machine import BenchResult, header
from blocktrain.bench.network.shaper import Link, ShapedLink
from blocktrain.bench.serving.answers import Prompt, Way, quantile, take_prompts, write
from blocktrain.bench.serving.stages import StageProcess, links, names, split, stages
from blocktrain.config import Config
from blocktrain.errors import ConfigError, RunError
from blocktrain.learning.corpus.source import Source
from blocktrain.learning.generate import Mode
from blocktrain.learning.threads import limited_threads
from blocktrain.learning.tokenizer import tokenizer_of
from blocktrain.runs.folder import read_manifest, write_json
from blocktrain.runs.served import RunModel
from blocktrain.serving.entry.entry import Entry
from blocktrain.serving.entry.failover import AnswerFailed
from blocktrain.serving.line.stage_line import StageLine
from blocktrain.terminal import JobBars, console

REPLICAS = 2
MODES: tuple[Mode, ...] = ("exact", "autoregressive")  # in turn
BACK_SECONDS = 120.0
DEADLINE = 3.0  # seconds of an answer that must not be degraded when no holder is left
LOOK_SECONDS = 0.005
Harm = Literal["kill", "blackhole"]
KILL: Harm = "kill"
BLACKHOLE: Harm = "blackhole"


@dataclass(frozen=True)
class FailoverOptions:
    """Options of `bench failover`."""

    folder: Path
    run: Path
    source: Source
    kills: int = 50
    blackholes: int = 10
    link: Link = field(default_factory=lambda: Link(20.0, mbit=100.0))
    output: int = 256
    seed: int = 0


@dataclass
class StageHost:
    """A stage, its link, and the entry's line to it."""

    process: StageProcess
    link: ShapedLink
    line: StageLine
    lost_at: float = 0.0  # when the entry last noticed that it was gone
    _back: asyncio.Task[None] | None = None

    async def harm(self, how: Harm) -> float:
        """Returns the moment of the failure."""
        began = time.perf_counter()
        if how == "kill":
            self.process.kill()
        else:
            await asyncio.to_thread(self.link.block)
        return began

    def heal(self, how: Harm) -> None:
        """Bring it back in the background."""
        self._back = asyncio.create_task(
            asyncio.to_thread(self.process.restart if how == "kill" else self.link.open)
        )

    async def back(self) -> None:
        """Until the entry can use it again."""
        if self._back is not None:
            await self._back
            self._back = None
        deadline = time.monotonic() + BACK_SECONDS
        while not self.line.alive:
            if time.monotonic() > deadline:
                raise RunError(
                    f"the stage {self.line.name} did not come back; the machine may be overloaded"
                )
            await asyncio.sleep(LOOK_SECONDS)


@dataclass(frozen=True)
class Case:
    """An answer during which a stage failed."""

    harm: Harm
    mode: Mode
    identical: bool
    detect_ms: float
    next_byte_ms: float
    failovers: int


def failover(options: FailoverOptions, command: str) -> BenchResult:
    """Figures of all cases; writes failover.json to the folder."""
    config = read_manifest(options.run).config
    if config.traits.topology == "ring" or config.independent < 2:
        raise ConfigError(
            "a ring does not survive the loss of a stage: "
            "give bench failover a run composed by fuse or pool"
        )
    options.folder.mkdir(parents=True, exist_ok=True)
    groups = split(range(2, config.independent + 1), 2)
    with limited_threads(), ExitStack() as stack, JobBars("failover", 3) as bars:
        processes = stack.enter_context(stages(options.run, groups * REPLICAS))
        lines = stack.enter_context(links(processes, options.link))
        cases, no_replica = asyncio.run(_measure(options, config, processes, lines, bars.update))
    result = {
        **header(command, options.seed),
        "data": options.source.name,
        "rtt_ms": options.link.rtt_ms,
        "mbit": options.link.mbit,
        "replicas": REPLICAS,
        "stages": len(processes),
        "blocks_of_stages": [list(process.blocks) for process in processes],
        "output_bytes": options.output,
        **summary(cases),
        "no_replica": no_replica,
        "rows": [vars(case) for case in cases],
    }
    write_json(options.folder / "failover.json", result)
    console.print(f"wrote {options.folder / 'failover.json'}")
    return result


def summary(cases: Sequence[Case]) -> BenchResult:
    """Kills and black holes apart."""
    figures: BenchResult = {}
    for harm, plural, prefix in (("kill", "kills", ""), ("blackhole", "blackholes", "blackhole_")):
        mine = [case for case in cases if case.harm == harm]
        figures |= {plural: len(mine), f"{prefix}identical": sum(case.identical for case in mine)}
        for name in ("detect_ms", "next_byte_ms") if mine else ():
            values = [getattr(case, name) for case in mine]
            figures |= {
                f"{prefix}{name}_p50": quantile(values, 0.5),
                f"{prefix}{name}_p99": quantile(values, 0.99),
            }
    return figures


async def _measure(
    options: FailoverOptions,
    config: Config,
    processes: Sequence[StageProcess],
    lines: Sequence[ShapedLink],
    report: Callable[[str, BenchResult], None],
) -> tuple[list[Case], BenchResult]:
    entry = Entry(RunModel(options.run), names(lines))
    draws = random.Random(options.seed)
    cases: list[Case] = []
    try:
        await entry.start(30.0)
        hosts = [StageHost(*each) for each in zip(processes, lines, entry.route.lines, strict=True)]
        for host in hosts:
            _notice(host)
        harms: list[Harm] = [KILL] * options.kills + [BLACKHOLE] * options.blackholes
        valid = options.source.open(tokenizer_of(config)).valid
        prompts = take_prompts(
            valid, len(harms) + 1, min(32, config.context // 4), options.output, options.seed
        )
        for harm, prompt in zip(harms, prompts, strict=False):
            cases.append(
                await _case(entry, hosts, harm, MODES[len(cases) % len(MODES)], prompt, draws)
            )
            count = sum(case.harm == harm for case in cases)
            report(f"{harm}s", {"share": count / harms.count(harm)})
        no_replica = await _without_replica(entry, hosts, prompts[-1])
        report("no replica", {"share": 1.0})
    finally:
        await entry.aclose()
    return cases, no_replica


def _notice(host: StageHost) -> None:
    """Record when the entry loses its line."""
    before = host.line.on_change

    def on_change(line: StageLine) -> None:
        if not line.alive:
            host.lost_at = time.perf_counter()
        if before is not None:
            before(line)

    host.line.on_change = on_change


async def _case(
    entry: Entry,
    hosts: Sequence[StageHost],
    harm: Harm,
    mode: Mode,
    prompt: Prompt,
    draws: random.Random,
) -> Case:
    """An answer during which a stage fails; repeated if the answer ended before that."""
    expected = (await write(entry, Way("", "fan", "exact").request(prompt, len(prompt.real)))).text
    while True:
        for host in hosts:
            await host.back()
        fault = Fault(hosts, harm, draws)
        text, failovers = b"", 0
        async for piece in entry.generate(Way("", "fan", mode).request(prompt, len(expected))):
            text, failovers = text + piece.text, piece.stats.failovers
            fault.advance(len(text), len(expected))
        victim = await fault.over()
        if victim is None:
            continue
        victim.heal(harm)
        if fault.next_byte and victim.lost_at > fault.began:
            detect, next_byte = (
                1000 * (moment - fault.began) for moment in (victim.lost_at, fault.next_byte)
            )
            return Case(harm, mode, text == expected, detect, next_byte, failovers)


class Fault:
    """Harms one of the stages that an answer uses, at a random moment."""

    def __init__(self, hosts: Sequence[StageHost], harm: Harm, draws: random.Random) -> None:
        self.began = self.next_byte = 0.0
        self._hosts, self._harm = hosts, harm
        self._bytes_before = [host.line.bytes_out for host in hosts]
        self._blocks = draws.choice(sorted({host.process.blocks for host in hosts}))
        self._share = draws.uniform(0.05, 0.5)  # of the text that is there before
        self._pause = draws.uniform(0, 1.5e-3) * max(host.line.rtt_ms for host in hosts)
        self._strike_task: asyncio.Task[StageHost] | None = None

    def advance(self, there: int, whole: int) -> None:
        """Call it with the number of bytes written so far."""
        if self.began and not self.next_byte:
            self.next_byte = time.perf_counter()
        if self._strike_task is None and there >= self._share * whole:
            self._strike_task = asyncio.create_task(self._strike())

    async def _strike(self) -> StageHost:
        await asyncio.sleep(self._pause)
        holders = [n for n, host in enumerate(self._hosts) if host.process.blocks == self._blocks]
        host = self._hosts[
            max(holders, key=lambda n: self._hosts[n].line.bytes_out - self._bytes_before[n])
        ]  # the one that is asked
        self.began = await host.harm(self._harm)
        return host

    async def over(self) -> StageHost | None:
        """The host that failed; None if the answer ended before."""
        if self._strike_task is None:
            return None
        if not self.began:
            self._strike_task.cancel()
        with suppress(asyncio.CancelledError):
            return await self._strike_task
        return None


async def _without_replica(entry: Entry, hosts: Sequence[StageHost], prompt: Prompt) -> BenchResult:
    """All holders of a block fail: the answer is degraded, or refused in time; then they return."""
    for host in hosts:
        await host.back()
    request = Way("", "fan", "exact").request(prompt, len(prompt.real))
    expected = (await write(entry, request)).text
    victims = [host for host in hosts if host.process.blocks == hosts[0].process.blocks]
    for host in victims:
        await host.harm("kill")
    degraded = await write(entry, replace(request, allow_degraded=True))
    began, refusal = time.perf_counter(), ""
    try:
        await write(entry, replace(request, deadline=DEADLINE))
    except AnswerFailed as error:
        refusal = str(error)
    seconds = time.perf_counter() - began
    for host in victims:
        host.heal("kill")
    for host in victims:
        await host.back()
    again = await write(entry, request)
    return {
        "degraded": list(degraded.stats.degraded),
        "bytes": len(degraded.text),
        "refused": refusal,
        "refused_after_s": seconds,
        "deadline_s": DEADLINE,
        "used_again": again.text == expected and not again.stats.degraded,
    }
