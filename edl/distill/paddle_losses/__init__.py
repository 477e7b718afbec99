"""Losses of a student that learns from soft labels, for PaddlePaddle.

The same definitions as in `edl.distill.losses`, whose documentation holds here: logits [rows, ..., classes], computed
in float32 or more, multiplied by T², forward KL, no gradient to the teacher.
"""

from __future__ import annotations

from edl.distill.paddle_losses.divergences import (
    kl_divergence,
    logit_mse,
    soft_cross_entropy,
    token_loss,
    top_k_kl,
)
from edl.distill.paddle_losses.mixture import DistillLoss

__all__ = ["DistillLoss", "kl_divergence", "logit_mse", "soft_cross_entropy", "token_loss", "top_k_kl"]
