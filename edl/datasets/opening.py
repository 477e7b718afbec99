"""Finds the kind of data set that a name stands for, opens it, and makes it again from what the master keeps of it.

A name is `KIND:LOCATION`, a file, or a function of the user's: `MODULE:FACTORY` or `FILE.py:FACTORY`. `open_dataset`
opens what is cut into shards (`edl master`), `open_data` what is labelled (`edl label`). Both find functions in the
same way. Code is imported only because a user named it, never because a message did.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from edl.datasets.dataset import Dataset, NumberedDataset, ShardSettings, Source, unpack_parts
from edl.datasets.files import FileSet, is_growing_folder
from edl.datasets.parquet import ParquetDataset
from edl.datasets.rows import IterableData, LabelDataset, SequenceData, open_arrays, open_sequences, take_field
from edl.datasets.text import LinesDataset, RecordsDataset
from edl.errors import SettingsError
from edl.protocol.master import DatasetSpec
from edl.quoting import quote

__all__ = ["load_dataset", "open_data", "open_dataset", "same_data"]

_KINDS: Final[dict[str, type[Dataset]]] = {
    "range": NumberedDataset,
    "lines": LinesDataset,
    "csv": RecordsDataset,
    "files": FileSet,
    "parquet": ParquetDataset,
}
"""Kinds that a location names. The index of "follow" names one of them; "source" is a range without an end."""
_EXPECTED: Final = (
    f"expected range:SIZE, {', '.join(f'{kind}:PATH' for kind in [*_KINDS, 'follow'] if kind != 'range')}, "
    "MODULE:FACTORY, FILE.py:FACTORY"
)
_EXPECTED_ROWS: Final = (
    "expected FILE.npz, FILE.npy, FILE.jsonl, FILE.parquet, PACKAGE.MODULE:FACTORY or FILE.py:FACTORY"
)


def open_dataset(
    location: str, settings: ShardSettings | None = None, *, samples: Any = None, **options: Any
) -> Dataset:
    """Open a data set where it is created, and cut it into shards. Text is read once for that, from start to end.

    Args:
        location: `KIND:LOCATION`, as docs/master.md lists them, or `MODULE:FACTORY` or `FILE.py:FACTORY`: a function
            that returns a sequence of samples or a `Source`.
        settings: How it is cut and handed out; None for the defaults.
        samples: A sequence or `Source` that is there already; `location` then is `range:NAME` or `source:NAME`.
        options: Options of the kind, such as `encoding="utf-8"`.

    Returns:
        The data set, whose `spec` is what the master is told.

    Raises:
        SettingsError: There is no such data set, or no such option.
        SourceError: The data cannot be read, or change during that time.
    """
    settings = settings or ShardSettings()
    kind, colon, rest = location.partition(":")
    if not colon or not rest:
        raise SettingsError(f"data {quote(location)}: {_EXPECTED}")
    try:
        rest.encode()
    except UnicodeError as exc:
        raise SettingsError(f"data {quote(location)}: the name is not text, so no message can carry it") from exc
    if samples is None and kind == "follow":
        growing = FileSet if is_growing_folder(rest) else LinesDataset
        return growing._create_growing(rest, settings, growing._read_options(kind, options))
    if samples is None and kind in _KINDS:
        return _KINDS[kind]._create(rest, settings, _KINDS[kind]._read_options(kind, options))
    NumberedDataset._read_options(kind, options)
    if samples is None and rest.startswith("//"):
        raise SettingsError(
            f"data {quote(location)}: a URL needs the kind of its data before it, such as parquet:s3://bucket/data;"
            f" {_EXPECTED}"
        )
    if samples is None:
        rest, samples = location, _make_samples(_find_factory(location, _EXPECTED))
    elif kind not in ("range", "source"):
        raise SettingsError(f"data {quote(location)}: samples of yours are opened as 'range:NAME' or 'source:NAME'")
    if isinstance(samples, Source):
        return NumberedDataset.of(rest, None, settings, samples)
    if not _is_indexed(samples):
        raise SettingsError(
            f"data {quote(location)} is a {type(samples).__name__}: expected a sequence (len, [number]), or a Source"
        )
    return NumberedDataset.of(rest, len(samples), settings, samples)


def load_dataset(spec: DatasetSpec, samples: Any = None) -> Dataset:
    """Make a data set from what the master keeps of it, to read its shards. Opens no file yet.

    Args:
        spec: As the master describes it.
        samples: For a data set whose samples your code makes: `MODULE:FACTORY` as where it was created, or the object
            that it returns.

    Returns:
        The data set, ready to `read`.

    Raises:
        SettingsError: The data set is of an unknown kind, or needs `samples`.
        ProtocolError: Its index cannot be read.
    """
    name = "range" if spec.kind == "source" else spec.kind
    if spec.kind == "follow":
        parts = unpack_parts(spec.index)
        name = str(parts[0].head.get("of") if parts else None)
    if name not in _KINDS:
        kind = quote(name if name == spec.kind else f"{spec.kind} of {name}")
        raise SettingsError(f"the data set is of the kind {kind}, which this version of EDL cannot read")
    if isinstance(samples, str):
        samples = _make_samples(_find_factory(samples, _EXPECTED))
    return _KINDS[name](spec, samples)


def same_data(left: DatasetSpec, right: DatasetSpec) -> bool:
    """Return whether two specifications are of the same data, cut alike.

    Their bytes may differ all the same: another build of zlib compresses an index into other bytes. A source that grows
    is the same however much of it is known.

    Args:
        left: A specification.
        right: Another one.
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


