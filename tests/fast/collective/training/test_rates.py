"""What a change of the batch does to an optimizer's options, against the formulas of the papers."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import Tensor, nn  # noqa: E402

from edl.collective.training.batch_size.noise import GradientNoise  # noqa: E402
from edl.collective.training.learning_rate import (  # noqa: E402
    AdaScale,
    Linear,
    Policy,
    RateScaling,
    SquareRoot,
    decay_for,
    epsilon_for,
)
from edl.collective.training.trainer import ElasticTrainer  # noqa: E402
from edl.errors import SettingsError  # noqa: E402


class Lamb(torch.optim.Adam):
    """One of those that are not PyTorch's own and have decays, too."""


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


def test_rmsprop_is_scaled_as_by_malladi() -> None:
    def rmsprop(rate: float, alpha: float, eps: float) -> Any:
        return lambda parameters: torch.optim.RMSprop(parameters, lr=rate, alpha=alpha, eps=eps)

    found, _ = trained(rmsprop(0.01, 0.99, 1e-3), SquareRoot())
    wanted, _ = trained(rmsprop(0.02, 1 - 4 * 0.01, 1e-3 / 2), None)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("moments", [None, False, True])
def test_other_optimizers_change_rate_only(moments: bool | None) -> None:
    """Of other optimizers only the rate is."""
    kind = torch.optim.NAdam if moments is None else torch.optim.Adam
    found, _ = trained(adam(0.01, 0.9, 0.99, 1e-3, kind), SquareRoot(moments=moments))
    plain, _ = trained(adam(0.02, 0.9, 0.99, 1e-3, kind), None)
    assert torch.allclose(found, plain, rtol=1e-12) is not bool(moments)


def test_a_smaller_batch_has_a_longer_memory() -> None:
    assert decay_for(0.9, 0.25) == pytest.approx(0.975)
    assert epsilon_for(1e-8, 0.25) == pytest.approx(2e-8)
    assert decay_for(0.9, 1.0) == 0.9


def test_too_large_batch_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """A batch too large for the rule is said."""
    with caplog.at_level(logging.WARNING, "edl.collective"):
        found, _ = trained(adam(0.01, 0.9, 0.99, 1e-3), SquareRoot(), base_batch=2)
    assert torch.isfinite(found).all()
    assert caplog.text.count("more than the square root rule is for") == 1


@pytest.mark.parametrize(("policy", "wanted"), [(Linear(1000), 4.0), (SquareRoot(1000), 2.0)])
def test_both_rules_may_warm_up(policy: Policy, wanted: float) -> None:
    """LARS takes the linear rule with a warm-up, LAMB the square root rule with one."""
    scaling, noise = RateScaling(policy, 64, 64), GradientNoise()
    scaling.set_batch(256, noise)
    assert scaling.factor(noise) == 1.0
    scaling.count_step(500, noise)
    assert scaling.factor(noise) == pytest.approx((1 + wanted) / 2)
    scaling.count_step(500, noise)
    assert scaling.factor(noise) == pytest.approx(wanted)
    assert math.isclose(RateScaling(SquareRoot(), 64, 256).factor(noise), 2.0), "at once, if nobody asks for a warm-up"
    with pytest.raises(SettingsError, match="warmup_samples=-1"):
        SquareRoot(-1)


@pytest.mark.parametrize(
    ("optimizer", "warned"),
    [(adam(0.01, 0.9, 0.99, 1e-3), True), (lambda parameters: torch.optim.SGD(parameters, lr=0.01), False)],
)
def test_adascale_with_adam_warns(optimizer: Any, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Adascale with adam is worth a warning."""
    with caplog.at_level(logging.WARNING, "edl.collective"):
        trained(optimizer, AdaScale())
    assert ("AdaScale is derived for SGD" in caplog.text) is warned
