"""Text files by lines, and CSV by records: found in a single pass over the files, and read by ranges of bytes.

The pass cuts the files, one after another, into segments: shards, or parts of a shard that is large or grows slowly
(`edl.datasets.growing`). The index has the units, the length in bytes and the CRC-32 of each segment. So every byte
belongs to one shard, and a reader, which opens the files itself, reads the bytes of its segments and nothing else. It
checks a segment before it hands out the first sample of it.

A newline ends a CSV record if the number of quotes before it is even, as RFC 4180 has it; Python's `csv` parses the
records. pyarrow's CSV reader would not do: it goes through a file from the start, does not say after which bytes
records end, and guesses types from what it reads first. Here all fields are text.
"""

from __future__ import annotations

import abc
import bisect
import codecs
import csv
import itertools
import logging
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final

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

__all__ = ["LinesDataset", "RecordsDataset"]

logger = logging.getLogger(__name__)

_LOGGED_NBYTES: Final = 10 << 30
"""Bytes between two lines in the log: a pass over a large text takes minutes."""
_LOOK_NBYTES: Final = 256 << 20
"""Bytes read per look: the first shards of a text that is there already should be handed out within a second."""
_TAIL_NBYTES: Final = 4096
"""Bytes before the end of the last line that are compared at every look: another file of that name has others there."""
_MOST_SEGMENT: Final = 8 << 20
"""Bytes after which a segment ends, even if its shard goes on: a reader holds a segment in memory."""
_COMPRESSED: Final = {
    b"\x1f\x8b\x08": "gzip",
    b"BZh91AY&SY": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}
_BOM: Final = b"\xef\xbb\xbf"
_NEWLINE, _RETURN = b"\n\r"
_FIELD_LIMIT: Final = 64 << 20
"""Characters of a CSV field. Python's default of 131,072 is less than a document may have."""


class _SegmentCutter:
    """Cuts a text into segments while it streams by, and keeps only their columns of the index.

    Args:
        shard_size: Units per shard.
        units: Units that were there before.
        most_nbytes: Bytes after which a segment ends, even if its shard goes on; None for no limit.

    Attributes:
        units: Units so far.
    """

    def __init__(self, shard_size: int, units: int = 0, most_nbytes: int | None = None) -> None:
        self.units = self._cut_units = units
        self._shard_size = shard_size
        self._most_nbytes = most_nbytes
        self._length = self._crc = 0
        self._columns: dict[str, array[int]] = {}  # 8 bytes per number: lists would take five times as much
        self.pop_columns()

    def feed(self, data: bytes, ends: Numbers) -> None:
        """Take the next bytes, and where units end in them, rising; an end of 0 ends a unit of the bytes before."""
        view = memoryview(data)
        begin = 0
        missing = self._shard_size - self.units % self._shard_size
        for number, end in enumerate(ends[missing - 1 :: self._shard_size].tolist()):
            self._add(view[begin:end])
            self._cut(self.units + missing + number * self._shard_size)
            begin = end
        self.units += len(ends)
        is_long = self._most_nbytes is not None and self._length + len(data) - begin >= self._most_nbytes
        if is_long and len(ends) and self.units > self._cut_units:
            self._add(view[begin : int(ends[-1])])
            self._cut(self.units)
            begin = int(ends[-1])
        self._add(view[begin:])

    def cut_rest(self) -> None:
        """Make a segment of the units that fill no shard, if there are any."""
        if self.units > self._cut_units:
            self._cut(self.units)

    def pop_columns(self) -> dict[str, Numbers]:
        """Return the columns of the segments so far, and forget them."""
        found = {name: np.array(numbers, np.int64) for name, numbers in self._columns.items()}
        self._columns = {name: array("q") for name in ("counts", "lengths", "crcs")}
        return found

    def _add(self, data: memoryview) -> None:
        self._crc = zlib.crc32(data, self._crc)
        self._length += len(data)

    def _cut(self, units: int) -> None:
        for name, number in (("counts", units - self._cut_units), ("lengths", self._length), ("crcs", self._crc)):
            self._columns[name].append(number)
        self._cut_units = units
        self._length = self._crc = 0


