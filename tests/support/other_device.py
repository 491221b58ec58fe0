"""A second device for machines that have none: tensors with real numbers that say they are
elsewhere, and that refuse to be mixed with those of the processor, as on a real one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

OTHER = torch.device("meta")  # the only other one that every torch knows
_aten = torch.ops.aten
# What may mix devices, as on a real GPU: a copy, and indices of the processor.
_MIXES = {_aten.copy_.default, _aten.index.Tensor, _aten._to_copy.default}


class OtherTensor(torch.Tensor):
    """A tensor of the processor that says it is elsewhere."""

    inside: Tensor

    @staticmethod
    def __new__(cls, inside: Tensor) -> OtherTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inside.shape,
            dtype=inside.dtype,
            device=OTHER,
            strides=inside.stride(),
            storage_offset=inside.storage_offset(),
        )

    def __init__(self, inside: Tensor) -> None:
        self.inside = inside

    def tolist(self) -> Any:
        return self.inside.tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(function, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Makes tensors where a factory or a copy names the device."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(function, args, kwargs or {})


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    here, there = [], []

    def unwrap(value: Any) -> Any:
        if isinstance(value, OtherTensor):
            there.append(value)
            return value.inside
        if isinstance(value, Tensor) and value.device == OTHER:
            raise RuntimeError(f"{function}: a tensor without numbers, made below this mode")
        if isinstance(value, Tensor) and value.ndim:
            here.append(value)
        return value

    plain_args, plain = tree_map(unwrap, args), tree_map(unwrap, kwargs)
    if here and there and function not in _MIXES:
        raise RuntimeError(f"{function}: expected all tensors to be on the same device")
    wanted = kwargs.get("device")
    if wanted is not None:
        plain["device"] = torch.device("cpu")
        if function is _aten._to_copy.default:
            plain.pop("non_blocking", None)
    elsewhere = torch.device(wanted).type == OTHER.type if wanted is not None else bool(there)
    result = function(*plain_args, **plain)
    if function.overloadpacket.__name__.endswith("_") and there:
        return args[0]  # in place
    if not elsewhere:
        return result
    return tree_map(lambda x: OtherTensor(x) if isinstance(x, Tensor) else x, result)


@contextmanager
def other_device() -> Iterator[torch.device]:
    """Inside, tensors can be made on, and moved to, this device. It has no autocast."""
    make = torch.tensor  # it makes its tensor below the mode

    def make_tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        tensor = make(data, **options)
        return tensor if device is None else tensor.to(device)

    with (
        mock.patch("torch.autocast", lambda *_, **__: nullcontext()),
        mock.patch("torch.tensor", make_tensor),
        _Mode(),
    ):
        yield OTHER
