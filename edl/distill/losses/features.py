"""Losses over features and embeddings."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from edl.distill.losses.terms import Reduction, as_tensor, reduced, widened
from edl.errors import SettingsError
from edl.protocol.tensors import Array

__all__ = ["feature_mse"]


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
    projected = widened(projection(student) if projection is not None else student)
    target = as_tensor(teacher, projected.device).detach().to(projected.dtype)
    if projected.shape != target.shape:
        raise SettingsError(
            f"features of the student are {list(projected.shape)}, of the teacher {list(target.shape)}: "
            "pass a projection that gives the teacher's shape, such as torch.nn.Linear or a 1x1 convolution"
        )
    return reduced((projected - target).square().flatten(1).mean(dim=1), reduction)
