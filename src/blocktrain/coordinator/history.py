"""What the run keeps at hand of its ledger: orders, payloads, deltas, counts and standings.

Standing says how far a member is trusted, and when it gets no tasks. It grows slowly, with updates
that became part of a version, and falls at once. Nothing that a member says of itself counts here.
A restart, and the audit, read the same from the ledger.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from blocktrain.coordinator.limits.retention import BlockRetention
from blocktrain.protocol import ledger
from blocktrain.protocol import messages as m

Body = dict[str, Any]  # of a ledger entry

ENTRY_BYTES = 600  # about what the database keeps of an entry, besides its body
PROBATION = 3  # merged updates before a member is no newcomer any more
BARRED_AFTER = 2  # updates in a row that were left out for what they held
LONGEST_BAR = 6  # a member sits out at most 2 ** this many rounds
FAULTS = (
    "not_finite",
    "wrong_shape",
    "too_long",
    "no_change",
    "copy",
    "not_trained",
    "worse",
    "no_gain",
)
"""Codes of updates that were left out for what they held."""
RECENT_ROUNDS = 4  # whose updates a new one may be a copy of
MOST_RECENT = 64  # of these updates
LONGEST_CHAIN = 8  # tasks that are trained again to check the last of them
ESTABLISHED = 30  # merged updates from which on a member is checked less often
Answer = tuple[m.Submission, m.Order]


@dataclass(frozen=True)
class Standing:
    """One member, as far as the ledger goes."""

    merged: int = 0
    longest: int = 0  # steps of its longest merged update
    missed: int = 0  # leases in a row that ran out without an update
    faults: int = 0  # left out for what it held, less those merged since
    checked: int = 0  # updates that came out right when they were trained again
    block: int = 0  # of its last fault
    barred: int = 0  # rounds of that block that it still has to sit out

    @property
    def proven(self) -> bool:
        """Whether a round may wait for it."""
        return self.merged > 0 and self.missed == 0 and self.faults == 0

    @property
    def answers(self) -> bool:
        """Whether it gets tasks, and has not let the last two run out."""
        return not self.barred and self.missed < 2

    @property
    def newcomer(self) -> bool:
        """Whether it has too little behind it to weigh as much as others."""
        return self.merged < PROBATION

    @property
    def name(self) -> Literal["newcomer", "proven", "quarantined"]:
        """For people."""
        if self.barred:
            return "quarantined"
        return "newcomer" if self.newcomer else "proven"

    def after_update(self) -> Standing:
        """It has answered a task."""
        return replace(self, missed=0)

    def after_merge(self, steps: int) -> Standing:
        """Its update became part of a version."""
        faults = max(0, self.faults - 1)
        return replace(
            self, merged=self.merged + 1, longest=max(self.longest, steps), faults=faults
        )

    def after_drop(self, block: int, reason: str) -> Standing:
        """Its update was left out. If that was for what it held, its tasks are small again."""
        if not reason.startswith(FAULTS):
            return self
        faults = self.faults + 1
        barred = 2 ** min(faults, LONGEST_BAR) if faults >= BARRED_AFTER else 0
        return replace(self, longest=0, faults=faults, block=block, barred=barred)

    def after_check(self) -> Standing:
        """An update of it was trained again, and came out right."""
        return replace(self, checked=self.checked + 1)

    def check_chance(self, share: float) -> float:
        """How likely an update of it is trained again, where that share of all updates is."""
        if self.faults or self.newcomer:
            return min(1.0, 10 * share)
        return share / 3 if self.merged >= ESTABLISHED else share

    def after_miss(self) -> Standing:
        """A lease of it ran out."""
        return replace(self, missed=self.missed + 1)

    def after_version(self, block: int) -> Standing:
        """A block has a new version."""
        if block != self.block or not self.barred:
            return self
        return replace(self, barred=self.barred - 1)


NEWCOMER = Standing()


@dataclass
class UpdateCounts:
    """Of a block or of a worker."""

    accepted: int = 0
    refused: int = 0
    late: int = 0  # started from an older version
    late_by_one: int = 0
    tokens: int = 0


@dataclass
class RunHistory:
    """What the run keeps at hand of its ledger. A restart reads the ledger and knows the same."""

    orders: dict[int, m.Order] = field(default_factory=dict)  # by task that may still be answered
    waiting: dict[str, Answer] = field(default_factory=dict)  # by update, in the ledger's order
    recent: dict[int, deque[tuple[Answer, ...]]] = field(default_factory=dict)
    """By block: the updates that its last rounds have settled."""
    public: dict[str, int] = field(default_factory=dict)  # blob that members may read -> its block
    features: dict[int, tuple[m.BlockVersion, ...]] = field(default_factory=dict)
    """By block: the versions that its newest version was trained on."""
    tasks: dict[str, deque[tuple[int, int]]] = field(default_factory=dict)
    """By worker: its last tasks that it has answered, and the entries of the answers."""
    differing: dict[str, str] = field(default_factory=dict)
    """Updates that wait for their merge and do not follow from their tasks, and why."""
    deltas: dict[int, deque[m.VersionDelta]] = field(default_factory=dict)
    """By block: how its last versions follow from each other."""
    received: dict[int, int] = field(default_factory=dict)
    """By block: bytes of merged updates since its last delta that was complete."""
    waiting_bytes: Counter[str] = field(default_factory=Counter)  # by worker
    recorded: int = 0  # bytes of entries, updates and deltas
    retention: dict[int, BlockRetention] = field(default_factory=dict)  # by block
    devices: dict[str, str] = field(default_factory=dict)  # by worker
    blocks: dict[int, UpdateCounts] = field(default_factory=dict)
    workers: dict[str, UpdateCounts] = field(default_factory=dict)
    standings: dict[str, Standing] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    """By worker: its share in the last version that it was part of."""
    restood: bool = True  # whether `standings` changed since they were last looked at
    barred: set[str] = field(default_factory=set)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """(worker, reason) of the updates that the last round left out."""
    versions: int = 0  # made by merging
    float32_bytes: int = 0
    """What tasks and updates would have moved if all weights and updates were sent whole."""
    _held: dict[str, set[str]] = field(default_factory=dict)  # by worker: weights of its last task
    finished: bool = False
    head: ledger.LedgerEntry | None = None

    def follow(self, entry: ledger.LedgerEntry) -> Body:
        """Take one more entry into account; its body."""
        self.head = entry
        self.recorded += len(entry.body) + ENTRY_BYTES
        body: Body = json.loads(entry.body)
        if (take := getattr(self, f"_{entry.kind}", None)) is not None:
            take(body)
        return body

    def _run(self, body: Body) -> None:
        for part in ("index", "tokenizer"):
            if (blob := body["corpus"].get(part)) is not None:
                self.public[blob["sha256"]] = 0

    def _join(self, body: Body) -> None:
        self.devices[body["worker"]] = body["device"]

    def _lease(self, body: Body) -> None:
        order = m.Order.model_validate_json(json.dumps(body["order"]))
        self.orders[order.task] = order
        needed = {pin.weights.sha256: pin.weights.length for pin in order.versions}
        held = self._held.get(body["worker"], set())
        self.float32_bytes += sum(size for name, size in needed.items() if name not in held)
        self._held[body["worker"]] = set(needed)

    def _update(self, body: Body) -> None:
        submission = m.Submission.model_validate_json(json.dumps(body["submission"]))
        order = self.orders.pop(submission.task, None)
        if order is None:
            order = m.Order.model_validate_json(json.dumps(body["order"]))
        self.waiting[submission.update] = (submission, order)
        tasks = self.tasks.setdefault(submission.worker, deque(maxlen=LONGEST_CHAIN))
        tasks.append((submission.task, self.head.seq if self.head else 0))
        self.waiting_bytes[submission.worker] += submission.payload_length
        self.recorded += submission.payload_length
        self._stand(submission.worker, Standing.after_update)
        self.float32_bytes += order.weights.length
        for counts in (
            self.blocks.setdefault(submission.block, UpdateCounts()),
            self.workers.setdefault(submission.worker, UpdateCounts()),
        ):
            counts.accepted += 1
            counts.late += body["staleness"] > 0
            counts.late_by_one += body["staleness"] == 1
            counts.tokens += submission.tokens

    def _version(self, body: Body) -> None:
        block = body["block"]
        self.versions += body["version"] > 0
        for part in ("weights", "momentum", "delta", "residual"):
            if body[part] is not None:
                self.public[body[part]["sha256"]] = block
        self.retention.setdefault(block, BlockRetention()).add(body)
        if body["delta"] is not None:
            sent = {submission.payload_sha256 for submission, _ in self.waiting.values()}
            own = body["delta"]["sha256"] in sent
            self.recorded += 0 if own else body["delta"]["length"]
            self.deltas.setdefault(block, deque(maxlen=m.MAX_CHAIN)).append(
                m.VersionDelta(
                    block=block,
                    version=body["version"],
                    parent=body["parent"],
                    weights=body["weights"]["sha256"],
                    delta=m.Blob(**body["delta"]),
                )
            )
        self.features[block] = tuple(
            m.BlockVersion.model_validate_json(json.dumps(pin)) for pin in body["features"]
        )
        if body["version"] > 0:
            for worker in tuple(self.barred):
                self._stand(worker, Standing.after_version, block)
        self._remember(block, [*(part["update"] for part in body["parts"]), *body["dropped"]])
        received = self.received.get(block, 0) if body.get("complete") is False else None
        shares: dict[str, float] = {}
        for part in body["parts"]:
            submission = self._settle(block, part["update"])
            received = None if received is None else received + submission.payload_length
            self._stand(submission.worker, Standing.after_merge, submission.steps)
            shares[submission.worker] = shares.get(submission.worker, 0.0) + part["share"]
        self.shares |= shares
        self.received[block] = received or 0
        self._drop(block, body["dropped"])

    def _round(self, body: Body) -> None:
        dropped = body.get("dropped", {})
        self._remember(body["block"], dropped)
        self._drop(body["block"], dropped)

    def _remember(self, block: int, names: Collection[str]) -> None:
        """What was settled, in the order in which it came."""
        if names:
            came = tuple(answer for name, answer in self.waiting.items() if name in names)
            self.recent.setdefault(block, deque(maxlen=RECENT_ROUNDS)).append(came)

    def earlier(self, block: int) -> tuple[Answer, ...]:
        """What a new update of a block may be a copy of."""
        rounds = self.recent.get(block, ())
        return tuple(answer for answers in rounds for answer in answers)[-MOST_RECENT:]

    def _check(self, body: Body) -> None:
        if body["result"] in ("same", "near"):
            self._stand(body["worker"], Standing.after_check)
        elif body["result"] == "differs" and body["update"] in self.waiting:
            self.differing[body["update"]] = body["reason"]  # its round leaves it out
        elif body["result"] == "differs":
            reason = f"not_trained: {body['reason']}"
            self._stand(body["worker"], Standing.after_drop, body["block"], reason)

    def _expire(self, body: Body) -> None:
        self._stand(body["worker"], Standing.after_miss)

    def _drop(self, block: int, reasons: Mapping[str, str]) -> None:
        self.left_out = []
        for name, reason in reasons.items():
            worker = self._settle(block, name).worker
            self._stand(worker, Standing.after_drop, block, reason)
            self.left_out.append((worker, reason))
            self.blocks.setdefault(block, UpdateCounts()).refused += 1
            self.workers.setdefault(worker, UpdateCounts()).refused += 1

    def _stand(self, worker: str, change: Callable[..., Standing], *facts: Any) -> None:
        standing = change(self.standings.get(worker, NEWCOMER), *facts)
        self.standings[worker], self.restood = standing, True
        (self.barred.add if standing.barred else self.barred.discard)(worker)

    def _finish(self, _: Body) -> None:
        self.finished = True

    def _settle(self, block: int, update: str) -> m.Submission:
        """Payloads can be read once their round is closed, when copying them is of no use."""
        submission, _ = self.waiting.pop(update)
        self.waiting_bytes[submission.worker] -= submission.payload_length
        self.waiting_bytes += Counter()  # removes those that are zero
        self.public[submission.payload_sha256] = block
        self.differing.pop(update, None)
        return submission

    def retire(self, block: int, newest: int, held: Iterable[str]) -> set[str]:
        """Blobs of a block's older versions that nobody needs any more: they are not public now.

        What updates or tasks start from or read is needed, and so is what is `held`.
        """
        settled = (answer for rounds in self.recent.values() for came in rounds for answer in came)
        answers = (*self.waiting.values(), *settled)
        orders = (*self.orders.values(), *(order for _, order in answers))
        pins = [*(pin for order in orders for pin in order.versions)]
        pins += [pin for features in self.features.values() for pin in features]
        needed = {pin.weights.sha256 for pin in pins}
        retired = self.retention[block].retire(newest, needed.union(held))
        for name in retired:
            self.public.pop(name, None)
        return retired

    @property
    def stored(self) -> int:
        """Bytes that the run has made and keeps: without the corpus and open uploads."""
        return self.recorded + sum(block.bytes for block in self.retention.values())

    def delivered(self) -> set[str]:
        """Workers with an accepted update."""
        return {worker for worker, counts in self.workers.items() if counts.accepted}

    def forget_workers(self, gone: Iterable[str]) -> None:
        """Members that never delivered. What a fault has cost them stays."""
        for worker in gone:
            self.devices.pop(worker, None)
            self.workers.pop(worker, None)
            self._held.pop(worker, None)
            if (standing := self.standings.get(worker)) and not standing.faults:
                del self.standings[worker]
                self.restood = True

    def forget_orders(self, open_tasks: Mapping[int, Any]) -> None:
        for task in [t for t in self.orders if t not in open_tasks]:
            del self.orders[task]
