"""What must hold after every event, whatever goes wrong. Each has a name; to add one, add a check.

The checks read what is stored, not what the coordinator believes, and use none of its code: the
rules are written again, shorter. At the end the real audit reads everything once more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from blocktrain.audit.audit import audit
from blocktrain.audit.evidence import RunRecord
from blocktrain.coordinator.recovery import recover_state
from blocktrain.coordinator.state import KEPT_TIMES
from blocktrain.errors import BlockTrainError, Damaged
from blocktrain.protocol import messages as m
from blocktrain.protocol.identity import verify
from blocktrain.protocol.ledger import LedgerEntry, require_chain
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.protocol.tensors import Tensors, unpack
from blocktrain.simulation.begin import LANE, TAGS
from blocktrain.simulation.node import ROOT, CoordinatorNode
from blocktrain.simulation.store import EffectStore
from blocktrain.simulation.tape import Tape

FAIR = frozenset(  # reasons to refuse an honest worker
    {
        Code.STALE_FENCE,
        Code.TOO_STALE,
        Code.TASK_ANSWERED,
        Code.BLOCK_FINISHED,
        Code.UNKNOWN_TASK,
        Code.UNKNOWN_WORKER,
        Code.NOT_FOUND,
        Code.KICKED,
        Code.RUN_FINISHED,
        Code.NOT_YOUR_TASK,
    }
)


class Violation(Exception):
    """An invariant does not hold."""

    def __init__(self, invariant: str, sentence: str) -> None:
        super().__init__(f"{invariant}: {sentence}")
        self.invariant, self.sentence = invariant, sentence


def require(holds: bool, invariant: str, sentence: str) -> None:
    if not holds:
        raise Violation(invariant, sentence)


@dataclass
class Lane:
    """What the lane of tags of a block must hold, computed from the ledger's shares alone."""

    values: Any = field(default_factory=lambda: np.zeros(TAGS))
    momentum: Any = field(default_factory=lambda: np.zeros(TAGS))

    def add(self, mean: Any, body: Mapping[str, Any]) -> None:
        if body["outer"] == "average":
            self.values = self.values + mean
            return
        rate, decay = body["outer_learning_rate"], body["outer_momentum"]
        self.momentum = decay * self.momentum - mean
        self.values = self.values - rate * (-mean + decay * self.momentum)


@dataclass
class StoredEvidence:
    """See `audit.evidence.EvidenceSource`: what is stored, read after the end."""

    whole: ClassVar[bool] = True
    store: EffectStore

    def record(self) -> RunRecord:
        return RunRecord(tuple(self.store.ledger()), self.store.contributions())

    def blob(self, blob: m.Blob) -> bytes:
        return b"".join(self.store.blobs.pieces(blob.sha256))

    def verify(self, blob: m.Blob) -> None:
        self.store.blobs.verify(blob.sha256)


