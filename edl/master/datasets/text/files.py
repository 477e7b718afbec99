"""Text files that are cut into shards: the index, and the bytes of a shard, checked against it."""

from __future__ import annotations

import abc
import bisect
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias

from edl.errors import ProtocolError, SettingsError, SourceError
from edl.master.datasets.dataset import Dataset
from edl.master.datasets.index import MOST_NBYTES, IndexPart, Numbers, check_size, pack_part
from edl.master.datasets.settings import DEFAULT_SHARD_SIZE, ShardSettings
from edl.master.datasets.storage import DataStorage, check_paths, file_changed, open_storage
from edl.master.datasets.text.cutting import ShardCutter
from edl.master.datasets.text.segments import Segments
from edl.quoting import quote, shown

__all__ = ["TextDataset", "TextOptions", "TextPiece", "TextProgress", "check_encoding", "check_plain"]

TextProgress: TypeAlias = Callable[[int, int], object]
"""Is called with the bytes that were indexed so far, and the bytes of all files."""

_CHECKED_NBYTES: Final = 8 << 20
"""A shard of at most so many bytes is checked as a whole before its first sample is yielded; of a larger one only its
last block is held back until its checksum is known, so that a reader's memory does not grow with the shard."""
_SEGMENT_NBYTES: Final = 4
"""Of a shard in an index, at least: its checksum. Where that alone is too much, a text is not read to its end first."""
_COMPRESSED: Final = {
    b"\x1f\x8b\x08": "gzip",
    b"BZh91AY&SY": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}

_MOST_MAGIC: Final = 10  # bytes of the longest of them


@dataclass(frozen=True)
class TextOptions:
    """How the bytes of a text are read.

    Attributes:
        encoding: of samples that are text; None for bytes as they are.
        errors: what to do with bytes that are not of the encoding, as in `bytes.decode`.
    """

    encoding: str | None = None
    errors: str = "strict"


@dataclass(frozen=True)
class TextPiece:
    """Bytes of a file, from the first of a unit on.

    Attributes:
        path: of the file.
        at: offset of the first byte in the file.
        blocks: the bytes.
    """

    path: str
    at: int
    blocks: Iterable[bytes]


