"""Which versions stay on the disk whole.

An update of a few bytes makes a version whose weights are as long as any other's. So older versions
are kept as what was added to their parents, which weighs about as much as their updates. Whole
weights stay of version 0, of the newest versions, of those that somebody still needs, and whenever
the deltas since the last whole ones have come to weigh as much. All others follow from these, bit
for bit: see `protocol.messages.delta_path`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class KeptVersion:
    """The blobs of a version that may be removed one day."""

    weights: str
    state: tuple[str, ...]  # momentum and residual: only the next version is made of them
    derivable: bool  # whether the weights may go: they follow from earlier ones


@dataclass
class BlockRetention:
    """The versions of one block."""

    versions: deque[KeptVersion] = field(default_factory=deque)  # oldest first
    whole: set[str] = field(default_factory=set)  # older weights that stay
    sizes: dict[str, int] = field(default_factory=dict)  # of all that is here
    bytes: int = 0
    unbroken: int = 0  # bytes of the deltas since the last version that stays whole

    def add(self, version: Mapping[str, Any]) -> None:
        """One more version was published: the body of its entry in the ledger."""
        delta, weights = version["delta"], version["weights"]
        self.unbroken += delta["length"] if delta else 0
        derivable = bool(delta) and self.unbroken < weights["length"]
        self.unbroken = self.unbroken if derivable else 0
        state = [blob for part in ("momentum", "residual") if (blob := version[part])]
        names = tuple(blob["sha256"] for blob in state)
        for blob in (weights, *state):
            self.bytes += 0 if blob["sha256"] in self.sizes else blob["length"]
            self.sizes[blob["sha256"]] = blob["length"]
        self.versions.append(KeptVersion(weights["sha256"], names, derivable))

    def retire(self, newest: int, needed: Set[str]) -> set[str]:
        """Names that are of no use any more, beyond so many newest versions. They are forgotten.

        Weights that are `needed` now are looked at again the next time.
        """
        retired: set[str] = set()
        later: list[KeptVersion] = []
        while len(self.versions) > newest:
            version = self.versions.popleft()
            retired.update(version.state)
            if not version.derivable:
                self.whole.add(version.weights)
            elif version.weights in needed:
                later.append(KeptVersion(version.weights, (), True))
            else:
                retired.add(version.weights)
        self.versions.extendleft(reversed(later))
        # A version that changes nothing has the weights of another one.
        kept = {name for v in self.versions for name in (v.weights, *v.state)}
        gone = retired - kept - self.whole - needed
        self.bytes -= sum(self.sizes.pop(name) for name in gone)
        return gone
