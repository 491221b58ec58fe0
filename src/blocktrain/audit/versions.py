"""Blobs of a run, also those that its coordinator has removed because they follow from others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from blocktrain.audit.evidence import EvidenceSource, read_verified, require_bytes
from blocktrain.errors import Damaged
from blocktrain.protocol.compression import add_delta
from blocktrain.protocol.messages import Blob, VersionDelta
from blocktrain.protocol.refusals import Refused
from blocktrain.protocol.tensors import Tensors, pack, unpack
from blocktrain.protocol.transfer import sha256

ROOM, ROOM_PER_BLOCK = 6, 1  # older weights that were made here and are kept
VersionPart = Literal["weights", "momentum", "residual"]


@dataclass(frozen=True)
class PublishedVersion:
    """What the next version of a block is checked against."""

    weights: Blob
    momentum: Blob | None = None
    residual: Blob | None = None
    tokens: int = 0
    norms: tuple[float, ...] = ()
    received: int = 0  # bytes of updates since the last delta that was complete

    @property
    def blobs(self) -> tuple[Blob, ...]:
        return tuple(filter(None, (self.weights, self.momentum, self.residual)))


def unreadable(source: EvidenceSource, blobs: Iterable[Blob]) -> Iterator[str]:
    """What is wrong with blobs that must be there, such as those that a coordinator starts from."""
    for blob in blobs:
        try:
            read_verified(source, blob)
        except Damaged as error:
            yield str(error)


class EvidenceReader:
    """Gives the bytes of a blob after their hash has been checked.

    Weights that are missing are made from the last whole ones and the deltas that follow. Momentum
    and residual of a version follow from nothing that is stored: they are those that the audit has
    computed itself. So each block's last ones stay until its next version, however long that takes.
    """

    def __init__(self, source: EvidenceSource) -> None:
        self._source = source
        self._steps: dict[str, VersionDelta] = {}  # by the weights that they lead to
        self._made: OrderedDict[str, bytes] = OrderedDict()
        self._state: dict[tuple[int, VersionPart], tuple[str, bytes]] = {}  # of the last versions
        self.blocks = 1

    def __call__(self, blob: Blob) -> bytes:
        try:
            content = self._source.blob(blob)
        except Damaged as error:
            content = self._computed(blob.sha256) or self._derive(blob, error)
        require_bytes(content, blob)
        return content

    def follow(self, step: VersionDelta | None) -> None:
        """Know how a version follows from its parent."""
        if step is not None:
            self._steps.setdefault(step.weights, step)

    def keep(self, block: int, part: VersionPart, tensors: Tensors | None) -> Blob | None:
        """What was computed for a block's newest version, in case it is not stored; its name."""
        if not tensors:
            self._state.pop((block, part), None)
            return None
        content = pack(tensors)
        name = sha256(content)
        self._state[block, part] = name, content
        return Blob(sha256=name, length=len(content))

    def _computed(self, name: str) -> bytes | None:
        return self._made.get(name) or dict(self._state.values()).get(name)

    def _keep(self, name: str, content: bytes) -> None:
        self._made[name] = content
        self._made.move_to_end(name)
        while len(self._made) > ROOM + ROOM_PER_BLOCK * self.blocks:
            self._made.popitem(last=False)

    def _derive(self, blob: Blob, missing: Damaged) -> bytes:
        path: list[VersionDelta] = []
        name, passed = blob.sha256, set[str]()
        while (start := self._whole(Blob(sha256=name, length=blob.length))) is None:
            step = self._steps.get(name)
            if step is None or name in passed:
                raise missing
            passed.add(name)
            path.append(step)
            name = step.parent
        tensors = unpack(start)
        try:
            for step in reversed(path):
                tensors = add_delta(tensors, read_verified(self._source, step.delta))
        except Refused as error:
            raise Damaged(f"the blob {blob.sha256} cannot be made again: {error}") from None
        content = pack(tensors)
        self._keep(blob.sha256, content)
        return content

    def _whole(self, blob: Blob) -> bytes | None:
        """Weights that are here. Stored ones are kept for the moment."""
        content = self._computed(blob.sha256)
        if content is None:
            try:
                content = read_verified(self._source, blob)
            except Damaged:
                return None
            self._keep(blob.sha256, content)
        return content
