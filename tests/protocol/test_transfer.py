"""Chunks: every byte once, whatever was there before; nothing outside the plan."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.protocol import transfer
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.protocol.transfer import MIN_CHUNK_BYTES, Plan


@given(st.integers(0, 50_000), st.integers(MIN_CHUNK_BYTES, 8000), st.sets(st.integers(0, 60)))
def test_what_is_there_and_what_is_missing_make_the_whole(
    length: int, chunk_bytes: int, have: set[int]
) -> None:
    plan = Plan(length, chunk_bytes)
    spans = [plan.span(index) for index in range(plan.chunks)]
    assert [start for start, _ in spans] == list(range(0, length, chunk_bytes))
    assert all(
        end == (spans[i + 1][0] if i + 1 < len(spans) else length)
        for i, (_, end) in enumerate(spans)
    )
    missing = plan.missing(have)
    assert (
        sorted(set(missing) | have & set(range(plan.chunks))) == list(range(plan.chunks))
        and not set(missing) & have
    )
    ranges = plan.ranges(have)
    assert sum(end - start for start, end in ranges) == sum(
        spans[index][1] - spans[index][0] for index in missing
    )
    assert all(a[1] < b[0] for a, b in pairwise(ranges))


@given(st.binary(max_size=10_000))
def test_chunks_join_to_the_content(content: bytes) -> None:
    chunks = transfer.split(content, MIN_CHUNK_BYTES)
    assert b"".join(chunks) == content and all(chunks)
    assert transfer.chunk_hashes(content, MIN_CHUNK_BYTES) == [
        hashlib.sha256(chunk).hexdigest() for chunk in chunks
    ]
    plan = Plan(len(content), MIN_CHUNK_BYTES)
    for index, chunk in enumerate(chunks):
        transfer.require_chunk(plan, index, chunk, transfer.sha256(chunk))


@pytest.mark.parametrize(
    ("index", "content", "digest", "code"),
    [
        (0, b"x" * 1024, "0" * 64, Code.HASH_MISMATCH),
        (0, b"x" * 1023, transfer.sha256(b"x" * 1023), Code.MALFORMED),
        (1, b"x" * 1024, transfer.sha256(b"x" * 1024), Code.MALFORMED),
        (2, b"x", transfer.sha256(b"x"), Code.MALFORMED),
        (-1, b"x", transfer.sha256(b"x"), Code.MALFORMED),
    ],
)
def test_a_wrong_chunk_is_refused(index: int, content: bytes, digest: str, code: Code) -> None:
    with pytest.raises(Refused) as caught:
        transfer.require_chunk(Plan(1500, 1024), index, content, digest)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("length", "chunk_bytes", "code"),
    [(-1, 1024, "malformed"), (1, 1, "malformed"), (1 << 40, 1024, "too_large")],
)
def test_a_plan_has_limits(length: int, chunk_bytes: int, code: str) -> None:
    with pytest.raises(Refused) as caught:
        Plan(length, chunk_bytes)
    assert caught.value.code == code


def test_ranges_as_http_writes_them() -> None:
    assert transfer.range_header(5) == "bytes=5-" and transfer.range_header(0, 10) == "bytes=0-9"
