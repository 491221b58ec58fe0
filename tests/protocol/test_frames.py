"""Frames: the same bytes every time, however the stream is cut; no bytes can hurt the reader."""

from __future__ import annotations

import itertools
import os
import random
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.protocol import frames, handshake
from blocktrain.protocol.frames import PREFIX, Decoder, Frame, FrameError, Header, Kind, Why, encode
from support.stages import mutated

MOST = 1000
MUTATIONS = 1_000_000 if os.environ.get("BLOCKTRAIN_LONG") else 100_000
HASH = "ab" * 32
WELCOME = frames.Welcome(bytes(32), "blocks", (2, 3), 128, 128, 64, HASH, "cd" * 32)
EXAMPLES: dict[Kind, Header] = {
    Kind.CHALLENGE: frames.Challenge(bytes(range(32))),
    Kind.HELLO: frames.Hello("entry", bytes(32), bytes(range(32)), HASH, 1),
    Kind.WELCOME: WELCOME,
    Kind.OPEN: frames.Open("ring", "fp16", 64, 128, "127.0.0.1:8481", (2,)),
    Kind.OPENED: frames.Opened((2, 3), 128),
    Kind.RUN: frames.Run(3, 40, 5, 1, 0),
    Kind.RESULT: frames.Result(3, 44, 1, 2, 1500),
    Kind.CLOSE: frames.Close(),
    Kind.PING: frames.Ping(7),
    Kind.PONG: frames.Pong(7, 1),
    Kind.ERROR: frames.Error("too_large", "no"),
}


def decoder() -> Decoder:
    return Decoder(lambda kind, session: MOST if kind in (Kind.RUN, Kind.RESULT) else 0)


def joined(
    header: Header, session: int = 0, sequence: int = 0, payload: Sequence[bytes] = ()
) -> bytes:
    return b"".join(encode(header, session, sequence, payload))


def plain(found: Sequence[Frame]) -> list[tuple[int, int, Header, bytes]]:
    return [(f.session, f.sequence, f.header, bytes(f.payload)) for f in found]


def refused(data: bytes) -> Why:
    with pytest.raises(FrameError) as caught:
        decoder().feed(data)
    return caught.value.why


def test_golden_bytes() -> None:
    run = joined(frames.Run(3, 40, 5, 1), 0x1122334455667788, 9, [b"hello"])
    assert run.hex() == (
        "42544631"
        + "0002"
        + "06"
        + "00"
        + "1122334455667788"
        + "00000009"
        + "00000006"
        + "0000000000000005"
        + "950328050100"
        + b"hello".hex()
    )
    assert (
        joined(frames.Close(), 5).hex()
        == "42544631"
        + "0002"
        + "08"
        + "00"
        + "0000000000000005"
        + "00000000"
        + "00000001"
        + "00" * 8
        + "90"
    )
    assert (
        joined(frames.Open("fan", "fp32", 96, 128), 1)[PREFIX.size :].hex()
        == "96" + "a366616e" + "a466703332" + "60" + "cc80" + "a0" + "90"
    )
    assert joined(frames.Error("busy", "no"))[PREFIX.size :].hex() == "92" + "a462757379" + "a26e6f"
    assert {kind.name: int(kind) for kind in Kind} == {
        "CHALLENGE": 1,
        "HELLO": 2,
        "WELCOME": 3,
        "OPEN": 4,
        "OPENED": 5,
        "RUN": 6,
        "RESULT": 7,
        "CLOSE": 8,
        "PING": 9,
        "PONG": 10,
        "ERROR": 11,
    }


def test_golden_proofs() -> None:
    hello = handshake.make_hello(b"k" * 16, bytes(32), b"\1" * 32, "entry", HASH, 1)
    assert hello.proof.hex() == "70df310129a30f5e5979dea2946588d6ed5ce718a87b16267e8503ecf8b064a9"
    welcome = handshake.prove_welcome(b"k" * 16, bytes(32), b"\1" * 32, WELCOME)
    assert welcome.proof.hex() == "f6860156e151b60166bdd908e1ed2243b29106521698b75d51cc10d3af60c6a8"


