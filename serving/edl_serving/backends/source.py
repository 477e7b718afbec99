"""Defines `ModelSource`, the model described by the command line; hashes files, and imports `package.module:name`."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from edl.errors import SettingsError
from edl.quoting import did_you_mean

DEFAULT_MAX_TOKENS = 8192
"""Tokens in a batch of sequences: enough to keep a GPU busy, and twice the length of long training sequences."""


class WeightsVersion(str):
    """A hash of weights and code. It has its own type, because a user's version may look like a hash."""

    __slots__ = ()


@dataclass(frozen=True)
class ModelSource:
    """A model as described by the flags of `edl serve`; the fields have the flags' names.

    `kind` is the flag that names the model, a key of `MODEL_LOADERS`, and `target` is the flag's value. A field that is
    None, empty or False was not given.
    """

    kind: str
    target: str
    checkpoint: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    sample: str | None = None
    device: str | None = None
    threads: int | None = None
    autocast: str | None = None
    normalize: str | None = None
    version: str | None = None
    task: str | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    dtype: str | None = None
    packing: bool = False

    @property
    def package(self) -> str:
        return top_name(self.target.rpartition(":")[0])

    def settings(self) -> bytes:
        """Return the settings, part of the version, that change a model's outputs but are not in its weights.

        An option whose value is the path of a file or folder is hashed by the content, not by the path. The order of
        inputs and outputs counts, because a model may take and return them by position.
        """
        options = [(key, _content(value)) for key, value in sorted(self.options.items())]
        names = self.inputs or (_sample_names(self.sample) if self.sample else ())
        return repr((options, self.autocast, self.normalize, names, self.outputs)).encode()


def top_name(module: str) -> str:
    """Return the name of a module's top-level package, or a file's name without its suffix."""
    return Path(module).stem if module.endswith(".py") else module.partition(".")[0]


def existing_file(path: str, flag: str) -> Path:
    found = Path(path).expanduser()
    if not found.is_file():
        raise SettingsError(f"{flag}: file {str(found)!r} does not exist (in {Path.cwd()})")
    return found


def _sample_names(path: str) -> tuple[str, ...]:
    with np.load(existing_file(path, "--sample"), allow_pickle=False) as sample:
        return tuple(sample.files)


def digest(parts: Iterable[bytes | memoryview | Path]) -> WeightsVersion:
    """Return a version: 16 hexadecimal digits of the SHA-256 of bytes and files' contents."""
    sha = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            with part.open("rb") as file:
                while block := file.read(1 << 20):
                    sha.update(block)
        else:
            sha.update(part)
        sha.update(b"\0")
    return WeightsVersion(sha.hexdigest()[:16])


def _content(value: Any) -> Any:
    try:
        path = Path(value).expanduser() if isinstance(value, str) and value else None
        if path is None or not path.exists():
            return value
        return f"folder {_folder(path)}" if path.is_dir() else f"file {digest([path])}" if path.is_file() else value
    except (OSError, ValueError, RuntimeError):  # not a valid path, or a file that this process cannot read
        return value


def _folder(path: Path) -> str:
    """Hash the names and contents of the files in a folder, except hidden files and caches that tools leave there."""
    parts: list[bytes | Path] = []
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if not _by_tools(name))
        for name in sorted(name for name in files if not _by_tools(name)):
            file = Path(folder, name)
            if file.is_file():
                parts += [file.relative_to(path).as_posix().encode(), file]
    return digest(parts)


def _by_tools(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


_loaded: dict[str, ModuleType] = {}


def import_target(target: str, flag: str) -> Any:
    """Import an object. The current folder is also searched for modules, as with `python -m`."""
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
    return _loaded[target.rpartition(":")[0]]


def _load_file(where: str, flag: str) -> ModuleType:
    path = Path(where).expanduser().resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise SettingsError(f"{flag}: file {where!r} does not exist (in {Path.cwd()})")
    _search_first(path.parent)  # so that the file can import its neighbours, as when Python runs it
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look up an object's module here
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
            "to name a file, include its suffix: path/file.py:name"
        ) from exc


def _search_first(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def is_library(file: str) -> bool:
    """Return whether a source file belongs to Python or to an installed package, rather than to the user."""
    return file.startswith(_library_folders())


def in_package(file: str, package: str) -> bool:
    folders = getattr(sys.modules.get(package), "__path__", ())
    return file.startswith(tuple(f"{folder}{os.sep}" for folder in folders))


@functools.cache
def _library_folders() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {*map(sysconfig.get_path, names), *site.getsitepackages(), site.getusersitepackages()}
    folders |= {folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")}
    folders |= {os.path.realpath(folder) for folder in folders}
    return ("<", *(f"{folder}{os.sep}" for folder in sorted(folders)))
