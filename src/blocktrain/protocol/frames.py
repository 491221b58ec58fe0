"""TCP frames between an entry and its stages, without I/O: typed headers, `encode`, `Decoder`.

A frame is 32 bytes (magic, protocol, kind, flags, session, sequence, two lengths), a small typed
header in msgpack, and raw tensor bytes. Lengths are checked before memory is reserved for them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum, StrEnum
from typing import Annotated, Literal, NamedTuple

import msgspec

from blocktrain.config import Topology
from blocktrain.errors import BlockTrainError

MAGIC = b"BTF1"
PROTOCOL = 2
PREFIX = struct.Struct(">4sHBBQIIQ")
MOST_HEADER = 4096  # bytes
MOST_SENTENCE = 500  # characters
MOST_BLOCKS = 256
NONCE = 32  # bytes
BUFFER = 1 << 16

Buffer = bytes | bytearray | memoryview
Wire = Literal["fp32", "fp16"]
Role = Literal["entry", "stage"]
ID_WIDTHS = {1: "B", 2: "H", 4: "I"}  # bytes of a token id, and its `struct` format
ITEM: dict[Wire, int] = {"fp32": 4, "fp16": 2}

U16 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
U53 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Hex64 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
Numbers = Annotated[tuple[U16, ...], msgspec.Meta(max_length=MOST_BLOCKS)]


class Kind(IntEnum):
    """What a frame is for."""

    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    OPEN = 4
    OPENED = 5
    RUN = 6
    RESULT = 7
    CLOSE = 8
    PING = 9
    PONG = 10
    ERROR = 11


class Why(StrEnum):
    """Why a frame, a session or a connection is refused.

    The values are stable: programs compare them, people read the sentence.
    """

    MALFORMED = "malformed"
    WRONG_PROTOCOL = "wrong_protocol"
    TOO_LARGE = "too_large"
    UNEXPECTED = "unexpected"
    WRONG_KEY = "wrong_key"
    WRONG_FINGERPRINT = "wrong_fingerprint"
    WRONG_MODEL = "wrong_model"
    WRONG_ID_WIDTH = "wrong_id_width"
    TOO_SLOW = "too_slow"
    BUSY = "busy"
    OUT_OF_ORDER = "out_of_order"
    DUPLICATED = "duplicated"
    WRONG_SHAPE = "wrong_shape"
    UNKNOWN_SESSION = "unknown_session"
    TOO_MANY_SESSIONS = "too_many_sessions"
    NOT_HERE = "not_here"
    NOT_FOR_RING = "not_for_ring"
    NOT_FOR_FAN = "not_for_fan"
    WRONG_START = "wrong_start"
    OLD_EPOCH = "old_epoch"
    NEXT_LOST = "next_lost"
    FAILED = "failed"


SENTENCES: dict[Why, str] = {
    Why.MALFORMED: "this is not a frame of this protocol; compare it with docs/protocol.md",
    Why.WRONG_PROTOCOL: (
        "the protocol numbers differ; install the same version of blocktrain on all hosts"
    ),
    Why.TOO_LARGE: (
        "the frame is larger than its session allows; send no more positions than were opened"
    ),
    Why.UNEXPECTED: "a frame of this kind has no place here; follow the order in docs/protocol.md",
    Why.WRONG_KEY: "the keys differ; give the same file with --key on all hosts",
    Why.WRONG_FINGERPRINT: "the settings of the model differ; serve the same run on all hosts",
    Why.WRONG_MODEL: "the weights differ; serve the same version of the run on all hosts",
    Why.WRONG_ID_WIDTH: (
        "token ids here have another width; serve the same run on all hosts, "
        "and name its width in HELLO"
    ),
    Why.TOO_SLOW: "the bytes did not arrive in time; connect again over a faster line",
    Why.BUSY: "there are too many connections; close one, or start another stage",
    Why.OUT_OF_ORDER: (
        "the sequence number is not the next of its session; "
        "number frames one by one and send them in order"
    ),
    Why.DUPLICATED: (
        "this frame or session was sent before; "
        "send everything once, and open sessions under new numbers"
    ),
    Why.WRONG_SHAPE: (
        "the shape is not the one that the session was opened with; send what was announced"
    ),
    Why.UNKNOWN_SESSION: "there is no such session here (idle ones are dropped); open it first",
    Why.TOO_MANY_SESSIONS: (
        "there is no room for another session; close one, or start another stage"
    ),
    Why.NOT_HERE: "the stage does not hold this block; ask one that does",
    Why.NOT_FOR_RING: "this model is served as a fan; open the session with topology fan",
    Why.NOT_FOR_FAN: "this model is served as a ring; open the session with topology ring",
    Why.WRONG_START: "the session does not know the positions before this one; send them first",
    Why.OLD_EPOCH: "a newer epoch has replaced this one; drop the frame",
    Why.NEXT_LOST: (
        "the stage cannot reach the next one of the ring; open the session over other hosts"
    ),
    Why.FAILED: "the stage could not compute this; see its log",
}
SESSION_ONLY = frozenset(
    {
        Why.UNKNOWN_SESSION,
        Why.TOO_MANY_SESSIONS,
        Why.NOT_HERE,
        Why.NOT_FOR_RING,
        Why.NOT_FOR_FAN,
        Why.WRONG_START,
        Why.NEXT_LOST,
        Why.FAILED,
    }
)
"""After these the connection lives on; after any other it is closed."""


class Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """Base of all typed headers: a msgpack array of the fields in their order."""


class Challenge(Header, frozen=True):
    """The first frame, by the stage: a number that was never used before."""

    nonce: Bytes32


class Hello(Header, frozen=True):
    """The answer: the role, the proof of the key, and the bytes of a token id."""

    role: Role
    nonce: Bytes32
    proof: Bytes32
    fingerprint: Hex64
    id_bytes: U16


class Welcome(Header, frozen=True):
    """The stage's own proof, and what it holds."""

    proof: Bytes32
    kind: Literal["blocks", "reference"]
    blocks: Numbers
    width: U32
    context: U32
    z_width: U32
    fingerprint: Hex64
    model: Hex64


