"""Losses over whole distributions and over top-k labels, and `DistillLoss`, their mixture with a hard loss."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from edl.distill.compress import TopK
from edl.distill.losses.terms import (
    as_tensor,
    bucket_log_probabilities,
    check_classes,
    check_same_shape,
    expected,
    log_probabilities,
    reduced,
    widened,
)
from edl.distill.mixture import NO_LABEL, MixedLoss, Reduction, TeacherIs
from edl.errors import SettingsError
from edl.protocol.tensors import Array
from edl.settings import is_share


def soft_cross_entropy(
    student_logits: Tensor,
    teacher: Tensor | Array,
    *,
    temperature: float = 1.0,
    teacher_is: TeacherIs = "logits",
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute T² times the cross-entropy between the teacher's and the student's distributions at temperature T.

    It has the same gradient as `kl_divergence`; its value is larger by the teacher's entropy.

    Args:
        student_logits: Logits of the student, floating-point [rows, ..., classes].
        teacher: Outputs of the teacher, of the same shape.
        temperature: Temperature T, above 0.
        teacher_is: Kind of the teacher's outputs. Probabilities p become p^(1/T), scaled to sum to 1, as their logits
            would give. On the CPU, an error is raised if they are not probabilities.
        reduction: Reduction over rows; see `edl.distill.losses`.

    Returns:
        The loss, or losses [rows, ...] with reduction "none".

    Raises:
        SettingsError: A shape, type or value is invalid.
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
        student_logits: Logits of the student, floating-point [rows, ..., classes].
        teacher: Outputs of the teacher, of the same shape.
        temperature: Temperature T, above 0.
        teacher_is: Kind of the teacher's outputs; see `soft_cross_entropy`.
        reduction: Reduction over rows; see `edl.distill.losses`.

    Returns:
        The loss, or losses [rows, ...] with reduction "none".

    Raises:
        SettingsError: A shape, type or value is invalid.
    """
    log_p, log_q = log_probabilities(student_logits, teacher, temperature, teacher_is)
    return reduced(expected(log_p, log_p - log_q) * temperature**2, reduction)


def top_k_kl(student_logits: Tensor, teacher: TopK, *, reduction: Reduction = "mean") -> Tensor:
    """Compute T² times KL(teacher ‖ student) over the k kept classes and one class for all the others.

    T is the temperature at which the labels were made. If every class is kept, this is `kl_divergence`; otherwise it is
    smaller by the divergence within the tail. Without the extra class, the student could move its whole probability out
    of the k classes, or into them, at no cost.

    Only the forward direction is offered, because KL(student ‖ teacher) grows without bound where the teacher's
    probability is near 0. A teacher that is confident in its top k leaves almost nothing for the tail, where an
    untrained student has nearly all of its probability.

    Args:
        student_logits: Logits of the student, floating-point [rows, ..., classes].
        teacher: Labels of as many rows, as numpy arrays or tensors.
        reduction: Reduction over rows; see `edl.distill.losses`.

    Returns:
        The loss, or losses [rows, ...] with reduction "none".

    Raises:
        SettingsError: The rows or classes do not agree.
    """
    log_p, log_q = bucket_log_probabilities(student_logits, teacher)
    return reduced(expected(log_p, log_p - log_q) * teacher.temperature**2, reduction)


def logit_mse(student_logits: Tensor, teacher_logits: Tensor | Array, *, reduction: Reduction = "mean") -> Tensor:
    """Compute the squared difference of logits, averaged over the classes.

    Sources: Ba and Caruana, "Do Deep Nets Really Need to be Deep?", 2014; Kim et al., "Comparing Kullback-Leibler
    Divergence and Mean Squared Error Loss in Knowledge Distillation", 2021.

    Args:
        student_logits: Logits of the student, floating-point [rows, ..., classes].
        teacher_logits: Logits of the teacher, of the same shape.
        reduction: Reduction over rows; see `edl.distill.losses`.

    Returns:
        The loss, or losses [rows, ...] with reduction "none".

    Raises:
        SettingsError: The shapes differ.
    """
    student = widened(student_logits)
    teacher = as_tensor(teacher_logits, student.device).detach().to(student.dtype)
    check_same_shape("logits", student, teacher)
    return reduced((student - teacher).square().mean(dim=-1), reduction)


def _hard_loss(student_logits: Tensor, labels: Tensor, reduction: Reduction) -> Tensor:
    classes = student_logits.shape[-1]
    target = labels.reshape(-1, classes) if labels.shape == student_logits.shape else labels.reshape(-1)
    if target.shape[0] != student_logits.numel() // classes:
        raise SettingsError(
            f"labels are {list(labels.shape)}, logits {list(student_logits.shape)}: "
            f"expected {list(student_logits.shape[:-1])}"
        )
    if not target.is_floating_point():
        check_classes(target, classes, NO_LABEL)
    logits = widened(student_logits).reshape(-1, classes)
    if reduction == "mean" and not target.is_floating_point():
        labelled = (target != NO_LABEL).sum().clamp(min=1)  # PyTorch's own mean of no rows is NaN
        return F.cross_entropy(logits, target, reduction="sum") / labelled
    loss = F.cross_entropy(logits, target, reduction=reduction)
    return loss.reshape(student_logits.shape[:-1]) if reduction == "none" else loss


def mix(hard: Tensor, soft: Tensor, alpha: float) -> Tensor:
    """Return `alpha` of the soft loss and 1 - `alpha` of the hard loss.

    Args:
        hard: Loss against the true labels.
        soft: Loss against the teacher.
        alpha: Share of the soft loss, from 0 to 1.

    Raises:
        SettingsError: `alpha` is out of range.
    """
    if not is_share(alpha):
        raise SettingsError(f"alpha={alpha!r}: the share of the soft loss must be from 0 to 1")
    return alpha * soft + (1 - alpha) * hard


class DistillLoss(MixedLoss, nn.Module):
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
        reduction: Reduction over rows; see `edl.distill.losses`.

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
