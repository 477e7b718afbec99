"""Which files a model's code reads while it is imported and built: what it was made of, as far as Python sees it.

Files that it writes meanwhile, or renames, count as well: code that computes something once and keeps it in a file
would have another version from its second start on.

Source that is run counts apart, however it is: by an import statement, `importlib`, `runpy` or `exec`.

Python reports each file that is opened to audit hooks (PEP 578). Files opened by native code, as by `safetensors` or
`onnxruntime`, are not seen.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import runpy
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["code_read", "files_read", "is_library", "is_of", "reading"]

_SOURCE = (".py", ".pyc")
_NATIVE = (".so", ".pyd")
_OF_THE_HOST = ("/proc/", "/sys/", "/dev/", "/run/", "/etc/")
_IMPORTERS = ("<frozen importlib", "<frozen runpy", runpy.__file__)
_read: dict[str, dict[str, None]] = {}
_code: dict[str, dict[str, None]] = {}
_now = ""  # a key of both; empty while nothing is noted
_package = ""
_hooked = False


@contextlib.contextmanager
def reading(what: str, package: str) -> Iterator[None]:
    """Note the files that the user's code reads or makes meanwhile, for `files_read`.

    A module is executed by the first import only, so notes of the same `what` add up.

    Args:
        what: for `files_read` and `code_read`; begins with the module that was named.
        package: the top package or module of the user's code, wherever it is installed.
    """
    global _now, _package, _hooked
    if not _hooked:  # once and for all: a hook cannot be removed
        sys.addaudithook(_hook)
        _hooked = True
    before = _now, _package
    _now, _package = what, package
    _read.setdefault(what, {})
    _code.setdefault(what, {})
    try:
        yield
    finally:
        _now, _package = before


def files_read(what: str) -> list[Path]:
    """The files noted for `what` that are still there."""
    return [path for path in map(Path, _read.get(what, ())) if path.is_file()]


def code_read(module: str) -> list[str]:
    """Real paths of the source that ran while a module was imported and its factories were called, without libraries'.

    A factory's second call, with other options, may use what the first one imported, so all of them count.
    """
    noted = [files for what, files in _code.items() if what == module or what.startswith(f"{module}:")]
    return [
        file
        for file in dict.fromkeys(os.path.realpath(name) for files in noted for name in files)
        if Path(file).is_file()
    ]


def is_of(frame: FrameType, package: str) -> bool:
    """Whether a frame runs code of a package or module, by its top name."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] == package


def is_library(file: str) -> bool:
    """Whether a source file belongs to Python or to an installed package, rather than to the user."""
    return file.startswith(_library_folders())


@functools.cache
def _library_folders() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {*map(sysconfig.get_path, names), *site.getsitepackages(), site.getusersitepackages()}
    folders |= {folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")}
    folders |= {os.path.realpath(folder) for folder in folders}
    return ("<", *(f"{folder}{os.sep}" for folder in sorted(folders)))  # "<frozen os>" and its like


def _hook(event: str, args: tuple[Any, ...]) -> None:
    now = _now  # once, as another thread may be opening files while a start ends
    if not now or event not in ("open", "os.rename"):
        return
    path = args[0] if event == "open" and _counts(*args[1:]) else args[1] if event == "os.rename" else -1
    if isinstance(path, int):
        return
    file = str(Path.cwd() / os.fsdecode(path))
    if file.startswith(_OF_THE_HOST) or (is_library(file) and not _in_package(file)):
        return
    if file.endswith(_SOURCE):
        if event == "open" and _is_run():
            _code[now][_source_of(file)] = None
    elif not file.endswith(_NATIVE) and _asked_by_user():
        _read[now][file] = None


def _counts(mode: str | None, flags: Any) -> bool:
    """Whether a file that is opened so is read, or made anew: what the first start writes, the next ones will read.

    Files that are appended to are logs.
    """
    if mode is not None:
        return "a" not in mode
    return not (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _in_package(file: str) -> bool:
    """Whether a file lies with the user's code, which may be installed."""
    folders = getattr(sys.modules.get(_package), "__path__", ())
    return file.startswith(tuple(f"{folder}{os.sep}" for folder in folders))


def _source_of(file: str) -> str:
    try:
        return importlib.util.source_from_cache(file) if file.endswith(".pyc") else file
    except ValueError:  # it lies where the source would
        return file


def _is_run() -> bool:
    """Whether source is opened to be imported or run, or by the user's own code.

    What libraries open are files that they generate, compilers' mostly, and differs from host to host.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_IMPORTERS) or not is_library(name) or is_of(frame, _package):
            return True
        if "site-packages" in name or "dist-packages" in name:
            return False
        frame = frame.f_back
    return False


def _asked_by_user() -> bool:
    """Whether the user's code wants the file, if through a library, and not a library that is being imported.

    The latter read what differs from host to host: settings, lists of fonts and processors.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith("<frozen importlib"):
            return False
        if not is_library(name) or is_of(frame, _package):
            return True
        frame = frame.f_back
    return True
