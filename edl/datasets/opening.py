"""Opens a data set by name and cuts it into shards, or recreates it from the master's specification.

A name is `KIND:LOCATION`, or refers to a user's function: `MODULE:FACTORY` or `FILE.py:FACTORY`. Code is imported only
for a name that the user gives, never for a name in a message from the network.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from edl.datasets.dataset import Dataset, NumberedDataset, ShardSettings, Source, unpack_parts
from edl.datasets.files import FileSet, is_growing_folder
from edl.datasets.parquet import ParquetDataset
from edl.datasets.text import LinesDataset, RecordsDataset
from edl.errors import SettingsError
from edl.protocol.master import DatasetSpec
from edl.quoting import quote

_KINDS: Final[dict[str, type[Dataset]]] = {
    "range": NumberedDataset,
    "lines": LinesDataset,
    "csv": RecordsDataset,
    "files": FileSet,
    "parquet": ParquetDataset,
}
"""Kinds of data set, by the name in a location. The index of "follow" names one of these kinds. "source" is a range
without an end."""
_EXPECTED: Final = (
    f"expected range:SIZE, {', '.join(f'{kind}:PATH' for kind in [*_KINDS, 'follow'] if kind != 'range')}, "
    "MODULE:FACTORY, FILE.py:FACTORY"
)


def open_dataset(
    location: str, settings: ShardSettings | None = None, *, samples: Any = None, **options: Any
) -> Dataset:
    """Open a new data set, and cut it into shards. A text data set is read once from start to end for this.

    Args:
        location: `KIND:LOCATION`, with a kind that docs/master.md lists, or `MODULE:FACTORY` or `FILE.py:FACTORY`: a
            function that returns a sequence of samples or a `Source`.
        settings: How to cut the data set into shards, and how to hand out the shards; None for the defaults.
        samples: An existing sequence or `Source`; `location` is then `range:NAME` or `source:NAME`.
        options: Options for the kind of data set, such as `encoding="utf-8"`.

    Returns:
        The data set; pass its `spec` to the master to create the data set there.

    Raises:
        SettingsError: The data set or an option does not exist.
        SourceError: The data cannot be read, or changed while they were being read.
    """
    settings = settings or ShardSettings()
    kind, colon, rest = location.partition(":")
    if not colon or not rest:
        raise SettingsError(f"data {quote(location)}: {_EXPECTED}")
    try:
        rest.encode()
    except UnicodeError as exc:
        raise SettingsError(f"data {quote(location)}: the name is not valid text and cannot be sent") from exc
    if samples is None and (kind == "follow" or kind in _KINDS):
        found = _KINDS[kind if kind != "follow" else "files" if is_growing_folder(rest) else "lines"]
        return found._create(kind, rest, settings, found._read_options(kind, options))
    NumberedDataset._read_options(kind, options)
    if samples is None and rest.startswith("//"):
        raise SettingsError(
            f"data {quote(location)}: a URL needs the kind of its data before it, such as parquet:s3://bucket/data;"
            f" {_EXPECTED}"
        )
    if samples is None:
        rest, samples = location, make_samples(find_factory(location, _EXPECTED))
    elif kind not in ("range", "source"):
        raise SettingsError(f"data {quote(location)}: open your own samples as 'range:NAME' or 'source:NAME'")
    if isinstance(samples, Source):
        return NumberedDataset.of(rest, None, settings, samples)
    if not is_indexed(samples):
        raise SettingsError(
            f"data {quote(location)} is a {type(samples).__name__}: expected a sequence (len, [number]), or a Source"
        )
    return NumberedDataset.of(rest, len(samples), settings, samples)


def load_dataset(spec: DatasetSpec, samples: Any = None) -> Dataset:
    """Recreate a data set from the master's specification, to read its shards. This opens no file yet.

    Args:
        spec: The master's specification.
        samples: For a data set whose samples your code creates: the `MODULE:FACTORY` with which the data set was
            created, or the object that this factory returns.

    Returns:
        The data set, ready to `read`.

    Raises:
        SettingsError: The data set is of an unknown kind, or needs `samples`.
        ProtocolError: The index in the specification cannot be read.
    """
    name = "range" if spec.kind == "source" else spec.kind
    if spec.kind == "follow":
        parts = unpack_parts(spec.index)
        name = str(parts[0].head.get("of") if parts else None)
    if name not in _KINDS:
        kind = quote(name if name == spec.kind else f"{spec.kind} of {name}")
        raise SettingsError(f"the data set is of kind {kind}, which this version of EDL cannot read")
    if isinstance(samples, str):
        samples = make_samples(find_factory(samples, _EXPECTED))
    return _KINDS[name](spec, samples)


def same_data(left: DatasetSpec, right: DatasetSpec) -> bool:
    """Return whether two specifications describe the same data, cut in the same way.

    Their bytes may still differ: another build of zlib may compress an index differently. Two specifications of a
    source that grows describe the same data, whatever the number of units in each.

    Args:
        left: A specification.
        right: The other specification.
    """
    return left == right or _comparable(left) == _comparable(right)


def _comparable(spec: DatasetSpec) -> tuple[DatasetSpec, list[Any]]:
    plain = DatasetSpec()
    plain.CopyFrom(spec)
    plain.index = b""
    parts = unpack_parts(spec.index)
    if spec.kind in ("follow", "source"):
        plain.ClearField("units")
        parts = parts[:1]
    return plain, [(head, {name: numbers.tolist() for name, numbers in columns.items()}) for head, columns in parts]


def find_factory(name: str, expected: str) -> Any:
    """Return the object that `MODULE:FACTORY` or `FILE.py:FACTORY` names."""
    module, colon, attribute = name.rpartition(":")
    if not colon or not module or not attribute:
        raise SettingsError(f"data {quote(name)}: {expected}")
    found = getattr(_import(name, module, expected), attribute, None)
    if found is None:
        raise SettingsError(f"data {quote(name)}: {module} has no {attribute!r}")
    return found


def _import(name: str, module: str, expected: str) -> ModuleType:
    if not module.endswith(".py"):
        if "" not in sys.path:
            sys.path.insert(0, "")  # the working folder, as `python -m` does
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as exc:
            if exc.name and (module == exc.name or module.startswith(f"{exc.name}.")):
                raise SettingsError(f"data {quote(name)}: no module named {exc.name!r}; {expected}") from exc
            raise
    path = Path(module).resolve()
    if not path.is_file():
        raise SettingsError(f"data {quote(name)}: file not found: {module!r}")
    # Under its own name if that is free, so that worker processes find its classes.
    own = path.stem if path.stem not in sys.modules else f"edl_data_{path.stem}"
    spec = importlib.util.spec_from_file_location(own, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as `python FILE` does, so that it can import its neighbours
    sys.modules[own] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def make_samples(found: Any) -> Any:
    """Return a factory's result, or existing samples unchanged."""
    is_made = isinstance(found, Source) or hasattr(found, "__getitem__") or hasattr(found, "__iter__")
    return found if not callable(found) or (is_made and not isinstance(found, type)) else found()


def is_indexed(data: Any) -> bool:
    """Return whether samples can be read by number."""
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and isinstance(data, torch_data.IterableDataset):
        return False  # it still has `__getitem__`, which raises
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, Mapping)
