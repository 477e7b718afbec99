"""Cuts the user's data into requests: gathers samples and sequences, splits batches, and tracks rows.

A `Cutter` reads one kind of source. If teachers differ by route, a request is for one route: a `Router` finds each
sample's route, and each route has its own `Gatherer`. Items keep the source's order.

A sequence of T tokens is T rows. Row t holds token t and the teacher's prediction of token t + 1; the last row predicts
the token after the end. A request may hold several sequences, and no sequence is split.
"""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edl.distill.padding import as_token_mask
from edl.distill.source.chunk import Chunk, Item
from edl.distill.source.fingerprint import ItemFingerprint
from edl.errors import SourceError
from edl.protocol.names import POSITION
from edl.protocol.tensors import Array, RowBuffer, as_array
from edl.quoting import listed

_OTHER_SHAPE = (
    "pad them to one shape, yield batches with set_batch_generator, or send each alone with set_teacher_batch_size(1)"
)
_OTHER_ROWS = "the rows of all sequences must have one shape; only the number of rows may differ"
_MASK = "tokens"  # the user's argument for the mask
_REQUESTS_WAITING = 4  # requests that a teacher's queue should hold, so that the next one is always ready
_MOST_OVERTAKING = 4
"""How many full requests of other routes may overtake a partly filled request. Readers keep at least eight requests
open, so the overtaken request is still sent in time. With a smaller number, requests of rare routes would hold only a
row or two."""

Getter = Callable[[Any], Any]
Prepare = Callable[[Mapping[int | None, int]], None]
"""Sets the teachers' limits in the gatherers before a value's rows are put into requests. Called with the length of the
longest sequence by route (0 if the rows are not sequences)."""


@dataclass(frozen=True)
class Router:
    """Selects services by value. Raises `SourceError` for a missing field, or a value without a service."""

    find: Callable[[Any], Any]  # finds the value in a sample, or the values of all rows in a batch
    routes: Mapping[Any, int]  # the service's number by value; `None` covers all other values

    def of_sample(self, sample: Any, what: str) -> int:
        return self._route(_plain(self._found(sample, what)), what)

    def of_batch(self, batch: Any, rows: int, what: str) -> list[int]:
        found = _plain(self._found(batch, what))
        if not isinstance(found, list | tuple):
            if not self._is_value(found):
                raise SourceError(
                    f"{what} has {found!r} for route: expected a list, an array or a tensor of values, or one value"
                )
            return [self._route(found, what)] * rows
        if len(found) != rows:
            raise SourceError(f"{what} has {len(found)} values of route for {rows} rows")
        return [self._route(_plain(value), f"{what}, row {row}") for row, value in enumerate(found)]

    def _found(self, value: Any, what: str) -> Any:
        return _found_by(
            self.find, value, f"the function that finds the route of {what}", f"{what} has no field for route"
        )

    def _route(self, value: Any, what: str) -> int:
        found = None
        if self._is_value(value):
            others = self.routes.get(None)
            if isinstance(value, bytes):
                others = self.routes.get(value.decode(errors="replace"), others)
            with contextlib.suppress(TypeError):  # an unhashable value, such as a tuple with a list
                found = self.routes.get(value, others)
        if found is None:
            known = listed([repr(known) for known in self.routes])
            raise SourceError(
                f"{what} has route {value!r}, but teachers are named for {known}: add teachers for it, or under "
                "None for all other values"
            )
        return found

    def _is_value(self, value: Any) -> bool:
        """Return whether a value may select a route. Any other value is an error, even if there is a route None."""
        if isinstance(value, float):
            return not math.isnan(value)
        return value is None or isinstance(value, str | bytes | int) or type(value) in map(type, self.routes)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _found_by(getter: Getter, value: Any, finder: str, missing: str) -> Any:
    """Call a user's function; turn its `StopIteration`, which would end the epoch, into an error."""
    try:
        return getter(value)
    except StopIteration as exc:
        raise SourceError(f"{finder} raised StopIteration: an iterator that it reads is exhausted") from exc
    except (LookupError, TypeError, AttributeError) as exc:
        raise SourceError(f"{missing}: {exc}") from exc


