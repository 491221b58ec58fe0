"""Trains every accepted update of a ledger again, in one process with one thread.

It needs torch: only an audit with `retrain` imports it.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter

import numpy as np
import torch
from torch import Tensor

from blocktrain.audit.evidence import AuditProgress, CheckName, Finding
from blocktrain.config import Config, make_config
from blocktrain.errors import BlockTrainError, Damaged
from blocktrain.learning.compose import build_block, independent
from blocktrain.learning.model import Block
from blocktrain.learning.shards import (
    Batches,
    CorpusIndex,
    Shard,
    batches,
    order_of,
    read_index,
)
from blocktrain.learning.threads import limited_threads
from blocktrain.learning.tokenizer import Ids
from blocktrain.learning.train import Trainer, block_weights, put_weights
from blocktrain.protocol import compression, ledger, tensors
from blocktrain.protocol.ledger import UpdateBody, UpdateFacts
from blocktrain.protocol.messages import Blob, Order, Submission

OPEN_SHARDS = 8  # in memory at a time
Read = Callable[[Blob], bytes]
Updates = Sequence[tuple[int, UpdateBody]]  # accepted, with the numbers of their entries


@dataclass(frozen=True)
class TaskState:
    """What a worker held when a task was done."""

    lineage: str
    moments: dict[str, Tensor]
    residual: tensors.Tensors


def retrain(
    run: ledger.RunBody,
    joins: Mapping[str, ledger.JoinFacts],
    updates: Updates,
    read: Read,
    progress: AuditProgress,
) -> tuple[int, list[Finding]]:
    """How many updates were trained again, and the findings.

    Only states that an accepted update has left can be continued.
    """
    config = make_config({**run.config, "device": "cpu"})
    jobs = {update.order.task: (entry, update) for entry, update in updates}
    needs = {task: _parents(update) for task, (_, update) in jobs.items()}
    try:
        ordered = [task for task in TopologicalSorter(needs).static_order() if task in jobs]
    except CycleError:
        return 0, [Finding("lineage", 0, "some updates continue each other's states in a circle")]
    uses = Counter(before for befores in needs.values() for before in befores)
    states: dict[int, TaskState] = {}
    findings = list(_check_first_versions(config, run))
    alone = bool(run.policy.get("exclusive"))
    text = TrainingText(config, read_index(read(run.corpus.index)), read, alone)
    with limited_threads():
        for number, task in enumerate(ordered, start=1):
            entry, update = jobs[task]
            problems, state = _retrain_update(update, text, states)
            findings += [
                Finding(name, entry, f"{sentence}{_device_note(joins, update, name)}")
                for name, sentence in problems
            ]
            uses.subtract(needs[task])
            states = {key: value for key, value in states.items() if uses[key] > 0}
            if state is not None and uses[task] > 0:
                states[task] = state
            progress("updates", number, len(ordered))
    return len(ordered), sorted(findings, key=lambda finding: finding.entry)


def _parents(update: UpdateBody) -> set[int]:
    c = update.submission.continued
    return {task for task in (c.optimizer, c.residual) if task is not None}


@dataclass(frozen=True)
class TrainingText:
    """The corpus of a run. Only shards that an order names are read."""

    config: Config
    index: CorpusIndex
    read: Read
    alone: bool = False
    """Whether each block of the run has one worker."""

    def batches(self, block: int) -> Batches:
        open_shard = lru_cache(OPEN_SHARDS)(self._open)
        return batches(order_of(self.index, self.config, block), self.config.batch, open_shard)

    def _open(self, shard: Shard) -> Ids:
        content = self.read(Blob(sha256=shard.sha256, length=self.index.file_bytes(shard)))
        return np.frombuffer(content, self.index.dtype)


def _check_first_versions(config: Config, run: ledger.RunFacts) -> Iterator[Finding]:
    """Version 0 is what the seed gives, unless it comes from a parent."""
    for first in run.blocks:
        if first.block in run.taken:
            continue
        content = tensors.pack(block_weights(build_block(config, first.block)))
        if hashlib.sha256(content).hexdigest() != first.weights.sha256:
            yield Finding(
                "retrain",
                1,
                f"version 0 of block {first.block} is not what this build of torch draws "
                "from the seed",
            )


def _retrain_update(
    update: UpdateBody, text: TrainingText, states: Mapping[int, TaskState]
) -> tuple[list[tuple[CheckName, str]], TaskState | None]:
    """Train an update again, and compare the result with what was sent."""
    sent = update.submission
    name = f"update {update.id[:12]}... of task {update.order.task} by {sent.worker}"
    try:
        found = train_again(update, text, states)
    except BlockTrainError as error:
        return [("retrain", f"{name} cannot be trained again: {error}")], None
    problems: list[tuple[CheckName, str]] = []
    if sent.lineage != found.state.lineage:
        problems.append(("lineage", f"{name} comes from another optimizer state than it says"))
    if sent.payload_sha256 != hashlib.sha256(found.payload).hexdigest():
        problems.append(
            ("retrain", f"{name} comes out with other bytes{_difference(sent, found, text.read)}")
        )
    elif (sent.loss_before, sent.loss_after) != found.losses:
        problems.append(("retrain", f"{name} has other losses than it reports"))
    return problems, found.state


@dataclass(frozen=True)
class Retrained:
    """What an update comes out as."""

    payload: bytes
    base: tensors.Tensors
    losses: tuple[float, float]
    state: TaskState


def train_again(
    answer: UpdateFacts, text: TrainingText, states: Mapping[int, TaskState]
) -> Retrained:
    """Train an update again, from the states that the tasks before it have left."""
    order, continued = answer.order, answer.submission.continued
    parent = _state_of(states, continued.optimizer)
    before = _state_of(states, continued.residual)
    residual = before.residual if before else {}
    carried = residual if text.alone and _is_carried(answer) else {}
    trainer, losses = _train(answer, text, parent, carried)
    payload, rest = _payload(order, trainer, {} if carried else residual, text.read)
    lineage = ledger.lineage(parent.lineage if parent else None, order, continued)
    base = tensors.unpack(text.read(order.weights))
    state = TaskState(lineage, trainer.moments(), rest)
    return Retrained(payload, base, (losses[0], losses[-1]), state)


def distance(chain: Sequence[UpdateFacts], text: TrainingText) -> float:
    """How far the last update of a chain is from what comes out here, in lengths of that.

    Each continues what those before it have left, and the first one nothing. 0: the same bytes.
    """
    states: dict[int, TaskState] = {}
    with limited_threads():
        for answer in chain:
            found = train_again(answer, text, states)
            states[answer.order.task] = found.state
    sent = chain[-1].submission
    if sent.payload_sha256 == hashlib.sha256(found.payload).hexdigest():
        return 0.0
    schema = tensors.schema_of(found.base)
    theirs = compression.open_update(text.read(_blob_of(sent)), schema)
    ours = compression.open_update(found.payload, schema)
    off = change = 0.0
    for name, base in found.base.items():
        value = ours.tensors[name].astype(np.float64)
        off += float(np.sum(np.square(theirs.tensors[name] - value)))
        change += float(np.sum(np.square(value - base if ours.absolute else value)))
    return math.sqrt(off / change) if change > 0 else math.inf


def _blob_of(sent: Submission) -> Blob:
    return Blob(sha256=sent.payload_sha256, length=sent.payload_length)


def _state_of(states: Mapping[int, TaskState], task: int | None) -> TaskState | None:
    if task is not None and task not in states:
        raise Damaged(
            f"it continues what task {task} left, and no accepted update of that task "
            "could be trained again"
        )
    return None if task is None else states[task]


def _is_carried(update: UpdateFacts) -> bool:
    """Whether training began with the residual in the weights, by the protocol's rule."""
    named = update.order.continues.residual
    method = compression.METHODS[update.order.compression]
    return method.carries and named is not None and named == update.submission.continued.residual


