"""What the coordinator keeps at hand beside `RunState`, all of it recovered from the ledger: orders, waiting submissions, public blobs,
tallies."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from blocktrain.protocol.messages import BlockVersion, Order, Submission
from blocktrain.store.contract import Store
from blocktrain.store.ledger import Entry


@dataclass
class Tally:
    """Counts of a block or of a worker."""

    accepted: int = 0
    refused: int = 0
    late: int = 0
    tokens: int = 0


@dataclass
class Recall:
    """Follows the ledger entry by entry; a restart reads it from the beginning and knows the same."""

    orders: dict[int, Order] = field(
        default_factory=dict
    )  # by task: leases that may still be answered
    waiting: dict[str, tuple[Submission, Order]] = field(
        default_factory=dict
    )  # by update: accepted, not yet merged
    public: dict[str, int] = field(
        default_factory=dict
    )  # blobs that anyone in the run may read -> the block they belong to
    features: dict[int, tuple[BlockVersion, ...]] = field(
        default_factory=dict
    )  # by block: what its newest version was trained on
    devices: dict[str, str] = field(default_factory=dict)  # by worker
    blocks: dict[int, Tally] = field(default_factory=dict)
    workers: dict[str, Tally] = field(default_factory=dict)
    refusals: Counter[str] = field(
        default_factory=Counter
    )  # of this process: refusals change nothing and leave no trace
    versions: int = 0  # made by merging
    finished: bool = False  # the ledger says that the run ended
    seen: int = 0  # entries
    fresh: list[tuple[str, dict[str, Any]]] | None = (
        None  # entries that nobody was told of yet; None: they need not be
    )

    def catch_up(self, store: Store) -> None:
        """Read what is new in the ledger."""
        while entries := store.ledger(after=self.seen):
            for entry in entries:
                self.follow(entry)

    def follow(self, entry: Entry) -> None:
        """Take one more entry into account."""
        self.seen = entry.seq
        body = json.loads(entry.body)
        if entry.kind in ("run", "join", "lease", "update", "version", "round", "finish"):
            getattr(self, f"_{entry.kind}")(body)
        if self.fresh is not None:
            self.fresh.append((entry.kind, body))

    def _run(self, body: dict[str, Any]) -> None:
        for part in ("train", "valid"):
            self.public[body["corpus"][part]["sha256"]] = 0

    def _join(self, body: dict[str, Any]) -> None:
        self.devices[body["worker"]] = body["device"]

    def _lease(self, body: dict[str, Any]) -> None:
        order = Order.model_validate_json(json.dumps(body["order"]))
        self.orders[order.task] = order

    def _update(self, body: dict[str, Any]) -> None:
        submission = Submission.model_validate_json(json.dumps(body["submission"]))
        order = self.orders.pop(submission.task, None) or Order.model_validate_json(
            json.dumps(body["order"])
        )
        self.waiting[submission.update] = (submission, order)
        for tally in (
            self.blocks.setdefault(submission.block, Tally()),
            self.workers.setdefault(submission.worker, Tally()),
        ):
            tally.accepted += 1
            tally.late += body["staleness"] > 0
            tally.tokens += submission.tokens

    def _version(self, body: dict[str, Any]) -> None:
        block = body["block"]
        self.versions += body["version"] > 0
        self.public[body["weights"]["sha256"]] = block
        if body["momentum"] is not None:
            self.public[body["momentum"]["sha256"]] = block
        self.features[block] = tuple(
            BlockVersion.model_validate_json(json.dumps(pin)) for pin in body["features"]
        )
        for name in [*(part["update"] for part in body["parts"]), *body["dropped"]]:
            submission, _ = self.waiting.pop(name)
            self.public[submission.payload_sha256] = (
                block  # uploads are readable once nobody can copy them any more
            )

    def _round(self, body: dict[str, Any]) -> None:
        for name in body.get("dropped", ()):
            submission, _ = self.waiting.pop(name)
            self.public[submission.payload_sha256] = body["block"]

    def _finish(self, _: dict[str, Any]) -> None:
        self.finished = True

    def forget_tasks(self, open_tasks: set[int]) -> None:
        """Orders of tasks that can no longer be answered."""
        for task in [t for t in self.orders if t not in open_tasks]:
            del self.orders[task]

    def refused(self, code: str, worker: str = "", block: int = 0) -> None:
        """Count a no."""
        self.refusals[code] += 1
        if worker in self.workers or worker in self.devices:
            self.workers.setdefault(worker, Tally()).refused += 1
            if block in self.blocks:
                self.blocks[block].refused += 1
