"""Whether updates that repeat what another worker has sent were left out, and no others were."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from blocktrain.audit.versions import EvidenceReader
from blocktrain.errors import Damaged
from blocktrain.protocol import compression, tensors
from blocktrain.protocol.ledger import RoundBody, UpdateBody, VersionBody
from blocktrain.protocol.messages import Blob
from blocktrain.protocol.refusals import Refused

RECENT_ROUNDS = 4
MOST_RECENT = 64  # updates
SAMPLE = 1 << 14  # weights of an update that are compared; the coordinator takes others
MARGIN = 0.005  # of the cosine: another sample gives another one
Sample = NDArray[np.float64]


@dataclass(frozen=True)
class _Sent:
    """A sample of an update: what it holds, and of absolute weights what they started from."""

    worker: str
    payload: str
    values: Sample
    base: Sample | None

    @property
    def change(self) -> Sample:
        return self.values if self.base is None else self.values - self.base

    def likeness(self, other: _Sent) -> float:
        """Cosine with an earlier one of another worker."""
        if self.worker == other.worker:
            return 0.0
        found = _cosine(self.change, other.change)
        if self.base is not None and other.base is not None:
            found = max(found, _cosine(self.change, other.values - self.base))
        return found


@dataclass
class CopyCheck:
    """Follows what the rounds of a run have settled."""

    read: EvidenceReader
    alike: float
    payloads: set[str] = field(default_factory=set)
    recent: dict[int, deque[list[_Sent]]] = field(default_factory=dict)  # by block

    def settle(
        self, updates: Iterable[tuple[int, UpdateBody]], closed: VersionBody | RoundBody
    ) -> Iterator[str]:
        """What is wrong with the updates of a round, each with its entry."""
        rounds = self.recent.setdefault(closed.block, deque(maxlen=RECENT_ROUNDS))
        known = [sent for sents in rounds for sent in sents][-MOST_RECENT:]
        came: list[_Sent] = []
        for _, update in sorted(updates, key=lambda known: known[0]):
            try:
                sent = self._sent(update)
            except (Damaged, Refused):
                continue  # that is a finding of its own
            likeness = max(map(sent.likeness, (*known, *came)), default=0.0)
            if sent.payload in self.payloads:
                likeness = 1.0
            left_out = closed.dropped.get(update.id, "").startswith("copy:")
            if left_out and likeness < self.alike - MARGIN:
                yield f"update {update.id[:12]}... was left out as copy, and is not"
            if update.id not in closed.dropped and likeness > self.alike + MARGIN:
                yield f"update {update.id[:12]}... is used, although another worker has sent it"
            self.payloads.add(sent.payload)
            came.append(sent)
        if came:
            rounds.append(came)

    def _sent(self, update: UpdateBody) -> _Sent:
        sent = update.submission
        base = tensors.unpack(self.read(update.order.weights))
        blob = Blob(sha256=sent.payload_sha256, length=sent.payload_length)
        schema, method = tensors.schema_of(base), update.order.compression
        opened = compression.open_update(self.read(blob), schema, method=method)
        start = _sample(base) if opened.absolute else None
        return _Sent(sent.worker, sent.payload_sha256, _sample(opened.tensors), start)


def _sample(values: Mapping[str, tensors.Array]) -> Sample:
    flat = np.concatenate([values[name].reshape(-1) for name in sorted(values)])
    return flat[:: max(1, len(flat) // SAMPLE)].astype(np.float64)


def _cosine(a: Sample, b: Sample) -> float:
    if a.shape != b.shape:  # a forged ledger names other weights: that is a finding of its own
        return 0.0
    length = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / length if length > 0 else 0.0
