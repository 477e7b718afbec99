"""Indexes the rows of a key on disk: the file and row of every id, files that come and go, and rows not written yet.

Not thread-safe but for `read`: the cache's lock guards it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.cache_before.folder import KEY_FILE, SUFFIX, folder_of
from benchmarks.cache_before.layout import RowLayout
from benchmarks.cache_before.memory import SampleId
from benchmarks.cache_before.segment import BadSegmentError, FileHandles, Segment
from edl.distill.cache import CacheKey

__all__ = ["Namespace", "RowRange"]

logger = logging.getLogger("edl.distill")

_ROW_BITS = 32
"""Of an index entry, for the row in its file: more rows than a file can have, and room for as many files."""
_ROW_MASK = (1 << _ROW_BITS) - 1
_SCAN_S = 1.0
"""Between two looks at the folder: other processes' rows may be that late, and a look costs a listing."""
_VERIFIED_AT_ONCE = 64
"""Rows read at a time by `verify`, so that memory stays bounded for wide rows."""
_CLOCK_GRAIN_S = 2.0
"""File systems stamp folders this coarsely: a folder that changed so recently may have changed again unnoticed."""


class RowRange(NamedTuple):
    """Rows that lie behind one another in a file.

    Attributes:
        number: of the file.
        segment: the file.
        start: first row.
        rows: how many.
    """

    number: int
    segment: Segment
    start: int
    rows: int