def test_every_kind_comes_back() -> None:
    assert set(EXAMPLES) == set(Kind) == set(frames.HEADERS)
    for kind, header in EXAMPLES.items():
        (found,) = decoder().feed(joined(header, 1 << 63, 1 << 31))
        assert (found.kind, found.header, found.session, found.sequence) == (
            kind,
            header,
            1 << 63,
            1 << 31,
        )


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[tuple[int, int, Header, bytes]]]:
    """Some frames, as they are sent."""
    sent: list[tuple[int, int, Header, bytes]] = []
    for _ in range(draw(st.integers(1, 6))):
        header = draw(st.sampled_from(list(EXAMPLES.values())))
        carries = isinstance(header, frames.Run | frames.Result)
        payload = draw(st.binary(max_size=MOST)) if carries else b""
        sent.append(
            (draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 2**32 - 1)), header, payload)
        )
    return b"".join(joined(h, s, n, [p[:7], p[7:]]) for s, n, h, p in sent), sent


@given(streams(), st.lists(st.integers(0, 4000)), st.sampled_from([0, 4200, 1 << 16]))
def test_any_split_of_the_stream_decodes_alike(
    stream: tuple[bytes, list[tuple[int, int, Header, bytes]]], cuts: list[int], size: int
) -> None:
    data, sent = stream
    reader = Decoder(lambda *_: MOST, size)
    found: list[Frame] = []
    edges = [0, *sorted(c for c in cuts if c < len(data)), len(data)]
    for low, high in itertools.pairwise(edges):
        found += reader.feed(data[low:high])
    assert plain(found) == sent
    assert reader.needed_bytes == 0


@given(streams())
def test_a_byte_at_a_time(stream: tuple[bytes, list[tuple[int, int, Header, bytes]]]) -> None:
    data, sent = stream
    reader = decoder()
    found = [frame for i in range(len(data)) for frame in reader.feed(data[i : i + 1])]
    assert plain(found) == sent


def test_a_payload_belongs_to_its_reader() -> None:
    reader = decoder()
    (first,) = reader.feed(joined(EXAMPLES[Kind.RUN], payload=[b"first"]))
    reader.feed(joined(EXAMPLES[Kind.RUN], payload=[b"other"]))
    assert bytes(first.payload) == b"first"
    assert isinstance(first.payload, bytearray)


def test_what_is_refused_and_by_which_name() -> None:
    good = joined(frames.Run(1, 0, 3), 1, 1, [b"abc"])
    fields = list(PREFIX.unpack_from(good))

    def with_(index: int, value: object) -> bytes:
        return (
            PREFIX.pack(*[value if i == index else f for i, f in enumerate(fields)])
            + good[PREFIX.size :]
        )

    assert refused(with_(0, b"HTTP")) == Why.MALFORMED
    assert refused(with_(1, frames.PROTOCOL + 1)) == Why.WRONG_PROTOCOL
    assert refused(with_(2, 0)) == refused(with_(2, 12)) == refused(with_(3, 1)) == Why.MALFORMED
    assert refused(with_(6, frames.MOST_HEADER + 1)) == Why.TOO_LARGE
    assert refused(with_(7, MOST + 1)) == refused(with_(7, 2**64 - 1)) == Why.TOO_LARGE
    assert refused(joined(frames.Ping(1), payload=[b"x"])) == Why.TOO_LARGE


