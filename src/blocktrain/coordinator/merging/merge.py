"""Many updates of one block in, its next version out.

Pure numpy: the same inputs give the same bytes, in any order.

What is averaged are *proposals*: the weights that each worker proposes, not its deltas.
`base + (new - base)` is not `new` in float32, nor always in float64 (1 + (1e-30 - 1) is 0). So a
worker that does not compress sends its new weights (`absolute`). Where these start from the current
version they are the proposal: one replica with plain averaging gives the worker's bytes. Compressed
deltas, and late absolute weights, become proposals in float64: current + delta.

Order: `checks` on each update (shape, finite, bounds, copies, retraining, canary, norm clip), the
shares, `combine` (weighted mean, or the trimmed mean of five workers and more), the outer step,
then `guards` on the result. Only elementwise float64 arithmetic and numpy's pairwise sum are used.
BLAS is not: its order of sums depends on the machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

NumpyArray = NDArray[np.generic]
Wide = NDArray[np.float64]
State = Mapping[str, NumpyArray]


@dataclass(frozen=True)
class MergeOptions:
    """How updates are merged. The default is plain averaging, as in the paper."""

    outer: str = "average"  # or nesterov
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    clip: float | None = 3.0  # longest norm of a delta, in running medians; None: as it comes
    clip_by_steps: bool = False  # norms are compared as if all had made the same steps
    clip_after: int = 5  # norms that must be known before any is clipped
    kept_norms: int = 32  # norms that the running median is taken from
    defences: bool = False  # bounds, capped shares and a robust mean: not every member is trusted
    alike: float | None = None  # cosine with another worker's update from which on it is a copy
    changes: bool = False  # whether the change from the current version is wanted, too

    def __post_init__(self) -> None:
        if self.outer not in ("average", "nesterov"):
            raise ValueError(f"outer={self.outer!r} is neither average nor nesterov")


@dataclass(frozen=True)
class Likeness:
    """The earlier update that an update is most like."""

    of: str  # empty: one that is not at hand any more
    cosine: float


@dataclass(frozen=True)
class Update:
    """One update as it came out of the codec."""

    id: str
    values: State  # new weights if absolute, else a delta
    tokens: int
    weight: float = 1.0  # of staleness
    absolute: bool = False
    base: State | None = None  # what late absolute weights started from; None: the current version
    worker: str = ""
    payload: str = ""  # sha256
    like: Likeness | None = None  # None: not compared
    differs: str = ""  # how it came out when it was trained again, if not right
    newcomer: bool = False
    steps: int = 1
    usual: float = 1.0  # the unit of its norm; with `clip_by_steps` what its steps usually change
    bounds: tuple[float, float] = (0.0, math.inf)  # shortest and longest norm of honest steps
    late: bool = False  # whether it started from an older version
    reach: float = 1.0  # how far its steps could go together, up to a factor
    gain: float | None = None  # how far it leads down on the canary; None: not judged
    noise: float = 0.0  # that a gain may be off by


@dataclass(frozen=True)
class Peers:
    """What the median worker of a round gains for each unit of reach, and its reach."""

    gain: float
    reach: float

    def expect(self, reach: float) -> float:
        """Longer tasks need not gain more: what there is to gain is not without end."""
        return self.gain * min(reach, self.reach)


@dataclass(frozen=True)
class MergeContext:
    """What all updates of a merge are held against."""

    current: State
    options: MergeOptions = field(default_factory=MergeOptions)
    momentum: State | None = None  # of the outer step: part of the version's state
    norms: Sequence[float] = ()  # of the block's last used updates in their units, oldest first
    peers: Peers | None = None  # the round's workers, where they say what is usual


@dataclass(frozen=True)
class Candidate:
    """An update on its way through the checks."""

    update: Update
    norm: float = 0.0  # of its delta, before the clip
    scale: float = 1.0  # by the clip
    share: float = 0.0  # in the mean


@dataclass(frozen=True)
class RejectedUpdate:
    """An update that did not pass a check."""

    id: str
    code: str
    reason: str


@dataclass(frozen=True)
class MergeResult:
    """The next version, or why there is none. `used` and `rejected` name every update."""

    state: dict[str, NumpyArray] | None
    momentum: dict[str, NumpyArray] | None
    used: tuple[Candidate, ...]
    rejected: tuple[RejectedUpdate, ...]
    norms: tuple[float, ...]  # to be handed to the next merge
    reason: str
    change: dict[str, NumpyArray] = field(default_factory=dict)
    """What is added to the current version, before it is rounded to the next one's weights."""


