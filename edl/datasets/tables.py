"""Tables in Parquet files: a unit is a row, and what is read at once is a row group. Needs pyarrow.

Parquet says in a footer where its rows are, so that nothing but footers is read when a data set is opened, and a reader
decodes the row groups of its shards only. `pyarrow.parquet` does that; the bytes come through `edl.datasets.storage`.
`pyarrow.dataset` would not do: it does not tell a file that was replaced from the one that it was.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import itertools
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, ClassVar, Final

import numpy as np

from edl.datasets.dataset import Dataset, LeasedUnits, Options, Progress, ShardSettings
from edl.datasets.index import IndexPart
from edl.datasets.storage import Storage, check_paths, file_changed, open_storage
from edl.errors import EDLError, ProtocolError, SettingsError, SourceError
from edl.quoting import quote, shown

__all__ = ["ParquetDataset", "import_pyarrow"]

_ROWS_AT_ONCE: Final = 1024
"""Rows turned into Python objects at a time: a row group of a million rows would be gigabytes of them."""
_TAIL: Final = struct.Struct("<I4s")
"""End of a file: the footer's length, and the magic (https://parquet.apache.org/docs/file-format)."""


class ParquetDataset(Dataset):
    """Rows of Parquet files. Samples are dictionaries by column; `read_table` gives columns.

    The last row group is kept, so that it is decoded once for all its shards that a reader gets one after another.
    By default a shard has as many rows as the largest row group: where all groups have the same size, a shard is one.
    """

    _unit: ClassVar[str] = "rows"
    _options_known: ClassVar[Options] = {"columns": (None, (list, NoneType))}

    @classmethod
    def _create(
        cls, location: str, settings: ShardSettings, options: Mapping[str, Any], progress: Progress | None
    ) -> Dataset:
        import_pyarrow()
        columns: list[str] | None = options["columns"]
        storage = open_storage(location)
        location, paths, stats = storage.find_files(location)
        nbytes = [stat.nbytes for stat in stats]
        rows, crcs, groups, schemas = [], [], [], []
        for number, path in enumerate(paths):
            footer = _read_footer(storage, path, nbytes[number])
            metadata = _parse_footer(path, footer)
            schemas.append(metadata.schema.to_arrow_schema())
            if not schemas[0].equals(schemas[-1]):
                raise SettingsError(
                    f"{quote(path)} has other columns than {quote(paths[0])}: {shown(schemas[-1])}, and "
                    f"{shown(schemas[0])}"
                )
            rows.append(metadata.num_rows)
            crcs.append(zlib.crc32(footer))
            groups += _group_rows(metadata)
            if progress is not None:
                progress(sum(nbytes[: number + 1]), sum(nbytes))
        if not sum(rows):
            raise SettingsError(f"parquet:{location} has no rows")
        if columns is not None and not (columns and set(columns) <= set(schemas[0].names)):
            raise SettingsError(
                f"parquet:{location}: columns={quote(columns)}, and there are {quote(schemas[0].names)}"
            )
        found = {"nbytes": nbytes, "rows": rows, "crcs": crcs}
        index = IndexPart(
            {"columns": columns, "files": paths}, {name: np.array(numbers, np.int64) for name, numbers in found.items()}
        )
        return cls(settings.make_spec("parquet", location, sum(rows), index, max(groups)))

    def _load(self, parts: Sequence[IndexPart]) -> None:
        (part,) = parts
        self._paths = part.get_texts("files")
        self._columns = None if part.head["columns"] is None else part.get_texts("columns")
        self._nbytes, self._crcs = part.columns["nbytes"], part.columns["crcs"]
        rows: list[int] = part.columns["rows"].tolist()
        check_paths(self.spec.location, self._paths)
        self._begins = [0, *itertools.accumulate(rows)]
        if not len(rows) == len(self._paths) == len(self._nbytes) == len(self._crcs):
            raise ProtocolError(f"the index of {self.kind}:{self.spec.location} has another number of files")
        if self._begins[-1] != self.spec.units:
            raise ProtocolError(f"the index of {self.kind}:{self.spec.location} has another number of rows")
        self._footer: tuple[int, str, Any] = (-1, "", None)
        self._group: tuple[int, int, Any] = (-1, -1, None)

    def read_table(self, lease: LeasedUnits) -> Any:
        """Return the rows of a lease as a `pyarrow.Table`, in the order of `read`.

        Raises:
            SettingsError: The lease is not of this data set.
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
        """Yield the rows as tables, which end where row groups do."""
        import_pyarrow()
        storage = open_storage(self.spec.location)
        while start < stop:
            file = bisect.bisect_right(self._begins, start) - 1
            metadata = self._check_file(storage, file)
            begins = [0, *itertools.accumulate(_group_rows(metadata))]
            row = start - self._begins[file]
            group = bisect.bisect_right(begins, row) - 1
            if group + 1 >= len(begins):
                raise ProtocolError(f"the index of {self.kind}:{self.spec.location} has rows that its files lack")
            count = min(stop - start, begins[group + 1] - row)
            yield self._read_group(storage, file, group, metadata).slice(row - begins[group], count)
            start += count

    def _check_file(self, storage: Storage, file: int) -> Any:
        """Return a file's metadata, after a look whether the file is still what it was."""
        path = self._paths[file]
        found = storage.stat_file(path)
        known, version, metadata = self._footer
        if known == file and version == found.version != "":
            return metadata
        if found.nbytes != self._nbytes[file]:
            raise file_changed(path, f"it has {found.nbytes} bytes, and had {self._nbytes[file]}")
        footer = _read_footer(storage, path, found.nbytes)
        if zlib.crc32(footer) != self._crcs[file]:
            raise file_changed(path, "it has another footer")
        metadata = _parse_footer(path, footer)
        self._group = (-1, -1, None)  # it may be of the file as it was before
        self._footer = (file, found.version, metadata)
        return metadata

    def _read_group(self, storage: Storage, file: int, group: int, metadata: Any) -> Any:
        import pyarrow.parquet

        *known, table = self._group
        if known != [file, group]:
            path = self._paths[file]
            with _translated(path), storage.open_file(path) as source:
                opened = pyarrow.parquet.ParquetFile(source, metadata=metadata, page_checksum_verification=True)
                # Without threads of its own: a reader is one of many processes, and may be a fork.
                table = opened.read_row_group(group, columns=self._columns, use_threads=False)
                if self._columns is not None:
                    table = table.select(self._columns)
            if storage.stat_file(path).version != self._footer[1]:
                raise file_changed(path, "it was written while it was read")
            if table.num_rows != metadata.row_group(group).num_rows:
                raise file_changed(path, f"row group {group} has {table.num_rows} rows")
            self._group = (file, group, table)
        return table