class _TextDataset(Dataset):
    """Text files; a shard may go from the end of a file into the next one."""

    _kind: ClassVar[str]

    @classmethod
    def _create(cls, location: str, settings: ShardSettings, options: dict[str, Any]) -> Dataset:
        kind, shard_size = cls._kind, settings.shard_size or DEFAULT_SHARD_SIZE
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
                    f"{quote(path)} changed while it was indexed. A file that grows is opened as 'follow:{path}'"
                )
        if not cutter.units:
            raise SettingsError(f"{kind}:{location} has no {cls._unit}")
        cutter.cut_rest()
        head = {"options": options, "files": paths, "nbytes": [stat.nbytes for stat in stats]}
        return cls(settings._make_spec(kind, location, cutter.units, head, cutter.pop_columns()))

    @classmethod
    @abc.abstractmethod
    def _scan(cls, path: str, blocks: Iterable[bytes], options: dict[str, Any]) -> Iterator[tuple[bytes, Numbers]]:
        """Yield all bytes of a file, and where units end in them, as `_SegmentCutter.feed` takes them.

        May add to the options what the first file says.
        """

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
        # To the end where the lease goes up to it, so that too many units are noticed.
        return itertools.islice(units, start - begin, None if stop == end else stop - begin)

    def _read_segment(self, segment: int) -> list[tuple[str, int, bytes]]:
        """Return the bytes of a segment by file, each with its path and the offset of the first one."""
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
                raise file_changed(path, f"it has {there} bytes, and had {nbytes}")
            if there < stop:
                raise file_changed(path, f"it has {there} bytes, and had {stop} or more: was it cut off, or rotated?")
            found.append((path, start, b"".join(read_blocks(path, start, stop))))
            crc = zlib.crc32(found[-1][2], crc)
        if crc != self._crcs[segment]:
            path, start, data = found[-1]
            raise file_changed(path, f"its bytes {start} to {start + len(data)} are others")
        return found


class LinesDataset(_TextDataset):
    r"""Text by lines. A line ends at byte 10 and nowhere else, or at the end of its file; NUL bytes are data.

    Samples are bytes, or `str` with an encoding, without the line's end (`\n` or `\r\n`) unless `keep_ends` is set.
    An empty line is a sample. A byte order mark is data, except with the encoding `utf-8-sig`. In a file that grows, a
    line counts when its end is there; the last one when the source ends.
    """

    _kind: ClassVar[str] = "lines"
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
    def _scan(cls, path: str, blocks: Iterable[bytes], options: dict[str, Any]) -> Iterator[tuple[bytes, Numbers]]:
        ended = True
        for block in blocks:
            yield block, _newline_ends(block)
            ended = block.endswith(b"\n")
        if not ended:
            yield b"", np.zeros(1, np.int64)

    def _parse(self, path: str, at: int, data: bytes) -> Iterable[Any]:
        encoding, errors, keep_ends = self._options.values()
        if encoding == "utf-8-sig":
            encoding, data = "utf-8", data if at else data.removeprefix(_BOM)  # a mark elsewhere is data
        lines = _split_lines(data, keep_ends=keep_ends)
        return lines if encoding is None else map(partial(self._decode, path, encoding, errors), lines)

    def _decode(self, path: str, encoding: str, errors: str, line: bytes) -> str:
        try:
            return line.decode(encoding, errors)
        except UnicodeError as exc:
            raise SourceError(
                f"{quote(path)}: the line {quote(line)} is not {encoding}: {exc}. Read bytes (encoding=None), or "
                f"choose errors='replace' or another encoding"
            ) from exc

    @classmethod
    def _create_growing(cls, location: str, settings: ShardSettings, options: dict[str, Any]) -> Dataset:
        location = absolute(location)
        if list_files(location):  # it need not be there yet
            _check_uncompressed(location)
        head = {"of": "lines", "options": options, "files": [location], "nbytes": [None]}
        return cls(settings._make_spec("follow", location, None, head, _SegmentCutter(1).pop_columns()))

    def _load(self, parts: Sequence[IndexPart]) -> int:
        units = super()._load(parts)
        self._cutter = _SegmentCutter(self.spec.shard_size, units)
        self._at = int(self._byte_begins[-1])
        self._tail = (int(self._byte_begins[-2]), self._at, int(self._crcs[-1])) if units else (0, 0, 0)
        return units

    def _look(self, now_s: float, settle_s: float, *, final: bool) -> tuple[int, bool]:
        path = self._paths[0]
        if not self._at and not list_files(path):
            return 0, False  # it is still to come
        nbytes = stat_file(path).nbytes
        if nbytes < self._at:
            raise file_changed(path, f"it has {nbytes} bytes, and had {self._at}: was it cut off, or rotated?")
        begin, end, crc = self._tail
        if zlib.crc32(b"".join(read_blocks(path, begin, end))) != crc:
            raise file_changed(path, f"its bytes {begin} to {end} are others: was it replaced, or rotated?")
        begun: list[bytes] = []  # of a line whose end is not there yet
        for block in read_blocks(path, self._at, nbytes if final else min(nbytes, self._at + _LOOK_NBYTES)):
            cut = block.rfind(b"\n") + 1
            if cut:
                data = b"".join([*begun, block[:cut]])
                self._feed(data, _newline_ends(data))
                begun = []
            begun.append(block[cut:])
        rest = b"".join(begun)
        if final and rest:
            self._feed(rest, np.array([len(rest)]))
        return self._cutter.units, False

    def _feed(self, data: bytes, ends: Any) -> None:
        self._cutter.feed(data, ends)
        self._at += len(data)
        last = data[-_TAIL_NBYTES:]
        self._tail = (self._at - len(last), self._at, zlib.crc32(last))

    def _next_part(self, known: int, units: int) -> bytes:
        if units == self._cutter.units:
            self._cutter.cut_rest()
        return pack_part({}, self._cutter.pop_columns())


