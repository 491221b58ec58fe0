"""What an audit reads, from a run's folder or through its calls, and what it reports."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from blocktrain.errors import Damaged, RunError, Unreachable
from blocktrain.protocol.calls import Calls
from blocktrain.protocol.identity import verify
from blocktrain.protocol.ledger import LedgerEntry, ParentRun, RunFacts
from blocktrain.protocol.messages import PROTOCOL, Blob, Manifest
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.store.open import read_blobs, read_store

Totals = dict[str, tuple[int, int]]  # worker -> updates and tokens that became part of a version
CheckName = Literal[
    "chain",  # the ledger was changed, cut or reordered
    "manifest",  # what the coordinator signed is not in the ledger
    "malformed",  # an entry cannot be read
    "run",  # the run's own document contradicts itself
    "parent",  # the run does not go on from the model that it names
    "join",  # a worker is unknown, or is not its key
    "signature",
    "update",  # submission, order and record contradict each other
    "lease",  # the task was never leased, or to another worker
    "fence",  # the task was leased to another worker in the meantime
    "twice",  # a task has two accepted updates
    "weight",  # of staleness
    "payload",  # missing or with other bytes
    "lost",
    "doubled",
    "unexpected",
    "share",
    "rule",  # merged otherwise than the run's rules say
    "sequence",  # versions do not follow each other
    "weights",  # recomputed to other bytes
    "momentum",
    "delta",  # not what the version adds to its parent
    "residual",
    "blob",  # missing or with other bytes
    "corpus",  # a shard is damaged, or a task reads other text than the rules say
    "contributions",  # totals do not add up
    "retrain",  # trained again to other bytes
    "lineage",
]
AuditProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Finding:
    """Something that is wrong."""

    name: CheckName
    entry: int  # of the ledger; 0: the run as a whole
    sentence: str


@dataclass(frozen=True)
class RunRecord:
    """The ledger as it was at one moment, and what the coordinator says about it elsewhere."""

    entries: tuple[LedgerEntry, ...]
    totals: Totals | None = None
    manifest: Manifest | None = None


def check_manifest(record: RunRecord, coordinator: str) -> Iterator[tuple[int, str]]:
    """(entry, sentence) of what is wrong with what the coordinator has signed."""
    manifest = record.manifest
    if manifest is None:
        return
    try:
        verify(manifest, coordinator)
    except Refused:
        yield 0, "the manifest is not signed by the run's coordinator"
    if (
        manifest.number > len(record.entries)
        or record.entries[manifest.number - 1].hash != manifest.head
    ):
        yield manifest.number, "the ledger is not the one that the coordinator has signed"


@dataclass(frozen=True)
class Audit:
    """What was checked, and what was found."""

    run: str
    head: str  # hash of the newest entry: two audits with the same one looked at the same ledger
    entries: int
    updates: int  # accepted
    versions: int  # made by merging
    pending: int  # updates that wait for their merge
    dropped: int
    retrained: int
    contributions: Totals
    findings: tuple[Finding, ...]
    facts: RunFacts | None = field(default=None, repr=False)

    @property
    def parent(self) -> ParentRun | None:
        """The trained model that the run goes on from."""
        return self.facts.parent if self.facts else None

    @property
    def ok(self) -> bool:
        return not self.findings

    def as_dict(self) -> dict[str, Any]:
        totals = {
            worker: {"updates": count, "tokens": tokens}
            for worker, (count, tokens) in sorted(self.contributions.items())
        }
        fields = {key: value for key, value in vars(self).items() if key != "facts"}
        return {
            "ok": self.ok,
            **fields,
            "parent": self.parent.model_dump(mode="json") if self.parent else None,
            "contributions": totals,
            "findings": [asdict(f) for f in self.findings],
        }


class EvidenceSource(Protocol):
    """Where a run can be read. Nothing here is checked."""

    whole: ClassVar[bool]  # whether payloads that wait for their merge can be read, too

    def record(self) -> RunRecord:
        """The ledger, and what the coordinator says about it elsewhere."""

    def blob(self, blob: Blob) -> bytes:
        """The bytes under a name; Damaged if there are none."""

    def verify(self, blob: Blob) -> None:
        """Damaged, unless the bytes under a name are those of the name. They may be many."""


@dataclass(frozen=True)
class FolderSource:
    """A coordinator's folder, also while it is in use: takes no lock, writes nothing."""

    whole: ClassVar[bool] = True
    path: Path

    def record(self) -> RunRecord:
        """Ledger and totals as of the same commit."""
        with closing(read_store(self.path)) as store:
            return RunRecord(tuple(store.ledger()), store.contributions())

    def blob(self, blob: Blob) -> bytes:
        """The bytes under a name."""
        return b"".join(read_blobs(self.path).pieces(blob.sha256))

    def verify(self, blob: Blob) -> None:
        """In pieces."""
        blobs = read_blobs(self.path)
        if blobs.size(blob.sha256) != blob.length:
            raise Damaged(f"the blob {blob.sha256} has another size than {blob.length} bytes")
        blobs.verify(blob.sha256)


@dataclass(frozen=True)
class RemoteSource:
    """A run behind its calls. Downloads are kept in a folder, so that each is made once."""

    whole: ClassVar[bool] = False
    client: Calls
    cache: Path

    def record(self) -> RunRecord:
        """The manifest first: the ledger must then reach at least as far as it says."""
        manifest = self.client.manifest()
        entries: list[LedgerEntry] = []
        while page := self.client.ledger(len(entries)).entries:
            entries += page
        return RunRecord(tuple(entries), manifest=manifest)

    def blob(self, blob: Blob) -> bytes:
        """The bytes under a name. A broken connection is no finding about the run."""
        path = self.cache / blob.sha256
        if path.exists():
            return path.read_bytes()
        content = bytearray()
        try:
            for piece in self.client.blob(blob.sha256):
                content += piece
                if len(content) > blob.length:
                    break
        except Refused as error:
            if error.code is not Code.NOT_FOUND:
                raise Unreachable(str(error)) from None
            raise Damaged(f"the coordinator has no blob {blob.sha256}") from None
        if len(content) == blob.length:
            path.write_bytes(content)
        return bytes(content)

    def verify(self, blob: Blob) -> None:
        """After it was fetched."""
        read_verified(self, blob)


def require_protocol(record: RunRecord) -> None:
    """The rules of an older protocol are in an older version."""
    with suppress(ValueError, AttributeError, IndexError, RecursionError):
        first = record.entries[0]
        protocol = json.loads(first.body).get("protocol")
        if first.kind == "run" and protocol != PROTOCOL:
            raise RunError(
                f"this run was begun with protocol {protocol}, and this version of blocktrain "
                f"audits {PROTOCOL}; use the version that it began with"
            )


def open_folder(path: Path) -> EvidenceSource:
    """The run in a coordinator's folder, or in a folder of `train`, which has one inside."""
    inside = path / "coordinator"
    return FolderSource(inside if inside.is_dir() else path)


def read_verified(source: EvidenceSource, blob: Blob) -> bytes:
    """The bytes, after their hash has been checked."""
    content = source.blob(blob)
    require_bytes(content, blob)
    return content


def require_bytes(content: bytes, blob: Blob) -> None:
    """Damaged, unless these are the bytes of the name."""
    if len(content) != blob.length or hashlib.sha256(content).hexdigest() != blob.sha256:
        raise Damaged(f"the blob {blob.sha256} does not hold the {blob.length} bytes of its name")