class Namespace:
    """The rows of a key on disk.

    Args:
        root: the cache's folder.
        key: of the rows.
        handles: open files.

    Attributes:
        key: as given.
        path: of the namespace's folder.
        layout: of the rows; None before the first was seen.
        pending: records that are not in a file yet.
        skipped: files left out.
        damaged_rows: found so far.
    """

    def __init__(self, root: Path, key: CacheKey, handles: FileHandles) -> None:
        self.key = key
        self.path = root / folder_of(key)
        self.layout: RowLayout | None = None
        self.pending: dict[SampleId, bytes] = {}
        self.skipped = self.damaged_rows = 0
        self._handles = handles
        self._index: dict[SampleId, int] = {}  # the file's number << _ROW_BITS | row
        self._segments: dict[int, Segment] = {}
        self._numbers: dict[str, int] = {}
        self._next = 0
        self._damaged: set[int] = set()
        self._bad: set[tuple[str, int, int]] = set()
        self._said: set[str] = set()  # what could not be read for a reason that may pass
        self._scanned_at = -float("inf")
        self._changed_ns = -1

    def __len__(self) -> int:
        return len(self._index.keys() | self.pending.keys()) if self.pending else len(self._index)

    def __contains__(self, sample: SampleId) -> bool:
        return sample in self.pending or sample in self._index

    def ids(self) -> list[SampleId]:
        """Return all ids, in the order in which they were first seen."""
        return list({**dict.fromkeys(self._index), **dict.fromkeys(self.pending)})

    def head(self, sample: SampleId) -> tuple[int, bytes] | None:
        """Return the rows and the fingerprint of a sequence; None if there is none."""
        record = self.pending.get(sample)
        if record is not None and self.layout is not None:
            return self.layout.head_of(record)
        code = self._index.get(sample)
        return None if code is None else self._segments[code >> _ROW_BITS].head(code & _ROW_MASK)

    def segments(self) -> list[Segment]:
        """Return the files, oldest first."""
        return [self._segments[number] for _, number in sorted(self._numbers.items())]

    # Looking up

    def places(self, ids: Sequence[SampleId]) -> list[RowRange | None]:
        """Return where rows are, in the order of `ids`: a range for as many ids as it has rows, None for an id."""
        codes = [self._index.get(sample, -1) for sample in ids]
        found: list[RowRange | None] = []
        at = 0
        while at < len(codes):
            code = codes[at]
            if code < 0:
                found.append(None)
                at += 1
                continue
            end = at + 1
            while end < len(codes) and codes[end] == codes[end - 1] + 1:
                end += 1
            number = code >> _ROW_BITS
            found.append(RowRange(number, self._segments[number], code & _ROW_MASK, end - at))
            at = end
        return found

    def is_newest(self, place: RowRange, row: int, sample: SampleId) -> bool:
        """Return whether row `row` of the range still is what counts for this id."""
        return sample not in self.pending and self._index.get(sample) == place.number << _ROW_BITS | place.start + row

    def read(self, place: RowRange) -> list[bytes | None] | BadSegmentError:
        """Return the records there, None for damaged records, or why the file cannot be read. Needs no lock."""
        try:
            return place.segment.read(self._handles, place.start, place.rows)
        except BadSegmentError as exc:
            return exc

    def lost(self, place: RowRange, why: BadSegmentError) -> None:
        """Forget a file that could not be read, unless that may pass: then its rows are there when it has."""
        if why.may_pass:
            self._say_unreadable(place.segment.path, str(why))
        elif place.number in self._segments:
            self._forget(place.number)
            self._leave_out(place.segment.path, why)

    def damaged(self, place: RowRange, row: int, sample: SampleId) -> None:
        """Forget a row whose bytes are not what was written. Logged once per file."""
        self.damaged_rows += 1
        if self.is_newest(place, row, sample):
            del self._index[sample]
        if place.number in self._segments and place.number not in self._damaged:
            self._damaged.add(place.number)
            logger.warning(
                "soft-label cache: %s is damaged: the label of sample %r, at least, is asked for again",
                place.segment.path,
                sample,
            )

    def verify(self) -> None:
        """Read every row, and forget damaged rows and files that cannot be read any more."""
        for number, segment in list(self._segments.items()):
            for start in range(0, len(segment.ids), _VERIFIED_AT_ONCE):
                place = RowRange(number, segment, start, min(_VERIFIED_AT_ONCE, len(segment.ids) - start))
                records = self.read(place)
                if isinstance(records, BadSegmentError):
                    self.lost(place, records)
                    break
                for row, record in enumerate(records):
                    if record is None:
                        self.damaged(place, row, segment.ids[start + row])

    # Files that come and go

    def scan(self, *, force: bool = False) -> None:
        """Notice files that came and went; looks at the folder at most once a second unless forced."""
        now = time.monotonic()
        if not force and now - self._scanned_at < _SCAN_S:
            return
        self._scanned_at = now
        try:
            changed_ns = self.path.stat().st_mtime_ns
            if not force and changed_ns == self._changed_ns:
                return
            files = self._list()
        except FileNotFoundError:
            changed_ns, files = 0, {}
        except OSError as exc:
            self._say_unreadable(self.path, exc.strerror or str(exc))
            return  # what is known stays
        settled = time.time() - changed_ns / 1e9 > _CLOCK_GRAIN_S
        self._changed_ns = changed_ns if settled else -1
        self._compare(files)

    def _list(self) -> dict[str, Path]:
        entries = (path for path in self.path.iterdir() if not path.name.startswith("."))
        return {path.name: path for path in entries if path.name != KEY_FILE}

    def _compare(self, files: dict[str, Path]) -> None:
        for name in self._numbers.keys() - files.keys():
            self._forget(self._numbers[name])
        for name in sorted(files.keys() - self._numbers.keys()):
            self._take_in(files[name])

    def _take_in(self, path: Path) -> None:
        if _identity(path) in self._bad:
            return
        try:
            if path.suffix != SUFFIX:
                raise BadSegmentError("it was not written by EDL")
            segment = Segment.open(path, self.path.name, self._handles)
            self.agree(segment.layout)
        except BadSegmentError as exc:
            if exc.may_pass:
                self._changed_ns = -1  # look again, though nothing else changes
                self._say_unreadable(path, str(exc))
            else:
                self._leave_out(path, exc)
        else:
            self._add(segment)

    def _say_unreadable(self, path: Path, why: str) -> None:
        if why not in self._said:  # for each file anew it would fill the log
            self._said.add(why)
            logger.warning(
                "soft-label cache: %s cannot be read now, nor perhaps others: %s; its labels are not there until then",
                path,
                why,
            )

    def _leave_out(self, path: Path, why: BadSegmentError) -> None:
        self._handles.drop(path)
        identity = _identity(path)
        if identity is None:
            return  # it was evicted meanwhile, which is nothing to warn of
        self._bad.add(identity)
        self.skipped += 1
        logger.warning("soft-label cache: %s is left out: %s", path, why)

    def agree(self, layout: RowLayout) -> None:
        """Check that rows have the layout of the first rows.

        Raises:
            BadSegmentError: they have another.
        """
        merged = layout if self.layout is None else self.layout.merged(layout)
        if merged is not None:
            self.layout = merged
        else:
            raise BadSegmentError(f"its rows are {layout}; others of the same key are {self.layout}")

    def _add(self, segment: Segment) -> None:
        number = self._next
        self._next = self._next + 1
        self._segments[number] = segment
        self._numbers[segment.path.name] = number
        base = number << _ROW_BITS
        for row, sample in enumerate(segment.ids):
            known = self._index.get(sample)
            # Of several rows of one id the newest counts, in whatever order files are found. Names begin with the time.
            if known is None or self._segments[known >> _ROW_BITS].path.name <= segment.path.name:
                self._index[sample] = base | row

    def _forget(self, number: int) -> None:
        segment = self._segments.pop(number)
        self._damaged.discard(number)
        del self._numbers[segment.path.name]
        self._handles.drop(segment.path)
        for sample in segment.ids:
            if self._index.get(sample, -1) >> _ROW_BITS == number:
                del self._index[sample]

    # Rows not written yet

    def written(self, ids: Iterable[SampleId], records: Iterable[bytes]) -> None:
        """Note that rows are in a file now, or never will be; rows put again meanwhile stay pending."""
        for sample, record in zip(ids, records, strict=True):
            if self.pending.get(sample) is record:
                del self.pending[sample]


def _identity(path: Path) -> tuple[str, int, int] | None:
    """Return what tells a file from another that takes its name later; None if there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return path.name, stat.st_size, stat.st_mtime_ns
