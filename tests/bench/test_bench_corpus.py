"""The corpus that is larger than memory, in small: real processes, and real kills."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from blocktrain.bench.corpus import CorpusOptions, measure_corpus, write_text


def test_a_corpus_of_many_shards(tmp_path: Path) -> None:
    options = CorpusOptions(tmp_path / "bench", gigabytes=0.004, shard_tokens=1 << 16)
    result = measure_corpus(options)
    small, large = result["rows"]
    assert 10 < small["shards"] < large["shards"] / 3
    for row in (small, large):
        assert 1 <= row["first_task_shards"] <= 2 and row["worker_shards"] <= 5
        assert row["coordinator_mb"] < 300
    assert result["same_shards_after_kills"] and result["same_bytes_after_the_kill"]
    assert result["kills_while_tokenizing"] >= 1
    assert 0 < result["killed_at_byte"] <= result["of_a_shard_of"]
    assert not any(path.is_dir() for path in (tmp_path / "bench").iterdir())


def test_generated_text_is_the_same_for_a_seed(tmp_path: Path) -> None:
    for name, size in (("a", 3_000_000), ("b", 3_000_000), ("c", 100_001)):
        write_text(tmp_path / name, size, seed=3)
    one, again, short = ((tmp_path / name).read_bytes() for name in "abc")
    assert one == again and one[:100_001] == short
    assert len(one) == 3_000_000 and one.isascii() and one.count(b"\n") == 3_000_000 // 64
    assert dataclasses.replace(CorpusOptions(tmp_path, 4.0)).sizes == (10**9, 4 * 10**9)
