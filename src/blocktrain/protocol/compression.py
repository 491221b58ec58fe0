"""Updates as payloads: a delta, compressed by one method of the table `METHODS`.

A method is one class. To add one, write a class and put it into the table: settings, messages,
worker, coordinator and audit take it from there. numpy only; docs/protocol.md has the layout.

Bounds of one element x of a delta, with s the scale of its group of 128
(s is always >= max|group| / levels):
    none   exact, bit for bit
    fp16   |error| <= |x| / 2048, or 2**(exponent - 25) where that is larger
    int8   |error| <= s / 2, levels -127 to 127
    int4   |error| <= s / 2, levels -7 to 7
    int2   |error| <= s / 2 up to 7.5 s, with s the root mean square of a group of 512
    topk   the same with 1.75 root mean squares
The residual is exactly what a payload lacks: sent + residual == delta + old residual.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from backports import zstd
from pydantic import AfterValidator

from blocktrain.protocol.quantization import (
    GROUP,
    LARGE_GROUP,
    check_nibbles,
    check_scales,
    cut,
    dequantize_all,
    group_count,
    join,
    pack_nibbles,
    quantize,
    quantize_coarsely,
    unpack_nibbles,
)
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.protocol.tensors import (
    DEFAULT_LIMITS,
    Array,
    Layout,
    Schema,
    TensorLimits,
    Tensors,
    check_finite,
    layout_bytes,
    pack,
    read_header,
    read_tensors,
    require_layout,
    schema_hash,
    schema_of,
)

# fp16 times 2**exponent is then a normal float32, so a level times a scale is exact everywhere.
MIN_EXPONENT, MAX_EXPONENT = -100, 64
WINDOW_LOG_MAX = 23  # a zstd frame may ask the reader for a window of 8 MiB at most
_NOTE = re.compile(
    r"(delta|weights) 1 ([a-z][a-z0-9_-]{0,15}) (0|-?[1-9][0-9]{0,2}) ([0-9a-f]{64})"
)


class Compression(ABC):
    """One method. `exponent` is a power of two that all tensors of a payload share."""

    name: ClassVar[str]
    exact: ClassVar[bool] = False
    """Keeps every bit: there is no residual, and a worker sends new weights, not a delta."""
    carries: ClassVar[bool] = False
    """A worker that is alone on its block trains on with the residual in its weights, instead of
    without what it has learned and not sent yet. With others beside it that does harm."""
    levels: ClassVar[float] = 1
    """The peak of a delta divided by this is at least its largest scale."""
    zstd_share: ClassVar[float] = 1.0
    """What zstd leaves of the bytes of `layout`, measured on updates of real training."""
    zstd_options: ClassVar[dict[int, int]] = {zstd.CompressionParameter.compression_level: 1}

    @abstractmethod
    def layout(self, sizes: Sequence[int]) -> Layout:
        """The tensors in a payload for tensors of these sizes. It caps a payload's length."""

    @abstractmethod
    def encode(self, tensors: Sequence[Array], exponent: int) -> Tensors:
        """Flat tensors as the tensors of `layout`."""

    @abstractmethod
    def decode(self, wire: Tensors, sizes: Sequence[int], exponent: int) -> list[Array]:
        """Flat float32 tensors, of values that were checked."""

    def part(self, wire: Tensors, sizes: Sequence[int], index: int) -> Tensors:
        """What `decode` needs for one of the tensors alone. In `layout` they follow each other."""
        before, own = self.layout(sizes[:index]), self.layout(sizes[index : index + 1])
        starts = {name: math.prod(shape) for name, (_, shape) in before.items()}
        return {
            name: wire[name][starts[name] : starts[name] + math.prod(shape)]
            for name, (_, shape) in own.items()
        }

    def check(self, wire: Tensors, sizes: Sequence[int]) -> None:  # noqa: B027
        """Refuse values that `encode` never writes. They have the layout and are finite."""

    def exponent(self, peak: float) -> int:
        """Puts the largest scale into [2**14, 2**15], so that fp16 keeps its precision."""
        if peak == 0 or self.exact:
            return 0
        exponent = max(math.frexp(peak / self.levels)[1] - 15, MIN_EXPONENT)
        if exponent > MAX_EXPONENT:
            raise Refused(Code.NOT_FINITE, f"a change of {peak:.3g} in one weight")
        return exponent


