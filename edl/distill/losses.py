"""Losses of a student that learns from soft labels, for PyTorch; `edl.distill.paddle_losses` has them for PaddlePaddle.

Logits are [rows, ..., classes]. They are computed in float32 (float64 where the student's are), whatever the precision
of the labels and of autocast; no gradient flows to the teacher. Losses over probabilities at a temperature T are
multiplied by T², so that their gradients keep their size next to a hard loss when T changes (Hinton, Vinyals, Dean,
"Distilling the Knowledge in a Neural Network", 2015, section 2). `reduction` is "mean" over all rows and positions
(`batchmean` in `torch.nn.KLDivLoss`, whose "mean" divides by the classes too), "sum", or "none" for [rows, ...].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from edl.distill.compress import TopK
from edl.errors import SettingsError
from edl.protocol.tensors import Array
from edl.settings import is_above_zero, is_share

__all__ = [
    "DistillLoss",
    "Reduction",
    "TeacherIs",
    "feature_mse",
    "kl_divergence",
    "logit_mse",
    "mix",
    "soft_cross_entropy",
    "top_k_kl",
]

Reduction: TypeAlias = Literal["mean", "sum", "none"]
"""What is made of the losses of a batch's rows, as in torch; with `none` they are returned one by one."""

TeacherIs: TypeAlias = Literal["logits", "probabilities"]
"""What the teacher's output holds."""

_SUM_TOLERANCE = 0.02  # float16 probabilities of many classes sum to 1 only so nearly


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
    log_p, log_q = _log_probabilities(student_logits, teacher, temperature, teacher_is)
    return _reduced(-_expected(log_p, log_q) * temperature**2, reduction)


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
    log_p, log_q = _log_probabilities(student_logits, teacher, temperature, teacher_is)
    return _reduced(_expected(log_p, log_p - log_q) * temperature**2, reduction)


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
    student, ids = _wide(student_logits), _tensor(teacher.ids, student_logits.device).long()
    values = _tensor(teacher.values, student.device).to(student.dtype)
    tail_lse = _tensor(teacher.tail_lse, student.device).to(student.dtype)
    _check_top_k(student, teacher, ids)
    temperature = teacher.temperature
    scaled = student / temperature
    total = scaled.logsumexp(dim=-1, keepdim=True)
    log_q = scaled.gather(-1, ids) - total
    kept = values.detach() / temperature
    if teacher.k == student.shape[-1]:  # no class is left out
        log_p = kept.log_softmax(dim=-1)
    else:
        log_p = torch.cat([kept, tail_lse.detach().unsqueeze(-1)], dim=-1).log_softmax(dim=-1)
        # The lowest finite number in place of -inf: the gradient of logsumexp over -inf alone is NaN.
        left_out = scaled.scatter(-1, ids, torch.finfo(scaled.dtype).min)
        log_q = torch.cat([log_q, left_out.logsumexp(dim=-1, keepdim=True) - total], dim=-1)
    return _reduced(_expected(log_p, log_p - log_q) * temperature**2, reduction)


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
    student = _wide(student_logits)
    teacher = _tensor(teacher_logits, student.device).detach().to(student.dtype)
    _same_shape("logits", student, teacher)
    return _reduced((student - teacher).square().mean(dim=-1), reduction)


