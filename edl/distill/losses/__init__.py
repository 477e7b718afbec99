"""PyTorch losses for a student that learns from soft labels; `edl.distill.paddle_losses` is the PaddlePaddle version.

Logits are [rows, ..., classes]. Losses are computed in float32 (in float64 if the student's outputs are float64),
whatever the precision of the labels and of autocast; no gradient flows to the teacher. Losses over probabilities at a
temperature T are multiplied by T², so that their gradients keep the same size relative to a hard loss when T changes
(Hinton, Vinyals, Dean, "Distilling the Knowledge in a Neural Network", 2015, section 2). `reduction` is "mean" over all
rows and positions, "sum", or "none" for [rows, ...]. This "mean" is called `batchmean` in `torch.nn.KLDivLoss`, whose
own "mean" also divides by the number of classes. Invalid shapes, types and values raise `SettingsError`; values are
checked only on the CPU.
"""

from __future__ import annotations

from edl.distill.divergences import (
    Reduction,
    TeacherIs,
    kl_divergence,
    logit_mse,
    soft_cross_entropy,
    token_loss,
    top_k_kl,
)
from edl.distill.losses.features import feature_cosine, feature_mse
from edl.distill.losses.mixture import DistillLoss
from edl.distill.losses.tokens import (
    KLEstimator,
    TokenCount,
    chunked_token_loss,
    sampled_kl,
    target_labels,
    token_log_probabilities,
)

__all__ = [
    "DistillLoss",
    "KLEstimator",
    "Reduction",
    "TeacherIs",
    "TokenCount",
    "chunked_token_loss",
    "feature_cosine",
    "feature_mse",
    "kl_divergence",
    "logit_mse",
    "sampled_kl",
    "soft_cross_entropy",
    "target_labels",
    "token_log_probabilities",
    "token_loss",
    "top_k_kl",
]
