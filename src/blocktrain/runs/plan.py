"""What a run will need and take, before anybody starts it. Pure, and without torch.

docs/guides/sizes.md explains every formula. Tests hold memory and bytes against measured ones.
Time follows from peaks and an assumed share of them, unless the fleet says measured speeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from blocktrain.config import Config
from blocktrain.coordinator.policy import Policy
from blocktrain.footprint import Footprint, training_footprint, worker_memory
from blocktrain.protocol.compression import METHODS, expected_payload, payload_cap
from blocktrain.protocol.tensors import DEFAULT_LIMITS, Spec, layout_bytes
from blocktrain.runs.fleet import FleetMachine
from blocktrain.shapes import block_parameters, block_shapes, flops_per_token, model_parameters
from blocktrain.units import amount

SHARE_OF_PEAK = 0.35  # that training reaches, unless the fleet says a measured speed
DAY = 86400.0
MBIT = 1e6 / 8  # bytes
TRANSFER_WARNS = 0.5  # share of a machine's time


@dataclass(frozen=True)
class BlockPlan:
    """One kind of block: what training it takes."""

    parameters: int
    memory: int
    """Bytes that a worker needs if it trains in the machine's own memory."""
    device_memory: int
    """Bytes that it needs on a GPU."""
    parts: Footprint
    """What it is made of."""
    flops_per_token: float
    weights: int
    """Bytes that a worker fetches for a task: a version, or what changed since the last one."""
    update: int
    """Bytes that it sends after a task."""
    reads: int
    """Bytes of the versions that a fusion block reads, if all of them are new."""

    def needed(self, machine: FleetMachine) -> int:
        """Bytes that it takes on this machine."""
        return self.device_memory if machine.has_gpu else self.memory


@dataclass(frozen=True)
class MachinePlan:
    """What one kind of machine can do in this run."""

    name: str
    count: int
    hours: float
    independent: bool
    fusion: bool
    reasons: list[str]
    """Why it cannot take part, or only in part."""
    tokens_per_second: float
    """Of training an independent block, without transfers."""
    step_seconds: float
    transfer_share: float
    """Of its time, in which it waits for bytes."""
    round_bytes: dict[str, int]
    """Of one task: down, up, shards."""
    day_bytes: dict[str, int]
    """Of one machine and day: down, up, shards."""

    @property
    def rate(self) -> float:
        """Tokens a second of one machine, averaged over its days and its transfers."""
        return self.tokens_per_second * (1 - self.transfer_share) * self.hours / 24


@dataclass(frozen=True)
class RunPlan:
    """The whole plan. `problems` are why the fleet cannot do it."""

    config: Config
    policy: Policy
    tokens: int
    independent: BlockPlan
    fusion: BlockPlan | None
    machines: list[MachinePlan]
    seconds: float | None
    """Until all blocks together have read `tokens`; None: never, or no fleet was given."""
    coordinator_day_bytes: dict[str, int]
    """In and out, of all machines together."""
    problems: list[str]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        config = self.config
        return {
            "possible": not self.problems,
            "problems": self.problems,
            "parameters": model_parameters(config),
            "blocks": config.blocks,
            "settings": config.model_dump(),
            "coordination": self.policy.model_dump(),
            "tokens": self.tokens,
            "seconds": self.seconds,
            "independent": asdict(self.independent),
            "fusion": asdict(self.fusion) if self.fusion else None,
            "machines": [asdict(machine) for machine in self.machines],
            "coordinator_day_bytes": self.coordinator_day_bytes,
        }