class Open(Header, frozen=True):
    """A session with its shape.

    `width` of what is passed on, `most` positions, `next` host:port of a ring, and the blocks
    wanted (none: all).
    """

    topology: Topology
    wire: Wire
    width: U32
    most: U32
    next: Annotated[str, msgspec.Meta(max_length=255)] = ""
    blocks: Numbers = ()


class Opened(Header, frozen=True):
    """Which blocks answer, in this order, and how wide a position of each answer is."""

    blocks: Numbers
    width: U32


class Run(Header, frozen=True):
    """Forget positions from `start` on, read `count`, answer the last `wanted` of them (0: all)."""

    epoch: U53
    start: U32
    count: U32
    wanted: U32 = 0
    tail: U32 = 0


class Result(Header, frozen=True):
    """The answer to the RUN of the same sequence.

    It has positions `start` to `start + count`, how many RUNs still wait, and the time it took.
    """

    epoch: U53
    start: U32
    count: U32
    queue: U32
    microseconds: U32


class Close(Header, frozen=True):
    """The session is over."""


class Ping(Header, frozen=True):
    """Any number, to be sent back."""

    stamp: U53


class Pong(Header, frozen=True):
    """The number, and how much work waits."""

    stamp: U53
    queue: U32


class Error(Header, frozen=True):
    """A refusal: a stable code, and a sentence that names the fix."""

    code: Annotated[str, msgspec.Meta(max_length=64)]
    sentence: Annotated[str, msgspec.Meta(max_length=MOST_SENTENCE)]


HEADERS: dict[Kind, type[Header]] = {
    Kind.CHALLENGE: Challenge,
    Kind.HELLO: Hello,
    Kind.WELCOME: Welcome,
    Kind.OPEN: Open,
    Kind.OPENED: Opened,
    Kind.RUN: Run,
    Kind.RESULT: Result,
    Kind.CLOSE: Close,
    Kind.PING: Ping,
    Kind.PONG: Pong,
    Kind.ERROR: Error,
}
_KINDS: dict[type[Header], Kind] = {header: kind for kind, header in HEADERS.items()}
_KNOWN = {int(kind): kind for kind in Kind}
_READ = {kind: msgspec.msgpack.Decoder(header) for kind, header in HEADERS.items()}
_WRITE = msgspec.msgpack.Encoder()


class FrameError(BlockTrainError):
    """Bytes that are refused. `before` are the good frames that arrived in front of them."""

    def __init__(self, why: Why, detail: str = "") -> None:
        self.why = why
        self.before: list[Frame] = []
        sentence = f"{detail}: {SENTENCES[why]}" if detail else SENTENCES[why]
        super().__init__(sentence[:MOST_SENTENCE])


class Frame(NamedTuple):
    """One message; the payload is the reader's own."""

    session: int
    sequence: int
    header: Header
    payload: Buffer = b""

    @property
    def kind(self) -> Kind:
        """What it is for."""
        return _KINDS[type(self.header)]


def encode(
    header: Header, session: int = 0, sequence: int = 0, payload: Sequence[Buffer] = ()
) -> list[Buffer]:
    """The buffers of a frame, to be written one after another; payloads are not copied."""
    typed = _WRITE.encode(header)
    length = sum(len(part) for part in payload)
    return [
        PREFIX.pack(MAGIC, PROTOCOL, _KINDS[type(header)], 0, session, sequence, len(typed), length)
        + typed,
        *payload,
    ]


def refusal(error: FrameError, session: int = 0) -> list[Buffer]:
    """The ERROR frame for a refusal."""
    return encode(Error(error.why.value, str(error)), session)


