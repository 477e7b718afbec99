"""Finds the kind of data set that a location names, and makes it again from what the master keeps of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from edl.errors import SettingsError
from edl.master.datasets.dataset import Dataset
from edl.master.datasets.factories import EXPECTED, make_samples
from edl.master.datasets.file_sets import CHECKS, FileSet
from edl.master.datasets.growth import GrowingFileSet, GrowingText, Source, SourceDataset
from edl.master.datasets.index import unpack_parts
from edl.master.datasets.ranges import RangeDataset
from edl.master.datasets.settings import ShardSettings
from edl.master.datasets.storage import has_wildcards, open_storage
from edl.master.datasets.tables import ParquetDataset
from edl.master.datasets.text import LinesDataset, RecordsDataset, TextOptions, TextProgress
from edl.master.datasets.text.files import check_encoding
from edl.master.datasets.text.record_ends import Dialect
from edl.protocol.master import DatasetSpec
from edl.quoting import quote

__all__ = ["load_dataset", "open_dataset", "same_data"]


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
            that returns a sequence of samples or a `Source`.
        settings: how it is cut and handed out; None for the defaults.
        samples: a sequence or `Source` that is there already; `location` then is `range:NAME` or `source:NAME`.
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
    if samples is None and kind in _OPENERS:
        return _OPENERS[kind](rest, settings, options, progress)
    _no_options(kind, options)
    if samples is None:
        rest, samples = location, make_samples(location)
    elif kind not in ("range", "source"):
        raise SettingsError(f"data {quote(location)}: samples of yours are opened as 'range:NAME' or 'source:NAME'")
    if isinstance(samples, Source):
        return SourceDataset.from_source(rest, samples, settings)
    if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__") or isinstance(samples, Mapping):
        raise SettingsError(
            f"data {quote(location)} is a {type(samples).__name__}: expected a sequence (len, [number]), or a Source"
        )
    return RangeDataset.from_size(rest, len(samples), settings, samples)


def load_dataset(spec: DatasetSpec, samples: Any = None) -> Dataset:
    """Make a data set from what the master keeps of it, to read its shards. Opens no file yet.

    Args:
        spec: as the master describes it.
        samples: for a data set whose samples code of the user's makes: `MODULE:FACTORY` as where it was created, or
            the object that it returns. Code is never imported because the master names it.

    Returns:
        The data set, ready to `read`.

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
    """Return whether two specifications are of the same data, cut alike.

    Their bytes may differ all the same: another build of zlib compresses an index into other bytes. A source that grows
    is the same however much of it is known.

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
    parts_left, parts_right = unpack_parts(left.index), unpack_parts(right.index)
    if left.kind in ("follow", "source"):
        plain_left.ClearField("units")
        plain_right.ClearField("units")
        parts_left, parts_right = parts_left[:1], parts_right[:1]
    if plain_left != plain_right:
        return False
    return len(parts_left) == len(parts_right) and all(
        a.head == b.head
        and a.columns.keys() == b.columns.keys()
        and all(a.columns[name].tolist() == b.columns[name].tolist() for name in a.columns)
        for a, b in zip(parts_left, parts_right, strict=True)
    )


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
    return FileSet.from_location(location, settings, _check_option("files", options), progress)


def _check_option(kind: str, options: dict[str, Any]) -> str:
    check: str = options.pop("check", "mtime")
    _no_options(kind, options)
    if check not in CHECKS:
        raise SettingsError(f"check={check!r}: must be one of {', '.join(CHECKS)}")
    return check


def _open_parquet(
    location: str, settings: ShardSettings, options: dict[str, Any], progress: TextProgress | None
) -> Dataset:
    columns = options.pop("columns", None)
    _no_options("parquet", options)
    if isinstance(columns, str):
        raise SettingsError("columns= is a list of names")
    return ParquetDataset.from_location(location, settings, columns, progress)


def _open_stream(location: str, settings: ShardSettings, options: dict[str, Any], _: TextProgress | None) -> Dataset:
    storage = open_storage(location)
    is_folder = location.endswith("/") or storage.is_folder(storage.absolute(location))
    is_pattern = has_wildcards(location) and storage.list_files(storage.absolute(location)) != [location]
    if is_folder or is_pattern:
        return GrowingFileSet.from_pattern(location, settings, _check_option("follow", options))
    keep_ends = options.pop("keep_ends", False)
    text = _text_options("follow", options)
    return GrowingText.from_path(location, settings, {**asdict(text), "keep_ends": bool(keep_ends)})


def _load_stream(spec: DatasetSpec, samples: Any) -> Dataset:
    parts = unpack_parts(spec.index)
    of = parts[0].head.get("of") if parts else None
    if not isinstance(of, str) or of not in _STREAMS:
        raise SettingsError(f"the data set follows {quote(of)}, which this version of EDL cannot read")
    return _STREAMS[of](spec, samples)


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
    "follow": _open_stream,
    "parquet": _open_parquet,
}
_STREAMS: dict[str, Callable[[DatasetSpec, Any], Dataset]] = {"lines": GrowingText, "files": GrowingFileSet}
_KINDS: dict[str, Callable[[DatasetSpec, Any], Dataset]] = {
    "range": RangeDataset,
    "lines": LinesDataset,
    "csv": RecordsDataset,
    "files": FileSet,
    "follow": _load_stream,
    "source": SourceDataset,
    "parquet": ParquetDataset,
}
