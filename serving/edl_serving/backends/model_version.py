"""The version of a model that Python code makes, where the user names none: a hash of its weights and code.

Hashed are

- the weights: parameters, buffers and attributes of a PyTorch module, or what a function's closure and defaults hold;
- the source of the user's modules: the module that is named, and those that it imports;
- the arrays, numbers and text in the globals of those modules.

A version that stays the same although the model has changed would let students reuse labels of the old model. So where
a model holds anything else (an object, a container that is filled later, code without source), its version is unknown
until `--model-version` names it. Not seen, and for `--model-version` as well: files and environment variables that a
function reads when it is called, and the versions of installed libraries.
"""

from __future__ import annotations

import ast
import enum
import hashlib
import importlib.util
import logging
import os
import re
import sys
import types
import weakref
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from edl_serving.backends.source import ModelSource, top_name
from edl_serving.backends.target import in_package, is_library

__all__ = ["compute_version"]

_log = logging.getLogger(__name__)

_SCALARS = (bool, int, float, complex, str, bytes, type(None), range)
_NAMED = (re.Pattern, np.dtype, np.ufunc, types.GenericAlias, types.UnionType)
"""Types whose values are told apart by their text."""
_STATELESS = (logging.Logger, PurePath, weakref.ReferenceType, type(os.environ))
"""Types of which no value is part of a model: paths and environments differ between hosts that serve the same model."""
_SET_BY_PYTHON = {
    *vars(types.ModuleType("")),
    *("__annotations__", "__builtins__", "__cached__", "__file__", "__path__", "__warningregistry__"),
}
_OWN_PACKAGES = ("edl", "edl_serving")


class _UnknownStateError(Exception):
    """A model holds something that cannot be hashed; the message names it."""


def compute_version(source: ModelSource, module: types.ModuleType, model: Any) -> str:
    """Hash the model that the user's code has made.

    Args:
        source: where the model comes from; its options are part of the version.
        module: the module that `source` names.
        model: a function over arrays or a PyTorch module, with its weights loaded.

    Returns:
        16 hexadecimal digits; empty, with a warning in the log that says why, if the model holds what cannot be hashed.
    """
    content = _Content(module)
    try:
        content.add("the function's name", source.target.rpartition(":")[2])
        content.update(source.settings())
        content.queue_module(module)
        content.add("the model", model)
        content.add_modules()
    except Exception as exc:  # noqa: BLE001 - objects of the user's may raise anything when they are looked at
        reason = str(exc) if isinstance(exc, _UnknownStateError) else f"{type(exc).__name__}: {exc}"
        _log.warning(
            "the version of the model is unknown: %s. Students keep no labels of it in caches: name the version by "
            "--model-version, and another one with each change",
            reason,
        )
        return ""
    return content.digest()


