"""The gradient noise: formulas against a quadratic problem whose noise is known, and averages."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.collective.training.batch_size.noise import GradientGroups, GradientNoise

TRUTH = np.array([3.0, -1.0, 0.5])
SPREADS = np.array([2.0, 0.5, 1.0])
VARIANCE = float(np.square(SPREADS).sum())
SQUARE = float(np.square(TRUTH).sum())


def groups_of(sizes: list[int], random: np.random.Generator) -> GradientGroups:
    """Of samples whose loss is |x - target|²/2 at x = 0, so that a sample's gradient is minus its target."""
    gradients = TRUTH + SPREADS * random.standard_normal((sum(sizes), 3))
    means = [part.mean(axis=0) for part in np.split(gradients, np.cumsum(sizes)[:-1])]
    weighted = sum(size * float(mean @ mean) for size, mean in zip(sizes, means, strict=True))
    whole = gradients.mean(axis=0)
    return GradientGroups(len(sizes), sum(sizes), weighted, float(whole @ whole))


@pytest.mark.parametrize("sizes", [[4, 4], [8, 8, 8, 8], [1, 2, 3, 10], [16, 1]])
def test_estimates_are_unbiased(sizes: list[int]) -> None:
    """Estimates are unbiased whatever the groups."""
    random = np.random.default_rng(1)
    estimates = np.array([groups_of(sizes, random).estimate() for _ in range(20_000)])
    errors = estimates.std(axis=0) / math.sqrt(len(estimates))
    assert np.abs(estimates.mean(axis=0) - (VARIANCE, SQUARE)).max() < 4 * errors.max()


def test_averages_find_the_noise_scale() -> None:
    random, noise = np.random.default_rng(2), GradientNoise()
    for _ in range(400):
        noise.add_step(groups_of([4, 4, 4, 3], random))
    assert noise.scale == pytest.approx(VARIANCE / SQUARE, rel=0.15)


def test_averages_follow_a_change() -> None:
    noise = GradientNoise()
    for square in (1.0, 9.0):
        for _ in range(500):
            noise.add_step(GradientGroups(2, 8, weighted_square=8 * square + 4.0, square=square))
    assert noise.variance == pytest.approx(4.0)
    assert noise.square == pytest.approx(9.0 - 4.0 / 8, rel=0.02)


@pytest.mark.parametrize(
    "groups", [GradientGroups(1, 8, 3.0, 1.0), GradientGroups(2, 8, math.inf, 1.0), GradientGroups(2, 8, 1.0, math.nan)]
)
def test_what_says_nothing_is_left_out(groups: GradientGroups) -> None:
    noise = GradientNoise()
    noise.add_step(groups)
    assert not noise.known


POSITIVE = st.floats(1e-6, 1e6)


@given(variance=st.floats(0, 1e6), square=st.floats(-1e3, 1e6), base=st.integers(1, 512), scale=st.integers(1, 64))
def test_gain_is_between_one_and_scale(variance: float, square: float, base: int, scale: int) -> None:
    """The gain is between one and the scale."""
    gain = GradientNoise(variance, square, 1.0).gain(base * scale, base)
    assert 1 - 1e-9 <= gain <= scale * (1 + 1e-9)


@given(
    noise=st.builds(GradientNoise, POSITIVE, POSITIVE, st.just(1.0)),
    batch=st.integers(1, 4096),
    base=st.integers(1, 4096),
)
def test_gain_is_one_at_the_base(noise: GradientNoise, batch: int, base: int) -> None:
    """The gain is one at the base and undone on the way back."""
    assert noise.gain(base, base) == pytest.approx(1.0)
    assert noise.gain(batch, base) * noise.gain(base, batch) == pytest.approx(1.0)


def test_gain_with_no_and_only_noise() -> None:
    """Without noise a larger batch gains nothing and with only noise all."""
    assert GradientNoise(0.0, 1.0, 1.0).gain(512, 64) == 1.0
    assert GradientNoise(1.0, 0.0, 1.0).gain(512, 64) == pytest.approx(8.0)
    assert (GradientNoise(0.0, 1.0).scale, GradientNoise(1.0, -0.1).scale) == (0.0, math.inf)


def test_the_state_is_all() -> None:
    first, second = GradientNoise(2.0, 3.0, 40.0), GradientNoise()
    second.load_state_dict(first.state_dict())
    assert second == first
