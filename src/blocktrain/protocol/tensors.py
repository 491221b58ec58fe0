"""Tensors as safetensors bytes, read with limits. numpy only; docs/protocol.md has the layout.

The header is checked before anything else is read: names, types and shapes must be exactly those
of the schema, so a reader never allocates more than the schema asks for.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from blocktrain.protocol.refusals import Code, Refused

Array = npt.NDArray[Any]
Tensors = dict[str, Array]

NOTE = "blocktrain"  # one key only: safetensors writes several keys in no fixed order
_DTYPES = {"F32": "<f4", "F16": "<f2", "I8": "<i1", "U8": "<u1", "I32": "<i4", "I64": "<i8"}
_NAMES = {np.dtype(kind): name for name, kind in _DTYPES.items()}

Layout = dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype as safetensors names it, shape


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
class TensorLimits:
    """Caps that hold for any schema. The caps that follow from a schema are tighter."""

    payload_bytes: int = 1 << 30
    raw_bytes: int = 1 << 32
    header_bytes: int = 1 << 20
    tensors: int = 4096


DEFAULT_LIMITS = TensorLimits()


def schema_of(tensors: Mapping[str, Array]) -> dict[str, Spec]:
    return {name: Spec(tuple(map(int, t.shape)), t.dtype.name) for name, t in tensors.items()}


def schema_hash(schema: Schema) -> str:
    """sha256 of the sorted compact JSON {name: shape}."""
    canonical = json.dumps(
        {name: list(spec.shape) for name, spec in schema.items()},
        sort_keys=True,
        separators=(",", ":"),
    )
    return hashlib.sha256(canonical.encode()).hexdigest()


def pack(tensors: Mapping[str, Array], note: str | None = None) -> bytes:
    """safetensors bytes; the same tensors always give the same bytes."""
    odd = next((name for name, t in tensors.items() if t.dtype not in _NAMES), None)
    if odd is not None:
        raise Refused(
            Code.WRONG_SHAPE,
            f"tensor {odd!r} has the type {tensors[odd].dtype}, which is never sent",
        )
    # safetensors refuses views, so each tensor is made contiguous.
    dense = {name: np.asarray(tensors[name], order="C") for name in sorted(tensors)}
    return safetensors.numpy.save(dense, None if note is None else {NOTE: note})


def unpack(
    raw: bytes, schema: Schema | None = None, limits: TensorLimits = DEFAULT_LIMITS
) -> Tensors:
    """The tensors of safetensors bytes. With a schema, any other tensor is refused."""
    if len(raw) > limits.raw_bytes:
        raise Refused(
            Code.TOO_LARGE, f"{len(raw)} bytes of tensors, {limits.raw_bytes} are allowed"
        )
    header, _ = read_header(raw, limits)
    if schema is not None:
        require_layout(
            header,
            {name: (_NAMES[np.dtype(spec.dtype)], spec.shape) for name, spec in schema.items()},
        )
    return read_tensors(raw)


def check_finite(tensors: Mapping[str, Array]) -> None:
    """Refuse NaN and infinity, naming the tensor."""
    for name, t in tensors.items():
        if t.dtype.kind == "f" and not np.isfinite(t).all():
            raise Refused(Code.NOT_FINITE, f"tensor {name!r}")


def layout_bytes(layout: Layout) -> int:
    """An upper bound for safetensors bytes of this layout.

    The data is exact; the header gets room for any spacing and any escapes.
    """
    data = sum(
        math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize for dtype, shape in layout.values()
    )
    header = 1024 + sum(
        6 * len(name.encode()) + 24 * len(shape) + 160 for name, (_, shape) in layout.items()
    )
    return data + header


def read_header(raw: bytes, limits: TensorLimits) -> tuple[Layout, str]:
    """(layout, note). Repeated names and extra keys are refused."""
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
        layout = {name: _layout_entry(entry) for name, entry in entries.items()}
        note = metadata.get(NOTE, "")
        if not isinstance(note, str):
            raise TypeError("the note is not text")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refused(
            Code.MALFORMED, f"the safetensors header cannot be read ({str(error)[:80]})"
        ) from None
    return layout, note


def _layout_entry(entry: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
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
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name occurs twice")
    return entries


def require_layout(layout: Layout, expected: Layout) -> None:
    if layout == expected:
        return
    names = layout.keys() | expected.keys()
    name = sorted(n for n in names if layout.get(n) != expected.get(n))[0]
    raise Refused(
        Code.WRONG_SHAPE,
        f"tensor {name[:100]!r} is {_describe(layout.get(name))},"
        f" expected {_describe(expected.get(name))}",
    )


def _describe(entry: tuple[str, tuple[int, ...]] | None) -> str:
    return "absent" if entry is None else f"{entry[0]} {list(entry[1])}"


def read_tensors(raw: bytes) -> Tensors:
    """The tensors behind a header that was checked."""
    try:
        # This checks that the offsets fit the shapes, touch, and cover the file.
        items = safetensors.deserialize(raw)
    except safetensors.SafetensorError as error:
        raise Refused(
            Code.MALFORMED, f"the safetensors bytes are damaged ({str(error)[:80]})"
        ) from None
    odd = next((name for name, t in items if t["dtype"] not in _DTYPES), None)
    if odd is not None:
        raise Refused(Code.WRONG_SHAPE, f"tensor {odd[:100]!r} has a type that is never sent")
    return {
        name: np.frombuffer(t["data"], _DTYPES[t["dtype"]]).reshape(t["shape"])
        for name, t in sorted(items)
    }
