"""A new compression is one class: a run uses it, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from blocktrain.coordinator.policy import Policy
from blocktrain.protocol import compression
from blocktrain.protocol.compression import Compression
from blocktrain.protocol.messages import Order
from blocktrain.protocol.tensors import Array, Layout, Tensors, schema_of
from blocktrain.web.client import LocalClient
from support.fake_worker import FakeWorker, begin


class Thirds(Compression):
    """Every third value, and zero for the others."""

    name = "thirds"

    def layout(self, sizes: Sequence[int]) -> Layout:
        return {"values": ("F32", (sum(-(-size // 3) for size in sizes),))}

    def encode(self, tensors: Sequence[Array], exponent: int) -> Tensors:
        return {"values": np.concatenate([x[::3] for x in tensors])}

    def decode(self, wire: Tensors, sizes: Sequence[int], exponent: int) -> list[Array]:
        parts, start = [], 0
        for size in sizes:
            count = -(-size // 3)
            part = np.zeros(size, np.float32)
            part[::3] = wire["values"][start : start + count]
            parts.append(part)
            start += count
        return parts


def test_one_class_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValidationError, match="none, fp16, int8, int4"):
        Policy(compression="thirds")
    monkeypatch.setitem(compression.METHODS, "thirds", Thirds())

    coordinator = begin(tmp_path, compression="thirds", version_compression="none")
    worker = FakeWorker(LocalClient(coordinator))
    task = worker.joined()
    assert task.compression == "thirds"
    before, payload = worker.weights(task), worker.payload(task)
    assert len(payload) <= task.payload_limit
    assert worker.send(task, payload).receipt.accepted
    coordinator.tick()

    merged = next(b for b in coordinator.status().blocks if b.block == task.block)
    assert merged.version == 1
    after = worker.weights(task.model_copy(update={"weights": merged.weights}))
    sent = compression.decompress(payload, schema_of(before), method="thirds")
    for name, old in before.items():
        change = (after[name] - old).reshape(-1)
        assert change[::3].any() and not np.delete(change, np.s_[::3]).any()
        assert np.allclose(change, sent[name].reshape(-1), atol=1e-7)
    coordinator.close()


def test_a_name_outside_the_table_is_refused_in_an_order() -> None:
    with pytest.raises(ValidationError, match="compression is one of"):
        Order.model_validate_json(
            '{"task":1,"number":0,"block":1,"base":0,"weights":{"sha256":"' + "0" * 64 + '",'
            '"length":1},"seed":1,"position":1,"shards":[],"start_step":0,"steps":1,'
            '"compression":"thirds"}'
        )