def make_plan(config: Config, policy: Policy, machines: Sequence[FleetMachine]) -> RunPlan:
    """The plan of a run on these machines; without machines, of what each one would need."""
    independent = plan_block(config, policy, 1)
    fusion = plan_block(config, policy, config.fusion) if config.fusion else None
    steps = sum(config.steps_of(index) for index in range(1, config.blocks + 1))
    tokens = policy.tokens or steps * config.batch * config.context
    plans = [plan_machine(config, policy, machine, (independent, fusion)) for machine in machines]
    problems = limit_problems(config, policy)
    problems += fleet_problems(plans, independent, fusion) if machines else []
    seconds = run_seconds(config, tokens, plans, (independent, fusion))
    totals = {
        way: sum(plan.day_bytes[way] * plan.count for plan in plans if plan.independent)
        for way in ("down", "up", "shards")
    }
    return RunPlan(
        config,
        policy,
        tokens,
        independent,
        fusion,
        plans,
        None if problems else seconds,
        {"in": totals["up"], "out": totals["down"] + totals["shards"]},
        problems,
    )


def plan_block(config: Config, policy: Policy, index: int) -> BlockPlan:
    """What training block `index` (from 1) takes."""
    schema = {name: Spec(shape) for name, shape in block_shapes(config, index).items()}
    return BlockPlan(
        parameters=block_parameters(config, index),
        memory=worker_memory(config.replace(device="cpu"), index),
        device_memory=worker_memory(config.replace(device="cuda"), index),
        parts=training_footprint(config, index),
        flops_per_token=flops_per_token(config, index),
        weights=fetched_bytes(config, policy, index),
        update=expected_payload(schema, policy.compression),
        reads=config.reads(index) * fetched_bytes(config, policy, 1),
    )


def fetched_bytes(config: Config, policy: Policy, index: int) -> int:
    """Bytes that bring a worker from one version of a block to the next."""
    if METHODS[policy.version_compression].exact:
        return version_bytes(config, index)
    schema = {name: Spec(shape) for name, shape in block_shapes(config, index).items()}
    return expected_payload(schema, policy.version_compression)


def version_bytes(config: Config, index: int) -> int:
    """Bytes of the weights of a block as they are stored."""
    shapes = block_shapes(config, index)
    return layout_bytes({name: ("F32", shape) for name, shape in shapes.items()})


def limit_problems(config: Config, policy: Policy) -> list[str]:
    """What the protocol would refuse, whatever the machines are."""
    problems = []
    for index in {1, config.fusion or 1}:
        name = block_name(config, index)
        schema = {name: Spec(shape) for name, shape in block_shapes(config, index).items()}
        if version_bytes(config, index) > DEFAULT_LIMITS.raw_bytes:
            problems.append(
                f"a version of {name} has {amount(version_bytes(config, index))} and the protocol "
                f"allows {amount(DEFAULT_LIMITS.raw_bytes)}: use more blocks, or a smaller width"
            )
        elif payload_cap(schema, policy.compression) > DEFAULT_LIMITS.payload_bytes:
            problems.append(
                f"an update of {name} has {amount(payload_cap(schema, policy.compression))} and "
                f"the protocol allows {amount(DEFAULT_LIMITS.payload_bytes)}: "
                "use another --compression, or more blocks"
            )
    return problems


def block_name(config: Config, index: int) -> str:
    return "the fusion block" if index == config.fusion else "an independent block"


def plan_machine(
    config: Config,
    policy: Policy,
    machine: FleetMachine,
    blocks: tuple[BlockPlan, BlockPlan | None],
) -> MachinePlan:
    """What a machine can train, how fast, and how many bytes that moves."""
    independent, _ = blocks
    speed = tokens_per_second(config, machine, independent)
    step = config.batch * config.context / speed
    able, reasons = judge_machine(machine, blocks, step, policy.options(config).longest_deadline)
    # A task takes the wanted time, and at least one step.
    training = max(policy.task_seconds, step)
    down = independent.weights / (machine.down * MBIT)
    up = independent.update / (machine.up * MBIT)
    # The next task is trained while the last update is sent; its weights are waited for.
    round_seconds = max(training, up) + down
    task = {
        "down": independent.weights,
        "up": independent.update,
        "shards": int(speed * training * id_bytes(config)),
    }
    rounds = DAY * machine.hours / 24 / round_seconds
    share = 1 - training / round_seconds
    if able[0] and share > TRANSFER_WARNS:
        reasons.append(
            f"it would wait for its line {share:.0%} of the time: a longer --task-seconds "
            f"(now {policy.task_seconds:g}) helps"
        )
    return MachinePlan(
        machine.name,
        machine.count,
        machine.hours,
        able[0],
        able[1],
        reasons,
        speed,
        step,
        share,
        task,
        {way: int(count * rounds) for way, count in task.items()},
    )


