"""Adds soft labels, as tensors, to the batches of a PaddlePaddle `DataLoader`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import paddle
from typing_extensions import override

from edl.distill.loader import DistillLoader, TeachersLike, batch_request
from edl.protocol.tensors import Array

__all__ = ["PaddleLoader", "distill"]

B = TypeVar("B")


def distill(loader: Iterable[B], teachers: TeachersLike = None, **arguments: Any) -> PaddleLoader[B]:
    """Wrap a `paddle.io.DataLoader` so that it yields `(batch, soft labels)`.

    Args:
        loader: Yields batches, such as a `paddle.io.DataLoader`.
        teachers: Teachers to ask, as in `edl.distill.torch.distill`; if this is an empty list, the loader yields
            `(batch, None)`.
        **arguments: The other arguments of `edl.distill.torch.distill`, such as `inputs` and `outputs`, except `device`
            and `ahead`: Paddle creates the tensors of labels on its current device.

    Returns:
        An iterable of batches with their labels as Paddle tensors. It has the loader's length.

    Raises:
        SettingsError: An argument is invalid.
    """
    return PaddleLoader(loader, batch_request(teachers, **arguments))


class PaddleLoader(DistillLoader[B]):
    """Yields `(batch, soft labels)`; made by `distill`, see `DistillLoader`."""

    @override
    def to_tensor(self, labels: Array) -> Any:
        return paddle.to_tensor(labels)

    @override
    def move(self, value: Any, device: Any) -> Any:
        return value  # Paddle creates tensors on its current device
