"""Cuts a source whose samples go to different services: a cutter for each, and items put together from all of them.

A request is of one service. Items come in the source's order, each with its rows where it has them.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from edl.distill.source.chunk import Chunk, Item
from edl.distill.source.cutters import BatchCutter, Cutter, SampleCutter
from edl.distill.source.fingerprint import ItemFingerprint
from edl.distill.source.routes import Router
from edl.distill.source.sequence_cutters import PaddedBatchCutter, SequenceCutter, SequenceListCutter
from edl.errors import SourceError

__all__ = ["routed_cutter"]

_MOST_OVERTAKING = 4
"""Full requests of other services that go before one that is not full. Readers keep eight open at least, so that it has
the time of four until the training loop is there; with fewer, the requests of rare routes would hold a row or two."""

C = TypeVar("C", bound=Cutter)


def routed_cutter(router: Router, make: Callable[[], Cutter]) -> Cutter:
    """Return a cutter for all routes.

    Args:
        router: says which service labels what.
        make: makes a cutter for one service.
    """
    parts = [make() for _ in router.names]
    batches = [part for part in parts if isinstance(part, BatchCutter)]
    padded = [part for part in parts if isinstance(part, PaddedBatchCutter)]
    if batches:
        return _RoutedBatches(router, batches)
    if padded:
        found = _RoutedPaddedBatches(router, padded)
        found.whole_batches = padded[0].whole_batches
        return found
    if isinstance(parts[0], SampleCutter) or type(parts[0]) is SequenceCutter:
        return _RoutedSamples(router, parts)
    return _RoutedLists(router, parts)


class _RoutedCutter(Cutter, Generic[C], abc.ABC):
    """Has a cutter for each route.

    Args:
        router: says which service labels what.
        parts: the cutters, by route.
    """

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

    @property
    def wants_limits(self) -> bool:
        """Never: those of its parts are set."""
        return False

    @property
    def empty(self) -> bool:
        """Whether no row waits for a request to be full."""
        return all(part.empty for part in self._parts)

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

    def routes_of(self, value: Any) -> list[int | None]:
        """Return the route of a sample."""
        return [self._router.of_sample(value, f"sample {self.seen}")]

    def put(self, value: Any) -> tuple[Item, list[Chunk]]:
        """Take in a sample."""
        route = self._router.of_sample(value, f"sample {self.seen}")
        part = self._parts[route]
        part.seen = self.seen
        item, full = part.put(value)
        self.seen += 1
        return item, self._ready(route, full)


class _RoutedLists(_RoutedCutter[Cutter]):
    """Takes lists of samples, which may be of several routes."""

    def routes_of(self, value: Any) -> list[int | None]:
        """Return the routes of a list's samples."""
        return list(dict.fromkeys(self._routes(value)))

    def put(self, value: Any) -> tuple[Item, list[Chunk]]:
        """Take in a list of samples."""
        ready: list[Chunk] = []
        places: list[tuple[Chunk, int, int]] = []
        fingerprints: list[ItemFingerprint] = []
        merging = not isinstance(self._parts[0], SequenceListCutter)  # each sequence is a part of its own
        for route, sample in zip(self._routes(value), value, strict=True):
            part = self._parts[route]
            part.seen = self.seen
            item, full = part.put([sample])
            self.seen += 1
            _extend(places, item.parts, merging)
            fingerprints += item.fingerprints
            ready += self._ready(route, full)
        return Item(value, places, tuple(fingerprints)), ready

    def _routes(self, value: Any) -> list[int]:
        if not isinstance(value, Collection):
            raise SourceError(
                f"after {self.seen} samples the source yielded {type(value).__name__}, which is no list of samples"
            )
        return [self._router.of_sample(sample, f"sample {self.seen + at}") for at, sample in enumerate(value)]


class _RoutedBatches(_RoutedCutter[BatchCutter]):
    """Takes batches, whose rows may be of several routes."""

    def routes_of(self, value: Any) -> list[int | None]:
        """Return the routes of a batch's rows."""
        return list(dict.fromkeys(self._routes(value)[1]))

    def put(self, value: Any) -> tuple[Item, list[Chunk]]:
        """Take in a batch."""
        (fields, ids, fingerprint), routes = self._routes(value)
        self._pending = None
        chunks: list[Chunk] = []
        places: dict[int, list[tuple[Chunk, int, int]]] = {}
        for route in dict.fromkeys(routes):
            rows = np.flatnonzero(np.asarray(routes) == route)
            own = fields if len(rows) == len(routes) else {name: array[rows] for name, array in fields.items()}
            cut = self._parts[route].cut(own, [ids[row] for row in rows] if ids is not None else None)
            for chunk in cut:
                chunk.copied = own is not fields
            places[route] = [(chunk, row, row + 1) for chunk in cut for row in range(chunk.rows)]
            chunks += self._marked(route, cut)
        chunks[0].rest_nbytes = fingerprint.rest_nbytes
        self.seen += 1
        parts: list[tuple[Chunk, int, int]] = []
        behind = {route: iter(found) for route, found in places.items()}
        _extend(parts, [next(behind[route]) for route in routes], True)
        return Item(value, parts, (fingerprint,)), chunks

    _pending: Any = None  # a batch that was read to find its routes, until it is put

    def _routes(self, value: Any) -> Any:
        if self._pending is None:
            reading = self._parts[0]
            reading.seen = self.seen
            found = reading.read(value)
            rows = len(next(iter(found[0].values())))
            self._pending = found, self._router.of_batch(value, rows, f"batch {self.seen}")
        return self._pending


class _RoutedPaddedBatches(_RoutedCutter[PaddedBatchCutter]):
    """Takes batches of padded sequences, which may be of several routes."""

    whole_batches = False
    _pending: Any = None

    def routes_of(self, value: Any) -> list[int | None]:
        """Return the routes of those sequences of a batch that have tokens."""
        (_, mask, _, _), routes = self._routes(value)
        return list(dict.fromkeys(route for route, kept in zip(routes, mask, strict=True) if kept.any()))

    def put(self, value: Any) -> tuple[Item, list[Chunk]]:
        """Take in a batch; each sequence of it that has tokens is a part of the item."""
        (arrays, mask, ids, fingerprint), routes = self._routes(value)
        self._pending = None
        ready: list[Chunk] = []
        places: list[tuple[Chunk, int, int]] = []
        for row, (route, kept) in enumerate(zip(routes, mask, strict=True)):
            if kept.any():
                full: list[Chunk] = []
                sequence = {name: array[row][kept] for name, array in arrays.items()}
                rest_nbytes = 0 if places else fingerprint.rest_nbytes
                what = f"batch {self.seen}, sequence {row}"
                places.append(self._parts[route].add(sequence, what, rest_nbytes, full, ids[row]))
                ready += self._ready(route, full)
        if self.whole_batches:
            ready += self.finish()
        self.seen += 1
        return Item(value, places, (fingerprint,), mask.copy()), ready

    def _routes(self, value: Any) -> Any:
        if self._pending is None:
            reading = self._parts[0]
            reading.seen = self.seen
            found = reading.read(value)
            self._pending = found, self._router.of_batch(value, len(found[1]), f"batch {self.seen}")
        return self._pending


def _extend(places: list[tuple[Chunk, int, int]], more: Iterable[tuple[Chunk, int, int]], merging: bool) -> None:
    """Add where rows are; rows beside one another in one request become one part, if `merging`."""
    for chunk, start, stop in more:
        if merging and places and places[-1][0] is chunk and places[-1][2] == start:
            places[-1] = (chunk, places[-1][1], stop)
        else:
            places.append((chunk, start, stop))