@pytest.mark.parametrize(
    "raw",
    [
        [1, 0],  # a field is missing
        [1, 0, 3, 0, 0, 0],  # one too many
        {"epoch": 1, "start": 0, "count": 3},  # no array
        [1, 0, "3", 0, 0],
        [1, 0, 3.0, 0, 0],
        [1, -1, 3, 0, 0],
        [1, 2**32, 3, 0, 0],
        [2**53, 0, 3, 0, 0],
        None,
    ],
)
def test_headers_are_read_strictly(raw: object) -> None:
    typed = msgspec.msgpack.encode(raw)
    prefix = PREFIX.pack(frames.MAGIC, frames.PROTOCOL, Kind.RUN, 0, 1, 1, len(typed), 0)
    assert refused(prefix + typed) == Why.MALFORMED
    typed = msgspec.msgpack.encode(frames.Run(1, 0, 3)) + b"\0"  # something after it
    assert (
        refused(
            PREFIX.pack(frames.MAGIC, frames.PROTOCOL, Kind.RUN, 0, 1, 1, len(typed), 0) + typed
        )
        == Why.MALFORMED
    )


def test_caps_are_checked_before_anything_is_kept() -> None:
    tracemalloc.start()
    reader = decoder()
    try:
        with pytest.raises(FrameError) as caught:
            reader.feed(PREFIX.pack(frames.MAGIC, frames.PROTOCOL, Kind.RUN, 0, 1, 1, 6, 1 << 40))
        assert caught.value.why == Why.TOO_LARGE
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_a_decoder_is_dead_after_a_bad_frame_and_gives_what_came_before() -> None:
    good = joined(frames.Ping(1))
    reader = decoder()
    with pytest.raises(FrameError) as caught:
        reader.feed(good + good + b"x" * PREFIX.size + good)
    assert plain(caught.value.before) == [(0, 0, frames.Ping(1), b"")] * 2
    with pytest.raises(FrameError) as again:
        reader.feed(good)
    assert again.value.why == Why.MALFORMED and again.value.before == []


def test_a_session_may_have_a_cap_of_its_own() -> None:
    reader = Decoder(lambda kind, session: session)
    assert len(reader.feed(joined(frames.Run(0, 0, 1), 4, payload=[b"four"]))) == 1
    with pytest.raises(FrameError, match="larger"):
        reader.feed(joined(frames.Run(0, 0, 1), 3, payload=[b"four"]))


def test_what_is_announced_tells_a_frame_that_has_begun() -> None:
    data = joined(frames.Run(1, 0, 3), 1, 1, [b"abc"])
    reader = decoder()
    seen = []
    for i in range(len(data)):
        reader.feed(data[i : i + 1])
        seen.append(reader.needed_bytes)
    assert all(seen[:-1]) and seen[-1] == 0


def test_every_code_has_a_sentence_that_fits() -> None:
    assert set(frames.SENTENCES) == set(Why)
    for why, sentence in frames.SENTENCES.items():
        (frame,) = decoder().feed(b"".join(frames.refusal(FrameError(why, "x" * 1000), 3)))
        assert frame.header == frames.Error(why.value, ("x" * 1000)[: frames.MOST_SENTENCE])
        assert ";" in sentence, "it names the fix"


@pytest.mark.timeout(1800)
def test_mutated_frames_neither_crash_nor_hang_nor_grow() -> None:
    draw = random.Random(0)
    good = [
        joined(h, 3, 1, [b"abcdef"] if isinstance(h, frames.Run | frames.Result) else [])
        for h in EXAMPLES.values()
    ]
    outcomes: dict[str, int] = {}
    reader = decoder()
    before = 0
    for number in range(MUTATIONS):
        data = mutated(draw.choice(good), draw)
        try:
            found = reader.feed(data)
            outcomes["read"] = outcomes.get("read", 0) + len(found)
            assert all(
                isinstance(f.header, frames.HEADERS[f.kind]) and len(f.payload) <= MOST
                for f in found
            )
        except FrameError as error:
            outcomes[error.why] = outcomes.get(error.why, 0) + 1
            reader = decoder()
        if number == MUTATIONS // 10:
            before = sys.getallocatedblocks()
    assert sys.getallocatedblocks() < before + 2000
    assert {Why.MALFORMED, Why.WRONG_PROTOCOL, Why.TOO_LARGE, "read"} <= set(outcomes)


