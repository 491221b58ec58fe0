"""Versions that are published as deltas, computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blocktrain.audit.evidence import CheckName, EvidenceSource, read_verified
from blocktrain.audit.recompute import change_of, name_of, narrow
from blocktrain.protocol import compression
from blocktrain.protocol.ledger import UpdateBody, VersionBody
from blocktrain.protocol.messages import Blob
from blocktrain.protocol.tensors import Tensors, unpack

Problem = tuple[CheckName, str]


@dataclass(frozen=True)
class VersionChange:
    """What a version should be made of."""

    method: str  # by which versions are published
    current: Tensors  # the parent
    target: Tensors  # the weights that the updates lead to, in float64
    residual: Blob | None  # what the parent's delta lacks
    updates: Sequence[UpdateBody]


def check_delta(
    source: EvidenceSource, version: VersionBody, change: VersionChange
) -> tuple[Tensors, list[Problem]]:
    """The weights as they should have been published, and what is wrong with delta and residual.

    The published delta must hold the same values; zstd may have packed them otherwise.
    """
    published, whole = version.delta, compression.METHODS[change.method].exact
    if whole or published is None:
        follows_rules = whole and published is None and version.residual is None
        problem: Problem = ("delta", "was published otherwise than the run's rules say")
        return narrow(change.target), [] if follows_rules else [problem]
    delta, rest = _make_delta(source, version, change)
    made, found = (
        compression.add_delta(change.current, payload)
        for payload in (delta, read_verified(source, published))
    )
    problems: list[Problem] = []
    if any(made[name].tobytes() != found[name].tobytes() for name in made):
        problems.append(("delta", "has another delta than its updates make"))
    left = name_of(rest) if any(tensor.any() for tensor in rest.values()) else None
    if left != version.residual:
        problems.append(("residual", "has another residual than its delta leaves"))
    return made, problems


def _make_delta(
    source: EvidenceSource, version: VersionBody, change: VersionChange
) -> tuple[bytes, Tensors]:
    """(delta, what it lacks). A single update that is not shortened is the delta itself."""
    part, update = version.parts[0], change.updates[0]
    alone = len(version.parts) == 1 and part.scale == 1 and version.outer == "average"
    if alone and change.residual is None and update.order.compression == change.method:
        sent = update.submission
        blob = Blob(sha256=sent.payload_sha256, length=sent.payload_length)
        return read_verified(source, blob), {}
    residual = unpack(read_verified(source, change.residual)) if change.residual else None
    return compression.compress(change_of(change.current, change.target), residual, change.method)
