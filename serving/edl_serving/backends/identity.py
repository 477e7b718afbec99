"""The version of a model that Python code makes, where nobody names one: a hash of all that can be known of it.

Into it go

- the source of the user's modules: the one that was named, those that it and its imports import by name, and whatever
  else of the user's ran meanwhile, as by `importlib.import_module` and `runpy.run_path`;
- numbers in those modules' names, alone, and in lists, dictionaries and the like;
- arrays, tensors and bytes that can be reached from the model, and from those modules' names: through attributes,
  closures, lists and dictionaries;
- the content of files that were read while the modules were imported and the factory ran, and of those that its
  options name.

No paths, times or addresses, so the same model has the same version on each host. What cannot be known: weights that
are loaded later, at the first call, and those that only native code sees; and which versions of libraries compute.
"""

from __future__ import annotations

import array
import ast
import contextlib
import functools
import importlib.util
import logging
import operator
import os
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import BuiltinMethodType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np

from edl_serving.backends.numbers import globals_of, numbers_in
from edl_serving.backends.opened import code_read, files_read, is_library
from edl_serving.backends.source import ModelSource, digest
from edl_serving.backends.target import module_of

__all__ = ["code_of", "identity", "read_by", "tensors_in", "users_modules"]

_log = logging.getLogger(__name__)

_OWN = ("edl", "edl_serving")
_MOST_NAMES = 8
_PLAIN = (str, int, float, complex, bool, type(None), np.generic)
_ENVIRONMENT = type(os.environ)  # holds bytes, of the process and not of the model


def identity(source: ModelSource, model: Any) -> str:
    """The version of `model`, which the code that `source` names has just made. Says in the log what it is made of."""
    modules = users_modules(source)
    read = read_by(source, modules)
    arrays = 0

    def parts() -> Iterator[bytes | memoryview | Path]:  # one at a time: a tensor's may be a copy
        nonlocal arrays
        yield from [*code_of(source, modules), *read]
        for array_parts in tensors_in([model], modules):
            arrays += 1
            yield from array_parts

    version = digest(parts())
    names = [path.name for path in [*_files(modules), *read.values()]] or ["no file"]
    _log.info(
        "version %s is a hash of %s and %d arrays; if the model loads weights later, or in native code, name them with "
        "--model-version",
        version,
        ", ".join([*names[:_MOST_NAMES], *([f"{len(names) - _MOST_NAMES} more"] if names[_MOST_NAMES:] else [])]),
        arrays,
    )
    return version


def code_of(source: ModelSource, modules: list[ModuleType]) -> list[bytes | Path]:
    """What is named, its settings, and the source of the user's modules with the numbers in them, for `digest`."""
    return [source.target.rpartition(":")[2].encode(), source.settings(), *_files(modules), *numbers_in(modules)]


def read_by(source: ModelSource, modules: list[ModuleType]) -> dict[bytes, Path]:
    """The files that were read while the model was imported and built, by a hash of each, in its order: of no path.

    With source that ran without being one of the modules.
    """
    known = {os.path.realpath(file) for file in _files(modules)}
    ran = [Path(file) for file in code_read(source.module) if file not in known and not _is_own(file, source.package)]
    files = [*files_read(source.module), *files_read(source.call), *ran]
    return dict(sorted((digest([file]).encode(), file) for file in files))


def _files(modules: list[ModuleType]) -> list[Path]:
    files = [Path(module.__file__) for module in modules if module.__file__ is not None]
    return [file for file in files if file.is_file()]


def _is_own(file: str, package: str) -> bool:
    """Whether a source file is this project's, and the model is not."""
    folders = [folder for name in _OWN if name != package for folder in getattr(sys.modules.get(name), "__path__", ())]
    return file.startswith(tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in folders))


# Modules


def users_modules(source: ModelSource) -> list[ModuleType]:
    """The module that was named and those of the user's that it imports, directly or not, in the order of imports.

    Then those that ran without being named in an import, by name.
    """
    root = module_of(source.target)
    own = root.__name__.partition(".")[0]

    def is_users(module: ModuleType | None) -> bool:
        file, top = getattr(module, "__file__", None), getattr(module, "__name__", "").partition(".")[0]
        return file is not None and (top == own or (top not in _OWN and not is_library(file)))

    found: dict[str, ModuleType] = {}

    def find(module: ModuleType) -> None:
        found[module.__name__] = module
        waiting = [module]
        while waiting:
            for name in _imported_by(waiting.pop(0)):
                imported = sys.modules.get(name)
                if imported is not None and name not in found and is_users(imported):
                    found[name] = imported
                    waiting.append(imported)

    find(root)
    for module in _running(set(code_read(source.module))):
        if module.__name__ not in found and is_users(module):
            find(module)
    return list(found.values())


def _running(files: set[str]) -> list[ModuleType]:
    """The modules that source files have become, by name: in which order they are imported may be that of a folder."""
    # Where a file is two modules, as a script that was imported too, they have the same source: both count.
    return [
        module
        for _, module in sorted(sys.modules.items())
        if isinstance(file := getattr(module, "__file__", None), str) and os.path.realpath(file) in files
    ]


