"""Learning rates when the batch changes: each policy's numbers, and what it does to an optimizer, by the papers."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edl.collective.training.batch_size.noise import GradientNoise
from edl.collective.training.gradients import divisor_of, is_adaptive
from edl.collective.training.learning_rate import (
    AdaScale,
    Linear,
    Policy,
    RateScaling,
    SquareRoot,
)
from edl.collective.training.trainer import ElasticTrainer
from edl.errors import SettingsError


def trained(optimizer: Any, policy: Policy, base_batch: int = 8) -> tuple[Tensor, torch.optim.Optimizer]:
    """A weight after five steps of 32 samples, and the optimizer."""
    torch.manual_seed(3)
    model = nn.Linear(4, 1).double()
    made = optimizer(model.parameters())
    trainer = ElasticTrainer(model, made, global_batch=32, base_batch=base_batch, policy=policy)
    for step in range(5):
        inputs = torch.randn(32, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for some in trainer.micro_batches(inputs):
            trainer.backward((model(some) - 1).square().mean())
        trainer.step()
    return model.weight.detach(), made


def adam(rate: float, beta1: float, beta2: float, eps: float, kind: Any = torch.optim.Adam) -> Any:
    return lambda parameters: kind(parameters, lr=rate, betas=(beta1, beta2), eps=eps)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_is_scaled_as_by_malladi(kind: Any) -> None:
    """1 - S(1 - beta) for both decays, epsilon / sqrt(S), the rate times sqrt(S)."""
    found, optimizer = trained(adam(0.01, 0.9, 0.99, 1e-3, kind), SquareRoot())
    wanted, _ = trained(adam(0.02, 1 - 4 * 0.1, 1 - 4 * 0.01, 1e-3 / 2, kind), None)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.01, (0.9, 0.99), 1e-3), "as the user gave them"
    plain, _ = trained(adam(0.02, 0.9, 0.99, 1e-3, kind), None)
    assert not torch.allclose(found, plain, rtol=1e-4)


@pytest.mark.parametrize("moments", [None, False, True])
def test_other_optimizers_change_rate_only(moments: bool | None) -> None:
    kind = torch.optim.NAdam if moments is None else torch.optim.Adam
    found, _ = trained(adam(0.01, 0.9, 0.99, 1e-3, kind), SquareRoot(moments=moments))
    plain, _ = trained(adam(0.02, 0.9, 0.99, 1e-3, kind), None)
    assert torch.allclose(found, plain, rtol=1e-12) is not bool(moments)


def test_too_large_batch_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "edl.collective"):
        found, _ = trained(adam(0.01, 0.9, 0.99, 1e-3), SquareRoot(), base_batch=2)
    assert torch.isfinite(found).all()
    assert caplog.text.count("more than the square root rule is for") == 1


UNKNOWN = GradientNoise()
HALF = GradientNoise(variance=64.0, square=1.0, steps=10.0)  # at a batch of 64, as much noise as signal


@pytest.mark.parametrize(
    ("policy", "factor"),
    [
        (None, 1.0),
        (Linear(0), 4.0),
        (SquareRoot(), 2.0),
        (SquareRoot(1000), 1.0),  # until it is warm
        (AdaScale(), 1.6),
        (lambda scale: scale**0.75, 4**0.75),
    ],
)
def test_a_batch_four_times_the_base(policy: Policy, factor: float) -> None:
    scaling = RateScaling(policy, base_batch=64, batch=64)
    scaling.set_batch(256, HALF)
    assert scaling.factor(HALF) == pytest.approx(factor)


@pytest.mark.parametrize("policy", [None, Linear(1000), SquareRoot(), AdaScale(), lambda scale: scale])
def test_base_batch_needs_no_policy(policy: Policy) -> None:
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


def test_adascale_progress_is_invariant() -> None:
    scaling = RateScaling(AdaScale(), base_batch=64, batch=256)
    scaling.count_step(256, HALF)
    assert scaling.progress == pytest.approx(1.6 * 64)
    scaling.count_step(128, HALF)  # the last batch of an epoch counts in proportion
    assert scaling.progress == pytest.approx(2.4 * 64)
    assert scaling.samples == 384


@pytest.mark.parametrize(("batch", "factor"), [(256, 1.0), (32, 0.5)])
def test_adascale_is_careful_without_noise(batch: int, factor: float) -> None:
    assert RateScaling(AdaScale(), base_batch=64, batch=batch).factor(UNKNOWN) == factor


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_users_function_must_return_a_rate(value: float) -> None:
    with pytest.raises(SettingsError, match="scale of 2"):
        RateScaling(lambda _: value, base_batch=64, batch=128).factor(UNKNOWN)


def test_what_cannot_be_is_refused() -> None:
    for rule in (Linear, SquareRoot):
        with pytest.raises(SettingsError, match="warmup_samples=-1"):
            rule(-1)
    with pytest.raises(SettingsError, match="base_batch=0"):
        RateScaling(None, base_batch=0, batch=1)


WITHOUT_MOMENTUM = (0.0, 0.9)


def stepped(kind: type[torch.optim.Optimizer], steps: int, **options: Any) -> tuple[Any, ...]:
    """The last step's change and gradient, the state after it, and the options."""
    generator = torch.Generator().manual_seed(2)
    one = torch.nn.Parameter(torch.zeros(50, dtype=torch.float64))
    optimizer = kind([one], lr=0.1, **options)
    before = one.detach().clone()
    for _ in range(steps):
        before = one.detach().clone()
        one.grad = torch.randn(50, generator=generator, dtype=torch.float64) + 0.5
        optimizer.step()
    return one.detach() - before, one.grad, optimizer.state[one], optimizer.param_groups[0]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Adam, {"betas": WITHOUT_MOMENTUM}),
        (torch.optim.Adam, {"betas": WITHOUT_MOMENTUM, "eps": 0.1}),
        (torch.optim.Adam, {"betas": WITHOUT_MOMENTUM, "amsgrad": True}),
        (torch.optim.AdamW, {"betas": WITHOUT_MOMENTUM, "weight_decay": 0.0}),
        (torch.optim.RMSprop, {"alpha": 0.9}),
        (torch.optim.RMSprop, {"alpha": 0.9, "centered": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adagrad, {"initial_accumulator_value": 2.0}),
    ],
)
def test_step_is_gradient_by_divisor(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    change, grad, state, group = stepped(kind, 12, **options)
    assert is_adaptive(state, group)
    divisor = divisor_of(state, group)
    assert divisor is not None
    factors = change * divisor / grad  # the same for every element: the rate, and what grows with the steps alone
    torch.testing.assert_close(factors, factors[:1].expand(50), rtol=1e-5, atol=0.0)
