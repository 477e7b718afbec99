"""Losses over tokens that the student chose: those that it sampled, or its own likeliest."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from edl.distill.compress import TopK
from edl.distill.losses.terms import Reduction, as_tensor, check_reduction, widened
from edl.distill.losses.tokens import TokenCount, kept_rows, total
from edl.errors import SettingsError
from edl.protocol.tensors import Array

__all__ = ["KLEstimator", "sampled_kl", "target_labels", "token_log_probabilities"]

KLEstimator: TypeAlias = Literal["k1", "k3"]
"""How the value of a KL is estimated from samples, by Schulman's names."""

_MOST_NATS = 20.0
"""Largest log-ratio of a sampled token, either way, e^20 being 5e8. float32 overflows at e^88; long before that a
single token, which one of the two finds all but impossible, would be all of the loss."""


def token_log_probabilities(student_logits: Tensor, targets: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return the student's log-probabilities of `targets`.

    Args:
        student_logits: floating-point [rows, ..., vocabulary].
        targets: whole numbers [rows, ...], or [rows, ..., m] for m tokens each. What is negative, as -100 of padding,
            is taken for token 0: leave it out by the loss's mask.
        temperature: T, at which the student sampled them.

    Returns:
        Of the shape of `targets`, float32 at least.

    Raises:
        SettingsError: shapes that do not agree.
    """
    student = widened(student_logits)
    scaled = student if temperature == 1 else student / temperature
    single = targets.ndim == student.ndim - 1
    ids = (targets.unsqueeze(-1) if single else targets).to(student.device).long().clamp(min=0)
    if ids.shape[:-1] != student.shape[:-1]:
        raise SettingsError(f"targets are {list(targets.shape)}, logits {list(student.shape)}: the rows do not agree")
    found = scaled.gather(-1, ids) - scaled.logsumexp(dim=-1, keepdim=True)
    return found.squeeze(-1) if single else found


def sampled_kl(
    student: Tensor,
    teacher: Tensor | Array,
    *,
    estimator: KLEstimator = "k3",
    mask: Tensor | None = None,
    token_count: TokenCount = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Estimate KL(student ‖ teacher) from tokens that the student sampled, with the gradient of that KL.

    With r = P(token) / Q(token), Q the student, the value is -log r (k1: without bias, and negative for some tokens) or
    (r - 1) - log r (k3: without bias, never negative, of less variance). Source: Schulman, "Approximating KL
    Divergence", 2020.

    The gradient is (log Q - log P) ∇log Q with either, whose expectation over tokens of Q is the gradient of the KL at
    that position. Differentiating the values would give another: that of k1 has expectation 0, that of k3 is the
    gradient of the forward KL(teacher ‖ student). Source: Tang and Munos, "On a few pitfalls in KL divergence gradient
    estimation for RL", 2025. What a token does to the ones after it is left out, as in on-policy distillation by token.

    Args:
        student: log-probabilities of the sampled tokens, floating-point [rows, ...]: `token_log_probabilities`.
        teacher: the teacher's of the same tokens, at the same temperature. -inf is as improbable as e^-20 times the
            student's probability, and so is anything below.
        estimator: "k1" or "k3".
        mask: see `token_loss`.
        token_count: see `token_loss`.
        reduction: "mean" over tokens, "sum", or "none" for [rows, ...].

    Returns:
        The estimate, or estimates [rows, ...] with reduction "none".

    Raises:
        SettingsError: shapes, types or values that cannot be.
    """
    check_reduction(reduction)
    if estimator not in ("k1", "k3"):
        raise SettingsError(f"estimator={estimator!r}: must be 'k1' or 'k3'")
    log_q = widened(student)
    log_p = as_tensor(teacher, log_q.device).detach().to(log_q.dtype)
    if log_p.shape != log_q.shape:
        raise SettingsError(
            f"log-probabilities of the student are {list(log_q.shape)}, of the teacher {list(log_p.shape)}: "
            "both must be those of the sampled tokens [rows, ...]"
        )
    kept = kept_rows(mask, log_q.shape, log_q.device)
    if kept is not None:
        # The inputs, not only the losses: a gradient of 0 times NaN would be NaN.
        log_q, log_p = torch.where(kept, log_q, 0.0), torch.where(kept, log_p, 0.0)
    ratio = (log_q.detach() - log_p).clamp(-_MOST_NATS, _MOST_NATS)
    value = ratio if estimator == "k1" else torch.expm1(-ratio) + ratio
    slope = ratio * log_q
    return total(value + (slope - slope.detach()), kept, token_count, reduction)


def target_labels(targets: Tensor | Array, log_probabilities: Tensor | Array, *, classes: int | None = None) -> TopK:
    """Return labels for tokens that the student chose, such as its own likeliest: `token_loss` takes them as any.

    ::

        targets = student_logits.topk(16).indices  # asked of the teachers: `targets` beside `ids`
        labels = target_labels(targets, target_logprobs)
        token_loss(student_logits, labels, mask=mask, beta=1).backward()

    In the reverse direction it is the student's mass that weighs, so its own likeliest tokens tell more than the
    teacher's. The tail is what the teacher's probabilities leave of 1. They are float32, so that a tail below 1e-6
    or so is rounding error; the reverse direction's floor is no smaller. Half precision, by which a tail below 1e-3
    would be, is refused.

    Args:
        targets: tokens, whole numbers [rows, ..., m], none twice in a row.
        log_probabilities: the teacher's, at temperature 1, of the same shape; float32 or wider.
        classes: how many tokens there are, None if unknown. With all of them as targets, the tail is empty.

    Returns:
        Labels of tensors with temperature 1, on the device of `targets`.

    Raises:
        SettingsError: shapes that do not agree, or log-probabilities of half precision.
    """
    ids = as_tensor(targets, targets.device if isinstance(targets, Tensor) else torch.device("cpu"))
    values = as_tensor(log_probabilities, ids.device).detach()
    if ids.ndim < 2 or ids.shape != values.shape or ids.is_floating_point() or not values.is_floating_point():
        raise SettingsError(
            f"targets are {ids.dtype} {list(ids.shape)}, log-probabilities {values.dtype} {list(values.shape)}: "
            "expected whole numbers and floating-point, both [rows, ..., m]"
        )
    if values.element_size() < 4:
        raise SettingsError(
            f"log-probabilities are {values.dtype}: what their sum leaves of 1, the tail, would be rounding error. "
            "Teachers answer float32; a model of your own takes its log_softmax in float32"
        )
    mass = widened(values).double().logsumexp(dim=-1)
    # At 1 or, by rounding, above it nothing is left.
    left = torch.where(mass < 0, torch.log(-torch.expm1(mass.clamp(max=0))), -torch.inf)
    tail_lse = left.masked_fill(torch.isnan(mass), torch.nan).float()
    return TopK(ids, values, tail_lse, 1.0, classes)  # type: ignore[arg-type]  # tensors, as after `TopK.map`
