"""Versions that are published as deltas, computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blocktrain.audit.evidence import CheckName
from blocktrain.audit.recompute import change_of, narrow
from blocktrain.audit.versions import EvidenceReader
from blocktrain.protocol import compression
from blocktrain.protocol.ledger import UpdateBody, VersionBody
from blocktrain.protocol.messages import Blob
from blocktrain.protocol.tensors import Tensors, schema_of, unpack

WORTH = 4  # lengths of the updates that are worth a delta with the parent's residual
Problem = tuple[CheckName, str]


@dataclass(frozen=True)
class VersionChange:
    """What a version should be made of."""

    method: str  # by which versions are published
    current: Tensors  # the parent
    target: Tensors  # the weights that the updates lead to, in float64
    residual: Blob | None  # what the parent's delta lacks
    updates: Sequence[UpdateBody]
    received: int = 0  # bytes of updates since the last delta that was complete

    @property
    def complete(self) -> bool:
        """Whether enough has come for a delta that holds the parent's residual."""
        expected = compression.expected_payload(schema_of(self.current), self.method)
        lengths = (update.submission.payload_length for update in self.updates)
        return self.residual is None or WORTH * (self.received + sum(lengths)) >= expected


def check_delta(
    read: EvidenceReader, version: VersionBody, change: VersionChange
) -> tuple[Tensors, list[Problem]]:
    """The weights as they should have been published, and what is wrong with delta and residual.

    The published delta must hold the same values; zstd may have packed them otherwise.
    """
    published, whole = version.delta, compression.METHODS[change.method].exact
    if whole or published is None:
        follows_rules = whole and published is None and version.residual is None
        read.keep(version.block, "residual", None)
        problem: Problem = ("delta", "was published otherwise than the run's rules say")
        return narrow(change.target), [] if follows_rules else [problem]
    delta, rest = _make_delta(read, version, change)
    rest = rest if any(tensor.any() for tensor in rest.values()) else {}
    left = read.keep(version.block, "residual", rest)  # first: the next version is made of it
    made, found = (
        compression.add_delta(change.current, payload) for payload in (delta, read(published))
    )
    problems: list[Problem] = []
    if change.complete and not version.complete:
        problems.append(("rule", "does without a residual that its updates are worth"))
    if any(made[name].tobytes() != found[name].tobytes() for name in made):
        problems.append(("delta", "has another delta than its updates make"))
    if left != version.residual:
        problems.append(("residual", "has another residual than its delta leaves"))
    return made, problems


def _make_delta(
    read: EvidenceReader, version: VersionBody, change: VersionChange
) -> tuple[bytes, Tensors]:
    """(delta, what it lacks). A single update that is not shortened is the delta itself."""
    part, update = version.parts[0], change.updates[0]
    alone = len(version.parts) == 1 and part.scale == 1 and version.outer == "average"
    waits = change.residual is not None and not version.complete
    if alone and (change.residual is None or waits) and update.order.compression == change.method:
        sent = update.submission
        blob = Blob(sha256=sent.payload_sha256, length=sent.payload_length)
        return read(blob), unpack(read(change.residual)) if change.residual else {}
    residual = unpack(read(change.residual)) if change.residual else None
    added = change_of(change.current, change.target)
    if residual is None or not waits:
        return compression.compress(added, residual, change.method)
    delta, rest = compression.compress(added, None, change.method)
    if any(tensor.any() for tensor in rest.values()):
        residual = {name: tensor + rest[name] for name, tensor in residual.items()}
    return delta, residual
