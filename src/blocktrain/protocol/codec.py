"""Tensors <-> bytes: weights as safetensors, updates as compressed deltas with error feedback. numpy only; docs/protocol.md has the layout.

Bounds of one element x of a delta, with s the scale of its group of 128 (always >= max|group| / levels):
    none   exact, bit for bit
    fp16   |error| <= |x| / 2048, or 2**(exponent - 25) where that is larger
    int8   |error| <= s / 2, levels -127 to 127
    int4   |error| <= s / 2, levels -7 to 7
What is lost comes back as the residual, exactly: sent + residual == delta + old residual.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy
from backports import zstd

from blocktrain.protocol.refusals import Code, Refused

Method = Literal["none", "fp16", "int8", "int4"]
METHODS: tuple[Method, ...] = get_args(Method)
Array = npt.NDArray[Any]
Tensors = dict[str, Array]

GROUP = 128
LEVELS: dict[Method, int] = {"fp16": 1, "int8": 127, "int4": 7}
# fp16 times 2**exponent is then a normal float32, so that a level times a scale is exact on every machine
MIN_EXPONENT, MAX_EXPONENT = -100, 64
WINDOW_LOG_MAX = 23  # a frame may ask the reader for a window of 8 MiB at most
NOTE = "blocktrain"  # one key only: safetensors writes several in no fixed order
_UPDATE = re.compile(
    r"(delta|weights) 1 (none|fp16|int8|int4) (0|-?[1-9][0-9]{0,2}) ([0-9a-f]{64})"
)
_VALUES: dict[Method, str] = {
    "none": "<f4",
    "fp16": "<f2",
    "int8": "<i1",
    "int4": "<i1",
}  # before int4 is packed
_DTYPES = {"F32": "<f4", "F16": "<f2", "I8": "<i1", "U8": "<u1", "I32": "<i4", "I64": "<i8"}
_NAMES = {np.dtype(kind): name for name, kind in _DTYPES.items()}

Wire = dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype as safetensors names it, shape


@dataclass(frozen=True)
class Spec:
    """What a tensor must be."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


Schema = Mapping[str, Spec]


@dataclass(frozen=True)
class Limits:
    """Caps that hold whatever a schema says; what a schema implies is tighter and is checked too."""

    payload_bytes: int = 1 << 30
    raw_bytes: int = 1 << 32
    header_bytes: int = 1 << 20
    tensors: int = 4096


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Opened:
    """The content of a payload: a delta, or (absolute) the new weights."""

    tensors: Tensors
    absolute: bool


def schema_of(tensors: Mapping[str, Array]) -> dict[str, Spec]:
    """The names, shapes and types of these tensors."""
    return {name: Spec(tuple(map(int, t.shape)), t.dtype.name) for name, t in tensors.items()}


def pack(tensors: Mapping[str, Array], note: str | None = None) -> bytes:
    """safetensors bytes; the same tensors always give the same bytes."""
    odd = next((name for name, t in tensors.items() if t.dtype not in _NAMES), None)
    if odd is not None:
        raise Refused(
            Code.WRONG_SHAPE,
            f"tensor {odd!r} has the type {tensors[odd].dtype}, which is never sent",
        )
    dense = {
        name: np.asarray(tensors[name], order="C") for name in sorted(tensors)
    }  # views are refused by safetensors
    return safetensors.numpy.save(dense, None if note is None else {NOTE: note})


def unpack(raw: bytes, schema: Schema | None = None, limits: Limits = DEFAULT_LIMITS) -> Tensors:
    """The tensors of safetensors bytes; with a schema, exactly those of it and nothing else."""
    wanted = (
        None
        if schema is None
        else {name: (_NAMES[np.dtype(spec.dtype)], spec.shape) for name, spec in schema.items()}
    )
    if len(raw) > limits.raw_bytes:
        raise Refused(
            Code.TOO_LARGE, f"{len(raw)} bytes of tensors, {limits.raw_bytes} are allowed"
        )
    header, _ = _read_header(raw, limits)
    if wanted is not None:
        _require_same(header, wanted)
    return _tensors(raw)


def compress(
    delta: Mapping[str, Array], residual: Mapping[str, Array] | None, method: Method
) -> tuple[bytes, Tensors]:
    """(payload, new residual); keep the new residual only if the update was accepted. No residual is None or an empty one."""
    total = _with_residual(delta, residual)
    exponent = 0 if method == "none" else _exponent(_peak(total), LEVELS[method])
    return _squeeze("delta", total, method, exponent)


def compress_weights(weights: Mapping[str, Array]) -> bytes:
    """A payload with the new weights themselves; base + (new - base) is not always new, so only this keeps every bit."""
    return _squeeze("weights", _with_residual(weights, None), "none", 0)[0]


