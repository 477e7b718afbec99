"""Distributions over the k classes kept and the tail, which stands for all classes left out."""

from __future__ import annotations

import torch
from torch import Tensor

from edl.distill.compress import TopK
from edl.distill.losses.terms import as_tensor, widened
from edl.errors import SettingsError

__all__ = ["bucket_log_probabilities"]


def bucket_log_probabilities(
    student_logits: Tensor, teacher: TopK, *, padded_vocabulary: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the logarithms of the teacher's and the student's probabilities at the labels' temperature.

    Args:
        student_logits: floating-point [rows, ..., classes].
        teacher: labels of as many rows.
        padded_vocabulary: whether student and teacher may have different numbers of classes. Classes that the student
            does not have count in the teacher's tail, those that the teacher does not have in the student's.

    Returns:
        Two tensors [rows, ..., k + 1], the tail last; [rows, ..., k] where every class is kept.

    Raises:
        SettingsError: rows or classes that do not agree.
    """
    student = widened(student_logits)
    ids = as_tensor(teacher.ids, student.device).long()
    _check_top_k(student, teacher, ids, padded_vocabulary)
    # A division by 1 would copy [rows, classes].
    scaled = student if teacher.temperature == 1 else student / teacher.temperature
    total = scaled.logsumexp(dim=-1, keepdim=True)
    kept = as_tensor(teacher.values, student.device).detach().to(student.dtype) / teacher.temperature
    # The lowest finite number in place of -inf: the gradient of logsumexp over -inf alone is NaN.
    lowest = torch.finfo(scaled.dtype).min
    if padded_vocabulary:
        tail = as_tensor(teacher.tail_lse, student.device).detach().to(student.dtype)
        known = ids < student.shape[-1]
        ids = ids.where(known, 0)
        tail = torch.logaddexp(tail, kept.masked_fill(known, -torch.inf).logsumexp(dim=-1))
        log_p = torch.cat([kept.masked_fill(~known, -torch.inf), tail.unsqueeze(-1)], dim=-1).log_softmax(dim=-1)
        log_q = (scaled.gather(-1, ids) - total).masked_fill(~known, -torch.inf)
        # Counted, not set: an id that stands for an unknown class must not undo what a known one set.
        times = torch.zeros(scaled.shape, dtype=torch.int32, device=scaled.device).scatter_add(-1, ids, known.int())
        left_out = scaled.masked_fill(times > 0, lowest)
    else:
        log_q = scaled.gather(-1, ids) - total
        if teacher.k == student.shape[-1]:  # no class is left out
            return kept.log_softmax(dim=-1), log_q
        tail = as_tensor(teacher.tail_lse, student.device).detach().to(student.dtype)
        log_p = torch.cat([kept, tail.unsqueeze(-1)], dim=-1).log_softmax(dim=-1)
        left_out = scaled.scatter(-1, ids, lowest)
    return log_p, torch.cat([log_q, left_out.logsumexp(dim=-1, keepdim=True) - total], dim=-1)


def _check_top_k(student: Tensor, teacher: TopK, ids: Tensor, padded_vocabulary: bool) -> None:
    classes = student.shape[-1]
    if student.shape[:-1] != ids.shape[:-1]:
        raise SettingsError(f"logits are {list(student.shape)}, top-k labels {list(ids.shape)}: the rows do not agree")
    if not padded_vocabulary and (teacher.k > classes or teacher.classes not in (None, classes)):
        raise SettingsError(
            f"the student has {classes} classes, the teacher {teacher.classes or f'at least {teacher.k}'}"
        )
    # On the CPU only, and not while compiling: elsewhere every step would wait for the device.
    if ids.device.type != "cpu" or torch.compiler.is_compiling() or not ids.numel():
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or (high >= classes and not padded_vocabulary):
        raise SettingsError(f"the student has {classes} classes, the labels name class {low if low < 0 else high}")
