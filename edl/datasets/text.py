"""Text by lines, and CSV by records: one pass over the files finds the units; readers later read byte ranges.

The pass cuts the files, one after another, into segments: shards, or parts of a shard that is large or grows slowly.
For each segment, the index contains the number of units, the length in bytes and the CRC-32. A reader checks these
values before it returns the segment's first sample.

A newline ends a CSV record if the number of quotes before it is even, as RFC 4180 specifies. Python's `csv` module
parses the records. pyarrow's CSV reader is unsuitable: it reads a file from the start, does not report the offsets at
which records end, and guesses types from the first rows. Here all fields are text.
"""

from __future__ import annotations

import abc
import bisect
import codecs
import csv
import io
import itertools
import logging
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np

from edl.datasets.dataset import (
    DEFAULT_SHARD_SIZE,
    Dataset,
    IndexPart,
    Numbers,
    Options,
    ShardSettings,
    pack_part,
)
from edl.datasets.files import absolute, file_changed, find_files, list_files, read_blocks, read_range, stat_file
from edl.errors import SettingsError, SourceError
from edl.quoting import quote, shown

logger = logging.getLogger(__name__)

_LOGGED_NBYTES: Final = 10 << 30  # bytes between two lines in the log: indexing a large text takes minutes
_LOOK_NBYTES: Final = 256 << 20  # bytes read per check, so that the first shards are handed out within a second
_TAIL_NBYTES: Final = 4096  # bytes at the end that are compared at every check, to detect a different file
_MOST_SEGMENT: Final = 8 << 20  # bytes after which a segment ends within a shard: a reader holds a segment in memory
_COMPRESSED: Final = {
    b"\x1f\x8b\x08": "gzip",
    b"BZh91AY&SY": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}
Pieces: TypeAlias = Iterator[tuple[memoryview, Numbers]]  # pieces of a file, and where units end in each piece
_BOM: Final = b"\xef\xbb\xbf"
_NEWLINE, _RETURN = b"\n\r"
_FIELD_LIMIT: Final = 64 << 20  # characters of a CSV field; Python's 131,072 are too few for some documents
_MOST_RECORD: Final = 256 << 20  # bytes of a CSV record: an open quote is noticed before the end of a large file


class _SegmentCutter:
    """Cuts a streamed text into segments, and keeps only the segments' counts, lengths and checksums for the index.

    `units` is the number of earlier units. After `most_nbytes`, a segment ends even if its shard is incomplete.
    """

    def __init__(self, shard_size: int, units: int = 0, most_nbytes: int = sys.maxsize) -> None:
        self.units = self._cut_units = units
        self._shard_size = shard_size
        self._most_nbytes = most_nbytes
        self._length = self._crc = 0
        self._segments = array("q")  # 8 bytes per number: a list would take five times as much

    def feed(self, data: memoryview, ends: Numbers) -> None:
        """Add the bytes of whole units, and the ascending offsets at which units end."""
        begin = 0
        missing = self._shard_size - self.units % self._shard_size
        for number, end in enumerate(ends[missing - 1 :: self._shard_size].tolist()):
            self._add(data[begin:end])
            self._cut(self.units + missing + number * self._shard_size)
            begin = end
        self.units += len(ends)
        self._add(data[begin:])
        if self._length >= self._most_nbytes and self.units > self._cut_units:
            self._cut(self.units)

    def pop_columns(self, *, rest: bool) -> dict[str, Numbers]:
        """Return and forget the columns of the segments so far; with `rest`, add units that do not fill a shard."""
        if rest and self.units > self._cut_units:
            self._cut(self.units)
        columns = np.array(self._segments, np.int64).reshape(-1, 3).T
        self._segments = array("q")
        return dict(zip(("counts", "lengths", "crcs"), columns, strict=True))

    def _add(self, data: memoryview) -> None:
        self._crc = zlib.crc32(data, self._crc)
        self._length += len(data)

    def _cut(self, units: int) -> None:
        self._segments.extend((units - self._cut_units, self._length, self._crc))
        self._cut_units = units
        self._length = self._crc = 0


