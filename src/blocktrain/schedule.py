"""Learning rates step by step, and how far they can move a block."""

from __future__ import annotations

import math

from blocktrain.config import Config, Schedule

MOST = 2.0
"""Root mean square of a step at most, in learning rates. AdamW's is below 1.3 and Muon's below 0.5;
the rest is for weight decay and for what compression has left over from the task before."""
LEAST_RATE = 0.01  # of the peak: what is left over also travels when the schedule has ended
LEFT_OVER = 100
"""Steps before a task: of their change compression may have left something over. Where the last
tasks of a run are short, that is more than they change themselves."""
LEAST = 0.02
"""A fifth of what steps in random directions change, in the longest change / sqrt(steps)."""


def learning_rate(step: int, steps: int, peak: float, warmup: int, schedule: Schedule) -> float:
    """Linear warm-up over at most a tenth of all steps, then the schedule.

    Cosine and linear fall to zero and stay there.
    """
    warmup = min(warmup, steps // 10)
    if step < warmup:
        return peak * (step + 1) / warmup
    share = min(1.0, (step - warmup) / max(steps - warmup, 1))
    if schedule == "cosine":
        return peak * (1 + math.cos(math.pi * share)) / 2
    return peak * (1 - share) if schedule == "linear" else peak


def block_learning_rate(config: Config, index: int, step: int) -> float:
    """Of a block, or (0) of the end-to-end reference, at a step of its own schedule."""
    peak, schedule = config.learning_rate, config.schedule
    if index == 0:
        peak = config.reference_learning_rate
    elif index == config.fusion:
        peak, schedule = config.fusion_learning_rate, config.fusion_schedule
    return learning_rate(step, config.steps_of(index), peak, config.warmup, schedule)


def usual_change(config: Config, index: int, steps: range, parameters: int) -> float:
    """How long a change is that so many steps make, up to a factor that they all share.

    It lies between the bounds: steps neither go in one direction nor in random ones.
    """
    return math.sqrt(parameters) * reach(config, index, steps) / len(steps) ** 0.25


def change_bounds(config: Config, index: int, steps: range, parameters: int) -> tuple[float, float]:
    """(shortest, longest) norm of what honest steps change in a block, with either optimizer."""
    rates = [block_learning_rate(config, index, step) for step in steps]
    root = MOST * math.sqrt(parameters)
    shortest = LEAST * root * math.fsum(rates) / math.sqrt(len(steps))
    before = range(max(0, steps.start - LEFT_OVER), steps.stop)
    return shortest, root * reach(config, index, before)


def reach(config: Config, index: int, steps: range) -> float:
    """How far steps would go that all had one direction, up to a factor that they all share."""
    return math.fsum(_rates(config, index, steps))


def _rates(config: Config, index: int, steps: range) -> list[float]:
    """Learning rates, but not less than what is left over from earlier steps can make."""
    peak = config.fusion_learning_rate if index == config.fusion else config.learning_rate
    return [max(block_learning_rate(config, index, step), LEAST_RATE * peak) for step in steps]