class RecordsDataset(_TextDataset):
    """CSV by records as RFC 4180 has it: a newline in quotes ends none.

    Samples are dictionaries of text by column, or lists without names. Blank lines are skipped. A record
    with more or fewer fields than there are columns is an error. All files need the same header.
    """

    _kind: ClassVar[str] = "csv"
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
            raise SettingsError(f"delimiter={options['delimiter']!r} is the quotechar as well")
        return options

    @classmethod
    def _create(cls, location: str, settings: ShardSettings, options: dict[str, Any]) -> Dataset:
        if options["header"] and options["names"] is not None:
            raise SettingsError("names=: the header names the columns; pass header=False where there is none")
        return super()._create(location, settings, options)

    @classmethod
    def _scan(cls, path: str, blocks: Iterable[bytes], options: dict[str, Any]) -> Iterator[tuple[bytes, Numbers]]:
        header = b""
        is_found = not options["header"]
        for data, ends in _scan_records(path, blocks, options):
            if not is_found:
                header += data[: ends[0]] if len(ends) else data
            if not is_found and len(ends):
                found = next(_parse_rows(path, 0, header, options))
                options["names"] = options["names"] or found
                if found != options["names"]:
                    raise SettingsError(
                        f"{quote(path)} has the columns {quote(found)}, and the first file has "
                        f"{quote(options['names'])}: files with other columns are another data set"
                    )
                is_found, ends = True, ends[1:]
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
                    f"{quote(path)}: the record {quote(row)} has {len(row)} fields, not the {len(names)} of the columns"
                )
            record = dict(zip(names, row, strict=True))
            yield record if columns is None else {name: record[name] for name in columns}


def _check_uncompressed(path: str) -> None:
    """Refuse a compressed file, in which nothing can be found by offset.

    Raises:
        SettingsError: The file is compressed.
    """
    head = read_range(path, 0, max(map(len, _COMPRESSED)))
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise SettingsError(
                f"{quote(path)} is compressed ({name}): a shard could only be read by unpacking all that comes before. "
                f"Unpack the file, or write Parquet, which is compressed within"
            )


def _newline_ends(data: bytes) -> Numbers:
    """Return the offset after each newline."""
    ends: Numbers = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE) + 1
    return ends


def _check_encoding(options: dict[str, Any]) -> None:
    """Refuse encodings in which a newline is not the byte 10; spell the one with a mark as Python does."""
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
        raise SettingsError(f"encoding={encoding!r}: lines cannot be found in it by bytes; convert to UTF-8")