def id_width(vocabulary: int) -> int:
    """Bytes of a token id on the wire: the fewest of 1, 2 and 4 that hold every id."""
    return next(width for width in ID_WIDTHS if vocabulary <= 1 << 8 * width)


def pack_ids(ids: Sequence[int], width: int) -> bytes:
    """Token ids as they follow the state in a RUN: unsigned, little-endian."""
    return bytes(ids) if width == 1 else struct.pack(f"<{len(ids)}{ID_WIDTHS[width]}", *ids)


Cap = Callable[[Kind, int], int]
"""(kind, session) -> the most bytes that the payload of such a frame may have."""


class Decoder:
    """Bytes in, frames out, however the stream was cut. Dead after the first bad frame.

    Either `feed(data)`, or without a copy: read into `space()`, then `advance(count)`. A payload
    that arrives in parts is read straight into its own buffer.
    """

    def __init__(self, cap: Cap, size: int = BUFFER) -> None:
        self._dead: Why | None = None  # not the error itself, which would keep all of this alive
        self._cap = cap
        self._view = memoryview(bytearray(max(size, PREFIX.size + MOST_HEADER)))
        self._start = self._end = 0  # of the bytes that are received but not decoded yet
        self._prefix: tuple[Kind, int, int, int, int] | None = None
        self._frame: Frame | None = None  # its payload is still arriving
        self._rest: memoryview | None = None  # the unfilled part of that payload

    @property
    def needed_bytes(self) -> int:
        """Bytes still missing in the current frame, as far as is known; 0 between frames."""
        if self._rest is not None:
            return len(self._rest)
        if self._prefix is not None:
            return self._prefix[3] + self._prefix[4]
        return PREFIX.size if self._end > self._start else 0

    def space(self) -> memoryview:
        """The buffer for the next bytes."""
        return self._rest if self._rest is not None else self._view[self._end :]

    def advance(self, count: int) -> list[Frame]:
        """The frames that are complete now that `count` more bytes are in `space()`."""
        if self._dead is not None:
            raise FrameError(self._dead, "an earlier frame of this connection was refused")
        frames: list[Frame] = []
        if self._rest is not None and self._frame is not None:
            self._rest = self._rest[count:]
            if self._rest:
                return frames
            frames.append(self._frame)
            self._rest = self._frame = None
            return frames
        self._end += count
        try:
            while (frame := self._next()) is not None:
                frames.append(frame)
        except FrameError as error:
            error.before = frames
            self._dead = error.why
            raise
        self._make_room()
        return frames

    def feed(self, data: Buffer) -> list[Frame]:
        """The frames that are complete with these bytes."""
        frames: list[Frame] = []
        rest = memoryview(data)
        try:
            while rest:
                space = self.space()
                count = min(len(space), len(rest))
                space[:count] = rest[:count]
                rest = rest[count:]
                frames += self.advance(count)
        except FrameError as error:
            error.before = frames + error.before
            raise
        return frames

    def _make_room(self) -> None:
        unread = self._end - self._start
        if unread and self._start:
            self._view[:unread] = bytes(self._view[self._start : self._end])
        self._start, self._end = 0, unread

    def _next(self) -> Frame | None:
        if self._prefix is None:
            if self._end - self._start < PREFIX.size:
                return None
            self._prefix = self._check_prefix(PREFIX.unpack_from(self._view, self._start))
            self._start += PREFIX.size
        kind, session, sequence, header_length, length = self._prefix
        if self._end - self._start < header_length:
            return None
        try:
            header = _READ[kind].decode(self._view[self._start : self._start + header_length])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise FrameError(Why.MALFORMED, f"header of {kind.name}: {error}") from None
        self._start += header_length
        self._prefix = None
        payload = bytearray(length)
        there = min(length, self._end - self._start)
        payload[:there] = self._view[self._start : self._start + there]
        self._start += there
        frame = Frame(session, sequence, header, payload)
        if there == length:
            return frame
        self._frame, self._rest = frame, memoryview(payload)[there:]
        return None

    def _check_prefix(
        self, prefix: tuple[bytes, int, int, int, int, int, int, int]
    ) -> tuple[Kind, int, int, int, int]:
        magic, protocol, number, flags, session, sequence, header_length, length = prefix
        if magic != MAGIC:
            raise FrameError(Why.MALFORMED, f"it begins with {magic!r} instead of {MAGIC!r}")
        if protocol != PROTOCOL:
            raise FrameError(Why.WRONG_PROTOCOL, f"{protocol} instead of {PROTOCOL}")
        kind = _KNOWN.get(number)
        if kind is None or flags:
            raise FrameError(Why.MALFORMED, f"kind {number}, flags {flags}")
        if header_length > MOST_HEADER:
            raise FrameError(Why.TOO_LARGE, f"a header of {header_length} bytes")
        if length and length > self._cap(kind, session):
            raise FrameError(Why.TOO_LARGE, f"a payload of {length} bytes with {kind.name}")
        return kind, session, sequence, header_length, length
