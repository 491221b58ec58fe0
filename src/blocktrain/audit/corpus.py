"""Checks what the ledger says about the corpus: its index and shards, and what each task reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from blocktrain.audit.evidence import AuditProgress, EvidenceSource, read_verified
from blocktrain.config import Config
from blocktrain.errors import CorpusError, Damaged
from blocktrain.learning.shards import CorpusIndex, SequenceOrder, order_of, read_index
from blocktrain.protocol.ledger import LeaseFacts, RunFacts
from blocktrain.protocol.messages import Blob, Order
from blocktrain.protocol.positions import Ranges, add_range, overlap


def read_corpus(source: EvidenceSource, run: RunFacts) -> CorpusIndex:
    """The index of a run's corpus; Damaged if it is not the one that the run names."""
    try:
        return read_index(read_verified(source, run.corpus.index))
    except CorpusError as error:
        raise Damaged(str(error)) from None


@dataclass
class CorpusCheck:
    """Follows which batches the tasks of each block read. Every method gives what is wrong."""

    index: CorpusIndex
    config: Config
    exclusive: bool
    """Whether the run's rules allow one task of a block at a time."""
    read: dict[int, Ranges] = field(default_factory=dict)  # by block: by accepted updates
    ends: dict[int, int] = field(default_factory=dict)  # by block: of all tasks so far
    _orders: dict[int, SequenceOrder] = field(default_factory=dict)  # by block

    def damaged_shards(self, source: EvidenceSource, progress: AuditProgress) -> Iterator[str]:
        """Shards that are missing, or have other bytes than their name says."""
        shards = list(dict.fromkeys(self.index.shards))
        for number, shard in enumerate(shards, start=1):
            try:
                blob = Blob(sha256=shard.sha256, length=self.index.file_bytes(shard))
                source.verify(blob)
            except Damaged as error:
                yield f"shard {shard.sha256} of the corpus is missing or damaged: {error}"
            progress("shards", number, len(shards))

    def lease(self, lease: LeaseFacts, before: LeaseFacts | None) -> Iterator[str]:
        """A task reads the shards that its batches are in, where the rules let it begin."""
        order, name = lease.order, f"task {lease.order.task}"
        if order.shards != self._shards(order):
            yield f"{name} names other shards than its batches are in"
        end = self.ends.get(order.block, 0)
        if self.exclusive:
            if order.position != order.start_step:
                yield f"{name} reads batch {order.position} at step {order.start_step}"
        elif before is not None:
            if order.position != before.order.position or order.steps > before.order.steps:
                yield f"{name} was leased again with other batches"
        elif order.position > end:
            yield f"{name} leaves out the batches from {end} to {order.position}"
        self.ends[order.block] = max(end, order.position + order.steps)

    def update(self, order: Order, steps: int) -> Iterator[str]:
        """No batch is read twice. An epoch is as long as the order, which goes on for ever."""
        first, end = order.position, order.position + steps
        read = self.read.get(order.block, ())
        if overlap(read, first, end) and not self.exclusive:
            yield f"task {order.task} reads batches that another update of its block has read"
        self.read[order.block] = add_range(read, first, end)

    def _shards(self, order: Order) -> tuple[Blob, ...]:
        batch = self.config.batch
        if order.block not in self._orders:
            self._orders[order.block] = order_of(self.index, self.config, order.block)
        sequences = self._orders[order.block]
        return tuple(
            Blob(sha256=shard.sha256, length=self.index.file_bytes(shard))
            for shard in sequences.shards(order.position * batch, order.steps * batch)
        )