Check = Callable[[MergeContext, Candidate], Candidate | RejectedUpdate]
Combine = Callable[[MergeContext, Sequence[Candidate], str], Wide]
Guard = Callable[[MergeContext, State, Sequence[Candidate]], str | None]
Shares = Callable[[Sequence[Update]], list[float]]

ROBUST_FROM = 5  # workers
LARGEST = 2.0  # weight of a worker in a merge, in medians of all workers' weights
PEERS = 3  # workers whose gains say what is usual
LEAST_GAIN = 0.25  # of the usual
NEWCOMERS = 0.2  # share of all newcomers together, where others have answered as well


def check_shape(before: MergeContext, candidate: Candidate) -> Candidate | RejectedUpdate:
    """Names, shapes and number types are those of the block."""
    update = candidate.update
    for kind, values in (("values", update.values), ("base", update.base)):
        if values is None:
            continue
        if set(values) != set(before.current):
            odd = sorted(set(values) ^ set(before.current))[0]
            return RejectedUpdate(
                update.id, "wrong_shape", f"{kind}: the tensor {odd!r} is missing or unknown"
            )
        for name, expected in before.current.items():
            tensor = values[name]
            if tensor.shape != expected.shape:
                return RejectedUpdate(
                    update.id,
                    "wrong_shape",
                    f"{kind}: {name} has shape {tensor.shape}, the block has {expected.shape}",
                )
            if (
                update.absolute and tensor.dtype != expected.dtype
            ) or tensor.dtype.kind != expected.dtype.kind:
                return RejectedUpdate(
                    update.id,
                    "wrong_shape",
                    f"{kind}: {name} is {tensor.dtype}, the block is {expected.dtype}",
                )
    if update.tokens < 1 or not 0 < update.weight <= 1:
        return RejectedUpdate(
            update.id,
            "wrong_weight",
            f"{update.tokens} tokens with weight {update.weight} cannot be counted",
        )
    return candidate


def check_finite(before: MergeContext, candidate: Candidate) -> Candidate | RejectedUpdate:
    """No NaN and no infinity."""
    for name in sorted(candidate.update.values):
        if not np.isfinite(candidate.update.values[name]).all():
            return RejectedUpdate(
                candidate.update.id, "not_finite", f"{name} holds numbers that are not finite"
            )
    return candidate


def measure_norm(before: MergeContext, candidate: Candidate) -> Candidate | RejectedUpdate:
    """How long the delta is."""
    squares = []
    for name in sorted(before.current):
        if _is_float(before.current[name]):
            with np.errstate(over="ignore"):
                squares.append(float(np.sum(np.square(_delta(before, candidate.update, name)))))
    norm = math.sqrt(math.fsum(squares)) if all(math.isfinite(s) for s in squares) else math.inf
    if norm == math.inf:
        return RejectedUpdate(
            candidate.update.id, "not_finite", "the length of the update is not finite"
        )
    return replace(candidate, norm=norm)


