"""Routing of samples to different services: `Router` finds the service of each sample, and each service has a cutter.

A request goes to one service. Items keep the source's order, and each knows where its rows are.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from edl.distill.source.chunk import Chunk, Item, Reading
from edl.distill.source.cutters import BatchCutter, Cutter, SampleCutter
from edl.distill.source.fingerprint import ItemFingerprint
from edl.distill.source.sequence_cutters import PaddedBatchCutter, PaddedReading, SequenceCutter, SequenceListCutter
from edl.errors import SourceError
from edl.quoting import listed

__all__ = ["Router", "routed_cutter"]


@dataclass(frozen=True)
class Router:
    """Which service labels what."""

    find: Callable[[Any], Any]  # finds the value in a sample, or the values of all rows in a batch
    routes: Mapping[Any, int]  # by value, the service's number. `None` is that of all other values.

    def of_sample(self, sample: Any, what: str) -> int:
        """Return the number of the service that labels a sample.

        Raises:
            SourceError: it has no such field, or a value that no service is named for.
        """
        return self._route(_plain(self._found(sample, what)), what)

    def of_batch(self, batch: Any, rows: int, what: str) -> list[int]:
        """Return by row the number of the service that labels it.

        Raises:
            SourceError: it has no such field, another number of values, or one that no service is named for.
        """
        found = _plain(self._found(batch, what))
        if not isinstance(found, list | tuple):
            if not self._is_value(found):
                raise SourceError(
                    f"{what} has {found!r} for route: expected a list, an array or a tensor of values, or a single one"
                )
            return [self._route(found, what)] * rows
        if len(found) != rows:
            raise SourceError(f"{what} has {len(found)} values of route for {rows} rows")
        return [self._route(_plain(value), f"{what}, row {row}") for row, value in enumerate(found)]

    def _found(self, value: Any, what: str) -> Any:
        try:
            return self.find(value)
        except StopIteration as exc:
            raise SourceError(f"what finds the route of {what} raised StopIteration") from exc
        except (LookupError, TypeError, AttributeError) as exc:
            raise SourceError(f"{what} has no field for route: {exc}") from exc

    def _route(self, value: Any, what: str) -> int:
        found = None
        if self._is_value(value):
            others = self.routes.get(None)
            if isinstance(value, bytes):
                others = self.routes.get(value.decode(errors="replace"), others)
            with contextlib.suppress(TypeError):  # a tuple with a list, say, which is the key of nothing
                found = self.routes.get(value, others)
        if found is None:
            known = listed([repr(known) for known in self.routes])
            raise SourceError(
                f"{what} has route {value!r}, and teachers are named for {known}: name those for it as well, or under "
                "None those for all other values"
            )
        return found

    def _is_value(self, value: Any) -> bool:
        """Return whether this is a value of a field; anything else was not understood, and is not among all others."""
        if isinstance(value, float):
            return not math.isnan(value)
        return value is None or isinstance(value, str | bytes | int) or type(value) in map(type, self.routes)


def _plain(value: Any) -> Any:
    """Return numbers and strings of arrays and tensors as Python's."""
    return value.tolist() if hasattr(value, "tolist") else value


_MOST_OVERTAKING = 4
"""How many full requests of other services may overtake one that is not full. Readers keep at least eight open, so it
still has the time of four until the training loop needs it. With fewer, requests of rare routes would hold a row or
two."""

C = TypeVar("C", bound=Cutter)


def routed_cutter(router: Router | None, make: Callable[[], Cutter]) -> Cutter:
    """Return a cutter for all routes, of cutters for one service each; that of the only service without a router."""
    if router is None:
        return make()
    parts = [make() for _ in set(router.routes.values())]
    batches = [part for part in parts if isinstance(part, BatchCutter)]
    padded = [part for part in parts if isinstance(part, PaddedBatchCutter)]
    if batches:
        return _RoutedBatches(router, batches)
    if padded:
        return _RoutedPaddedBatches(router, padded)
    if isinstance(parts[0], SampleCutter) or type(parts[0]) is SequenceCutter:
        return _RoutedSamples(router, parts)
    return _RoutedLists(router, parts)


