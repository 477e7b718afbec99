"""Cuts the user's data into requests: gathers samples, splits batches, and records where the rows of each item are.

There are no threads and no network here. A value that cannot be sent raises a `SourceError` that names the item, the
field and the remedy.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from edl.distill.source.chunk import Chunk, Item, Reading
from edl.distill.source.fingerprint import ItemFingerprint, TimeBudget
from edl.errors import SourceError
from edl.protocol.arrays import RowBuffer, as_array
from edl.protocol.tensors import Array

__all__ = [
    "CHECKING_SHARE",
    "BatchCutter",
    "Cutter",
    "Gatherer",
    "Getter",
    "SampleCutter",
    "SampleListCutter",
    "TooFewFieldsError",
]

_OTHER_SHAPE = (
    "pad them to one shape, yield batches with set_batch_generator, or send each alone with set_teacher_batch_size(1)"
)


Getter = Callable[[Any], Any]


class TooFewFieldsError(LookupError):
    """A getter's error if a sample or batch has fewer fields than are named."""


CHECKING_SHARE = 0.02  # training does not notice it; at 20 ms a batch, it suffices to check all of 4.8 MB


class Cutter(abc.ABC):
    """Turns the values of a source into items and chunks that are ready to be sent.

    Args:
        chunk_rows: Rows of a request; None for a suitable number that all teachers accept.
        ids: Function that finds the sample ids; None without a cache.

    Attributes:
        max_rows: Largest number of rows in a request that teachers accept; 0 for any.
        max_sequence: Largest number of rows in a sequence that teachers accept; 0 for any.
    """

    # returns how many rows like its argument fit into a request, by their bytes; 0 for any number
    fit: Callable[[Mapping[str, Array]], int] = staticmethod(lambda _: 0)
    usual_rows: int  # largest number of rows in a request if the user sets none

    def __init__(
        self, getters: Mapping[str, Getter], chunk_rows: int | None, services: int, ids: Getter | None = None
    ) -> None:
        self.getters = getters
        self.services = services
        self.ids = ids
        self.seen = self.max_rows = self.max_sequence = 0  # items so far
        # of the epoch, for checking that whole items are delivered as they were sent
        self.time_budget = TimeBudget(CHECKING_SHARE)
        self._chunk_rows = chunk_rows

    @property
    def chunk_rows(self) -> int:
        """Rows of a full request."""
        return self._chunk_rows or min(self.usual_rows, self.max_rows or self.usual_rows)

    def _rows_like(self, fields: Mapping[str, Array]) -> int:
        """Return the rows of a full request of rows like these."""
        fitting = self.fit(fields) if not self._chunk_rows else 0
        return min(self.chunk_rows, fitting or self.chunk_rows)

    def read(self, value: Any) -> Reading:
        """Read what must be known about the source's next item before `cut`, which is called with the result.

        Raises:
            SourceError: The item cannot be sent, or no teachers are named for it.
        """
        return Reading(value)

    @abc.abstractmethod
    def cut(self, reading: Reading) -> tuple[Item, list[Chunk]]:
        """Cut an item that was read; return it with the chunks that are full now."""

    def put(self, value: Any) -> tuple[Item, list[Chunk]]:
        """Read and cut the source's next item, if the teachers' limits are already set."""
        return self.cut(self.read(value))

    @property
    def wants_limits(self) -> bool:
        """Whether `max_rows` and `max_sequence` must be updated before the next item, which takes time."""
        return self.empty

    @property
    def empty(self) -> bool:
        """Whether no row waits for a request to be full."""
        return True

    @property
    def open_chunk(self) -> Chunk | None:
        """The request that is not full, if there is one."""
        return None

    def by_route(self) -> list[tuple[int | None, Cutter]]:
        """Return all routes, and the cutter of each, whose limits are those of the route's teachers."""
        return [(None, self)]

    def finish(self) -> list[Chunk]:
        """Seal what is not full: the source is at its end, or silent."""
        return []

    def seal(self, chunk: Chunk) -> list[Chunk]:
        """Seal a request that is not full; return the sealed chunks, none if it was sealed before."""
        return self.finish() if self.open_chunk is chunk else []

    def _get(self, name: str, getter: Getter, value: Any, what: str) -> Any:
        try:
            return getter(value)
        except StopIteration as exc:
            raise _stopped(f"what finds input {name!r} in {what}") from exc
        except TooFewFieldsError as exc:
            raise SourceError(f"{what} of the source {exc}") from exc
        except (LookupError, TypeError, AttributeError) as exc:
            raise SourceError(f"{what} of the source has no field for input {name!r}: {exc}") from exc

    def _read_fields(
        self, value: Any, what: str, getters: Mapping[str, Getter] | None = None
    ) -> tuple[ItemFingerprint, dict[str, Array]]:
        """Return the fingerprint and the arrays of a sample or batch."""
        getters = self.getters if getters is None else getters
        found = {name: self._get(name, getter, value, what) for name, getter in getters.items()}
        fingerprint = ItemFingerprint(what, value, found, self.time_budget)
        arrays = {name: as_array(part, f"{what}, input {name!r}") for name, part in found.items()}
        if fingerprint.conversions_matter:
            fingerprint.add_sent(found, arrays, functools.partial(as_array, what=what))
        return fingerprint, arrays

    def _get_ids(self, ids: Getter, value: Any, what: str) -> Any:
        try:
            return ids(value)
        except StopIteration as exc:
            raise _stopped(f"what finds the sample ids in {what}") from exc
        except (LookupError, TypeError, AttributeError) as exc:
            raise SourceError(f"{what} of the source has no field for the id (ids=, id_field=): {exc}") from exc

    def _ids_of_batch(self, value: Any, what: str, count: int, of: str) -> Sequence[Any] | None:
        if self.ids is None:
            return None
        ids = self._get_ids(self.ids, value, what)
        found: Sequence[Any] = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        if len(found) != count:
            raise SourceError(f"{what} has {len(found)} sample ids for {count} {of}")
        return found


