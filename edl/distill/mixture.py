"""What the losses of PyTorch and PaddlePaddle share: settings, checks of these, and the mixture with a hard loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from edl.distill.compress import TopK
from edl.errors import SettingsError
from edl.settings import is_above_zero, is_share

Reduction: TypeAlias = Literal["mean", "sum", "none"]
"""How the losses of a batch's rows are reduced, as in torch; with `none` they are returned one by one."""

TeacherIs: TypeAlias = Literal["logits", "probabilities"]
"""Kind of the teacher's output."""

NO_LABEL = -100
"""The label of a row that has no hard label: `ignore_index` of PyTorch and PaddlePaddle."""

FLOOR = 1e-6
"""Smallest probability of the teacher in the reverse direction, so that a token costs at most 14 nats. Sums of float32
probabilities have errors of about 1e-7, so with a smaller floor a student would learn the tail's rounding errors. A
larger floor would tolerate tokens that the teacher finds improbable."""


def check_reduction(reduction: Reduction) -> None:
    """Raise a `SettingsError` for a reduction that is not known."""
    if reduction not in ("mean", "sum", "none"):
        raise SettingsError(f"reduction={reduction!r}: must be 'mean', 'sum' or 'none'")


def check_temperature(temperature: float) -> None:
    """Raise a `SettingsError` for a temperature that is not above 0 and finite."""
    if not is_above_zero(temperature) or temperature == float("inf"):
        raise SettingsError(f"temperature={temperature!r}: must be a finite number above 0")


def check_teacher_is(teacher_is: TeacherIs) -> None:
    """Raise a `SettingsError` for a kind of outputs that is not known."""
    if teacher_is not in ("logits", "probabilities"):
        raise SettingsError(f"teacher_is={teacher_is!r}: must be 'logits' or 'probabilities'")


def check_divergence(labels: TopK, beta: float, temperature: float | None, floor: float) -> None:
    """Raise a `SettingsError` for invalid labels or settings of a token loss."""
    if not isinstance(labels, TopK):
        raise SettingsError(f"labels are {type(labels).__name__}: expected TopK; edl.distill.compress.top_k makes them")
    if not is_share(beta):
        raise SettingsError(f"beta={beta!r}: must be from 0 (forward KL) to 1 (reverse KL)")
    if not is_above_zero(floor) or floor >= 1:
        raise SettingsError(f"floor={floor!r}: must be a probability above 0 and below 1")
    if temperature is not None and temperature != labels.temperature:
        raise SettingsError(
            f"top-k labels were made at temperature {labels.temperature:g}, the loss uses {temperature!r}: "
            "ask the teachers for that temperature"
        )


def check_hard_weight(hard_weight: float, hard_labels: object) -> None:
    """Raise a `SettingsError` for a share of the cross-entropy that cannot be, or lacks its labels."""
    if not is_share(hard_weight):
        raise SettingsError(f"hard_weight={hard_weight!r}: the share of the cross-entropy must be from 0 to 1")
    if hard_weight and hard_labels is None:
        raise SettingsError(f"hard_weight={hard_weight} mixes in the cross-entropy with hard_labels, which are missing")


class MixedLoss:
    """The mixture of a soft and a hard loss, out of a framework's losses."""

    kl_divergence: Callable[..., Any]
    soft_cross_entropy: Callable[..., Any]
    logit_mse: Callable[..., Any]
    top_k_kl: Callable[..., Any]
    hard_loss: Callable[..., Any]  # of logits, labels and a reduction

    def _set(self, temperature: float, alpha: float, soft: str, teacher_is: TeacherIs, reduction: Reduction) -> None:
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

    def forward(self, student_logits: Any, teacher: Any, labels: Any = None) -> Any:
        """Compute the loss.

        Args:
            student_logits: Logits of the student, [rows, ..., classes].
            teacher: Outputs of the teacher, of the same shape, or `TopK`. None for the hard loss alone, as in batches
                without teachers.
            labels: True classes, whole numbers [rows, ...] (in PaddlePaddle also [rows, ..., 1]), or probabilities of
                the shape of the logits; required unless `alpha` is 1 and there is a teacher. Rows with label -100 do
                not count in the hard loss, which is 0 if all rows have it.

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
        hard = self.hard_loss(student_logits, labels, self.reduction)
        return hard if teacher is None else self.alpha * self._soft(student_logits, teacher) + (1 - self.alpha) * hard

    def extra_repr(self) -> str:
        """Return the settings, for `repr`."""
        return f"temperature={self.temperature:g}, alpha={self.alpha:g}, soft={self.soft!r}"

    def _soft(self, student_logits: Any, teacher: Any) -> Any:
        if isinstance(teacher, TopK):
            if self.soft != "kl":
                raise SettingsError(f"top-k labels go with soft='kl', not {self.soft!r}")
            if teacher.temperature != self.temperature:
                raise SettingsError(
                    f"top-k labels were made at temperature {teacher.temperature:g}, the loss uses "
                    f"{self.temperature:g}: ask the teachers for temperature={self.temperature:g}"
                )
            return self.top_k_kl(student_logits, teacher, reduction=self.reduction)
        if self.soft == "mse":
            return self.logit_mse(student_logits, teacher, reduction=self.reduction)
        loss = self.kl_divergence if self.soft == "kl" else self.soft_cross_entropy
        settings = {"temperature": self.temperature, "teacher_is": self.teacher_is, "reduction": self.reduction}
        return loss(student_logits, teacher, **settings)