class _RoutedCutter(Cutter, Generic[C], abc.ABC):
    """Has a cutter for each route."""

    def __init__(self, router: Router, parts: Sequence[C]) -> None:
        super().__init__(parts[0].getters, None, parts[0].services, parts[0].ids)
        self._router = router
        self._parts = parts
        self._overtaken = [0] * len(parts)
        self._open: list[Chunk | None] = [None] * len(parts)
        self._begun = [0] * len(parts)  # when that was begun, counted in rows or sequences
        self._clock = itertools.count()
        for part in parts:
            part.time_budget = self.time_budget

    def by_route(self) -> list[tuple[int | None, Cutter]]:
        """Return all routes, and the cutter of each."""
        return list(enumerate(self._parts))

    def finish(self) -> list[Chunk]:
        """Seal what is not full, in the order in which it was begun, which is that in which it is waited for."""
        routes = sorted(range(len(self._parts)), key=self._begun.__getitem__)
        return [chunk for route in routes for chunk in self._finished(route)]

    def seal(self, chunk: Chunk) -> list[Chunk]:
        """Seal a request that is not full."""
        routes = [route for route, part in enumerate(self._parts) if part.open_chunk is chunk]
        return [sealed for route in routes for sealed in self._finished(route)]

    def _finished(self, route: int) -> list[Chunk]:
        self._overtaken[route] = 0
        self._open[route] = None
        return self._marked(route, self._parts[route].finish())

    def _marked(self, route: int, chunks: Iterable[Chunk]) -> list[Chunk]:
        chunks = list(chunks)
        for chunk in chunks:
            chunk.route = route
        return chunks

    def _ready(self, route: int, full: Sequence[Chunk]) -> list[Chunk]:
        """Return a route's requests that are full now, behind those that full ones have overtaken too often."""
        now, begun = next(self._clock), self._parts[route].open_chunk
        if begun is not self._open[route]:
            self._open[route], self._begun[route] = begun, now
        if not full:
            return []
        self._overtaken[route] = 0
        ready: list[Chunk] = []
        for other, part in enumerate(self._parts):
            if other != route and not part.empty:
                self._overtaken[other] += len(full)
                if self._overtaken[other] > _MOST_OVERTAKING:
                    ready += self._finished(other)
        return ready + self._marked(route, full)


class _RoutedSamples(_RoutedCutter[Cutter]):
    """Takes samples, each of one route."""

    def read(self, value: Any) -> Reading:
        """Look at a sample."""
        route = self._router.of_sample(value, f"sample {self.seen}")
        part = self._parts[route]
        part.seen = self.seen
        reading = part.read(value)
        return Reading(value, _by_route([(route, reading)]), (route, reading))

    def cut(self, reading: Reading) -> tuple[Item, list[Chunk]]:
        """Take in a sample."""
        route, found = reading.found
        part = self._parts[route]
        part.seen = self.seen
        item, full = part.cut(found)
        self.seen += 1
        return item, self._ready(route, full)


class _RoutedLists(_RoutedCutter[Cutter]):
    """Takes lists of samples, which may be of several routes."""

    def read(self, value: Any) -> Reading:
        """Look at a list of samples."""
        if not isinstance(value, Collection):
            raise SourceError(
                f"after {self.seen} samples the source yielded {type(value).__name__}, which is no list of samples"
            )
        found: list[tuple[int, Reading]] = []
        for number, sample in enumerate(value, self.seen):
            route = self._router.of_sample(sample, f"sample {number}")
            self._parts[route].seen = number
            found.append((route, self._parts[route].read([sample])))
        return Reading(value, _by_route(found), found)

    def cut(self, reading: Reading) -> tuple[Item, list[Chunk]]:
        """Take in a list of samples."""
        ready: list[Chunk] = []
        places: list[tuple[Chunk, int, int]] = []
        fingerprints: list[ItemFingerprint] = []
        merging = not isinstance(self._parts[0], SequenceListCutter)  # each sequence is a part of its own
        for route, sample in reading.found:
            part = self._parts[route]
            part.seen = self.seen
            item, full = part.cut(sample)
            self.seen += 1
            _extend(places, item.parts, merging)
            fingerprints += item.fingerprints
            ready += self._ready(route, full)
        return Item(reading.value, places, tuple(fingerprints)), ready


