"""A worker that attacks.

It joins, trains and sends with the product's own code. A row of `policies.ATTACKS` says what it
trains on and what it makes of its updates.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from backports import zstd

from blocktrain.bench.attacks.policies import ATTACKS, HonestUpdate
from blocktrain.learning.shards import Batches, SequenceOrder, batches
from blocktrain.learning.threads import use_threads
from blocktrain.protocol import messages as m
from blocktrain.protocol.calls import Calls
from blocktrain.protocol.compression import METHODS, Method, compress, decompress
from blocktrain.protocol.identity import Identity
from blocktrain.protocol.ledger import LedgerPage, UpdateBody, VersionBody, read_body
from blocktrain.protocol.refusals import Refused
from blocktrain.protocol.tensors import Array, Tensors, pack, schema_hash, schema_of
from blocktrain.watch.checking.judge import MOST_SEQUENCES
from blocktrain.web.client import HttpClient, fetch_bytes
from blocktrain.worker.command import JsonOutput
from blocktrain.worker.loop import Machine, Worker
from blocktrain.worker.session import EventHandler
from blocktrain.worker.state import TrainingState, own_identity
from blocktrain.worker.task import BlockTraining

MOST_COPIED = 1 << 24  # bytes of a payload that is copied


class AttackingWorker(Worker):
    """A worker with one row of `ATTACKS`. `seed` is its own, `direction` is shared by all."""

    def __init__(
        self,
        client: Calls,
        cache: Path,
        identity: Identity,
        emit: EventHandler,
        *,
        attack: str,
        seed: int = 0,
        direction: int = 0,
    ) -> None:
        super().__init__(client, cache, identity, Machine("cpu", 0, attack), emit)
        self._client, self._attack, self._direction = client, ATTACKS[attack], direction
        self._draw, self._sent = np.random.default_rng(seed), 0
        self._ledger_read, self._seen = 0, list[m.Submission]()
        self._canaries: dict[int, int] = {}  # by block: the last one that was revealed

    def _read_ahead(self, order: m.Order) -> Batches:
        read, change = super()._read_ahead(order), self._attack.text
        if self._attack.reads_canary:
            self._follow_ledger()
            read = self._canary_text(order.block) or read
        vocabulary = self.config.vocabulary
        return lambda number: change(read(number), vocabulary)

    def _canary_text(self, block: int) -> Batches | None:
        """The text of the last judgement, again and again."""
        if (seed := self._canaries.get(block)) is None:
            return None
        order = SequenceOrder(self.corpus, self.config.context, seed, block)
        known = batches(order, self.config.batch, self._shards.open)
        return lambda number: known(number % max(1, MOST_SEQUENCES // self.config.batch))

    def _compress(self, order: m.Order, training: BlockTraining) -> tuple[TrainingState, bytes]:
        new, base = training.trainer.weights(), training.base
        delta = {name: np.asarray(new[name] - base[name]) for name in new}
        after, _ = super()._compress(order, training)
        others = self._read_others(order, delta) if self._attack.reads_others else []
        update = HonestUpdate(
            delta, self._sent, self._draw, self._direction, others, dict(training.base)
        )
        self._sent += 1
        return after, attacking_payload(self._attack.change(update), order.compression)

    def _read_others(self, order: m.Order, delta: Tensors) -> list[Tensors]:
        """The newest update of another worker that the coordinator gives away."""
        self._follow_ledger()
        for submission in reversed(self._seen):
            if submission.block == order.block and submission.worker != self._id:
                blob = m.Blob(sha256=submission.payload_sha256, length=submission.payload_length)
                try:
                    content = fetch_bytes(self._client, blob, MOST_COPIED)
                    return [decompress(content, schema_of(delta), method=order.compression)]
                except Refused:
                    continue  # its round is open
        return []

    def _follow_ledger(self) -> None:
        """What it says of the updates of others, and of the text that they were judged on."""
        retries = self._session.retries
        while page := retries.call(self._next_page, self._stopped).entries:
            self._ledger_read = page[-1].seq
            for entry in page:
                if entry.kind == "update":
                    self._seen = [*self._seen, read_body(UpdateBody, entry).submission][-100:]
                elif entry.kind == "version":
                    body = read_body(VersionBody, entry)
                    if body.canary is not None:
                        self._canaries[body.block] = body.canary

    def _next_page(self) -> LedgerPage:
        return self._client.ledger(self._ledger_read)


def attacking_payload(delta: Tensors, method: Method) -> bytes:
    """A payload that nothing on this side has checked: it may hold NaN."""
    if all(np.isfinite(tensor).all() for tensor in delta.values()):
        return compress(delta, None, method)[0]
    compression = METHODS[method]
    flat = [np.nan_to_num(delta[name]).reshape(-1) for name in sorted(delta)]
    wire = compression.encode(flat, compression.exponent(max(float(abs(t).max()) for t in flat)))
    wire = {name: _broken(values) for name, values in wire.items()}
    return zstd.compress(pack(wire, f"delta 1 {method} 0 {schema_hash(schema_of(delta))}"))


def _broken(values: Array) -> Array:
    """With NaN as its first number, if it holds numbers that can be NaN."""
    broken = values.copy()
    if broken.dtype.kind == "f":
        broken.reshape(-1)[0] = np.nan
    return broken


def main() -> None:
    """One attacker as a process; its options are a line of JSON on stdin."""
    options = json.loads(sys.stdin.readline())
    use_threads()
    client, cache = HttpClient(options.pop("url")), Path(options.pop("cache"))
    with own_identity(cache) as identity:
        AttackingWorker(client, cache, identity, JsonOutput().emit, **options).run()


if __name__ == "__main__":
    main()
