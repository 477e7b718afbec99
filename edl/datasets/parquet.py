"""Tables in Parquet files: a unit is a row, and each read decodes a whole row group. Needs pyarrow.

Opening a data set reads only the files' footers, and a reader decodes only the row groups in its shards.
`pyarrow.dataset` is unsuitable, because it does not notice that a file was replaced.
"""

from __future__ import annotations

import bisect
import io
import itertools
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from edl.datasets.dataset import Dataset, IndexPart, LeasedUnits, Options, ShardSettings
from edl.datasets.files import FileStat, file_changed, find_files, open_file, read_range, stat_file, translated
from edl.errors import ProtocolError, SettingsError, SourceError
from edl.quoting import quote, shown

_ROWS_AT_ONCE: Final = 1024  # rows of Python objects at a time: a row group of a million rows would be gigabytes
_TAIL: Final = struct.Struct("<I4s")  # footer's length, magic (https://parquet.apache.org/docs/file-format)


class ParquetDataset(Dataset):
    """Rows of Parquet files. Samples are dictionaries by column; `read_table` returns a table instead.

    The row group that was read last is kept, so that it is decoded only once for consecutive shards. By default, a
    shard has as many rows as the largest row group. So if all row groups have the same size, each shard is one row
    group.
    """

    _unit: ClassVar[str] = "rows"
    _options_known: ClassVar[Options] = {"columns": (None, list)}

    @classmethod
    def _create(cls, kind: str, location: str, settings: ShardSettings, options: dict[str, Any]) -> Dataset:
        columns: list[str] | None = options["columns"]
        location, paths, stats = find_files(location)
        nbytes = [stat.nbytes for stat in stats]
        rows, crcs, most = [], [], 0
        schema: Any = None
        for path, size in zip(paths, nbytes, strict=True):
            metadata, crc = _read_footer(path, size)
            found = metadata.schema.to_arrow_schema()
            schema = found if schema is None else schema
            if not schema.equals(found):
                raise SettingsError(
                    f"{quote(path)} has different columns than {quote(paths[0])}: {shown(found)}, not {shown(schema)}"
                )
            rows.append(metadata.num_rows)
            crcs.append(crc)
            most = max(most, *_group_rows(metadata), 0)
        if not most:
            raise SettingsError(f"parquet:{location} has no rows")
        if columns is not None and not (columns and set(columns) <= set(schema.names)):
            raise SettingsError(f"parquet:{location}: columns={quote(columns)}, but the file has {quote(schema.names)}")
        counts = {"nbytes": nbytes, "rows": rows, "crcs": crcs}
        index = {name: np.array(numbers, np.int64) for name, numbers in counts.items()}
        head = {"columns": columns, "files": paths}
        return cls(settings._make_spec(kind, location, sum(rows), head, index, most))

    def _load(self, parts: Sequence[IndexPart]) -> int:
        (part,) = parts
        self._paths, self._columns = part.head["files"], part.head["columns"]
        self._nbytes, self._crcs = part.columns["nbytes"].tolist(), part.columns["crcs"].tolist()
        self._begins: list[int] = [0, *itertools.accumulate(part.columns["rows"].tolist())]
        self._footer: tuple[int, FileStat | None, Any] = (-1, None, None)
        self._group: tuple[int, int, Any] = (-1, -1, None)
        return self._begins[-1]

    def read_table(self, lease: LeasedUnits) -> Any:
        """Return the rows of a lease as a `pyarrow.Table`, in the order of `read`.

        Raises:
            SettingsError: The lease does not belong to this data set.
            SourceError: See `read`.
        """
        import pyarrow

        first, stop = self._shard_bounds(lease)
        if not self._shuffle_within:
            return pyarrow.concat_tables(self._slices(lease.start, lease.stop))
        return pyarrow.concat_tables(self._slices(first, stop)).take(self._order(lease, first, stop))

    def _read_units(self, start: int, stop: int) -> Iterable[Any]:
        for table in self._slices(start, stop):
            for at in range(0, table.num_rows, _ROWS_AT_ONCE):
                yield from table.slice(at, _ROWS_AT_ONCE).to_pylist()

    def _slices(self, start: int, stop: int) -> Iterator[Any]:
        """Yield the rows as tables, split at row groups."""
        while start < stop:
            file = bisect.bisect_right(self._begins, start) - 1
            metadata = self._check_file(file)
            begins = [0, *itertools.accumulate(_group_rows(metadata))]
            row = start - self._begins[file]
            group = bisect.bisect_right(begins, row) - 1
            if group + 1 >= len(begins):
                raise ProtocolError(f"the index of {self.kind}:{self.spec.location} has rows that its files lack")
            count = min(stop - start, begins[group + 1] - row)
            yield self._read_group(file, group, metadata).slice(row - begins[group], count)
            start += count

    def _check_file(self, file: int) -> Any:
        path, stat = self._paths[file], stat_file(self._paths[file])
        if self._footer[:2] == (file, stat) and stat.version:
            return self._footer[2]
        if stat.nbytes != self._nbytes[file]:
            raise file_changed(path, f"it has {stat.nbytes} bytes, but had {self._nbytes[file]}")
        metadata, crc = _read_footer(path, stat.nbytes)
        if crc != self._crcs[file]:
            raise file_changed(path, "its footer has changed")
        self._group = (-1, -1, None)  # it may be from the file's earlier version
        self._footer = (file, stat, metadata)
        return metadata

    def _read_group(self, file: int, group: int, metadata: Any) -> Any:
        if self._group[:2] != (file, group):
            path = self._paths[file]
            with translated(path), open_file(path) as source:
                opened = import_parquet().ParquetFile(source, metadata=metadata, page_checksum_verification=True)
                # Without its own threads: a reader is one of many processes, and may be a fork.
                table = opened.read_row_group(group, columns=self._columns, use_threads=False)
                table = table if self._columns is None else table.select(self._columns)
            if stat_file(path) != self._footer[1]:
                raise file_changed(path, "it was written while it was being read")
            self._group = (file, group, table)
        return self._group[2]


def import_parquet() -> Any:
    """Return pyarrow's Parquet module; pyarrow is an extra."""
    try:
        import pyarrow.parquet
    except ImportError as exc:
        raise SettingsError("Parquet needs pyarrow: pip install 'elastic-distill[tables]'") from exc
    return pyarrow.parquet


def _group_rows(metadata: Any) -> list[int]:
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def _read_footer(path: str, nbytes: int) -> tuple[Any, int]:
    """Return a file's metadata, and the CRC-32 of the footer that contains the metadata."""
    parquet = import_parquet()
    tail = read_range(path, max(0, nbytes - _TAIL.size), nbytes)
    length, magic = _TAIL.unpack(tail) if len(tail) == _TAIL.size else (0, b"")
    if magic == b"PARE":
        raise SourceError(f"{quote(path)} has an encrypted footer, for which EDL has no keys")
    if magic != b"PAR1" or length + _TAIL.size > nbytes:
        raise SourceError(f"{quote(path)} is not a Parquet file, or is cut off: it does not end in a footer")
    footer = read_range(path, nbytes - _TAIL.size - length, nbytes)
    with translated(path):
        return parquet.read_metadata(io.BytesIO(b"PAR1" + footer)), zlib.crc32(footer)