def decompress(
    payload: bytes, schema: Schema, limits: Limits = DEFAULT_LIMITS, method: Method | None = None
) -> Tensors:
    """The delta in a payload, or a refusal."""
    update = open_update(payload, schema, limits, method)
    if update.absolute:
        raise Refused(Code.MALFORMED, "the payload holds weights, not a delta")
    return update.tensors


def open_update(
    payload: bytes, schema: Schema, limits: Limits = DEFAULT_LIMITS, method: Method | None = None
) -> Opened:
    """What is in a payload, or a refusal; reads nothing that the schema (and the method, if given) does not call for."""
    _require_float32(schema)
    if len(payload) > limits.payload_bytes:
        raise Refused(
            Code.TOO_LARGE, f"a payload of {len(payload)} bytes, {limits.payload_bytes} are allowed"
        )
    raw = _inflate(payload, min(_raw_cap(schema, method or "none"), limits.raw_bytes))
    header, note = _read_header(raw, limits)
    kind, found, exponent = _read_note(note, schema, method)
    _require_same(header, wire_schema(schema, found))
    wire = _tensors(raw)
    values, scales = wire["values"], wire.get("scales", np.zeros(0, "<f2"))
    _require_valid(values, scales, found)
    if found == "int4":
        values = _unpack_nibbles(values, sum(spec.size for spec in schema.values()))
    delta: Tensors = {}
    start = first = 0
    for name, spec in sorted(schema.items()):
        end, last = start + spec.size, first + _groups(spec, found)
        delta[name] = _decode(values[start:end], scales[first:last], found, exponent).reshape(
            spec.shape
        )
        start, first = end, last
    return Opened(delta, absolute=kind == "weights")


