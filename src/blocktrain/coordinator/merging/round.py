"""One round: its updates are read, judged and merged, and the next version is stored.

numpy only. A payload was checked when it arrived, without decoding it: many small payloads may wait
that decode to much, so nothing decoded is kept. It is opened once, here.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from blocktrain.config import Config
from blocktrain.coordinator.history import NEWCOMER, Answer, Standing
from blocktrain.coordinator.merging.copies import find_copies
from blocktrain.coordinator.merging.judge import Judge, Judged, Question, Suspect
from blocktrain.coordinator.merging.merge import (
    BOUNDED,
    Candidate,
    Likeness,
    MergeContext,
    MergeOptions,
    MergeResult,
    Update,
    merge,
    run_checks,
)
from blocktrain.protocol.compression import (
    METHODS,
    Method,
    add_delta,
    compress,
    expected_payload,
    open_update,
)
from blocktrain.protocol.messages import Blob, BlockVersion, Order, Submission
from blocktrain.protocol.refusals import Refused
from blocktrain.protocol.tensors import (
    Schema,
    Tensors,
    check_finite,
    pack,
    schema_of,
    unpack,
)
from blocktrain.schedule import change_bounds, reach, usual_change
from blocktrain.store.contract import Blobs, Store, UpdateRecord, VersionRecord

WORTH = 4
"""A residual makes a delta long, however little its updates change. It waits until a quarter of
such a length has come as updates. So the disk grows by what is received."""
WaitingUpdates = Mapping[str, Answer]  # by update


@dataclass(frozen=True)
class RoundOutcome:
    """What a merge gave, with its blobs stored. Without weights there is no version."""

    merged: MergeResult
    weights: Blob | None = None
    momentum: Blob | None = None
    delta: Blob | None = None
    residual: Blob | None = None
    complete: bool = True
    loss: float | None = None
    features: tuple[BlockVersion, ...] = ()
    canary: int | None = None
    gains: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """(gain, noise) by update, used or not."""

    @property
    def evidence(self) -> dict[str, Any]:
        """What else the ledger keeps. The text of the judgement is secret no more."""
        judged = {} if self.canary is None else {"canary": self.canary, "gains": dict(self.gains)}
        return judged if self.complete else {**judged, "complete": False}

    @property
    def dropped(self) -> dict[str, str]:
        """Updates that are not part of the version, and why."""
        reasons = {r.id: f"{r.code}: {r.reason}" for r in self.merged.rejected}
        if self.weights is None:  # a guard refused the result: all that were merged are suspect
            reasons |= {c.update.id: self.merged.reason for c in self.merged.used}
        return reasons


@dataclass(frozen=True)
class MergedRound:
    """What a merge gave. Nothing of it is stored yet."""

    merged: MergeResult
    delta: bytes | None = None  # None: the version is published whole
    residual: Tensors = field(default_factory=dict)  # empty: the delta lacks nothing
    complete: bool = True  # whether the parent's residual is part of the delta
    canary: int | None = None  # the text that the updates were judged on; None: they were not
    judged: Mapping[str, Judged] = field(default_factory=dict)  # by update


@dataclass(frozen=True)
class Round:
    """What a version is made of, and who judges it."""

    config: Config
    parent: VersionRecord
    waiting: WaitingUpdates
    standings: Mapping[str, Standing]
    options: MergeOptions
    earlier: Sequence[Answer] = ()  # of the block's last rounds
    repeated: frozenset[str] = frozenset()  # updates whose bytes were sent before
    differing: Mapping[str, str] = field(default_factory=dict)  # trained again, with other results
    judge: Judge | None = None
    received: int = 0  # bytes of updates since the block's last delta that was complete

    @property
    def features(self) -> tuple[BlockVersion, ...]:
        """The newest versions of other blocks that updates were trained on."""
        orders = (order for _, order in self.waiting.values())
        return _newest_features(order.features for order in orders)


def merge_round(store: Store, round_: Round, method: Method = "none") -> MergedRound:
    """The waiting updates of a block, merged. Nothing is written yet.

    Of the updates only names and figures are kept. `method` is the compression of versions.
    """
    parent, waiting, options = round_.parent, round_.waiting, round_.options
    current = _read_tensors(store.blobs, parent.weights)
    momentum = None if parent.momentum is None else _read_tensors(store.blobs, parent.momentum)
    records = {u.id: u for u in store.pending(parent.block)}
    base = _Base(current, schema_of(current), parent.version)
    updates = [
        _with_facts(_read_update(store, records[name], order, base), waiting[name], round_, base)
        for name, (_, order) in waiting.items()
    ]
    updates = compare_updates(store, round_, updates, base)
    before = MergeContext(current, options, momentum, parent.norms)
    canary, judged = judge_updates(round_, before, updates)
    updates = [_with_verdict(update, judged.get(update.id)) for update in updates]
    merged = merge(before, updates)
    used = (replace(c, update=replace(c.update, values={}, base=None)) for c in merged.used)
    merged = replace(merged, used=tuple(used))
    made = _compressed(store, round_, merged, current, method)
    return replace(made, canary=canary, judged=judged)


def _compressed(
    store: Store, round_: Round, merged: MergeResult, current: Tensors, method: Method
) -> MergedRound:
    """The version as it is published."""
    parent = round_.parent
    if merged.state is None or METHODS[method].exact:
        return MergedRound(merged)
    residual = None if parent.residual is None else _read_tensors(store.blobs, parent.residual)
    lengths = (round_.waiting[c.update.id][0].payload_length for c in merged.used)
    received = round_.received + sum(lengths)
    complete = WORTH * received >= expected_payload(schema_of(current), method)
    own = None
    if residual is None or not complete:
        name = _own_payload(merged, round_, method)
        own = None if name is None else store.blobs.read(name)
    if residual is None or complete:
        return compress_version(merged, current, residual, method, own)
    made = compress_version(merged, current, None, method, own)
    rest = {name: t + made.residual[name] if made.residual else t for name, t in residual.items()}
    return replace(made, residual=rest, complete=False)


def compare_updates(
    store: Store, round_: Round, updates: Sequence[Update], base: _Base
) -> list[Update]:
    """The updates, with what they are like of what others have sent before them.

    Nothing where members are trusted.
    """
    if not round_.options.defences or round_.options.alike is None:
        return list(updates)
    earlier = (_read_earlier(store, answer, base) for answer in round_.earlier)
    found = find_copies(base.tensors, updates, earlier)
    for name in round_.repeated:
        if name not in found or found[name].cosine < 1:
            found[name] = Likeness("", 1.0)
    return [replace(update, like=found.get(update.id)) for update in updates]


def judge_updates(
    round_: Round, before: MergeContext, updates: Sequence[Update]
) -> tuple[int | None, dict[str, Judged]]:
    """(canary, what each update gains), for those that pass all checks that need no text.

    Nothing where members are trusted. The canary is drawn only now, when all payloads are stored:
    nobody could train for it.
    """
    if round_.judge is None or not round_.options.defences:
        return None, {}
    names = [c.update.id for c in run_checks(before, updates, BOUNDED)[0]]
    if not names:
        return None, {}
    suspects = tuple(
        Suspect(
            payload=submission.payload_sha256,
            compression=order.compression,
            base=order.weights.sha256 if order.base != round_.parent.version else None,
        )
        for submission, order in map(round_.waiting.__getitem__, names)
    )
    canary = secrets.randbits(32)
    return canary, dict(zip(names, _ask(round_, suspects, canary), strict=True))


def _ask(round_: Round, suspects: tuple[Suspect, ...], canary: int) -> list[Judged]:
    parent = round_.parent
    question = Question(parent.block, parent.weights, round_.features, suspects, canary)
    return round_.judge.judge(question) if round_.judge else []


def guard_version(
    store: Store, round_: Round, made: MergedRound, outcome: RoundOutcome
) -> RoundOutcome:
    """The outcome with its loss; without the version, if that is worse than its parent.

    Updates that are good one by one can still be too much together.
    """
    if made.canary is None:
        return outcome
    gains = {name: (judged.gain, judged.noise) for name, judged in made.judged.items()}
    outcome = replace(outcome, canary=made.canary, gains=gains)
    if outcome.weights is None:
        return outcome
    names, outer = [c.update.id for c in outcome.merged.used], round_.options.outer
    if len(names) == 1 and outer == "average" and outcome.merged.used[0].scale == 1:
        return replace(outcome, loss=made.judged[names[0]].loss)
    (version,) = _ask(round_, (Suspect(weights=outcome.weights.sha256),), made.canary)
    if version.gain >= -version.noise:
        return replace(outcome, loss=version.loss)
    for blob in filter(None, (outcome.weights, outcome.momentum, outcome.delta, outcome.residual)):
        store.blobs.delete(blob.sha256)
    reason = (
        f"not published: the loss on a secret sample of text rose by {-version.gain:.3g}; "
        f"merged were {', '.join(names)}"
    )
    return RoundOutcome(
        replace(outcome.merged, state=None, reason=reason), canary=made.canary, gains=gains
    )


def _own_payload(merged: MergeResult, round_: Round, method: Method) -> str | None:
    """The payload of the only update, if that is just what the version adds to its parent.

    Whoever has sent it need not fetch it.
    """
    used = merged.used
    if round_.options.outer != "average" or len(used) != 1 or used[0].scale != 1:
        return None
    submission, order = round_.waiting[used[0].update.id]
    return submission.payload_sha256 if order.compression == method else None


def compress_version(
    merged: MergeResult,
    current: Tensors,
    residual: Tensors | None,
    method: Method,
    own: bytes | None = None,
) -> MergedRound:
    """The version as its parent plus a delta, and what the delta lacks.

    The next version gets that, so nothing is lost. `own` is a payload that is the delta already.
    """
    try:
        delta, rest = (own, {}) if own else compress(merged.change, residual, method)
        weights = add_delta(current, delta)
        check_finite(weights)
    except Refused as error:
        named = ", ".join(c.update.id for c in merged.used)
        reason = f"not published: {error}; merged were {named}"
        return MergedRound(replace(merged, state=None, momentum=None, reason=reason))
    if not any(tensor.any() for tensor in rest.values()):
        rest = {}
    return MergedRound(replace(merged, state=weights, change={}), delta, rest)


def store_outcome(store: Store, made: MergedRound, waiting: WaitingUpdates) -> RoundOutcome:
    """What a merge gave, made durable."""
    merged = made.merged
    if merged.state is None:
        return RoundOutcome(merged)
    used = [waiting[c.update.id] for c in merged.used]
    return RoundOutcome(
        merged,
        weights=_store_tensors(store.blobs, merged.state),
        momentum=None if merged.momentum is None else _store_tensors(store.blobs, merged.momentum),
        delta=None if made.delta is None else _store_bytes(store.blobs, made.delta),
        residual=_store_tensors(store.blobs, made.residual) if made.residual else None,
        complete=made.complete,
        loss=_mean_loss(merged.used, used),
        features=_newest_features(order.features for _, order in used),
    )


def _newest_features(of_orders: Iterable[tuple[BlockVersion, ...]]) -> tuple[BlockVersion, ...]:
    return max(of_orders, key=lambda pins: [pin.version for pin in pins], default=())


@dataclass(frozen=True)
class _Base:
    """The version that is merged into."""

    tensors: Tensors
    schema: Schema
    version: int


def _read_tensors(blobs: Blobs, name: str) -> Tensors:
    return unpack(blobs.read(name))


def _read_update(store: Store, record: UpdateRecord, order: Order, current: _Base) -> Update:
    content = store.blobs.read(record.payload)
    opened = open_update(content, current.schema, method=order.compression)
    base = None
    # Of late weights only the difference to what they started from counts.
    if opened.absolute and record.base != current.version:
        started = store.version(record.block, record.base)
        base = current.tensors if started is None else _read_tensors(store.blobs, started.weights)
    return Update(record.id, opened.tensors, record.tokens, record.weight, opened.absolute, base)


def _read_earlier(store: Store, answer: Answer, current: _Base) -> Update:
    """What somebody has sent for an older version."""
    submission, order = answer
    content = store.blobs.read(submission.payload_sha256)
    opened = open_update(content, current.schema, method=order.compression)
    base = _read_tensors(store.blobs, order.weights.sha256) if opened.absolute else None
    return Update(
        submission.update,
        opened.tensors,
        submission.tokens,
        absolute=opened.absolute,
        base=base,
        worker=submission.worker,
        payload=submission.payload_sha256,
    )


def _with_facts(
    update: Update, answer: tuple[Submission, Order], round_: Round, current: _Base
) -> Update:
    """With what the coordinator knows of it by itself."""
    if not round_.options.defences:
        return update
    submission, order = answer
    parameters = sum(tensor.size for tensor in current.tensors.values())
    made = range(order.start_step, order.start_step + submission.steps)
    usual = 1.0
    if round_.options.clip_by_steps:
        usual = usual_change(round_.config, order.block, made, parameters)
    return replace(
        update,
        usual=usual,
        worker=submission.worker,
        payload=submission.payload_sha256,
        differs=round_.differing.get(update.id, ""),
        newcomer=round_.standings.get(submission.worker, NEWCOMER).newcomer,
        late=order.base != current.version,
        reach=reach(round_.config, order.block, made),
        steps=submission.steps,
        bounds=change_bounds(round_.config, order.block, made, parameters),
    )


def _with_verdict(update: Update, verdict: Judged | None) -> Update:
    return replace(update, gain=verdict.gain, noise=verdict.noise) if verdict else update


def _store_tensors(blobs: Blobs, tensors: Tensors) -> Blob:
    return _store_bytes(blobs, pack(tensors))


def _store_bytes(blobs: Blobs, content: bytes) -> Blob:
    return Blob(sha256=blobs.put(content), length=len(content))


def _mean_loss(used: Sequence[Candidate], answers: Sequence[tuple[Submission, Order]]) -> float:
    return sum(c.share * s.loss_after for c, (s, _) in zip(used, answers, strict=True))
