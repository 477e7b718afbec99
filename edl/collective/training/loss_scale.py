"""The scale of losses in mixed precision: a `torch.amp.GradScaler`, and where a step is with it; or none at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["LossScale"]


class LossScale:
    """Of the steps of one optimizer. Without a scaler all this does nothing but step."""

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self._scaler = scaler
        self._unscaled = False

    @property
    def factor(self) -> float:
        """By what losses are multiplied."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to take the gradient of."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the factor out of the optimizer's gradients, once a step."""
        if self._scaler is not None and not self._unscaled:
            self._unscaled = True  # even if it fails half-way: `forget` must undo it
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step the optimizer; False if the scaler skipped it because of infinite gradients."""
        if self._scaler is None:
            optimizer.step()
            return True
        before = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        self._unscaled = False
        return self._scaler.get_scale() >= before

    def forget(self) -> None:
        """Be as before a step that was not made."""
        if self._scaler is not None and self._unscaled:
            self._scaler.update(self._scaler.get_scale())  # begin anew with the same scale
            self._unscaled = False

    def state_dict(self) -> dict[str, Any] | None:
        """The scaler's, None without one."""
        return self._scaler.state_dict() if self._scaler is not None else None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from there, if there is a scaler now and was one then."""
        if self._scaler is not None and state is not None:
            self._scaler.load_state_dict(state)
