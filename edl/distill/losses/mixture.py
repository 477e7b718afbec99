"""The PyTorch operations for `edl.distill.divergences`, and `DistillLoss`, which mixes a soft and a hard loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from edl.distill.divergences import FRAMEWORKS, Framework, MixedLoss
from edl.errors import SettingsError


class _Torch(Framework):
    module = torch

    def tensor(self, value: Any, like: Tensor) -> Tensor:
        if isinstance(value, np.ndarray):  # shares its memory if possible
            return torch.from_numpy(value if value.flags.writeable else value.copy()).to(like.device)
        if not isinstance(value, Tensor):
            raise SettingsError(f"labels are {type(value).__name__}: expected a tensor or a numpy array")
        return value.to(like.device)

    def cast(self, tensor: Tensor, dtype: Any) -> Tensor:
        return tensor.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)

    def pick(self, tensor: Tensor, ids: Tensor) -> Tensor:
        return tensor.gather(-1, ids)

    def put(self, tensor: Tensor, ids: Tensor, value: float) -> Tensor:
        return tensor.scatter(-1, ids, value)

    def count(self, like: Tensor, ids: Tensor, counted: Tensor) -> Tensor:
        return torch.zeros(like.shape, dtype=torch.int32, device=like.device).scatter_add(-1, ids, counted.int())

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts), dim=-1)

    def can_look(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and tensor.numel() > 0


TORCH = _Torch()
FRAMEWORKS.append(TORCH)


class DistillLoss(MixedLoss, nn.Module):
    """A soft loss against the teacher mixed with the cross-entropy against the true labels.

    ::

        loss = DistillLoss(temperature=4.0, alpha=0.9)
        loss(student(images), soft_labels, labels).backward()

    Args:
        temperature: Temperature T of the soft loss; "mse" does not use it. With `TopK` labels, it must equal their
            temperature.
        alpha: Weight of the soft loss, from 0 to 1; the hard loss gets the rest.
        soft: Kind of soft loss: "kl", "cross_entropy" or "mse" (of logits).
        teacher_is: Kind of the teacher's outputs; see `soft_cross_entropy`.
        reduction: Reduction over rows; see `edl.distill.losses`.

    Raises:
        SettingsError: A value is invalid.
    """
