"""Soft and hard losses together, for PaddlePaddle."""

from __future__ import annotations

from typing import Any, Literal

from paddle import nn

from edl.distill.compress import TopK
from edl.distill.paddle_losses.divergences import (
    Reduction,
    TeacherIs,
    Tensor,
    hard_cross_entropy,
    kl_divergence,
    logit_mse,
    soft_cross_entropy,
    top_k_kl,
    widened,
)
from edl.errors import SettingsError
from edl.settings import is_above_zero, is_share

__all__ = ["DistillLoss"]


class DistillLoss(nn.Layer):
    """A soft loss against the teacher mixed with the cross-entropy against the true labels.

    ::

        loss = DistillLoss(temperature=4.0, alpha=0.9)
        loss(student(images), soft_labels, labels).backward()

    Args:
        temperature: T of the soft loss; not used by "mse". With `TopK` labels it must be the temperature that they were
            made with.
        alpha: share of the soft loss, from 0 to 1.
        soft: "kl", "cross_entropy" or "mse" (of logits).
        teacher_is: see `soft_cross_entropy`.
        reduction: see `soft_cross_entropy`.

    Raises:
        SettingsError: a value that cannot be.
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
        if not is_above_zero(temperature) or temperature == float("inf"):
            raise SettingsError(f"temperature={temperature!r}: must be a finite number above 0")
        if not is_share(alpha):
            raise SettingsError(f"alpha={alpha!r}: the share of the soft loss must be from 0 to 1")
        if soft not in ("kl", "cross_entropy", "mse"):
            raise SettingsError(f"soft={soft!r}: must be 'kl', 'cross_entropy' or 'mse'")
        if teacher_is not in ("logits", "probabilities"):
            raise SettingsError(f"teacher_is={teacher_is!r}: must be 'logits' or 'probabilities'")
        if soft == "mse" and teacher_is != "logits":
            raise SettingsError("soft='mse' compares logits: it cannot use a teacher that gives probabilities")
        if reduction not in ("mean", "sum", "none"):
            raise SettingsError(f"reduction={reduction!r}: must be 'mean', 'sum' or 'none'")
        self.temperature = temperature
        self.alpha = alpha
        self.soft = soft
        self.teacher_is: TeacherIs = teacher_is
        self.reduction: Reduction = reduction

    def forward(self, student_logits: Tensor, teacher: Any, labels: Tensor | None = None) -> Tensor:
        """Compute the loss.

        Args:
            student_logits: [rows, ..., classes].
            teacher: of the same shape, or `TopK`. None, as batches without teachers have it, for the hard loss alone.
            labels: whole numbers [rows, ...] or [rows, ..., 1], or probabilities of the shape of the logits; wanted
                unless `alpha` is 1 and there is a teacher. Rows with label -100 have no part in the hard loss, which is
                0 for a batch of such rows only.

        Returns:
            The loss, or losses [rows, ...] with reduction "none".

        Raises:
            SettingsError: labels that are missing, or shapes that do not agree.
        """
        if self.alpha == 1 and teacher is not None:
            return self._soft(student_logits, teacher)
        if labels is None:
            raise SettingsError(
                f"labels are missing: alpha={self.alpha} mixes in a hard loss; with alpha=1 none is used"
                if teacher is not None
                else "there are neither a teacher's labels nor hard ones"
            )
        hard = hard_cross_entropy(widened(student_logits), labels, self.reduction)
        if teacher is None:
            return hard
        return self.alpha * self._soft(student_logits, teacher) + (1 - self.alpha) * hard

    def extra_repr(self) -> str:
        """Return the settings, for `repr`."""
        return f"temperature={self.temperature:g}, alpha={self.alpha:g}, soft={self.soft!r}"

    def _soft(self, student_logits: Tensor, teacher: Any) -> Tensor:
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
