"""Compression: exact or bounded errors, the same bytes every time, hostile payloads refused."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.protocol import compression, tensors
from blocktrain.protocol.compression import METHODS, Method
from blocktrain.protocol.quantization import GROUP
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.protocol.tensors import Spec, TensorLimits, Tensors

LOSSY: tuple[Method, ...] = ("fp16", "int8", "int4", "int2", "topk")
FINE: tuple[Method, ...] = ("fp16", "int8", "int4")  # nothing is beyond their last level
SCHEMA = {"a": Spec((3, 50)), "b": Spec(()), "c": Spec((129,))}


def example(seed: int = 0, magnitude: float = 1e-3) -> Tensors:
    rng = np.random.default_rng(seed)
    return {
        name: np.asarray(rng.normal(size=spec.shape) * magnitude, np.float32)
        for name, spec in SCHEMA.items()
    }


def sent(payload: bytes, like: Tensors) -> Tensors:
    return compression.decompress(payload, tensors.schema_of(like))


@st.composite
def deltas(draw: st.DrawFn) -> Tensors:
    """Tensors of odd sizes whose values span all magnitudes, with zeros and outliers among them."""
    tensors: Tensors = {}
    for name in draw(st.lists(st.sampled_from(["w", "x.y", "ä", "z"]), unique=True, max_size=3)):
        shape = tuple(draw(st.lists(st.integers(0, 20), max_size=3)))
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        values = (
            rng.normal(size=shape)
            * 2.0 ** draw(st.integers(-140, 60))
            * rng.choice([0, 1, 1, 2**-9, 300], size=shape)
        )
        tensors[name] = np.asarray(values, np.float32)
    few = draw(st.lists(st.floats(-(2.0**60), 2.0**60, width=32), max_size=5))
    return tensors | {"few": np.array(few, np.float32)}


@given(deltas(), st.booleans())
def test_none_is_exact_bit_for_bit(delta: Tensors, again: bool) -> None:
    payload, residual = compression.compress(delta, {} if again else None, "none")
    found = sent(payload, delta)
    assert residual == {} and found.keys() == delta.keys()
    assert all(
        found[n].tobytes() == delta[n].tobytes() and found[n].shape == delta[n].shape for n in delta
    )


@given(deltas(), st.sampled_from(LOSSY))
def test_what_is_lost_is_the_residual_exactly(delta: Tensors, method: Method) -> None:
    payload, residual = compression.compress(delta, None, method)
    found = sent(payload, delta)
    assert all(np.array_equal(found[n] + residual[n], delta[n]) for n in delta)
    second, left = compression.compress(delta, residual, method)
    assert all(
        np.array_equal(sent(second, delta)[n] + left[n], delta[n] + residual[n]) for n in delta
    )


@given(deltas(), st.sampled_from(["int8", "int4"]))
def test_the_error_is_at_most_half_a_scale(delta: Tensors, method: Method) -> None:
    payload, _ = compression.compress(delta, None, method)
    raw = zstd.decompress(payload)
    exponent = int(note_of(raw).split()[3])
    scales = np.ldexp(tensors.unpack(raw)["scales"].astype(np.float64), exponent)
    found = sent(payload, delta)
    first = 0
    for name in sorted(delta):
        x, y = (
            delta[name].reshape(-1).astype(np.float64),
            found[name].reshape(-1).astype(np.float64),
        )
        for start in range(0, x.size, GROUP):
            scale, group = scales[first], x[start : start + GROUP]
            first += 1
            assert (np.abs(group - y[start : start + GROUP]) <= scale / 2).all()
            smallest = 2.0 ** (exponent - 24)  # of fp16
            assert (
                np.abs(group).max() / METHODS[method].levels
                <= scale
                <= np.abs(group).max() / METHODS[method].levels * (1 + 2**-10) + smallest
            )


@given(deltas())
def test_fp16_keeps_eleven_bits(delta: Tensors) -> None:
    payload, _ = compression.compress(delta, None, "fp16")
    exponent = int(note_of(zstd.decompress(payload)).split()[3])
    found = sent(payload, delta)
    for name, x in delta.items():
        error = np.abs(found[name].astype(np.float64) - x)
        assert (
            error <= np.maximum(np.abs(x.astype(np.float64)) / 2048, 2.0 ** (exponent - 25))
        ).all()


def note_of(raw: bytes) -> str:
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return str(header["__metadata__"]["blocktrain"])


@pytest.mark.parametrize("method", FINE)
def test_error_feedback_sends_everything_in_the_end(method: Method) -> None:
    """Twenty small changes next to a large one: without the residual int4 never sends them."""
    delta = {"w": np.full(GROUP, 1e-5, np.float32)}
    delta["w"][0] = 1e-3
    total, residual = np.zeros(GROUP), None
    for _ in range(20):
        payload, residual = compression.compress(delta, residual, method)
        total += sent(payload, delta)["w"]
    assert (
        np.abs(total - 20 * delta["w"].astype(np.float64)).max()
        <= 1e-3 / METHODS[method].levels * (1 + 2**-9) / 2 + 1e-9
    )


@pytest.mark.parametrize(("method", "residual_bound"), [("int2", 0.8), ("topk", 1.2)])
def test_few_bits_send_outliers_too(method: Method, residual_bound: float) -> None:
    """The same delta again and again: the residual of no value grows beyond a step."""
    delta = {"w": np.random.default_rng(0).standard_normal(1000).astype(np.float32)}
    delta["w"][7] = 12.0
    residual = None
    for _ in range(60):
        _, residual = compression.compress(delta, residual, method)
    assert residual is not None
    assert np.sqrt(np.square(residual["w"]).mean()) < residual_bound
    assert np.abs(residual["w"]).max() < 24


@pytest.mark.parametrize(("method", "bits", "lost"), [("int2", 2.3, 0.09), ("topk", 1.65, 0.27)])
def test_few_bits_of_normal_numbers(method: Method, bits: float, lost: float) -> None:
    delta = {"w": np.random.default_rng(1).standard_normal((256, 512)).astype(np.float32)}
    payload, residual = compression.compress(delta, None, method)
    assert np.square(residual["w"]).sum() / np.square(delta["w"]).sum() < lost
    assert 8 * len(payload) / delta["w"].size < bits
    expected = compression.expected_payload(tensors.schema_of(delta), method)
    assert len(payload) == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("method", METHODS)
def test_same_input_same_bytes(method: Method) -> None:
    delta = example()
    backwards = {name: np.array(delta[name], order="F") for name in reversed(delta)}
    assert (
        compression.compress(delta, None, method)[0]
        == compression.compress(backwards, None, method)[0]
    )
    assert tensors.pack(delta, "n") == tensors.pack(backwards, "n")
    assert len(compression.compress(delta, None, method)[0]) <= compression.payload_cap(
        SCHEMA, method
    )


@pytest.mark.parametrize(("method", "least"), [("int8", 3.9), ("int4", 7.5)])
def test_noise_that_no_coder_can_squeeze_keeps_the_ratio(method: Method, least: float) -> None:
    delta = {"w": np.random.default_rng(1).uniform(-1, 1, (512, 300)).astype(np.float32)}
    assert delta["w"].nbytes / len(compression.compress(delta, None, method)[0]) >= least


# Golden bytes: what another implementation has to read and write. The zstd frame around them may
# differ, its content may not.
GOLDEN_DELTA = {
    "b": np.array([1.0, -0.5, 0.25], np.float32),
    "a": np.array([[0.001953125, -7.0]], np.float32),
}
GOLDEN: dict[Method, str] = {
    "none": (
        "b0000000000000007b225f5f6d657461646174615f5f223a7b22626c6f636b747261696e223a2264656c74612031206e6f6e65203020613132633061"
        "64646435656636616330366364643365353037356263383830343232356161613466636132313535303461646661636237303565313736326265227d"
        "2c2276616c756573223a7b226474797065223a22463332222c227368617065223a5b355d2c22646174615f6f666673657473223a5b302c32305d7d7d"
        "202020200000003b0000e0c00000803f000000bf0000803e"
    ),
    "fp16": (
        "b0000000000000007b225f5f6d657461646174615f5f223a7b22626c6f636b747261696e223a2264656c746120312066703136202d31322061313263"
        "306164646435656636616330366364643365353037356263383830343232356161613466636132313535303461646661636237303565313736326265"
        "227d2c2276616c756573223a7b226474797065223a22463136222c227368617065223a5b355d2c22646174615f6f666673657473223a5b302c31305d"
        "7d7d2020004800f7006c00e80064"
    ),
    "int8": (
        "e8000000000000007b225f5f6d657461646174615f5f223a7b22626c6f636b747261696e223a2264656c7461203120696e7438202d31392061313263"
        "306164646435656636616330366364643365353037356263383830343232356161613466636132313535303461646661636237303565313736326265"
        "227d2c227363616c6573223a7b226474797065223a22463136222c227368617065223a5b325d2c22646174615f6f666673657473223a5b302c345d7d"
        "2c2276616c756573223a7b226474797065223a224938222c227368617065223a5b355d2c22646174615f6f666673657473223a5b342c395d7d7d2020"
        "0f77096c00817fc120"
    ),
    "int4": (
        "e8000000000000007b225f5f6d657461646174615f5f223a7b22626c6f636b747261696e223a2264656c7461203120696e7434202d31342061313263"
        "306164646435656636616330366364643365353037356263383830343232356161613466636132313535303461646661636237303565313736326265"
        "227d2c227363616c6573223a7b226474797065223a22463136222c227368617065223a5b325d2c22646174615f6f666673657473223a5b302c345d7d"
        "2c2276616c756573223a7b226474797065223a225538222c227368617065223a5b335d2c22646174615f6f666673657473223a5b342c375d7d7d2020"
        "00749368185f8a"
    ),
    "int2": (
        "e8000000000000007b225f5f6d657461646174615f5f223a7b22626c6f636b747261696e223a2264656c7461203120696e7432202d31322061313263"
        "306164646435656636616330366364643365353037356263383830343232356161613466636132313535303461646661636237303565313736326265"
        "227d2c227363616c6573223a7b226474797065223a22463136222c227368617065223a5b325d2c22646174615f6f666673657473223a5b302c345d7d"
        "2c2276616c756573223a7b226474797065223a225538222c227368617065223a5b335d2c22646174615f6f666673657473223a5b342c375d7d7d2020"
        "f3744b69787a88"
    ),
    "topk": (
        "e8000000000000007b225f5f6d657461646174615f5f223a7b22626c6f636b747261696e223a2264656c7461203120746f706b202d31312061313263"
        "306164646435656636616330366364643365353037356263383830343232356161613466636132313535303461646661636237303565313736326265"
        "227d2c227363616c6573223a7b226474797065223a22463136222c227368617065223a5b325d2c22646174615f6f666673657473223a5b302c345d7d"
        "2c2276616c756573223a7b226474797065223a225538222c227368617065223a5b335d2c22646174615f6f666673657473223a5b342c375d7d7d2020"
        "5574a168788988"
    ),
}


@pytest.mark.parametrize("method", METHODS)
def test_golden_bytes(method: Method) -> None:
    payload, _ = compression.compress(GOLDEN_DELTA, None, method)
    assert zstd.decompress(payload).hex() == GOLDEN[method]
    stored = zstd.compress(bytes.fromhex(GOLDEN[method]), level=19)
    found, again = (
        compression.decompress(stored, tensors.schema_of(GOLDEN_DELTA), method=method),
        sent(payload, GOLDEN_DELTA),
    )
    assert all(np.array_equal(found[n], again[n]) for n in GOLDEN_DELTA)


def refused(action: Callable[[], object]) -> Code:
    with pytest.raises(Refused) as caught:
        action()
    assert caught.value.sentence
    return caught.value.code


def file_of(header: dict[str, object] | str, data: bytes = b"") -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + data


def with_wire(
    change: Callable[[Tensors], Tensors], method: Method = "int8", note: str | None = None
) -> bytes:
    """An honest payload with its tensors or its note changed."""
    raw = zstd.decompress(compression.compress(example(), None, method)[0])
    wire = {name: t.copy() for name, t in tensors.unpack(raw).items()}
    return zstd.compress(tensors.pack(change(wire), note_of(raw) if note is None else note))


def put(name: str, index: int, value: float) -> Callable[[Tensors], Tensors]:
    def change(wire: Tensors) -> Tensors:
        wire[name][index] = value
        return wire

    return change


HASH = tensors.schema_hash(SCHEMA)


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (with_wire(put("scales", 0, math.inf)), Code.NOT_FINITE),
        (with_wire(put("scales", 1, math.nan)), Code.NOT_FINITE),
        (with_wire(put("scales", 1, -1.0)), Code.NOT_FINITE),
        (with_wire(put("values", 3, -128)), Code.MALFORMED),
        (with_wire(put("values", 3, 0x80), "int4"), Code.MALFORMED),
        (with_wire(put("scales", 1, -1.0), "int2"), Code.NOT_FINITE),
        (with_wire(put("values", 3, 0x80), "topk"), Code.MALFORMED),
        (with_wire(put("values", 3, math.nan), "none"), Code.NOT_FINITE),
        (with_wire(put("values", 3, math.inf), "fp16"), Code.NOT_FINITE),
        (with_wire(lambda wire: wire | {"more": np.zeros(1, np.int8)}), Code.WRONG_SHAPE),
        (with_wire(lambda wire: {"values": wire["values"]}), Code.WRONG_SHAPE),
        (with_wire(lambda wire: wire | {"values": wire["values"][:-1]}), Code.WRONG_SHAPE),
        (
            with_wire(lambda wire: wire | {"values": wire["values"].reshape(1, -1)}),
            Code.WRONG_SHAPE,
        ),
        (
            with_wire(lambda wire: wire | {"values": wire["values"].astype(np.uint8)}),
            Code.WRONG_SHAPE,
        ),
        (with_wire(dict, note=f"delta 1 int8 65 {HASH}"), Code.NOT_FINITE),
        (with_wire(dict, note=f"delta 1 int8 -101 {HASH}"), Code.NOT_FINITE),
        (with_wire(dict, "none", note=f"delta 1 none 3 {HASH}"), Code.NOT_FINITE),
        (with_wire(dict, note=f"delta 1 int8 0 {'0' * 64}"), Code.WRONG_SHAPE),
        (with_wire(dict, note=f"delta 2 int8 0 {HASH}"), Code.MALFORMED),
        (with_wire(dict, note=""), Code.MALFORMED),
        (b"", Code.MALFORMED),
        (b"not zstd at all", Code.MALFORMED),
        (compression.compress(example(), None, "int8")[0][:-1], Code.MALFORMED),
        (compression.compress(example(), None, "int8")[0] + b"\0", Code.MALFORMED),
        (compression.compress(example(), None, "int8")[0] * 2, Code.MALFORMED),
        (zstd.compress(b"\0" * 7), Code.MALFORMED),
        (zstd.compress(b"\xff" * 8 + b"{}"), Code.MALFORMED),
        (zstd.compress(file_of("[" * 900)), Code.MALFORMED),
        (zstd.compress(file_of('{"a":1}')), Code.MALFORMED),
        (zstd.compress(file_of('{"__metadata__":[]}')), Code.MALFORMED),
        (
            zstd.compress(file_of('{"values":{"dtype":"I8","shape":[-1],"data_offsets":[0,0]}}')),
            Code.MALFORMED,
        ),
        (
            zstd.compress(file_of('{"values":{"dtype":"I8","shape":1,"data_offsets":[0,0]}}')),
            Code.MALFORMED,
        ),
    ],
)
def test_hostile_payloads_are_refused(payload: bytes, code: Code) -> None:
    assert refused(lambda: compression.decompress(payload, SCHEMA)) == code


def test_a_repeated_name_is_refused() -> None:
    entry = '"values":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    note = (
        f'"__metadata__":{{"blocktrain":"delta 1 none 0 {tensors.schema_hash({"w": Spec((1,))})}"}}'
    )
    honest = file_of(f"{{{note},{entry}}}", b"\0" * 4)
    assert compression.decompress(zstd.compress(honest), {"w": Spec((1,))})["w"].tolist() == [0]
    doubled = file_of(f"{{{note},{entry},{entry}}}", b"\0" * 4)
    assert (
        refused(lambda: compression.decompress(zstd.compress(doubled), {"w": Spec((1,))}))
        == Code.MALFORMED
    )


def test_another_method_than_the_task_asked_for_is_refused() -> None:
    payload, _ = compression.compress(example(), None, "int8")
    assert refused(lambda: compression.decompress(payload, SCHEMA, method="fp16")) == Code.MALFORMED
    large, _ = compression.compress(
        {"w": np.random.default_rng(0).normal(size=5000).astype(np.float32)}, None, "none"
    )
    assert (
        refused(lambda: compression.decompress(large, {"w": Spec((5000,))}, method="int4"))
        == Code.TOO_LARGE
    )


def bomb(window_log: int | None = None) -> bytes:
    options: dict[int, int] = {zstd.CompressionParameter.compression_level: 1}
    if window_log is not None:
        options[zstd.CompressionParameter.window_log] = window_log
    writer = zstd.ZstdCompressor(options=options)
    zeros = bytes(1 << 20)
    return b"".join(writer.compress(zeros) for _ in range(64)) + writer.flush()


@pytest.mark.parametrize(("window_log", "code"), [(None, Code.TOO_LARGE), (25, Code.MALFORMED)])
def test_a_bomb_costs_no_more_memory_than_an_honest_payload(
    window_log: int | None, code: Code
) -> None:
    payload = bomb(window_log)
    tracemalloc.start()
    try:
        assert refused(lambda: compression.decompress(payload, SCHEMA)) == code
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_caps_hold_before_anything_is_read() -> None:
    payload, _ = compression.compress(example(), None, "none")
    raw = tensors.pack(example())
    assert (
        refused(lambda: compression.decompress(payload, SCHEMA, TensorLimits(payload_bytes=10)))
        == Code.TOO_LARGE
    )
    assert (
        refused(lambda: compression.decompress(payload, SCHEMA, TensorLimits(raw_bytes=100)))
        == Code.TOO_LARGE
    )
    assert (
        refused(lambda: tensors.unpack(raw, SCHEMA, TensorLimits(raw_bytes=100))) == Code.TOO_LARGE
    )
    assert (
        refused(lambda: tensors.unpack(raw, SCHEMA, TensorLimits(header_bytes=50)))
        == Code.TOO_LARGE
    )
    assert refused(lambda: tensors.unpack(raw, SCHEMA, TensorLimits(tensors=2))) == Code.TOO_LARGE


def test_weights_come_back_and_nothing_else_does() -> None:
    weights = example(3) | {"counts": np.arange(4)}
    schema = tensors.schema_of(weights)
    raw = tensors.pack(weights)
    for known in (schema, None):
        found = tensors.unpack(raw, known)
        assert tensors.schema_of(found) == schema and all(
            found[n].tobytes() == weights[n].tobytes() for n in weights
        )
    assert refused(lambda: tensors.unpack(raw, schema | {"more": Spec((1,))})) == Code.WRONG_SHAPE
    assert refused(lambda: tensors.unpack(raw, schema | {"b": Spec((1,))})) == Code.WRONG_SHAPE
    assert (
        refused(lambda: tensors.unpack(raw, schema | {"b": Spec((), "float16")}))
        == Code.WRONG_SHAPE
    )
    assert refused(lambda: tensors.unpack(raw[:-1], schema)) == Code.MALFORMED
    assert refused(lambda: tensors.pack({"z": np.zeros(1, np.complex64)})) == Code.WRONG_SHAPE
    odd = file_of({"z": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}, b"\0\0")
    assert refused(lambda: tensors.unpack(odd)) == Code.WRONG_SHAPE


def test_absolute_weights_keep_every_bit() -> None:
    weights = example(4) | {"zero": np.array([-0.0, 1e-45], np.float32)}
    payload, schema = compression.compress_weights(weights), tensors.schema_of(weights)
    opened = compression.open_update(payload, schema, method="none")
    assert opened.absolute and all(
        opened.tensors[n].tobytes() == weights[n].tobytes() for n in weights
    )
    assert refused(lambda: compression.decompress(payload, schema)) == Code.MALFORMED
    assert not compression.open_update(
        compression.compress(weights, None, "none")[0], schema
    ).absolute
    assert (
        refused(lambda: compression.compress_weights({"w": np.array([math.inf], np.float32)}))
        == Code.NOT_FINITE
    )
    assert (
        refused(
            lambda: compression.decompress(with_wire(dict, note=f"weights 1 int8 0 {HASH}"), SCHEMA)
        )
        == Code.MALFORMED
    )


def test_a_sender_gets_its_own_refusals() -> None:
    delta = example()
    assert (
        refused(lambda: compression.compress({"w": np.array([math.nan], np.float32)}, None, "int8"))
        == Code.NOT_FINITE
    )
    assert (
        refused(lambda: compression.compress({"w": np.array([3e38], np.float32)}, None, "int8"))
        == Code.NOT_FINITE
    )
    assert (
        refused(lambda: compression.compress({"w": np.zeros(3)}, None, "none")) == Code.WRONG_SHAPE
    )
    assert (
        refused(lambda: compression.compress(delta, {"a": delta["a"]}, "int4")) == Code.WRONG_SHAPE
    )
    assert (
        refused(lambda: compression.decompress(b"", {"w": Spec((1,), "int64")})) == Code.WRONG_SHAPE
    )
