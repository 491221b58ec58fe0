"""`blocktrain plan`: what a run needs and takes, before anybody starts it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from blocktrain.cli.coordinator import read_request
from blocktrain.cli.environment import vocabulary_in_file
from blocktrain.cli.flags import BeginFlags, Coordination, Json, SettingsFlags, named_settings
from blocktrain.devices import DEVICES
from blocktrain.errors import ConfigError
from blocktrain.footprint import PROCESS
from blocktrain.runs.fleet import FleetMachine, read_fleet
from blocktrain.runs.plan import (
    DAY,
    SHARE_OF_PEAK,
    BlockPlan,
    MachinePlan,
    RunPlan,
    duration,
    make_plan,
)
from blocktrain.shapes import model_parameters
from blocktrain.units import amount

EXAMPLES = ("cpu", "rtx3060", "rtx4090", "a100", "h100")  # shown when there is no fleet


def plan(
    *,
    fleet: Path | None = None,
    config: Path | None = None,
    settings: SettingsFlags = None,
    coordination: Coordination = None,
    json_: Json = False,
) -> None:
    """Say what a run needs before anybody starts it: memory, bytes, time, and who can take part.

    It takes the settings of `coordinator`. A fleet that cannot do it is refused with a sentence
    and exit code 2.

    Parameters
    ----------
    fleet
        A TOML file that describes the machines, a table [[machine]] for each kind. Without it,
        the plan shows a few known devices.
    config
        A TOML file with settings and a table [coordination]; flags win over it.
    """
    machines = read_fleet(fleet) if fleet else []
    request = read_request(
        config, BeginFlags(), named_settings(settings), named_settings(coordination)
    )
    chosen = request.config
    if vocabulary := vocabulary_in_file(chosen.tokenizer):
        chosen = chosen.replace(vocabulary=vocabulary)
    result = make_plan(chosen, request.policy, machines)
    if json_:
        print(json.dumps(result.as_dict()))
    else:
        _print(result)
    if result.problems:
        raise ConfigError("this run is not possible: " + "; ".join(result.problems))


def _print(result: RunPlan) -> None:
    for line in (*_model(result), "", *_blocks(result), ""):
        print(line)
    for line in _fleet(result) if result.machines else _examples(result):
        print(line)


def _model(result: RunPlan) -> Iterable[str]:
    c, tokens = result.config, result.tokens
    kinds = f"{c.independent} independent" + (" and the fusion block" if c.fusion else "")
    yield f"model      {model_parameters(c):,} parameters in {c.blocks} blocks: {kinds}"
    yield (
        f"shape      {c.layers_per_block} layers a block, width {c.width}, {c.heads} heads, "
        f"context {c.context}, {c.tokenizer} ({c.vocabulary:,} tokens)"
    )
    yield (
        f"training   {c.length}; a step has {c.batch} x {c.context} tokens, "
        f"{c.rows} sequences at once, {c.dtype}"
    )
    yield f"text       {_count(tokens)} tokens over all blocks"


def _blocks(result: RunPlan) -> Iterable[str]:
    blocks = [result.independent, *([result.fusion] if result.fusion else [])]
    yield _row("per worker", ["an independent block", "the fusion block"][: len(blocks)])
    rows: list[tuple[str, list[str]]] = [
        ("parameters", [f"{b.parameters:,}" for b in blocks]),
        ("memory", [amount(b.memory) for b in blocks]),
        ("  weights", [amount(b.parts.weights) for b in blocks]),
        ("  optimizer", [amount(b.parts.optimizer) for b in blocks]),
        ("  activations and gradients", [amount(b.parts.working) for b in blocks]),
        ("  blocks that it reads", [amount(b.parts.frozen) for b in blocks]),
        ("  updates", [amount(b.memory - b.parts.training - PROCESS) for b in blocks]),
        ("  Python and torch", [amount(PROCESS) for b in blocks]),
        ("fetched for a task", [_fetched(b) for b in blocks]),
        (f"sent after a task ({result.policy.compression})", [amount(b.update) for b in blocks]),
        ("FLOPs per token", [_count(b.flops_per_token) for b in blocks]),
    ]
    for title, cells in rows:
        yield _row(title, cells)


def _fetched(block: BlockPlan) -> str:
    more = f" + {amount(block.reads)} read" if block.reads else ""
    return amount(block.weights) + more


def _row(title: str, cells: Iterable[str]) -> str:
    return f"{title:<28}" + "".join(f"{cell:>24}" for cell in cells)


def _fleet(result: RunPlan) -> Iterable[str]:
    yield f"{'machines':<20}{'tokens/s':>10}{'waits':>8}{'down/day':>11}{'up/day':>11}  takes part"
    for machine in result.machines:
        yield from _machine(machine)
    yield ""
    day = result.coordinator_day_bytes
    yield (
        f"coordinator receives {amount(day['in'])} and sends {amount(day['out'])} a day "
        f"({day['out'] * 8 / DAY / 1e6:.3g} Mbit/s on average)"
    )
    if result.seconds is not None:
        yield (
            f"time to {_count(result.tokens)} tokens: {duration(result.seconds)} "
            f"(speeds are {SHARE_OF_PEAK:.0%} of peaks, unless measured)"
        )


def _machine(machine: MachinePlan) -> Iterable[str]:
    name = f"{machine.count} x {machine.name}"
    if not machine.independent:
        yield f"{name:<20}{'':>40}  no: {machine.reasons[0]}"
        return
    part = "yes" if machine.fusion or not machine.reasons else f"yes, but {machine.reasons[0]}"
    down = machine.day_bytes["down"] + machine.day_bytes["shards"]
    yield (
        f"{name:<20}{_count(machine.tokens_per_second):>10}{machine.transfer_share:>8.0%}"
        f"{amount(down):>11}{amount(machine.day_bytes['up']):>11}  {part}"
    )
    rest = machine.reasons[1:] if part != "yes" else machine.reasons
    for reason in rest:
        yield f"{'':<62}{reason}"


def _examples(result: RunPlan) -> Iterable[str]:
    """Known devices, one for each block, on a usual line."""
    seconds = result.policy.task_seconds
    rounds = DAY / seconds
    block = result.independent
    day = f"{amount(rounds * block.weights)} down and {amount(rounds * block.update)} up"
    yield f"a task of {seconds:g} s makes {rounds:,.0f} rounds a day: {day} for each worker"
    yield (
        f"time to {_count(result.tokens)} tokens on one machine per block "
        f"(at {SHARE_OF_PEAK:.0%} of its peak; --fleet FILE plans your machines):"
    )
    for name in EXAMPLES:
        memory = DEVICES[name].memory or max(
            b.memory for b in (result.independent, result.fusion) if b
        )
        machine = FleetMachine(name=name, count=result.config.blocks, device=name, memory=memory)
        alone = make_plan(result.config, result.policy, [machine])
        time = (
            duration(alone.seconds) if alone.seconds is not None else alone.machines[0].reasons[0]
        )
        yield f"  {name:<10}{time}"


def _count(number: float) -> str:
    """Three digits: 2.05 M."""
    for unit in ("", " k", " M", " G", " T", " P"):
        if number < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} E"
