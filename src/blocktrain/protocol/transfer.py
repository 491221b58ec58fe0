"""The arithmetic of resumable transfers: chunks, what is missing, which ranges. No I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from blocktrain.protocol.refusals import Code, Refused

CHUNK_BYTES = 1 << 20
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 1 << 10, 1 << 26
MAX_CHUNKS = 1 << 16


@dataclass(frozen=True)
class Plan:
    """`length` bytes in chunks of `chunk_bytes`, numbered from 0; the last may be shorter."""

    length: int
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        if self.length < 0 or not MIN_CHUNK_BYTES <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise Refused(Code.MALFORMED, f"{self.length} bytes in chunks of {self.chunk_bytes}")
        if self.chunks > MAX_CHUNKS:
            raise Refused(Code.TOO_LARGE, f"{self.chunks} chunks, {MAX_CHUNKS} are allowed")

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        return -(-self.length // self.chunk_bytes)

    def span(self, index: int) -> tuple[int, int]:
        """[start, end) of a chunk; an index outside the plan is refused."""
        if not 0 <= index < self.chunks:
            raise Refused(Code.MALFORMED, f"chunk {index} of {self.chunks}")
        start = index * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.length)

    def missing(self, have: Iterable[int]) -> list[int]:
        """The chunks that are still to be sent, in order."""
        return sorted(set(range(self.chunks)) - set(have))

    def ranges(self, have: Iterable[int]) -> list[tuple[int, int]]:
        """The missing bytes as few [start, end) ranges."""
        ranges: list[tuple[int, int]] = []
        for index in self.missing(have):
            start, end = self.span(index)
            if ranges and ranges[-1][1] == start:
                start = ranges.pop()[0]
            ranges.append((start, end))
        return ranges


def sha256(content: bytes) -> str:
    """64 hex digits."""
    return hashlib.sha256(content).hexdigest()


def split(content: bytes, chunk_bytes: int = CHUNK_BYTES) -> list[bytes]:
    """The chunks themselves."""
    plan = Plan(len(content), chunk_bytes)
    return [content[slice(*plan.span(index))] for index in range(plan.chunks)]


def chunk_hashes(content: bytes, chunk_bytes: int = CHUNK_BYTES) -> list[str]:
    """The sha256 of every chunk."""
    return [sha256(chunk) for chunk in split(content, chunk_bytes)]


def range_header(start: int, end: int | None = None) -> str:
    """The HTTP Range header for the bytes [start, end), or for all from start on."""
    return f"bytes={start}-" if end is None else f"bytes={start}-{end - 1}"


def require_chunk(plan: Plan, index: int, content: bytes, digest: str) -> None:
    """Refuse a chunk of the wrong length or with other bytes than announced."""
    start, end = plan.span(index)
    if len(content) != end - start:
        raise Refused(
            Code.MALFORMED, f"chunk {index} has {len(content)} bytes, {end - start} belong there"
        )
    require_hash(content, digest, f"chunk {index}")


def require_hash(content: bytes, digest: str, what: str = "the payload") -> None:
    """Refuse bytes that are not the announced ones."""
    actual = sha256(content)
    if actual != digest:
        raise Refused(
            Code.HASH_MISMATCH,
            f"{what} has sha256 {actual[:12]}..., announced was {digest[:12]}...",
        )
