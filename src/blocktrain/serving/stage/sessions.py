"""A session at its stage: the shape it was opened with, and which RUN may come next. No I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blocktrain.config import Topology
from blocktrain.errors import ConfigError
from blocktrain.protocol.frames import (
    ITEM,
    Buffer,
    FrameError,
    Kind,
    Open,
    Run,
    Why,
    Wire,
    id_width,
)
from blocktrain.serving.line.address import parse_address

if TYPE_CHECKING:
    from torch import Tensor

    from blocktrain.serving.blocks import ServedBlocks
    from blocktrain.serving.stage.stage import Peer


@dataclass(eq=False)
class Work:
    """A RUN on its way through the computing thread."""

    session: Session
    sequence: int
    run: Run
    payload: Buffer  # state, then ids
    peer: Peer | None = None  # the connection that it came on
    dropped: bool = False  # a newer epoch made it useless
    offset: int = 0  # positions that are computed
    outputs: list[Tensor] = field(default_factory=list)
    result: memoryview | None = None
    count: int = 0  # positions in the result
    failed: bool = False
    seconds: float = 0.0


@dataclass(eq=False)
class Session:
    """Its number and shape, what it has read, and what the computing thread keeps for it."""

    number: int
    owner: Peer  # the connection that opened it, and gets the answers
    topology: Topology
    wire: Wire
    most: int
    blocks: tuple[int, ...]
    id_bytes: int
    item: int  # bytes per position of a RUN
    remembers: bool
    next: str
    last_use: float  # when something last came
    sequence: int = 0
    epoch: int = 0
    known: int = 0  # positions that a RUN may follow
    waiting: list[Work] = field(default_factory=list)  # without an answer
    closed: bool = False
    memory: Any = None  # this and the next are used by the computing thread alone
    works: deque[Work] = field(default_factory=deque)

    @property
    def forwards(self) -> bool:
        """Whether another stage goes on with the result."""
        return bool(self.next)

    @property
    def most_payload(self) -> int:
        """Bytes that a RUN may have."""
        return self.most * self.item

    def admit(self, sequence: int, run: Run, payload: Buffer, *, gaps: bool = False) -> Work | None:
        """The work of a RUN; None if it is late and to be ignored; FrameError if it does not fit.

        `gaps`: it comes from a stage, which does not pass on what a newer epoch has overtaken.
        """
        if sequence <= self.sequence:
            raise FrameError(Why.DUPLICATED, f"sequence {sequence} after {self.sequence}")
        if sequence != self.sequence + 1 and not gaps:
            raise FrameError(Why.OUT_OF_ORDER, f"sequence {sequence} after {self.sequence}")
        if (
            not 1 <= run.count <= self.most
            or run.start + run.count > self.most
            or len(payload) != run.count * self.item
        ):
            raise FrameError(
                Why.WRONG_SHAPE,
                f"{len(payload)} bytes for positions {run.start} to {run.start + run.count} "
                f"of {self.most}",
            )
        if run.wanted > run.count or run.tail > run.count or (run.tail and self.remembers):
            raise FrameError(
                Why.WRONG_SHAPE, f"{run.wanted} wanted, a tail of {run.tail}, of {run.count}"
            )
        self.sequence = sequence
        if run.epoch < self.epoch:
            return None
        if run.start > (self.known if self.remembers else 0):
            raise FrameError(
                Why.WRONG_START, f"position {run.start} after {self.known if self.remembers else 0}"
            )
        if run.epoch > self.epoch:  # what it would forget at once is not computed
            for work in self.waiting:
                work.dropped = work.dropped or work.run.start >= run.start
        self.epoch, self.known = run.epoch, run.start + run.count
        work = Work(self, sequence, run, payload)
        self.waiting.append(work)
        return work


def open_session(
    served: ServedBlocks, number: int, request: Open, owner: Peer, now: float
) -> Session:
    """The session that an OPEN asks for, or FrameError."""
    facts = served.facts
    if request.topology != served.topology:
        raise FrameError(Why.NOT_FOR_RING if request.topology == "ring" else Why.NOT_FOR_FAN)
    blocks = request.blocks or facts.blocks
    if missing := [n for n in blocks if n not in facts.blocks]:
        raise FrameError(Why.NOT_HERE, f"block {missing[0]}")
    if blocks != tuple(sorted(set(blocks))) or (
        request.topology == "ring" and blocks != facts.blocks
    ):
        raise FrameError(Why.WRONG_SHAPE, f"blocks {blocks} of {facts.blocks}")
    width = served.pass_width if request.topology == "ring" else facts.width
    if request.width != width or not 1 <= request.most <= facts.context:
        raise FrameError(
            Why.WRONG_SHAPE,
            f"width {request.width} and {request.most} positions "
            f"instead of {width} and up to {facts.context}",
        )
    if request.next:
        if served.last:
            raise FrameError(Why.WRONG_SHAPE, "nothing comes after the last block")
        try:
            parse_address(request.next)
        except ConfigError as error:
            raise FrameError(Why.WRONG_SHAPE, str(error)) from None
    id_bytes = id_width(facts.vocabulary)
    item = id_bytes + served.state_width * ITEM[request.wire]
    return Session(
        number,
        owner,
        request.topology,
        request.wire,
        request.most,
        blocks,
        id_bytes,
        item,
        served.remembers,
        request.next,
        now,
    )


def most_payload(served: ServedBlocks, kind: Kind) -> int:
    """The largest payload of any session; a RUN of an unknown session is skipped up to this."""
    if kind != Kind.RUN:
        return 0
    facts = served.facts
    return facts.context * (id_width(facts.vocabulary) + 4 * served.state_width)
