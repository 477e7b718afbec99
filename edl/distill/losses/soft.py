"""Losses over whole distributions and over top-k labels."""

from __future__ import annotations

from torch import Tensor

from edl.distill.compress import TopK
from edl.distill.losses.buckets import bucket_log_probabilities
from edl.distill.losses.terms import (
    Reduction,
    TeacherIs,
    as_tensor,
    check_same_shape,
    expected,
    log_probabilities,
    reduced,
    widened,
)
from edl.protocol.tensors import Array

__all__ = ["kl_divergence", "logit_mse", "soft_cross_entropy", "top_k_kl"]


def soft_cross_entropy(
    student_logits: Tensor,
    teacher: Tensor | Array,
    *,
    temperature: float = 1.0,
    teacher_is: TeacherIs = "logits",
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute T² times the cross-entropy between the teacher's and the student's distributions at temperature T.

    Its gradient is that of `kl_divergence`; the value is larger by the entropy of the teacher.

    Args:
        student_logits: floating-point [rows, ..., classes].
        teacher: of the same shape.
        temperature: T, above 0.
        teacher_is: what the teacher's outputs are. Probabilities p become p^(1/T), scaled to sum to 1, which is what
            their logits would give. On the CPU it is checked that they are probabilities.
        reduction: see the module.

    Returns:
        The loss, or losses [rows, ...] with reduction "none".

    Raises:
        SettingsError: shapes, types or values that cannot be.
    """
    log_p, log_q = log_probabilities(student_logits, teacher, temperature, teacher_is)
    return reduced(-expected(log_p, log_q) * temperature**2, reduction)


def kl_divergence(
    student_logits: Tensor,
    teacher: Tensor | Array,
    *,
    temperature: float = 1.0,
    teacher_is: TeacherIs = "logits",
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute T² times KL(teacher ‖ student) of the distributions at temperature T.

    Args:
        student_logits: floating-point [rows, ..., classes].
        teacher: of the same shape.
        temperature: T, above 0.
        teacher_is: see `soft_cross_entropy`.
        reduction: see the module.

    Returns:
        The loss, or losses [rows, ...] with reduction "none".

    Raises:
        SettingsError: shapes, types or values that cannot be.
    """
    log_p, log_q = log_probabilities(student_logits, teacher, temperature, teacher_is)
    return reduced(expected(log_p, log_p - log_q) * temperature**2, reduction)


def top_k_kl(student_logits: Tensor, teacher: TopK, *, reduction: Reduction = "mean") -> Tensor:
    """Compute T² times KL(teacher ‖ student) over the k classes kept and one more, which stands for all those left out.

    T is the temperature at which the labels were made. With every class kept this is `kl_divergence`; otherwise it is
    smaller by what the two distributions differ by within the tail. Without the extra class the student could move its
    whole mass out of the k classes, or into them, at no cost.

    The forward direction only: KL(student ‖ teacher) grows without bound where the teacher's mass is near 0, and a
    teacher that is sure of its top k leaves a tail of almost none, on which an untrained student puts nearly all.

    Args:
        student_logits: floating-point [rows, ..., classes].
        teacher: labels of as many rows, of numpy arrays or tensors.
        reduction: see the module.

    Returns:
        The loss, or losses [rows, ...] with reduction "none".

    Raises:
        SettingsError: rows or classes that do not agree.
    """
    log_p, log_q = bucket_log_probabilities(student_logits, teacher)
    return reduced(expected(log_p, log_p - log_q) * teacher.temperature**2, reduction)


def logit_mse(student_logits: Tensor, teacher_logits: Tensor | Array, *, reduction: Reduction = "mean") -> Tensor:
    """Compute the squared difference of logits, averaged over the classes.

    Sources: Ba and Caruana, "Do Deep Nets Really Need to be Deep?", 2014; Kim et al., "Comparing Kullback-Leibler
    Divergence and Mean Squared Error Loss in Knowledge Distillation", 2021.

    Args:
        student_logits: floating-point [rows, ..., classes].
        teacher_logits: of the same shape.
        reduction: see the module.

    Returns:
        The loss, or losses [rows, ...] with reduction "none".

    Raises:
        SettingsError: shapes that differ.
    """
    student = widened(student_logits)
    teacher = as_tensor(teacher_logits, student.device).detach().to(student.dtype)
    check_same_shape("logits", student, teacher)
    return reduced((student - teacher).square().mean(dim=-1), reduction)
