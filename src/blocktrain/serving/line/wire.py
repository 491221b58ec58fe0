"""What both ends of a connection share: tensors as bytes, and sockets that send small frames at once."""

from __future__ import annotations

import asyncio
import socket

import torch
from torch import Tensor

from blocktrain.protocol.frames import Buffer, Wire

DTYPES: dict[Wire, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16}
LARGEST_HALF = 65504.0


def tensor_bytes(tensor: Tensor, wire: Wire) -> memoryview:
    """The values as they go over the wire, without a copy where that is possible; what fp16 cannot hold is cut to what it can."""
    if wire == "fp16":
        tensor = tensor.clamp(-LARGEST_HALF, LARGEST_HALF)
    return tensor.detach().to(DTYPES[wire]).contiguous().view(-1).view(torch.uint8).numpy().data


def tensor_of(payload: Buffer, shape: tuple[int, ...], wire: Wire) -> Tensor:
    """The inverse, in float32; the tensor keeps the payload where it needs no conversion."""
    return torch.frombuffer(payload, dtype=DTYPES[wire]).view(shape).float()


def tune(transport: asyncio.BaseTransport) -> None:
    """No waiting for more to send, and the kernel too notices hosts that vanished."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