class _TextDataset(Dataset):
    """Text files; a shard may continue from the end of a file into the next file."""

    @classmethod
    def _create(cls, kind: str, location: str, settings: ShardSettings, options: dict[str, Any]) -> Dataset:
        shard_size = settings.shard_size or DEFAULT_SHARD_SIZE
        location, paths, stats = find_files(location)
        for path in paths:
            _check_uncompressed(path)
        cutter = _SegmentCutter(shard_size, most_nbytes=_MOST_SEGMENT)
        done, whole = 0, sum(stat.nbytes for stat in stats)
        for path, stat in zip(paths, stats, strict=True):
            for data, ends in cls._scan(path, read_blocks(path, 0, stat.nbytes), options):
                cutter.feed(data, ends)
                if done // _LOGGED_NBYTES < (done + len(data)) // _LOGGED_NBYTES:
                    logger.info("indexing %s:%s: %.0f of %.0f GB", kind, shown(location), done / 1e9, whole / 1e9)
                done += len(data)
            if stat_file(path) != stat:
                raise SourceError(
                    f"{quote(path)} changed while it was indexed. Open a file that grows as 'follow:{path}'"
                )
        if not cutter.units:
            raise SettingsError(f"{kind}:{location} has no {cls._unit}")
        head = {"options": options, "files": paths, "nbytes": [stat.nbytes for stat in stats]}
        return cls(settings._make_spec(kind, location, cutter.units, head, cutter.pop_columns(rest=True)))

    @classmethod
    @abc.abstractmethod
    def _scan(cls, path: str, blocks: Iterable[bytes], options: dict[str, Any]) -> Pieces:
        """Yield all bytes of a file, with the offsets at which units end. May add options found in the first file."""

    @abc.abstractmethod
    def _parse(self, path: str, at: int, data: bytes) -> Iterable[Any]:
        """Yield the units in the bytes of a file from offset `at` on."""

    def _load(self, parts: Sequence[IndexPart]) -> int:
        head = parts[0].head
        self._options = self._read_options(self.kind, head["options"])
        self._paths = head["files"]
        self._nbytes: list[int | None] = head["nbytes"]  # None: the file grows
        self._file_begins = [0, *itertools.accumulate(nbytes or 0 for nbytes in self._nbytes)]
        counts, lengths, self._crcs = (
            np.concatenate([part.columns[name] for part in parts]) for name in ("counts", "lengths", "crcs")
        )
        self._unit_begins, self._byte_begins = np.append(0, np.cumsum(counts)), np.append(0, np.cumsum(lengths))
        return int(self._unit_begins[-1])

    def _read_units(self, start: int, stop: int) -> Iterable[Any]:
        first = int(np.searchsorted(self._unit_begins, start, "right")) - 1
        last = int(np.searchsorted(self._unit_begins, stop, "left"))
        pieces = itertools.chain.from_iterable(map(self._read_segment, range(first, last)))
        units = itertools.chain.from_iterable(itertools.starmap(self._parse, pieces))
        begin, end = self._unit_begins[[first, last]].tolist()
        # Read to the end if the lease covers it, so that too many units are noticed.
        return itertools.islice(units, start - begin, None if stop == end else stop - begin)

    def _read_segment(self, segment: int) -> list[tuple[str, int, bytes]]:
        """Return the bytes of a segment by file, each with the file's path and the offset of the first byte."""
        begin, end = self._byte_begins[segment : segment + 2].tolist()
        files = len(self._paths)
        first = bisect.bisect_right(self._file_begins, begin, hi=files) - 1
        found = []
        crc = 0
        for file in range(first, bisect.bisect_left(self._file_begins, end, hi=files)):
            path, nbytes = self._paths[file], self._nbytes[file]
            start, stop = max(0, begin - self._file_begins[file]), end - self._file_begins[file]
            stop = stop if nbytes is None else min(stop, nbytes)
            if start == stop:
                continue
            there = stat_file(path).nbytes
            if nbytes is not None and there != nbytes:
                raise file_changed(path, f"it has {there} bytes, but had {nbytes}")
            if there < stop:
                raise file_changed(path, f"it has {there} bytes, but had {stop} or more: was it truncated, or rotated?")
            found.append((path, start, b"".join(read_blocks(path, start, stop))))
            crc = zlib.crc32(found[-1][2], crc)
        if crc != self._crcs[segment]:
            path, start, data = found[-1]
            raise file_changed(path, f"its bytes {start} to {start + len(data)} differ")
        return found