def wire_schema(schema: Schema, method: Method) -> Wire:
    """The one or two tensors that a payload of this method holds: all values, then all scales, in the order of the sorted names."""
    size = sum(spec.size for spec in schema.values())
    if method in ("none", "fp16"):
        return {"values": ("F32" if method == "none" else "F16", (size,))}
    values = ("I8", (size,)) if method == "int8" else ("U8", ((size + 1) // 2,))
    return {
        "values": values,
        "scales": ("F16", (sum(_groups(spec, method) for spec in schema.values()),)),
    }


def schema_hash(schema: Schema) -> str:
    """sha256 of the sorted compact JSON {name: shape}: says which tensors a payload is cut into."""
    canonical = json.dumps(
        {name: list(spec.shape) for name, spec in schema.items()},
        sort_keys=True,
        separators=(",", ":"),
    )
    return hashlib.sha256(canonical.encode()).hexdigest()


def payload_cap(schema: Schema, method: Method) -> int:
    """The longest payload that an honest worker can send: what cannot be compressed grows by less than 1 %."""
    cap = _raw_cap(schema, method)
    return cap + cap // 128 + 1024


def check_finite(tensors: Mapping[str, Array]) -> None:
    """Refuse NaN and infinity, naming the tensor."""
    for name, t in tensors.items():
        if t.dtype.kind == "f" and not np.isfinite(t).all():
            raise Refused(Code.NOT_FINITE, f"tensor {name!r}")


def _squeeze(kind: str, total: Tensors, method: Method, exponent: int) -> tuple[bytes, Tensors]:
    """(payload, what it does not say)."""
    left: Tensors = {}
    values: list[Array] = [np.zeros(0, _VALUES[method])]
    scales: list[Array] = [np.zeros(0, "<f2")]
    for name in sorted(total):
        x = total[name]
        ours, steps = _encode(x.reshape(-1), method, exponent)
        values.append(ours)
        scales.append(steps)
        if method != "none":
            left[name] = x - _decode(ours, steps, method, exponent).reshape(x.shape)
    wire = {"values": np.concatenate(values)}
    if method in ("int8", "int4"):
        wire["scales"] = np.concatenate(scales)
    if method == "int4":
        wire["values"] = _pack_nibbles(wire["values"])
    raw = pack(wire, f"{kind} 1 {method} {exponent} {schema_hash(schema_of(total))}")
    return zstd.compress(raw, options={zstd.CompressionParameter.compression_level: 1}), left


def _require_float32(schema: Schema) -> None:
    odd = next((name for name, spec in schema.items() if spec.dtype != "float32"), None)
    if odd is not None:
        raise Refused(
            Code.WRONG_SHAPE, f"tensor {odd!r} of a delta is {schema[odd].dtype}, not float32"
        )


def _with_residual(delta: Mapping[str, Array], residual: Mapping[str, Array] | None) -> Tensors:
    schema = schema_of(delta)
    _require_float32(schema)
    if residual and schema_of(residual) != schema:
        raise Refused(Code.WRONG_SHAPE, "the residual is not of the same tensors as the delta")
    total = (
        {name: np.asarray(t + residual[name]) for name, t in delta.items()}
        if residual
        else dict(delta)
    )
    check_finite(total)
    return total


def _peak(tensors: Mapping[str, Array]) -> float:
    return max((float(np.abs(t).max(initial=0)) for t in tensors.values()), default=0.0)


def _exponent(peak: float, levels: int) -> int:
    """The power of two that puts the largest scale into [2**14, 2**15], so that fp16 keeps its precision for all of them."""
    if peak == 0:
        return 0
    exponent = max(math.frexp(peak / levels)[1] - 15, MIN_EXPONENT)
    if exponent > MAX_EXPONENT:
        raise Refused(Code.NOT_FINITE, f"a change of {peak:.3g} in one weight")
    return exponent


def _groups(spec: Spec, method: Method) -> int:
    """How many scales a tensor has; every tensor begins a new group."""
    return -(-spec.size // GROUP) if method in ("int8", "int4") else 0


def _encode(x: Array, method: Method, exponent: int) -> tuple[Array, Array]:
    """(values, scales) of one flat tensor; the values of int4 are not packed yet."""
    nothing = np.zeros(0, "<f2")
    if method == "none":
        return x, nothing
    if method == "fp16":
        return np.ldexp(x.astype(np.float64), -exponent).astype("<f2"), nothing
    groups = np.zeros(
        (-(-x.size // GROUP), GROUP), np.float64
    )  # in float64 the nearest level is found without rounding errors
    groups.reshape(-1)[: x.size] = x
    exact = np.ldexp(np.abs(groups).max(axis=1, initial=0) / LEVELS[method], -exponent)
    scales = exact.astype("<f2")
    scales = np.where(
        scales < exact, np.nextafter(scales, np.float16(np.inf)), scales
    )  # up: no level beyond the last
    steps = np.ldexp(scales.astype(np.float64), exponent)
    levels = np.rint(groups / np.where(steps == 0, 1, steps)[:, None])
    return levels.astype(np.int8).reshape(-1)[: x.size], scales


def _decode(values: Array, scales: Array, method: Method, exponent: int) -> Array:
    """One flat tensor in float32; exact, as a level has 7 bits and a scale 11."""
    if method == "none":
        return values
    if method == "fp16":
        return np.ldexp(values.astype(np.float32), exponent)
    out = values.astype(np.float32)
    steps = np.ldexp(scales.astype(np.float32), exponent)
    whole = out.size - out.size % GROUP
    out[:whole].reshape(-1, GROUP)[...] *= steps[: whole // GROUP, None]
    out[whole:] *= steps[whole // GROUP :]  # the last group is short, or there is none
    return out


def _pack_nibbles(levels: Array) -> Array:
    """Level + 8 (1..15) in four bits, the first of two in the low half; an odd end is filled with level 0."""
    codes = np.full(levels.size + levels.size % 2, 8, np.uint8)
    codes[: levels.size] = levels + 8
    return codes[0::2] | (codes[1::2] << 4)


def _unpack_nibbles(packed: Array, size: int) -> Array:
    codes = np.empty(2 * packed.size, np.int8)
    codes[0::2] = packed & 15
    codes[1::2] = packed >> 4
    if (codes == 0).any() or (size % 2 and codes[-1] != 8):
        raise Refused(
            Code.MALFORMED, "an int4 code is 0, or the padding is not level 0; codes are 1 to 15"
        )
    return codes[:size] - np.int8(8)


def _read_note(note: str, schema: Schema, method: Method | None) -> tuple[str, Method, int]:
    """(delta or weights, method, exponent) that a payload announces for these tensors."""
    match = _UPDATE.fullmatch(note)
    if match is None:
        raise Refused(Code.MALFORMED, f"the payload calls itself {note[:60]!r}, not an update")
    found = next(m for m in METHODS if m == match[2])
    exponent = int(match[3])
    if method is not None and found != method:
        raise Refused(
            Code.MALFORMED, f"the task asks for compression {method}, the payload uses {found}"
        )
    if not MIN_EXPONENT <= exponent <= MAX_EXPONENT or (found == "none" and exponent):
        raise Refused(Code.NOT_FINITE, f"the exponent {exponent} is out of range")
    if match[4] != schema_hash(schema):
        raise Refused(
            Code.WRONG_SHAPE,
            f"the payload is of the tensors {match[4][:12]}..., the block has {schema_hash(schema)[:12]}...",
        )
    if match[1] == "weights" and found != "none":
        raise Refused(Code.MALFORMED, "weights are never quantised")
    return match[1], found, exponent


def _require_valid(values: Array, scales: Array, method: Method) -> None:
    """Refuse what no honest encoder writes: values or scales that are not finite, negative scales, the level -128."""
    check_finite({"values": values, "scales": scales})
    if (scales < 0).any():
        raise Refused(Code.NOT_FINITE, "a scale is negative")
    if method == "int8" and (values == -128).any():
        raise Refused(Code.MALFORMED, "a level is -128; levels are -127 to 127")


def _raw_cap(schema: Schema, method: Method) -> int:
    """No file of this schema and method is longer: exact data, and a header with room for any spacing and escapes."""
    wire = wire_schema(schema, method)
    data = sum(
        math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize for dtype, shape in wire.values()
    )
    return (
        data
        + 1024
        + sum(6 * len(name.encode()) + 24 * len(shape) + 160 for name, (_, shape) in wire.items())
    )


def _inflate(payload: bytes, cap: int) -> bytes:
    """One whole zstd frame of at most `cap` bytes; a larger one is refused after `cap` + 1 bytes."""
    reader = zstd.ZstdDecompressor(
        options={zstd.DecompressionParameter.window_log_max: WINDOW_LOG_MAX}
    )
    try:
        raw = reader.decompress(payload, max_length=cap + 1)
    except zstd.ZstdError as error:
        raise Refused(Code.MALFORMED, f"the payload is not a zstd frame ({error})") from None
    if len(raw) > cap:
        raise Refused(Code.TOO_LARGE, f"the payload unpacks to more than {cap} bytes")
    if not reader.eof or reader.unused_data:
        raise Refused(Code.MALFORMED, "the payload is cut off, or something follows its zstd frame")
    return raw


def _read_header(raw: bytes, limits: Limits) -> tuple[Wire, str]:
    """Names, types and shapes and the note, before anything else is read; duplicates and extra keys are refused."""
    size = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or size > len(raw) - 8:
        raise Refused(Code.MALFORMED, "the safetensors bytes are cut off")
    if size > limits.header_bytes:
        raise Refused(
            Code.TOO_LARGE, f"a header of {size} bytes, {limits.header_bytes} are allowed"
        )
    try:
        entries = json.loads(raw[8 : 8 + size].decode("utf-8"), object_pairs_hook=_without_repeats)
        metadata = entries.pop("__metadata__", {})
        if len(entries) > limits.tensors:
            raise Refused(Code.TOO_LARGE, f"{len(entries)} tensors, {limits.tensors} are allowed")
        wire = {name: _wire_entry(entry) for name, entry in entries.items()}
        note = metadata.get(NOTE, "")
        if not isinstance(note, str):
            raise TypeError("the note is not text")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refused(
            Code.MALFORMED, f"the safetensors header cannot be read ({str(error)[:80]})"
        ) from None
    return wire, note


def _wire_entry(entry: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    dtype, shape = entry["dtype"], entry["shape"]
    if (
        set(entry) != {"dtype", "shape", "data_offsets"}
        or not isinstance(dtype, str)
        or len(shape) > 8
    ):
        raise ValueError("a tensor has just dtype, shape and data_offsets")
    if not all(type(n) is int and 0 <= n < 2**48 for n in shape):
        raise ValueError("a shape is a list of sizes")
    return dtype, tuple(shape)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _require_same(found: Wire, wanted: Wire) -> None:
    if found == wanted:
        return
    name = sorted(n for n in found.keys() | wanted.keys() if found.get(n) != wanted.get(n))[0]
    raise Refused(
        Code.WRONG_SHAPE,
        f"tensor {name[:100]!r} is {_said(found.get(name))}, expected {_said(wanted.get(name))}",
    )


def _said(entry: tuple[str, tuple[int, ...]] | None) -> str:
    return "absent" if entry is None else f"{entry[0]} {list(entry[1])}"


def _tensors(raw: bytes) -> Tensors:
    try:
        found = safetensors.deserialize(
            raw
        )  # checks that the offsets fit the shapes, touch, and cover the file
    except safetensors.SafetensorError as error:
        raise Refused(
            Code.MALFORMED, f"the safetensors bytes are damaged ({str(error)[:80]})"
        ) from None
    odd = next((name for name, t in found if t["dtype"] not in _DTYPES), None)
    if odd is not None:
        raise Refused(Code.WRONG_SHAPE, f"tensor {odd[:100]!r} has a type that is never sent")
    return {
        name: np.frombuffer(t["data"], _DTYPES[t["dtype"]]).reshape(t["shape"])
        for name, t in sorted(found)
    }