def _train(
    update: UpdateFacts, text: TrainingText, parent: TaskState | None, carried: tensors.Tensors
) -> tuple[Trainer, list[float]]:
    order, config, read = update.order, text.config, text.read
    sources = {pin.block: _source(config, pin.block, read(pin.weights)) for pin in order.features}
    trainer = Trainer(config, order.block, independent(sources), order.start_step)
    trainer.shift = order.position - order.start_step
    weights = tensors.unpack(read(order.weights))
    trainer.load_weights(compression.add_residual(weights, carried))
    # Copies: the optimizer works in place, and another task may continue the same state.
    trainer.restore(
        {} if parent is None else {name: moment.clone() for name, moment in parent.moments.items()}
    )
    end = order.start_step + update.submission.steps
    losses = [loss for _, loss in trainer.run(text.batches(order.block), end)]
    return trainer, losses


def _source(config: Config, index: int, raw: bytes) -> Block:
    block = build_block(config, index)
    put_weights(block, tensors.unpack(raw))
    return block


def _payload(
    order: Order, trainer: Trainer, residual: tensors.Tensors, read: Read
) -> tuple[bytes, tensors.Tensors]:
    new = trainer.weights()
    if compression.METHODS[order.compression].exact:
        return compression.compress_weights(new, order.compression), {}
    base = tensors.unpack(read(order.weights))
    return compression.compress(
        {name: new[name] - base[name] for name in new},
        residual,
        order.compression,
    )


def _difference(sent: Submission, found: Retrained, read: Read) -> str:
    """How far what was sent is from what comes out here."""
    schema = tensors.schema_of(found.base)
    try:
        theirs = compression.open_update(read(_blob_of(sent)), schema).tensors
    except BlockTrainError as error:
        return f" ({error})"
    ours = compression.open_update(found.payload, schema).tensors
    most = max(float(np.abs(ours[name] - theirs[name]).max(initial=0)) for name in ours)
    return f" (values differ by up to {most:.1e})" if most else " (the same values: another zstd)"


def _device_note(joins: Mapping[str, ledger.JoinFacts], update: UpdateBody, name: CheckName) -> str:
    """Honest work can differ: the finding says on which device it was trained."""
    if name != "retrain":
        return ""
    known = joins.get(update.submission.worker)
    device = known.device if known else "an unknown device"
    return (
        f"; it was trained on {device}, this is torch {torch.__version__} on cpu with one thread: "
        "another device type or build of torch gives other bits"
    )
