"""Optimizers: AdamW, or Muon for the matrices inside a block and AdamW for the rest.

torch's own Muon orthogonalises in bfloat16. Its bits differ between processors, and some cannot
run it at all. This one stays in float32, so a task that is trained again gives the same bytes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from blocktrain.learning.model import Linear

# Matrices from the residual stream to the residual stream.
INSIDE = ("layers.", "mix.", "correct.", "hand_on.", "look_back.")
# Newton-Schulz with a steep start: five rounds bring singular values near one.
STEEP = (3.4445, -4.7750, 2.0315)
ROUNDS = 5
MOMENTUM = 0.9
LENGTH = 0.4  # root mean square of a step, in learning rates; twice AdamW's, which measured best


class AdamW(torch.optim.AdamW):
    """torch's own, without its hook for the compiler."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class Muon(Optimizer):
    """Momentum with orthogonal steps: all directions in a matrix move alike, however small.

    Steps are scaled so that AdamW's learning rate fits. Matrices that are stored side by side
    (`parts`) are treated one by one.
    """

    def __init__(self, layers: Iterable[Linear], *, weight_decay: float) -> None:
        groups = [{"params": [layer.weight], "parts": layer.parts} for layer in layers]
        super().__init__(groups, {"lr": 0.0, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every matrix that has a gradient."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum"] = torch.zeros_like(matrix)
                state["momentum"].lerp_(matrix.grad, 1 - MOMENTUM)
                direction = matrix.grad.lerp(state["momentum"], MOMENTUM)
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                side = int(matrix.shape[1] > matrix.shape[0])
                for part, way in zip(
                    matrix.chunk(group["parts"], side),
                    direction.chunk(group["parts"], side),
                    strict=True,
                ):
                    part.add_(orthogonal(way), alpha=-group["lr"] * LENGTH * max(part.shape) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """About U @ V.T of the singular value decomposition, by products alone."""
    a, b, c = STEEP
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(ROUNDS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


class Optimizers:
    """The optimizers of one block, as one."""

    def __init__(
        self, block: nn.Module, kind: Literal["muon", "adamw"], *, weight_decay: float
    ) -> None:
        self._parameters = dict(block.named_parameters())
        linear = {f"{n}.weight": m for n, m in block.named_modules() if isinstance(m, Linear)}
        inside = {n: m for n, m in linear.items() if kind == "muon" and n.startswith(INSIDE)}
        others = [p for n, p in self._parameters.items() if n not in inside]
        groups = [
            {"params": [p for p in others if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in others if p.ndim <= 1], "weight_decay": 0.0},
        ]
        _skip_compiler_import()
        self._parts: list[Optimizer] = [AdamW(groups, betas=(0.9, 0.95), fused=True)]
        if inside:
            self._parts.append(Muon(inside.values(), weight_decay=weight_decay))

    def step(self, rate: float) -> None:
        """Move the weights by their gradients, at this learning rate."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()

    def moments(self) -> dict[str, Tensor]:
        """The state of every parameter, as `moment.name`; empty before the first step."""
        state = {p: of_one for part in self._parts for p, of_one in part.state.items()}
        return {
            f"{moment}.{name}": t
            for name, p in self._parameters.items()
            for moment, t in state.get(p, {}).items()
        }

    def restore(self, moments: Mapping[str, Tensor]) -> None:
        """Continue with these moments; without any, start fresh."""
        states: dict[nn.Parameter, dict[str, Tensor]] = {}
        for key, t in moments.items():
            moment, _, name = key.partition(".")
            if (parameter := self._parameters.get(name)) is not None:
                states.setdefault(parameter, {})[moment] = t.to(parameter.device)
        for part in self._parts:
            own = {p for group in part.param_groups for p in group["params"]}
            part.state.clear()
            part.state.update({p: of_one for p, of_one in states.items() if p in own})


def _skip_compiler_import() -> None:
    """Mark what the compiler must skip, so that the first optimizer does not import the compiler.

    That import would take two seconds at every worker's start.
    """
    add_group = inspect.unwrap(Optimizer.add_param_group)
    setattr(add_group, "__dynamo_disable", add_group)