def tokens_per_second(config: Config, machine: FleetMachine, block: BlockPlan) -> float:
    """Of training an independent block."""
    if machine.tokens_per_second is not None:
        return machine.tokens_per_second
    return SHARE_OF_PEAK * (machine.peak(config.dtype) or 1.0) / block.flops_per_token


def judge_machine(
    machine: FleetMachine,
    blocks: tuple[BlockPlan, BlockPlan | None],
    step_seconds: float,
    longest: float,
) -> tuple[tuple[bool, bool], list[str]]:
    """Whether it can train an independent block and the fusion block, and why not."""
    memory = machine.memory or 0
    independent, fusion = blocks
    if memory < (needed := independent.needed(machine)):
        missing = f"training a block takes {amount(needed)} and it has {amount(memory)}"
        return (False, False), [missing]
    if step_seconds > longest:
        slow = f"one step takes {duration(step_seconds)} and a task may take {duration(longest)}"
        return (False, False), [slow]
    down = independent.weights / (machine.down * MBIT)
    up = independent.update / (machine.up * MBIT)
    if max(down, up) > longest:
        slow = f"moving a block takes {duration(max(down, up))} over its line, more than a task may"
        return (False, False), [slow]
    if fusion is not None and memory < (needed := fusion.needed(machine)):
        only = f"it cannot train the fusion block, which takes {amount(needed)}"
        return (True, False), [f"{only}: it has {amount(memory)}"]
    return (True, fusion is not None), []


def fleet_problems(
    machines: Sequence[MachinePlan], independent: BlockPlan, fusion: BlockPlan | None
) -> list[str]:
    """What the fleet lacks. Fewer machines than blocks lack nothing: workers move."""
    if not any(machine.independent for machine in machines):
        return [
            "no machine can train a block: "
            + "; ".join(f"{machine.name}: {machine.reasons[0]}" for machine in machines)
        ]
    if fusion is not None and not any(machine.fusion for machine in machines):
        return [
            f"no machine has the memory for the fusion block, which takes {amount(fusion.memory)}: "
            "add one, use --compose pool, or a smaller --size, --context or --micro-batch"
        ]
    return []


def run_seconds(
    config: Config,
    tokens: int,
    machines: Sequence[MachinePlan],
    blocks: tuple[BlockPlan, BlockPlan | None],
) -> float | None:
    """Until all blocks together have read `tokens`, each its share.

    All machines train all the time they have. The fusion block begins when the others are half
    done, and only some machines may be able to train it.
    """
    independent, fusion = blocks
    steps = {index: config.steps_of(index) for index in range(1, config.blocks + 1)}
    share = tokens * config.steps / sum(steps.values())
    rate = sum(m.count * m.rate for m in machines if m.independent)
    if not rate:
        return None
    work = share * config.independent  # in tokens of an independent block
    if fusion is None:
        return work / rate
    cost = fusion.flops_per_token / independent.flops_per_token
    able = sum(m.count * m.rate for m in machines if m.fusion)
    if not able:
        return None
    last = share * cost * config.steps_of(config.blocks) / config.steps
    return max((work + last) / rate, work / 2 / rate + last / able)


def id_bytes(config: Config) -> int:
    """Bytes of a token in a shard."""
    return 1 if config.vocabulary <= 1 << 8 else 2 if config.vocabulary <= 1 << 16 else 4


def duration(seconds: float) -> str:
    """For people, by two digits."""
    for unit, size in (("years", 365 * DAY), ("days", DAY), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{float(f'{seconds / size:.2g}'):,g} {unit}"
    return f"{seconds:.2g} seconds"