def bound_norm(before: MergeContext, candidate: Candidate) -> Candidate | RejectedUpdate:
    """As long as so many steps at this learning rate make a delta, not longer and not shorter.

    It needs no earlier update, so it holds from the first one on. It also keeps the running median
    of the clip from being pulled to zero.
    """
    update, norm, (shortest, longest) = candidate.update, candidate.norm, candidate.update.bounds
    made = f"a change of {norm:.3g}; {update.steps} steps change"
    if norm > longest:
        return RejectedUpdate(update.id, "too_long", f"{made} at most {longest:.3g}")
    if norm < shortest:
        return RejectedUpdate(update.id, "no_change", f"{made} at least {shortest:.3g}")
    return candidate


def check_copy(before: MergeContext, candidate: Candidate) -> Candidate | RejectedUpdate:
    """It is not what another worker has sent before, in this round or in the last ones."""
    like, alike = candidate.update.like, before.options.alike
    if like is not None and alike is not None and like.cosine >= alike:
        reason = f"it changes what update {like.of[:12]} changes (cosine {like.cosine:.6f})"
        if not like.of:
            reason = "the same bytes were sent before"
        return RejectedUpdate(candidate.update.id, "copy", reason)
    return candidate


def check_trained(before: MergeContext, candidate: Candidate) -> Candidate | RejectedUpdate:
    """If it was trained again, it came out as it was sent."""
    update = candidate.update
    return RejectedUpdate(update.id, "not_trained", update.differs) if update.differs else candidate


def find_peers(updates: Sequence[Update]) -> Peers | None:
    """The median worker of a round; None: too few to say.

    A late update repeats what the last version has gained already.
    """
    own: dict[str, list[Update]] = {}
    for u in updates:
        if u.gain is not None and math.isfinite(u.gain) and not u.late:
            own.setdefault(u.worker, []).append(u)
    if len(own) < PEERS:
        return None
    gains = (median((u.gain or 0.0) / u.reach for u in mine) for mine in own.values())
    return Peers(median(gains), median(median(u.reach for u in mine) for mine in own.values()))


def check_gain(before: MergeContext, candidate: Candidate) -> Candidate | RejectedUpdate:
    """On text that its worker could not know beforehand the update does no harm, and some good if
    those of others do."""
    update = candidate.update
    if update.gain is None:
        return candidate
    if not update.gain >= -update.noise:
        return RejectedUpdate(
            update.id,
            "worse",
            f"it leads to a loss on a secret sample of text that is {-update.gain:.3g} higher "
            f"(noise {update.noise:.3g})",
        )
    usual = 0.0 if before.peers is None or update.late else before.peers.expect(update.reach)
    if update.gain + update.noise < LEAST_GAIN * usual:
        return RejectedUpdate(
            update.id,
            "no_gain",
            f"it gains {update.gain:.3g} on a secret sample of text (noise {update.noise:.3g}), "
            f"where others would gain {usual:.3g}",
        )
    return candidate


def clip_norm(before: MergeContext, candidate: Candidate) -> Candidate | RejectedUpdate:
    """A delta much longer than the block's usual ones is shortened; its weight stays."""
    o, norm = before.options, candidate.norm / candidate.update.usual
    known = before.norms[-o.kept_norms :]
    limit = math.inf if o.clip is None or len(known) < o.clip_after else o.clip * median(known)
    return replace(candidate, scale=min(1.0, limit / norm) if norm > 0 else 1.0)


def plain_shares(updates: Sequence[Update]) -> list[float]:
    """By tokens times staleness weight."""
    total = math.fsum(u.tokens * u.weight for u in updates)
    return [u.tokens * u.weight / total for u in updates]


def capped_shares(updates: Sequence[Update]) -> list[float]:
    """By tokens times staleness weight, but nobody decides alone.

    The updates of one worker count as its largest one. No worker weighs more than twice the median.
    Newcomers together have at most a fifth where others have answered as well.
    """
    own: dict[str, list[float]] = {}
    for u in updates:
        own.setdefault(u.worker, []).append(u.tokens * u.weight)
    usual = median([max(weights) for weights in own.values()] or [0.0])
    factor = {
        worker: min(max(weights), LARGEST * usual) / math.fsum(weights)
        for worker, weights in own.items()
    }
    weights = [u.tokens * u.weight * factor[u.worker] for u in updates]
    fresh = math.fsum(w for u, w in zip(updates, weights, strict=True) if u.newcomer)
    others = math.fsum(weights) - fresh
    if fresh > 0 and others > 0:
        scale = min(1.0, NEWCOMERS / (1 - NEWCOMERS) * others / fresh)
        weights = [w * scale if u.newcomer else w for u, w in zip(updates, weights, strict=True)]
    total = math.fsum(weights)
    return [w / total for w in weights]