class BatchCutter(Cutter):
    """Cuts batches, whose fields are arrays [rows, ...]. A batch may be split into requests, and is never merged."""

    usual_rows = 256  # a quarter of what `edl serve` queues, and four times what it computes at once

    def cut(self, reading: Reading) -> tuple[Item, list[Chunk]]:
        """Take in a batch."""
        fields, ids, fingerprint = self.fields_of(reading.value)
        chunks = self.split(fields, ids)
        chunks[0].rest_nbytes = fingerprint.rest_nbytes
        self.seen += 1
        return Item(reading.value, [(chunk, 0, chunk.rows) for chunk in chunks], (fingerprint,)), chunks

    def fields_of(self, value: Any) -> tuple[dict[str, Array], Sequence[Any] | None, ItemFingerprint]:
        """Return a batch's fields, its sample ids and its fingerprint."""
        what = f"batch {self.seen}"
        fingerprint, fields = self._read_fields(value, what)
        ids = self._ids_of_batch(value, what, _common_rows(fields, what), "rows")
        return fields, ids, fingerprint

    def split(self, fields: Mapping[str, Array], ids: Sequence[Any] | None) -> list[Chunk]:
        """Return the requests of a batch's fields, in the order of its rows."""
        rows = len(next(iter(fields.values())))
        step = self._rows_like(fields)
        chunks = []
        for start in range(0, rows, step):
            part = {name: array[start : start + step] for name, array in fields.items()}
            chunks.append(Chunk(self.services).seal(part, ids[start : start + step] if ids is not None else None))
        return chunks


