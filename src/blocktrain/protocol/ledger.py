"""The public record: hash-chained entries, and the body of each kind of entry.

With the blobs it is all that a replay needs. `BODIES` defines each body once, for the coordinator
that writes it and for the audit that reads it. A class named `...Facts` that has a `...Body` is the
part that the calls of a coordinator know; the store adds the rest of the body.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from blocktrain.errors import Damaged
from blocktrain.protocol.compression import require_method
from blocktrain.protocol.identity import canonical, canonical_json
from blocktrain.protocol.messages import (
    MAX_BLOCKS,
    Blob,
    BlockIndex,
    BlockVersion,
    CorpusBlobs,
    Count,
    Lineage,
    Message,
    Name,
    Number,
    Order,
    PublicKey,
    RunId,
    Seconds,
    Sentence,
    Settings,
    Sha256,
    Submission,
    VersionDelta,
    Weight,
    WorkerId,
    read,
)
from blocktrain.protocol.refusals import Code, Refused

BEGINNING = "0" * 64  # `previous` of the first entry
MAX_BODY = 1 << 20
M = TypeVar("M", bound=Message)

EntryKind = Literal[
    "run",
    "start",
    "join",
    "lease",
    "expire",
    "update",
    "version",
    "round",
    "kick",
    "finish",
    "check",
]


class LedgerEntry(Message):
    """One line of the ledger. The body stays text: a check of its hash rewrites no numbers."""

    seq: Number
    """From 1."""
    kind: EntryKind
    body: Annotated[str, Field(max_length=MAX_BODY)]
    """Canonical JSON of an object; it has at least the fields of the facts of its kind."""
    previous: Sha256
    hash: Sha256


class LedgerPage(Message):
    """GET /v1/ledger?after=N: the entries that follow number N, and how many there are in all."""

    entries: Annotated[tuple[LedgerEntry, ...], Field(max_length=1000)]
    total: Count


class ParentRun(Message):
    """The trained model that a run goes on from."""

    run: RunId | None = None
    """Its run; None: not known."""
    head: Sha256 | None = None
    """Hash of the newest entry of its ledger; None: not known."""
    model: Sha256
    """One hash over all its weights."""
    fingerprint: Sha256
    """Of its settings."""
    blocks: Annotated[tuple[BlockIndex, ...], Field(min_length=1, max_length=MAX_BLOCKS)]
    """Whose version 0 is the parent's; the others begin with new weights."""
    frozen: Annotated[tuple[BlockIndex, ...], Field(max_length=MAX_BLOCKS)] = ()
    """Of these, the ones that stay as they are: they get no tasks and have no other version."""

    @property
    def sentence(self) -> str:
        """Where a run comes from, for people."""
        run = f"run {self.run[:12]}" if self.run else f"a model ({self.model[:12]})"
        head = f" at ledger entry {self.head[:12]}" if self.head else ""
        count = len(self.blocks)
        frozen = f", {len(self.frozen)} of them frozen" if self.frozen else ""
        return f"goes on from {run}{head}: {count} block{'s'[: count != 1]} of it{frozen}"


