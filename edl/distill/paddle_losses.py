"""Losses of a student that learns from soft labels, for PaddlePaddle.

The same definitions as in `edl.distill.losses`, whose documentation holds here: logits [rows, ..., classes], computed
in float32 or more, multiplied by T², forward KL, no gradient to the teacher.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import numpy as np
import paddle
import paddle.nn.functional as F  # noqa: N812 - its usual name
from paddle import nn

from edl.distill.compress import TopK
from edl.distill.mixture import (
    FLOOR,
    NO_LABEL,
    MixedLoss,
    Reduction,
    TeacherIs,
    check_divergence,
    check_hard_weight,
    check_reduction,
    check_teacher_is,
    check_temperature,
)
from edl.errors import SettingsError

__all__ = ["DistillLoss", "kl_divergence", "logit_mse", "soft_cross_entropy", "token_loss", "top_k_kl"]

Tensor: TypeAlias = Any  # paddle ships no types


def soft_cross_entropy(
    student_logits: Tensor,
    teacher: Tensor,
    *,
    temperature: float = 1.0,
    teacher_is: TeacherIs = "logits",
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute T² times the cross-entropy between the teacher's and the student's distributions at temperature T.

    Args:
        student_logits: Logits of the student, floating-point [rows, ..., classes].
        teacher: Outputs of the teacher, of the same shape, as a tensor or a numpy array.
        temperature: Temperature T, above 0.
        teacher_is: Kind of the teacher's outputs: "logits" or "probabilities".
        reduction: Reduction: "mean" over all rows and positions, "sum", or "none" for [rows, ...].

    Returns:
        The loss, or losses [rows, ...] with reduction "none".

    Raises:
        SettingsError: A shape, type or value is invalid.
    """
    log_p, log_q = _log_probabilities(student_logits, teacher, temperature, teacher_is)
    return _reduced(-_expected(log_p, log_q) * temperature**2, reduction)


