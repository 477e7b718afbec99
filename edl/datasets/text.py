"""Text files by lines, and CSV by records: found in a single pass over the files, and read by ranges of bytes.

The pass cuts the files, one after another, into segments: shards, or parts of a shard that is large or grows slowly
(`edl.datasets.growing`). The index has the units, the length in bytes and the CRC-32 of each segment. So every byte
belongs to one shard, and a reader, which opens the files itself, reads the bytes of its segments and nothing else. It
checks a segment before it hands out the first sample of it.

CSV records are found and parsed with Python's `csv`, not with pyarrow. A shard is a range of bytes that is read without
what is before it. pyarrow's CSV reader goes through a file from the start and gives out tables: it does not say after
which bytes records end. It also guesses types from what it reads first, so that a record might have other types in
another shard. Here all fields are text.
"""

from __future__ import annotations

import abc
import bisect
import csv
import itertools
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, ClassVar, Final

import numpy as np

from edl.datasets.dataset import DEFAULT_SHARD_SIZE, Dataset, Options, Progress, ShardSettings
from edl.datasets.index import MOST_NBYTES, IndexPart, Numbers
from edl.datasets.storage import Storage, check_paths, file_changed, open_storage
from edl.errors import ProtocolError, SettingsError, SourceError
from edl.quoting import quote

__all__ = ["LinesDataset", "RecordsDataset", "Segments", "ShardCutter", "check_plain"]

_MOST_SEGMENT: Final = 8 << 20
"""Bytes after which a segment ends, even if its shard goes on: a reader holds a segment in memory."""
_SEGMENT_NBYTES: Final = 4
"""Smallest size of a segment in an index: its checksum. Where that is too much, the text is not read to its end."""
_COMPRESSED: Final = {
    b"\x1f\x8b\x08": "gzip",
    b"BZh91AY&SY": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}
_MOST_MAGIC: Final = max(map(len, _COMPRESSED))
_BOM: Final = b"\xef\xbb\xbf"
_FIELD_LIMIT: Final = 64 << 20
"""Characters of a CSV field. Python's default of 131,072 is less than a document may have. Without a limit, a quote
that is never closed would bring the rest of the file into memory."""


class ShardCutter:
    """Cuts a text into segments while it streams by, and keeps only their columns of the index.

    Args:
        shard_size: Units per shard.
        units: Units that were there before.
        most_nbytes: Bytes after which a segment ends, even if its shard goes on; None for no limit.

    Attributes:
        units: Units so far.
    """

    def __init__(self, shard_size: int, units: int = 0, most_nbytes: int | None = None) -> None:
        self.units = units
        self._most_nbytes = most_nbytes
        self._cut_units = units
        self._shard_size = shard_size
        self._length = self._crc = 0
        self._columns = _empty_columns()

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

    def pop_segments(self, *, rest: bool) -> dict[str, Numbers]:
        """Return the columns of the segments so far, and forget them.

        Args:
            rest: Make a segment of the units that fill no shard, if there are any.
        """
        if rest and self.units > self._cut_units:
            self._cut(self.units)
        found = {name: np.array(numbers, np.int64) for name, numbers in self._columns.items()}
        self._columns = _empty_columns()
        return found

    @property
    def segments(self) -> int:
        """Number of segments that have not been popped."""
        return len(self._columns["counts"])

    def _add(self, data: memoryview) -> None:
        self._crc = zlib.crc32(data, self._crc)
        self._length += len(data)

    def _cut(self, units: int) -> None:
        for name, number in (("counts", units - self._cut_units), ("lengths", self._length), ("crcs", self._crc)):
            self._columns[name].append(number)
        self._cut_units = units
        self._length = self._crc = 0


def _empty_columns() -> dict[str, array[int]]:
    """Return columns of 8 bytes per number: for millions of shards, lists would take five times as much."""
    return {name: array("q") for name in ("counts", "lengths", "crcs")}


