"""CSV by records: a newline in quotes ends none.

Records are found and parsed here, with Python's `csv`, and not with pyarrow, which reads Parquet files. A shard is a
range of bytes, which another worker reads without what is before it. pyarrow's CSV reader goes through a file from its
begin and gives out tables: it does not say behind which bytes records end, and where a quoted field may hold newlines
only a pass from the begin can tell. It also guesses the columns' types from what it reads first, so that the same
record might be of other types in another shard; here all fields are text.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, ClassVar

import numpy as np

from edl.errors import ProtocolError, SettingsError, SourceError
from edl.master.datasets.dataset import Dataset
from edl.master.datasets.index import Numbers
from edl.master.datasets.settings import ShardSettings
from edl.master.datasets.storage import open_storage
from edl.master.datasets.text.files import TextDataset, TextPiece, TextProgress, check_plain
from edl.master.datasets.text.lines import split_lines
from edl.master.datasets.text.record_ends import BOM, Dialect, find_record_ends
from edl.quoting import quote

__all__ = ["RecordsDataset"]


class RecordsDataset(TextDataset):
    """CSV by records, as RFC 4180 has it. Samples are dictionaries of text by column; lists without names.

    Blank lines are no records. A record with more or fewer fields than there are columns is an error.
    """

    _kind: ClassVar[str] = "csv"
    _unit: ClassVar[str] = "rows"
    _option_types = {
        **dict.fromkeys(("delimiter", "encoding", "errors"), (str,)),
        "quotechar": (str, NoneType),
        "header": (bool,),
        "names": (list, NoneType),
        "columns": (list, NoneType),
    }

    @classmethod
    def index_files(
        cls, location: str, settings: ShardSettings, options: Mapping[str, Any], progress: TextProgress | None
    ) -> Dataset:
        """See `TextDataset.index_files`. Takes the columns' names from the first file where there is a header."""
        names: Sequence[str] | None = options["names"]
        if options["header"]:
            storage = open_storage(location)
            path = storage.find_files(storage.absolute(location))[0]
            nbytes = storage.stat_file(path).nbytes
            check_plain(storage, path, nbytes)
            blocks = storage.read_blocks(path, 0, nbytes)
            header = next(_parse_rows(path, blocks, options, at=0), [])
            names = header
        if names is not None and (len(set(names)) < len(names) or not names):
            raise SettingsError(f"csv:{location}: the columns are {quote(list(names))}: each needs a name of its own")
        unknown = set(options["columns"] or []) - set(names or [])
        if unknown:
            raise SettingsError(f"csv:{location} has no column {quote(sorted(unknown))}, only {quote(names)}")
        return super().index_files(location, settings, {**options, "names": names}, progress)

    @classmethod
    def _scan(cls, path: str, blocks: Iterable[bytes], options: Mapping[str, Any]) -> Iterator[tuple[bytes, Numbers]]:
        header = bool(options["header"])
        for data, ends in _scan_records(path, blocks, options):
            if header and len(ends):
                _check_header(path, next(_parse_rows(path, [data], options, at=0), []), options)
                ends = ends[1:]
                header = False
            yield data, ends

    def _check_options(self) -> None:
        super()._check_options()
        _dialect(self._options)
        names, columns = self._options["names"], self._options["columns"]
        texts = all(isinstance(name, str) for name in (names or []) + (columns or []))
        if not texts or not set(columns or []) <= set(names or []):
            raise ProtocolError(f"the index of csv:{self.spec.location} has other columns than its file")

    def _parse(self, pieces: Iterable[TextPiece]) -> Iterator[Any]:
        names: Sequence[str] | None = self._options["names"]
        columns = self._options["columns"] or names
        for piece in pieces:
            rows = _parse_rows(piece.path, piece.blocks, self._options, at=piece.at)
            if self._options["header"] and piece.at == 0:
                next(rows, None)
            for row in rows:
                if names is None:
                    yield row
                    continue
                if len(row) != len(names):
                    raise SourceError(
                        f"{quote(piece.path)}: the record {quote(row)} has {len(row)} fields, not the {len(names)} of "
                        f"the columns"
                    )
                record = dict(zip(names, row, strict=True))
                yield record if columns is names else {name: record[name] for name in columns or ()}


def _dialect(options: Mapping[str, Any]) -> Dialect:
    return Dialect(options["delimiter"], options["quotechar"])


def _scan_records(path: str, blocks: Iterable[bytes], options: Mapping[str, Any]) -> Iterator[tuple[bytes, Numbers]]:
    """Yield the bytes of a file, and behind which of them records end."""
    dialect = _dialect(options)
    rest = b""
    at = 0
    try:
        for block in blocks:
            data = rest + block
            if not at and data.startswith(BOM):
                yield BOM, np.zeros(0, np.int64)
                at, data = len(BOM), data[len(BOM) :]
            ends, complete = find_record_ends(data, dialect, final=False)
            yield data[:complete], ends
            rest = data[complete:]
            at += complete
        ends, _ = find_record_ends(rest, dialect, final=True)
        yield rest, ends
    except csv.Error as exc:
        raise SettingsError(
            f"{quote(path)}: the records from byte {at} on cannot be told apart: {exc} "
            f"(delimiter={dialect.delimiter!r}, quotechar={dialect.quotechar!r})"
        ) from exc


def _parse_rows(path: str, blocks: Iterable[bytes], options: Mapping[str, Any], *, at: int) -> Iterator[list[str]]:
    """Yield the records of a file from offset `at` on."""
    encoding: str = options["encoding"]
    count = 0

    def lines() -> Iterator[str]:
        for number, line in enumerate(split_lines(blocks, keep_ends=True)):
            plain = line.removeprefix(BOM) if not at and not number else line
            yield plain.decode(encoding, options["errors"])

    try:
        for row in _dialect(options).parse(lines()):
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


def _check_header(path: str, header: Sequence[str], options: Mapping[str, Any]) -> None:
    if list(header) != list(options["names"]):
        raise SettingsError(
            f"{quote(path)} has the columns {quote(header)}, and the first file has {quote(options['names'])}: files "
            f"with other columns are another data set"
        )
