"""Soft labels for a PyTorch `DataLoader`: the same batches, each with the teachers' answer as tensors."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

import torch

from edl.distill.compress import TopK
from edl.distill.delivery import Combine, Combiner, in_order, rows_of
from edl.distill.epoch import Epoch
from edl.distill.labeller import Labeller, Options
from edl.distill.request import Ask
from edl.distill.source import BatchCutter, Getter
from edl.distill.stats import ReaderStats
from edl.distill.teachers import Teachers
from edl.errors import SettingsError
from edl.protocol.transport import FORK_HANDLERS

__all__ = ["DistillLoader", "distill"]

logger = logging.getLogger("edl.distill")

B = TypeVar("B")


def distill(
    loader: Iterable[B],
    teachers: str | Sequence[str] | Teachers | Sequence[Teachers] | None = None,
    *,
    inputs: str | Sequence[str | None] | Mapping[str, str | int | Callable[[B], Any]],
    outputs: str | Sequence[str],
    discovery: str | None = None,
    batch_rows: int | None = None,
    combine: Combine = "each",
    top_k: int | None = None,
    temperature: float = 1.0,
    dtype: Literal["float16", "float32"] | None = None,
    device: torch.device | str | None = None,
    options: Options | None = None,
) -> DistillLoader[B]:
    """Wrap a `DataLoader` so that it yields `(batch, soft labels)`.

    ::

        for (images, labels), logits in distill(loader, "resnet-teacher", inputs=["image", None], outputs="logits"):
            ...

    Args:
        loader: yields batches: a tensor, a tuple or list of tensors, or a mapping. Its workers, pinning and `len` work.
        teachers: a service's name, `host:port` of teachers, `Teachers`, or a list of `Teachers` for an ensemble;
            None for what the environment says (`EDL_SERVICE`, `EDL_TEACHERS`).
        inputs: which parts of a batch the teachers need: names by position (None: not sent), one name for a batch that
            is a tensor or whose first part is meant, or a mapping from name to key, position or function of the batch.
        outputs: the teachers' output, or several.
        discovery: URL of the registry that `teachers` names a service of.
        batch_rows: rows of one request; None for the whole batch.
        combine, top_k, temperature, dtype: see `DistillReader`.
        device: move tensors there one batch ahead of use; pinned batches without waiting.
        options: deadlines, memory, hedging.

    Returns:
        An iterable with the loader's length. Soft labels are a tensor [rows, ...] for one output, a tuple for several
        (for each service of an ensemble that is not combined), `TopK` of tensors with `top_k`.
    """
    return DistillLoader(
        loader,
        _teachers(teachers, discovery),
        getters=_getters(inputs),
        ask=Ask(
            (outputs,) if isinstance(outputs, str) else tuple(outputs),
            top_k=top_k,
            temperature=temperature,
            dtype=dtype,
        ),
        batch_rows=batch_rows,
        combine=combine,
        device=torch.device(device) if device is not None else None,
        options=options or Options(),
    )


class DistillLoader(Generic[B]):
    """What `distill` returns. Iterate it once an epoch; `close` it, or let it go, when done."""

    def __init__(
        self,
        loader: Iterable[B],
        teachers: list[Teachers],
        *,
        getters: Mapping[str, Getter],
        ask: Ask,
        batch_rows: int | None,
        combine: Combine,
        device: torch.device | None,
        options: Options,
    ) -> None:
        if FORK_HANDLERS and getattr(loader, "num_workers", False):
            logger.warning(
                "grpc was imported before edl, with its fork handlers on, which can crash DataLoader workers: "
                "import edl.distill first, or set GRPC_ENABLE_FORK_SUPPORT=0"
            )
        self.loader = loader
        self._getters, self._batch_rows, self._device = getters, batch_rows, device
        self._outputs = ask.outputs
        self._combiner = Combiner(combine, [group.weight for group in teachers])
        self._services = len(teachers)
        self._epoch: Epoch | None = None
        self._labeller = Labeller(teachers, ask, options)
        self._finalizer = weakref.finalize(self, Labeller.close, self._labeller)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[tuple[B, Any]]:
        self._labeller.check()
        if self._epoch is not None:
            self._epoch.close()
        cutter = BatchCutter(self._getters, self._batch_rows, self._services)
        # The loader's workers are started here, in the caller's thread, where a fork is as safe as without EDL.
        self._epoch = Epoch(self._labeller, iter(self.loader), cutter)
        return self._ahead(self._labelled(self._epoch))

    def stats(self) -> ReaderStats:
        """What has been done so far; may be called from any thread."""
        return self._labeller.stats()

    def close(self) -> None:
        """End the epoch and all connections."""
        if self._epoch is not None:
            self._epoch.close()
        self._labeller.close()

    def __enter__(self) -> DistillLoader[B]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _labelled(self, epoch: Epoch) -> Iterator[tuple[B, Any]]:
        try:
            for item in epoch:
                combined = self._combiner([rows_of(item, service) for service in range(self._services)])
                epoch.taken(item)
                labels = [_to_tensor(value) for outputs in combined for value in in_order(outputs, self._outputs)]
                yield item.value, labels[0] if len(labels) == 1 else tuple(labels)
        finally:
            epoch.close()

    def _ahead(self, batches: Iterator[tuple[B, Any]]) -> Iterator[tuple[B, Any]]:
        """With a device, start moving the next batch before this one is used."""
        if self._device is None:
            yield from batches
            return
        waiting: deque[tuple[B, Any]] = deque()
        for batch in batches:
            waiting.append(_moved(batch, self._device))
            if len(waiting) > 1:
                yield waiting.popleft()
        yield from waiting


def _teachers(
    teachers: str | Sequence[str] | Teachers | Sequence[Teachers] | None, discovery: str | None
) -> list[Teachers]:
    if teachers is None:
        return [Teachers.from_env()]
    if isinstance(teachers, str | Teachers):
        return [Teachers.parse(teachers, discovery=discovery)]
    groups = [group for group in teachers if isinstance(group, Teachers)]
    if groups and len(groups) == len(teachers):
        return groups
    return [Teachers.parse([part for part in teachers if isinstance(part, str)])]


def _getters(inputs: str | Sequence[str | None] | Mapping[str, Any]) -> dict[str, Getter]:
    if isinstance(inputs, str):
        return {inputs: lambda batch: batch if isinstance(batch, torch.Tensor) else batch[0]}
    if isinstance(inputs, Mapping):
        return {name: key if callable(key) else _at(key) for name, key in inputs.items()}
    found = {name: _at(index) for index, name in enumerate(inputs) if name}
    if not found:
        raise SettingsError(f"inputs={inputs!r}: name at least one input of the teachers")
    return found


def _at(key: str | int) -> Getter:
    return lambda batch: batch[key]


def _to_tensor(value: Any) -> Any:
    if isinstance(value, TopK):
        return value.map(lambda array: torch.from_numpy(array.copy()))
    return torch.from_numpy(value)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, TopK):
        return value.map(lambda tensor: _moved(tensor, device))
    if isinstance(value, Mapping):
        return {key: _moved(part, device) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(part, device) for part in value))
    if isinstance(value, tuple | list):
        return type(value)(_moved(part, device) for part in value)
    return value