def _split_lines(data: bytes, *, keep_ends: bool) -> list[bytes]:
    *lines, rest = data.split(b"\n")
    lines = [line + b"\n" if keep_ends else line.removesuffix(b"\r") for line in lines]
    return [*lines, rest] if rest else lines


def _parse_rows(path: str, at: int, data: bytes, options: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the records in the bytes of a file from offset `at` on."""
    csv.field_size_limit(max(csv.field_size_limit(), _FIELD_LIMIT))  # for the whole process: only ever raised
    encoding = options["encoding"]
    quoting: Any = csv.QUOTE_NONE if options["quotechar"] is None else csv.QUOTE_MINIMAL
    count = 0
    lines = _split_lines(data if at else data.removeprefix(_BOM), keep_ends=True)
    texts = (line.decode(encoding, options["errors"]) for line in lines)
    try:
        for row in csv.reader(
            texts, delimiter=options["delimiter"], quotechar=options["quotechar"], quoting=quoting, strict=True
        ):
            if row:
                count += 1
                yield row
    except UnicodeError as exc:
        raise SourceError(
            f"{quote(path)}: record {count} from byte {at} on is not {encoding}: {exc}. Choose another encoding, or "
            f"errors='replace'"
        ) from exc
    except csv.Error as exc:
        raise SourceError(f"{quote(path)}: record {count} from byte {at} on: {exc}") from exc


def _scan_records(path: str, blocks: Iterable[bytes], options: Mapping[str, Any]) -> Iterator[tuple[bytes, Numbers]]:
    """Yield the bytes of a file, and after which of them records end. Blank lines do not count.

    A field with quotes in it must be quoted as a whole, and the quotes in it doubled. So every newline after an even
    number of quotes ends a record, and no record has to be parsed to find its end.
    """
    delimiter = ord(options["delimiter"])
    mark = 256 if options["quotechar"] is None else ord(options["quotechar"])  # 256: equals no byte
    at = opened = 0
    is_quoted = False
    last, first = _NEWLINE, -1  # the byte before the block, and the first byte of a record that it goes on with
    for block in blocks:
        skipped = len(_BOM) if not at and block.startswith(_BOM) else 0
        data = np.frombuffer(block, np.uint8)[skipped:]
        before = np.concatenate([np.array([last], np.uint8), data[:-1]])
        marks = data == mark
        # Whether each byte comes after an odd number of quotes, and what comes behind the last one.
        quoted = np.bitwise_xor.accumulate(np.append(is_quoted, marks).view(np.uint8)).view(np.bool_)
        outside = ~quoted[:-1]
        opens, behind = np.flatnonzero(marks & outside), np.flatnonzero((before == mark) & outside)
        odd = [
            *opens[~np.isin(before[opens], [delimiter, _NEWLINE, mark])],
            *behind[~np.isin(data[behind], [delimiter, _NEWLINE, _RETURN, mark])],
        ]
        if odd:
            raise SettingsError(
                f"{quote(path)}: the records cannot be told apart: at byte {at + skipped + min(odd)}, only a part of a "
                f"field is in quotes. Quote all of it, and double the quotes in it, or pass quotechar=None"
            )
        if len(opens):
            opened = at + skipped + int(opens[-1])
        ends = np.flatnonzero((data == _NEWLINE) & outside) + 1
        firsts = data[np.append(0, ends)[: len(ends)]]
        if first >= 0:
            firsts[:1] = first
        yield block, ends[(firsts != _NEWLINE) & (firsts != _RETURN)] + skipped
        rest = data[ends[-1] :] if len(ends) else data
        if len(ends) or first < 0:
            first = int(rest[0]) if len(rest) else -1
        last = int(data[-1]) if len(data) else last
        is_quoted = bool(quoted[-1])
        at += len(block)
    if is_quoted:
        raise SettingsError(
            f"{quote(path)}: the records cannot be told apart: the quote at byte {opened} is never closed "
            f"(delimiter={options['delimiter']!r}, quotechar={options['quotechar']!r})"
        )
    if first not in (-1, _NEWLINE, _RETURN):
        yield b"", np.zeros(1, np.int64)
