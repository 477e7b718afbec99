"""Where the shards of a text are, as its index says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edl.errors import ProtocolError
from edl.master.datasets.index import IndexPart, Numbers

__all__ = ["Segments"]


@dataclass(frozen=True)
class Segments:
    """Segments of a text: shards, or parts of shards where the text grew slowly.

    Attributes:
        unit_begins: the first unit of each segment, and the number of all units.
        byte_begins: the first byte of each segment in all files one after another, and the number of all bytes.
        crcs: CRC-32 of the bytes of each segment.
    """

    unit_begins: Numbers
    byte_begins: Numbers
    crcs: Numbers

    @classmethod
    def join(cls, parts: Sequence[IndexPart]) -> Segments:
        """Return the segments of an index.

        A part of a text that grows says from which unit on it is (`from`). Where two followers have told the same, the
        second is left out.

        Raises:
            ProtocolError: parts do not fit together.
        """
        columns: dict[str, list[Numbers]] = {"counts": [], "lengths": [], "crcs": []}
        units = 0
        for part in parts:
            try:
                found = {name: part.columns[name] for name in columns}
            except KeyError as exc:
                raise ProtocolError(f"the index of a text lacks {exc}") from exc
            if len({len(numbers) for numbers in found.values()}) > 1:
                raise ProtocolError("the index of a text has columns of several lengths")
            begin = part.head.get("from", units)
            if type(begin) is not int or any((numbers < 0).any() for numbers in found.values()):
                raise ProtocolError("the index of a text has a part that is none of a text")
            skipped = _overlap(found["counts"], units - begin)
            for name, numbers in found.items():
                columns[name].append(numbers[skipped:])
            units += int(found["counts"][skipped:].sum())
        counts, lengths, crcs = (np.concatenate(numbers) for numbers in columns.values())
        zero = np.zeros(1, np.int64)
        begins = [np.concatenate([zero, np.cumsum(numbers)]) for numbers in (counts, lengths)]
        return cls(begins[0], begins[1], crcs)

    @property
    def units(self) -> int:
        """How many units there are."""
        return int(self.unit_begins[-1])

    @property
    def end(self) -> int:
        """Behind which byte nothing is indexed."""
        return int(self.byte_begins[-1])

    def find(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first segment with units of a range, and the segment behind the last."""
        first = int(np.searchsorted(self.unit_begins, start, "right")) - 1
        return first, int(np.searchsorted(self.unit_begins, stop, "left"))

    def bounds(self, segment: int) -> tuple[int, int]:
        """Return the first byte of a segment, and the byte behind the last."""
        return int(self.byte_begins[segment]), int(self.byte_begins[segment + 1])

    def nbytes(self, segment: int) -> int:
        """Return how many bytes a segment has."""
        return int(self.byte_begins[segment + 1] - self.byte_begins[segment])


def _overlap(counts: Numbers, units: int) -> int:
    """Return how many segments of a part hold the units that are there already."""
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    skipped = min(int(np.searchsorted(ends, units)), len(counts))
    if units < 0 or (skipped < len(counts) and ends[skipped] != units):
        raise ProtocolError("parts of the index do not fit together: are there two followers?")
    return skipped
