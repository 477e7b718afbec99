"""Puts soft labels beside the batches of a PaddlePaddle `DataLoader`, as tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import paddle

from edl.distill.cache import SoftLabelCache
from edl.distill.loader import DistillLoader, Inputs, TeachersLike, batch_request
from edl.distill.options import Options
from edl.distill.pipeline.answers import Combine
from edl.protocol.tensors import Array

__all__ = ["PaddleLoader", "distill"]

B = TypeVar("B")


def distill(
    loader: Iterable[B],
    teachers: TeachersLike = None,
    *,
    inputs: Inputs,
    outputs: str | Sequence[str],
    discovery: str | None = None,
    route: str | int | Callable[[B], Any] | None = None,
    tokens: str | int | Callable[[B], Any] | None = None,
    tokenizer: str | os.PathLike[str] = "",
    batch_rows: int | None = None,
    combine: Combine = "each",
    top_k: int | None = None,
    temperature: float = 1.0,
    dtype: Literal["float16", "float32"] | None = None,
    version: str = "",
    cache: SoftLabelCache | None = None,
    ids: str | int | Callable[[B], Any] | None = None,
    dataset: str = "",
    options: Options | None = None,
) -> PaddleLoader[B]:
    """Wrap a `paddle.io.DataLoader` so that it yields `(batch, soft labels)`.

    The arguments are those of `edl.distill.torch.distill`, but for `device`: Paddle makes the tensors of labels on its
    current device. They are described there.

    Args:
        loader: Yields batches, such as a `paddle.io.DataLoader`.
        teachers: Teachers to ask; an empty list for none: `(batch, None)`.
        inputs: See there.
        outputs: See there.
        discovery: See there.
        route: See there.
        tokens: See there.
        tokenizer: See there.
        batch_rows: See there.
        combine: See there.
        top_k: See there.
        temperature: See there.
        dtype: See there.
        version: See there.
        cache: See there.
        ids: See there.
        dataset: See there.
        options: See there.

    Returns:
        An iterable with the loader's length, of batches and their labels as Paddle's tensors.

    Raises:
        SettingsError: An argument is invalid.
    """
    request = batch_request(
        teachers,
        inputs=inputs,
        outputs=outputs,
        discovery=discovery,
        route=route,
        tokens=tokens,
        tokenizer=tokenizer,
        batch_rows=batch_rows,
        combine=combine,
        top_k=top_k,
        temperature=temperature,
        dtype=dtype,
        version=version,
        cache=cache,
        ids=ids,
        dataset=dataset,
        options=options,
    )
    return PaddleLoader(loader, request)


class PaddleLoader(DistillLoader[B]):
    """Yields `(batch, soft labels)`; made by `distill`, see `DistillLoader`."""

    def to_tensor(self, labels: Array) -> Any:
        """Return a tensor of `labels`, on Paddle's current device.

        Args:
            labels: Array of any shape.
        """
        return paddle.to_tensor(labels)

    def move(self, value: Any, device: Any) -> Any:
        """Return the value as it is: Paddle makes tensors on its current device.

        Args:
            value: Part of a batch, or labels.
            device: Not used.
        """
        return value
