"""Losses over features and embeddings."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from edl.distill.divergences import Reduction, reduced, teachers_part, widened
from edl.errors import SettingsError
from edl.protocol.tensors import Array

_LEAST_ELEMENT = 1e-8
"""Vectors without a larger element count as zero and get no gradient, because the gradient grows as a vector gets
smaller. With a smaller bound, rounding errors (about 1e-9 for float32 probabilities around 0.01) would be taken for a
direction."""


def _unit_vectors(vectors: Tensor) -> Tensor:
    """Return vectors [..., features] scaled to length 1, and zeros for vectors without a direction."""
    largest = vectors.detach().abs().amax(dim=-1, keepdim=True)
    missing = largest <= _LEAST_ELEMENT  # false for NaN, which stays NaN
    scaled = vectors / largest.masked_fill(missing, 1.0)  # squares of large elements would overflow
    squares = scaled.square().sum(dim=-1, keepdim=True)
    return (scaled / squares.masked_fill(missing, 1.0).sqrt()).masked_fill(missing, 0.0)


def feature_mse(
    student: Tensor,
    teacher: Tensor | Array,
    projection: Callable[[Tensor], Tensor] | None = None,
    *,
    reduction: Reduction = "mean",
) -> Tensor:
    """Return the squared difference between features [rows, ...], averaged over all axes but the first.

    Source: Romero et al., "FitNets: Hints for Thin Deep Nets", 2015.

    Args:
        student: Features of the student, floating-point [rows, ...].
        teacher: Features of the teacher, [rows, ...].
        projection: Module that maps the student's features to the teacher's shape, for example `torch.nn.Linear(128,
            512)`. The module is trained with the student: give its parameters to the optimizer, and discard it after
            training.
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