class Segments:
    """Where the segments of a text are, as the parts of its index say.

    A part of a text that grows says at which unit it begins (`from`). Where two followers have told the master the same
    units, the second part is left out.

    Attributes:
        unit_begins: First unit of each segment, then the number of all units.
        byte_begins: First byte of each segment in all files one after another, then the number of all bytes.
        crcs: CRC-32 of each segment's bytes.

    Raises:
        ProtocolError: Parts do not fit together.
    """

    def __init__(self, parts: Sequence[IndexPart]) -> None:
        columns: dict[str, list[Numbers]] = {"counts": [], "lengths": [], "crcs": []}
        units = 0
        for part in parts:
            found = {name: part.columns[name] for name in columns}
            if len({len(numbers) for numbers in found.values()}) > 1:
                raise ProtocolError("the index of a text has columns of different lengths")
            ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(found["counts"])])
            known = units - part.head.get("from", units)
            skipped = min(int(np.searchsorted(ends, known)), len(ends) - 1)
            if known < 0 or (skipped < len(ends) - 1 and ends[skipped] != known):
                raise ProtocolError("parts of the index do not fit together: are there two followers?")
            for name, numbers in found.items():
                columns[name].append(numbers[skipped:])
            units += int(found["counts"][skipped:].sum())
        counts, lengths, self.crcs = (np.concatenate(numbers) for numbers in columns.values())
        self.unit_begins, self.byte_begins = (
            np.concatenate([np.zeros(1, np.int64), np.cumsum(numbers)]) for numbers in (counts, lengths)
        )
        if (self.unit_begins < 0).any() or (self.byte_begins < 0).any():
            raise ProtocolError("the index of a text has numbers that are too large")

    @property
    def units(self) -> int:
        """Number of units."""
        return int(self.unit_begins[-1])

    @property
    def end(self) -> int:
        """First byte that is not indexed."""
        return int(self.byte_begins[-1])

    def find(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first segment with units of a range, and the segment after the last one."""
        first = int(np.searchsorted(self.unit_begins, start, "right")) - 1
        return first, int(np.searchsorted(self.unit_begins, stop, "left"))

    def bounds(self, segment: int) -> tuple[int, int]:
        """Return the first byte of a segment, and the first one after it."""
        return int(self.byte_begins[segment]), int(self.byte_begins[segment + 1])


class _TextDataset(Dataset):
    """Text files; a shard may go from the end of a file into the next one."""

    _kind: ClassVar[str]

    @classmethod
    def _create(
        cls, location: str, settings: ShardSettings, options: Mapping[str, Any], progress: Progress | None
    ) -> Dataset:
        kind, shard_size = cls._kind, settings.shard_size or DEFAULT_SHARD_SIZE
        storage = open_storage(location)
        location, paths, stats = storage.find_files(location)
        options = cls._complete(storage, location, paths[0], stats[0].nbytes, options)
        whole = sum(stat.nbytes for stat in stats)
        cutter = ShardCutter(shard_size, most_nbytes=_MOST_SEGMENT)
        done = 0
        for path, stat in zip(paths, stats, strict=True):
            check_plain(storage, path, stat.nbytes)
            for data, ends in cls._scan(path, storage.read_blocks(path, 0, stat.nbytes), options):
                cutter.feed(data, ends)
                done += len(data)
                if cutter.segments * _SEGMENT_NBYTES > MOST_NBYTES:
                    raise SettingsError(
                        f"{kind}:{location} has more than {cutter.segments} shards of {shard_size}, and the "
                        f"index of them more than {MOST_NBYTES >> 20} MiB: choose a larger shard_size"
                    )
                if progress is not None:
                    progress(done, whole)
            if storage.stat_file(path) != stat:
                raise SourceError(
                    f"{quote(path)} changed while it was indexed. A file that grows is opened as 'follow:{path}'"
                )
        if not cutter.units:
            raise SettingsError(f"{kind}:{location} has no {cls._unit}")
        head = {"options": options, "files": paths, "nbytes": [stat.nbytes for stat in stats]}
        index = IndexPart(head, cutter.pop_segments(rest=True))
        return cls(settings.make_spec(kind, location, cutter.units, index))

    @classmethod
    def _complete(
        cls, storage: Storage, location: str, path: str, nbytes: int, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the options with what the first file adds to them."""
        return dict(options)

    @classmethod
    @abc.abstractmethod
    def _scan(cls, path: str, blocks: Iterable[bytes], options: Mapping[str, Any]) -> Iterator[tuple[bytes, Numbers]]:
        """Yield all bytes of a file, and where units end in them, as `ShardCutter.feed` takes them."""

    @abc.abstractmethod
    def _parse(self, path: str, at: int, data: bytes) -> Iterable[Any]:
        """Yield the units in the bytes of a file from offset `at` on."""

    def _load(self, parts: Sequence[IndexPart]) -> None:
        self._options = self._options_of(parts[0])
        self._paths = parts[0].get_texts("files")
        check_paths(self.spec.location, self._paths)
        self._nbytes: list[int | None] = parts[0].head["nbytes"]
        sizes = [0] if self._nbytes == [None] else self._nbytes  # a file that grows has no size
        if not len(sizes) == len(self._paths) > 0 or not all(type(nbytes) is int and nbytes >= 0 for nbytes in sizes):
            raise ProtocolError(f"the index of {self.kind}:{self.spec.location} has no sizes of its files")
        self._segments = Segments(parts)
        self._file_begins = [0, *itertools.accumulate(nbytes or 0 for nbytes in self._nbytes)]
        if self.spec.HasField("units") and self._segments.units != self.spec.units:
            raise ProtocolError(f"the index of {self.kind}:{self.spec.location} has another number of units")
        if None not in self._nbytes and self._segments.end > self._file_begins[-1]:
            raise ProtocolError(f"the index of {self.kind}:{self.spec.location} has more bytes than its files")

    def _known_units(self) -> int:
        return self._segments.units

    def _read_units(self, start: int, stop: int) -> Iterable[Any]:
        storage = open_storage(self.spec.location)
        first, last = self._segments.find(start, stop)
        segments = (self._read_segment(storage, segment) for segment in range(first, last))
        units = (self._parse(*piece) for piece in itertools.chain.from_iterable(segments))
        begin, end = (int(self._segments.unit_begins[segment]) for segment in (first, last))
        # To the end where the lease goes up to it, so that too many units are noticed.
        return itertools.islice(
            itertools.chain.from_iterable(units), start - begin, None if stop == end else stop - begin
        )

    def _read_segment(self, storage: Storage, segment: int) -> list[tuple[str, int, bytes]]:
        """Return the bytes of a segment by file, each with its path and the offset of the first one."""
        begin, end = self._segments.bounds(segment)
        file = bisect.bisect_right(self._file_begins, begin) - 1 if len(self._paths) > 1 else 0
        found = []
        crc = 0
        path, start, stop = self._paths[0], begin, end
        while begin < end:
            path, nbytes = self._paths[file], self._nbytes[file]
            start, stop = begin - self._file_begins[file], end - self._file_begins[file]
            if nbytes is not None:
                stop = min(stop, nbytes)
            if start < stop:
                self._check_stat(storage, path, stop, nbytes)
                data = b"".join(storage.read_blocks(path, start, stop))
                crc = zlib.crc32(data, crc)
                found.append((path, start, data))
                begin += len(data)
            file += 1
        if crc != self._segments.crcs[segment]:
            raise file_changed(path, f"its bytes {start} to {stop} are others")
        return found

    def _check_stat(self, storage: Storage, path: str, stop: int, nbytes: int | None) -> None:
        found = storage.stat_file(path).nbytes
        if nbytes is not None and found != nbytes:
            raise file_changed(path, f"it has {found} bytes, and had {nbytes}")
        if found < stop:
            raise file_changed(path, f"it has {found} bytes, and had at least {stop}: was it cut off, or rotated?")


class LinesDataset(_TextDataset):
    r"""Text by lines. A line ends at byte 10 and nowhere else, or at the end of its file; NUL bytes are data.

    Samples are bytes, or `str` with an encoding, without the line's end (`\n` or `\r\n`) unless `keep_ends` is set.
    An empty line is a sample. A byte order mark is data, except with the encoding `utf-8-sig`.
    """

    _kind: ClassVar[str] = "lines"
    _unit: ClassVar[str] = "lines"
    _options_known: ClassVar[Options] = {
        "encoding": (None, (str, NoneType)),
        "errors": ("strict", (str,)),
        "keep_ends": (False, (bool,)),
    }

    @classmethod
    def _read_options(cls, kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
        options = super()._read_options(kind, given)
        _check_encoding(options)
        return options

    @classmethod
    def _scan(cls, path: str, blocks: Iterable[bytes], options: Mapping[str, Any]) -> Iterator[tuple[bytes, Numbers]]:
        ended = True
        for block in blocks:
            yield block, newline_ends(block)
            ended = block.endswith(b"\n")
        if not ended:
            yield b"", np.zeros(1, np.int64)

    def _parse(self, path: str, at: int, data: bytes) -> Iterable[Any]:
        encoding: str | None = self._options["encoding"]
        if encoding is None:
            return _split_lines(data, keep_ends=self._options["keep_ends"])
        if _is_marked(encoding):
            encoding = "utf-8"
            data = data if at else data.removeprefix(_BOM)  # a mark elsewhere is data
        return self._decoded(path, _split_lines(data, keep_ends=self._options["keep_ends"]), encoding)

    def _decoded(self, path: str, lines: Iterable[bytes], encoding: str) -> Iterator[str]:
        for line in lines:
            try:
                yield line.decode(encoding, self._options["errors"])
            except UnicodeError as exc:
                raise SourceError(
                    f"{quote(path)}: the line {quote(line)} is not {encoding}: {exc}. Read bytes (encoding=None), or "
                    f"choose errors='replace' or another encoding"
                ) from exc


class RecordsDataset(_TextDataset):
    """CSV by records as RFC 4180 has it: a newline in quotes ends none.

    Samples are dictionaries of text by column, or lists without names. Blank lines are skipped. A record
    with more or fewer fields than there are columns is an error. All files need the same header.
    """

    _kind: ClassVar[str] = "csv"
    _unit: ClassVar[str] = "rows"
    _options_known: ClassVar[Options] = {
        "delimiter": (",", (str,)),
        "quotechar": ('"', (str, NoneType)),
        "header": (True, (bool,)),
        "names": (None, (list, NoneType)),
        "columns": (None, (list, NoneType)),
        "encoding": ("utf-8", (str,)),
        "errors": ("strict", (str,)),
    }

    @classmethod
    def _read_options(cls, kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
        options = super()._read_options(kind, given)
        _check_encoding(options)
        if _is_marked(options["encoding"]):  # a mark at the start of a file is left out anyway
            options["encoding"] = "utf-8"
        for name in ("delimiter", "quotechar"):
            value = options[name]
            if value is not None and (len(value) != 1 or not value.isascii() or value in "\r\n\0"):
                raise SettingsError(f"{name}={value!r}: must be an ASCII character")
        if options["delimiter"] == options["quotechar"]:
            raise SettingsError(f"delimiter={options['delimiter']!r} is the quotechar as well")
        if not all(isinstance(name, str) for name in (options["names"] or []) + (options["columns"] or [])):
            raise SettingsError("names= and columns= are lists of names")
        return options

    @classmethod
    def _complete(
        cls, storage: Storage, location: str, path: str, nbytes: int, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        names: Sequence[str] | None = options["names"]
        if options["header"]:
            if names is not None:
                raise SettingsError("names=: the columns are named by the header; header=False where there is none")
            check_plain(storage, path, nbytes)
            scanned = _scan_records(path, storage.read_blocks(path, 0, nbytes), options)
            first = next((data[: ends[0]] for data, ends in scanned if len(ends)), b"")
            names = next(_parse_rows(path, 0, first, options), [])
        if names is not None and (len(set(names)) < len(names) or not names):
            raise SettingsError(f"csv:{location}: the columns are {quote(list(names))}: each needs a name of its own")
        if unknown := set(options["columns"] or []) - set(names or []):
            raise SettingsError(f"csv:{location} has no column {quote(sorted(unknown))}, only {quote(names)}")
        return {**options, "names": names}

    @classmethod
    def _scan(cls, path: str, blocks: Iterable[bytes], options: Mapping[str, Any]) -> Iterator[tuple[bytes, Numbers]]:
        header = options["header"]
        for data, ends in _scan_records(path, blocks, options):
            if header and len(ends):
                found = next(_parse_rows(path, 0, data[: ends[0]], options))
                if found != options["names"]:
                    raise SettingsError(
                        f"{quote(path)} has the columns {quote(found)}, and the first file has "
                        f"{quote(options['names'])}: files with other columns are another data set"
                    )
                yield data, ends[1:]
                header = False
            else:
                yield data, ends

    def _load(self, parts: Sequence[IndexPart]) -> None:
        super()._load(parts)
        if not set(self._options["columns"] or []) <= set(self._options["names"] or []):
            raise ProtocolError(f"the index of csv:{self.spec.location} has other columns than its file")

    def _parse(self, path: str, at: int, data: bytes) -> Iterator[Any]:
        names: Sequence[str] | None = self._options["names"]
        columns = self._options["columns"]
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


def check_plain(storage: Storage, path: str, nbytes: int) -> None:
    """Refuse a compressed file, in which nothing can be found by offset.

    Raises:
        SettingsError: The file of `nbytes` bytes is compressed.
    """
    head = b"".join(storage.read_blocks(path, 0, min(nbytes, _MOST_MAGIC)))
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise SettingsError(
                f"{quote(path)} is compressed ({name}): a shard could only be read by unpacking all that comes before. "
                f"Unpack the file, or write Parquet, which is compressed within"
            )


def newline_ends(data: bytes) -> Numbers:
    """Return the offset after each newline."""
    ends: Numbers = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + 1
    return ends


def _check_encoding(options: Mapping[str, Any]) -> None:
    """Refuse encodings in which a newline is not the byte 10."""
    encoding, errors = options["encoding"], options["errors"]
    if encoding is None:
        return
    plain = False
    try:
        plain = 'a\n,"'.encode(encoding) in (b'a\n,"', _BOM + b'a\n,"')
        b"a".decode(encoding, errors)
        b"\xff\xfe\xfd".decode("ascii", errors)
    except UnicodeError:
        pass
    except (LookupError, ValueError, TypeError) as exc:
        raise SettingsError(f"encoding={encoding!r}, errors={errors!r}: {exc}") from exc
    if not plain:
        raise SettingsError(f"encoding={encoding!r}: lines cannot be found in it by bytes; convert to UTF-8")


def _is_marked(encoding: str) -> bool:
    return encoding.lower().replace("_", "-") == "utf-8-sig"


def _split_lines(data: bytes, *, keep_ends: bool) -> list[bytes]:
    *lines, rest = data.split(b"\n")
    lines = [line + b"\n" if keep_ends else line.removesuffix(b"\r") for line in lines]
    return [*lines, rest] if rest else lines


def _csv_reader(lines: Iterable[str], options: Mapping[str, Any]) -> Iterator[list[str]]:
    """Return a reader that takes lines as records need them, and raises `csv.Error` where a record is malformed."""
    csv.field_size_limit(max(csv.field_size_limit(), _FIELD_LIMIT))  # for the whole process: only ever raised
    named: dict[str, Any] = {"delimiter": options["delimiter"], "strict": True}
    if options["quotechar"] is None:
        return csv.reader(lines, quoting=csv.QUOTE_NONE, **named)
    return csv.reader(lines, quotechar=options["quotechar"], **named)


def _parse_rows(path: str, at: int, data: bytes, options: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the records in the bytes of a file from offset `at` on."""
    encoding: str = options["encoding"]
    count = 0
    lines = _split_lines(data if at else data.removeprefix(_BOM), keep_ends=True)
    texts = (line.decode(encoding, options["errors"]) for line in lines)
    try:
        for row in _csv_reader(texts, options):
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
    """Yield the bytes of a file, and after which of them records end."""
    rest = b""
    at = 0
    try:
        for block in blocks:
            data = rest + block
            if not at and data.startswith(_BOM):
                yield _BOM, np.zeros(0, np.int64)
                at, data = len(_BOM), data[len(_BOM) :]
            ends, complete = _record_ends(data, options, final=False)
            yield data[:complete], ends
            rest = data[complete:]
            at += complete
        ends, _ = _record_ends(rest, options, final=True)
        yield rest, ends
    except csv.Error as exc:
        raise SettingsError(
            f"{quote(path)}: the records from byte {at} on cannot be told apart: {exc} "
            f"(delimiter={options['delimiter']!r}, quotechar={options['quotechar']!r})"
        ) from exc


def _record_ends(data: bytes, options: Mapping[str, Any], *, final: bool) -> tuple[Numbers, int]:
    """Find the records in data that begin with a record. Blank lines are none.

    Args:
        data: A part of a file.
        options: Of the CSV.
        final: Whether nothing follows.

    Returns:
        After which bytes records end, rising; and the first byte of the record that is not complete.
    """
    quotechar = options["quotechar"]
    is_plain = quotechar is None or quotechar.encode() not in data
    if is_plain and data.count(b"\r") == data.count(b"\r\n"):  # every newline ends a record: no need to parse
        ends = newline_ends(data)
        if final and data and not data.endswith(b"\n"):
            ends = np.append(ends, len(data))
        if not len(ends):
            return ends, 0
        firsts = np.frombuffer(data, np.uint8)[np.append(0, ends[:-1])]
        return ends[(firsts != ord("\n")) & (firsts != ord("\r"))], int(ends[-1])
    at = complete = 0
    exhausted = False

    def lines() -> Iterator[str]:
        nonlocal at, exhausted
        while at < len(data):
            end = data.find(b"\n", at) + 1
            if not end and not final:
                break
            line = data[at : end or len(data)]
            at += len(line)
            yield line.decode("latin-1")
        exhausted = True

    found: list[int] = []
    try:
        for row in _csv_reader(lines(), options):
            complete = at
            if row:
                found.append(at)
    except csv.Error:
        if not exhausted or final:  # else more of the record is to come
            raise
    return np.array(found, np.int64), complete
