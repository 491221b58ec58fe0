"""Tokens a second, and the estimated share of the device's peak."""

from __future__ import annotations

import pytest
import torch

from blocktrain.devices import DEVICES, find_device
from blocktrain.learning.threads import limited_threads
from blocktrain.learning.train import REFERENCE, Trainer
from blocktrain.shapes import flops_per_token
from blocktrain.terminal import speed
from blocktrain.worker.speed import SpeedMeter, measure_peak, peak_flops
from conftest import tiny_config


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 PCIe", "h100"),
        ("Tesla T4", "t4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("Voodoo 2", None),
        ("cpu", None),
    ],
)
def test_known_gpus_are_found_by_the_name_of_their_driver(name: str, known: str | None) -> None:
    assert find_device(name) == (DEVICES[known] if known else None)


def test_a_processor_is_measured_once() -> None:
    with limited_threads():
        peak = peak_flops("cpu", "float32")
        assert 1e8 < peak < 1e13
        assert peak_flops("cpu", "float32") == peak, "kept"
        assert measure_peak(torch.device("cpu"), torch.bfloat16) > 1e7


def test_the_meter_counts_tokens_and_operations() -> None:
    trainer = Trainer(tiny_config(), 1)
    meter = SpeedMeter(trainer)
    for _ in range(60):  # the first steps are forgotten: they were slower
        trainer.step += 1
        trainer.seconds += 1.0 if trainer.step <= 10 else 0.1
        fields = meter.after_step()
    assert fields["tokens_per_second"] == pytest.approx(4 * 16 / 0.1)
    operations = fields["tokens_per_second"] * flops_per_token(trainer.config, 1)
    share = operations / peak_flops("cpu", "float32")
    assert fields["peak_share"] == pytest.approx(share, abs=1e-4)
    assert speed(fields) == f"640 tokens/s, est. {share:.0%} of peak"
    assert speed({}) == ""


def test_the_reference_counts_all_its_layers() -> None:
    config = tiny_config()
    one, whole = flops_per_token(config, 1), flops_per_token(config, REFERENCE)
    head = 6 * config.width * 256
    assert whole - head == 3 * (one - head)
