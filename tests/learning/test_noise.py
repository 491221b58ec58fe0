"""Noise levels: equal shares, ranges, samples, EDM's coefficients, the Euler step."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from blocktrain.config import Config
from blocktrain.learning.noise import NoiseLevels, edges_by_loss, edm, euler_step, noise_levels
from conftest import tiny_config

DEFAULT = noise_levels(Config())


@st.composite
def levels(draw: st.DrawFn) -> NoiseLevels:
    low = draw(st.floats(0.05, 2))
    distribution = NoiseLevels(
        draw(st.floats(-2, 1)), draw(st.floats(0.5, 2)), low, low * draw(st.floats(1.5, 50))
    )
    assume(
        distribution.mass_below(distribution.sigma_max)
        - distribution.mass_below(distribution.sigma_min)
        > 1e-3
    )
    return distribution


def test_the_edges_of_four_blocks() -> None:
    assert DEFAULT.edges(4) == pytest.approx([1, 1.238, 1.623, 2.429, 10], abs=5e-4)


@given(levels(), st.integers(1, 12))
def test_edges_rise_and_hold_equal_mass(distribution: NoiseLevels, blocks: int) -> None:
    edges = distribution.edges(blocks)
    assert len(edges) == blocks + 1
    assert (edges[0], edges[-1]) == (distribution.sigma_min, distribution.sigma_max)
    assert all(a < b for a, b in itertools.pairwise(edges))
    share = (
        distribution.mass_below(distribution.sigma_max)
        - distribution.mass_below(distribution.sigma_min)
    ) / blocks
    for a, b in itertools.pairwise(edges):
        assert distribution.mass_below(b) - distribution.mass_below(a) == pytest.approx(
            share, rel=1e-9
        )


def test_named_edges_cut_the_range_but_not_that_of_a_tail() -> None:
    config = tiny_config(
        objective="denoise", compose="euler", tail=4, blocks=3, noise_edges="1.5,4"
    )
    assert noise_levels(config).edges(3) == [1, 1.5, 4, 10]
    assert noise_levels(config).ranges(3, 0.0)[0] == (4, 10)
    assert noise_levels(config, tail=True).edges(3)[1:3] != [1.5, 4]


@given(
    st.dictionaries(st.floats(0.5, 20), st.floats(0, 10), min_size=2, max_size=12),
    st.integers(1, 8),
)
def test_edges_by_loss_rise_from_end_to_end(curve: dict[float, float], blocks: int) -> None:
    assume(max(curve) > 1.5 * min(curve))
    edges = edges_by_loss(curve, blocks)
    assert (edges[0], edges[-1], len(edges)) == (min(curve), max(curve), blocks + 1)
    assert all(a < b for a, b in itertools.pairwise(edges))


def test_edges_by_loss_share_out_its_rise() -> None:
    curve = {1.0: 0.0, 2.0: 8.0, 4.0: 8.0, 8.0: 8.0}  # z tells something below 2 only
    edges = edges_by_loss(curve, 4)
    assert edges[:4] == pytest.approx([1.0, 2**0.25, 2**0.5, 2**0.75], rel=0.05)
    flat = edges_by_loss(dict.fromkeys([1.0, 2.0, 4.0], 3.0), 2)
    assert flat == pytest.approx([1.0, 2.0, 4.0])


@given(levels(), st.integers(1, 8))
def test_the_first_block_owns_the_highest_noise(distribution: NoiseLevels, blocks: int) -> None:
    ranges = distribution.ranges(blocks, 0.0)
    assert ranges[0].high == distribution.sigma_max
    assert ranges[-1].low == distribution.sigma_min
    for above, below in itertools.pairwise(ranges):
        assert above.low == pytest.approx(below.high)


@given(levels(), st.integers(2, 8), st.floats(0, 1))
def test_ranges_overlap_by_gamma_of_their_log_width(
    distribution: NoiseLevels, blocks: int, gamma: float
) -> None:
    for plain, wide in zip(
        distribution.ranges(blocks, 0.0), distribution.ranges(blocks, gamma), strict=True
    ):
        extra = gamma * math.log(plain.high / plain.low)
        assert math.log(wide.low) == pytest.approx(
            max(math.log(plain.low) - extra, math.log(distribution.sigma_min))
        )
        assert math.log(wide.high) == pytest.approx(
            min(math.log(plain.high) + extra, math.log(distribution.sigma_max))
        )


@given(levels(), st.integers(1, 6), st.floats(0, 0.5))
def test_samples_stay_in_range_and_follow_the_distribution(
    distribution: NoiseLevels, blocks: int, gamma: float
) -> None:
    uniform = torch.linspace(0, 1 - 2**-24, 65)
    for part in distribution.ranges(blocks, gamma):
        sigma = distribution.sample(part, uniform)
        assert sigma.dtype == torch.float32
        assert part.low * (1 - 1e-6) <= sigma.min() and sigma.max() <= part.high * (1 + 1e-6)
        low, high = distribution.mass_below(part.low), distribution.mass_below(part.high)
        below = torch.tensor(
            [(distribution.mass_below(float(s)) - low) / (high - low) for s in sigma]
        )
        # A float32 sigma cannot resolve a narrow range better than its own rounding.
        slack = 1e-5 + 1e-6 / math.log(part.high / part.low)
        assert torch.allclose(below, uniform, atol=slack, rtol=0)


def test_the_tail_has_its_own_lower_end() -> None:
    config = tiny_config(objective="denoise", compose="euler", tail=4, tail_sigma_min=0.2)
    assert noise_levels(config).sigma_min == 1.0
    assert noise_levels(config, tail=True).sigma_min == 0.2
    assert noise_levels(config, tail=True).sigma_max == config.sigma_max


def test_edm_without_noise_keeps_z_and_with_all_noise_ignores_it() -> None:
    none, all_ = edm(torch.tensor(1e-6), 0.5), edm(torch.tensor(1e6), 0.5)
    assert none.skip.item() == pytest.approx(1)
    assert none.out.item() == pytest.approx(0, abs=1e-5)
    assert none.in_.item() == pytest.approx(1 / 0.5)
    assert all_.skip.item() == pytest.approx(0, abs=1e-9)
    assert all_.out.item() == pytest.approx(0.5)
    assert all_.weight.item() == pytest.approx(1 / 0.5**2)


@given(st.floats(0.01, 100), st.floats(0.1, 2))
def test_edm_by_its_definition(sigma: float, data: float) -> None:
    c = edm(torch.tensor(sigma, dtype=torch.float64), data)
    variance = sigma**2 + data**2
    assert c.skip.item() == pytest.approx(data**2 / variance)
    assert c.out.item() == pytest.approx(sigma * data / math.sqrt(variance))
    assert c.in_.item() ** 2 * variance == pytest.approx(1)  # F sees unit variance
    assert c.noise.item() == pytest.approx(math.log(sigma) / 4)
    assert c.weight.item() * c.out.item() ** 2 == pytest.approx(
        1
    )  # the weight undoes the output's scale


def test_euler_step_leaves_a_fixed_point_and_lands_on_the_estimate() -> None:
    z, denoised = torch.randn(3, 5), torch.randn(3, 5)
    assert torch.equal(euler_step(z, z, 4.0, 2.0), z)
    assert torch.allclose(euler_step(z, denoised, 4.0, 0.0), denoised, atol=1e-6)
    assert torch.allclose(euler_step(z, denoised, 4.0, 2.0), (z + denoised) / 2, atol=1e-6)
