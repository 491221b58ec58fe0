"""Recomputes a run from its public record: every link, signature, lease, share and version.

The coordinator's code (`merge`, `rounds`) is not used here: the rules are written again, shorter.
Every problem becomes a finding; a finding does not end the audit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from blocktrain.audit.copies import CopyCheck
from blocktrain.audit.corpus import CorpusCheck, read_corpus
from blocktrain.audit.deltas import VersionChange, check_delta
from blocktrain.audit.evidence import (
    Audit,
    AuditProgress,
    CheckName,
    EvidenceSource,
    Finding,
    RunRecord,
    Totals,
    check_manifest,
    require_protocol,
)
from blocktrain.audit.recompute import Mean, narrow, outer_step, propose
from blocktrain.audit.rules import (
    bounds_of,
    check_drawn,
    check_dropped,
    check_staleness,
    check_used,
    follows_rules,
    least_gain,
    usual_of,
)
from blocktrain.audit.shares import capped_shares, plain_shares
from blocktrain.audit.versions import EvidenceReader, PublishedVersion, unreadable
from blocktrain.config import Config, make_config
from blocktrain.errors import ConfigError, Damaged
from blocktrain.protocol import compression, ledger, tensors
from blocktrain.protocol.identity import verify, worker_id
from blocktrain.protocol.ledger import (
    CheckFacts,
    ExpireFacts,
    FinishFacts,
    JoinFacts,
    KickFacts,
    LeaseFacts,
    RoundBody,
    RunBody,
    StartFacts,
    UpdateBody,
    VersionBody,
    read_body,
)
from blocktrain.protocol.messages import Blob, BlockVersion
from blocktrain.protocol.refusals import Refused

MergedPart = tuple[ledger.Part, UpdateBody]


def audit(
    source: EvidenceSource, *, retrain: bool = False, progress: AuditProgress = lambda *_: None
) -> Audit:
    """Check a run; with `retrain` also train every update again.

    Training takes about as long as all workers took together.
    """
    record = source.record()
    require_protocol(record)
    auditor = Auditor(source)
    for number, entry in enumerate(record.entries, start=1):
        auditor.follow(entry)
        progress("entries", number, len(record.entries))
    auditor.finish(record)
    if source.whole:  # from far away this would fetch the whole corpus
        auditor.check_shards(progress)
    retrained, differences = 0, list[Finding]()
    if retrain and auditor.run is not None:
        from blocktrain.audit import replay  # torch, only where it is needed

        updates = list(auditor.updates.values())
        retrained, differences = replay.retrain(
            auditor.run, auditor.joins, updates, auditor.read, progress
        )
    return Audit(
        run=auditor.run.run if auditor.run else "",
        head=record.entries[-1].hash if record.entries else ledger.BEGINNING,
        entries=len(record.entries),
        updates=len(auditor.updates),
        versions=sum(len(chain) - 1 for chain in auditor.chains.values()),
        pending=auditor.pending,
        dropped=auditor.dropped,
        retrained=retrained,
        contributions=auditor.totals,
        findings=(*auditor.findings, *differences),
        facts=auditor.run,
    )


@dataclass
class Auditor:
    """Reads the ledger entry by entry and remembers what later ones are checked against."""

    source: EvidenceSource
    findings: list[Finding] = field(default_factory=list)
    run: RunBody | None = None
    config: Config | None = None
    last: ledger.LedgerEntry | None = None
    corpus: CorpusCheck | None = None
    copies: CopyCheck | None = None
    differing: set[str] = field(default_factory=set)  # updates that were trained again
    joins: dict[str, JoinFacts] = field(default_factory=dict)  # by worker
    newest: dict[int, LeaseFacts] = field(default_factory=dict)  # by task
    updates: dict[str, tuple[int, UpdateBody]] = field(
        default_factory=dict
    )  # accepted, by id, with the number of the entry
    answered: dict[int, str] = field(default_factory=dict)  # update by task
    settled: dict[str, int] = field(
        default_factory=dict
    )  # by update: the entry that merged or dropped it
    dropped: int = 0
    pending: int = 0
    kicked: set[str] = field(default_factory=set)
    chains: dict[int, list[PublishedVersion]] = field(default_factory=dict)  # by block, from 0 on
    closed: dict[int, int] = field(default_factory=dict)  # by block: the newest version's entry
    totals: Totals = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.read = EvidenceReader(self.source)

    def report(self, name: CheckName, entry: int, sentence: str) -> None:
        self.findings.append(Finding(name, entry, sentence))

    def follow(self, entry: ledger.LedgerEntry) -> None:
        """Check one entry against all before it."""
        seq, previous = (self.last.seq + 1, self.last.hash) if self.last else (1, ledger.BEGINNING)
        digest = ledger.entry_hash(entry.seq, entry.kind, entry.body, entry.previous)
        if (entry.seq, entry.previous, entry.hash) != (seq, previous, digest):
            self.report("chain", seq, f"entry {seq} was changed, or one before it is missing")
        if (entry.seq == 1) != (entry.kind == "run"):
            self.report(
                "run",
                entry.seq,
                f"entry {entry.seq} is of the kind {entry.kind}; the first entry, and only that, "
                "is the run's own",
            )
        self.last = entry
        try:
            self._read(entry)
        except Refused as error:
            self.report(
                "malformed",
                entry.seq,
                f"entry {entry.seq} ({entry.kind}) or what it names cannot be read: {error}",
            )
        except Damaged as error:
            self.report(
                "blob", entry.seq, f"entry {entry.seq} ({entry.kind}) cannot be checked: {error}"
            )

    def _read(self, entry: ledger.LedgerEntry) -> None:
        match entry.kind:
            case "run" if self.run is None:
                self._run(entry)
            case "join":
                join = read_body(JoinFacts, entry)
                self.joins[join.worker] = join
                if worker_id(join.public_key) != join.worker:
                    self.report(
                        "join", entry.seq, f"worker {join.worker} is not the name of its key"
                    )
            case "lease":
                self._lease(entry, read_body(LeaseFacts, entry))
            case "update":
                self._update(entry, read_body(UpdateBody, entry))
            case "version":
                self._version(entry, read_body(VersionBody, entry))
            case "round":
                closed = read_body(RoundBody, entry)
                self._settle(entry, closed, ())
            case "start":
                read_body(StartFacts, entry)
            case "expire":
                read_body(ExpireFacts, entry)
            case "kick":
                self.kicked.add(read_body(KickFacts, entry).worker)
            case "finish":
                read_body(FinishFacts, entry)
            case "check":
                self._check(entry, read_body(CheckFacts, entry))

    def _run(self, entry: ledger.LedgerEntry) -> None:
        run = read_body(RunBody, entry)
        self.run = run
        self.read.blocks = len(run.blocks)
        self.chains = {b.block: [PublishedVersion(b.weights)] for b in run.blocks if b.version == 0}
        try:
            self.config = make_config(dict(run.config))
            if self.config.fingerprint != run.fingerprint or sorted(self.chains) != list(
                range(1, self.config.blocks + 1)
            ):
                self.report(
                    "run", entry.seq, "the fingerprint or the blocks are not those of the settings"
                )
            exclusive = bool(run.policy.get("exclusive"))
            self.corpus = CorpusCheck(read_corpus(self.source, run), self.config, exclusive)
            alike = self._rule("alike")
            if self._defended and alike is not None:
                self.copies = CopyCheck(self.read, alike)
        except ConfigError as error:
            self.report("run", entry.seq, f"the settings make no sense: {error}")
        if not run.frozen <= run.taken <= self.chains.keys():
            self.report("parent", entry.seq, "it names blocks of its parent that it does not have")

    def _check(self, entry: ledger.LedgerEntry, facts: CheckFacts) -> None:
        for sentence in check_drawn(facts, self.updates.get(facts.update, (0, None))[1]):
            self.report("rule", entry.seq, sentence)
        self.differing |= {facts.update} if facts.result == "differs" else set()

    def check_shards(self, progress: AuditProgress) -> None:
        """All shards of the corpus, also those that no task has read."""
        if self.corpus is not None:
            for sentence in self.corpus.damaged_shards(self.source, progress):
                self.report("corpus", 1, sentence)

    def _lease(self, entry: ledger.LedgerEntry, lease: LeaseFacts) -> None:
        task, before = lease.order.task, self.newest.get(lease.order.task)
        for sentence in self.corpus.lease(lease, before) if self.corpus else ():
            self.report("corpus", entry.seq, sentence)
        if before is not None and lease.fence <= before.fence and lease != before:
            self.report(
                "fence",
                entry.seq,
                f"task {task} was leased with fence {lease.fence} after {before.fence}",
            )
        if self.run is not None and lease.order.block in self.run.frozen:
            self.report("lease", entry.seq, f"task {task} trains a block that is frozen")
        if self.config is not None and lease.order.seed != self.config.seed:
            self.report("lease", entry.seq, f"task {task} has another seed than the run")
        for pin in (
            BlockVersion(
                block=lease.order.block, version=lease.order.base, weights=lease.order.weights
            ),
            *lease.order.features,
        ):
            chain = self.chains.get(pin.block, [])
            if pin.version >= len(chain) or chain[pin.version].weights != pin.weights:
                self.report(
                    "lease",
                    entry.seq,
                    f"task {task} names version {pin.version} of block {pin.block}, "
                    "but other weights were published",
                )
        self.newest[task] = lease

    def _update(self, entry: ledger.LedgerEntry, update: UpdateBody) -> None:
        s, o, seq, name = (
            update.submission,
            update.order,
            entry.seq,
            f"update {update.id[:12]}... by {update.submission.worker}",
        )
        try:
            if s.worker not in self.joins or s.worker in self.kicked:
                self.report("join", seq, f"{name}: this worker never joined, or was removed before")
            else:
                verify(s, self.joins[s.worker].public_key)
        except Refused:
            self.report(
                "signature", seq, f"{name} was not signed by that worker, or was changed since"
            )
        tokens = s.steps * self.config.batch * self.config.context if self.config else s.tokens
        same = (s.task, s.block, s.base, s.tokens, s.tokens) == (
            o.task,
            o.block,
            o.base,
            tokens,
            update.tokens,
        ) and s.steps <= o.steps
        expected = hashlib.sha256(f"{s.task}:{s.payload_sha256}".encode()).hexdigest()
        if not same or update.id != expected or (self.run is not None and s.run != self.run.run):
            self.report(
                "update",
                seq,
                f"{name}: its id, its submission and its order do not belong together",
            )
        lease = self.newest.get(s.task)
        if (
            lease is None
            or (lease.fence == s.fence and (lease.worker, lease.order) != (s.worker, o))
            or s.fence > lease.fence
        ):
            self.report(
                "lease", seq, f"{name} answers task {s.task}, which was not given so to that worker"
            )
        elif lease.fence != s.fence:
            self.report(
                "fence",
                seq,
                f"{name} came with fence {s.fence} of task {s.task}, "
                f"which was leased again with {lease.fence}",
            )
        if not update.accepted:
            return
        if s.task in self.answered:
            self.report("twice", seq, f"{name} is the second accepted answer to task {s.task}")
        elif self.corpus is not None:
            for sentence in self.corpus.update(o, s.steps):
                self.report("corpus", seq, sentence)
        behind = len(self.chains.get(o.block, [])) - 1 - o.base
        for sentence in check_staleness(update, behind, self._rule("decay")):
            self.report("weight", seq, f"{name} {sentence}")
        self.answered[s.task] = update.id
        self.updates[update.id] = seq, update

    def _rule(self, name: str) -> float | None:
        """A number of the run's policy; None if the run does not state it."""
        value = None if self.run is None else self.run.policy.get(name)
        return value if isinstance(value, int | float) else None

    def _version(self, entry: ledger.LedgerEntry, version: VersionBody) -> None:
        chain, name = (
            self.chains.setdefault(version.block, []),
            f"version {version.version} of block {version.block}",
        )
        if version.version == 0 and len(chain) == 1:
            if version.weights != chain[0].weights or version.parent is not None or version.parts:
                self.report("sequence", entry.seq, f"{name} is not the one that the run began with")
            return
        if not chain or version.version != len(chain) or version.parent != chain[-1].weights.sha256:
            self.report("sequence", entry.seq, f"{name} does not follow version {len(chain) - 1}")
        self.closed[version.block] = entry.seq
        self.read.follow(version.step)
        parts = self._settle(entry, version, version.parts)
        try:
            if chain and len(parts) == len(version.parts):
                self._shares(entry, version, parts, name)
                self._weights(entry, version, parts, name)
        finally:
            received = 0 if version.complete or not chain else chain[-1].received
            for _, update in parts:
                received += 0 if version.complete else update.submission.payload_length
                count, tokens = self.totals.get(update.submission.worker, (0, 0))
                self.totals[update.submission.worker] = count + 1, tokens + update.tokens
            chain.append(
                PublishedVersion(
                    version.weights,
                    version.momentum,
                    version.residual,
                    version.tokens,
                    version.norms,
                    received,
                )
            )

    def _settle(
        self,
        entry: ledger.LedgerEntry,
        closed: VersionBody | RoundBody,
        parts: Sequence[ledger.Part],
    ) -> list[MergedPart]:
        """Every update is named once, after it was accepted, in its own block.

        Returns the parts for which this holds.
        """
        settled, mine, block, dropped = [], [], closed.block, closed.dropped
        for name, part in [*((p.update, p) for p in parts), *((name, None) for name in dropped)]:
            seq, update = self.updates.get(name, (0, None))
            if update is None or update.order.block != block:
                self.report(
                    "unexpected",
                    entry.seq,
                    f"entry {entry.seq} uses update {name}, "
                    f"which is not an accepted update of block {block}",
                )
            elif name in self.settled:
                self.report(
                    "doubled",
                    entry.seq,
                    f"entry {entry.seq} uses update {name} again, after entry {self.settled[name]}",
                )
            else:
                self.settled[name] = entry.seq
                mine.append((seq, update))
                if part is not None:
                    settled.append((part, update))
                else:
                    self.dropped += 1
                    payload = self._payload(seq, update)
                    try:
                        self._left_out(entry.seq, payload, update, closed)
                    except (Damaged, Refused) as error:  # the others are settled all the same
                        self.report(
                            "blob" if isinstance(error, Damaged) else "malformed",
                            entry.seq,
                            f"why update {name[:12]}... was left out cannot be checked: {error}",
                        )
        if self.copies is not None:
            for sentence in self.copies.settle(mine, closed):
                self.report("rule", entry.seq, sentence)
        return settled

    def _left_out(
        self, seq: int, payload: bytes | None, update: UpdateBody, closed: VersionBody | RoundBody
    ) -> None:
        """The reason for which an update was left out is true."""
        chain = self.chains.get(closed.block)
        if payload is None or not chain or not self._defended or self.config is None:
            return
        current = tensors.unpack(self.read(chain[-1].weights))
        schema = tensors.schema_of(current)
        base = tensors.unpack(self.read(update.order.weights), schema)
        opened = compression.open_update(payload, schema, method=update.order.compression)
        norm = propose(current, opened, base, 1.0)[1]
        bounds = bounds_of(self.config, update, sum(t.size for t in current.values()))
        least = least_gain(self.config, update, self.updates, closed)
        for sentence in check_dropped(update.id, norm, bounds, closed, least, self.differing):
            self.report("rule", seq, sentence)

    def _payload(self, seq: int, update: UpdateBody) -> bytes | None:
        s = update.submission
        try:
            return self.read(Blob(sha256=s.payload_sha256, length=s.payload_length))
        except Damaged as error:
            self.report(
                "payload",
                seq,
                f"the payload of update {update.id[:12]}... is not what was signed: {error}",
            )
            return None

    def _shares(
        self,
        entry: ledger.LedgerEntry,
        version: VersionBody,
        parts: Sequence[MergedPart],
        name: str,
    ) -> None:
        workers = [update.submission.worker for _, update in parts]
        counted = [
            (worker, update.tokens * update.weight, self.totals.get(worker, (0, 0))[0])
            for worker, (_, update) in zip(workers, parts, strict=True)
        ]
        shares = (capped_shares if self._defended else plain_shares)(counted)
        for (part, _), share in zip(parts, shares, strict=True):
            if not math.isclose(part.share, share, rel_tol=1e-12):
                self.report(
                    "share",
                    entry.seq,
                    f"update {part.update[:12]}... has the share {part.share} in {name}; "
                    "its tokens give another",
                )
        if [p.update for p in version.parts] != sorted(p.update for p in version.parts):
            self.report(
                "share", entry.seq, f"{name} does not add its updates in the order of their ids"
            )
        tokens = self.chains[version.block][-1].tokens + sum(update.tokens for _, update in parts)
        if version.tokens != tokens or sorted(version.applied) != sorted(
            p.update for p in version.parts
        ):
            self.report(
                "contributions",
                entry.seq,
                f"{name} counts other tokens or updates than its parts have",
            )
        if parts and version.features not in [update.order.features for _, update in parts]:
            self.report(
                "update", entry.seq, f"{name} names other features than its updates were trained on"
            )

    @property
    def _defended(self) -> bool:
        """Whether the run believes nobody."""
        return self.run is not None and self.run.policy.get("undefended") is False

    def _usual(self, update: UpdateBody, current: tensors.Tensors) -> float:
        """The unit in which the norm of an update is compared."""
        if not self._defended or self._rule("clip_by_steps") is None or self.config is None:
            return 1.0
        return usual_of(self.config, update, sum(t.size for t in current.values()))

    def _weights(
        self,
        entry: ledger.LedgerEntry,
        version: VersionBody,
        parts: Sequence[MergedPart],
        name: str,
    ) -> None:
        before = self.chains[version.block][-1]
        current = tensors.unpack(self.read(before.weights))
        schema, average = tensors.schema_of(current), self._average(entry, version, parts, current)
        if average is None:
            return
        mean, norms = average
        if mean is None:
            self.report("weights", entry.seq, f"{name} is made of no update")
            return
        buffer = (
            None if before.momentum is None else tensors.unpack(self.read(before.momentum), schema)
        )
        target, momentum = outer_step(current, mean, buffer, version)
        memory = self.read.keep(version.block, "momentum", momentum and narrow(momentum))
        if memory != version.momentum:
            self.report(
                "momentum",
                entry.seq,
                f"the outer step's memory of {name} recomputes to other bytes",
            )
        weights, problems = check_delta(
            self.read,
            version,
            VersionChange(
                self.run.version_compression if self.run else "none",
                current,
                target,
                before.residual,
                [update for _, update in parts],
                before.received,
            ),
        )
        for check, sentence in problems:
            self.report(check, entry.seq, f"{name} {sentence}")
        if self.read.keep(version.block, "weights", weights) != version.weights:
            self.report(
                "weights", entry.seq, f"{name} recomputes to other weights than were published"
            )
        known = self.chains[version.block][-1].norms
        if self.run is not None and not follows_rules(version, known, norms, self.run.policy):
            self.report(
                "rule",
                entry.seq,
                f"{name} was clipped, or its outer step made, otherwise than the run's rules say",
            )
        for blob in filter(None, (version.weights, version.momentum, version.residual)):
            self.read(blob)

    def _average(
        self,
        entry: ledger.LedgerEntry,
        version: VersionBody,
        parts: Sequence[MergedPart],
        current: tensors.Tensors,
    ) -> tuple[tensors.Tensors | None, list[float]] | None:
        """(mean of the proposals, norms as they are clipped); None if a payload is missing."""
        schema, mean = tensors.schema_of(current), Mean(not self._defended)
        norms: list[float] = []
        for part, update in parts:
            payload = self._payload(self.updates[part.update][0], update)
            if payload is None:
                return None
            opened = compression.open_update(payload, schema, method=update.order.compression)
            late = opened.absolute and update.order.base != version.version - 1
            base = tensors.unpack(self.read(update.order.weights), schema) if late else None
            proposed, norm = propose(current, opened, base, part.scale)
            if self._defended and self.config is not None:
                bounds = bounds_of(self.config, update, sum(t.size for t in current.values()))
                least = least_gain(self.config, update, self.updates, version)
                for sentence in check_used(update.id, norm, bounds, version, least, self.differing):
                    self.report("rule", entry.seq, sentence)
            mean.add(update.submission.worker, part.share, proposed)
            norms.append(norm / self._usual(update, current))
        return mean.result(), norms

    def finish(self, record: RunRecord) -> None:
        """The checks that need the whole ledger."""
        if self.run is None:
            self.report("run", 0, "the ledger does not begin with a run")
        for index, chain in self.chains.items():
            seq = self.closed.get(index, 1)
            known = any((f.name, f.entry) == ("blob", seq) for f in self.findings)
            for sentence in () if known else unreadable(self.source, chain[-1].blobs):
                self.report("blob", seq, f"the newest version of block {index}: {sentence}")
        for name, (seq, update) in self.updates.items():
            if name not in self.settled:
                lost = seq < self.closed.get(update.order.block, 0)
                self.pending += not lost
                if lost:
                    self.report(
                        "lost",
                        seq,
                        f"update {name} was accepted, but block {update.order.block} "
                        "went on without it",
                    )
                if self.source.whole:
                    self._payload(seq, update)
        if record.totals is not None and record.totals != self.totals:
            self.report(
                "contributions", 0, "the coordinator counts other contributions than the ledger"
            )
        if self.run is not None:
            for number, sentence in check_manifest(record, self.run.coordinator):
                self.report("manifest", number, sentence)