def import_pyarrow() -> None:
    """Import pyarrow, which is an extra.

    Raises:
        SettingsError: It is not installed.
    """
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as exc:
        raise SettingsError("Parquet needs pyarrow: pip install 'elastic-distill[tables]'") from exc


def _group_rows(metadata: Any) -> list[int]:
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def _read_footer(storage: Storage, path: str, nbytes: int) -> bytes:
    tail = storage.read_range(path, max(0, nbytes - _TAIL.size), nbytes)
    length, magic = _TAIL.unpack(tail) if len(tail) == _TAIL.size else (0, b"")
    if magic == b"PARE":
        raise SourceError(f"{quote(path)} has an encrypted footer, which EDL has no keys for")
    if magic != b"PAR1" or length + _TAIL.size > nbytes:
        raise SourceError(f"{quote(path)} is not a Parquet file, or is cut off: it does not end in a footer")
    return storage.read_range(path, nbytes - _TAIL.size - length, nbytes)


def _parse_footer(path: str, footer: bytes) -> Any:
    import pyarrow.parquet

    with _translated(path):
        return pyarrow.parquet.read_metadata(io.BytesIO(b"PAR1" + footer))


@contextlib.contextmanager
def _translated(path: str) -> Iterator[None]:
    """Raise `SourceError` for the errors of pyarrow and of what it reads from, which are of many classes."""
    try:
        yield
    except EDLError:
        raise
    except Exception as exc:
        raise SourceError(f"{quote(path)} cannot be read as Parquet: {type(exc).__name__}: {shown(exc)}") from exc
