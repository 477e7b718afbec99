"""PaddlePaddle losses for a student that learns from soft labels; `edl.distill.losses` documents them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
from paddle import nn

from edl.distill.divergences import (
    FRAMEWORKS,
    Framework,
    MixedLoss,
    kl_divergence,
    logit_mse,
    soft_cross_entropy,
    token_loss,
    top_k_kl,
)
from edl.errors import SettingsError

__all__ = ["DistillLoss", "kl_divergence", "logit_mse", "soft_cross_entropy", "token_loss", "top_k_kl"]


class _Paddle(Framework):  # paddle has no type annotations
    module = paddle

    def tensor(self, value: Any, like: Any) -> Any:
        if isinstance(value, np.ndarray):
            return paddle.to_tensor(value, place=like.place)
        if not isinstance(value, paddle.Tensor):
            raise SettingsError(f"labels are {type(value).__name__}: expected a tensor or a numpy array")
        return value

    def cast(self, tensor: Any, dtype: Any) -> Any:
        return tensor.astype(dtype)

    def pick(self, tensor: Any, ids: Any) -> Any:
        return paddle.take_along_axis(tensor, ids, axis=-1)

    def put(self, tensor: Any, ids: Any, value: float) -> Any:
        return paddle.put_along_axis(tensor, ids, paddle.to_tensor(value, tensor.dtype, place=tensor.place), -1)

    def count(self, like: Any, ids: Any, counted: Any) -> Any:
        zeros = paddle.zeros(like.shape, "int32")
        return paddle.put_along_axis(zeros, ids, counted.astype("int32"), -1, reduce="add")

    def join(self, parts: Sequence[Any]) -> Any:
        return paddle.concat(list(parts), axis=-1)

    def can_look(self, tensor: Any) -> bool:
        return bool(tensor.place.is_cpu_place() and tensor.size > 0)


FRAMEWORKS.append(_Paddle())


class DistillLoss(MixedLoss, nn.Layer):
    """A soft loss against the teacher mixed with the cross-entropy against the true labels, as a Paddle layer.

    The arguments are those of `edl.distill.losses.DistillLoss`, which documents them.
    """
