"""The user's data cut into requests: samples gathered, batches split, and where each row of an item went.

Pure: no threads and no network. Whatever a source yields that cannot be sent is a `SourceError` that names the item,
the field and the remedy.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from edl.distill.request import Outputs
from edl.errors import SourceError
from edl.protocol.tensors import Array

__all__ = ["BatchCutter", "Chunk", "Cutter", "Item", "SampleCutter", "SampleListCutter", "as_array"]


@dataclass(eq=False)
class Chunk:
    """Rows that are asked for together, and what came back.

    Attributes:
        outputs: one entry a service, None until its answer is there.
        error: why there are no outputs; then the chunk counts as done.
        left: rows that the training loop has not taken yet.
    """

    services: int
    rows: int = 0
    left: int = 0
    nbytes: int = 0
    fields: dict[str, Array] = field(default_factory=dict)
    ids: Sequence[Any] | None = None
    outputs: list[Outputs | None] = field(default_factory=list)
    jobs: list[tuple[int, int]] = field(default_factory=list)  # (service, number of the job there)
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.outputs = [None] * self.services

    @property
    def done(self) -> bool:
        return self.error is not None or all(outputs is not None for outputs in self.outputs)

    def seal(self, fields: dict[str, Array], ids: Sequence[Any] | None) -> Chunk:
        """Set what to send; rows are counted."""
        self.fields, self.ids = fields, ids
        self.rows = self.left = next(iter(fields.values())).shape[0]
        self.nbytes = sum(array.nbytes for array in fields.values())
        return self


class Trace(NamedTuple):
    """Where an array lies, and a few of its bytes: enough to tell that a source filled the same buffer again."""

    place: tuple[int, str]
    marks: bytes

    @classmethod
    def of(cls, array: Array) -> Trace:
        step = max(array.size // 16, 1)
        layout = f"{array.shape}{array.strides}{array.dtype.str}"
        return cls((array.__array_interface__["data"][0], layout), array.reshape(-1)[::step].tobytes())


@dataclass(eq=False)
class Item:
    """One thing that the source yielded, and where its rows are: (chunk, first row, behind the last row)."""

    value: Any
    parts: list[tuple[Chunk, int, int]]
    traces: list[Trace] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(stop - start for _, start, stop in self.parts)


Getter = Callable[[Any], Any]


class Cutter(abc.ABC):
    """Turns what a source yields into items and the chunks that are ready to be sent.

    Args:
        getters: for each input's name, how to find it in a sample or batch.
        chunk_rows: rows of a request; None for as many as is good, which is never more than teachers take.
        services: how many services are asked for each chunk.
        ids: how to find the sample ids, None without a cache.

    Attributes:
        max_rows: that teachers take in one request, 0 if any number.
    """

    usual_rows: int
    """Of a request at most, where the user does not say."""

    def __init__(
        self, getters: Mapping[str, Getter], chunk_rows: int | None, services: int, ids: Getter | None = None
    ) -> None:
        self.getters, self.services, self.ids = getters, services, ids
        self.seen = self.max_rows = 0
        self._chunk_rows = chunk_rows

    @property
    def chunk_rows(self) -> int:
        """Rows of a full request."""
        return self._chunk_rows or min(self.usual_rows, self.max_rows or self.usual_rows)

    @abc.abstractmethod
    def put(self, value: Any) -> tuple[Item, list[Chunk]]:
        """One more item of the source; the chunks that are full with it."""

    def finish(self) -> list[Chunk]:
        """The source is at its end; what was not full."""
        return []

    def _get(self, name: str, getter: Getter, value: Any, what: str) -> Any:
        try:
            return getter(value)
        except (LookupError, TypeError, AttributeError) as exc:
            raise SourceError(f"{what} {self.seen} of the source has no field for input {name!r}: {exc}") from exc


class BatchCutter(Cutter):
    """Items are batches: fields are arrays [rows, ...]. Each is split into requests, never merged with another."""

    usual_rows = 256  # a quarter of what `edl serve` lets wait, and four times what it computes at once

    def put(self, value: Any) -> tuple[Item, list[Chunk]]:
        fields = {
            name: as_array(self._get(name, getter, value, "batch"), f"batch {self.seen}, input {name!r}")
            for name, getter in self.getters.items()
        }
        rows = _common_rows(fields, self.seen)
        ids = _as_ids(self.ids(value), rows, self.seen) if self.ids is not None else None
        step = self.chunk_rows
        parts, chunks = [], []
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            chunk = Chunk(self.services)
            chunk.seal(
                {name: array[start:stop] for name, array in fields.items()},
                ids[start:stop] if ids is not None else None,
            )
            chunks.append(chunk)
            parts.append((chunk, 0, stop - start))
        self.seen += 1
        return Item(value, parts, _traces(fields.values())), chunks


class _RowGatherer(Cutter):
    """Gathers single rows into chunks of `chunk_rows`."""

    usual_rows = 32

    def __init__(
        self, getters: Mapping[str, Getter], chunk_rows: int | None, services: int, ids: Getter | None = None
    ) -> None:
        super().__init__(getters, chunk_rows, services, ids)
        self._open = Chunk(services)
        self._rows: dict[str, list[Any]] = {name: [] for name in getters}
        self._ids: list[Any] = []
        self._first_seen = 0

    def _row(self, sample: Any, ready: list[Chunk]) -> tuple[Chunk, int]:
        for name, getter in self.getters.items():
            self._rows[name].append(self._get(name, getter, sample, "sample"))
        if self.ids is not None:
            self._ids.append(self.ids(sample))
        chunk = self._open
        chunk.rows += 1
        self.seen += 1
        row = chunk.rows - 1
        if chunk.rows >= self.chunk_rows:
            ready.append(self._sealed())
        return chunk, row

    def _sample_traces(self, sample: Any) -> list[Trace]:
        found = (self._get(name, getter, sample, "sample") for name, getter in self.getters.items())
        return _traces(value for value in found if isinstance(value, np.ndarray))

    def _sealed(self) -> Chunk:
        fields = {name: self._stacked(name, rows) for name, rows in self._rows.items()}
        chunk = self._open.seal(fields, list(self._ids) if self.ids is not None else None)
        self._open = Chunk(self.services)
        self._first_seen = self.seen
        self._rows = {name: [] for name in self.getters}
        self._ids = []
        return chunk

    def _stacked(self, name: str, rows: list[Any]) -> Array:
        arrays = [as_array(row, f"sample {self._first_seen + at}, input {name!r}") for at, row in enumerate(rows)]
        first = arrays[0]
        for at, array in enumerate(arrays):
            if array.shape != first.shape:
                raise SourceError(
                    f"sample {self._first_seen + at}: input {name!r} has shape {list(array.shape)}, samples before it "
                    f"{list(first.shape)}: pad them to one shape, yield batches with set_batch_generator, or send each "
                    "alone with set_teacher_batch_size(1)"
                )
        return np.stack(arrays)

    def finish(self) -> list[Chunk]:
        return [self._sealed()] if self._open.rows else []


class SampleCutter(_RowGatherer):
    """Items are samples, each one row."""

    def put(self, value: Any) -> tuple[Item, list[Chunk]]:
        ready: list[Chunk] = []
        chunk, row = self._row(value, ready)
        return Item(value, [(chunk, row, row + 1)], self._sample_traces(value)), ready


class SampleListCutter(_RowGatherer):
    """Items are lists of samples; a request may hold rows of several lists."""

    def put(self, value: Any) -> tuple[Item, list[Chunk]]:
        ready: list[Chunk] = []
        parts: list[tuple[Chunk, int, int]] = []
        traces: list[Trace] = []
        if not isinstance(value, Collection):  # also a generator, which could not be gone through again at the end
            raise SourceError(
                f"after {self.seen} samples the source yielded {type(value).__name__}, which is no list of samples"
            )
        for sample in value:
            traces += self._sample_traces(sample)
            chunk, row = self._row(sample, ready)
            if parts and parts[-1][0] is chunk:
                parts[-1] = (chunk, parts[-1][1], row + 1)
            else:
                parts.append((chunk, row, row + 1))
        return Item(value, parts, traces), ready


def as_array(value: Any, what: str) -> Array:
    """A numpy array of whatever holds numbers or strings: arrays, tensors of any framework, lists."""
    if isinstance(value, np.ndarray):
        array = value
    elif hasattr(value, "detach") and hasattr(value, "numpy"):  # a tensor of torch or paddle, wherever it lies
        tensor = value.detach().cpu()
        array = (tensor.float() if "bfloat16" in str(tensor.dtype) else tensor).numpy()
    else:
        try:
            array = np.asarray(value)
        except ValueError as exc:
            raise SourceError(f"{what}: cannot be made an array: {exc}") from exc
        if array.dtype.kind == "U" or isinstance(value, bytes):
            array = array.astype(object)
    if array.dtype.kind not in "biufSUO":
        raise SourceError(f"{what}: dtype {array.dtype} cannot be sent; numbers, booleans, bytes and strings can")
    if array.dtype.kind == "O":
        strange = {kind for kind in set(map(type, array.flat)) if not issubclass(kind, bytes | str)}
        if strange:
            at, found = next((at, one) for at, one in enumerate(array.flat) if type(one) in strange)
            raise SourceError(
                f"{what}: an array of Python objects cannot be sent; make it an array of numbers or strings "
                f"(element {at} is {type(found).__name__})"
            )
    return array


def _traces(arrays: Iterable[Array]) -> list[Trace]:
    return [Trace.of(array) for array in arrays if array.size and array.dtype.kind != "O"]


def _common_rows(fields: Mapping[str, Array], seen: int) -> int:
    counts = {name: array.shape[0] if array.ndim else -1 for name, array in fields.items()}
    if -1 in counts.values():
        name = next(name for name, count in counts.items() if count == -1)
        raise SourceError(f"batch {seen}: input {name!r} is a single number; a batch has rows first")
    if len(set(counts.values())) > 1:
        raise SourceError(f"batch {seen}: inputs have different numbers of rows: {counts}")
    rows = next(iter(counts.values()))
    if rows == 0:
        raise SourceError(f"batch {seen} has no rows")
    return rows


def _as_ids(ids: Any, rows: int, seen: int) -> Sequence[Any]:
    found: Sequence[Any] = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if len(found) != rows:
        raise SourceError(f"batch {seen} has {len(found)} sample ids for {rows} rows")
    return found