class Gatherer(Cutter):
    """Gathers rows in a request that is sealed when it is full."""

    def __init__(
        self, getters: Mapping[str, Getter], chunk_rows: int | None, services: int, ids: Getter | None = None
    ) -> None:
        super().__init__(getters, chunk_rows, services, ids)
        self._open = Chunk(services)
        self._rows: dict[str, RowBuffer] = {}
        self._ids: list[Any] = []

    @property
    def empty(self) -> bool:
        """Whether no row waits for a request to be full."""
        return not self._open.rows

    @property
    def open_chunk(self) -> Chunk | None:
        """The request that is not full, if there is one."""
        return self._open if self._open.rows else None

    def finish(self) -> list[Chunk]:
        """Seal what is not full: the source is at its end, or silent."""
        return [self._sealed()] if self._open.rows else []

    def _sealed(self) -> Chunk:
        fields = {name: rows.gathered() for name, rows in self._rows.items()}
        chunk = self._open.seal(fields, self._ids if self.ids is not None else None)
        chunk.copied = True
        self._open = Chunk(self.services)
        self._rows = {}
        self._ids = []
        return chunk


class _SampleGatherer(Gatherer):
    """Gathers samples, each of them a row."""

    usual_rows = 32
    _full = 0

    def _row(self, sample: Any, ready: list[Chunk]) -> tuple[Chunk, int, ItemFingerprint]:
        what = f"sample {self.seen}"
        fingerprint, arrays = self._read_fields(sample, what)
        if not self._open.rows:
            self._full = self._rows_like({name: array[None] for name, array in arrays.items()})
        for name, array in arrays.items():
            if name not in self._rows:
                self._rows[name] = RowBuffer(name, self._full, _OTHER_SHAPE)
            self._rows[name].append(array, what)
        if self.ids is not None:
            self._ids.append(self._get_ids(self.ids, sample, what))
        chunk = self._open
        chunk.rows += 1
        chunk.rest_nbytes += fingerprint.rest_nbytes
        self.seen += 1
        row = chunk.rows - 1
        if chunk.rows >= self._full:
            ready.append(self._sealed())
        return chunk, row, fingerprint


class SampleCutter(_SampleGatherer):
    """Gathers samples, each of them a row."""

    def cut(self, reading: Reading) -> tuple[Item, list[Chunk]]:
        """Take in a sample."""
        ready: list[Chunk] = []
        chunk, row, fingerprint = self._row(reading.value, ready)
        return Item(reading.value, [(chunk, row, row + 1)], (fingerprint,)), ready


class SampleListCutter(_SampleGatherer):
    """Gathers lists of samples; a request may hold rows of several lists."""

    def cut(self, reading: Reading) -> tuple[Item, list[Chunk]]:
        """Take in a list of samples."""
        value = reading.value
        ready: list[Chunk] = []
        parts: list[tuple[Chunk, int, int]] = []
        fingerprints: list[ItemFingerprint] = []
        if not isinstance(value, Collection):  # a generator, say, which could not be iterated again on delivery
            raise SourceError(
                f"after {self.seen} samples the source yielded {type(value).__name__}, which is no list of samples"
            )
        value = list(value)  # the source may put other samples into its own
        for sample in value:
            chunk, row, fingerprint = self._row(sample, ready)
            fingerprints.append(fingerprint)
            if parts and parts[-1][0] is chunk:
                parts[-1] = (chunk, parts[-1][1], row + 1)
            else:
                parts.append((chunk, row, row + 1))
        return Item(value, parts, tuple(fingerprints)), ready


def _stopped(what: str) -> SourceError:
    """Return the error for a `StopIteration` that is not the source's own end, but would end the epoch."""
    return SourceError(f"{what} raised StopIteration: something that it goes through has no more to give")


def _common_rows(fields: Mapping[str, Array], what: str) -> int:
    counts = {name: array.shape[0] if array.ndim else -1 for name, array in fields.items()}
    if -1 in counts.values():
        name = next(name for name, count in counts.items() if count == -1)
        raise SourceError(f"{what}: input {name!r} is a single number; a batch has rows first")
    if len(set(counts.values())) > 1:
        raise SourceError(f"{what}: inputs have different numbers of rows: {counts}")
    rows = next(iter(counts.values()))
    if rows == 0:
        raise SourceError(f"{what} has no rows")
    return rows
