"""The optimizer in a step: its options by the policy, and the scale of losses in mixed precision."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from edl.collective.training.learning_rate import AdaScale, Policy, SquareRoot, decay_for, epsilon_for

__all__ = ["LossScale", "OptionScaling"]

logger = logging.getLogger("edl.collective")


class LossScale:
    """The scale of losses for an optimizer, and where a step is with it. Without a scaler the scale is 1.

    Args:
        scaler: of the user; None without mixed precision.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self._scaler = scaler
        self._unscaled = False

    @property
    def factor(self) -> float:
        """The factor of losses."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss to take the gradient of."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the factor out of the optimizer's gradients, once a step."""
        if self._scaler is not None and not self._unscaled:
            self._unscaled = True  # even if it fails half-way: `discard_step` must undo it
            self._scaler.unscale_(optimizer)

    def step_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step the optimizer.

        Returns:
            False if the scaler skipped the step because of infinite gradients.
        """
        if self._scaler is None:
            optimizer.step()
            return True
        before = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        self._unscaled = False
        return self._scaler.get_scale() >= before

    def discard_step(self) -> None:
        """Be as before a step that was not made."""
        if self._scaler is not None and self._unscaled:
            self._scaler.update(self._scaler.get_scale())  # begin anew with the same scale
            self._unscaled = False

    def state_dict(self) -> dict[str, Any] | None:
        """Return the scaler's state, None without a scaler."""
        return self._scaler.state_dict() if self._scaler is not None else None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from a saved state, if there is a scaler, and was when it was saved."""
        if self._scaler is not None and state is not None:
            self._scaler.load_state_dict(state)


class OptionScaling:
    """Scales the options of an optimizer for the time of a step: schedules and checkpoints see the user's.

    Args:
        optimizer: any of PyTorch's, or another whose parameter groups have `lr`.
        policy: decides whether more than the rate is scaled.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, policy: Policy) -> None:
        self._optimizer = optimizer
        self._moments = isinstance(policy, SquareRoot) and _scales_moments(optimizer, policy)
        self._warned = False
        if isinstance(policy, AdaScale) and _is_adaptive(optimizer):
            logger.warning(
                "AdaScale is derived for SGD (Johnson et al. 2020), where a step is the rate times the gradient; %s "
                "divides the gradient by its own scale, so its gain says little there: SquareRoot() is the rule for "
                "Adam and RMSprop",
                type(optimizer).__name__,
            )

    @contextmanager
    def apply(self, factor: float, scale: float) -> Iterator[None]:
        """Use other options for the block only."""
        groups = self._optimizer.param_groups
        changed = [self._scaled(group, factor, scale) for group in groups]
        before = [{name: group[name] for name in new} for group, new in zip(groups, changed, strict=True)]
        try:
            for group, new in zip(groups, changed, strict=True):
                group.update(new)
            yield
        finally:
            for group, old in zip(groups, before, strict=True):
                group.update(old)

    def _scaled(self, group: dict[str, Any], factor: float, scale: float) -> dict[str, Any]:
        new: dict[str, Any] = {"lr": group["lr"] * factor} if factor != 1.0 else {}
        if not self._moments or scale == 1.0:
            return new
        if "betas" in group:
            new["betas"] = tuple(self._decay(beta, scale) for beta in group["betas"])
        if "alpha" in group:
            new["alpha"] = self._decay(group["alpha"], scale)
        if "eps" in group:
            new["eps"] = epsilon_for(group["eps"], scale)
        return new

    def _decay(self, decay: float, scale: float) -> float:
        new = decay_for(float(decay), scale)
        if new < 0 and not self._warned:
            self._warned = True
            logger.warning(
                "a batch of %.4g times the base batch is more than the square root rule is for: 1 - %g times that is "
                "above 1, and 0 is taken for the decay. Choose a larger base_batch, or SquareRoot(moments=False)",
                scale,
                decay,
            )
        return max(new, 0.0)


def _scales_moments(optimizer: torch.optim.Optimizer, policy: SquareRoot) -> bool:
    if policy.moments is not None:
        return policy.moments
    return isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop))


def _is_adaptive(optimizer: torch.optim.Optimizer) -> bool:
    kinds = (torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta)
    return isinstance(optimizer, kinds) or any("betas" in group for group in optimizer.param_groups)
