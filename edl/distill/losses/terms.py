"""Shared parts of all losses: types, conversions, expectations, top-k labels as distributions, and checks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from edl.distill.compress import TopK
from edl.distill.mixture import Reduction, TeacherIs, check_reduction, check_teacher_is, check_temperature
from edl.errors import SettingsError
from edl.protocol.tensors import Array

_LEAST_ELEMENT = 1e-8
"""Vectors without a larger element count as zero and get no gradient, which would be as large as they are small. With a
smaller bound, rounding errors would count as directions; for probabilities around 0.01 in float32 they are about
1e-9."""

SUM_TOLERANCE = 0.02  # float16 probabilities of many classes sum to 1 only with this accuracy
_LOOKED_AT = 1 << 14  # class ids that are compared with one another in a step, in less than a millisecond


def expected(log_p: Tensor, values: Tensor) -> Tensor:
    """Return the sum of p times `values`; values without probability add 0, even if infinite. NaN stays NaN."""
    p = log_p.exp()
    return (p * torch.where(p > 0, values, 0.0)).sum(dim=-1)


def unit_vectors(vectors: Tensor) -> Tensor:
    """Return vectors [..., features] scaled to length 1, however large, and zeros for those without a direction."""
    largest = vectors.detach().abs().amax(dim=-1, keepdim=True)
    missing = largest <= _LEAST_ELEMENT  # not of NaN, which stays
    # Divided by the largest element first: squares of large ones overflow.
    scaled = vectors / largest.masked_fill(missing, 1.0)
    squares = scaled.square().sum(dim=-1, keepdim=True)
    return (scaled / squares.masked_fill(missing, 1.0).sqrt()).masked_fill(missing, 0.0)


def log_probabilities(
    student_logits: Tensor, teacher: Tensor | Array, temperature: float, teacher_is: TeacherIs
) -> tuple[Tensor, Tensor]:
    """Return the logarithms of the teacher's and the student's probabilities at `temperature`."""
    check_temperature(temperature)
    check_teacher_is(teacher_is)
    student = widened(student_logits)
    given = as_tensor(teacher, student.device).detach().to(student.dtype)
    check_same_shape("logits", student, given)
    if teacher_is == "probabilities":
        _check_probabilities(given)
        given = given.log()
    return (given / temperature).log_softmax(dim=-1), (student / temperature).log_softmax(dim=-1)


def widened(tensor: Tensor) -> Tensor:
    """Return the tensor as at least float32."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        what = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise SettingsError(f"the student's outputs are {what}: expected a floating-point tensor")
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def as_tensor(value: Tensor | Array, device: torch.device) -> Tensor:
    """Return labels as a tensor on `device`; an array's memory is shared where that is allowed."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value if value.flags.writeable else value.copy()).to(device)
    if not isinstance(value, Tensor):
        raise SettingsError(f"soft labels are {type(value).__name__}: expected a tensor or a numpy array")
    return value.to(device)


def reduced(rows: Tensor, reduction: Reduction) -> Tensor:
    """Return the losses of rows, their mean or their sum."""
    check_reduction(reduction)
    if reduction == "none":
        return rows
    return rows.mean() if reduction == "mean" else rows.sum()


def check_same_shape(what: str, student: Tensor, teacher: Tensor) -> None:
    """Raise a `SettingsError` unless both are [rows, ..., classes]."""
    if student.shape != teacher.shape or student.ndim < 2:
        raise SettingsError(
            f"{what} of the student are {list(student.shape)}, of the teacher {list(teacher.shape)}: "
            "both must be [rows, ..., classes]"
        )


def _check_probabilities(given: Tensor) -> None:
    """Check, on the CPU, that labels are probabilities."""
    if not on_cpu(given):
        return
    low, sums = float(given.min()), given.sum(dim=-1)
    furthest = float((sums - 1).abs().max())
    if low < 0 or not furthest <= SUM_TOLERANCE:
        raise SettingsError(
            f"teacher_is='probabilities', but the labels reach down to {low:g} and sum to as far as {furthest:g} from "
            "1: if they are logits, pass teacher_is='logits'"
        )


def bucket_log_probabilities(
    student_logits: Tensor, teacher: TopK, *, padded_vocabulary: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the logarithms of the teacher's and the student's probabilities at the labels' temperature.

    Returns:
        Two tensors [rows, ..., k + 1], the tail last; [rows, ..., k] where every class is kept.
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
        # Counted instead of set, so that the id that replaces an unknown class does not undo what a known one set.
        times = torch.zeros(scaled.shape, dtype=torch.int32, device=scaled.device).scatter_add(-1, ids, known.int())
        tail = torch.logaddexp(tail, kept.masked_fill(known, -torch.inf).logsumexp(dim=-1))
        # A student all of whose classes are kept has no tail: the teacher's is of classes that it lacks.
        tail = tail.masked_fill((times > 0).all(dim=-1), -torch.inf)
        log_p = torch.cat([kept.masked_fill(~known, -torch.inf), tail.unsqueeze(-1)], dim=-1).log_softmax(dim=-1)
        log_q = (scaled.gather(-1, ids) - total).masked_fill(~known, -torch.inf)
        left_out = scaled.masked_fill(times > 0, lowest)
    else:
        log_q = scaled.gather(-1, ids) - total
        if teacher.k == student.shape[-1]:  # no class is left out
            return kept.log_softmax(dim=-1), log_q
        tail = as_tensor(teacher.tail_lse, student.device).detach().to(student.dtype)
        log_p = torch.cat([kept, tail.unsqueeze(-1)], dim=-1).log_softmax(dim=-1)
        left_out = scaled.scatter(-1, ids, lowest)
    return log_p, torch.cat([log_q, left_out.logsumexp(dim=-1, keepdim=True) - total], dim=-1)


def on_cpu(tensor: Tensor) -> bool:
    """Return whether values can be looked at: an accelerator would have to be waited for, and a compiler cannot."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and tensor.numel() > 0


