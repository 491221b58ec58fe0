"""Drafting: the fast block against the plain one, what sweeps cost, and how much to draft."""

from __future__ import annotations

import pytest
import torch

from blocktrain.errors import ConfigError
from blocktrain.learning.compose import Model
from blocktrain.learning.generate import Drafter, Sampler, Tokens, window_start, write_with
from blocktrain.serving.blocks import FanBlocks
from blocktrain.serving.entry.drafting import (
    DraftBlock,
    LinearCost,
    LinkCost,
    Pace,
    SweepMeter,
    exact_seconds,
    expected_tokens,
    fan_sweep,
    ring_sweep,
    sweep_seconds,
)
from conftest import random_model, tiny_config

CONTEXT = 16
FUSE = random_model(tiny_config(context=CONTEXT))
DENOISE = random_model(tiny_config(context=CONTEXT, compose="pool", objective="denoise"))


SHARED = [random_model(model.config.replace(embedding="shared")) for model in (FUSE, DENOISE)]


@pytest.mark.parametrize("model", [FUSE, DENOISE, *SHARED])
def test_the_fast_drafter_has_the_bits_of_the_plain_one(model: Model) -> None:
    with torch.inference_mode():
        plain, lean = (
            model.drafter(),
            DraftBlock(model.config, FanBlocks(model.config, {1: model.blocks[0]}, "")),
        )
        text = bytes(range(60, 60 + CONTEXT))
        for start, end in [
            (0, 1),
            (1, 2),
            (2, 6),
            *((i, i + 1) for i in range(6, CONTEXT)),
            (3, 4),
            (4, 5),
        ]:
            expected = plain(torch.tensor([list(text[start:end])]), start)[0, -1]
            assert torch.equal(lean.read(text[start:end], start), expected)
        with pytest.raises(ValueError, match="context"):
            lean.read(text, 0)
            lean.read(b"x", CONTEXT)


def test_a_drafter_keeps_its_guesses_as_long_as_the_text_agrees() -> None:
    with torch.inference_mode():
        lean = DraftBlock(FUSE.config, FanBlocks(FUSE.config, {1: FUSE.blocks[0]}, ""))
        drafter, sampler = Drafter(lean.read, Sampler(seed=2)), Sampler(seed=2)

        def local_draft(text: Tokens, count: int) -> Tokens:
            return tuple(write_with(FUSE.drafter(), text, count, CONTEXT, sampler))

        prompt = tuple(b"abcd")
        first = drafter.draft(prompt, 0, 6)
        assert first == local_draft(prompt, 6)
        assert drafter.ready(prompt + first[:2]) == 4
        assert drafter.draft(prompt + first[:2], 0, 7) == local_draft(prompt + first[:2], 7)
        other = prompt + first[:3] + (first[3] ^ 1,)
        assert drafter.ready(other) == 0
        assert drafter.draft(other, 0, 5) == local_draft(other, 5)
        longer = tuple(range(30))
        assert drafter.draft(longer, window_start(30, CONTEXT), 2) == local_draft(longer, 2)


def test_a_block_of_the_paper_cannot_draft() -> None:
    paper = random_model(tiny_config(compose="euler", objective="denoise", skip="edm"))
    with pytest.raises(ConfigError, match="autoregressive"):
        DraftBlock(paper.config, FanBlocks(paper.config, {1: paper.blocks[0]}, ""))


def test_predicted_sweeps() -> None:
    line = LinkCost(rtt=0.08, bits=100e6, overhead=0.001)
    assert fan_sweep(
        10, line, 3 * 512, LinearCost(0.002), LinearCost(0.001, 1e-4)
    ) == pytest.approx(0.08 + 0.001 + 0.0012288 + 0.002 + 0.002)
    assert ring_sweep(1, line, 3, 512, LinearCost(0.002)) == pytest.approx(
        2 * (0.04 + 0.001 + 0.00004096) + 3 * 0.002 + 0.041
    )
    assert expected_tokens(0.5, 3) == 1.875
    assert expected_tokens(1.0, 3) == 4
    assert exact_seconds(0.0, 0, 1.0, 0.08) == 0.08
    assert sweep_seconds(0.0, 96, 2, 0.001, lambda _: 0.1) == pytest.approx(
        (0.2 + 0.001 * (96 + 95 + 94)) / 96
    )
    assert sweep_seconds(1.0, 96, 2, 0.001, lambda _: 0.1) == pytest.approx((0.1 + 0.001 * 96) / 96)


def test_a_meter_learns_the_line_of_sweeps_and_forgets_an_old_one() -> None:
    meter = SweepMeter()
    for base in (0.2, 0.08):
        for m in [1, 33, 17, 5] * 15:
            meter.add(m, base + 1e-3 * m)
        assert meter(9) == pytest.approx(base + 9e-3, rel=0.02)
        assert meter(30) > meter(2)


def train_pace(sweep: float, draft: float, right: int, of: int) -> Pace:
    pace = Pace()
    for _ in range(60):
        pace.sweep.add(5, sweep)
        pace.record_draft(of, draft * of)
        pace.record_verification(right, of)
    return pace


def test_drafts_are_long_on_slow_lines_and_off_on_fast_ones() -> None:
    assert train_pace(0.085, 0.0005, 8, 16).best_draft(32) >= 12
    assert train_pace(0.085, 0.0005, 8, 16).best_draft(5) == 5
    assert train_pace(0.085, 0.0005, 0, 16).best_draft(32) <= 8
    assert train_pace(0.001, 0.002, 8, 16).best_draft(32) == 0
    off = train_pace(0.085, 0.0005, 0, 1)
    low = off.acceptance
    for _ in range(300):
        off.record_skip()
    assert low < 0.3
    assert off.acceptance > 0.8
