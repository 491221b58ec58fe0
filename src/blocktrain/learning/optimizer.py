"""How a block's weights follow their gradients: AdamW, or Muon for the matrices inside the block and AdamW for the rest.

torch has a Muon of its own, which orthogonalises in bfloat16: its bits are another processor's, and some processors cannot run
it at all. This one stays in float32, so that a task that is trained again gives the same bytes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from blocktrain.learning.model import Linear

INSIDE = (
    "layers.",
    "mix.",
    "correct.",
    "hand_on.",
)  # from the residual stream to the residual stream
STEEP = (
    3.4445,
    -4.7750,
    2.0315,
)  # Newton-Schulz with a steep start: five rounds bring singular values near one
ROUNDS = 5
MOMENTUM = 0.9
LENGTH = 0.4  # of a step, root mean square, in learning rates: twice that of AdamW's steps, which measured best


class AdamW(torch.optim.AdamW):
    """torch's own, taking its steps without asking for the compiler."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class Muon(Optimizer):
    """Momentum whose steps are made orthogonal: every direction in a matrix moves alike, also those with small gradients.

    A step is as long as the learning rate of AdamW wants it: both take the same one. Matrices that are stored side by side
    (`parts`) are treated each by itself.
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
    """All that moves one block, as one optimizer."""

    def __init__(
        self, block: nn.Module, kind: Literal["muon", "adamw"], *, weight_decay: float
    ) -> None:
        self._named = dict(block.named_parameters())
        linear = {f"{n}.weight": m for n, m in block.named_modules() if isinstance(m, Linear)}
        inside = {n: m for n, m in linear.items() if kind == "muon" and n.startswith(INSIDE)}
        others = [p for n, p in self._named.items() if n not in inside]
        groups = [
            {"params": [p for p in others if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in others if p.ndim <= 1], "weight_decay": 0.0},
        ]
        _spare_the_compiler()
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
        """What is remembered of every parameter, as `moment.name`; nothing before the first step."""
        state = {p: of_one for part in self._parts for p, of_one in part.state.items()}
        return {
            f"{moment}.{name}": t
            for name, p in self._named.items()
            for moment, t in state.get(p, {}).items()
        }

    def restore(self, moments: Mapping[str, Tensor]) -> None:
        """Continue with these moments; none of them: as new."""
        found: dict[nn.Parameter, dict[str, Tensor]] = {}
        for key, t in moments.items():
            moment, _, name = key.partition(".")
            if (parameter := self._named.get(name)) is not None:
                found.setdefault(parameter, {})[moment] = t.to(parameter.device)
        for part in self._parts:
            held = {p for group in part.param_groups for p in group["params"]}
            part.state.clear()
            part.state.update({p: of_one for p, of_one in found.items() if p in held})


def _spare_the_compiler() -> None:
    """An optimizer imports torch's compiler, two seconds at every worker's start, to tell it what not to compile: say it beforehand."""
    add_group = inspect.unwrap(Optimizer.add_param_group)
    setattr(add_group, "__dynamo_disable", add_group)