class NoCompression(Compression):
    name = "none"
    exact = True
    zstd_share = 0.93

    def layout(self, sizes: Sequence[int]) -> Layout:
        return {"values": ("F32", (sum(sizes),))}

    def encode(self, tensors: Sequence[Array], exponent: int) -> Tensors:
        return {"values": join(tensors, "<f4")}

    def decode(self, wire: Tensors, sizes: Sequence[int], exponent: int) -> list[Array]:
        return cut(wire["values"], sizes)


class Float16(Compression):
    name = "fp16"
    zstd_share = 0.92

    def layout(self, sizes: Sequence[int]) -> Layout:
        return {"values": ("F16", (sum(sizes),))}

    def encode(self, tensors: Sequence[Array], exponent: int) -> Tensors:
        values = [np.ldexp(x.astype(np.float64), -exponent).astype("<f2") for x in tensors]
        return {"values": join(values, "<f2")}

    def decode(self, wire: Tensors, sizes: Sequence[int], exponent: int) -> list[Array]:
        parts = cut(wire["values"], sizes)
        return [np.ldexp(part.astype(np.float32), exponent) for part in parts]


class Int8(Compression):
    """Levels of a byte, with one fp16 scale per group of 128. Each tensor begins a new group."""

    name = "int8"
    levels: ClassVar[float] = 127
    zstd_share = 0.97

    group: ClassVar[int] = GROUP

    def layout(self, sizes: Sequence[int]) -> Layout:
        groups = sum(group_count(size, self.group) for size in sizes)
        return {"values": ("I8", (sum(sizes),)), "scales": ("F16", (groups,))}

    def quantize(self, x: Array, exponent: int) -> tuple[Array, Array]:
        """(levels, scales) of one flat tensor."""
        return quantize(x, self.levels, exponent)

    def encode(self, tensors: Sequence[Array], exponent: int) -> Tensors:
        pairs = [self.quantize(x, exponent) for x in tensors]
        return {
            "values": join([values for values, _ in pairs], "<i1"),
            "scales": join([scales for _, scales in pairs], "<f2"),
        }

    def check(self, wire: Tensors, sizes: Sequence[int]) -> None:
        check_scales(wire["scales"])
        if (wire["values"] == -128).any():
            raise Refused(Code.MALFORMED, "a level is -128; levels are -127 to 127")

    def decode(self, wire: Tensors, sizes: Sequence[int], exponent: int) -> list[Array]:
        return dequantize_all(wire["values"], wire["scales"], sizes, exponent, self.group)


