"""Chunks of rows (one request each), the items to which the rows belong, and the detection of reused memory."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from edl.distill.source.fingerprint import ItemFingerprint, MemoryLocation, arrays_nbytes
from edl.distill.transport.schema import Outputs
from edl.protocol.tensors import Array


@dataclass(eq=False)
class Chunk:
    """The rows of one request, and their answers."""

    services: int  # number of services that label it
    rows: int = 0  # rows of the request
    left: int = 0  # rows not yet taken by the training loop
    nbytes: int = 0  # bytes of its inputs
    rest_nbytes: int = 0  # bytes of its items' other fields, which are held for the training loop too
    fields: dict[str, Array] = field(default_factory=dict)  # inputs [rows, ...] by name
    positions: Array | None = None  # int32 [rows], position of each row in its sequence; None without sequences
    longest_sequence: int = 0  # rows of the longest sequence, 0 if the rows are not sequences
    ids: Sequence[Any] | None = None  # of the samples, [rows] or [sequences]; None without a cache
    lengths: Array | None = None  # int64 [sequences], rows of each sequence; None if the rows are not sequences
    outputs: list[Outputs | None] = field(default_factory=list)  # by service, None until its answer arrives
    jobs: list[tuple[int, int]] = field(default_factory=list)  # (service, job number at the service)
    error: BaseException | None = None  # why it has no outputs; it then counts as done
    sent: bool = False  # whether it was sent or is being sent
    answers_nbytes: list[int] = field(default_factory=list)  # bytes by service, estimated until the answer arrives
    foreseen: bool = True  # whether all answers could be estimated
    route: int | None = None  # number of the only service to ask; None for all of them
    source_s: float = 0.0  # seconds that the epoch's source had taken when the chunk was sent

    def __post_init__(self) -> None:
        self.outputs = [None] * self.services
        self.answers_nbytes = [0] * self.services

    @property
    def weight(self) -> int:
        """Size in bytes of the chunk's items and answers, including pending answers."""
        return self.nbytes + self.rest_nbytes + sum(self.answers_nbytes)

    @property
    def done(self) -> bool:
        return self.error is not None or all(outputs is not None for outputs in self.outputs)

    def release(self) -> None:
        self.fields = {}
        self.positions = self.lengths = None
        self.outputs = [{} for _ in self.outputs]

    def seal(self, fields: dict[str, Array], ids: Sequence[Any] | None) -> Chunk:
        self.fields = fields
        self.ids = ids
        self.rows = self.left = next(iter(fields.values())).shape[0]
        self.nbytes = arrays_nbytes(fields.values())
        return self


@dataclass(eq=False)
class Item:
    """A value that the source yielded, and the places of its rows in chunks."""

    value: Any  # as the source yielded it
    parts: list[tuple[Chunk, int, int]]  # (chunk, first row, end row)
    fingerprints: tuple[ItemFingerprint, ...] = ()  # of the value, or of its samples
    mask: Array | None = None  # of padded sequences, bool [sequences, length]: elements with rows; else None

    @property
    def rows(self) -> int:
        return sum(stop - start for _, start, stop in self.parts)


class ReuseDetector:
    """Detects a source that refills the memory of an item while the training loop uses it.

    A changed item alone is not an error, because the training loop may modify the item in place. It is an error if the
    source then yields the same memory, list or dictionary again.

    There is no lock: only the feeding thread calls `begin_draw` and `check_drawn`, only the training loop's thread
    calls `release` and `check_delivered`, and any thread may call `clear`.
    """

    def __init__(self) -> None:
        self._current: Item | None = None
        self._released: collections.deque[Item] = collections.deque()  # released while the source was producing a value
        self._at_work = False

    def begin_draw(self) -> None:
        self._released.clear()
        self._at_work = True

    def check_drawn(self, item: Item) -> None:
        """Raise `SourceError` if a new item shares memory with items in use, and the memory has changed."""
        current = self._current  # read before `_released`, to which `release` adds it before clearing `_current`
        earlier = [*self._released, *([current] if current is not None else [])]
        self._at_work = False
        if not earlier:
            return
        found: list[set[MemoryLocation]] = []

        def locations() -> set[MemoryLocation]:
            if not found:  # rarely needed
                found.append({location for fingerprint in item.fingerprints for location in fingerprint.locations})
            return found[0]

        for used in earlier:
            for fingerprint in used.fingerprints:
                fingerprint.check_locations(locations)

    def release(self) -> None:
        current = self._current
        if current is not None and self._at_work:
            self._released.append(current)
        self._current = None

    def check_delivered(self, item: Item) -> None:
        self._current = item
        for fingerprint in item.fingerprints:
            fingerprint.check()

    def clear(self) -> None:
        self._current = None
        self._released.clear()
