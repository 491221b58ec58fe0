"""A round that closes: the blobs of its updates in, the next version of the block out. numpy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from blocktrain.coordinator.merge import Before, Candidate, Merged, MergeOptions, Update, merge
from blocktrain.protocol.compression import open_update
from blocktrain.protocol.messages import Blob, BlockVersion, Order, Submission
from blocktrain.protocol.tensors import Schema, Tensors, pack, schema_of, unpack
from blocktrain.store.blobs import Blobs
from blocktrain.store.contract import Store, UpdateRecord, VersionRecord

Waiting = Mapping[str, tuple[Submission, Order]]  # by update


@dataclass(frozen=True)
class Closed:
    """What a merge came to, with its blobs on the disk; no weights: no version, for the reason in `merged`."""

    merged: Merged
    weights: Blob | None
    momentum: Blob | None
    loss: float | None
    features: tuple[BlockVersion, ...]

    @property
    def dropped(self) -> dict[str, str]:
        """Updates that are not part of the version, and why."""
        left = {r.id: f"{r.code}: {r.reason}" for r in self.merged.refused}
        if self.weights is None:  # a guard spoke: those that were merged are the culprits
            left |= {c.update.id: self.merged.reason for c in self.merged.used}
        return left


def merge_round(
    store: Store, parent: VersionRecord, waiting: Waiting, options: MergeOptions
) -> Merged:
    """The updates of a block that wait, merged; nothing is written yet, and of the updates only names and figures are kept."""
    current = _tensors(store.blobs, parent.weights)
    momentum = None if parent.momentum is None else _tensors(store.blobs, parent.momentum)
    records = {u.id: u for u in store.pending(parent.block)}
    block = _Current(current, schema_of(current), parent.version)
    updates = [_opened(store, records[name], order, block) for name, (_, order) in waiting.items()]
    merged = merge(Before(current, options, momentum, parent.norms), updates)
    return replace(
        merged,
        used=tuple(replace(c, update=replace(c.update, values={}, base=None)) for c in merged.used),
    )


def close_round(store: Store, merged: Merged, waiting: Waiting) -> Closed:
    """What a merge made, on the disk."""
    if merged.state is None:
        return Closed(merged, None, None, None, ())
    used = [waiting[c.update.id] for c in merged.used]
    pins = max(
        (order.features for _, order in used),
        key=lambda features: [f.version for f in features],
        default=(),
    )
    return Closed(
        merged,
        _put(store.blobs, merged.state),
        _put(store.blobs, merged.momentum),
        _loss(merged.used, used),
        pins,
    )


def _tensors(blobs: Blobs, name: str) -> Tensors:
    return unpack(blobs.read(name))


@dataclass(frozen=True)
class _Current:
    tensors: Tensors
    schema: Schema
    version: int


def _opened(store: Store, record: UpdateRecord, order: Order, current: _Current) -> Update:
    opened = open_update(store.blobs.read(record.payload), current.schema, method=order.compression)
    base = None
    if (
        opened.absolute and record.base != current.version
    ):  # late weights: only their difference to what they started from counts
        started = store.version(record.block, record.base)
        base = current.tensors if started is None else _tensors(store.blobs, started.weights)
    return Update(record.id, opened.tensors, record.tokens, record.weight, opened.absolute, base)


def _put(blobs: Blobs, tensors: Mapping[str, object] | None) -> Blob | None:
    if tensors is None:
        return None
    content = pack(tensors)  # type: ignore[arg-type]
    return Blob(sha256=blobs.put(content), length=len(content))


def _loss(used: Sequence[Candidate], submissions: Sequence[tuple[Submission, Order]]) -> float:
    return sum(c.share * s.loss_after for c, (s, _) in zip(used, submissions, strict=True))
