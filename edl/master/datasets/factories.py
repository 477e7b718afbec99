"""Finds what a function of the user's makes, by `MODULE:FACTORY` or `FILE.py:FACTORY`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any, Final

from edl.errors import SettingsError
from edl.master.datasets.growth import Source
from edl.quoting import quote

__all__ = ["EXPECTED", "make_samples"]

EXPECTED: Final = (
    "expected range:SIZE, lines:PATH, csv:PATH, parquet:PATH, files:PATH, follow:PATH, MODULE:FACTORY, FILE.py:FACTORY"
)


def make_samples(name: str) -> Any:
    """Return what the user's function `MODULE:FACTORY` or `FILE.py:FACTORY` returns.

    Raises:
        SettingsError: there is no such function.
    """
    module, colon, attribute = name.rpartition(":")
    if not colon or not module or not attribute:
        raise SettingsError(f"data {quote(name)}: {EXPECTED}")
    found = getattr(_import(name, module), attribute, None)
    if found is None:
        raise SettingsError(f"data {quote(name)}: {module} has no {attribute!r}")
    is_made = not isinstance(found, type) and (hasattr(found, "__getitem__") or isinstance(found, Source))
    return found if is_made or not callable(found) else found()


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