class TextDataset(Dataset):
    """Text files; every byte belongs to a single shard. A shard may go from the end of a file into the next."""

    _kind: ClassVar[str]
    _unit: ClassVar[str]
    _option_types: ClassVar[Mapping[str, tuple[type, ...]]]

    @classmethod
    def index_files(
        cls, location: str, settings: ShardSettings, options: Mapping[str, Any], progress: TextProgress | None
    ) -> Dataset:
        """Read all files once, and note where shards begin.

        Args:
            location: a path, URL or pattern.
            settings: of the data set.
            options: how units are found and read, as JSON can hold it.
            progress: is called as bytes are read.

        Raises:
            SettingsError: there is no such file, there is nothing in it, or it is compressed.
            SourceError: a file cannot be read, or changes meanwhile.
        """
        storage = open_storage(location)
        location = storage.absolute(location)
        paths = storage.find_files(location)
        stats = [storage.stat_file(path) for path in paths]
        whole = sum(stat.nbytes for stat in stats)
        shard_size = settings.shard_size or DEFAULT_SHARD_SIZE
        cutter = ShardCutter(shard_size)
        done = 0
        for path, stat in zip(paths, stats, strict=True):
            check_plain(storage, path, stat.nbytes)
            blocks = storage.read_blocks(path, 0, stat.nbytes)
            for data, ends in cls._scan(path, blocks, options):
                cutter.feed(data, ends)
                done += len(data)
                if cutter.segments * _SEGMENT_NBYTES > MOST_NBYTES:
                    raise SettingsError(
                        f"{cls._kind}:{location} has more than {cutter.segments} shards of {shard_size}, and the "
                        f"index of them more than {MOST_NBYTES >> 20} MiB: choose a larger shard_size"
                    )
                if progress is not None:
                    progress(done, whole)
            if storage.stat_file(path) != stat:
                raise SourceError(
                    f"{quote(path)} changed while it was indexed. A file that grows is opened as 'follow:{path}'"
                )
        if not cutter.units:
            raise SettingsError(f"{cls._kind}:{location} has no {cls._unit}")
        head = {
            "shuffle_within": settings.shuffle_within,
            "options": dict(options),
            "files": paths,
            "nbytes": [stat.nbytes for stat in stats],
        }
        index = pack_part(IndexPart(head, cutter.pop_segments(rest=True)))
        check_size(index, "choose a larger shard_size")
        return cls(settings.spec(cls._kind, location, cutter.units, shard_size, index))

    @classmethod
    @abc.abstractmethod
    def _scan(cls, path: str, blocks: Iterable[bytes], options: Mapping[str, Any]) -> Iterator[tuple[bytes, Numbers]]:
        """Yield all bytes of a file, and where units end in them, as `ShardCutter.feed` takes them."""

    @abc.abstractmethod
    def _parse(self, pieces: Iterable[TextPiece]) -> Iterator[Any]:
        """Yield the units in the bytes of a shard."""

    def _load(self, parts: Sequence[IndexPart]) -> None:
        if not parts:
            raise ProtocolError(f"{self.kind}:{self.spec.location} has no index")
        self._options = parts[0].get_options(self._option_types)
        self._check_options()
        self._paths = parts[0].get_texts("files")
        check_paths(self.spec.location, self._paths)
        self._nbytes: list[int | None] = parts[0].head.get("nbytes", [])
        good = isinstance(self._nbytes, list) and len(self._nbytes) == len(self._paths) > 0
        if not good or not all(nbytes is None or (type(nbytes) is int and nbytes >= 0) for nbytes in self._nbytes):
            raise ProtocolError(f"the index of {self.kind}:{self.spec.location} has no sizes of its files")
        self._segments = Segments.join(parts)
        self._file_begins = [0, *itertools.accumulate(nbytes or 0 for nbytes in self._nbytes)]
        if self.spec.HasField("units") and self._segments.units != self.spec.units:
            raise ProtocolError(f"the index of {self.kind}:{self.spec.location} is of another number of units")
        if None not in self._nbytes and self._segments.end > self._file_begins[-1]:
            raise ProtocolError(f"the index of {self.kind}:{self.spec.location} has more bytes than its files")

    def _check_options(self) -> None:
        options = self._options
        check_encoding(TextOptions(options["encoding"], options["errors"]))

    def _known_units(self) -> int:
        return self._segments.units

    def describe(self) -> str:
        """See `Dataset.describe`."""
        files = f", {len(self._paths)} files" if len(self._paths) > 1 else ""
        return f"{self.kind}:{shown(self.spec.location)} ({self._known_units()} {self._unit}{files})"

    def _read_units(self, start: int, stop: int) -> Iterable[Any]:
        storage = open_storage(self.spec.location)
        first, last = self._segments.find(start, stop)
        pieces = itertools.chain.from_iterable(self._pieces(storage, segment) for segment in range(first, last))
        begin, end = (int(self._segments.unit_begins[segment]) for segment in (first, last))
        # To the end where nothing else is asked for: the checksum is seen there.
        return itertools.islice(self._parse(pieces), start - begin, None if stop == end else stop - begin)

    def _pieces(self, storage: DataStorage, segment: int) -> Iterator[TextPiece]:
        checked = self._checked_blocks(storage, segment)
        if self._segments.nbytes(segment) <= _CHECKED_NBYTES:
            checked = iter(list(checked))
        for (path, at), group in itertools.groupby(checked, key=lambda block: block[:2]):
            yield TextPiece(path, at, (data for _, _, data in group))

    def _checked_blocks(self, storage: DataStorage, segment: int) -> Iterator[tuple[str, int, bytes]]:
        """Yield path, first offset and bytes; the last bytes of a segment after all of it was checked."""
        left = self._segments.nbytes(segment)
        crc = 0
        for file, start, stop in self._ranges(segment):
            path = self._paths[file]
            self._check_stat(storage, path, stop, self._nbytes[file])
            for data in storage.read_blocks(path, start, stop):
                crc = zlib.crc32(data, crc)
                left -= len(data)
                if not left and crc != self._segments.crcs[segment]:
                    raise file_changed(path, f"its bytes {start} to {stop} are others")
                yield path, start, data

    def _ranges(self, segment: int) -> Iterator[tuple[int, int, int]]:
        """Yield the files that a segment is in, and from where to where."""
        begin, end = self._segments.bounds(segment)
        file = bisect.bisect_right(self._file_begins, begin) - 1 if len(self._paths) > 1 else 0
        while begin < end:
            stop = end if self._nbytes[file] is None else min(end, self._file_begins[file + 1])
            if begin < stop:
                yield file, begin - self._file_begins[file], stop - self._file_begins[file]
            begin = stop
            file += 1

    def _check_stat(self, storage: DataStorage, path: str, stop: int, nbytes: int | None) -> None:
        found = storage.stat_file(path).nbytes
        if nbytes is not None and found != nbytes:
            raise file_changed(path, f"it has {found} bytes, and had {nbytes}")
        if found < stop:
            raise file_changed(path, f"it has {found} bytes, and had {stop} at least: was it cut off, or rotated?")


def check_plain(storage: DataStorage, path: str, nbytes: int) -> None:
    """Refuse a compressed file, in which nothing can be found by offset.

    Args:
        storage: that it is on.
        path: of the file.
        nbytes: its size.

    Raises:
        SettingsError: it is compressed.
    """
    head = b"".join(storage.read_blocks(path, 0, min(nbytes, _MOST_MAGIC)))
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise SettingsError(
                f"{quote(path)} is compressed ({name}): a shard could only be read by unpacking all that comes before. "
                f"Unpack the file, or write Parquet, which is compressed within"
            )


def check_encoding(options: TextOptions) -> None:
    """Refuse encodings in which a newline is not the byte 10.

    Raises:
        SettingsError: it is such an encoding, or there is none of that name.
    """
    if options.encoding is None:
        return
    try:
        plain = 'a\n,"'.encode(options.encoding) in (b'a\n,"', b'\xef\xbb\xbfa\n,"')
        b"a".decode(options.encoding, options.errors)
        b"\xff\xfe\xfd".decode("ascii", options.errors)
    except UnicodeError:
        pass
    except (LookupError, ValueError, TypeError) as exc:
        raise SettingsError(f"encoding={options.encoding!r}, errors={options.errors!r}: {exc}") from exc
    if not plain:
        raise SettingsError(f"encoding={options.encoding!r}: lines cannot be found in it by bytes; convert to UTF-8")