class _Content:
    """A hash of values, and of the user's modules that they lead to.

    Args:
        module: the module that the user named; its package is the user's even where it is installed.
    """

    def __init__(self, module: types.ModuleType) -> None:
        self._named = module
        self._package = top_name(module.__name__)
        self._hash = hashlib.sha256()
        self._modules: dict[str, types.ModuleType] = {}
        self._seen: dict[int, tuple[int, Any]] = {}  # by address, which no other object gets while this one is held

    def digest(self) -> str:
        return self._hash.hexdigest()[:16]

    def update(self, *parts: bytes | memoryview) -> None:
        for part in parts:
            self._hash.update(len(part).to_bytes(8, "little"))  # so that no two lists of parts have the same bytes
            self._hash.update(part)

    def queue_module(self, module: types.ModuleType | None) -> None:
        """Have `add_modules` hash a module of the user's, with the packages around it; leave out installed ones."""
        if module is not None and self._is_users(module):
            self._modules.setdefault(module.__name__, module)
            self.queue_module(sys.modules.get(module.__name__.rpartition(".")[0]))

    def add_modules(self) -> None:
        """Hash source and globals of the queued modules, and of those that they lead to."""
        done: set[str] = set()
        while waiting := [name for name in self._modules if name not in done]:
            for name in waiting:
                done.add(name)
                self._add_source(self._modules[name])
                for variable, value in vars(self._modules[name]).items():
                    submodule = isinstance(value, types.ModuleType) and value.__name__ == f"{name}.{variable}"
                    if variable not in _SET_BY_PYTHON and not submodule:  # that counts if an import names it
                        self.update(variable.encode())
                        self._add_variable(f"the global {name}.{variable}", value)

    def _add_variable(self, where: str, value: Any) -> None:
        if type(value) in (list, dict, set) and not value:
            raise _UnknownStateError(f"{where} is empty, and may be filled later")
        self.add(where, value)

    def add(self, where: str, value: Any) -> None:
        """Hash a value.

        Args:
            where: names the value in errors.
            value: any object.

        Raises:
            _UnknownStateError: the value, or something that it holds, cannot be hashed.
        """
        torch = sys.modules.get("torch")
        kind = type(value)
        if kind in _SCALARS or isinstance(value, np.generic):
            if not (kind is str and _is_path(value)):
                self.update(kind.__name__.encode(), repr(value).encode())
        elif isinstance(value, _STATELESS) or kind.__module__ in ("typing", "__future__"):
            self.update(kind.__name__.encode())
        elif torch is not None and isinstance(value, torch.device):
            self.update(b"device")  # which differs between hosts that serve the same model
        elif id(value) in self._seen:
            self.update(f"object {self._seen[id(value)][0]}".encode())
        elif isinstance(value, types.ModuleType):
            self.queue_module(value)
        elif isinstance(value, _NAMED):
            self.update(kind.__name__.encode(), str(value).encode())
        elif isinstance(value, enum.Enum):
            self.update(kind.__name__.encode(), value.name.encode())
        elif torch is not None and isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            self.update(str(value).encode())
        else:
            self._seen[id(value)] = len(self._seen), value
            self._add_object(where, value, torch)

    def _add_object(self, where: str, value: Any, torch: Any) -> None:
        self.update(type(value).__name__.encode())
        if isinstance(value, (list, tuple, dict)):
            entries = list(dict.items(value)) if isinstance(value, dict) else value
            self.update(str(len(entries)).encode())
            for entry in entries:
                for part in entry if isinstance(value, dict) else (entry,):
                    self.add(where, part)
        elif isinstance(value, (set, frozenset)) and all(type(entry) in _SCALARS for entry in value):
            self.update(*sorted(repr(entry).encode() for entry in value))
        elif type(value) is np.ndarray and not value.dtype.hasobject:
            self.update(repr(value.dtype).encode(), str(value.shape).encode(), _bytes_of(value))
        elif isinstance(value, type):
            self._add_class(value)
        elif self._is_library_object(value):
            self.update(f"{value.__module__}.{value.__qualname__}".encode())
        elif isinstance(value, types.BuiltinFunctionType) and isinstance(
            value.__self__, types.ModuleType | type | None
        ):
            self.update(value.__qualname__.encode())
        elif isinstance(value, types.FunctionType):
            self._add_function(where, value)
        elif torch is not None and isinstance(value, torch.Tensor):
            self.update(*_tensor_parts(where, torch, value))
        elif torch is not None and isinstance(value, torch.nn.Module) and not isinstance(value, torch.jit.ScriptModule):
            self._add_torch_module(where, torch, value)
        else:
            raise _UnknownStateError(f"{where} is or holds a {type(value).__module__}.{type(value).__qualname__}")

    def _add_function(self, where: str, function: types.FunctionType) -> None:
        if self._is_library(function.__code__.co_filename):
            if hasattr(function, "__wrapped__"):  # by a decorator of a library, such as torch.no_grad()
                self.add(where, function.__wrapped__)
                return
        else:
            module = self._module(function.__module__ or "")
            if module is None or vars(module) is not function.__globals__:
                raise _UnknownStateError(f"{where} is a function of no module ({function.__code__.co_filename})")
            self.queue_module(module)
        self.update(function.__qualname__.encode())
        self.add(where, function.__dict__)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._add_variable(f"a default of {function.__qualname__}", value)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            held = f"{name!r}, in the closure of {function.__qualname__},"
            try:
                self._add_variable(held, cell.cell_contents)
            except ValueError:
                raise _UnknownStateError(f"{held} is not set yet") from None

    def _add_class(self, kind: type) -> None:
        self.update(f"{kind.__module__}.{kind.__qualname__}".encode())
        module = self._module(kind.__module__)
        if module is None or not self._is_users(module) or issubclass(kind, enum.Enum):
            return
        self.queue_module(module)
        for base in kind.__bases__:
            self.add(kind.__qualname__, base)
        for name, value in vars(kind).items():
            if isinstance(value, types.FunctionType):
                self.queue_module(sys.modules.get(value.__module__ or ""))
            elif not name.startswith(("__", "_abc_")) and not hasattr(type(value), "__get__"):  # a property or the like
                self.update(name.encode())
                self.add(f"{kind.__qualname__}.{name}", value)

    def _add_torch_module(self, where: str, torch: Any, model: Any) -> None:
        plain = vars(torch.nn.Module())
        for path, part in model.named_modules():
            self.add(where, type(part))
            self.update(path.encode())
            for name, value in vars(part).items():
                held = f"{name!r} of {path or type(part).__name__}"
                if name.endswith("_hooks") and value:
                    raise _UnknownStateError(f"{held} are code that EDL does not know")
                if name in ("_parameters", "_buffers") or name not in plain:
                    self.update(name.encode())
                    self.add(held, value)

    def _add_source(self, module: types.ModuleType) -> None:
        try:
            text = Path(module.__file__ or "").read_bytes()
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError):
            raise _UnknownStateError(f"module {module.__name__} has no source") from None
        self.update(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Global | ast.Nonlocal):
                raise _UnknownStateError(f"a function of {module.__name__} sets the variable {node.names[0]!r} later")
            for name in _imported_names(node, module.__package__):
                loaded = sys.modules.get(name)
                if loaded is not None:
                    self.queue_module(loaded)
                elif self._may_be_loaded_later(name):
                    raise _UnknownStateError(f"a function of {module.__name__} imports {name} later")

    def _may_be_loaded_later(self, name: str) -> bool:
        """Whether `name` is a module of the user's that is there and not loaded."""
        package = name.rpartition(".")[0]
        if package and package not in sys.modules:
            return self._may_be_loaded_later(package)
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return False
        return spec is not None and spec.has_location and not self._is_library(spec.origin or "")

    def _module(self, name: str) -> types.ModuleType | None:
        """The module of that name; a file that the user named may have the name of another module."""
        return self._modules.get(name) or sys.modules.get(name)

    def _is_users(self, module: types.ModuleType) -> bool:
        file = getattr(module, "__file__", None)
        return module is self._named or (file is not None and not self._is_library(file))

    def _is_library(self, file: str) -> bool:
        if file.startswith("<"):
            return file.startswith("<frozen ")  # other such names are those of `exec`
        if any(in_package(file, name) for name in _OWN_PACKAGES):
            return file != self._named.__file__
        return is_library(file) and not in_package(file, self._package)

    def _is_library_object(self, value: Any) -> bool:
        """Whether a value is what an installed module has under the value's own name, such as `numpy.dot`."""
        module = sys.modules.get(getattr(value, "__module__", None) or "")
        if module is None or self._is_users(module):
            return False
        found: Any = module
        for name in str(getattr(value, "__qualname__", "")).split("."):
            found = getattr(found, name, None)
        return found is value


def _imported_names(node: ast.AST, package: str | None) -> list[str]:
    """Modules that an import statement may name."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    try:
        base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
    except ImportError:
        return []
    return [base, *(f"{base}.{alias.name}" for alias in node.names)]


def _bytes_of(array: Any) -> memoryview:
    if not array.nbytes:
        return memoryview(b"")
    view: memoryview = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return view


def _tensor_parts(where: str, torch: Any, tensor: Any) -> Iterable[bytes | memoryview]:
    try:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            raise TypeError(f"no plain tensor, but a {type(tensor).__qualname__}, {tensor.layout}")
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        # As bytes, since numpy has no bfloat16. A tensor of one element may have any stride until here.
        flat = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data
        return f"{tensor.dtype} {list(tensor.shape)}".encode(), flat
    except Exception as exc:  # quantized, nested, on the meta device: what it is raised by differs
        raise _UnknownStateError(f"{where} is a tensor that cannot be read ({exc})") from exc


def _is_path(text: str) -> bool:
    """Whether a text is a place on this host, which may differ on others that serve the same model."""
    try:
        return Path(text).is_absolute() and Path(text).exists()
    except (OSError, ValueError):  # no path can be so long, or has a zero byte
        return False