class Invariants:
    """See `worker.Witness` for what members tell it."""

    def __init__(self, tape: Tape, node: CoordinatorNode, keys: Mapping[str, str]) -> None:
        self._tape, self._node = tape, node
        self._keys = keys  # by worker: its public key
        self._blocks = tape.world.config(tape.seed).blocks
        self.coordinator = ""  # its public key
        self.head: LedgerEntry | None = None
        self._tags: dict[str, Tensors] = {}  # by payload: what it adds to the lane
        self._lanes = {block: Lane() for block in range(1, self._blocks + 1)}
        self._receipts: dict[str, m.Receipt] = {}  # by update
        self._fences: dict[int, tuple[int, str, int, int]] = {}  # task: fence, worker, block, base
        self._updates: dict[str, dict[str, Any]] = {}  # accepted, by id
        self._answered: dict[int, str] = {}  # task -> update
        self._settled: dict[str, int] = {}  # update -> the entry that merged or dropped it
        self._versions: dict[int, list[dict[str, Any]]] = {}
        self._free: set[tuple[int, int]] = set()  # (task, fence) that have ended without an answer
        self._promises: dict[tuple[int, int], float] = {}  # until when they are leased
        self._joined: set[str] = set()
        self._kicked: set[str] = set()
        self._epoch = 0
        self.finished = False
        self._totals: dict[str, tuple[int, int]] = {}
        self._counted = (0, 0)
        self.bytes_in = self.bytes_out = 0  # in requests that were answered
        self.most_in = 0  # also in others

    # What members tell

    def sent(self, payload: str, tags: Tensors) -> None:
        self._tags[payload] = tags

    def acknowledged(self, worker: str, receipt: m.Receipt, update: str) -> None:
        verify(receipt, self.coordinator)
        mine = receipt.accepted and receipt.worker == worker and receipt.update == update
        require(mine, "receipt", f"the receipt of {update[:12]} is for another update")
        before = self._receipts.setdefault(update, receipt)
        require(before == receipt, "receipt", f"update {update[:12]} has two receipts")
        stored = self._updates.get(update)
        require(stored is not None, "lost", f"update {update[:12]} has a receipt and no entry")
        if stored is not None:
            same = stored["hash"] == receipt.entry
            require(same, "receipt", f"the receipt of {update[:12]} names another entry")

    def repeated(self, first: m.Receipt, again: m.Receipt) -> None:
        require(first == again, "receipt", f"task {first.task} has two receipts for one payload")

    def refused(self, worker: int, error: Refused, update: str = "") -> None:
        known = update in self._updates and error.code is not Code.KICKED
        fair = error.code in FAIR and not known
        require(fair, "fairness", f"honest worker {worker} was refused: {error}")

    def followed(self, weights: str, made: str) -> None:
        require(weights == made, "deltas", f"the deltas lead to {made[:12]}, not to {weights[:12]}")

    def trespassed(self, what: str) -> None:
        raise Violation("trespass", what)

    def left(self, worker: str) -> None:
        """A worker has signed off: its tasks are free."""
        self._free |= {
            (task, lease[0]) for task, lease in self._fences.items() if lease[1] == worker
        }

    def promised(self, task: m.Task) -> None:
        """A worker was told how long its lease is."""
        until = self._node.uptime + task.lease_seconds
        key = (task.task, task.fence)
        self._promises[key] = max(until, self._promises.get(key, 0.0))

    def read(self, name: str) -> None:
        """A member has read a blob."""
        payloads = {key: update["payload"] for key, update in self._updates.items()}
        waiting = {payload for key, payload in payloads.items() if key not in self._settled}
        known = {payload for key, payload in payloads.items() if key in self._settled}
        require(
            name not in waiting - known, "copying", f"payload {name[:12]} was read before its merge"
        )

    # After every event

    def check(self) -> None:
        store = self._node.store
        if store is None or self._node.coordinator is None:
            return
        entries = store.ledger(self.head.seq if self.head else 0)
        try:
            self.head = require_chain(entries, self.head)
        except Damaged as error:
            raise Violation("chain", str(error)) from None
        for entry in entries:
            body = json.loads(entry.body)
            getattr(self, f"_{entry.kind}")(entry, body)

    def _run(self, entry: LedgerEntry, body: dict[str, Any]) -> None:
        require(entry.seq == 1, "chain", "a second run begins")
        self.coordinator = body["coordinator"]

    def _start(self, entry: LedgerEntry, body: dict[str, Any]) -> None:
        require(body["epoch"] > self._epoch, "epoch", f"epoch {body['epoch']} comes twice")
        self._epoch = body["epoch"]

    def _join(self, entry: LedgerEntry, body: dict[str, Any]) -> None:
        require(body["worker"] not in self._kicked, "member", "a removed worker joins")
        self._joined.add(body["worker"])

    def _lease(self, entry: LedgerEntry, body: dict[str, Any]) -> None:
        order, worker, fence = body["order"], body["worker"], body["fence"]
        task, block = order["task"], order["block"]
        before = self._fences.get(task, (0, "", block, order["base"]))
        require(fence > before[0], "fence", f"fence {fence} of task {task} after {before[0]}")
        require(task not in self._answered, "fence", f"task {task} is leased after its answer")
        allowed = worker in self._joined and worker not in self._kicked
        require(allowed, "member", f"task {task} goes to {worker}, who is no member")
        if before[0] and before[1] != worker and not self._tape.world.exclusive:
            free = (task, before[0]) in self._free or before[1] in self._kicked
            require(free, "lease", f"task {task} is given away while its lease runs")
        newest = self._versions[block][-1]
        same = order["base"] == newest["version"] and order["weights"] == newest["weights"]
        require(same, "lease", f"task {task} does not start from the newest version")
        require(not self.finished, "finish", f"task {task} is leased after the end")
        limit = self._tape.world.task_steps
        require(limit is None or order["steps"] <= limit, "lease", f"task {task} has more steps")
        self._fences[task] = (fence, worker, block, order["base"])

    def _expire(self, entry: LedgerEntry, body: dict[str, Any]) -> None:
        fence, worker, *_ = self._fences[body["task"]]
        same = (fence, worker) == (body["fence"], body["worker"])
        require(same, "fence", f"a lease of task {body['task']} expires that is not the newest")
        require(body["task"] not in self._answered, "fence", "an answered task expires")
        key = (body["task"], body["fence"])
        early = self._promises.get(key, 0.0) - self._node.uptime
        require(early < 0.01, "lease", f"task {key[0]} expires {early:.1f} s too early")
        self._free.add(key)

    def _update(self, entry: LedgerEntry, body: dict[str, Any]) -> None:
        submission, task, name = body["submission"], body["task"], body["id"]
        require(task not in self._answered, "doubled", f"task {task} has two accepted answers")
        mine = (body["fence"], body["worker"], body["block"], body["base"])
        lease = self._fences.get(task)
        require(mine == lease, "fence", f"task {task} was leased as {lease}, accepted as {mine}")
        signed = m.Submission.model_validate_json(json.dumps(submission))
        try:
            verify(signed, self._keys[body["worker"]])
        except (Refused, KeyError):
            raise Violation(
                "signature", f"update {name[:12]} is not signed by its worker"
            ) from None
        require(body["worker"] not in self._kicked, "member", "a removed worker counts")
        config = self._tape.world.config(self._tape.seed)
        tokens = signed.steps * config.batch * config.context
        require(body["tokens"] == tokens == signed.tokens, "tokens", f"update {name[:12]}")
        staleness = self._versions[body["block"]][-1]["version"] - body["base"]
        fits = staleness == body["staleness"] <= self._tape.world.staleness
        require(fits, "staleness", f"update {name[:12]} is {staleness} versions behind")
        known = all(
            before in self._answered
            and self._updates[self._answered[before]]["block"] == body["block"]
            for before in filter(None, submission["continued"].values())
        )
        require(known, "lineage", f"update {name[:12]} continues what was never accepted")
        require(body["payload"] in self._tags, "payload", "nobody has sent this payload")
        self._require_durable(body["payload"], f"the payload of update {name[:12]}")
        self._answered[task] = name
        self._updates[name] = {**body, "hash": entry.hash}

    def _version(self, entry: LedgerEntry, body: dict[str, Any]) -> None:
        block, number = body["block"], body["version"]
        chain = self._versions.setdefault(block, [])
        require(number == len(chain), "sequence", f"version {number} follows {len(chain) - 1}")
        parent = chain[-1]["weights"]["sha256"] if chain else None
        require(body["parent"] == parent, "sequence", f"version {number} has another parent")
        for part in ("weights", "momentum", "delta", "residual"):
            if body[part] is not None:
                self._require_durable(body[part]["sha256"], f"{part} of version {number}")
        parts = {part["update"]: part for part in body["parts"]}
        require(sorted(parts) == sorted(body["applied"]), "settled", f"version {number}: parts")
        pending = {
            name
            for name, update in self._updates.items()
            if name not in self._settled and update["block"] == block
        }
        named = [*parts, *body["dropped"]]
        require(
            sorted(named) == sorted(pending),
            "settled",
            f"version {number} of block {block} settles {len(named)} updates of {len(pending)}",
        )
        self._settle(entry, named)
        for name in parts:
            update = self._updates[name]
            count, tokens = self._totals.get(update["worker"], (0, 0))
            self._totals[update["worker"]] = (count + 1, tokens + update["tokens"])
        chain.append(body)
        if number:
            self._check_lane(body, parts)

    def _check_lane(self, body: dict[str, Any], parts: Mapping[str, Any]) -> None:
        """Each update of this version has added its share of a unit to its slot, once."""
        block, lane = body["block"], self._lanes[body["block"]]
        mean = np.zeros(TAGS)
        for name, part in parts.items():
            tags = self._tags[self._updates[name]["payload"]][LANE]
            mean = mean + part["share"] * part["scale"] * tags.astype(np.float64)
        lane.add(mean, body)
        read = self._node.store_now.blobs.read
        found = unpack(read(body["weights"]["sha256"]))[LANE].astype(np.float64)
        if body["residual"] is not None:
            found = found + unpack(read(body["residual"]["sha256"]))[LANE]
        wrong = np.flatnonzero(np.abs(found - lane.values) > 1e-3 * (1 + np.abs(lane.values)))
        if wrong.size:
            slot = int(wrong[0])
            before = lane.values[slot] - mean[slot]
            times = (found[slot] - before) / mean[slot] if mean[slot] else float("nan")
            raise Violation(
                "doubled" if times > 1.5 else "lost",
                f"version {body['version']} of block {block}: slot {slot} has {found[slot]:.4g} "
                f"instead of {lane.values[slot]:.4g}: its update counts {times:.2g} times",
            )

    def _settle(self, entry: LedgerEntry, names: list[str]) -> None:
        for name in names:
            require(name in self._updates, "settled", f"update {name[:12]} was never accepted")
            twice = name in self._settled
            require(not twice, "doubled", f"update {name[:12]} is merged or dropped twice")
            self._settled[name] = entry.seq

    def _round(self, entry: LedgerEntry, body: dict[str, Any]) -> None:
        self._settle(entry, list(body.get("dropped", ())))

    def _kick(self, entry: LedgerEntry, body: dict[str, Any]) -> None:
        self._kicked.add(body["worker"])

    def _finish(self, entry: LedgerEntry, body: dict[str, Any]) -> None:
        require(not self.finished, "finish", "the run ends twice")
        self.finished = True

    def _require_durable(self, name: str, what: str) -> None:
        """A blob is durable before the transaction that names it."""
        paths = [
            ROOT / "blobs" / name[:2] / name[2:4] / name,
            ROOT / "blobs" / "linked" / name,
        ]
        durable = any(self._node.files.is_durable(path) for path in paths)
        require(durable, "durability", f"{what} is recorded, but not durable")

    # Now and then

    def check_memory(self) -> None:
        """What the process knows is what a restart would read."""
        node = self._node
        if node.coordinator is None or not node.coordinator.ready:
            return
        run = node.coordinator.run
        now = node.clock.monotonic()
        stored = recover_state(run.store.recover(KEPT_TIMES), now, run.config.fusion)
        for task in stored.leases.keys() | run.state.leases.keys():
            mine, kept = run.state.leases.get(task), stored.leases.get(task)
            parts = ("fence", "worker", "block", "base", "batches", "expired", "trained")
            same = mine is not None and kept is not None
            same = same and all(getattr(mine, part) == getattr(kept, part) for part in parts)
            require(same, "recovery", f"the lease of task {task} would be {kept}, not {mine}")
            if mine is not None and kept is not None and not mine.expired:
                # Time that has passed is committed every two seconds.
                gained = kept.expires - mine.expires
                require(-1e-3 <= gained <= 3.5, "recovery", f"task {task} gains {gained:.1f} s")
        for index, kept_block in stored.blocks.items():
            block = run.state.blocks[index]
            names = ("version", "steps", "tokens", "read", "next_number", "task_seconds")
            same = all(getattr(block, name) == getattr(kept_block, name) for name in names)
            ours, theirs = block.round, kept_block.round
            same = same and {u.id for u in ours.updates} == {u.id for u in theirs.updates}
            same = same and (ours.extended, ours.attempt) == (theirs.extended, theirs.attempt)
            same = same and (ours.deadline is None) == (theirs.deadline is None)
            require(same, "recovery", f"block {index} would be {kept_block}, not {block}")
        for name, worker in run.state.workers.items():
            kept_worker = stored.workers.get(name)
            fields = ("block", "seconds_per_step", "overhead", "kicked")
            same = kept_worker is not None
            same = same and all(getattr(worker, f) == getattr(kept_worker, f) for f in fields)
            require(same, "recovery", f"worker {name} would be {kept_worker}, not {worker}")
        manifest, head = node.coordinator.manifest(), run.store.head()
        same = head is not None and (manifest.number, manifest.head) == (head.seq, head.hash)
        require(same, "recovery", "the manifest names another head than the ledger has")
        self._check_counters(run.store.byte_counts())

    def _check_counters(self, counts: Any) -> None:
        now = (sum(c.bytes_in for c in counts), sum(c.bytes_out for c in counts))
        grows = now[0] >= self._counted[0] and now[1] >= self._counted[1]
        require(grows, "counters", f"byte counters went from {self._counted} to {now}")
        moved = (self.most_in, self.bytes_out)
        fits = now[0] <= moved[0] and now[1] <= moved[1]
        require(fits, "counters", f"{now} bytes are counted, {moved} were moved")
        self._counted = now

    # At the end

    def finish(self) -> None:
        """After the run: nothing is lost, nothing was left over, and the audit finds nothing."""
        node, store = self._node, self._node.store_now
        self.check()
        for name in self._receipts:
            require(name in self._updates, "lost", f"update {name[:12]} has a receipt and no entry")
        require(store.contributions() == self._totals, "contributions", "they do not add up")
        waiting = {u.id for block in self._versions for u in store.pending(block)}
        left = self._updates.keys() - self._settled.keys()
        require(waiting == left, "lost", f"{len(waiting)} updates wait, {len(left)} should")
        if node.crashes == 0:
            counts = store.byte_counts()
            now = (sum(c.bytes_in for c in counts), sum(c.bytes_out for c in counts))
            moved = (self.bytes_in, self.bytes_out)
            require(now == moved, "counters", f"{now} bytes are counted, {moved} were moved")
        self._check_leftovers(store)
        try:
            found = audit(StoredEvidence(store)).findings
        except BlockTrainError as error:
            raise Violation("audit", str(error)) from None
        require(not found, "audit", "; ".join(f.sentence for f in found[:2]))

    def _check_leftovers(self, store: EffectStore) -> None:
        """Uploads end with their leases; blobs that nothing names come from crashes alone."""
        out = {f"{lease.task}.{lease.fence}" for lease in store.recover(KEPT_TIMES).leases}
        uploads = {path.name for path in self._node.files.find(ROOT / "uploads", "*")}
        require(uploads <= out, "leftovers", f"uploads of ended leases: {sorted(uploads - out)}")
        if self._node.crashes == 0:
            named = {update["payload"] for update in self._updates.values()}
            for body in (body for chain in self._versions.values() for body in chain):
                parts = (body[part] for part in ("weights", "momentum", "delta", "residual"))
                named |= {part["sha256"] for part in parts if part is not None}
            linked = {path.name for path in self._node.files.find(ROOT / "blobs" / "linked", "*")}
            extra = set(store.blobs.names()) - named - linked
            # The corpus' index is the one blob besides.
            require(len(extra) <= 1, "leftovers", f"{len(extra) - 1} blobs belong to nothing")
