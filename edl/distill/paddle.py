"""Puts soft labels beside the batches of a PaddlePaddle `DataLoader`, as tensors."""

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
        teachers: Teachers to ask, as in `edl.distill.torch.distill`; an empty list for none: `(batch, None)`.
        **arguments: The other arguments of `edl.distill.torch.distill`, which describes them, `inputs` and `outputs`
            first. There is no `device`, since Paddle makes the tensors of labels on its current device, and no `ahead`.

    Returns:
        An iterable with the loader's length, of batches and their labels as Paddle's tensors.

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
        return value  # Paddle makes tensors on its current device
