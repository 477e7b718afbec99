"""Losses of image classifiers beyond the divergence of two distributions."""

from __future__ import annotations

import torch
from torch import Tensor

from edl.distill.losses.terms import (
    Reduction,
    as_tensor,
    check_same_shape,
    check_temperature,
    expected,
    reduced,
    unit_vectors,
    widened,
)
from edl.errors import SettingsError
from edl.protocol.tensors import Array
from edl.settings import is_above_zero

__all__ = ["correlation_loss", "decoupled_kl"]


def decoupled_kl(
    student_logits: Tensor,
    teacher_logits: Tensor | Array,
    labels: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 8.0,
    temperature: float = 4.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute T² times (`alpha` TCKD + `beta` NCKD), decoupled knowledge distillation (DKD).

    TCKD is the KL of whether it is the true class or another, NCKD that of which of the other classes it is. With
    `alpha` 1 and, for each row, `beta` 1 minus the teacher's probability of the true class, this would be the KL of the
    whole distributions: a sure teacher's knowledge of the other classes then weighs next to nothing.

    Source: Zhao et al., "Decoupled Knowledge Distillation", 2022, with weights as in the authors' program.

    Args:
        student_logits: floating-point [rows, ..., classes], at least two classes.
        teacher_logits: of the same shape.
        labels: true classes, whole numbers [rows, ...].
        alpha: weight of TCKD, at least 0.
        beta: weight of NCKD, at least 0.
        temperature: T, above 0.
        reduction: see the module.

    Returns:
        The loss, or losses [rows, ...] with reduction "none".

    Raises:
        SettingsError: shapes, types or values that cannot be.
    """
    check_temperature(temperature)
    _check_weights(alpha=alpha, beta=beta)
    student = widened(student_logits)
    teacher = as_tensor(teacher_logits, student.device).detach().to(student.dtype)
    check_same_shape("logits", student, teacher)
    if labels.shape != student.shape[:-1] or labels.is_floating_point():
        raise SettingsError(
            f"labels are {labels.dtype} {list(labels.shape)}: expected whole numbers {list(student.shape[:-1])}"
        )
    true = labels.to(student.device).long().unsqueeze(-1)
    # The lowest finite number in place of -inf: the gradient of logsumexp over -inf alone is NaN.
    lowest = torch.finfo(student.dtype).min
    binary, others = [], []
    for logits in (teacher, student):
        scaled = logits / temperature
        rest = scaled.scatter(-1, true, lowest)
        rest_lse = rest.logsumexp(dim=-1, keepdim=True)
        binary.append(torch.cat([scaled.gather(-1, true), rest_lse], dim=-1).log_softmax(dim=-1))
        # The true class has no part in either; 0 in place of the lowest number, which T² would make infinite.
        others.append((rest - rest_lse).scatter(-1, true, 0.0))
    of_others = torch.ones_like(teacher).scatter(-1, true, 0.0)
    tckd = expected(binary[0], binary[0] - binary[1])
    weights = others[0].exp() * of_others
    nckd = (weights * torch.where(weights > 0, others[0] - others[1], 0.0)).sum(dim=-1)
    return reduced((alpha * tckd + beta * nckd) * temperature**2, reduction)


def correlation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor | Array,
    *,
    beta: float = 1.0,
    gamma: float = 1.0,
    temperature: float = 1.0,
) -> Tensor:
    """Compute T² times (`beta` (1 - inter) + `gamma` (1 - intra)), DIST.

    Inter is Pearson's correlation of the two models' probabilities over the classes, averaged over rows; intra is that
    over the rows, averaged over classes. So the student matches which class is likelier than which, and in which row a
    class is likelier, but not the probabilities: easier than KL where the teacher is much stronger.

    Source: Huang et al., "Knowledge Distillation from A Stronger Teacher", 2022.

    Args:
        student_logits: floating-point [rows, classes]. Rows whose probabilities are all equal have correlation 0, and
            so have classes with the same probability in all rows, as in a batch of a single row.
        teacher_logits: of the same shape.
        beta: weight of the relation between classes, at least 0.
        gamma: weight of the relation within classes, at least 0.
        temperature: T, above 0.

    Returns:
        The loss of the batch, from 0 to 2 T² (`beta` + `gamma`); rows have none of their own.

    Raises:
        SettingsError: shapes, types or values that cannot be.
    """
    check_temperature(temperature)
    _check_weights(beta=beta, gamma=gamma)
    student = widened(student_logits)
    teacher = as_tensor(teacher_logits, student.device).detach().to(student.dtype)
    check_same_shape("logits", student, teacher)
    if student.ndim != 2:
        raise SettingsError(f"logits are {list(student.shape)}: expected [rows, classes]")
    q, p = (student / temperature).softmax(dim=-1), (teacher / temperature).softmax(dim=-1)
    inter, intra = _pearson(q, p).mean(), _pearson(q.T, p.T).mean()
    return temperature**2 * (beta * (1 - inter) + gamma * (1 - intra))


def _pearson(first: Tensor, second: Tensor) -> Tensor:
    """Return the correlation coefficient of each row of two matrices."""
    centred = [values - values.mean(dim=1, keepdim=True) for values in (first, second)]
    return (unit_vectors(centred[0]) * unit_vectors(centred[1])).sum(dim=1)


def _check_weights(**weights: float) -> None:
    for name, weight in weights.items():
        if weight != 0 and not (is_above_zero(weight) and weight < float("inf")):
            raise SettingsError(f"{name}={weight!r}: must be a finite number of at least 0")
