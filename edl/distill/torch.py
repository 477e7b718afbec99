"""Puts soft labels beside the batches of a PyTorch `DataLoader`, as tensors."""

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

_BATCHES_AHEAD = 16
"""Enough for a few teachers that are asked for some batches at a time. More costs memory, and time before the first."""


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
        loader: Yields batches: a tensor, a tuple or list of tensors, or a mapping. Its workers, pinning and `len` work.
        teachers: A service's name, `host:port` of teachers, `Teachers`, or a list of `Teachers` for an ensemble; None
            for what the environment says (`EDL_SERVICE`, `EDL_TEACHERS`). With an empty list no teacher is asked:
            batches come in the same order as `(batch, None)`, and of the other arguments only `device` counts.
        inputs: Parts of a batch that the teachers need: names by position (None: not sent), a single name for a batch
            that is a tensor or whose first part is meant, or a mapping from name to key, position or function of the
            batch.
        outputs: Name of the teachers' output, or several names.
        discovery: URL of the registry that has the service named by `teachers`.
        route: Where in a batch each row has the value by which its teachers are found (a key such as "domain", a
            position or a function): a list, an array or a tensor, or one value for the whole batch. `teachers` is then
            a mapping from value to a service, endpoints or `Teachers`; the key None labels all other values. None
            where all services label everything.
        tokens: Where a batch of padded sequences, as collators for language models make it, has the mask of what is a
            token (a key such as "attention_mask", a position or a function), 0 and 1 [sequences, length]. The inputs
            are then [sequences, length, ...], what the mask keeps is sent, a token a row, and labels come as
            [sequences, length, ...], with 0 where the mask has 0. None for batches of rows.
        tokenizer: Path of the student's tokenizer, or its hash: teachers with another one are refused by name. Empty
            for any.
        batch_rows: Rows of a request; None for the whole batch, in pieces where it has more than 256 rows or a teacher
            accepts fewer; with `tokens`, None is 2,048 tokens, or a quarter of what a teacher lets wait.
        combine: What to make of an ensemble's answers; see `DistillReader`.
        top_k: Keep the k largest logits of a row, as `TopK` of tensors; None for whole outputs.
        temperature: Temperature at which the tail's mass is summed up with `top_k`.
        dtype: "float16" or "float32" for floating-point outputs, None for the model's own.
        version: Use labels of this version of the model only; empty for any.
        device: Device to move tensors to a batch before they are used; pinned batches without waiting.
        cache: Keeps soft labels by sample id. See `DistillReader`.
        ids: How to find the ids in a batch, with a cache: a key, a position or a function.
        dataset: What the ids mean, with a cache. See `DistillReader`.
        ahead: Number of batches to read ahead in the training loop's own thread, so that all ranks do it at the same
            place. None reads in another thread, as far ahead as teachers can use. What Accelerate has prepared is
            always read in the loop's thread, 16 batches ahead: its loaders exchange with other ranks, and count
            batches.
        options: Deadlines, memory, hedging.

    Returns:
        An iterable with the loader's length. Soft labels are a tensor [rows, ...] for a single output, a tuple for
        several (for every service of an ensemble that is not combined), `TopK` of tensors with `top_k`; None where
        `teachers` is an empty list.

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
    """Stands for a loader of Accelerate's where an `Accelerator` asks it how far it is.

    The loader is ahead of the training loop. Near its end it would report, some batches too early, that gradients must
    be synchronized.
    """

    def __init__(self, loader: Any, end_of_dataloader: bool, remainder: int) -> None:
        self._loader = loader
        self.end_of_dataloader = end_of_dataloader
        self.remainder = remainder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _is_prepared(loader: Any) -> bool:
    """Return whether a loader is what `accelerator.prepare` returned."""
    return hasattr(loader, "gradient_state") and hasattr(loader, "end_of_dataloader")
