"""Memory that training a block takes, by kind, without torch.

The formulas follow what `learning.model` computes; tests hold them against the peak that torch
itself reports. docs/guides/sizes.md explains them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from blocktrain.config import Config
from blocktrain.shapes import Shapes, block_parameters, block_shapes

FLOAT = 4  # bytes
PROCESS = 280 * 10**6  # bytes of Python and torch, before the first tensor
INSIDE = ("layers.", "mix.", "correct.", "hand_on.", "look_back.")  # whose matrices Muon moves
BACKWARD = 13  # floats per position and unit of width that the backward pass of a layer adds


@dataclass(frozen=True)
class Footprint:
    """Bytes of one worker."""

    weights: int
    """Of the block, with its constants."""
    optimizer: int
    """Moments."""
    frozen: int
    """The blocks that a fusion block reads, and its copies of their heads."""
    working: int
    """Activations and gradients at the moment when they are most."""
    held: int
    """Beside the training: the weights that the task began from, and two residuals."""
    update: int
    """What making an update takes, when activations and gradients are gone."""

    @property
    def training(self) -> int:
        """On the device that trains."""
        return self.weights + self.optimizer + self.frozen + self.working

    @property
    def total(self) -> int:
        """Of a worker that trains in the machine's own memory, at its peak."""
        resident = self.weights + self.optimizer + self.frozen
        return PROCESS + resident + max(self.working + self.held, self.update)


def worker_memory(config: Config, index: int) -> int:
    """Bytes that a worker needs on its device to train block `index` (from 1)."""
    footprint = training_footprint(config, index)
    return footprint.total if config.device == "cpu" else PROCESS + footprint.training


def training_footprint(config: Config, index: int) -> Footprint:
    """What training block `index` (from 1) takes."""
    shapes = block_shapes(config, index)
    parameters = _count(shapes)
    # Angles of the rotary embedding, and the target table.
    targets = config.vocabulary * config.z_width if config.objective == "denoise" else 0
    constants = config.context * config.width // config.heads + targets
    heads = config.width * config.vocabulary
    return Footprint(
        weights=FLOAT * (parameters + constants),
        optimizer=FLOAT * (2 * parameters - _count(_moved_by_muon(config, index))),
        frozen=FLOAT * config.reads(index) * (block_parameters(config, 1) + heads),
        working=int(FLOAT * _working(config, index)),
        held=3 * FLOAT * parameters,
        # Both residuals, the delta, their sum, what the payload says of it, and the payload.
        update=int(5.5 * FLOAT * parameters),
    )


def _working(config: Config, index: int) -> float:
    """Floats of activations and gradients at the worst moment of a step."""
    W, L, V = config.width, config.layers_per_block, config.vocabulary
    gradients = _count(block_shapes(config, index))
    positions = config.rows * config.context
    before = gradients if config.rows < config.batch else 0  # of the micro-batches before
    cast = before + _cast_weights(config, index)
    inputs, head, layer = _inputs(config, index), _head(config, index), _layer(config)
    kept = L * (W if config.checkpoint_activations else layer)
    again = layer if config.checkpoint_activations else 0
    backward = BACKWARD * W * _half(config)
    features = config.reads(index) * W
    return max(
        # The heads of the blocks read their features, raw, normed, corrected and joined.
        cast + positions * (inputs + kept + head + 3 * features + V),
        # The backward pass begins: the logits are there three times.
        cast + positions * (inputs + kept + head + 3 * V),
        # It is in the last layer,
        max(cast, W * V) + positions * (inputs + kept + again + backward),
        # or in the first.
        gradients + positions * (inputs + layer + backward),
        # The optimizer moves the weights.
        gradients + _muon_matrices(config, index),
    )


def _inputs(config: Config, index: int) -> float:
    """Floats per position of what a block reads, kept until its layers are done."""
    W, N, half = config.width, config.reads(index), _half(config)
    # Vectors of the lookback, if one matrix reads them.
    back = config.lookback - (not N) if config.shares_table else 0
    noised = 3 * config.z_width if config.objective == "denoise" and not N else 0
    return 4 + (back + N) * W * half + noised


def _head(config: Config, index: int) -> float:
    """Floats per position between the last layer and the logits: a norm and a product.

    A fusion block keeps the normed features and their corrections.
    """
    half = _half(config)
    return config.width * (half + (config.reads(index) * (1 + half) or 2))


def _layer(config: Config) -> float:
    """Floats per position that autograd keeps of one layer: see `learning.model.Layer`."""
    W, H = config.width, config.heads
    # Inputs of four products, queries, keys, their common storage with the values, what attention
    # gives and its copy in the order of positions, hidden units before and after the square.
    products = (1 + 1 + 1 + 3 + 1 + (H > 1) + 1 + 4 + 4) * W
    # Two norms keep their input and its normed rows; attention keeps a number per head.
    return 2 * (2 * W + 1) + H + products * _half(config)


def _half(config: Config) -> float:
    """Under autocast, products take half a float."""
    return 0.5 if config.dtype == "bfloat16" else 1.0


def _cast_weights(config: Config, index: int) -> float:
    """Floats of the weights as autocast keeps them for the backward pass."""
    if config.dtype == "float32":
        return 0
    matrices = {n: s for n, s in block_shapes(config, index).items() if n.endswith(".weight")}
    return (_count(matrices) + config.reads(index) * config.width * config.vocabulary) / 2


def _muon_matrices(config: Config, index: int) -> int:
    """Floats of the products with which Muon makes a matrix orthogonal."""
    square = config.width**2
    moved = _moved_by_muon(config, index)
    return max(21 * square, (config.reads(index) + 8) * square) if moved else 0


def _moved_by_muon(config: Config, index: int) -> Shapes:
    kind = config.fusion_optimizer if config.reads(index) else config.optimizer
    return {
        name: shape
        for name, shape in block_shapes(config, index).items()
        if kind == "muon" and name.startswith(INSIDE) and len(shape) == 2
    }


def _count(shapes: Shapes) -> int:
    return sum(map(prod, shapes.values()))