@dataclass(eq=False, slots=True)  # not frozen, which would cost a microsecond per sample
class _Unit:
    """Rows that stay together in a request: a sample, a sequence, or a batch's rows of one route."""

    what: str  # its place in the source, for messages
    arrays: Mapping[str, Array]  # by input [rows, ...]
    rows: int
    route: int | None = None
    sample_id: Any = None  # None without a cache
    rest_nbytes: int = 0  # bytes of its item that are not sent
    fingerprint: ItemFingerprint | None = None  # of a sample or sequence; None if the batch has one or none is needed


class Gatherer:
    """Gathers the rows of a route in a request, and seals the request when it is full."""

    # returns how many rows like its argument fit in a request, by their bytes; 0 for any number
    fit: Callable[[Mapping[str, Array]], int] = staticmethod(lambda _: 0)
    max_rows = 0  # most rows of a request that teachers accept; 0 for any
    max_sequence = 0  # most rows of a sequence that teachers accept; 0 for any
    begun = 0  # when the open request began, counted in units of all routes
    overtaken = 0  # how many full requests of other routes have overtaken it

    def __init__(self, cutter: Cutter, route: int | None) -> None:
        self._cutter = cutter
        self._route = route
        self.open = self.new_chunk()
        self._rows: dict[str, RowBuffer] = {}
        self._ids: list[Any] = []
        self._lengths: list[int] = []
        self._full = 0

    def new_chunk(self) -> Chunk:
        return Chunk(self._cutter.services, route=self._route)

    @property
    def wants_limits(self) -> bool:
        """Whether `max_rows` and `max_sequence`, which take time to update, must be updated before the next rows."""
        return self._cutter.of_sequences or not self.open.rows

    def rows_like(self, fields: Mapping[str, Array]) -> int:
        usual = self._cutter.usual_rows
        if self._cutter.chunk_rows:
            return self._cutter.chunk_rows
        most = min(usual, self.max_rows or usual)
        return min(most, self.fit(fields) or most)

    def add(self, unit: _Unit) -> tuple[tuple[Chunk, int, int], list[Chunk]]:
        ready: list[Chunk] = []
        if self._cutter.of_sequences:
            self._full = self._tokens_like(unit)
            if self.open.rows and self.open.rows + unit.rows > self._full:
                ready += self.seal()
        elif not self.open.rows:
            self._full = self.rows_like(unit.arrays)
        for name, array in unit.arrays.items():
            if name not in self._rows:
                remedy = _OTHER_ROWS if self._cutter.of_sequences else _OTHER_SHAPE
                self._rows[name] = RowBuffer(name, max(self._full, unit.rows), remedy)
            self._rows[name].extend(array, unit.what)
        self._ids.append(unit.sample_id)
        self._lengths.append(unit.rows)
        chunk, start = self.open, self.open.rows
        chunk.rows += unit.rows
        chunk.rest_nbytes += unit.rest_nbytes
        if chunk.rows >= self._full:
            ready += self.seal()
        return (chunk, start, start + unit.rows), ready

    def _tokens_like(self, unit: _Unit) -> int:
        rows = unit.rows
        if self.max_sequence and rows > self.max_sequence:
            raise SourceError(
                f"{unit.what} is a sequence of {rows} tokens, but teachers take at most {self.max_sequence}: cut it in "
                "your source, or serve the model with a larger --max-tokens if its context is longer"
            )
        fitting = self.fit({POSITION: np.broadcast_to(np.int32(0), (rows,)), **unit.arrays})
        if fitting and rows > fitting:
            raise SourceError(
                f"{unit.what} is a sequence of {rows} tokens, but teachers take messages of at most {fitting} tokens "
                "like these: cut it in your source, or serve the model with a larger --max-message"
            )
        # A teacher's largest request fills its whole queue, so it would refuse every second request of that size.
        usual = self._cutter.usual_rows
        usual = min(usual, max(self.max_rows // _REQUESTS_WAITING, 1) if self.max_rows else usual)
        return min(filter(None, (self._cutter.chunk_rows or usual, self.max_rows, fitting)))

    def seal(self) -> list[Chunk]:
        self.overtaken = 0
        chunk = self.open
        if not chunk.rows:
            return []
        chunk.seal(
            {name: rows.gathered() for name, rows in self._rows.items()}, self._ids if self._cutter.ids else None
        )
        if self._cutter.of_sequences:
            chunk.lengths = np.array(self._lengths, np.int64)
            chunk.positions = np.concatenate([np.arange(length, dtype=np.int32) for length in self._lengths])
            chunk.nbytes += chunk.positions.nbytes
            chunk.longest_sequence = max(self._lengths)
        self.open = self.new_chunk()
        self._rows, self._ids, self._lengths = {}, [], []
        return [chunk]


class Cutter(abc.ABC):
    """Turns the values of a source into items and chunks that are ready to send.

    `chunk_rows` is None for the default size. `routes` holds the gatherer of each route (key None without a router).
    """

    usual_rows: int  # largest number of rows in a request if the user sets none
    of_sequences = False  # whether rows are tokens of sequences

    def __init__(
        self,
        getters: Mapping[str, Getter],
        chunk_rows: int | None,
        services: int,
        ids: Getter | None = None,
        router: Router | None = None,
    ) -> None:
        self.getters = getters
        self.services = services
        self.ids = ids
        self.chunk_rows = chunk_rows
        self.seen = 0  # items so far
        self._router = router
        self._units = 0
        numbers = [None] if router is None else sorted(set(router.routes.values()))
        self.routes = {number: Gatherer(self, number) for number in numbers}

    @abc.abstractmethod
    def put(self, value: Any, prepare: Prepare = lambda _: None) -> tuple[Item, list[Chunk]]:
        """Cut the source's next item; return it with the chunks that are now full."""

    def finish(self) -> list[Chunk]:
        """Seal partly filled requests, oldest first, because the source has ended or is silent."""
        gatherers = sorted(self.routes.values(), key=lambda each: each.begun)
        return [chunk for gatherer in gatherers for chunk in gatherer.seal()]

    def seal(self, chunk: Chunk) -> list[Chunk]:
        """Seal a partly filled request; return the sealed chunks, or none if the request was already sealed."""
        return [sealed for gatherer in self.routes.values() if gatherer.open is chunk for sealed in gatherer.seal()]

    def _gather(self, unit: _Unit, ready: list[Chunk]) -> tuple[Chunk, int, int]:
        """Add a unit to its route's request; add full requests to `ready`, after requests overtaken too often."""
        gatherer = self.routes[unit.route]
        place, full = gatherer.add(unit)
        self._units += 1
        if place[0] is gatherer.open and not place[1]:
            gatherer.begun = self._units
        if full:
            for other in self.routes.values():
                if other is not gatherer and other.open.rows:
                    other.overtaken += len(full)
                    if other.overtaken > _MOST_OVERTAKING:
                        ready += other.seal()
            ready += full
        return place

    def _read_fields(
        self, value: Any, what: str, getters: Mapping[str, Getter] | None = None
    ) -> tuple[ItemFingerprint, dict[str, Array]]:
        """Return the fingerprint and the arrays of a sample or batch."""
        getters = self.getters if getters is None else getters
        found = {name: self._get(name, getter, value, what) for name, getter in getters.items()}
        fingerprint = ItemFingerprint(what, value, found)
        return fingerprint, {name: as_array(part, f"{what}, input {name!r}") for name, part in found.items()}

    def _get(self, name: str, getter: Getter, value: Any, what: str) -> Any:
        missing = f"{what} of the source has no field for input {name!r}"
        return _found_by(getter, value, f"the function that finds input {name!r} in {what}", missing)

    def _get_id(self, value: Any, what: str) -> Any:
        if self.ids is None:
            return None
        missing = f"{what} of the source has no field for the id (ids=, id_field=)"
        return _found_by(self.ids, value, f"the function that finds the sample ids in {what}", missing)

    def _ids_of_batch(self, value: Any, what: str, count: int, of: str) -> Sequence[Any] | None:
        if self.ids is None:
            return None
        found: Sequence[Any] = list(_plain(self._get_id(value, what)))
        if len(found) != count:
            raise SourceError(f"{what} has {len(found)} sample ids for {count} {of}")
        return found


class BatchCutter(Cutter):
    """Cuts batches, whose fields are arrays [rows, ...]. Batches may be split, but are never merged."""

    usual_rows = 256  # a quarter of what `edl serve` queues, and four times what it computes at once

    def put(self, value: Any, prepare: Prepare = lambda _: None) -> tuple[Item, list[Chunk]]:
        what = f"batch {self.seen}"
        fingerprint, fields = self._read_fields(value, what)
        rows = _common_rows(fields, what)
        ids = self._ids_of_batch(value, what, rows, "rows")
        routes: list[int | None] = [None]
        if self._router is not None:
            routes = [*self._router.of_batch(value, rows, what)]
        present = dict.fromkeys(routes, 0)
        prepare(present)
        found = {route: self._split(route, fields, ids, routes) for route in present}
        chunks = [chunk for of_route in found.values() for chunk in of_route]
        parts = [(chunk, 0, chunk.rows) for chunk in chunks]
        if len(found) > 1:
            places = {
                route: iter([(chunk, row, row + 1) for chunk in of_route for row in range(chunk.rows)])
                for route, of_route in found.items()
            }
            parts = _merged(next(places[route]) for route in routes)
        chunks[0].rest_nbytes = fingerprint.rest_nbytes
        self.seen += 1
        return Item(value, parts, (fingerprint,)), chunks

    def _split(
        self, route: int | None, fields: Mapping[str, Array], ids: Sequence[Any] | None, routes: Sequence[int | None]
    ) -> list[Chunk]:
        if set(routes) != {route}:
            mine = [row for row, each in enumerate(routes) if each == route]
            fields = {name: array[mine] for name, array in fields.items()}
            ids = [ids[row] for row in mine] if ids is not None else None
        gatherer = self.routes[route]
        step = gatherer.rows_like(fields)
        return [
            gatherer.new_chunk().seal(
                {name: array[start : start + step] for name, array in fields.items()},
                ids[start : start + step] if ids is not None else None,
            )
            for start in range(0, len(next(iter(fields.values()))), step)
        ]


class SampleCutter(Cutter):
    """Gathers samples, each of which is a row."""

    usual_rows = 32
    of_lists = False  # whether the source yields lists of samples

    def put(self, value: Any, prepare: Prepare = lambda _: None) -> tuple[Item, list[Chunk]]:
        if not self.of_lists:
            return self._cut(value, [self._read_sample(value, self.seen)], prepare)
        if not isinstance(value, Collection):  # such as a generator, which could not be iterated again on delivery
            what = "sequences" if self.of_sequences else "samples"
            kind = type(value).__name__
            raise SourceError(f"after {self.seen} {what} the source yielded {kind}, which is not a list of samples")
        value = list(value)  # copied, because the source may change its list
        return self._cut(value, [self._read_sample(each, self.seen + at) for at, each in enumerate(value)], prepare)

    def _read_sample(self, sample: Any, number: int) -> _Unit:
        what = f"sample {number}"
        route = self._router.of_sample(sample, what) if self._router is not None else None
        fingerprint, arrays = self._read_fields(sample, what)
        if not self.of_sequences:
            arrays = {name: array[None] for name, array in arrays.items()}
        rows = _common_rows(arrays, what, "sequence", "tokens") if self.of_sequences else 1
        sample_id = self._get_id(sample, what) if self.ids is not None else None
        return _Unit(what, arrays, rows, route, sample_id, fingerprint.rest_nbytes, fingerprint)

    def _cut(
        self,
        value: Any,
        units: Sequence[_Unit],
        prepare: Prepare,
        batch: ItemFingerprint | None = None,
        mask: Array | None = None,
        count: int | None = None,
    ) -> tuple[Item, list[Chunk]]:
        """Gather the units of a value; each sequence becomes a part of the item.

        `batch`: the fingerprint of the whole value, if the units have no fingerprints. `count`: the number to add to
        `seen`; None for the number of units.
        """
        longest: dict[int | None, int] = {}
        for unit in units:
            longest[unit.route] = max(longest.get(unit.route, 0), unit.rows)
        prepare(longest)
        ready: list[Chunk] = []
        places = [self._gather(unit, ready) for unit in units]
        if not self.of_sequences and len(places) > 1:
            places = _merged(places)
        self.seen += len(units) if count is None else count
        prints = [unit.fingerprint for unit in units] if batch is None else [batch]
        return Item(value, places, tuple(filter(None, prints)), mask), ready


class SampleListCutter(SampleCutter):
    """Gathers lists of samples; a request may hold rows of several lists."""

    of_lists = True


class SequenceCutter(SampleCutter):
    """Gathers sequences: samples whose fields are arrays [tokens, ...], one element per token of the sample."""

    usual_rows = 2048  # tokens, which keep an accelerator busy; their top-64 labels take 1 MB
    of_sequences = True


class SequenceListCutter(SequenceCutter):
    """Gathers lists of sequences; a request may hold sequences of several lists."""

    of_lists = True


class PaddedBatchCutter(SequenceCutter):
    """Gathers sequences from padded batches. `mask` finds the token mask, [sequences, length]: 1 for tokens, else 0."""

    whole_batches = False  # whether a request holds sequences of only one batch, because the next may be late

    def __init__(
        self,
        getters: Mapping[str, Getter],
        mask: Getter,
        chunk_rows: int | None,
        services: int,
        ids: Getter | None = None,
        router: Router | None = None,
    ) -> None:
        super().__init__(getters, chunk_rows, services, ids, router)
        self._mask = mask

    def put(self, value: Any, prepare: Prepare = lambda _: None) -> tuple[Item, list[Chunk]]:
        what = f"batch {self.seen}"
        mask_name = _MASK if _MASK not in self.getters else f"{_MASK} (the mask)"  # an input may have the same name
        fingerprint, arrays = self._read_fields(value, what, {**self.getters, mask_name: self._mask})
        mask = as_token_mask(arrays.pop(mask_name), what)
        if not mask.any():
            raise SourceError(f"{what} is a batch without tokens: skip it in your source")
        for name, array in arrays.items():
            if array.shape[:2] != mask.shape:
                raise SourceError(
                    f"{what}: input {name!r} has shape {list(array.shape)}, its mask {list(mask.shape)}: a batch of "
                    "padded sequences has inputs [sequences, length, ...]"
                )
        ids = self._ids_of_batch(value, what, len(mask), "sequences") or [None] * len(mask)
        routes = self._router.of_batch(value, len(mask), what) if self._router is not None else [None] * len(mask)
        units: list[_Unit] = []
        for row in np.flatnonzero(mask.any(axis=1)).tolist():
            kept = mask[row]
            own = {name: array[row][kept] for name, array in arrays.items()}
            rest_nbytes = 0 if units else fingerprint.rest_nbytes
            text = f"{what}, sequence {row}"
            units.append(_Unit(text, own, int(kept.sum()), routes[row], ids[row], rest_nbytes))
        item, ready = self._cut(value, units, prepare, fingerprint, mask.copy(), count=1)
        return item, [*ready, *self.finish()] if self.whole_batches else ready


class SequenceColumnsCutter(SequenceCutter):
    """Gathers sequences from batches that have a list of arrays [tokens, ...] per input. Arrays must never change."""

    def put(self, value: Any, prepare: Prepare = lambda _: None) -> tuple[Item, list[Chunk]]:
        batch = f"batch {self.seen}"
        columns = {name: self._get(name, getter, value, batch) for name, getter in self.getters.items()}
        ids = self._get_id(value, batch)
        units = []
        for row, found in enumerate(zip(*columns.values(), strict=True)):
            sample_id = ids[row] if ids is not None else None
            what = f"sample {sample_id!r}" if ids is not None else f"{batch}, sequence {row}"
            arrays = {name: as_array(part, what) for name, part in zip(columns, found, strict=True)}
            units.append(_Unit(what, arrays, _common_rows(arrays, what, "sequence", "tokens"), None, sample_id))
        return self._cut(value, units, prepare, count=1)


def _merged(places: Iterable[tuple[Chunk, int, int]]) -> list[tuple[Chunk, int, int]]:
    """Merge places that are adjacent in a request."""
    parts: list[tuple[Chunk, int, int]] = []
    for chunk, start, stop in places:
        if parts and parts[-1][0] is chunk and parts[-1][2] == start:
            parts[-1] = (chunk, parts[-1][1], stop)
        else:
            parts.append((chunk, start, stop))
    return parts


def _common_rows(arrays: Mapping[str, Array], what: str, kind: str = "batch", of: str = "rows") -> int:
    alone = next((name for name, array in arrays.items() if not array.ndim), None)
    if alone is not None:
        raise SourceError(f"{what}: input {alone!r} is a single number: a {kind} needs an array [{of}, ...]")
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) > 1:
        raise SourceError(f"{what}: inputs have different numbers of {of}: {counts}")
    rows = next(iter(counts.values()))
    if not rows:
        raise SourceError(f"{what} is a {kind} without {of}: skip it in your source")
    return rows