def open_data(
    name: str,
    inputs: Sequence[str],
    ids: str | None = None,
    workers: int = 0,
    *,
    sequences: bool = False,
    offsets: str | None = None,
) -> LabelDataset:
    """Open a data set to be labelled.

    Args:
        name: `FILE.npz` or `FILE.npy` (mapped into memory where possible), or `MODULE:FACTORY` or `FILE.py:FACTORY`: a
            function that returns a `Dataset`, a sequence or an iterable of samples (arrays, tuples or mappings).
            `FILE.jsonl` and `FILE.parquet` (list columns) have sequences.
        inputs: Inputs of the teachers' model: `NAME`, or `NAME=KEY` where the data set calls it otherwise (an array of
            the file, the key of a mapping, the position in a tuple).
        ids: What holds the ids: an array of an `.npz` file, an `.npy` file, or the key or position in a sample. None:
            the position of a row is its id.
        workers: See `SequenceData`.
        sequences: Whether each sample of a function is a sequence of tokens, of its own length.
        offsets: For sequences in an `.npz` file, the array [sequences + 1] of where each begins.

    Returns:
        The data set, whose `batches` yield ids and inputs.

    Raises:
        SettingsError: There is no such data set, or it has no such parts.
    """
    pairs = (part.partition("=") for part in inputs)
    wanted = {name.strip(): key.strip() or name.strip() for name, _, key in pairs}
    if not wanted or "" in wanted:
        raise SettingsError(f"--inputs {','.join(inputs)!r}: name at least one input of the teachers")
    if workers < 0:
        raise SettingsError(f"--workers {workers}: must be 0 or more")
    is_arrays = name.endswith((".npz", ".npy"))
    if offsets is not None and not is_arrays:
        raise SettingsError(f"--offsets {offsets}: belongs to sequences in an .npz file")
    if is_arrays:
        if sequences and offsets is None:
            raise SettingsError("--sequences: name the array of an .npz file that has their beginnings with --offsets")
        return open_arrays(Path(name), wanted, ids, offsets)
    if name.endswith((".jsonl", ".parquet")):
        return open_sequences(Path(name), wanted, ids)
    return _open_samples(name, wanted, ids, workers, sequences)


def _open_samples(name: str, wanted: Mapping[str, str], ids: str | None, workers: int, sequences: bool) -> LabelDataset:
    found = _find_factory(name, _EXPECTED_ROWS)
    data = _make_samples(found)
    if type(data).__name__ == "DataLoader":
        raise SettingsError(f"data {quote(name)} is a DataLoader: return the Dataset, and load it with --workers N")
    fields = {}
    for at, (key, part) in enumerate(wanted.items()):
        position = int(part) if part.isdecimal() else at if part == key else None
        alone = len(wanted) == 1
        fields[key] = partial(take_field, key=part, position=position, alone=alone, sequences=sequences)
    id_field = None
    if ids is not None:
        id_field = partial(take_field, key=ids, position=int(ids) if ids.isdecimal() else None)
    if _is_indexed(data) and id_field is None:
        return SequenceData(data, fields, workers, sequences=sequences)
    if workers:
        raise SettingsError(f"--workers {workers}: data {quote(name)} must be indexed, and have no ids of their own")
    if _is_indexed(data):
        return IterableData(lambda: (data[at] for at in range(len(data))), fields, id_field, sequences=sequences)
    if not hasattr(data, "__iter__"):
        raise SettingsError(f"data {quote(name)} is a {type(data).__name__}: expected samples by index, or an iterable")
    again = itertools.chain([data], (_make_samples(found) for _ in itertools.count()))
    return IterableData(lambda: next(again), fields, id_field, sequences=sequences)


def _find_factory(name: str, expected: str) -> Any:
    """Return what `MODULE:FACTORY` or `FILE.py:FACTORY` names."""
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
        sys.path.insert(0, str(path.parent))  # as `python FILE` does, so that it finds its neighbours
    sys.modules[own] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def _make_samples(found: Any) -> Any:
    """Return what a factory returns; samples that are there already as they are."""
    is_made = isinstance(found, Source) or hasattr(found, "__getitem__") or hasattr(found, "__iter__")
    return found if not callable(found) or (is_made and not isinstance(found, type)) else found()


def _is_indexed(data: Any) -> bool:
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and isinstance(data, torch_data.IterableDataset):
        return False  # it has `__getitem__` all the same, which raises
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, Mapping)