class _RoutedBatches(_RoutedCutter[BatchCutter]):
    """Takes batches, whose rows may be of several routes."""

    def read(self, value: Any) -> Reading:
        """Look at a batch."""
        self._parts[0].seen = self.seen
        found = self._parts[0].fields_of(value)
        routes = self._router.of_batch(value, len(next(iter(found[0].values()))), f"batch {self.seen}")
        return Reading(value, dict.fromkeys(routes, 0), (found, routes))

    def cut(self, reading: Reading) -> tuple[Item, list[Chunk]]:
        """Take in a batch."""
        (fields, ids, fingerprint), routes = reading.found
        chunks: list[Chunk] = []
        places: dict[int, list[tuple[Chunk, int, int]]] = {}
        for route in dict.fromkeys(routes):
            rows = np.flatnonzero(np.asarray(routes) == route)
            own = fields if len(rows) == len(routes) else {name: array[rows] for name, array in fields.items()}
            found = self._parts[route].split(own, [ids[row] for row in rows] if ids is not None else None)
            for chunk in found:
                chunk.copied = own is not fields
            places[route] = [(chunk, row, row + 1) for chunk in found for row in range(chunk.rows)]
            chunks += self._marked(route, found)
        chunks[0].rest_nbytes = fingerprint.rest_nbytes
        self.seen += 1
        parts: list[tuple[Chunk, int, int]] = []
        behind = {route: iter(found) for route, found in places.items()}
        _extend(parts, [next(behind[route]) for route in routes], True)
        return Item(reading.value, parts, (fingerprint,)), chunks


class _RoutedPaddedBatches(_RoutedCutter[PaddedBatchCutter]):
    """Takes batches of padded sequences, which may be of several routes."""

    def read(self, value: Any) -> Reading:
        """Look at a batch."""
        self._parts[0].seen = self.seen
        batch = self._parts[0].sequences_of(value)
        routes = self._router.of_batch(value, len(batch.mask), f"batch {self.seen}")
        longest: dict[int | None, int] = {}
        for row, text in batch.texts.items():
            longest[routes[row]] = max(longest.get(routes[row], 0), text.rows)
        return Reading(value, longest, (batch, routes))

    def cut(self, reading: Reading) -> tuple[Item, list[Chunk]]:
        """Take in a batch; each sequence of it that has tokens is a part of the item."""
        batch: PaddedReading
        batch, routes = reading.found
        ready: list[Chunk] = []
        places: list[tuple[Chunk, int, int]] = []
        for row, text in batch.texts.items():
            full: list[Chunk] = []
            places.append(self._parts[routes[row]].add(text, full))
            ready += self._ready(routes[row], full)
        if self._parts[0].whole_batches:
            ready += self.finish()
        self.seen += 1
        return Item(reading.value, places, (batch.fingerprint,), batch.mask), ready


def _by_route(found: Iterable[tuple[int, Reading]]) -> dict[int | None, int]:
    """Return the longest sequence of each route."""
    longest: dict[int | None, int] = {}
    for route, reading in found:
        longest[route] = max(longest.get(route, 0), *reading.longest.values())
    return longest


def _extend(places: list[tuple[Chunk, int, int]], more: Iterable[tuple[Chunk, int, int]], merging: bool) -> None:
    """Add where rows are; rows beside one another in one request become one part, if `merging`."""
    for chunk, start, stop in more:
        if merging and places and places[-1][0] is chunk and places[-1][2] == start:
            places[-1] = (chunk, places[-1][1], stop)
        else:
            places.append((chunk, start, stop))
