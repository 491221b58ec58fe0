"""What came of a run: its ledger against the receipts of its workers, its audit, and its loss."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from blocktrain.audit.audit import audit
from blocktrain.audit.evidence import open_folder
from blocktrain.bench.chaos.play import Played
from blocktrain.config import Config
from blocktrain.learning.corpus.source import Source
from blocktrain.learning.evaluate import evaluate_alone
from blocktrain.learning.model import build_independent
from blocktrain.learning.threads import limited_threads
from blocktrain.learning.tokenizer import Ids, tokenizer_of
from blocktrain.learning.train import put_weights
from blocktrain.protocol.compression import decompress
from blocktrain.protocol.ledger import (
    LedgerEntry,
    RoundBody,
    UpdateBody,
    VersionBody,
    read_body,
)
from blocktrain.protocol.refusals import Refused
from blocktrain.protocol.tensors import Tensors, schema_of, unpack
from blocktrain.store.open import read_blobs, read_store

ChaosFigures = dict[str, Any]
HARM, HARM_TOKENS = 0.01, 8192  # nats that an update costs; the tokens on which that is measured
PART = 0.25  # of an update, each way, that its slope is measured over
FAR = 0.1  # of the loss: what ends so much higher is harm
CURVE_POINTS, CURVE_TOKENS = 24, 32_768
RUINED = 20.0
"""What stands for a loss that is not finite, in nats."""
BLAMELESS = ("too_stale",)
"""Reasons for which an honest update may be left out."""


@dataclass
class LedgerRecord:
    """The public record, as far as it is counted."""

    entries: Counter[str] = field(default_factory=Counter)
    """Hashes of the entries of updates."""
    updates: dict[str, UpdateBody] = field(default_factory=dict)
    tasks: Counter[int] = field(default_factory=Counter)
    """Accepted answers by task."""
    merged: Counter[str] = field(default_factory=Counter)
    """How often an update became part of a version."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Why an update was left out."""
    versions: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    """Of the block, from version 0: the weights, and the updates that they were made of."""

    def follow(self, entry: LedgerEntry) -> None:
        if entry.kind == "update":
            body = read_body(UpdateBody, entry)
            self.entries[entry.hash] += 1
            self.updates[body.id] = body
            self.tasks[body.submission.task] += 1
        elif entry.kind == "version":
            version = read_body(VersionBody, entry)
            names = tuple(part.update for part in version.parts)
            self.merged.update(names)
            self.versions.append((version.weights.sha256, names))
            self.dropped |= version.dropped
        elif entry.kind == "round":
            self.dropped |= read_body(RoundBody, entry).dropped

    def lost(self, receipts: Mapping[str, str]) -> list[str]:
        """Updates that a worker has a receipt for, and that are not recorded under its entry."""
        return [name for name, entry in receipts.items() if self.entries[entry] == 0]

    def doubled(self) -> list[str]:
        """Updates, or answers to a task, that count twice."""
        twice = [name for name, count in (self.merged + self.entries).items() if count > 1]
        return twice + [f"task {task}" for task, count in self.tasks.items() if count > 1]


def read_record(folder: Path) -> LedgerRecord:
    record = LedgerRecord()
    with closing(read_store(folder)) as store:
        for entry in store.ledger():
            record.follow(entry)
    return record


class LossMeter:
    """The loss of a run's block on held-out text."""

    def __init__(self, folder: Path, config: Config, valid: Ids) -> None:
        self._blobs, self._config, self._valid = read_blobs(folder), config, valid
        self._block = build_independent(config, 1)
        self.weights = lru_cache(CURVE_POINTS)(self._read)
        self.loss_before = cache(lambda name: self.of(self.weights(name), HARM_TOKENS))

    def _read(self, name: str) -> Tensors:
        return unpack(self._blobs.read(name))

    def of(self, weights: Tensors, tokens: int | None = None) -> float:
        put_weights(self._block, weights)
        with limited_threads():
            ce = evaluate_alone(self._block, self._valid[:tokens], self._config.context)
        return ce if math.isfinite(ce) else RUINED

    def harm(self, update: UpdateBody, base: str) -> float:
        """How much the loss rises along an update, from the version that it was trained from.

        Only the slope tells: a step at full learning rate may end higher and still be a good part
        of a mean.
        """
        before, order, name = self.weights(base), update.order, update.submission.payload_sha256
        delta = decompress(self._blobs.read(name), schema_of(before), method=order.compression)

        def loss(part: float) -> float:
            step = np.float32(part)
            moved = {key: np.asarray(t + step * delta[key]) for key, t in before.items()}
            return self.of(moved, HARM_TOKENS)

        rise = loss(1.0) - self.loss_before(base)
        if rise > FAR * self.loss_before(base):
            return rise
        return (loss(PART) - loss(-PART)) / (2 * PART)


