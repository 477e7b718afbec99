"""Tables in Parquet files: a unit is a row; what is read at once is a row group."""

from __future__ import annotations

import bisect
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from edl.errors import ProtocolError, SettingsError
from edl.master.datasets.dataset import Dataset, LeasedUnits
from edl.master.datasets.index import IndexPart, check_size, pack_part
from edl.master.datasets.settings import ShardSettings
from edl.master.datasets.shuffling import permute_shard
from edl.master.datasets.storage import DataStorage, check_paths, file_changed, open_storage
from edl.master.datasets.tables.parquet_file import RangeFile, import_pyarrow, parse_footer, read_footer, translated
from edl.quoting import quote, shown

if TYPE_CHECKING:
    import pyarrow

__all__ = ["ParquetDataset"]

_ROWS_AT_ONCE: Final = 1024
"""Rows turned into Python objects at a time: a row group of a million rows would be gigabytes of them."""


class ParquetDataset(Dataset):
    """Rows of Parquet files. Samples are dictionaries by column; `read_table` gives columns.

    The last row group is kept, so that it is decoded once for all shards of it that a reader gets one after another.
    Without a shard size of the user's, a shard has as many rows as the largest row group: where all of them have the
    same number of rows, a shard is a row group.
    """

    @classmethod
    def from_location(
        cls,
        location: str,
        settings: ShardSettings,
        columns: Sequence[str] | None,
        progress: Callable[[int, int], object] | None,
    ) -> Dataset:
        """Read the footers of all files.

        Args:
            location: a path, URL or pattern.
            settings: of the data set.
            columns: which are read; None for all.
            progress: is called with the bytes of the files looked at, and of all files.

        Raises:
            SettingsError: there is no such file, there are no rows, or files have other columns.
            SourceError: a file cannot be read, or is no Parquet file.
        """
        import_pyarrow()
        storage = open_storage(location)
        location = storage.absolute(location)
        paths = storage.find_files(location)
        nbytes = [storage.stat_file(path).nbytes for path in paths]
        rows, crcs, groups, schemas = [], [], [], []
        for number, path in enumerate(paths):
            footer = read_footer(storage, path, nbytes[number])
            metadata = parse_footer(path, footer)
            schemas.append(metadata.schema.to_arrow_schema())
            if not schemas[0].equals(schemas[-1]):
                raise SettingsError(
                    f"{quote(path)} has other columns than {quote(paths[0])}: {shown(schemas[-1])}, and "
                    f"{shown(schemas[0])}"
                )
            rows.append(metadata.num_rows)
            crcs.append(zlib.crc32(footer))
            groups.extend(_group_rows(metadata))
            if progress is not None:
                progress(sum(nbytes[: number + 1]), sum(nbytes))
        if not sum(rows):
            raise SettingsError(f"parquet:{location} has no rows")
        unknown = set(columns or ()) - set(schemas[0].names)
        if unknown or (columns is not None and not columns):
            raise SettingsError(
                f"parquet:{location}: columns={quote(columns)}, and there are {quote(schemas[0].names)}"
            )
        shard_size = settings.shard_size or max(groups)
        head = {
            "shuffle_within": settings.shuffle_within,
            "columns": None if columns is None else list(columns),
            "files": paths,
        }
        columns_of = {"nbytes": nbytes, "rows": rows, "crcs": crcs}
        part = IndexPart(head, {name: np.array(numbers, np.int64) for name, numbers in columns_of.items()})
        index = pack_part(part)
        check_size(index, "split the files into several data sets")
        return cls(settings.spec("parquet", location, sum(rows), shard_size, index))

    def describe(self) -> str:
        """See `Dataset.describe`."""
        files = f", {len(self._paths)} files" if len(self._paths) > 1 else ""
        return f"parquet:{shown(self.spec.location)} ({self.spec.units} rows{files})"

    def _load(self, parts: Sequence[IndexPart]) -> None:
        try:
            (part,) = parts
            self._paths = part.get_texts("files")
            self._columns = None if part.head.get("columns") is None else part.get_texts("columns")
            self._nbytes = part.columns["nbytes"]
            self._crcs = part.columns["crcs"]
            rows: list[int] = part.columns["rows"].tolist()
        except (LookupError, ValueError) as exc:
            raise ProtocolError(f"the index of {self.kind}:{self.spec.location} lacks a part: {exc!r}") from exc
        check_paths(self.spec.location, self._paths)
        self._begins = [0, *itertools.accumulate(rows)]
        if not len(rows) == len(self._paths) == len(self._nbytes) == len(self._crcs):
            raise ProtocolError(f"the index of {self.kind}:{self.spec.location} is of another number of files")
        if self._begins[-1] != self.spec.units:
            raise ProtocolError(f"the index of {self.kind}:{self.spec.location} is of another number of rows")
        self._footer: tuple[int, str, Any] = (-1, "", None)
        self._group: tuple[int, int, Any] = (-1, -1, None)

    def read_table(self, lease: LeasedUnits) -> pyarrow.Table:
        """Return the rows of a lease as columns, in the order of `read`.

        Args:
            lease: of this data set.

        Raises:
            SettingsError: the lease is not of this data set.
            SourceError: see `read`.
        """
        import pyarrow

        first, stop = self._shard_bounds(lease)
        if not self._shuffle_within:
            return pyarrow.concat_tables(self._slices(lease.start, lease.stop))
        order = permute_shard(self.spec.seed, lease.epoch, lease.shard, stop - first)
        return pyarrow.concat_tables(self._slices(first, stop)).take(order[lease.start - first : lease.stop - first])

    def _read_units(self, start: int, stop: int) -> Iterable[Any]:
        for table in self._slices(start, stop):
            for at in range(0, table.num_rows, _ROWS_AT_ONCE):
                yield from table.slice(at, _ROWS_AT_ONCE).to_pylist()

    def _slices(self, start: int, stop: int) -> Iterator[Any]:
        """Yield the rows, cut where row groups end."""
        import_pyarrow()
        storage = open_storage(self.spec.location)
        while start < stop:
            file = bisect.bisect_right(self._begins, start) - 1
            metadata = self._open_file(storage, file)
            begins = [
                0,
                *itertools.accumulate(metadata.row_group(at).num_rows for at in range(metadata.num_row_groups)),
            ]
            row = start - self._begins[file]
            group = bisect.bisect_right(begins, row) - 1
            count = min(stop - start, begins[group + 1] - row)
            yield self._read_group(storage, file, group, metadata).slice(row - begins[group], count)
            start += count

    def _open_file(self, storage: DataStorage, file: int) -> Any:
        """Return a file's metadata, after a look whether the file is still what it was."""
        path = self._paths[file]
        found = storage.stat_file(path)
        known, version, metadata = self._footer
        if known == file and version == found.version != "":
            return metadata
        if found.nbytes != self._nbytes[file]:
            raise file_changed(path, f"it has {found.nbytes} bytes, and had {self._nbytes[file]}")
        footer = read_footer(storage, path, found.nbytes)
        if zlib.crc32(footer) != self._crcs[file]:
            raise file_changed(path, "its footer is another")
        metadata = parse_footer(path, footer)
        self._group = (-1, -1, None)  # of the file as it was before
        self._footer = (file, found.version, metadata)
        return metadata

    def _read_group(self, storage: DataStorage, file: int, group: int, metadata: Any) -> Any:
        import pyarrow.parquet

        *known, table = self._group
        if known != [file, group]:
            path = self._paths[file]
            with translated(path):
                opened = pyarrow.parquet.ParquetFile(
                    RangeFile(storage, path, int(self._nbytes[file])),
                    metadata=metadata,
                    page_checksum_verification=True,
                )
                # Without threads of its own: a reader is among many processes, and may be a fork.
                table = opened.read_row_group(group, columns=self._columns, use_threads=False)
                if self._columns is not None:
                    table = table.select(self._columns)
            if storage.stat_file(path).version != self._footer[1]:
                raise file_changed(path, "it was written while it was read")
            if table.num_rows != metadata.row_group(group).num_rows:
                raise file_changed(path, f"row group {group} has {table.num_rows} rows")
            self._group = (file, group, table)
        return table


def _group_rows(metadata: Any) -> list[int]:
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
