"""Losses of a student that learns from soft labels, for PaddlePaddle.

The same definitions as in `edl.distill.losses`, whose documentation holds here: logits [rows, ..., classes], computed
in float32 or more, multiplied by T², forward KL, no gradient to the teacher.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
import paddle
import paddle.nn.functional as F  # noqa: N812 - its usual name

from edl.distill.compress import TopK
from edl.errors import SettingsError
from edl.settings import is_above_zero

__all__ = ["kl_divergence", "soft_cross_entropy", "top_k_kl"]

Tensor: TypeAlias = Any  # paddle ships no types
Reduction: TypeAlias = Literal["mean", "sum", "none"]
TeacherIs: TypeAlias = Literal["logits", "probabilities"]


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
        student_logits: floating-point [rows, ..., classes].
        teacher: of the same shape, a tensor or a numpy array.
        temperature: T, above 0.
        teacher_is: "logits" or "probabilities".
        reduction: "mean" over all rows and positions, "sum", or "none" for [rows, ...].

    Returns:
        The loss, or losses [rows, ...] with reduction "none".

    Raises:
        SettingsError: shapes, types or values that cannot be.
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
        student_logits: floating-point [rows, ..., classes].
        teacher: of the same shape, a tensor or a numpy array.
        temperature: T, above 0.
        teacher_is: "logits" or "probabilities".
        reduction: see `soft_cross_entropy`.

    Returns:
        The loss, or losses [rows, ...] with reduction "none".

    Raises:
        SettingsError: shapes, types or values that cannot be.
    """
    log_p, log_q = _log_probabilities(student_logits, teacher, temperature, teacher_is)
    return _reduced(_expected(log_p, log_p - log_q) * temperature**2, reduction)


def top_k_kl(student_logits: Tensor, teacher: TopK, *, reduction: Reduction = "mean") -> Tensor:
    """Compute T² times KL(teacher ‖ student) over the k classes kept and one more, which stands for all those left out.

    Args:
        student_logits: floating-point [rows, ..., classes].
        teacher: labels of as many rows, of numpy arrays or tensors. T is the temperature that they were made at.
        reduction: see `soft_cross_entropy`.

    Returns:
        The loss, or losses [rows, ...] with reduction "none".

    Raises:
        SettingsError: rows or classes that do not agree.
    """
    student, temperature = _wide(student_logits), teacher.temperature
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
    log_p = F.log_softmax(kept, axis=-1)
    return _reduced(_expected(log_p, log_p - log_q) * temperature**2, reduction)


def _expected(log_p: Tensor, values: Tensor) -> Tensor:
    """Return the sum of p times `values`; values without probability add 0, even if infinite. NaN stays NaN."""
    p = log_p.exp()
    possible = p > 0
    zero = paddle.zeros_like(values)
    return (p * paddle.where(possible, values, zero)).sum(axis=-1)


def _log_probabilities(
    student_logits: Tensor, teacher: Tensor, temperature: float, teacher_is: TeacherIs
) -> tuple[Tensor, Tensor]:
    if not is_above_zero(temperature) or temperature == float("inf"):
        raise SettingsError(f"temperature={temperature!r}: must be a finite number above 0")
    if teacher_is not in ("logits", "probabilities"):
        raise SettingsError(f"teacher_is={teacher_is!r}: must be 'logits' or 'probabilities'")
    student = _wide(student_logits)
    given = _tensor(teacher).detach().astype(student.dtype)
    if list(student.shape) != list(given.shape) or student.ndim < 2:
        raise SettingsError(
            f"logits of the student are {list(student.shape)}, of the teacher {list(given.shape)}: "
            "both must be [rows, ..., classes]"
        )
    if teacher_is == "probabilities":
        given = given.log()
    return F.log_softmax(given / temperature, axis=-1), F.log_softmax(student / temperature, axis=-1)


def _wide(tensor: Tensor) -> Tensor:
    """Return the tensor as at least float32."""
    if not isinstance(tensor, paddle.Tensor) or not tensor.is_floating_point():
        what = tensor.dtype if isinstance(tensor, paddle.Tensor) else type(tensor).__name__
        raise SettingsError(f"the student's outputs are {what}: expected a floating-point tensor")
    return tensor.astype("float32") if tensor.dtype in (paddle.float16, paddle.bfloat16) else tensor


def _tensor(value: Tensor) -> Tensor:
    if isinstance(value, np.ndarray):
        return paddle.to_tensor(value)
    if not isinstance(value, paddle.Tensor):
        raise SettingsError(f"soft labels are {type(value).__name__}: expected a tensor or a numpy array")
    return value


def _reduced(rows: Tensor, reduction: Reduction) -> Tensor:
    if reduction not in ("mean", "sum", "none"):
        raise SettingsError(f"reduction={reduction!r}: must be 'mean', 'sum' or 'none'")
    if reduction == "none":
        return rows
    return rows.mean() if reduction == "mean" else rows.sum()
