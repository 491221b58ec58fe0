"""The logical shape of a very large model: real width and depth, one buffer for all layers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from blocktrain.config import Config, make_config
from blocktrain.errors import ConfigError, RunError
from blocktrain.learning.model import IndependentBlock, Layer

MATRICES = 12  # of width x width in a layer
SLENDERNESS = 58  # width over depth, as in the 75.8B: 7168 wide and 123 deep
HEAD = 128
UNITS = {"K": 1e3, "M": 1e6, "B": 1e9}
TILE = 1 << 22  # random numbers that the buffer is filled with, again and again


@dataclass(frozen=True)
class Shape:
    """Widths and depths; one block on each host."""

    width: int
    blocks: int
    layers: int  # of a block

    @property
    def parameters(self) -> int:
        """Of all layers: matrices and norms."""
        return self.blocks * self.layers * (MATRICES * self.width**2 + 2 * self.width)

    @property
    def buffer_bytes(self) -> int:
        """Of one layer in fp32: all that is really there."""
        return self.parameters // (self.blocks * self.layers) * 4

    def config(self, context: int) -> Config:
        """As settings of a run."""
        heads = next(
            h for h in range(max(self.width // HEAD, 1), 0, -1) if self.width % (2 * h) == 0
        )
        return make_config(
            {
                "width": self.width,
                "heads": heads,
                "blocks": self.blocks,
                "layers_per_block": self.layers,
                "context": max(context, 8),
                "lookback": 1,
                "compose": "pool",
            }
        )


def parse_shape(text: str, blocks: int) -> Shape:
    """75.8B -> 3 blocks of 41 layers, 7168 wide; any other size in the same proportions."""
    number, unit = text[:-1], text[-1:].upper()
    try:
        size = float(number) * UNITS[unit]
    except (ValueError, KeyError):
        raise ConfigError(
            f"--shape {text!r} is no number of parameters, for example 75.8B or 10M"
        ) from None
    if not 1e4 <= size <= 9e11:
        raise ConfigError(f"--shape {text} is out of reach; choose between 10K and 900B")
    depth = (size / (MATRICES * SLENDERNESS**2)) ** (1 / 3)
    layers = max(1, round(depth / blocks))
    width = math.sqrt(size / (MATRICES * layers * blocks))
    step = HEAD if width >= 8 * HEAD else 16
    return Shape(max(round(width / step), 1) * step, blocks, layers)


@contextmanager
def buffer(folder: Path, shape: Shape) -> Iterator[Path]:
    """A temporary file with one layer's weights; activations neither grow nor vanish with them."""
    path = folder / "layer.bin"
    tile = np.random.default_rng(0).standard_normal(TILE, dtype=np.float32)
    deep = (2 * shape.blocks * shape.layers) ** -0.5
    try:
        with path.open("wb") as file:
            for name, size in _sizes(shape).items():
                width = size[0] ** -0.5 * (
                    deep if name in ("attention_out.weight", "down.weight") else 1.0
                )
                part = (
                    np.ones(size[0], dtype=np.float32)
                    if len(size) == 1
                    else tile * np.float32(width)
                )
                for at in range(0, math.prod(size), len(part)):
                    part[: math.prod(size) - at].tofile(file)
        yield path
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror or error}; "
            f"it needs {shape.buffer_bytes / 1e9:.1f} GB"
        ) from None
    finally:
        path.unlink(missing_ok=True)


def _sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        layer = Layer(shape.width, 1)
    return {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}


def shared_model(shape: Shape, config: Config, path: Path) -> IndependentBlock:
    """The whole model. All layers share the weights in the file, which all processes map."""
    count = shape.buffer_bytes // 4
    buffer = torch.from_file(str(path), shared=True, size=count, dtype=torch.float32)
    weights: dict[str, Tensor] = {}
    at = 0
    for name, size in _sizes(shape).items():
        weights[name] = buffer[at : at + math.prod(size)].view(size)
        at += math.prod(size)
    with torch.device("meta"):
        layer = Layer(config.width, config.heads)
    layer.load_state_dict(weights, assign=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        block = IndependentBlock(config, layers=0)
    block.layers = nn.ModuleList([layer] * (shape.blocks * shape.layers))
    return block.requires_grad_(False).eval()


def model_hash(shape: Shape) -> str:
    """What stages call these weights."""
    return hashlib.sha256(repr(shape).encode()).hexdigest()
