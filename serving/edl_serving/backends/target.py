"""Imports of what `package.module:name` and `path/file.py:name` name."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import site
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from edl.errors import SettingsError
from edl.quoting import did_you_mean

__all__ = ["in_package", "is_library", "module_of", "import_target"]

_loaded: dict[str, ModuleType] = {}


def import_target(target: str, flag: str) -> Any:
    """Import an object; the current folder counts as a place for modules, as with `python -m`.

    Args:
        target: `package.module:name` or `path/file.py:name`; a name may have dots.
        flag: named in errors.

    Returns:
        The object.

    Raises:
        SettingsError: no such module, file or name.
        Exception: what the user's module raised while it was imported.
    """
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise SettingsError(f"{flag} {target!r}: expected package.module:name or path/file.py:name")
    found: Any = _load_file(where, flag) if where.endswith(".py") else _load_module(where, flag)
    _loaded[where] = found
    at = where
    for part in name.split("."):
        if not hasattr(found, part):
            near = did_you_mean(part, [known for known in dir(found) if not known.startswith("_")])
            raise SettingsError(f"{flag} {target!r}: {at} has no {part!r}{near}")
        found, at = getattr(found, part), f"{at}.{part}"
    return found


def module_of(target: str) -> ModuleType:
    """Return the module in which `import_target` found `target` last."""
    return _loaded[target.rpartition(":")[0]]


def _load_file(where: str, flag: str) -> ModuleType:
    path = Path(where).expanduser().resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise SettingsError(f"{flag}: there is no file {where!r} (in {Path.cwd()})")
    _search_first(path.parent)  # modules beside the file, as when Python runs it
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickles look their module up
    spec.loader.exec_module(module)
    return module


def _load_module(where: str, flag: str) -> ModuleType:
    _search_first(Path.cwd())
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as exc:
        missing = exc.name or ""
        if where != missing and not where.startswith(f"{missing}."):
            raise SettingsError(f"{flag}: {where!r} imports {missing!r}, which is not installed") from exc
        raise SettingsError(
            f"{flag}: there is no module {missing!r}, neither installed nor in {Path.cwd()}; "
            "a file is named with its suffix: path/file.py:name"
        ) from exc


def _search_first(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def is_library(file: str) -> bool:
    """Return whether a source file belongs to Python or to an installed package, rather than to the user."""
    return file.startswith(_library_folders())


def in_package(file: str, package: str) -> bool:
    """Return whether a source file lies in the folders of an imported package."""
    folders = getattr(sys.modules.get(package), "__path__", ())
    return file.startswith(tuple(f"{folder}{os.sep}" for folder in folders))


@functools.cache
def _library_folders() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {*map(sysconfig.get_path, names), *site.getsitepackages(), site.getusersitepackages()}
    folders |= {folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")}
    folders |= {os.path.realpath(folder) for folder in folders}
    return ("<", *(f"{folder}{os.sep}" for folder in sorted(folders)))