class LinesDataset(_TextDataset):
    r"""Text by lines. A line ends only at a byte with the value 10, or at the end of its file; NUL bytes are data.

    Samples are bytes, or `str` with an encoding, without the line's end (`\n` or `\r\n`) unless `keep_ends` is set. A
    byte order mark is data, except with the encoding `utf-8-sig`. In a file that grows, a line counts once its line end
    is written; a last line without a line end counts when the source ends.
    """

    _unit: ClassVar[str] = "lines"
    _options_known: ClassVar[Options] = {
        "encoding": (None, str),
        "errors": ("strict", str),
        "keep_ends": (False, bool),
    }

    @classmethod
    def _read_options(cls, kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
        options = super()._read_options(kind, given)
        _check_encoding(options)
        return options

    @classmethod
    def _scan(cls, path: str, blocks: Iterable[bytes], options: dict[str, Any]) -> Pieces:
        return _whole_units(path, blocks, _newline_ends)

    def _parse(self, path: str, at: int, data: bytes) -> Iterable[Any]:
        encoding, errors, keep_ends = self._options.values()
        if encoding == "utf-8-sig":
            encoding, data = "utf-8", data if at else data.removeprefix(_BOM)  # a mark elsewhere is data
        lines = io.BytesIO(data).readlines()  # ends lines at byte 10 only, unlike `splitlines`
        if not keep_ends:
            lines = [line.removesuffix(b"\r\n").removesuffix(b"\n") for line in lines]
        return lines if encoding is None else map(partial(_decode, path, encoding, errors), lines)

    @classmethod
    def _create(cls, kind: str, location: str, settings: ShardSettings, options: dict[str, Any]) -> Dataset:
        if kind != "follow":
            return super()._create(kind, location, settings, options)
        location = absolute(location)
        if list_files(location):  # it need not exist yet
            _check_uncompressed(location)
        head = {"of": "lines", "options": options, "files": [location], "nbytes": [None]}
        return cls(settings._make_spec(kind, location, None, head, _SegmentCutter(1).pop_columns(rest=False)))

    def _load(self, parts: Sequence[IndexPart]) -> int:
        units = super()._load(parts)
        self._cutter = _SegmentCutter(self.spec.shard_size, units)
        self._at = int(self._byte_begins[-1])
        self._tail = (int(self._byte_begins[-2]), self._at, int(self._crcs[-1])) if units else (0, 0, 0)
        return units

    def _look(self, now_s: float, settle_s: float, *, final: bool) -> tuple[int, bool]:
        path = self._paths[0]
        if not self._at and not list_files(path):
            return 0, False  # the file does not exist yet
        nbytes = stat_file(path).nbytes
        if nbytes < self._at:
            raise file_changed(path, f"it has {nbytes} bytes, but had {self._at}: was it truncated, or rotated?")
        begin, end, crc = self._tail
        if zlib.crc32(b"".join(read_blocks(path, begin, end))) != crc:
            raise file_changed(path, f"its bytes {begin} to {end} differ: was it replaced, or rotated?")
        blocks = read_blocks(path, self._at, nbytes if final else min(nbytes, self._at + _LOOK_NBYTES))
        for data, ends in _whole_units(path, blocks, _newline_ends):
            if final or data[-1] == _NEWLINE:  # the end of the last line may not be written yet
                self._cutter.feed(data, ends)
                self._at += len(data)
                last = data[-_TAIL_NBYTES:]
                self._tail = (self._at - len(last), self._at, zlib.crc32(last))
        return self._cutter.units, False

    def _next_part(self, known: int, units: int) -> bytes:
        return pack_part({}, self._cutter.pop_columns(rest=units == self._cutter.units))


class RecordsDataset(_TextDataset):
    """CSV by records, as RFC 4180 specifies: a newline in quotes does not end a record.

    Samples are dictionaries of text by column, or lists if the columns have no names. Blank lines are skipped. A record
    with more or fewer fields than there are columns is an error. All files need the same header.
    """

    _unit: ClassVar[str] = "rows"
    _options_known: ClassVar[Options] = {
        "delimiter": (",", str),
        "quotechar": ('"', str | None),
        "header": (True, bool),
        "names": (None, list),
        "columns": (None, list),
        "encoding": ("utf-8", str),
        "errors": ("strict", str),
    }

    @classmethod
    def _read_options(cls, kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
        options = super()._read_options(kind, given)
        _check_encoding(options)
        if options["encoding"] == "utf-8-sig":  # a mark at the start of a file is left out anyway
            options["encoding"] = "utf-8"
        for name in ("delimiter", "quotechar"):
            value = options[name]
            if value is not None and (len(value) != 1 or not value.isascii() or value in "\r\n\0"):
                raise SettingsError(f"{name}={value!r}: must be an ASCII character")
        if options["delimiter"] == options["quotechar"]:
            raise SettingsError(f"delimiter={options['delimiter']!r} is also the quotechar")
        return options

    @classmethod
    def _create(cls, kind: str, location: str, settings: ShardSettings, options: dict[str, Any]) -> Dataset:
        if options["header"] and options["names"] is not None:
            raise SettingsError("names=: the header names the columns; pass header=False if there is none")
        return super()._create(kind, location, settings, options)

    @classmethod
    def _scan(cls, path: str, blocks: Iterable[bytes], options: dict[str, Any]) -> Pieces:
        blocks = iter(blocks)
        first = next(blocks, b"")
        if first.startswith(_BOM):
            yield memoryview(_BOM), np.empty(0, np.int64)
        blocks = itertools.chain([first.removeprefix(_BOM)], blocks)
        needs_header = options["header"]
        for data, ends in _whole_units(path, blocks, partial(_record_ends, path, options)):
            begins = np.frombuffer(data, np.uint8)[np.append(0, ends[:-1])]
            ends = ends[(begins != _NEWLINE) & (begins != _RETURN)]  # blank lines do not count
            if needs_header and len(ends):
                found = next(_parse_rows(path, 0, bytes(data[: ends[0]]), options))
                options["names"] = options["names"] or found
                if found != options["names"]:
                    raise SettingsError(
                        f"{quote(path)} has the columns {quote(found)}, but the first file has "
                        f"{quote(options['names'])}: put files with different columns into a separate data set"
                    )
                needs_header, ends = False, ends[1:]
            yield data, ends

    def _load(self, parts: Sequence[IndexPart]) -> int:
        units = super()._load(parts)
        names, columns = self._options["names"], self._options["columns"]
        if names is not None and (len(set(names)) < len(names) or not names):
            raise SettingsError(f"csv:{self.spec.location} has the columns {quote(names)}: each needs its own name")
        if unknown := set(columns or []) - set(names or []):
            raise SettingsError(f"csv:{self.spec.location} has no column {quote(sorted(unknown))}, only {quote(names)}")
        return units

    def _parse(self, path: str, at: int, data: bytes) -> Iterator[Any]:
        names, columns = self._options["names"], self._options["columns"]
        rows = _parse_rows(path, at, data, self._options)
        if self._options["header"] and at == 0:
            next(rows, None)
        for row in rows:
            if names is None:
                yield row
                continue
            if len(row) != len(names):
                raise SourceError(
                    f"{quote(path)}: the record {quote(row)} has {len(row)} fields, but there are {len(names)} columns"
                )
            record = dict(zip(names, row, strict=True))
            yield record if columns is None else {name: record[name] for name in columns}


def _check_uncompressed(path: str) -> None:
    head = read_range(path, 0, max(map(len, _COMPRESSED)))
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise SettingsError(
                f"{quote(path)} is compressed ({name}): a shard could only be read by unpacking everything before it. "
                f"Unpack the file, or write Parquet, which is compressed internally"
            )


def _newline_ends(data: bytes) -> Numbers:
    ends: Numbers = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE) + 1
    return ends


def _check_encoding(options: dict[str, Any]) -> None:
    """Refuse encodings in which a newline is not the byte 10; spell `utf-8-sig` as Python does."""
    encoding, errors = options["encoding"], options["errors"]
    if encoding is None:
        return
    try:
        codecs.lookup_error(errors)
        if codecs.lookup(encoding).name == "utf-8-sig":
            options["encoding"] = "utf-8-sig"
        is_plain = '\n,"'.encode(encoding).removeprefix(_BOM) == b'\n,"'
    except (LookupError, ValueError) as exc:
        raise SettingsError(f"encoding={encoding!r}, errors={errors!r}: {exc}") from exc
    if not is_plain:
        raise SettingsError(
            f"encoding={encoding!r}: line endings cannot be found in the bytes of this encoding; convert the file to "
            "UTF-8"
        )


def _parse_rows(path: str, at: int, data: bytes, options: Mapping[str, Any]) -> Iterator[list[str]]:
    csv.field_size_limit(max(csv.field_size_limit(), _FIELD_LIMIT))  # for the whole process: only ever raised
    quoting: Any = csv.QUOTE_NONE if options["quotechar"] is None else csv.QUOTE_MINIMAL
    lines = io.BytesIO(data if at else data.removeprefix(_BOM)).readlines()
    reader = csv.reader(
        map(partial(_decode, path, options["encoding"], options["errors"]), lines),
        delimiter=options["delimiter"],
        quotechar=options["quotechar"],
        quoting=quoting,
        strict=True,
    )
    try:
        yield from filter(None, reader)
    except csv.Error as exc:
        line = lines[reader.line_num - 1]
        raise SourceError(f"{quote(path)}: the record that ends with the line {quote(line)}: {exc}") from exc


def _decode(path: str, encoding: str, errors: str, line: bytes) -> str:
    try:
        return line.decode(encoding, errors)
    except UnicodeError as exc:
        raise SourceError(
            f"{quote(path)}: the line {quote(line)} is not {encoding}: {exc}. Choose errors='replace' or a different "
            f"encoding; with lines:PATH, you can also read bytes (encoding=None)"
        ) from exc


def _whole_units(path: str, blocks: Iterable[bytes], find_ends: Callable[[bytes], Numbers]) -> Pieces:
    """Yield the bytes of a file in pieces that end where a unit ends. The last piece may lack a newline at its end."""
    begun: list[bytes] = []  # of a unit whose end has not been read
    for block in blocks:
        begun.append(block)
        if b"\n" in block:
            data = b"".join(begun)
            ends = find_ends(data)
            if len(ends):
                yield memoryview(data)[: ends[-1]], ends
                data = data[ends[-1] :]
            begun = [data]
    if rest := b"".join(begun):
        if not len(find_ends(rest + b"\n")):
            raise _unclosed(path, rest)
        yield memoryview(rest), np.array([len(rest)])


def _record_ends(path: str, options: Mapping[str, Any], data: bytes) -> Numbers:
    """Return where records end in bytes that begin with a record; a blank line counts as a record here.

    A field that contains quotes must be quoted as a whole, and the quotes inside it must be doubled. So every newline
    after an even number of quotes ends a record, and this function need not parse records.
    """
    if options["quotechar"] is None or options["quotechar"].encode() not in data:
        return _newline_ends(data)
    view = np.frombuffer(data, np.uint8)
    delimiter, mark = ord(options["delimiter"]), ord(options["quotechar"])
    marks = view == mark
    quoted = np.bitwise_xor.accumulate(marks.view(np.uint8)).view(np.bool_)  # an odd number of quotes up to here
    opening, closing = np.flatnonzero(marks & quoted), np.flatnonzero(marks & ~quoted)
    # If nothing precedes or follows a quote, the quote itself is checked, as if it were doubled.
    before, after = view[np.maximum(opening - 1, 0)], view[np.minimum(closing + 1, len(view) - 1)]
    odd = [
        *opening[~np.isin(before, [delimiter, _NEWLINE, mark])],
        *closing[~np.isin(after, [delimiter, _NEWLINE, _RETURN, mark])],
    ]
    if odd:
        at = int(min(odd))
        raise SettingsError(
            f"{quote(path)}: cannot find the records: at {quote(data[max(0, at - 10) : at + 10])}, only "
            f"part of a field is in quotes. Quote all of it, and double the quotes in it, or pass quotechar=None"
        )
    ends: Numbers = np.flatnonzero((view == _NEWLINE) & ~quoted) + 1
    if not len(ends) and len(data) > _MOST_RECORD:
        raise _unclosed(path, data)
    return ends


def _unclosed(path: str, record: bytes) -> SettingsError:
    return SettingsError(
        f"{quote(path)}: cannot find the records: a quote in the record {quote(record)} is never closed; "
        f"check delimiter and quotechar"
    )
