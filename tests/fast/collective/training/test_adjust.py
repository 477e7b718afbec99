"""Learning rates when the batch changes: each policy's numbers, warm-up, progress, and state."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.collective.training.batch_size.noise import GradientNoise
from edl.collective.training.learning_rate import AdaScale, Linear, Policy, RateScaling, SquareRoot, needs_noise
from edl.errors import SettingsError

UNKNOWN = GradientNoise()
HALF = GradientNoise(variance=64.0, square=1.0, steps=10.0)  # at a batch of 64, as much noise as signal


@pytest.mark.parametrize(
    ("policy", "factor"),
    [(None, 1.0), (Linear(0), 4.0), (SquareRoot(), 2.0), (AdaScale(), 1.6), (lambda scale: scale**0.75, 4**0.75)],
)
def test_a_batch_four_times_the_base(policy: Policy, factor: float) -> None:
    assert RateScaling(policy, base_batch=64, batch=256).factor(HALF) == pytest.approx(factor)


@pytest.mark.parametrize("policy", [None, Linear(1000), SquareRoot(), AdaScale(), lambda scale: scale])
def test_base_batch_needs_no_policy(policy: Policy) -> None:
    """At the base batch no policy does anything."""
    scaling = RateScaling(policy, base_batch=64, batch=64)
    for _ in range(3):
        assert scaling.factor(HALF) == pytest.approx(1.0)
        scaling.count_step(64, HALF)
    assert scaling.progress == pytest.approx(scaling.samples) == 192


def test_warm_up_only_for_larger_rates() -> None:
    """A larger rate is reached over the warm up and a smaller one at once."""
    scaling = RateScaling(Linear(warmup_samples=1000), base_batch=100, batch=400)
    factors = []
    for _ in range(4):
        factors.append(scaling.factor(UNKNOWN))
        scaling.count_step(400, UNKNOWN)
    assert factors == pytest.approx([1.0, 2.2, 3.4, 4.0])
    scaling.set_batch(200, UNKNOWN)
    assert scaling.factor(UNKNOWN) == 2.0
    scaling.set_batch(600, UNKNOWN)
    assert scaling.factor(UNKNOWN) == 2.0
    scaling.count_step(500, UNKNOWN)
    assert scaling.factor(UNKNOWN) == pytest.approx(4.0)


def test_second_change_goes_on_in_warm_up() -> None:
    """A second change within the warm up goes on from where it was."""
    scaling = RateScaling(Linear(1000), base_batch=100, batch=300)
    scaling.count_step(500, UNKNOWN)
    scaling.set_batch(600, UNKNOWN)
    assert scaling.factor(UNKNOWN) == pytest.approx(2.0)


def test_adascale_progress_is_invariant() -> None:
    """Progress of adascale is in scale invariant steps."""
    scaling = RateScaling(AdaScale(), base_batch=64, batch=256)
    scaling.count_step(256, HALF)
    assert scaling.progress == pytest.approx(1.6 * 64)
    scaling.count_step(128, HALF)  # the last batch of an epoch counts in proportion
    assert scaling.progress == pytest.approx(2.4 * 64)
    assert scaling.samples == 384


@pytest.mark.parametrize(("batch", "factor"), [(256, 1.0), (32, 0.5)])
def test_adascale_is_careful_without_noise(batch: int, factor: float) -> None:
    """Adascale is careful as long as it knows no noise."""
    assert RateScaling(AdaScale(), base_batch=64, batch=batch).factor(UNKNOWN) == factor


@given(batches=st.lists(st.integers(1, 512), min_size=1, max_size=10), stop=st.integers(0, 9))
def test_saved_run_goes_on_the_same(batches: list[int], stop: int) -> None:
    """A saved run goes on as the one that was not interrupted."""

    def run(scaling: RateScaling, sizes: list[int]) -> list[float]:
        factors = []
        for size in sizes:
            scaling.set_batch(size, UNKNOWN)
            factors.append(scaling.factor(UNKNOWN))
            scaling.count_step(size, UNKNOWN)
        return factors

    whole, first, second = (RateScaling(Linear(700), base_batch=64, batch=64) for _ in range(3))
    wanted = run(whole, batches)
    found = run(first, batches[:stop])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert found + run(second, batches[stop:]) == wanted
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_users_function_must_return_a_rate(value: float) -> None:
    with pytest.raises(SettingsError, match="scale of 2"):
        RateScaling(lambda _: value, base_batch=64, batch=128).factor(UNKNOWN)


def test_only_adascale_measures_noise() -> None:
    assert [needs_noise(one) for one in (None, Linear(0), SquareRoot(), AdaScale())] == [False, False, False, True]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(SettingsError, match="warmup_samples=-1"):
        Linear(-1)
    with pytest.raises(SettingsError, match="base_batch=0"):
        RateScaling(None, base_batch=0, batch=1)
