"""The order in which a block reads a corpus of shards."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.errors import CorpusError
from blocktrain.learning.shards import (
    PATTERN,
    CorpusIndex,
    SequenceOrder,
    Shard,
    TokenSource,
    batches,
    quotas,
    read_index,
)


def shard(name: str, tokens: int) -> Shard:
    return Shard(sha256=hashlib.sha256(name.encode()).hexdigest(), tokens=tokens, bytes=tokens)


def source(name: str, sizes: list[int], weight: float = 1.0) -> TokenSource:
    shards = tuple(shard(f"{name}-{i}", size) for i, size in enumerate(sizes))
    return TokenSource(name=name, weight=weight, shards=shards)


def index(*sources: TokenSource) -> CorpusIndex:
    part = (shard("part", 100),)
    return CorpusIndex(name="x", id_bytes=2, sources=sources, calibration=part, valid=part)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=6),
    context=st.integers(8, 32),
    seed=st.integers(0, 2**32 - 1),
    block=st.integers(1, 256),
)
def test_no_sequence_comes_twice_before_every_one_came(
    sizes: list[int], context: int, seed: int, block: int
) -> None:
    corpus = index(source("a", sizes))
    order = SequenceOrder(corpus, context, seed, block)
    total = order.sequences
    if not total:
        with pytest.raises(CorpusError, match="smaller --context"):
            order.places(0, 1)
        return
    tokens = {s.sha256: s.tokens for s in corpus.sources[0].shards}
    for epoch in (0, 1, 3):
        seen: dict[str, set[int]] = {}
        for place in order.places(epoch * total, total):
            assert 0 <= place.offset <= tokens[place.shard.sha256] - context - 1
            # The targets of two sequences of an epoch do not overlap.
            targets = set(range(place.offset + 1, place.offset + context + 1))
            assert not targets & seen.setdefault(place.shard.sha256, set())
            seen[place.shard.sha256] |= targets
    # Nearly all of a shard is read: less than two sequences of it are left out.
    for name, targets in seen.items():
        assert len(targets) > tokens[name] - 1 - 2 * context


@settings(max_examples=40, deadline=None)
@given(first=st.integers(0, 5000), count=st.integers(1, 300), weights=st.booleans())
def test_a_range_names_exactly_the_shards_that_it_reads(
    first: int, count: int, weights: bool
) -> None:
    sources = [source("a", [300, 500, 200])]
    if weights:
        sources.append(source("b", [400, 100], weight=0.25))
    order = SequenceOrder(index(*sources), 16, 3, 2)
    used = {place.shard for place in order.places(first, count)}
    assert set(order.shards(first, count)) == used


def test_order_is_a_pure_function_of_seed_block_and_position() -> None:
    corpus = index(source("a", [4000, 3000, 5000]), source("b", [900], weight=0.3))
    whole = SequenceOrder(corpus, 16, 1, 1).places(0, 3000)
    later = SequenceOrder(corpus, 16, 1, 1)
    assert later.places(2500, 100) == whole[2500:2600]  # without having read what came before
    assert SequenceOrder(corpus, 16, 2, 1).places(0, 50) != whole[:50]
    assert SequenceOrder(corpus, 16, 1, 2).places(0, 50) != whole[:50]


def test_a_mixture_keeps_its_weights_and_its_epochs() -> None:
    corpus = index(source("a", [8000], weight=3.0), source("b", [400], weight=1.0))
    order = SequenceOrder(corpus, 16, 0, 1)
    names = [place.shard for place in order.places(0, 4 * PATTERN)]
    share = Counter(names)[corpus.sources[0].shards[0]] / len(names)
    assert abs(share - 0.75) < 0.01
    small = [p for p in order.places(0, PATTERN) if p.shard == corpus.sources[1].shards[0]]
    per_epoch = 23  # 399 tokens have 24 sequences of 16, one of which is given up
    for epoch in range(len(small) // per_epoch):
        offsets = [p.offset for p in small[epoch * per_epoch : (epoch + 1) * per_epoch]]
        assert len(set(offsets)) == per_epoch


def test_quotas_add_up_and_leave_nobody_out() -> None:
    assert quotas([1, 1, 2], 8) == [2, 2, 4]
    assert quotas([1e9, 1.0, 1.0], 8) == [6, 1, 1]
    assert sum(quotas([0.31, 0.21, 0.48], PATTERN)) == PATTERN


def test_batches_read_the_ids_of_their_places() -> None:
    corpus = index(source("a", [300, 500]))
    ids = {s.sha256: np.arange(s.tokens, dtype=np.uint16) for s in corpus.sources[0].shards}
    order = SequenceOrder(corpus, 16, 0, 1)
    read = batches(order, 4, lambda s: ids[s.sha256])
    rows = read(3)
    assert rows.shape == (4, 17) and rows.dtype == np.int64
    for row, place in zip(rows, order.places(12, 4), strict=True):
        assert row.tolist() == list(range(place.offset, place.offset + 17))


def test_an_index_survives_writing_and_a_damaged_one_is_refused() -> None:
    corpus = index(source("a", [300], weight=0.5))
    assert read_index(corpus.write()) == corpus
    assert read_index(corpus.write()).hash == corpus.hash
    with pytest.raises(CorpusError, match="index of the corpus is damaged"):
        read_index(corpus.write()[:-3])
    with pytest.raises(CorpusError, match="sha256"):
        read_index(corpus.write().replace(corpus.valid[0].sha256.encode(), b"zz"))
