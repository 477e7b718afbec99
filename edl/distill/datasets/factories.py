"""Finds samples that a function of the user's makes, by `MODULE:FACTORY` or `FILE.py:FACTORY`."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from edl.distill.datasets.kinds import IterableData, LabelDataset, SequenceData
from edl.errors import SettingsError

__all__ = ["EXPECTED", "open_samples"]

EXPECTED = "expected FILE.npz, FILE.npy, FILE.jsonl, FILE.parquet, PACKAGE.MODULE:FACTORY or FILE.py:FACTORY"


class _Field:
    """A part of a sample: by key, by position, or the sample itself. A class, so that worker processes can have it."""

    def __init__(self, key: str, position: int | None, *, alone: bool = False, sequences: bool = False) -> None:
        self._key = key
        self._position = position
        self._alone = alone
        self._sequences = sequences

    def __call__(self, sample: Any) -> Any:
        if (
            self._sequences
            and self._alone
            and isinstance(sample, list)
            and sample
            and isinstance(sample[0], int | float)
        ):
            return sample  # token ids, as tokenizers return them
        if isinstance(sample, Mapping):
            return sample[self._key]
        if isinstance(sample, tuple | list):
            if self._position is None:
                raise TypeError(f"samples are {type(sample).__name__}s: name a position, not {self._key!r}")
            return sample[self._position]
        if not self._alone:
            raise TypeError(f"a sample is one {type(sample).__name__}; it has no parts")
        return sample


def _find(name: str) -> Any:
    module, colon, attribute = name.rpartition(":")
    if not colon or not module or not attribute:
        raise SettingsError(f"data {name!r}: {EXPECTED}")
    found = getattr(_import(name, module), attribute, None)
    if found is None:
        raise SettingsError(f"data {name!r}: {module} has no {attribute!r}")
    return found


def _import(name: str, module: str) -> ModuleType:
    if not module.endswith(".py"):
        if "" not in sys.path:
            sys.path.insert(0, "")  # as `python -m` does
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as exc:
            if exc.name and (module == exc.name or module.startswith(f"{exc.name}.")):
                raise SettingsError(f"data {name!r}: there is no module {exc.name!r} here; {EXPECTED}") from exc
            raise
    path = Path(module).resolve()
    if not path.is_file():
        raise SettingsError(f"data {name!r}: there is no file {module!r}")
    # Under its own name if that is free, so that worker processes can be told of its classes.
    own = path.stem if path.stem not in sys.modules else f"edl_data_{path.stem}"
    spec = importlib.util.spec_from_file_location(own, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # as `python FILE` does, so that it finds its neighbours
    sys.modules[own] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def open_samples(
    name: str, wanted: Mapping[str, str], ids: str | None, workers: int, *, sequences: bool = False
) -> LabelDataset:
    """Open the data set that the function `name` returns.

    Args:
        name: see `open_data`.
        wanted: names to keys.
        ids: see `open_data`.
        workers: see `open_data`.
        sequences: see `open_data`.

    Raises:
        SettingsError: there is no such function, or it returns no samples.
    """
    found = _find(name)
    data = _made(found)
    if type(data).__name__ == "DataLoader":
        raise SettingsError(f"data {name!r} is a DataLoader: return the Dataset, and load it with --workers N")
    fields = {
        key: _Field(
            part,
            int(part) if part.isdecimal() else at if part == key else None,
            alone=len(wanted) == 1,
            sequences=sequences,
        )
        for at, (key, part) in enumerate(wanted.items())
    }
    id_field = _Field(ids, int(ids) if ids.isdecimal() else None) if ids is not None else None
    if _is_indexed(data) and id_field is None:
        return SequenceData(data, fields, workers, sequences=sequences)
    if workers:
        raise SettingsError(
            f"--workers {workers}: data {name!r} must be indexed, and no --ids be taken from its samples"
        )
    if _is_indexed(data):
        return IterableData(lambda: (data[at] for at in range(len(data))), fields, id_field, sequences=sequences)
    if not hasattr(data, "__iter__"):
        raise SettingsError(f"data {name!r} is a {type(data).__name__}: expected samples by index, or an iterable")
    again = itertools.chain([data], (_made(found) for _ in itertools.count()))
    return IterableData(lambda: next(again), fields, id_field, sequences=sequences)


def _made(found: Any) -> Any:
    """Return what a factory returns; a data set that is there already as it is."""
    is_data = not isinstance(found, type) and (hasattr(found, "__getitem__") or hasattr(found, "__iter__"))
    return found if is_data or not callable(found) else found()


def _is_indexed(data: Any) -> bool:
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and isinstance(data, torch_data.IterableDataset):
        return False  # it has `__getitem__` all the same, which raises
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, Mapping)
