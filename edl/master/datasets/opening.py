"""Finds the kind of data set that a location names, and makes it again from what the master keeps of it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from edl.errors import SettingsError
from edl.master.datasets.dataset import Dataset
from edl.master.datasets.file_sets import CHECKS, FileSet
from edl.master.datasets.index import unpack_parts
from edl.master.datasets.ranges import RangeDataset
from edl.master.datasets.settings import ShardSettings
from edl.master.datasets.tables import ParquetDataset
from edl.master.datasets.text import LinesDataset, RecordsDataset, TextOptions, TextProgress
from edl.master.datasets.text.files import check_encoding
from edl.master.datasets.text.record_ends import Dialect
from edl.protocol.master import DatasetSpec
from edl.quoting import quote

__all__ = ["load_dataset", "open_dataset", "same_data"]

EXPECTED: Final = (
    "expected range:SIZE, lines:PATH, csv:PATH, parquet:PATH, files:PATH, PACKAGE.MODULE:FACTORY or FILE.py:FACTORY"
)


def open_dataset(
    location: str,
    settings: ShardSettings | None = None,
    *,
    samples: Any = None,
    progress: TextProgress | None = None,
    **options: Any,
) -> Dataset:
    """Open a data set where it is created, and cut it into shards. A text is read once for that, from begin to end.

    Args:
        location: `KIND:LOCATION`, as docs/master.md lists them, or `MODULE:FACTORY` or `FILE.py:FACTORY`: a function
            that returns a sequence of samples.
        settings: how it is cut and handed out; None for the defaults.
        samples: a sequence that is there already; `location` then is `range:NAME`.
        progress: is called with the bytes indexed so far and the bytes there are.
        options: of the kind, such as `encoding="utf-8"`.

    Returns:
        The data set, whose `spec` is what the master is told.

    Raises:
        SettingsError: there is no such data set, or no such option.
        SourceError: the data cannot be read, or change meanwhile.
    """
    settings = settings or ShardSettings()
    kind, colon, rest = location.partition(":")
    if not colon or not rest:
        raise SettingsError(f"data {quote(location)}: {EXPECTED}")
    try:
        rest.encode()
    except UnicodeError as exc:
        raise SettingsError(f"data {quote(location)}: the name is not text, so that no message can carry it") from exc
    if samples is not None and kind == "range":
        return RangeDataset.from_size(rest, len(samples), settings, samples)
    if kind in _OPENERS:
        return _OPENERS[kind](rest, settings, options, progress)
    _no_options(kind, options)
    made = make_samples(location)
    return RangeDataset.from_size(location, len(made), settings, made)


def load_dataset(spec: DatasetSpec, samples: Any = None) -> Dataset:
    """Make a data set from what the master keeps of it, to read its shards. Opens no file yet.

    Args:
        spec: as the master describes it.
        samples: for a data set whose samples code of the user's makes: `MODULE:FACTORY` as where it was created, or
            the object that it returns. Code is never imported because the master names it.

    Raises:
        SettingsError: the data set is of an unknown kind, or needs `samples`.
        ProtocolError: its index cannot be read.
    """
    if spec.kind not in _KINDS:
        raise SettingsError(f"the data set is of the kind {quote(spec.kind)}, which this version of EDL cannot read")
    if isinstance(samples, str):
        samples = make_samples(samples)
    return _KINDS[spec.kind](spec, samples)


def same_data(left: DatasetSpec, right: DatasetSpec) -> bool:
    """Tell whether two specifications are of the same data, cut alike.

    Their bytes may differ all the same: another build of zlib compresses an index into other bytes.

    Args:
        left: a specification.
        right: another.
    """
    if left == right:
        return True
    plain_left, plain_right = DatasetSpec(), DatasetSpec()
    plain_left.CopyFrom(left)
    plain_right.CopyFrom(right)
    plain_left.index = plain_right.index = b""
    if plain_left != plain_right:
        return False
    parts_left, parts_right = unpack_parts(left.index), unpack_parts(right.index)
    return len(parts_left) == len(parts_right) and all(
        a.head == b.head
        and a.columns.keys() == b.columns.keys()
        and all(a.columns[name].tolist() == b.columns[name].tolist() for name in a.columns)
        for a, b in zip(parts_left, parts_right, strict=True)
    )


def make_samples(name: str) -> Any:
    """Return what the user's function `MODULE:FACTORY` or `FILE.py:FACTORY` returns.

    Raises:
        SettingsError: there is no such function, or it returns nothing that has samples by number.
    """
    module, colon, attribute = name.rpartition(":")
    if not colon or not module or not attribute:
        raise SettingsError(f"data {quote(name)}: {EXPECTED}")
    found = getattr(_import(name, module), attribute, None)
    if found is None:
        raise SettingsError(f"data {quote(name)}: {module} has no {attribute!r}")
    made = found() if callable(found) and not hasattr(found, "__getitem__") else found
    if not hasattr(made, "__len__") or not hasattr(made, "__getitem__") or isinstance(made, Mapping):
        raise SettingsError(
            f"data {quote(name)} is a {type(made).__name__}: expected a sequence, with len and [number]"
        )
    return made


def _import(name: str, module: str) -> Any:
    if not module.endswith(".py"):
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as exc:
            if exc.name and (module == exc.name or module.startswith(f"{exc.name}.")):
                raise SettingsError(f"data {quote(name)}: there is no module {exc.name!r} here; {EXPECTED}") from exc
            raise
    path = Path(module).resolve()
    if not path.is_file():
        raise SettingsError(f"data {quote(name)}: there is no file {module!r}")
    own = path.stem if path.stem not in sys.modules else f"edl_data_{path.stem}"
    spec = importlib.util.spec_from_file_location(own, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[own] = loaded  # under a name, so that worker processes find its classes
    spec.loader.exec_module(loaded)
    return loaded


_Opener = Callable[[str, ShardSettings, dict[str, Any], TextProgress | None], Dataset]


def _open_range(location: str, settings: ShardSettings, options: dict[str, Any], _: TextProgress | None) -> Dataset:
    _no_options("range", options)
    if not location.isascii() or not location.isdecimal():
        raise SettingsError(f"range:{location}: expected a size, as in range:1000")
    return RangeDataset.from_size(location, int(location), settings)


def _open_lines(
    location: str, settings: ShardSettings, options: dict[str, Any], progress: TextProgress | None
) -> Dataset:
    keep_ends = options.pop("keep_ends", False)
    text = _text_options("lines", options)
    return LinesDataset.index_files(location, settings, {**asdict(text), "keep_ends": bool(keep_ends)}, progress)


def _open_csv(
    location: str, settings: ShardSettings, options: dict[str, Any], progress: TextProgress | None
) -> Dataset:
    dialect = Dialect(options.pop("delimiter", ","), options.pop("quotechar", '"'))
    header, names = bool(options.pop("header", True)), options.pop("names", None)
    if header and names is not None:
        raise SettingsError("names=: the columns are named by the header; header=False where there is none")
    columns = options.pop("columns", None)
    if isinstance(names, str) or isinstance(columns, str):
        raise SettingsError("names= and columns= are lists of names")
    text = _text_options("csv", {"encoding": "utf-8", **options})
    if text.encoding is None:
        raise SettingsError("encoding=None: the fields of a CSV are text")
    if text.encoding.lower().replace("_", "-") == "utf-8-sig":  # a mark at the begin of a file is left out anyway
        text = TextOptions("utf-8", text.errors)
    listed = {"names": None if names is None else list(names), "columns": None if columns is None else list(columns)}
    chosen = {**asdict(text), **asdict(dialect), "header": header, **listed}
    return RecordsDataset.index_files(location, settings, chosen, progress)


def _open_files(
    location: str, settings: ShardSettings, options: dict[str, Any], progress: TextProgress | None
) -> Dataset:
    check = options.pop("check", "mtime")
    _no_options("files", options)
    if check not in CHECKS:
        raise SettingsError(f"check={check!r}: must be one of {', '.join(CHECKS)}")
    return FileSet.from_location(location, settings, check, progress)


def _open_parquet(
    location: str, settings: ShardSettings, options: dict[str, Any], progress: TextProgress | None
) -> Dataset:
    columns = options.pop("columns", None)
    _no_options("parquet", options)
    if isinstance(columns, str):
        raise SettingsError("columns= is a list of names")
    return ParquetDataset.from_location(location, settings, columns, progress)


def _text_options(kind: str, options: dict[str, Any]) -> TextOptions:
    text = TextOptions(options.pop("encoding", None), options.pop("errors", "strict"))
    check_encoding(text)
    _no_options(kind, options)
    return text


def _no_options(kind: str, options: Mapping[str, Any]) -> None:
    if options:
        raise SettingsError(f"data of the kind {kind!r} has no option {', '.join(map(repr, options))}")


_OPENERS: dict[str, _Opener] = {
    "range": _open_range,
    "lines": _open_lines,
    "csv": _open_csv,
    "files": _open_files,
    "parquet": _open_parquet,
}
_KINDS: dict[str, Callable[[DatasetSpec, Any], Dataset]] = {
    "range": RangeDataset,
    "lines": LinesDataset,
    "csv": RecordsDataset,
    "files": FileSet,
    "parquet": ParquetDataset,
}
