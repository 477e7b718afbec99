"""Losses over whole distributions and over top-k labels, and `DistillLoss`, their mixture with a hard loss."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from edl.distill.compress import TopK
from edl.distill.losses.terms import (
    Reduction,
    TeacherIs,
    as_tensor,
    bucket_log_probabilities,
    check_classes,
    check_reduction,
    check_same_shape,
    check_teacher_is,
    check_temperature,
    expected,
    log_probabilities,
    reduced,
    widened,
)
from edl.errors import SettingsError
from edl.protocol.tensors import Array
from edl.settings import is_share

__all__ = ["DistillLoss", "kl_divergence", "logit_mse", "mix", "soft_cross_entropy", "top_k_kl"]


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


_NO_LABEL = -100
"""The label of a row that does not count in the hard loss, as PyTorch's `ignore_index`."""


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


class DistillLoss(nn.Module):
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
        check_temperature(temperature)
        if not is_share(alpha):
            raise SettingsError(f"alpha={alpha!r}: the share of the soft loss must be from 0 to 1")
        if soft not in ("kl", "cross_entropy", "mse"):
            raise SettingsError(f"soft={soft!r}: must be 'kl', 'cross_entropy' or 'mse'")
        check_teacher_is(teacher_is)
        if soft == "mse" and teacher_is != "logits":
            raise SettingsError("soft='mse' compares logits: it cannot use a teacher that gives probabilities")
        check_reduction(reduction)
        self.temperature = temperature
        self.alpha = alpha
        self.soft = soft
        self.teacher_is: TeacherIs = teacher_is
        self.reduction: Reduction = reduction

    def forward(
        self, student_logits: Tensor, teacher: Tensor | Array | TopK | None, labels: Tensor | None = None
    ) -> Tensor:
        """Compute the loss.

        Args:
            student_logits: Logits of the student, [rows, ..., classes].
            teacher: Outputs of the teacher, of the same shape, or `TopK`. None for the hard loss alone, as in batches
                without teachers.
            labels: True classes, int64 [rows, ...], or probabilities of the shape of the logits; required unless
                `alpha` is 1 and there is a teacher. Rows with label -100 do not count in the hard loss, which is 0 if
                all rows have it.

        Returns:
            The loss, or losses [rows, ...] with reduction "none".

        Raises:
            SettingsError: Labels are missing, or the shapes do not match.
        """
        if self.alpha == 1 and teacher is not None:
            return self._soft(student_logits, teacher)
        if labels is None:
            raise SettingsError(
                f"labels are missing: alpha={self.alpha} mixes in a hard loss; with alpha=1 none is used"
                if teacher is not None
                else "there are neither a teacher's labels nor hard ones"
            )
        if teacher is None:
            return self._hard(student_logits, labels)
        return mix(self._hard(student_logits, labels), self._soft(student_logits, teacher), self.alpha)

    def extra_repr(self) -> str:
        """Return the settings, for `repr`."""
        return f"temperature={self.temperature:g}, alpha={self.alpha:g}, soft={self.soft!r}"

    def _soft(self, student_logits: Tensor, teacher: Tensor | Array | TopK) -> Tensor:
        if isinstance(teacher, TopK):
            if self.soft != "kl":
                raise SettingsError(f"top-k labels go with soft='kl', not {self.soft!r}")
            if teacher.temperature != self.temperature:
                raise SettingsError(
                    f"top-k labels were made at temperature {teacher.temperature:g}, the loss uses "
                    f"{self.temperature:g}: ask the teachers for temperature={self.temperature:g}"
                )
            return top_k_kl(student_logits, teacher, reduction=self.reduction)
        if self.soft == "mse":
            return logit_mse(student_logits, teacher, reduction=self.reduction)
        loss = kl_divergence if self.soft == "kl" else soft_cross_entropy
        return loss(
            student_logits,
            teacher,
            temperature=self.temperature,
            teacher_is=self.teacher_is,
            reduction=self.reduction,
        )

    def _hard(self, student_logits: Tensor, labels: Tensor) -> Tensor:
        classes = student_logits.shape[-1]
        target = labels.reshape(-1, classes) if labels.shape == student_logits.shape else labels.reshape(-1)
        if target.shape[0] != student_logits.numel() // classes:
            raise SettingsError(
                f"labels are {list(labels.shape)}, logits {list(student_logits.shape)}: "
                f"expected {list(student_logits.shape[:-1])}"
            )
        if not target.is_floating_point():
            check_classes(target, classes, _NO_LABEL)
        logits = widened(student_logits).reshape(-1, classes)
        if self.reduction == "mean" and not target.is_floating_point():
            labelled = (target != _NO_LABEL).sum().clamp(min=1)  # PyTorch's own mean of no rows is NaN
            return F.cross_entropy(logits, target, reduction="sum") / labelled
        loss = F.cross_entropy(logits, target, reduction=self.reduction)
        return loss.reshape(student_logits.shape[:-1]) if self.reduction == "none" else loss
