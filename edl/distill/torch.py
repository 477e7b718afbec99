"""Adds soft labels, as tensors, to the batches of a PyTorch `DataLoader`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import torch
from typing_extensions import override

from edl.distill.cache import SoftLabelCache
from edl.distill.loader import DistillLoader, Inputs, TeachersLike, batch_request
from edl.distill.options import Options
from edl.distill.pipeline.answers import Combine
from edl.protocol.tensors import Array

__all__ = ["TorchLoader", "distill"]

B = TypeVar("B")

_BATCHES_AHEAD = 16  # for a few teachers with some batches in flight each; more would delay the first batch


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
    device: torch.device | str | None = None,
    cache: SoftLabelCache | None = None,
    ids: str | int | Callable[[B], Any] | None = None,
    dataset: str = "",
    ahead: int | None = None,
    options: Options | None = None,
) -> TorchLoader[B]:
    """Wrap a `DataLoader` so that it yields `(batch, soft labels)`.

    ::

        for (images, labels), logits in distill(loader, "resnet-teacher", inputs=["image", None], outputs="logits"):
            ...

    Args:
        loader: Yields batches: a tensor, a tuple or list of tensors, or a mapping. Its workers, pinned memory and `len`
            work as usual.
        teachers: A service's name, `host:port` of teachers, `Teachers`, or a list of services for an ensemble; None
            to read the environment (`EDL_SERVICE`, `EDL_TEACHERS`). If this is an empty list, no teacher is asked: the
            loader yields `(batch, None)` in the same order, and `device` is the only other argument that has an effect.
        inputs: Parts of a batch to send to the teachers: a list with the input name for each position (None: not sent);
            a single name if the batch is a tensor or only its first part is sent; or a mapping from each name to a key,
            position or function of the batch.
        outputs: Name of the teachers' output, or several names.
        discovery: URL of the registry for the service in `teachers`.
        route: Key (such as "domain"), position or function that finds, in a batch, the values that select the teachers:
            a list, array or tensor with one value per row, or a single value for the whole batch. `teachers` is then a
            mapping from each value to a service, endpoints or `Teachers`; the key None applies to all other values.
            None if all services label all rows.
        tokens: For batches of padded sequences from a language-model collator: key (such as "attention_mask"), position
            or function that finds the token mask, 0 and 1 [sequences, length]. Inputs are then [sequences, length,
            ...]; the tokens that the mask keeps are sent, one per row; labels are [sequences, length, ...], with 0
            where the mask is 0. None for batches of rows.
        tokenizer: Path of the student's tokenizer, or its hash. Teachers with a different tokenizer are not used. Empty
            for any.
        batch_rows: Rows per request; None for the whole batch, split if it has more than 256 rows or a teacher accepts
            fewer; with `tokens`, None means 2,048 tokens, or a quarter of what a teacher queues if that is less.
        combine: How to combine an ensemble's answers; see `DistillReader`.
        top_k: Number k of the largest logits per row to keep, as `TopK` of tensors; None for whole outputs.
        temperature: Temperature at which the mass of the tail is computed, with `top_k`.
        dtype: "float16" or "float32" for floating-point outputs, None for the model's own type.
        version: Use only labels of this model version; empty for any.
        device: Device to move tensors to, one batch ahead; pinned batches are moved without waiting.
        cache: Cache of soft labels by sample id. See `DistillReader`.
        ids: With a cache: key, position or function that finds the sample ids in a batch.
        dataset: With a cache: tag for what the ids mean. See `DistillReader`.
        ahead: Number of batches to read ahead in the training loop's own thread, so that all ranks read each batch at
            the same point. None to read in a separate thread, as many batches ahead as the teachers can use. Loaders
            prepared by Accelerate are always read in the loop's thread, 16 batches ahead, because they communicate with
            other ranks and count batches.
        options: Deadlines, memory and hedging; see `Options`.

    Returns:
        An iterable with the loader's length. Soft labels are a tensor [rows, ...] for a single output, or a `TopK` of
        tensors with `top_k`; a tuple of these for several outputs (for every service, if the answers of an ensemble are
        not combined); None if `teachers` is an empty list.

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
    ahead = _BATCHES_AHEAD if ahead is None and _is_prepared(loader) else ahead
    return TorchLoader(loader, request, device=torch.device(device) if device is not None else None, ahead=ahead)


class TorchLoader(DistillLoader[B]):
    """Yields `(batch, soft labels)`; made by `distill`, see `DistillLoader`."""

    _place: _DeliveredPlace | None = None

    @override
    def to_tensor(self, labels: Array) -> torch.Tensor:
        return torch.from_numpy(labels)

    @override
    def move(self, value: Any, device: torch.device) -> Any:
        return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value

    def _reading_state(self) -> Any:
        loader: Any = self.loader
        return (loader.end_of_dataloader, loader.remainder) if _is_prepared(loader) else None

    def _set_reading_state(self, state: Any) -> None:
        if not _is_prepared(self.loader):
            return
        gradient_state = self.loader.gradient_state  # type: ignore[attr-defined]
        if self._place is not None:
            gradient_state._remove_dataloader(self._place)
        self._place = _DeliveredPlace(self.loader, *state) if state is not None else None
        if self._place is not None:
            gradient_state._add_dataloader(self._place)


class _DeliveredPlace:
    """Replaces an Accelerate loader, which reads ahead, when an `Accelerator` asks for the loader's position."""

    def __init__(self, loader: Any, end_of_dataloader: bool, remainder: int) -> None:
        self._loader = loader
        self.end_of_dataloader = end_of_dataloader
        self.remainder = remainder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _is_prepared(loader: Any) -> bool:
    return hasattr(loader, "gradient_state") and hasattr(loader, "end_of_dataloader")