class RunFacts(Message):
    """run, the first entry: the settings and version 0 of every block."""

    protocol: Count
    run: RunId
    coordinator: PublicKey
    config: Settings
    fingerprint: Sha256
    corpus: CorpusBlobs
    blocks: Annotated[tuple[BlockVersion, ...], Field(min_length=1, max_length=MAX_BLOCKS)]
    parent: ParentRun | None = None
    """Left out where a run has none."""

    @model_serializer(mode="wrap")
    def _without_no_parent(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {k: v for k, v in serialize(self).items() if k != "parent" or v is not None}

    @property
    def taken(self) -> frozenset[int]:
        """The blocks that begin with the weights of a parent."""
        return frozenset(self.parent.blocks if self.parent else ())

    @property
    def frozen(self) -> frozenset[int]:
        """The blocks that are not trained."""
        return frozenset(self.parent.frozen if self.parent else ())


class StartFacts(Message):
    """start: a coordinator process took over the folder."""

    epoch: Number


class JoinFacts(Message):
    """join: a worker came for the first time."""

    worker: WorkerId
    public_key: PublicKey
    name: Name
    device: Name


class LeaseFacts(Message):
    """lease: a task was given to a worker."""

    worker: WorkerId
    fence: Number
    order: Order


class ExpireFacts(Message):
    """expire: a lease ended without an update."""

    worker: WorkerId
    task: Number
    fence: Number
    reason: Sentence


class UpdateFacts(Message):
    """update: a signed submission, and the order that it answers.

    The receipt carries the hash of this entry.
    """

    submission: Submission
    order: Order


class Part(Message):
    """One update's part in a version."""

    update: Sha256
    share: Annotated[float, Field(gt=0, le=1)]
    """Of the mean; all shares add up to 1."""
    scale: Annotated[float, Field(ge=0, le=1)]
    """By which the norm clip shortened the delta; 1 is unchanged."""


class VersionFacts(Message):
    """version: how a version was made of its parent and these updates, in this order."""

    block: BlockIndex
    version: Count
    parent: Sha256 | None
    weights: Blob
    momentum: Blob | None
    """The outer step's memory after this version."""
    delta: Blob | None = None
    """What was added to the parent; None: the weights were published whole."""
    residual: Blob | None = None
    """What the delta lacks, float32; None: nothing. It is part of the next delta."""
    parts: Annotated[tuple[Part, ...], Field(max_length=4096)]
    outer: Literal["average", "nesterov"]
    outer_learning_rate: Annotated[float, Field(ge=0, le=100)]
    outer_momentum: Annotated[float, Field(ge=0, lt=1)]
    features: Annotated[tuple[BlockVersion, ...], Field(max_length=MAX_BLOCKS)] = ()
    """For the fusion block: the versions of the others that it was trained on."""
    reason: Sentence

    @property
    def step(self) -> VersionDelta | None:
        """How it follows from its parent; None: it was published whole."""
        if self.delta is None or self.parent is None or self.version == 0:
            return None
        return VersionDelta(
            block=self.block,
            version=self.version,
            parent=self.parent,
            weights=self.weights.sha256,
            delta=self.delta,
        )


class RoundFacts(Message):
    """round: it was extended, or closed without a version."""

    block: BlockIndex
    version: Count
    event: Literal["extended", "empty"]
    seconds: Seconds
    """The new time to the deadline."""
    reason: Sentence


class KickFacts(Message):
    """kick: the operator removed a worker."""

    worker: WorkerId
    reason: Sentence


class FinishFacts(Message):
    """finish: the run ended."""

    reason: Sentence


class CheckFacts(Message):
    """check: an update was trained again beside the coordinator."""

    update: Sha256
    worker: WorkerId
    block: BlockIndex
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    """Drawn when the update was stored. It is checked if seed / 2^32 is less than `chance`."""
    chance: Annotated[float, Field(ge=0, le=1)]
    result: Literal["same", "near", "differs", "unknown"]
    """same: the same bytes. near: other roundings, as of another machine. unknown: not finished."""
    distance: Annotated[float, Field(ge=0)]
    """Length of the difference, in lengths of the change that comes out."""
    reason: Sentence


class RunBody(RunFacts):
    """run, with the rules that it is coordinated by."""

    policy: dict[str, Any] = Field(default_factory=dict)

    @property
    def version_compression(self) -> str:
        """How versions are published."""
        try:
            return require_method(str(self.policy.get("version_compression", "none")))
        except ValueError as error:
            raise Refused(Code.MALFORMED, f"the rules of the run: {error}") from None


class UpdateBody(UpdateFacts):
    """update, with what the coordinator decided."""

    id: Sha256
    accepted: bool
    staleness: Count
    weight: Weight
    tokens: Count


class Evidence(Message):
    """On what text updates were judged, and what came of it."""

    canary: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    """The seed of the text; None: members are trusted."""
    gains: dict[Sha256, tuple[float, float]] = Field(default_factory=dict)
    """By update: how much the loss fell, and how much that may be off."""


class VersionBody(VersionFacts, Evidence):
    """version, with what else it settled."""

    dropped: dict[Sha256, str] = Field(default_factory=dict)
    applied: tuple[Sha256, ...]
    tokens: Count
    norms: tuple[float, ...]
    complete: bool = True
    """Whether the parent's residual is part of the delta. Else it is part of this residual."""


class RoundBody(RoundFacts, Evidence):
    """round, with the updates that were left out of it."""

    dropped: dict[Sha256, str] = Field(default_factory=dict)


BODIES: dict[EntryKind, type[Message]] = {
    "run": RunBody,
    "start": StartFacts,
    "join": JoinFacts,
    "lease": LeaseFacts,
    "expire": ExpireFacts,
    "update": UpdateBody,
    "version": VersionBody,
    "round": RoundBody,
    "kick": KickFacts,
    "finish": FinishFacts,
    "check": CheckFacts,
}


def read_body(kind: type[M], entry: LedgerEntry) -> M:
    """The known fields of an entry's body. A newer coordinator may have written more."""
    if BODIES[entry.kind] is not kind:
        raise Refused(Code.MALFORMED, f"entry {entry.seq} is a {entry.kind}")
    try:
        body = json.loads(entry.body)
        if not isinstance(body, dict) or canonical_json(body) != entry.body:
            raise ValueError("it is not the canonical JSON of an object")
    except (ValueError, RecursionError) as error:
        raise Refused(Code.MALFORMED, f"the body of entry {entry.seq}: {error}") from None
    known = {name: body[name] for name in kind.model_fields if name in body}
    return read(kind, canonical_json(known).encode(), MAX_BODY)


def entry_hash(seq: int, kind: str, body: str, previous: str) -> str:
    """sha256 of the canonical JSON list [seq, kind, previous, body], with the body as a string."""
    return hashlib.sha256(canonical_json([seq, kind, previous, body]).encode()).hexdigest()


def require_chain(
    entries: Iterable[LedgerEntry], last: LedgerEntry | None = None
) -> LedgerEntry | None:
    """Refuse missing, repeated, reordered and changed entries; gives the last one."""
    for entry in entries:
        seq, previous = (1, BEGINNING) if last is None else (last.seq + 1, last.hash)
        if (entry.seq, entry.previous) != (seq, previous) or entry.hash != entry_hash(
            seq, entry.kind, entry.body, previous
        ):
            raise Damaged(
                f"the ledger is broken at entry {seq}: it was changed or lost; restore a backup"
            )
        last = entry
    return last


def lineage(parent: str | None, order: Order, continued: Lineage) -> str:
    """The name of an optimizer state, by the tasks it went through.

    sha256 of the parent's name, a line feed, and the order as it was carried out.
    """
    if (parent is None) != (continued.optimizer is None):
        raise ValueError("a state with a parent continues a task, a fresh one does not")
    carried_out = Order(**{name: getattr(order, name) for name in Order.model_fields}).model_copy(
        update={"continues": continued}
    )
    return hashlib.sha256((parent or "").encode() + b"\n" + canonical(carried_out)).hexdigest()
