"""Muon and AdamW side by side: who moves what, how far, and what is remembered."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from blocktrain.learning.compose import build_block
from blocktrain.learning.optimizer import INSIDE, Optimizers, orthogonal
from conftest import tiny_config


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (32, 32)])
def test_orthogonal_keeps_directions_and_levels_their_lengths(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    singular = u.T @ orthogonal(matrix) @ v.T
    lengths = singular.diagonal()
    assert lengths.min() > 0.3 and lengths.max() < 1.3
    assert torch.allclose(singular, torch.diag(lengths), atol=1e-4)
    assert torch.equal(orthogonal(torch.zeros(shape)), torch.zeros(shape))


def first_step(kind: str, index: int) -> dict[str, float]:
    """Root mean square of the first step of every parameter, in learning rates."""
    block = build_block(tiny_config(), index)
    before = {name: p.detach().clone() for name, p in block.named_parameters()}
    for p in block.parameters():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    Optimizers(block, kind, weight_decay=0.0).step(1e-2)  # type: ignore[arg-type]
    return {
        name: ((p - before[name]).square().mean().sqrt() / 1e-2).item()
        for name, p in block.named_parameters()
    }


@pytest.mark.parametrize("index", [1, 3])
def test_muon_moves_the_matrices_inside_by_about_0_4_learning_rates(index: int) -> None:
    muon, adamw = first_step("muon", index), first_step("adamw", index)
    assert all(length == pytest.approx(1, rel=0.01) for length in adamw.values())
    inside = {name for name in muon if name.startswith(INSIDE) and not name.endswith("scale")}
    assert inside == {name for name, length in muon.items() if length != adamw[name]}
    assert all(0.2 < muon[name] < 0.6 for name in inside)


def test_every_parameter_is_remembered_by_its_own_optimizer() -> None:
    block = build_block(tiny_config(), 3)
    optimizer = Optimizers(block, "muon", weight_decay=0.1)
    assert optimizer.moments() == {}
    for p in block.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step(1e-3)
    moments = {name: t.clone() for name, t in optimizer.moments().items()}
    assert {name.partition(".")[2] for name in moments} == {
        name for name, _ in block.named_parameters()
    }
    assert {"momentum.mix.weight", "exp_avg.embed", "exp_avg_sq.embed", "step.embed"} <= set(
        moments
    )
    optimizer.step(1e-3)
    optimizer.restore(moments)
    assert all(torch.equal(t, moments[name]) for name, t in optimizer.moments().items())
    optimizer.restore({})
    assert optimizer.moments() == {}


def test_training_does_not_wait_for_the_compiler_of_torch() -> None:
    code = """
import sys, numpy
from blocktrain.config import Config
from blocktrain.learning.shards import memory_batches
from blocktrain.learning.train import Trainer
trainer = Trainer(Config(width=8, heads=2, context=8, batch=1, optimizer="muon", steps=2), 1)
ids = numpy.arange(100, dtype=numpy.uint8)
list(trainer.run(memory_batches(ids, context=8, batch=1), 2))
moments = {name.split(".")[0] for name in trainer.moments()}
sys.exit("torch._dynamo" in sys.modules or not moments > {"momentum", "exp_avg"})
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
