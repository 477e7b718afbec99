"""What is read from an optimizer's state is what it really divides by: seen in the step that it makes."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from edl.collective.training.gradients import divisor_of, is_adaptive, is_warm  # noqa: E402

WITHOUT_MOMENTUM = (0.0, 0.9)


def stepped(kind: type[torch.optim.Optimizer], steps: int, **options: Any) -> tuple[Any, ...]:
    """The last step's change and gradient, the state after it, and the options."""
    generator = torch.Generator().manual_seed(2)
    one = torch.nn.Parameter(torch.zeros(50, dtype=torch.float64))
    optimizer = kind([one], lr=0.1, **options)  # type: ignore[call-arg]
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
    """A step is the gradient by the divisor."""
    change, grad, state, group = stepped(kind, 12, **options)
    assert is_adaptive(state, group)
    divisor = divisor_of(state, group)
    assert divisor is not None
    factors = change * divisor / grad  # the same for every element: the rate, and what grows with the steps alone
    torch.testing.assert_close(factors, factors[:1].expand(50), rtol=1e-5, atol=0.0)


def test_size_is_one_from_the_first_steps() -> None:
    """It is of one size from the first steps on."""
    for kind in (torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad):
        few, many = (stepped(kind, steps)[2:] for steps in (40, 160))
        sizes = [divisor_of(*one) for one in (few, many)]
        assert sizes[0] is not None
        assert sizes[1] is not None
        assert float(sizes[0].mean() / sizes[1].mean()) == pytest.approx(1.0, rel=0.1)


def test_it_is_warm_after_ten_steps() -> None:
    for kind in (torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.RAdam):
        assert [is_warm(*stepped(kind, steps)[2:]) for steps in (1, 9, 10)] == [False, False, True]


def test_group_counting_optimizer_is_known() -> None:
    """An optimizer that counts for the whole group is known."""
    state, options = {"exp_avg_sq": torch.full((2,), 0.19)}, {"betas": (0.9, 0.9), "eps": 0.0, "step": 2}
    assert is_adaptive(state, options)
    found = divisor_of(state, options)
    assert found is not None
    torch.testing.assert_close(found, torch.ones(2))


@pytest.mark.parametrize(
    ("state", "options"),
    [
        ({"momentum_buffer": torch.zeros(2)}, {}),
        ({"exp_avg_sq": torch.ones(2)}, {"betas": (0.9, 0.9)}),  # and no count of steps
        ({"square_avg": torch.ones(2), "acc_delta": torch.ones(2), "step": 20}, {"rho": 0.9}),
    ],
)
def test_other_kinds_are_not_guessed(state: dict[str, Any], options: dict[str, Any]) -> None:
    assert not is_adaptive(state, options)
    assert divisor_of(state, options) is None