def kl_divergence(
    student_logits: Tensor,
    teacher: Tensor,
    *,
    temperature: float = 1.0,
    teacher_is: TeacherIs = "logits",
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute T² times KL(teacher ‖ student) of the distributions at temperature T.

    Args:
        student_logits: Logits of the student, floating-point [rows, ..., classes].
        teacher: Outputs of the teacher, of the same shape, as a tensor or a numpy array.
        temperature: Temperature T, above 0.
        teacher_is: Kind of the teacher's outputs: "logits" or "probabilities".
        reduction: Reduction over rows; see `soft_cross_entropy`.

    Returns:
        The loss, or losses [rows, ...] with reduction "none".

    Raises:
        SettingsError: A shape, type or value is invalid.
    """
    log_p, log_q = _log_probabilities(student_logits, teacher, temperature, teacher_is)
    return _reduced(_expected(log_p, log_p - log_q) * temperature**2, reduction)


def logit_mse(student_logits: Tensor, teacher_logits: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    """Compute the squared difference of logits, averaged over the classes.

    Args:
        student_logits: Logits of the student, floating-point [rows, ..., classes].
        teacher_logits: Logits of the teacher, of the same shape, as a tensor or a numpy array.
        reduction: Reduction over rows; see `soft_cross_entropy`.

    Returns:
        The loss, or losses [rows, ...] with reduction "none".

    Raises:
        SettingsError: The shapes differ.
    """
    student, teacher = _alike(student_logits, teacher_logits)
    return _reduced((student - teacher).square().mean(axis=-1), reduction)


def top_k_kl(student_logits: Tensor, teacher: TopK, *, reduction: Reduction = "mean") -> Tensor:
    """Compute T² times KL(teacher ‖ student) over the k kept classes and one class for all the others.

    Args:
        student_logits: Logits of the student, floating-point [rows, ..., classes].
        teacher: Labels of as many rows, as numpy arrays or tensors. T is the temperature at which they were made.
        reduction: Reduction over rows; see `soft_cross_entropy`.

    Returns:
        The loss, or losses [rows, ...] with reduction "none".

    Raises:
        SettingsError: The rows or classes do not agree.
    """
    log_p, log_q = _bucket_log_probabilities(student_logits, teacher)
    return _reduced(_expected(log_p, log_p - log_q) * teacher.temperature**2, reduction)


def token_loss(
    student_logits: Tensor,
    labels: TopK,
    *,
    mask: Tensor | None = None,
    beta: float = 0.0,
    hard_labels: Tensor | None = None,
    hard_weight: float = 0.0,
    token_count: float | Tensor | None = None,
    floor: float = FLOOR,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute T² times the generalized Jensen-Shannon divergence of teacher and student, token by token.

    The definition, with its source, is that of `edl.distill.losses.token_loss`.

    Args:
        student_logits: Logits of the student, floating-point [rows, ..., vocabulary].
        labels: Labels of as many rows, as numpy arrays or tensors. T is the temperature at which they were made.
        mask: Token mask, bool or whole numbers [rows, ...], 0 for tokens that do not count, whatever their logits and
            labels are. None if all tokens count.
        beta: Direction of the divergence: 0 for forward KL, 1 for reverse KL, Jensen-Shannon divergence in between.
        hard_labels: Targets for `hard_weight`, whole numbers [rows, ...]: token t + 1 at row t. Rows with -100 have no
            cross-entropy, but count in the divisor like the others.
        hard_weight: Share of the cross-entropy with `hard_labels`, from 0 to 1.
        token_count: Divisor of the sum over tokens with reduction "mean": None for the tokens kept here, else the
            number of tokens of the whole optimizer step.
        floor: Smallest probability of the teacher in the reverse direction, above 0 and below 1.
        reduction: Reduction: "mean" over tokens, "sum", or "none" for [rows, ...].

    Returns:
        The loss, or losses [rows, ...] with reduction "none"; 0 if the mask keeps no token.

    Raises:
        SettingsError: A shape, type or value is invalid.
    """
    check_divergence(labels, beta, None, floor)
    check_hard_weight(hard_weight, hard_labels)
    kept = _kept_rows(mask, student_logits)
    if kept is not None:
        # The inputs, not only the losses: a gradient of 0 times NaN would be NaN.
        student_logits = _where(kept, student_logits)
        labels = labels.map(lambda array: _where(kept, _tensor(array)))
    log_p, log_q = _bucket_log_probabilities(student_logits, labels)
    losses = _divergence(log_p, log_q, beta, floor) * labels.temperature**2
    if hard_weight:
        targets = _tensor(hard_labels)
        if list(targets.shape) != list(student_logits.shape[:-1]):
            raise SettingsError(
                f"hard_labels are {list(targets.shape)}, the logits {list(student_logits.shape)}: the rows do not agree"
            )
        if kept is not None:
            targets = paddle.where(kept, targets, paddle.full_like(targets, NO_LABEL))
        hard = _hard_loss(student_logits, targets, "none")
        losses = hard if hard_weight == 1 else (1 - hard_weight) * losses + hard_weight * hard
    if kept is not None:
        losses = _where(kept, losses)
    if reduction != "mean":
        return _reduced(losses, reduction)
    if token_count is None:
        token_count = losses.size if kept is None else kept.sum()
    elif not isinstance(token_count, paddle.Tensor) and not token_count > 0:
        raise SettingsError(f"token_count={token_count!r}: must be a number of tokens, or None for those kept here")
    count = token_count if isinstance(token_count, paddle.Tensor) else paddle.to_tensor(float(token_count))
    return losses.sum() / count.astype(losses.dtype).reshape([]).clip(min=1)


def _hard_loss(logits: Tensor, labels: Tensor, reduction: Reduction) -> Tensor:
    """Return the cross-entropy with hard labels, 0 where there is none (-100); a mean is over the rows that have one.

    Raises:
        SettingsError: The shapes do not match, or a label is not a class.
    """
    logits = widened(logits)
    classes, rows = logits.shape[-1], list(logits.shape[:-1])
    labels = _tensor(labels)
    soft = labels.is_floating_point()
    if not soft and list(labels.shape) == [*rows, 1]:  # as many of Paddle's data sets have them
        labels = labels.squeeze(-1)
    if list(labels.shape) != (list(logits.shape) if soft else rows):
        raise SettingsError(
            f"labels are {labels.dtype} {list(labels.shape)}, logits {list(logits.shape)}: "
            f"expected whole numbers {rows}"
        )
    if soft:
        losses = F.cross_entropy(logits, labels.astype(logits.dtype), soft_label=True, reduction=reduction)
        return losses.reshape(rows) if reduction == "none" else losses
    wrong = ((labels < 0) & (labels != NO_LABEL)) | (labels >= classes)
    if labels.place.is_cpu_place() and bool(wrong.any()):
        raise SettingsError(f"labels hold {int(labels[wrong][0])}: must be from 0 to {classes - 1}, or {NO_LABEL}")
    flat, targets = logits.reshape([-1, classes]), labels.astype("int64").reshape([-1])
    losses = F.cross_entropy(flat, targets, ignore_index=NO_LABEL, reduction="none").reshape(rows)
    if reduction != "mean":
        return _reduced(losses, reduction)
    # Paddle's own mean divides by the rows without a label too, where `ignore_index` is below 0.
    return losses.sum() / (targets != NO_LABEL).sum().clip(min=1).astype(losses.dtype)


def _divergence(log_p: Tensor, log_q: Tensor, beta: float, floor: float) -> Tensor:
    """Return the generalized Jensen-Shannon divergence [rows, ...] of distributions [rows, ..., buckets]."""
    if beta == 0:
        return _expected(log_p, log_p - log_q)
    # Finite, since 0 times infinity is NaN, and so is its gradient. A quarter, so that no difference overflows.
    lowest = float(paddle.finfo(log_q.dtype).min) / 4
    log_q = log_q.clip(min=lowest)
    if beta == 1:
        floored = F.log_softmax(log_p.clip(min=math.log(floor)), axis=-1)
        return (log_q.exp() * (log_q - floored)).sum(axis=-1)
    log_p = log_p.clip(min=lowest)
    log_m = paddle.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    teacher, student = log_p.exp() * (log_p - log_m), log_q.exp() * (log_q - log_m)
    return (beta * teacher + (1 - beta) * student).sum(axis=-1)


def _kept_rows(mask: Tensor | None, student_logits: Tensor) -> Tensor | None:
    if mask is None:
        return None
    mask = _tensor(mask)
    if mask.is_floating_point():
        raise SettingsError(f"the mask is {mask.dtype}: expected bool or whole numbers, 0 for what is left out")
    rows = list(student_logits.shape[:-1])
    if list(mask.shape) != rows:
        raise SettingsError(f"the mask is {list(mask.shape)}, the logits have rows {rows}: they do not agree")
    if "bool" not in str(mask.dtype) and bool((mask < 0).any()):
        raise SettingsError(f"the mask holds {int(mask.min())}: it is 0 for what is left out, of labels labels != -100")
    return mask.astype("bool")


def _where(kept: Tensor, values: Tensor) -> Tensor:
    """Return `values` [rows, ...], 0 where a row is not kept."""
    if list(values.shape[: kept.ndim]) != list(kept.shape):
        raise SettingsError(
            f"logits have rows {list(kept.shape)}, top-k labels are {list(values.shape)}: the rows do not agree"
        )
    rows = kept.reshape([*kept.shape, *(1 for _ in range(values.ndim - kept.ndim))])
    return paddle.where(rows, values, paddle.zeros_like(values))


def _bucket_log_probabilities(student_logits: Tensor, teacher: TopK) -> tuple[Tensor, Tensor]:
    """Return the logarithms of teacher's and student's probabilities [rows, ..., k and the tail] at temperature T."""
    student, temperature = widened(student_logits), teacher.temperature
    ids = _tensor(teacher.ids).astype("int64")
    classes = student.shape[-1]
    if list(student.shape[:-1]) != list(ids.shape[:-1]):
        raise SettingsError(f"logits are {list(student.shape)}, top-k labels {list(ids.shape)}: the rows do not agree")
    if teacher.k > classes or teacher.classes not in (None, classes):
        raise SettingsError(
            f"the student has {classes} classes, the teacher {teacher.classes or f'at least {teacher.k}'}"
        )
    scaled = student / temperature
    total = scaled.logsumexp(axis=-1, keepdim=True)
    log_q = paddle.take_along_axis(scaled, ids, axis=-1) - total
    kept = _tensor(teacher.values).detach().astype(student.dtype) / temperature
    if teacher.k < classes:
        tail = _tensor(teacher.tail_lse).detach().astype(student.dtype).unsqueeze(-1)
        kept = paddle.concat([kept, tail], axis=-1)
        lowest = paddle.to_tensor(paddle.finfo(student.dtype).min, dtype=student.dtype, place=student.place)
        left_out = paddle.put_along_axis(scaled, ids, lowest, -1)
        log_q = paddle.concat([log_q, left_out.logsumexp(axis=-1, keepdim=True) - total], axis=-1)
    return F.log_softmax(kept, axis=-1), log_q


def _expected(log_p: Tensor, values: Tensor) -> Tensor:
    """Return the sum of p times `values`; values without probability add 0, even if infinite. NaN stays NaN."""
    p = log_p.exp()
    possible = p > 0
    zero = paddle.zeros_like(values)
    return (p * paddle.where(possible, values, zero)).sum(axis=-1)


def _log_probabilities(
    student_logits: Tensor, teacher: Tensor, temperature: float, teacher_is: TeacherIs
) -> tuple[Tensor, Tensor]:
    check_temperature(temperature)
    check_teacher_is(teacher_is)
    student, given = _alike(student_logits, teacher)
    if teacher_is == "probabilities":
        given = given.log()
    return F.log_softmax(given / temperature, axis=-1), F.log_softmax(student / temperature, axis=-1)


def _alike(student_logits: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    student = widened(student_logits)
    given = _tensor(teacher).detach().astype(student.dtype)
    if list(student.shape) != list(given.shape) or student.ndim < 2:
        raise SettingsError(
            f"logits of the student are {list(student.shape)}, of the teacher {list(given.shape)}: "
            "both must be [rows, ..., classes]"
        )
    return student, given


def widened(tensor: Tensor) -> Tensor:
    """Return the tensor as at least float32."""
    if not isinstance(tensor, paddle.Tensor) or not tensor.is_floating_point():
        what = tensor.dtype if isinstance(tensor, paddle.Tensor) else type(tensor).__name__
        raise SettingsError(f"the student's outputs are {what}: expected a floating-point tensor")
    return tensor.astype("float32") if tensor.dtype in (paddle.float16, paddle.bfloat16) else tensor


def _tensor(value: Tensor) -> Tensor:
    if isinstance(value, np.ndarray):
        return paddle.to_tensor(value)
    if not isinstance(value, paddle.Tensor):
        raise SettingsError(f"labels are {type(value).__name__}: expected a tensor or a numpy array")
    return value


def _reduced(rows: Tensor, reduction: Reduction) -> Tensor:
    check_reduction(reduction)
    if reduction == "none":
        return rows
    return rows.mean() if reduction == "mean" else rows.sum()


class DistillLoss(MixedLoss, nn.Layer):
    """A soft loss against the teacher mixed with the cross-entropy against the true labels.

    ::

        loss = DistillLoss(temperature=4.0, alpha=0.9)
        loss(student(images), soft_labels, labels).backward()

    Args:
        temperature: Temperature T of the soft loss; "mse" does not use it. It must be the temperature at which `TopK`
            labels were made.
        alpha: Share of the soft loss, from 0 to 1.
        soft: Kind of soft loss: "kl", "cross_entropy" or "mse" (of logits).
        teacher_is: Kind of the teacher's outputs; see `soft_cross_entropy`.
        reduction: Reduction over rows; see `soft_cross_entropy`.

    Raises:
        SettingsError: A value is invalid.
    """

    kl_divergence = staticmethod(kl_divergence)
    soft_cross_entropy = staticmethod(soft_cross_entropy)
    logit_mse = staticmethod(logit_mse)
    top_k_kl = staticmethod(top_k_kl)
    hard_loss = staticmethod(_hard_loss)

    def __init__(
        self,
        temperature: float = 4.0,
        alpha: float = 0.9,
        *,
        soft: Literal["kl", "cross_entropy", "mse"] = "kl",
        teacher_is: TeacherIs = "logits",
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__()
        self._set(temperature, alpha, soft, teacher_is, reduction)