def feature_mse(
    student: Tensor,
    teacher: Tensor | Array,
    projection: Callable[[Tensor], Tensor] | None = None,
    *,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute the squared difference of features [rows, ...], averaged over all axes but the first.

    Source: Romero et al., "FitNets: Hints for Thin Deep Nets", 2015.

    Args:
        student: features, floating-point [rows, ...].
        teacher: features [rows, ...].
        projection: brings the student's features to the teacher's shape, for example `torch.nn.Linear(128, 512)`. It is
            learned with the student: give its parameters to the optimizer, and throw it away after training.
        reduction: see the module.

    Returns:
        The loss, or losses [rows] with reduction "none".

    Raises:
        SettingsError: shapes that differ.
    """
    projected = _wide(projection(student) if projection is not None else student)
    target = _tensor(teacher, projected.device).detach().to(projected.dtype)
    if projected.shape != target.shape:
        raise SettingsError(
            f"features of the student are {list(projected.shape)}, of the teacher {list(target.shape)}: "
            "pass a projection that gives the teacher's shape, such as torch.nn.Linear or a 1x1 convolution"
        )
    return _reduced((projected - target).square().flatten(1).mean(dim=1), reduction)


def mix(hard: Tensor, soft: Tensor, alpha: float) -> Tensor:
    """Return `alpha` of the soft loss and 1 - `alpha` of the hard loss.

    Args:
        hard: loss against the true labels.
        soft: loss against the teacher.
        alpha: from 0 to 1.

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
        temperature: T of the soft loss; not used by "mse". With `TopK` labels it must be the temperature that they were
            made with.
        alpha: share of the soft loss, from 0 to 1.
        soft: "kl", "cross_entropy" or "mse" (of logits).
        teacher_is: see `soft_cross_entropy`.
        reduction: see the module.

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
        _check_temperature(temperature)
        if not is_share(alpha):
            raise SettingsError(f"alpha={alpha!r}: the share of the soft loss must be from 0 to 1")
        if soft not in ("kl", "cross_entropy", "mse"):
            raise SettingsError(f"soft={soft!r}: must be 'kl', 'cross_entropy' or 'mse'")
        _check_teacher_is(teacher_is)
        if soft == "mse" and teacher_is != "logits":
            raise SettingsError("soft='mse' compares logits: it cannot use a teacher that gives probabilities")
        _check_reduction(reduction)
        self.temperature = temperature
        self.alpha = alpha
        self.soft = soft
        self.teacher_is: TeacherIs = teacher_is
        self.reduction: Reduction = reduction

    def forward(self, student_logits: Tensor, teacher: Tensor | Array | TopK, labels: Tensor | None = None) -> Tensor:
        """Compute the loss.

        Args:
            student_logits: [rows, ..., classes].
            teacher: of the same shape, or `TopK`.
            labels: int64 [rows, ...], or probabilities of the shape of the logits; wanted unless `alpha` is 1. Rows
                with label -100 have no part in the hard loss.

        Returns:
            The loss, or losses [rows, ...] with reduction "none".

        Raises:
            SettingsError: labels that are missing, or shapes that do not agree.
        """
        if self.alpha == 1:
            return self._soft(student_logits, teacher)
        if labels is None:
            raise SettingsError(
                f"labels are missing: alpha={self.alpha} mixes in a hard loss; with alpha=1 none is used"
            )
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
        loss = F.cross_entropy(_wide(student_logits).reshape(-1, classes), target, reduction=self.reduction)
        return loss.reshape(student_logits.shape[:-1]) if self.reduction == "none" else loss


def _expected(log_p: Tensor, values: Tensor) -> Tensor:
    """Return the sum of p times `values`; values without probability add 0, even if infinite. NaN stays NaN."""
    p = log_p.exp()
    return (p * torch.where(p > 0, values, 0.0)).sum(dim=-1)


def _log_probabilities(
    student_logits: Tensor, teacher: Tensor | Array, temperature: float, teacher_is: TeacherIs
) -> tuple[Tensor, Tensor]:
    """Return the logarithms of the teacher's and the student's probabilities at `temperature`."""
    _check_temperature(temperature)
    _check_teacher_is(teacher_is)
    student = _wide(student_logits)
    given = _tensor(teacher, student.device).detach().to(student.dtype)
    _same_shape("logits", student, given)
    if teacher_is == "probabilities":
        _check_probabilities(given)
        given = given.log()
    return (given / temperature).log_softmax(dim=-1), (student / temperature).log_softmax(dim=-1)


def _wide(tensor: Tensor) -> Tensor:
    """Return the tensor as at least float32."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        what = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise SettingsError(f"the student's outputs are {what}: expected a floating-point tensor")
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _tensor(value: Tensor | Array, device: torch.device) -> Tensor:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value if value.flags.writeable else value.copy()).to(device)
    if not isinstance(value, Tensor):
        raise SettingsError(f"soft labels are {type(value).__name__}: expected a tensor or a numpy array")
    return value.to(device)


def _reduced(rows: Tensor, reduction: Reduction) -> Tensor:
    _check_reduction(reduction)
    if reduction == "none":
        return rows
    return rows.mean() if reduction == "mean" else rows.sum()


def _check_reduction(reduction: Reduction) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise SettingsError(f"reduction={reduction!r}: must be 'mean', 'sum' or 'none'")


def _check_temperature(temperature: float) -> None:
    if not is_above_zero(temperature) or temperature == float("inf"):
        raise SettingsError(f"temperature={temperature!r}: must be a finite number above 0")


def _check_teacher_is(teacher_is: TeacherIs) -> None:
    if teacher_is not in ("logits", "probabilities"):
        raise SettingsError(f"teacher_is={teacher_is!r}: must be 'logits' or 'probabilities'")


def _same_shape(what: str, student: Tensor, teacher: Tensor) -> None:
    if student.shape != teacher.shape or student.ndim < 2:
        raise SettingsError(
            f"{what} of the student are {list(student.shape)}, of the teacher {list(teacher.shape)}: "
            "both must be [rows, ..., classes]"
        )


def _check_probabilities(given: Tensor) -> None:
    """Check that labels are probabilities. On the CPU only: on an accelerator every step would wait for the device."""
    if given.device.type != "cpu" or not given.numel():
        return
    low, sums = float(given.min()), given.sum(dim=-1)
    furthest = float((sums - 1).abs().max())
    if low < 0 or not furthest <= _SUM_TOLERANCE:
        raise SettingsError(
            f"teacher_is='probabilities', but the labels reach down to {low:g} and sum to as far as {furthest:g} from "
            "1: if they are logits, pass teacher_is='logits'"
        )


def _check_top_k(student: Tensor, teacher: TopK, ids: Tensor) -> None:
    classes = student.shape[-1]
    if student.shape[:-1] != ids.shape[:-1]:
        raise SettingsError(f"logits are {list(student.shape)}, top-k labels {list(ids.shape)}: the rows do not agree")
    if teacher.k > classes or teacher.classes not in (None, classes):
        raise SettingsError(
            f"the student has {classes} classes, the teacher {teacher.classes or f'at least {teacher.k}'}"
        )
    if teacher.classes is None and ids.device.type == "cpu" and ids.numel() and int(ids.max()) >= classes:
        raise SettingsError(f"the student has {classes} classes, the labels name class {int(ids.max())}")