def _imported_by(module: ModuleType) -> list[str]:
    """Names of the modules that a module's source imports, and of the packages around it and them."""
    found = dict.fromkeys(_with_packages(module.__name__))
    try:
        tree = ast.parse(Path(module.__file__ or "").read_bytes())
    except (OSError, SyntaxError, ValueError):
        return list(found)  # compiled, or gone
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            try:
                base = importlib.util.resolve_name("." * node.level + (node.module or ""), module.__package__)
            except ImportError:
                continue
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        found.update(dict.fromkeys(part for name in names for part in _with_packages(name)))
    return list(found)


def _with_packages(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


# Values


def tensors_in(roots: list[Any], modules: list[ModuleType]) -> Iterator[list[bytes | memoryview]]:
    """Type, shape and bytes of each array and tensor that can be reached from `roots` or is in the user's modules."""
    names = {module.__name__ for module in modules}
    seen: dict[int, Any] = {}  # holds what it has seen, or another object could get the same address
    unread: dict[str, None] = {}
    waiting = [*reversed([*roots, *map(globals_of, modules)])]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (*_PLAIN, _ENVIRONMENT, ModuleType, logging.Logger)) or id(value) in seen:
            continue
        seen[id(value)] = value
        parts = _content(value, unread)
        if parts is not None:
            yield parts
        else:
            waiting += reversed(list(_within(value, names)))
    if unread:
        _log.warning(
            "the version does not tell the values of %s, which cannot be read; name them with --model-version",
            ", ".join(unread),
        )


def _content(value: Any, unread: dict[str, None]) -> list[bytes | memoryview] | None:
    """What there is to hash of an array, of any framework; None for something else.

    Of a tensor that cannot be read that is its type, which is added to `unread`.
    """
    if type(value) in (bytes, bytearray):  # a subclass may be a secret of the process, as multiprocessing's is
        return [b"bytes", bytes(value)]
    if isinstance(value, array.array):
        return [f"array {value.typecode}".encode(), value.tobytes()]
    if isinstance(value, memoryview):
        return [f"memoryview {value.format}".encode(), value.tobytes()]
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        try:
            return _of_tensor(torch, value)
        except Exception:  # noqa: BLE001 - without sizes yet, nested, or a subclass, which may raise anything
            name = f"{type(value).__module__}.{type(value).__qualname__}"
            unread[name] = None
            return [f"unread {name}".encode()]
    if not hasattr(type(value), "__array__") or not hasattr(type(value), "dtype"):
        return None
    try:
        values = np.asarray(value)
    except Exception:  # noqa: BLE001 - an object of the user's, which then is no array to us, whatever it raised
        return None
    if values.dtype.hasobject:
        return None
    head = f"{_dtype(values.dtype)} {values.shape}".encode()
    parts: list[bytes | memoryview] = [head, np.ascontiguousarray(values).reshape(-1).view(np.uint8).data]
    if isinstance(value, np.ma.MaskedArray):
        parts += [b"masked", np.ma.getmaskarray(value).tobytes(), np.asarray(value.fill_value).tobytes()]
    return parts


def _dtype(dtype: np.dtype[Any]) -> str:
    """What an array's bytes mean: of a structure, with the names of its fields."""
    if dtype.subdtype is not None:
        return f"{_dtype(dtype.base)}{dtype.shape}"
    fields = [(name, _dtype(dtype[name])) for name in dtype.names or ()]
    return f"{dtype.str}{fields or ''}"


def _of_tensor(torch: Any, tensor: Any) -> list[bytes | memoryview]:
    head = f"{tensor.dtype} {list(tensor.shape)}".encode()
    if tensor.is_meta:
        return [head]
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    plain = plain.dequantize() if plain.is_quantized else plain.to_dense() if plain.layout != torch.strided else plain
    flat = plain.contiguous().as_strided((plain.numel(),), (1,))  # a single element may have any stride until here
    # Any type's bytes, bfloat16's as well, which numpy does not know.
    return [head, flat.view(torch.uint8).numpy().data]


def _within(value: Any, modules: set[str]) -> Iterator[Any]:
    """What else an object leads to."""
    torch = sys.modules.get("torch")
    if isinstance(value, dict):
        entries = list(dict.items(value))  # a subclass might load something
        if all(isinstance(key, str) for key, _ in entries):
            entries.sort(key=operator.itemgetter(0))  # readers of files do not all give the same order each time
        yield from (entry for _, entry in entries)
    elif isinstance(value, (list, tuple, deque)):
        yield from value
    elif isinstance(value, (set, frozenset)):  # of anything else, the order differs from process to process
        yield from sorted(entry for entry in value if type(entry) is bytes)
    elif isinstance(value, np.ndarray):  # of objects
        yield from value.reshape(-1).tolist()
    elif isinstance(value, FunctionType):
        yield from (value.__defaults__, value.__kwdefaults__, value.__dict__)
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # not set yet
                yield cell.cell_contents
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, BuiltinMethodType):
        yield value.__self__
    elif isinstance(value, type):
        if value.__module__ in modules:
            yield {name: entry for name, entry in vars(value).items() if not name.startswith("__")}
            yield from value.__bases__
    elif torch is not None and isinstance(value, torch.jit.ScriptModule):
        yield value.state_dict()
    else:
        yield getattr(value, "__dict__", None)
        for kind in type(value).__mro__:
            for slot in vars(kind).values():
                if isinstance(slot, MemberDescriptorType):
                    with contextlib.suppress(AttributeError):  # not set
                        yield slot.__get__(value, kind)
        yield type(value)