class Int4(Int8):
    """As int8, with two levels in a byte."""

    name = "int4"
    levels: ClassVar[float] = 7
    zstd_share = 0.86

    def layout(self, sizes: Sequence[int]) -> Layout:
        return super().layout(sizes) | {"values": ("U8", ((sum(sizes) + 1) // 2,))}

    def encode(self, tensors: Sequence[Array], exponent: int) -> Tensors:
        wire = super().encode(tensors, exponent)
        return wire | {"values": pack_nibbles(wire["values"])}

    def part(self, wire: Tensors, sizes: Sequence[int], index: int) -> Tensors:
        start = sum(sizes[:index])
        end = start + sizes[index]
        packed = wire["values"][start // 2 : (end + 1) // 2]
        levels = unpack_nibbles(packed, 2 * packed.size)[start % 2 :][: sizes[index]]
        return super().part(wire, sizes, index) | {"values": pack_nibbles(levels)}

    def check(self, wire: Tensors, sizes: Sequence[int]) -> None:
        check_nibbles(wire["values"], sum(sizes))
        check_scales(wire["scales"])

    def decode(self, wire: Tensors, sizes: Sequence[int], exponent: int) -> list[Array]:
        values = unpack_nibbles(wire["values"], sum(sizes))
        return super().decode(wire | {"values": values}, sizes, exponent)


class Int2(Int4):
    """Levels as in int4, but each is as far from the next as the values of its group are large.

    Most are then -1, 0 or 1, and zstd makes about two bits of each. The larger ones keep outliers
    from piling up in the residual, as they would with four levels.
    """

    name = "int2"
    carries = True
    group = LARGE_GROUP
    step: ClassVar[float] = 1.0
    """Between two levels, in root mean squares of a group."""
    levels = 1.0
    zstd_share = 0.54
    zstd_options = Int4.zstd_options | {zstd.CompressionParameter.min_match: 7}

    def quantize(self, x: Array, exponent: int) -> tuple[Array, Array]:
        return quantize_coarsely(x, self.step, exponent)


class TopK(Int2):
    """Only the larger values, those beyond 0.875 root mean squares of their group; zero is sent for
    all others. zstd makes one and a half bits of each."""

    name = "topk"
    step = 1.75
    levels = 4 / 7
    zstd_share = 0.37


METHODS: dict[str, Compression] = {
    method.name: method for method in (NoCompression(), Float16(), Int8(), Int4(), Int2(), TopK())
}


def require_method(name: str) -> str:
    """Refuse a name that is not in the table."""
    if name not in METHODS:
        raise ValueError(f"compression is one of {', '.join(METHODS)}; {name[:40]!r} is unknown")
    return name


Method = Annotated[str, AfterValidator(require_method)]  # a name in the table


class WireTensors(Mapping[str, Array]):
    """The tensors of a payload. Each is decoded when it is asked for, and not kept.

    So many updates that are merged together need little more memory than their payloads.
    """

    def __init__(self, method: Compression, wire: Tensors, exponent: int, schema: Schema) -> None:
        self._method, self._wire, self._exponent, self._schema = method, wire, exponent, schema
        self._names = sorted(schema)
        self._sizes = [schema[name].size for name in self._names]

    def __getitem__(self, name: str) -> Array:
        if name not in self._schema:
            raise KeyError(name)
        index = self._names.index(name)
        part = self._method.part(self._wire, self._sizes, index)
        (flat,) = self._method.decode(part, self._sizes[index : index + 1], self._exponent)
        return flat.reshape(self._schema[name].shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class UpdateTensors:
    """The content of a payload: a delta, or (absolute) the new weights."""

    tensors: Mapping[str, Array]
    absolute: bool


def compress(
    delta: Mapping[str, Array], residual: Mapping[str, Array] | None, method: Method
) -> tuple[bytes, Tensors]:
    """(payload, new residual). Keep the new residual only if the update was accepted.

    None and an empty residual both mean that there is none yet.
    """
    return _write_payload("delta", _with_residual(delta, residual), METHODS[method])


def add_residual(weights: Mapping[str, Array], residual: Mapping[str, Array]) -> Tensors:
    """Where a worker begins whose last payload lacked something: one float32 sum per weight."""
    if not residual:
        return dict(weights)
    return {name: np.asarray(w + residual[name]) for name, w in weights.items()}


def compress_weights(weights: Mapping[str, Array], method: Method = "none") -> bytes:
    """A payload with the new weights themselves, for an exact method.

    base + (new - base) is not always new, so only this keeps every bit.
    """
    if not METHODS[method].exact:
        raise Refused(Code.MALFORMED, f"{method} does not keep every bit of weights")
    return _write_payload("weights", _with_residual(weights, None), METHODS[method])[0]


def decompress(
    payload: bytes,
    schema: Schema,
    limits: TensorLimits = DEFAULT_LIMITS,
    method: Method | None = None,
) -> Tensors:
    """The delta in a payload; weights are refused."""
    update = open_update(payload, schema, limits, method)
    if update.absolute:
        raise Refused(Code.MALFORMED, "the payload holds weights, not a delta")
    return dict(update.tensors)


def add_delta(weights: Mapping[str, Array], payload: bytes) -> Tensors:
    """The version that a delta makes of the one before: one float32 sum per weight."""
    delta = decompress(payload, schema_of(weights))
    return {name: np.asarray(tensor + delta[name]) for name, tensor in weights.items()}


def check_update(
    payload: bytes,
    schema: Schema,
    limits: TensorLimits = DEFAULT_LIMITS,
    method: Method | None = None,
) -> None:
    """Refuse everything that `open_update` refuses, without decoding the values.

    An int4 payload needs an eighth of the memory here that its tensors need.
    """
    _read_payload(payload, schema, limits, method)


def open_update(
    payload: bytes,
    schema: Schema,
    limits: TensorLimits = DEFAULT_LIMITS,
    method: Method | None = None,
) -> UpdateTensors:
    """The content of a payload that holds exactly the schema's tensors, by the given method."""
    kind, compression, exponent, wire = _read_payload(payload, schema, limits, method)
    return UpdateTensors(
        WireTensors(compression, wire, exponent, schema), absolute=kind == "weights"
    )


def _read_payload(
    payload: bytes, schema: Schema, limits: TensorLimits, method: Method | None
) -> tuple[str, Compression, int, Tensors]:
    """(delta or weights, method, exponent, tensors of the layout), all of them checked."""
    _require_float32(schema)
    if len(payload) > limits.payload_bytes:
        raise Refused(
            Code.TOO_LARGE, f"a payload of {len(payload)} bytes, {limits.payload_bytes} are allowed"
        )
    cap = max(_raw_cap(schema, name) for name in ([method] if method else METHODS))
    raw = _inflate(payload, min(cap, limits.raw_bytes))
    layout, note = read_header(raw, limits)
    kind, compression, exponent = _read_note(note, schema, method)
    require_layout(layout, wire_schema(schema, compression.name))
    wire = read_tensors(raw)
    check_finite(wire)
    compression.check(wire, [schema[name].size for name in sorted(schema)])
    return kind, compression, exponent, wire


def wire_schema(schema: Schema, method: Method) -> Layout:
    """The tensors that a payload of this method holds, in the order of the sorted names."""
    return METHODS[method].layout([schema[name].size for name in sorted(schema)])


def payload_cap(schema: Schema, method: Method) -> int:
    """The longest payload that an honest worker can send.

    zstd makes bytes that it cannot compress longer by less than 1 %.
    """
    cap = _raw_cap(schema, method)
    return cap + cap // 128 + 1024


def expected_payload(schema: Schema, method: Method) -> int:
    """About how long the payload of a usual update is."""
    return int(METHODS[method].zstd_share * layout_bytes(wire_schema(schema, method)))


def _raw_cap(schema: Schema, method: Method) -> int:
    return layout_bytes(wire_schema(schema, method))


def _write_payload(kind: str, total: Tensors, method: Compression) -> tuple[bytes, Tensors]:
    """(payload, what it lacks)."""
    names = sorted(total)
    flat = [total[name].reshape(-1) for name in names]
    exponent = method.exponent(_peak(total))
    wire = method.encode(flat, exponent)
    raw = pack(wire, f"{kind} 1 {method.name} {exponent} {schema_hash(schema_of(total))}")
    payload = zstd.compress(raw, options=method.zstd_options)
    if method.exact:
        return payload, {}
    parts = method.decode(wire, [x.size for x in flat], exponent)
    rest: Tensors = {
        name: total[name] - part.reshape(total[name].shape)
        for name, part in zip(names, parts, strict=True)
    }
    return payload, rest


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


def _require_float32(schema: Schema) -> None:
    odd = next((name for name, spec in schema.items() if spec.dtype != "float32"), None)
    if odd is not None:
        raise Refused(
            Code.WRONG_SHAPE, f"tensor {odd!r} of a delta is {schema[odd].dtype}, not float32"
        )


def _peak(tensors: Mapping[str, Array]) -> float:
    return max((float(np.abs(t).max(initial=0)) for t in tensors.values()), default=0.0)


def _read_note(
    note: str, schema: Schema, method: Method | None
) -> tuple[Literal["delta", "weights"], Compression, int]:
    """(kind, method, exponent) that a payload announces for these tensors."""
    match = _NOTE.fullmatch(note)
    if match is None or match[2] not in METHODS:
        raise Refused(Code.MALFORMED, f"the payload calls itself {note[:60]!r}, not an update")
    compression, exponent = METHODS[match[2]], int(match[3])
    if method is not None and compression.name != method:
        raise Refused(
            Code.MALFORMED,
            f"the task asks for compression {method}, the payload uses {compression.name}",
        )
    if not MIN_EXPONENT <= exponent <= MAX_EXPONENT or (compression.exact and exponent):
        raise Refused(Code.NOT_FINITE, f"the exponent {exponent} is out of range")
    if match[4] != (expected := schema_hash(schema)):
        raise Refused(
            Code.WRONG_SHAPE,
            f"the payload is of the tensors {match[4][:12]}..., the block has {expected[:12]}...",
        )
    if match[1] == "weights":
        if not compression.exact:
            raise Refused(Code.MALFORMED, "weights are never quantised")
        return "weights", compression, exponent
    return "delta", compression, exponent


def _inflate(payload: bytes, cap: int) -> bytes:
    """One whole zstd frame. Reading stops after `cap` + 1 bytes."""
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
