"""Losses over features and embeddings, and losses for image classifiers beyond the divergence of two distributions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from edl.distill.divergences import (
    Reduction,
    check_classes,
    check_temperature,
    expected,
    of_one_shape,
    reduced,
    teachers_part,
    widened,
)
from edl.distill.losses.mixture import TORCH
from edl.errors import SettingsError
from edl.protocol.tensors import Array
from edl.settings import is_above_zero

_LEAST_ELEMENT = 1e-8
"""Vectors without a larger element count as zero and get no gradient, which would be as large as they are small. With a
smaller bound, rounding errors (about 1e-9 for float32 probabilities around 0.01) would count as directions."""


def _unit_vectors(vectors: Tensor) -> Tensor:
    """Return vectors [..., features] of any size scaled to length 1, and zeros for vectors without a direction."""
    largest = vectors.detach().abs().amax(dim=-1, keepdim=True)
    missing = largest <= _LEAST_ELEMENT  # false for NaN, which stays NaN
    # Divided by the largest element first: squares of large ones overflow.
    scaled = vectors / largest.masked_fill(missing, 1.0)
    squares = scaled.square().sum(dim=-1, keepdim=True)
    return (scaled / squares.masked_fill(missing, 1.0).sqrt()).masked_fill(missing, 0.0)


def feature_mse(
    student: Tensor,
    teacher: Tensor | Array,
    projection: Callable[[Tensor], Tensor] | None = None,
    *,
    reduction: Reduction = "mean",
) -> Tensor:
    """Return the squared difference of features [rows, ...], averaged over all axes but the first.

    Source: Romero et al., "FitNets: Hints for Thin Deep Nets", 2015.

    Args:
        student: Features of the student, floating-point [rows, ...].
        teacher: Features of the teacher, [rows, ...].
        projection: Module that maps the student's features to the teacher's shape, for example `torch.nn.Linear(128,
            512)`. It learns with the student: give its parameters to the optimizer, and discard it after training.
        reduction: Reduction over rows; see `edl.distill.losses`.
    """
    projected, target = _projected(student, teacher, projection)
    return reduced((projected - target).square().flatten(1).mean(dim=1), reduction)


def feature_cosine(
    student: Tensor,
    teacher: Tensor | Array,
    projection: Callable[[Tensor], Tensor] | None = None,
    *,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute 1 minus the cosine of the angle between embeddings [rows, ..., features].

    Source: the cosine embedding loss of Sanh et al., "DistilBERT", 2019.

    Args:
        student: Embeddings of the student, floating-point [rows, ..., features].
        teacher: Embeddings of the teacher with the same number of features.
        projection: Module for the student's features; see `feature_mse`.
        reduction: Reduction: "mean" over rows and positions, "sum", or "none" for [rows, ...].

    Returns:
        The loss, from 0 to 2, or losses [rows, ...] with reduction "none". An embedding of zeros has cosine 0.
    """
    projected, target = _projected(student, teacher, projection)
    return reduced(1 - (_unit_vectors(projected) * _unit_vectors(target)).sum(dim=-1), reduction)