def weighted_mean(before: MergeContext, candidates: Sequence[Candidate], name: str) -> Wide:
    """Of one tensor, by share. A single candidate has share 1, and the mean is its proposal."""
    first, *others = candidates
    mean: Wide = first.share * proposal(
        before, first, name
    )  # not 0 + ...: that would lose the sign of -0.0
    for candidate in others:
        mean = mean + candidate.share * proposal(before, candidate, name)
    return mean


def trimmed_mean(before: MergeContext, candidates: Sequence[Candidate], name: str) -> Wide:
    """The weighted mean of each weight, without the extreme fifths of the workers' proposals."""
    own: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        own.setdefault(candidate.update.worker, []).append(candidate)
    shares = [sum(c.share for c in mine) for mine in own.values()]
    proposals = np.stack(
        [
            weighted_mean(before, mine, name) / share
            for mine, share in zip(own.values(), shares, strict=True)
        ]
    )
    weights = np.array(shares).reshape((-1,) + (1,) * (proposals.ndim - 1))
    drop = max(1, len(own) // 5)
    inner = np.argsort(proposals, axis=0, kind="stable")[drop:-drop]
    weights = np.take_along_axis(np.broadcast_to(weights, proposals.shape), inner, axis=0)
    values = np.take_along_axis(proposals, inner, axis=0)
    return np.asarray((weights * values).sum(axis=0) / weights.sum(axis=0))


def robust_mean(before: MergeContext, candidates: Sequence[Candidate], name: str) -> Wide:
    """The trimmed mean where at least five workers have answered, else the weighted mean."""
    workers = len({c.update.worker for c in candidates})
    combine = trimmed_mean if workers >= ROBUST_FROM else weighted_mean
    return combine(before, candidates, name)


def guard_finite(before: MergeContext, state: State, used: Sequence[Candidate]) -> str | None:
    """Finite updates can still add up to an overflow."""
    bad = [name for name in sorted(state) if not np.isfinite(state[name]).all()]
    return f"{bad[0]} would not be finite" if bad else None


@dataclass(frozen=True)
class Steps:
    """The merge as an ordered list: checks before, shares, how to combine, guards after."""

    checks: tuple[Check, ...] = (check_shape, check_finite, measure_norm, clip_norm)
    shares: Shares = plain_shares
    combine: Combine = weighted_mean
    guards: tuple[Guard, ...] = (guard_finite,)


TRUSTING = Steps()
BOUNDED: tuple[Check, ...] = (
    check_shape,
    check_finite,
    measure_norm,
    bound_norm,
    check_copy,
    check_trained,
)
"""The checks that need no text."""
DEFENDED = Steps(
    checks=(*BOUNDED, check_gain, clip_norm),
    shares=capped_shares,
    combine=robust_mean,
)


def merge(
    before: MergeContext, updates: Sequence[Update], steps: Steps | None = None
) -> MergeResult:
    """The next version of a block from all updates of its round."""
    steps = steps or (DEFENDED if before.options.defences else TRUSTING)
    ordered = sorted(updates, key=lambda u: u.id)
    if len({u.id for u in ordered}) != len(ordered):
        raise ValueError("the same update twice in one merge")
    before = replace(before, peers=find_peers(ordered))
    passed, rejected = run_checks(before, ordered, steps.checks)
    shares = steps.shares([c.update for c in passed])
    used = tuple(replace(c, share=share) for c, share in zip(passed, shares, strict=True))
    if not used:
        return MergeResult(
            None,
            None,
            (),
            rejected,
            tuple(before.norms),
            f"no update is left: {len(rejected)} refused",
        )
    state, momentum, change = _outer_step(before, used, steps.combine)
    for guard in steps.guards:
        if (problem := guard(before, state, used)) is not None:
            named = ", ".join(c.update.id for c in used)
            return MergeResult(
                None,
                None,
                used,
                rejected,
                tuple(before.norms),
                f"not published: {problem}; merged were {named}",
            )
    # Norms count as clipped: otherwise long updates would slowly lift the limit.
    norms = (*before.norms, *(c.norm / c.update.usual * c.scale for c in used))[
        -before.options.kept_norms :
    ]
    clipped = sum(c.scale < 1 for c in used)
    return MergeResult(
        state,
        momentum,
        used,
        rejected,
        norms,
        f"{len(used)} updates merged, {clipped} of them clipped, {len(rejected)} refused",
        change,
    )


def run_checks(
    before: MergeContext, updates: Sequence[Update], checks: Sequence[Check]
) -> tuple[list[Candidate], tuple[RejectedUpdate, ...]]:
    """(what passed all checks, what did not)."""
    passed: list[Candidate] = []
    rejected: list[RejectedUpdate] = []
    for update in updates:
        candidate: Candidate | RejectedUpdate = Candidate(update)
        for check in checks:
            if isinstance(candidate, Candidate):
                candidate = check(before, candidate)
        if isinstance(candidate, Candidate):
            passed.append(candidate)
        else:
            rejected.append(candidate)
    return passed, tuple(rejected)


def proposal(before: MergeContext, candidate: Candidate, name: str) -> Wide:
    """The weights that an update proposes for one tensor, in float64."""
    update = candidate.update
    if update.absolute and update.base is None and candidate.scale == 1.0:
        return _wide(update.values[name])
    return _wide(before.current[name]) + candidate.scale * _delta(before, update, name)


def _delta(before: MergeContext, update: Update, name: str) -> Wide:
    if not update.absolute:
        return _wide(update.values[name])
    return _wide(update.values[name]) - _wide(
        (before.current if update.base is None else update.base)[name]
    )


def _outer_step(
    before: MergeContext, used: Sequence[Candidate], combine: Combine
) -> tuple[dict[str, NumpyArray], dict[str, NumpyArray] | None, dict[str, NumpyArray]]:
    """(weights, momentum, change): the change only if it is wanted."""
    o = before.options
    state: dict[str, NumpyArray] = {}
    momentum: dict[str, NumpyArray] = {}
    change: dict[str, NumpyArray] = {}
    for name in sorted(before.current):
        current = before.current[name]
        if not _is_float(current):
            state[name] = current.copy()  # counters and tables are not learned
            continue
        target = combine(before, used, name)
        if o.outer == "nesterov":
            gradient = _wide(current) - target
            velocity = (
                _wide(before.momentum[name])
                if before.momentum is not None
                else np.zeros(current.shape, np.float64)
            )
            buffer = o.outer_momentum * velocity + gradient
            step = o.outer_learning_rate * (gradient + o.outer_momentum * buffer)
            target = _wide(current) - step
            momentum[name] = _narrow(buffer, current)
        state[name] = _narrow(target, current)
        if o.changes:
            change[name] = _narrow(target - _wide(current), current)
    return state, (momentum if o.outer == "nesterov" else None), change


def _is_float(array: NumpyArray) -> bool:
    return array.dtype.kind == "f"


def _wide(array: NumpyArray) -> Wide:
    return array.astype(np.float64, order="C")  # one layout: the order of a sum follows it


def _narrow(array: Wide, like: NumpyArray) -> NumpyArray:
    with np.errstate(over="ignore"):  # the finite guard speaks about it
        return np.asarray(array).astype(like.dtype)
