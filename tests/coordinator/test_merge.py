"""The merge: the same bytes in any order, exact where it says so, bounded where someone pushes."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from blocktrain.coordinator.merging.merge import (
    Candidate,
    MergeContext,
    MergeOptions,
    MergeResult,
    RejectedUpdate,
    State,
    Steps,
    Update,
    merge,
)
from blocktrain.protocol.compression import compress, open_update
from blocktrain.protocol.tensors import schema_of

SHAPES = {"a": (3, 2), "b": (4,), "c": ()}
FREE = MergeOptions(clip=None)
NESTEROV = MergeOptions(outer="nesterov", clip=None)


def arrays(shape: tuple[int, ...], limit: float) -> st.SearchStrategy[Any]:
    return hnp.arrays(np.float32, shape, elements=st.floats(-limit, limit, width=32))


def states(limit: float = 2.0**100) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({name: arrays(shape, limit) for name, shape in SHAPES.items()})


def state(seed: int, scale: float = 1.0) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {
        name: np.asarray(scale * draw.standard_normal(shape), np.float32)
        for name, shape in SHAPES.items()
    }


def bits(values: State | None) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return (
        {}
        if values is None
        else {name: (str(a.dtype), a.shape, a.tobytes()) for name, a in values.items()}
    )


def everything(merged: MergeResult) -> object:
    return (
        bits(merged.state),
        bits(merged.momentum),
        [(c.update.id, c.share, c.norm, c.scale) for c in merged.used],
        merged.rejected,
        merged.norms,
    )


@given(states(), states())
def test_one_replica_is_bit_identical_to_the_worker(
    current: dict[str, Any], new: dict[str, Any]
) -> None:
    merged = merge(MergeContext(current, FREE), [Update("u", new, tokens=7, absolute=True)])
    assert bits(merged.state) == bits(new)


def test_why_weights_are_shipped_and_not_deltas() -> None:
    base, new = np.float32(1.0), np.float32(1e-30)
    assert base + np.float32(new - base) != new
    assert np.float64(base) + (np.float64(new) - np.float64(base)) != np.float64(new)
    current = {"x": np.array([1.0, 0.0], np.float32)}
    proposed = {"x": np.array([1e-30, -0.0], np.float32)}
    assert bits(
        merge(MergeContext(current, FREE), [Update("u", proposed, 1, absolute=True)]).state
    ) == bits(proposed)


@given(st.integers(1, 7), st.integers(0, 10**6), st.sampled_from([FREE, NESTEROV, MergeOptions()]))
def test_order_of_arrival_changes_nothing(count: int, seed: int, options: MergeOptions) -> None:
    draw = random.Random(seed)
    updates = [
        Update(
            f"{draw.random()}",
            state(seed + i, draw.choice([0.01, 1, 50])),
            draw.randint(1, 999),
            draw.choice([1.0, 0.49]),
        )
        for i in range(count)
    ]
    updates += [
        Update("absolute", state(seed + 50), 5, absolute=True),
        Update("late", state(1), 5, 0.49, absolute=True, base=state(2)),
    ]
    before = MergeContext(state(seed + 99), options, state(seed + 98), norms=(1.0,) * 6)
    first = everything(merge(before, updates))
    for _ in range(3):
        draw.shuffle(updates)
        assert everything(merge(before, updates)) == first


def test_names_and_layout_change_nothing() -> None:
    current = {
        "m": np.asarray(np.random.default_rng(0).standard_normal((40, 30)), np.float32),
        "b": np.ones(3, np.float32),
    }
    new = {name: a * np.float32(1.5) for name, a in current.items()}
    turned: dict[str, Any] = {"b": new["b"], "m": np.asfortranarray(new["m"])}
    before = MergeContext(current, MergeOptions(), norms=(0.1,) * 6)
    one, two = (merge(before, [Update("u", values, 1, absolute=True)]) for values in (new, turned))
    assert everything(one) == everything(two)


@given(
    states(1024.0),
    st.lists(
        st.tuples(states(1024.0), st.integers(1, 10**6), st.sampled_from([1.0, 0.49, 0.343])),
        min_size=1,
        max_size=5,
    ),
)
def test_mean_is_weighted_by_tokens_and_staleness(
    current: dict[str, Any], sent: list[tuple[dict[str, Any], int, float]]
) -> None:
    updates = [
        Update(f"{i}", values, tokens, weight) for i, (values, tokens, weight) in enumerate(sent)
    ]
    merged = merge(MergeContext(current, FREE), updates)
    assert merged.state is not None
    total = sum(t * w for _, t, w in sent)
    for name, array in current.items():
        mean = sum(np.asarray(v[name], np.float64) * (t * w / total) for v, t, w in sent)
        np.testing.assert_allclose(
            np.asarray(merged.state[name], np.float64), array + mean, rtol=1e-6, atol=1e-3
        )
    assert sum(c.share for c in merged.used) == pytest.approx(1.0)


def test_late_absolute_weights_count_as_what_they_changed() -> None:
    base, current = {"x": np.array([1.0], np.float32)}, {"x": np.array([5.0], np.float32)}
    merged = merge(
        MergeContext(current, FREE),
        [Update("u", {"x": np.array([1.5], np.float32)}, 1, absolute=True, base=base)],
    )
    assert merged.state is not None and merged.state["x"] == 5.5


@given(st.floats(1.0, 1e6), st.integers(0, 1000))
def test_long_update_is_clipped_and_keeps_its_weight(scale: float, seed: int) -> None:
    before = MergeContext(state(1), MergeOptions(clip=2.0), norms=(1.0,) * 5)
    merged = merge(
        before, [Update("bad", state(seed, scale), 1), Update("good", state(seed + 1, 1e-3), 1)]
    )
    assert merged.state is not None
    assert [c.share for c in merged.used] == [0.5, 0.5]
    for candidate in merged.used:
        assert candidate.norm * candidate.scale <= 2.0 * (1 + 1e-12)
    new: dict[str, Any] = merged.state
    moved = np.sqrt(
        sum(np.sum((np.asarray(new[n], np.float64) - state(1)[n]) ** 2) for n in SHAPES)
    )
    assert moved <= 0.5 * (2.0 + 0.02) + 1e-5


def test_long_updates_do_not_lift_the_median() -> None:
    before = MergeContext(state(1), MergeOptions(clip=3.0), norms=(1.0,) * 32)
    norms: tuple[float, ...] = (1.0,) * 32
    for i in range(10):
        norms = merge(
            MergeContext(before.current, before.options, norms=norms),
            [Update(f"{i}", state(i, 1e4), 1)],
        ).norms
    assert max(norms) <= 3.0 * (1 + 1e-12) and len(norms) == 32


def test_nothing_is_clipped_before_enough_is_known() -> None:
    merged = merge(
        MergeContext(state(1), MergeOptions(), norms=(1e-9,) * 4), [Update("u", state(2), 1)]
    )
    assert merged.used[0].scale == 1.0


BAD = [
    ("missing", {"a": np.zeros((3, 2), np.float32)}, "wrong_shape"),
    ("extra", {**state(3), "z": np.zeros(1, np.float32)}, "wrong_shape"),
    ("shape", {**state(3), "b": np.zeros(5, np.float32)}, "wrong_shape"),
    ("kind", {**state(3), "b": np.zeros(4, np.int32)}, "wrong_shape"),
    ("nan", {**state(3), "b": np.array([1, np.nan, 0, 0], np.float32)}, "not_finite"),
    ("inf", {**state(3), "c": np.array(np.inf, np.float32)}, "not_finite"),
    ("endless", {**state(3), "b": np.full(4, 1e200)}, "not_finite"),
]


@pytest.mark.parametrize(("name", "values", "code"), BAD, ids=[row[0] for row in BAD])
def test_bad_update_is_left_out_and_the_others_count(
    name: str, values: dict[str, Any], code: str
) -> None:
    good = Update("good", state(2), 3)
    merged = merge(MergeContext(state(1)), [Update("bad", values, 3), good])
    assert [(r.id, r.code) for r in merged.rejected] == [("bad", code)] and merged.rejected[
        0
    ].reason
    assert bits(merged.state) == bits(merge(MergeContext(state(1)), [good]).state)
    alone = merge(MergeContext(state(1)), [Update("bad", values, 3)])
    assert alone.state is None and "no update is left" in alone.reason


def test_weights_must_count_for_something() -> None:
    sent = [
        Update("a", state(1), 0),
        Update("b", state(1), 1, 0.0),
        Update("c", state(1), 1, 1.5),
        Update("d", state(1), 1, float("nan")),
    ]
    assert [r.code for r in merge(MergeContext(state(1)), sent).rejected] == ["wrong_weight"] * 4
    with pytest.raises(ValueError, match="twice"):
        merge(MergeContext(state(1)), [Update("a", state(1), 1), Update("a", state(2), 1)])


def test_nesterov_is_torch_sgd_on_the_averaged_delta() -> None:
    torch = pytest.importorskip("torch")
    weights: dict[str, Any] = {"x": np.array([1.0, -2.0, 3.0], np.float32)}
    parameter = torch.nn.Parameter(torch.tensor(weights["x"]))
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    momentum: dict[str, Any] | None = None
    for i in range(5):
        delta = np.asarray(np.random.default_rng(i).standard_normal(3), np.float32)
        merged = merge(MergeContext(weights, NESTEROV, momentum), [Update("u", {"x": delta}, 1)])
        assert merged.state is not None
        weights, momentum = merged.state, merged.momentum
        parameter.grad = -torch.tensor(delta)
        sgd.step()
        np.testing.assert_allclose(
            np.asarray(weights["x"], np.float64), parameter.detach().numpy(), rtol=1e-5, atol=1e-6
        )
    with pytest.raises(ValueError, match="neither"):
        MergeOptions(outer="adam")


def test_tables_of_integers_are_kept() -> None:
    current: dict[str, Any] = {"n": np.array([3], np.int64), "x": np.zeros(1, np.float32)}
    merged = merge(
        MergeContext(current, FREE),
        [
            Update(
                "u", {"n": np.array([9], np.int64), "x": np.ones(1, np.float32)}, 1, absolute=True
            )
        ],
    )
    assert merged.state is not None and merged.state["n"] == 3 and merged.state["x"] == 1


def test_later_checks_means_and_guards_have_their_place() -> None:
    seen: list[str] = []

    def canary(before: MergeContext, candidate: Candidate) -> Candidate | RejectedUpdate:
        seen.append(candidate.update.id)
        return (
            RejectedUpdate(candidate.update.id, "no_gain", "worse on the canary")
            if candidate.update.id == "b"
            else candidate
        )

    def largest(before: MergeContext, candidates: Any, name: str) -> Any:
        return np.max(
            [
                np.asarray(before.current[name], np.float64) + c.update.values[name]
                for c in candidates
            ],
            axis=0,
        )

    def worse(before: MergeContext, new: State, used: Any) -> str | None:
        return "worse than its parent"

    plain = Steps()
    updates = [Update(i, state(ord(i)), 1) for i in "cab"]
    merged = merge(
        MergeContext(state(1)),
        updates,
        Steps((*plain.checks, canary), plain.shares, largest, plain.guards),
    )
    assert (
        seen == ["a", "b", "c"]
        and [r.code for r in merged.rejected] == ["no_gain"]
        and merged.state is not None
    )
    guarded = merge(MergeContext(state(1)), updates, Steps(guards=(*plain.guards, worse)))
    assert (
        guarded.state is None
        and "worse than its parent" in guarded.reason
        and "a, b, c" in guarded.reason
    )


def test_overflow_is_not_published() -> None:
    current = {"x": np.array([3e38], np.float32)}
    merged = merge(
        MergeContext(current, FREE), [Update("u", {"x": np.array([3e38], np.float32)}, 1)]
    )
    assert merged.state is None and "would not be finite" in merged.reason


def test_many_small_payloads_that_decode_large_need_little_memory() -> None:
    """A6: 40 payloads of one constant, each a few hundred bytes and 1.6 MB when it is decoded."""
    current = {f"t{n:02}": np.ones((64, 128), np.float32) for n in range(48)}
    change = {name: np.full_like(tensor, 1e-3) for name, tensor in current.items()}
    payload, schema = compress(change, None, "int4")[0], schema_of(current)
    decoded = 40 * sum(tensor.nbytes for tensor in current.values())
    assert 1000 * len(payload) * 40 < decoded
    tracemalloc.start()
    try:
        updates = [
            Update(f"u{n}", open_update(payload, schema).tensors, 10, worker=f"w{n}")
            for n in range(40)
        ]
        merged = merge(MergeContext(current, MergeOptions(defences=True)), updates)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(merged.used) == 40 and merged.state is not None
    assert most < decoded / 2, "one tensor of all updates at a time, and the trimmed mean of it"