def contrastive(
    student: Tensor,
    teacher: Tensor | Array,
    projection: Callable[[Tensor], Tensor] | None = None,
    *,
    temperature: float = 0.07,
    negatives: Tensor | Array | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Return the cross-entropy of finding the teacher's embedding of the same row among those of all rows (InfoNCE).

    Similarities are cosines divided by `temperature`. This loss is often mistaken for CRD. Both maximize the mutual
    information of the embeddings, but CRD estimates it by noise contrastive estimation with thousands of negatives from
    a memory.

    Sources: van den Oord et al., "Representation Learning with Contrastive Predictive Coding", 2018; Tian,
    Krishnan, Isola, "Contrastive Representation Distillation", 2020.

    Args:
        student: Embeddings of the student, floating-point [rows, features]; at least two rows unless there are
            negatives.
        teacher: Embeddings of the teacher, [rows, features].
        projection: Module for the student's features; see `feature_mse`.
        temperature: Temperature of the similarities, above 0.
        negatives: More teacher embeddings of other rows, [any number, features], from a queue or from other processes.
        reduction: Reduction over rows; see `edl.distill.losses`.

    Raises:
        SettingsError: A shape or the temperature is invalid.
    """
    check_temperature(temperature)
    projected, target = _projected(student, teacher, projection)
    if projected.ndim != 2:
        raise SettingsError(f"embeddings are {list(projected.shape)}: expected [rows, features]")
    candidates = target
    if negatives is not None:
        others = teachers_part(negatives, projected)
        if others.ndim != 2 or others.shape[1] != projected.shape[1]:
            raise SettingsError(f"negatives are {list(others.shape)}: expected [any number, {projected.shape[1]}]")
        candidates = torch.cat([target, others])
    with torch.autocast(projected.device.type, enabled=False):  # autocast would multiply in half precision
        similarities = _unit_vectors(projected) @ _unit_vectors(candidates).T / temperature
    if similarities.shape[0] and similarities.shape[1] < 2:
        raise SettingsError("a single row has nothing to contrast with: pass more rows, or negatives")
    return reduced(-similarities.log_softmax(dim=-1).diagonal(), reduction)


def attention_transfer(student: Tensor, teacher: Tensor | Array, *, reduction: Reduction = "mean") -> Tensor:
    """Compute the squared difference of spatial attention maps, averaged over positions.

    The map of features [rows, channels, ...] is the sum of squares over the channels, scaled to length 1, so that
    teacher and student may have different numbers of channels. The mean of squares is what the authors' program uses;
    their paper uses the length of the difference.

    Source: Zagoruyko and Komodakis, "Paying More Attention to Attention", 2017.

    Args:
        student: Features of a layer of the student, floating-point [rows, channels, height, width] or with other
            spatial axes.
        teacher: Features of the teacher, [rows, channels, height, width], of the same height and width.
        reduction: Reduction over rows; see `edl.distill.losses`.

    Returns:
        The loss, or losses [rows] with reduction "none". Sum it over layers, with a weight of about 1,000 next to a
        hard loss.

    Raises:
        SettingsError: The shapes do not agree.
    """
    ours = widened(student)
    theirs = teachers_part(teacher, ours)
    if ours.ndim < 3 or ours.shape[0] != theirs.shape[0] or ours.shape[2:] != theirs.shape[2:]:
        raise SettingsError(
            f"the student's features are {list(ours.shape)}, the teacher's {list(theirs.shape)}: both must be "
            "[rows, channels, height, width] with the same rows, height and width; resize one of them"
        )
    maps = [_attention(features) for features in (ours, theirs)]
    return reduced((maps[0] - maps[1]).square().mean(dim=1), reduction)


def _attention(features: Tensor) -> Tensor:
    """Return maps [rows, positions] of length 1."""
    largest = features.detach().abs().flatten(1).amax(dim=1).clamp(min=torch.finfo(features.dtype).tiny)
    # The map does not depend on the features' scale, but squares of large ones overflow and of small ones vanish.
    scaled = features / largest.reshape(-1, *(1,) * (features.ndim - 1))
    return _unit_vectors(scaled.square().sum(dim=1).flatten(1))


def _projected(
    student: Tensor, teacher: Tensor | Array, projection: Callable[[Tensor], Tensor] | None
) -> tuple[Tensor, Tensor]:
    projected = widened(projection(student) if projection is not None else student)
    target = teachers_part(teacher, projected)
    if projected.shape != target.shape:
        raise SettingsError(
            f"the student's features are {list(projected.shape)}, the teacher's {list(target.shape)}: "
            "pass a projection that gives the teacher's shape, such as torch.nn.Linear or a 1x1 convolution"
        )
    return projected, target


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
    """Return T² times (`alpha` TCKD + `beta` NCKD), decoupled knowledge distillation (DKD).

    TCKD is the KL divergence over two classes (the true class, and all others together). NCKD is the KL divergence
    among the other classes. With `alpha` 1 and, for each row, `beta` equal to 1 minus the teacher's probability of the
    true class, this would be the KL of the whole distributions, in which a confident teacher's knowledge of the other
    classes has almost no weight.

    Source: Zhao et al., "Decoupled Knowledge Distillation", 2022, with weights as in the authors' program.

    Args:
        student_logits: Logits of the student, floating-point [rows, ..., classes], at least two classes.
        teacher_logits: Logits of the teacher, of the same shape.
        labels: True classes, whole numbers [rows, ...].
        alpha: Weight of TCKD, at least 0.
        beta: Weight of NCKD, at least 0.
        temperature: Temperature T, above 0.
        reduction: Reduction over rows; see `edl.distill.losses`.

    Raises:
        SettingsError: A shape, type or value is invalid.
    """
    check_temperature(temperature)
    _check_weights(alpha=alpha, beta=beta)
    student, teacher = of_one_shape(student_logits, teacher_logits)
    if labels.shape != student.shape[:-1] or labels.is_floating_point():
        raise SettingsError(
            f"labels are {labels.dtype} {list(labels.shape)}: expected whole numbers {list(student.shape[:-1])}"
        )
    check_classes(TORCH, labels, student.shape[-1])
    true = labels.to(student.device).long().unsqueeze(-1)
    # The lowest finite number in place of -inf: the gradient of logsumexp over -inf alone is NaN.
    lowest = torch.finfo(student.dtype).min
    binary, others = [], []
    for logits in (teacher, student):
        scaled = logits / temperature
        rest = scaled.scatter(-1, true, lowest)
        rest_lse = rest.logsumexp(dim=-1, keepdim=True)
        binary.append(torch.cat([scaled.gather(-1, true), rest_lse], dim=-1).log_softmax(dim=-1))
        # The true class does not count in either; use 0 instead of the lowest number, which T² would make infinite.
        others.append((rest - rest_lse).scatter(-1, true, 0.0))
    of_others = torch.ones_like(teacher).scatter(-1, true, 0.0)
    tckd = expected(binary[0], binary[0] - binary[1])
    weights = others[0].exp() * of_others
    nckd = (weights * torch.where(weights > 0, others[0] - others[1], 0.0)).sum(dim=-1)
    losses: Tensor = (alpha * tckd + beta * nckd) * temperature**2
    return reduced(losses, reduction)


def correlation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor | Array,
    *,
    beta: float = 1.0,
    gamma: float = 1.0,
    temperature: float = 1.0,
) -> Tensor:
    """Compute T² times (`beta` (1 - inter) + `gamma` (1 - intra)), DIST.

    Inter is Pearson's correlation of the two models' probabilities over the classes, averaged over rows; intra is the
    correlation over the rows, averaged over classes. So the student learns which classes are more likely in a row, and
    in which rows a class is, but not the exact probabilities. This is easier than KL if the teacher is much stronger.

    Source: Huang et al., "Knowledge Distillation from A Stronger Teacher", 2022.

    Args:
        student_logits: Logits of the student, floating-point [rows, classes]. Rows whose probabilities are all equal
            have correlation 0, as do classes with the same probability in all rows, such as in a batch of one row.
        teacher_logits: Logits of the teacher, of the same shape.
        beta: Weight of the relation between classes, at least 0.
        gamma: Weight of the relation within classes, at least 0.
        temperature: Temperature T, above 0.

    Returns:
        The loss of the batch, from 0 to 2 T² (`beta` + `gamma`). There is no loss per row.

    Raises:
        SettingsError: A shape, type or value is invalid.
    """
    check_temperature(temperature)
    _check_weights(beta=beta, gamma=gamma)
    student, teacher = of_one_shape(student_logits, teacher_logits)
    if student.ndim != 2:
        raise SettingsError(f"logits are {list(student.shape)}: expected [rows, classes]")
    q, p = (student / temperature).softmax(dim=-1), (teacher / temperature).softmax(dim=-1)
    inter, intra = _pearson(q, p).mean(), _pearson(q.T, p.T).mean()
    return temperature**2 * (beta * (1 - inter) + gamma * (1 - intra))


def _pearson(first: Tensor, second: Tensor) -> Tensor:
    """Return the correlation coefficient of each row of two matrices."""
    centred = [values - values.mean(dim=1, keepdim=True) for values in (first, second)]
    return (_unit_vectors(centred[0]) * _unit_vectors(centred[1])).sum(dim=1)


def _check_weights(**weights: float) -> None:
    for name, weight in weights.items():
        if weight != 0 and not (is_above_zero(weight) and weight < float("inf")):
            raise SettingsError(f"{name}={weight!r}: must be a finite number of at least 0")