def measure(played: Played, source: Source, valid_tokens: int) -> ChaosFigures:
    """All figures of one run."""
    run, record = played.run, read_record(played.run.coordinator)
    checked = audit(open_folder(run.coordinator))
    valid = source.open(tokenizer_of(run.config)).valid[:valid_tokens]
    meter = LossMeter(run.coordinator, run.config, valid)
    receipts = {name: e for member in played.members for name, e in member.receipts.items()}
    wrong = {finding.entry for finding in checked.findings}
    honest = _workers(played, byzantine=False)
    return {
        "finished": played.finished,
        "seconds": round(played.seconds, 1),
        "minutes_of_faults": round(played.fault_minutes, 3),
        "faults": dict(played.faults),
        "stopped_by_itself": played.stopped_by_itself,
        "ce": meter.of(meter.weights(record.versions[-1][0])),
        "curve": loss_curve(record, meter, honest),
        "updates": len(record.updates),
        "receipts": len(receipts),
        "lost": record.lost(receipts),
        "doubled": record.doubled(),
        "versions": checked.versions,
        "recomputed": max(0, checked.versions - len(wrong)),
        "findings": [finding.sentence for finding in checked.findings[:10]],
        "recoveries": [round(seconds, 3) for seconds in sorted(played.recoveries)],
        "problems": _problems(played),
        "forged": dict(played.forged),
        "forgeries_accepted": dict(played.forgeries_accepted),
        "processor_seconds": played.processor_seconds,
        **_honest(played, record, honest),
        **_byzantine(played, record, meter),
    }


def _workers(played: Played, *, byzantine: bool) -> set[str]:
    members = (member for member in played.members if bool(member.attacks) == byzantine)
    return {worker for member in members for worker in member.workers}


def _problems(played: Played) -> list[str]:
    """Why processes of honest workers have ended by themselves: the last reason of each."""
    said = {member.problem.strip() for member in played.members if not member.attacks}
    return sorted(problem.splitlines()[-1] for problem in said if problem)


def _honest(played: Played, record: LedgerRecord, honest: set[str]) -> ChaosFigures:
    """What became of honest work."""
    own = {name: body for name, body in record.updates.items() if body.submission.worker in honest}
    refused = Counter(
        reason.partition(":")[0] for name, reason in record.dropped.items() if name in own
    )
    wrongly = sum(count for code, count in refused.items() if code not in BLAMELESS)
    merged = sum(body.submission.steps for name, body in own.items() if record.merged[name])
    trained = sum(member.steps for member in played.members if not member.attacks)
    settled = sum(1 for name in own if record.merged[name]) + wrongly
    return {
        "honest_steps": merged,
        "honest_trained": trained,
        "goodput": merged / max(trained, 1),
        "honest_left_out": dict(refused),
        "honest_refused": wrongly / max(settled, 1),
    }


def _byzantine(played: Played, record: LedgerRecord, meter: LossMeter) -> ChaosFigures:
    """What became of the updates of byzantine workers."""
    workers = _workers(played, byzantine=True)
    own = [body for body in record.updates.values() if body.submission.worker in workers]
    merged = [body for body in own if record.merged[body.id]]
    harmful = [body for body in merged if is_harmful(meter, body, record)]
    kinds = sum((member.kinds for member in played.members if member.attacks), Counter[str]())
    return {
        "byzantine_updates": len(own),
        "byzantine_merged": len(merged),
        "harmful_merged": len(harmful),
        "harmful_share": len(harmful) / max(len(own), 1),
        "attacks": dict(kinds),
    }


def is_harmful(meter: LossMeter, update: UpdateBody, record: LedgerRecord) -> bool:
    """Whether an update costs more than chance does."""
    base, _ = record.versions[update.submission.base]
    try:
        return meter.harm(update, base) > HARM
    except Refused:  # it cannot even be opened
        return True


def loss_curve(record: LedgerRecord, meter: LossMeter, honest: set[str]) -> list[tuple[int, float]]:
    """(honest steps that were merged, loss) of some versions, the first and the last among them."""
    steps, total = list[int](), 0
    for _, names in record.versions:
        bodies = (record.updates[name] for name in names)
        total += sum(b.submission.steps for b in bodies if b.submission.worker in honest)
        steps.append(total)
    chosen = np.unique(np.linspace(0, len(steps) - 1, CURVE_POINTS).astype(int))
    losses = (meter.of(meter.weights(record.versions[n][0]), CURVE_TOKENS) for n in chosen)
    return [(steps[n], round(loss, 4)) for n, loss in zip(chosen, losses, strict=True)]
