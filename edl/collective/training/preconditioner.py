"""By what adaptive optimizers divide a gradient, read from their state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["divisor_of", "is_adaptive", "is_warm"]

_WARM_STEPS = 10
"""After fewer steps a mean of squares is a matter of chance, as is the gradient that would be divided by its root: the
square of a quotient by the root mean square of k normal numbers has a mean from k = 3 on, a variance from k = 5 on."""

_MEANS = ("exp_avg_sq", "square_avg", "sum")


def is_adaptive(state: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether a parameter's state in the optimizer is of the kinds of Adam, RMSprop and Adagrad.

    Args:
        state: of one parameter, not empty.
        options: of its parameter group.
    """
    # Adadelta has a square_avg, but divides by more than that.
    return any(name in state for name in _MEANS) and "acc_delta" not in state and _step(state, options) is not None


def is_warm(state: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether an adaptive optimizer has seen enough gradients of a parameter."""
    return float(_step(state, options) or 0.0) >= _WARM_STEPS


def divisor_of(state: Mapping[str, Any], options: Mapping[str, Any]) -> Tensor | None:
    """By what an adaptive optimizer divides each element of a gradient, None if it is of another kind.

    What grows with the steps alone is left out, as if the mean of squares had been one from the beginning: estimates of
    several steps are averaged, and must be of one scale.
    """
    if not is_adaptive(state, options):
        return None
    step, eps = _step(state, options), options.get("eps", 0.0)
    found: Tensor
    if "exp_avg_sq" in state:
        found = state.get("max_exp_avg_sq", state["exp_avg_sq"])
        found = (found / (1 - options["betas"][1] ** step)).sqrt().add(eps)
    elif "square_avg" in state:
        found = state["square_avg"]
        if "grad_avg" in state:  # RMSprop, centered
            found = found.addcmul(state["grad_avg"], state["grad_avg"], value=-1).clamp_min(0)
        found = found.sqrt().add(eps) / (1 - options.get("alpha", 0.0) ** step) ** 0.5
    else:
        found = state["sum"].sqrt().add(eps) / step**0.5
    return found


def _step(state: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """How many steps the parameter has made, a number or a tensor; some optimizers count for the whole group."""
    return state.get("step", options.get("step"))