def check_log_probabilities(of: str, values: Tensor) -> None:
    """Raise a `SettingsError` for a log-probability above 0, on the CPU."""
    if on_cpu(values) and (most := float(values.detach().max())) > SUM_TOLERANCE:
        raise SettingsError(f"{of} reach up to {most:g}, and the logarithm of a probability is at most 0")


def check_classes(labels: Tensor, classes: int, ignored: int | None = None) -> None:
    """Raise a `SettingsError` for a label that is no class, on the CPU. `ignored`: a label that stands for none."""
    if not on_cpu(labels):
        return
    wrong = labels[((labels < 0) & (labels != (0 if ignored is None else ignored))) | (labels >= classes)]
    if wrong.numel():
        other = f", or {ignored}" if ignored is not None else ""
        raise SettingsError(f"labels hold {int(wrong[0])}: must be from 0 to {classes - 1}{other}")


def check_distinct(ids: Tensor) -> None:
    """Raise a `SettingsError` for a class that a row of top-k labels has twice; the first rows are looked at."""
    if not on_cpu(ids):
        return
    rows = ids.reshape(-1, ids.shape[-1])[: max(_LOOKED_AT // ids.shape[-1], 1)]
    rows = rows[rows.any(dim=-1)].sort(dim=-1).values  # padding is rows of zeros
    twice = rows[:, 1:][rows[:, 1:] == rows[:, :-1]]
    if twice.numel():
        raise SettingsError(f"top-k labels have class {int(twice[0])} twice in a row: each may be there once")


def _check_top_k(student: Tensor, teacher: TopK, ids: Tensor, padded_vocabulary: bool) -> None:
    classes = student.shape[-1]
    if student.shape[:-1] != ids.shape[:-1]:
        raise SettingsError(f"logits are {list(student.shape)}, top-k labels {list(ids.shape)}: the rows do not agree")
    if not padded_vocabulary and (teacher.k > classes or teacher.classes not in (None, classes)):
        raise SettingsError(
            f"the student has {classes} classes, the teacher {teacher.classes or f'at least {teacher.k}'}"
        )
    if not on_cpu(ids):
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or (high >= classes and not padded_vocabulary):
        raise SettingsError(f"the student has {classes} classes, the labels name class {low if low < 0 else high}")
    check_distinct(ids)
