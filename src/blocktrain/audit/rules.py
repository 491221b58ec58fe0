"""Whether updates were used, clipped and left out by the run's own rules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from blocktrain.audit.recompute import clip_scale
from blocktrain.config import Config
from blocktrain.protocol.ledger import CheckFacts, Evidence, RoundBody, UpdateBody, VersionBody
from blocktrain.schedule import change_bounds, reach, usual_change

OUTER = ("outer", "outer_learning_rate", "outer_momentum")
ROUNDING = 1e-6
Known = Mapping[str, tuple[int, UpdateBody]]  # entry and update, by id
PEERS = 3  # workers whose gains say what is usual
LEAST_GAIN = 0.25  # of the usual


def bounds_of(config: Config, update: UpdateBody, parameters: int) -> tuple[float, float]:
    """Shortest and longest change that may be used."""
    first = update.order.start_step
    made = range(first, first + update.submission.steps)
    return change_bounds(config, update.order.block, made, parameters)


def usual_of(config: Config, update: UpdateBody, parameters: int) -> float:
    """What its steps usually change, up to a factor."""
    first = update.order.start_step
    made = range(first, first + update.submission.steps)
    return usual_change(config, update.order.block, made, parameters)


def reach_of(config: Config, update: UpdateBody) -> float:
    """How far its steps could go together."""
    first = update.order.start_step
    return reach(config, update.order.block, range(first, first + update.submission.steps))


def least_gain(config: Config, update: UpdateBody, updates: Known, evidence: Evidence) -> float:
    """What its gain may not be below, but for noise: a part of what the round's median worker gains
    with as much reach, or with its own if that is less. 0 where too few could say."""
    own, reaches = defaultdict(list), defaultdict(list)
    for name, (gain, _) in evidence.gains.items():
        _, judged = updates.get(name, (0, None))
        if judged is not None and judged.staleness == 0:
            worker, far = judged.submission.worker, reach_of(config, judged)
            own[worker].append(gain / far)
            reaches[worker].append(far)
    if update.staleness > 0 or len(own) < PEERS:
        return 0.0
    usual, far = (median(map(median, found.values())) for found in (own, reaches))
    return max(0.0, LEAST_GAIN * usual * min(far, reach_of(config, update)))


def check_staleness(update: UpdateBody, behind: int, decay: float | None) -> Iterator[str]:
    """decay ** staleness, but 1 for staleness 1. Without a known decay only that is checked."""
    if update.staleness != behind:
        yield f"is {behind} versions behind, not {update.staleness}"
    weight = update.weight if decay is None else min(decay, 1.0) ** update.staleness
    weight = 1.0 if update.staleness <= 1 else weight
    if update.weight != weight:
        yield (
            f"is {update.staleness} versions behind and counts with {update.weight}, not {weight}"
        )


def check_used(
    name: str,
    norm: float,
    bounds: tuple[float, float],
    evidence: Evidence,
    least: float,
    differing: Collection[str],
) -> Iterator[str]:
    """What is wrong with the use of an update."""
    shortest, longest = bounds
    if not shortest * (1 - ROUNDING) <= norm <= longest * (1 + ROUNDING):
        yield f"update {name[:12]}... is used with a change of {norm:.3g}, against the bounds"
    gain, noise = evidence.gains.get(name, (0.0, 0.0))
    if gain < -noise:
        yield f"update {name[:12]}... is used, although it was judged to do harm"
    elif gain + noise < least * (1 - ROUNDING):
        yield f"update {name[:12]}... is used, although others gained far more"
    if name in differing:
        yield f"update {name[:12]}... is used, although it came out otherwise when trained again"
    if evidence.canary is not None and name not in evidence.gains:
        yield f"update {name[:12]}... is used, and was not judged"


def check_drawn(facts: CheckFacts, update: UpdateBody | None) -> Iterator[str]:
    """What is wrong with the record of an update that was trained again."""
    name = f"update {facts.update[:12]}..."
    if update is None or update.submission.worker != facts.worker:
        yield f"{name} was trained again, and is not an accepted update of {facts.worker}"
    if facts.seed >= facts.chance * 2**32:
        yield f"{name} was trained again, although it was not drawn"


def check_dropped(
    name: str,
    norm: float,
    bounds: tuple[float, float],
    closed: VersionBody | RoundBody,
    least: float,
    differing: Collection[str],
) -> Iterator[str]:
    """What is wrong with the reason for which an update was left out."""
    shortest, longest = bounds
    code, _, _ = closed.dropped[name].partition(":")
    gain, noise = closed.gains.get(name, (0.0, 0.0))
    wrong = {
        "too_long": norm < longest * (1 - ROUNDING),
        "no_change": norm > shortest * (1 + ROUNDING),
        "worse": gain >= -noise,
        "no_gain": gain + noise > least * (1 + ROUNDING),
        "not_trained": name not in differing,
    }
    if wrong.get(code, False):
        yield f"update {name[:12]}... was left out as {code}, and is not"


def follows_rules(
    version: VersionBody, known: Sequence[float], norms: Sequence[float], policy: Mapping[str, Any]
) -> bool:
    """Whether clip and outer step are the run's, as far as it states them.

    The norms that the clip uses (`known`, and then `norms`) must be those of the updates, all in
    the unit in which they are compared.
    """
    scales = [part.scale for part in version.parts]
    clipped = [norm * scale for norm, scale in zip(norms, scales, strict=True)]
    lengths = [*known, *clipped][-len(version.norms) :]
    same = len(lengths) == len(version.norms) and np.allclose(
        lengths, version.norms, rtol=1e-9, atol=0
    )
    after, clip, by_steps = (
        _number(policy, name) for name in ("clip_after", "clip", "clip_by_steps")
    )
    if policy.get("undefended") is False and by_steps is not None:
        clip = by_steps
    if after is not None:
        expected = [clip_scale(norm, known, clip, after) for norm in norms]
        same = same and np.allclose(expected, scales, rtol=1e-9, atol=0)
    return bool(same) and all(
        policy.get(rule, getattr(version, rule)) == getattr(version, rule) for rule in OUTER
    )


def _number(policy: Mapping[str, Any], name: str) -> float | None:
    value = policy.get(name)
    return value if isinstance(value, int | float) else None