def test_proofs_fit_one_key_one_connection_and_one_claim() -> None:
    key, challenge, nonce = b"k" * 16, bytes(32), b"\1" * 32
    hello = handshake.make_hello(key, challenge, nonce, "entry", HASH, 1)
    handshake.check_hello(key, challenge, hello, HASH, 1)
    for wrong in (
        (b"l" * 16, challenge, hello),
        (key, b"\2" * 32, hello),
        (key, challenge, frames.Hello("stage", nonce, hello.proof, HASH, 1)),
        (key, challenge, frames.Hello("entry", b"\3" * 32, hello.proof, HASH, 1)),
        (key, challenge, frames.Hello("entry", nonce, hello.proof, "cd" * 32, 1)),
        (key, challenge, frames.Hello("entry", nonce, hello.proof, HASH, 2)),
    ):
        with pytest.raises(FrameError) as caught:
            handshake.check_hello(*wrong, HASH, 1)
        assert caught.value.why == Why.WRONG_KEY
    with pytest.raises(FrameError) as caught:
        handshake.check_hello(key, challenge, hello, "cd" * 32, 1)
    assert caught.value.why == Why.WRONG_FINGERPRINT
    with pytest.raises(FrameError, match="1 bytes instead of 2") as caught:
        handshake.check_hello(key, challenge, hello, HASH, 2)
    assert caught.value.why == Why.WRONG_ID_WIDTH


@pytest.mark.parametrize(
    ("vocabulary", "width"), [(2, 1), (256, 1), (257, 2), (1 << 16, 2), (50_257 * 2, 4)]
)
def test_ids_take_the_fewest_bytes_that_hold_the_vocabulary(vocabulary: int, width: int) -> None:
    assert frames.id_width(vocabulary) == width
    ids = (0, 1, vocabulary - 1)
    packed = frames.pack_ids(ids, width)
    assert len(packed) == 3 * width
    assert tuple(np.frombuffer(packed, f"<u{width}").tolist()) == ids


def test_a_stage_proves_what_it_holds() -> None:
    key, challenge, nonce = b"k" * 16, bytes(32), b"\1" * 32
    bare = frames.Welcome(bytes(32), "blocks", (2, 3), 128, 128, 64, HASH, "cd" * 32)
    welcome = handshake.prove_welcome(key, challenge, nonce, bare)
    handshake.check_welcome(key, challenge, nonce, welcome, HASH, "cd" * 32)
    handshake.check_welcome(key, challenge, nonce, welcome, HASH)
    more = frames.Welcome(welcome.proof, "blocks", (1, 2, 3), 128, 128, 64, HASH, "cd" * 32)
    for key_, told, fingerprint, model, why in (
        (b"l" * 16, welcome, HASH, "", Why.WRONG_KEY),
        (key, more, HASH, "", Why.WRONG_KEY),
        (key, bare, HASH, "", Why.WRONG_KEY),
        (key, welcome, "cd" * 32, "", Why.WRONG_FINGERPRINT),
        (key, welcome, HASH, HASH, Why.WRONG_MODEL),
    ):
        with pytest.raises(FrameError) as caught:
            handshake.check_welcome(key_, challenge, nonce, told, fingerprint, model)
        assert caught.value.why == why


def test_the_document_has_every_kind_field_and_code() -> None:
    text = (
        (Path(__file__).parents[2] / "docs" / "protocol.md")
        .read_text(encoding="utf-8")
        .split("## Frames between stages")[1]
    )
    for why, sentence in frames.SENTENCES.items():
        ends = "session" if why in frames.SESSION_ONLY else "connection"
        assert f"| `{why}` | {ends} | {sentence} |" in text
    for kind, header in frames.HEADERS.items():
        (row,) = [
            line for line in text.splitlines() if line.startswith(f"| {kind.name} | {int(kind)} | ")
        ]
        assert [field for field in header.__struct_fields__ if f"`{field}`" not in row] == []
    prefix = "42544631 0002 06 00 1122334455667788 00000009 00000006 0000000000000005"
    assert f"{prefix}  95 03 28 05 01 00  68656c6c6f" in text
