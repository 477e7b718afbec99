"""Computes the version of a model that Python code builds: a hash of its weights and code, if the user sets no version.

docs/teachers.md ("Versions") says what the hash covers. If the version stayed the same after the model had changed,
students would reuse labels of the old model. So if a model holds anything that the hash does not cover (an object, a
container that is filled later, code without source), its version is unknown until the user sets `--model-version`.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import enum
import functools
import hashlib
import importlib.util
import logging
import os
import re
import reprlib
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from edl_serving.backends.source import ModelSource, WeightsVersion, in_package, is_library, top_name

_log = logging.getLogger(__name__)


def compute_version(source: ModelSource, module: types.ModuleType, model: Any) -> str:
    """Return the hash of a model built by the user's code: 16 hex digits, or "" (logged) if a part cannot be hashed."""
    modules = UserModules(module)
    content = ContentHash(modules)
    try:
        content.add("the function's name", source.target.rpartition(":")[2])
        content.update(source.settings())
        modules.queue(module)
        content.add("the model", model)
        for found in modules.drain():
            content.update(modules.read_source(found))
            content.add_globals(found)
    except Exception as exc:  # noqa: BLE001 - the user's objects may raise anything when they are inspected
        reason = str(exc) if isinstance(exc, UnknownStateError) else f"{type(exc).__name__}: {exc}"
        _log.warning(
            "the version of the model is unknown: %s. Students do not cache its labels: set "
            "--model-version, and change it with each change of the model",
            reason,
        )
        return ""
    return WeightsVersion(content.digest())


_OWN_PACKAGES = ("edl", "edl_serving")


class UnknownStateError(Exception):
    """Raised if a model holds an object that cannot be hashed; the message identifies the object."""


class UserModules:
    """The user's modules that a model depends on, in the order in which they were found."""

    def __init__(self, named: types.ModuleType) -> None:
        self._named = named
        self._package = top_name(named.__name__)
        self._found: dict[str, types.ModuleType] = {}
        self._unread: deque[types.ModuleType] = deque()
        self._whole: set[str] = set()  # names of packages whose submodules are queued

    def queue(self, module: types.ModuleType | None, *, submodules: bool = True) -> None:
        """Queue a module that belongs to the user, and its parent packages, for `drain`; ignore installed modules."""
        if module is None:
            return
        if module.__name__ in (self._whole if submodules else self._found):
            self._check_name(module)
            return
        users = self.is_users(module)
        if users:
            self._check_name(module)
            if module.__name__ not in self._found:
                self._found[module.__name__] = module
                self._unread.append(module)
            self.queue(sys.modules.get(module.__name__.rpartition(".")[0]), submodules=False)
        if submodules and (users or self.is_namespace(module)):
            self._whole.add(module.__name__)
            for variable, value in list(vars(module).items()):
                if is_submodule(module, variable, value):
                    self.queue(value)

    def drain(self) -> Iterator[types.ModuleType]:
        """Yield each queued module once, including modules queued during the iteration."""
        while self._unread:
            yield self._unread.popleft()

    def find(self, name: str) -> types.ModuleType | None:
        """Find a module by name, first among the user's modules, since their names may equal those of others."""
        return self._found.get(name) or sys.modules.get(name)

    def read_source(self, module: types.ModuleType) -> bytes:
        """Return a module's source, and queue the modules that it imports."""
        try:
            text = Path(module.__file__ or "").read_bytes()
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError):
            raise UnknownStateError(f"module {module.__name__} has no source") from None
        for node in ast.walk(tree):
            if isinstance(node, ast.Global | ast.Nonlocal):
                raise UnknownStateError(f"a function of {module.__name__} sets the variable {node.names[0]!r} later")
            for name in _imported_names(node, module.__package__):
                loaded = sys.modules.get(name)
                if loaded is not None:
                    self.queue(loaded)
                elif self._may_be_loaded_later(name):
                    raise UnknownStateError(f"a function of {module.__name__} imports {name} later")
        return text

    def is_users(self, module: types.ModuleType) -> bool:
        file = getattr(module, "__file__", None)
        return module is self._named or (file is not None and not self.is_library(file))

    def is_namespace(self, module: types.ModuleType) -> bool:
        """Return whether a module is a package of the user that has no `__init__.py`."""
        folders = list(getattr(module, "__path__", ()))
        if getattr(module, "__file__", None) is not None:
            return False
        return any(not self.is_library(f"{folder}{os.sep}") for folder in folders)

    def is_library(self, file: str) -> bool:
        if file.startswith("<"):
            return file.startswith("<frozen ")  # other names in angle brackets come from `exec`
        if any(in_package(file, name) for name in _OWN_PACKAGES):
            return file != self._named.__file__
        return is_library(file) and not in_package(file, self._package)

    def is_library_object(self, value: Any) -> bool:
        """Return whether an installed module holds this value, such as `numpy.dot`, under the value's own name."""
        module = sys.modules.get(getattr(value, "__module__", None) or "")
        if module is None or self.is_users(module):
            return False
        found: Any = module
        for name in str(getattr(value, "__qualname__", "")).split("."):
            found = getattr(found, name, None)
        return found is value

    def _check_name(self, module: types.ModuleType) -> None:
        if self._found.get(module.__name__, module) is not module:
            raise UnknownStateError(f"two modules have the name {module.__name__}")

    def _may_be_loaded_later(self, name: str) -> bool:
        """Return whether `name` is a module of the user that exists but has not been loaded yet."""
        package = name.rpartition(".")[0]
        if package and package not in sys.modules:
            return self._may_be_loaded_later(package)
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return False
        return spec is not None and spec.has_location and not self.is_library(spec.origin or "")


def is_submodule(module: types.ModuleType, variable: str, value: Any) -> bool:
    return isinstance(value, types.ModuleType) and value.__name__ == f"{module.__name__}.{variable}"


def _imported_names(node: ast.AST, package: str | None) -> list[str]:
    """Return the modules that an import statement may refer to."""
    if isinstance(node, ast.Import):  # without `as`, `import a.b` binds the name of the top package
        bound = [top_name(alias.name) for alias in node.names if not alias.asname]
        return [*(alias.name for alias in node.names), *bound]
    if not isinstance(node, ast.ImportFrom):
        return []
    try:
        base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
    except ImportError:
        return []
    return [base, *(f"{base}.{alias.name}" for alias in node.names)]


_SCALARS = (
    *(bool, int, float, complex, str, bytes, range),
    *(type(None), types.EllipsisType, types.NotImplementedType),
)
_NAMED = (np.dtype, types.GenericAlias, types.UnionType)
"""Types whose values are hashed by their text."""
_STATELESS = (logging.Logger, PurePath, type(os.environ))
"""Types whose values are not hashed, since paths and environments differ between hosts that serve the same model."""
_OF_BUILTIN_CLASSES = (
    *(types.MethodDescriptorType, types.ClassMethodDescriptorType),
    *(types.WrapperDescriptorType, types.GetSetDescriptorType),
)
_SET_BY_PYTHON = {
    *vars(types.ModuleType("")),
    *("__annotations__", "__builtins__", "__cached__", "__file__", "__path__", "__warningregistry__"),
}
_SET_ON_CLASSES = {
    *("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__", "__abstractmethods__"),
    *("__parameters__", "__orig_bases__", "__firstlineno__", "__static_attributes__", "_abc_impl"),
    *("__dataclass_fields__", "__dataclass_params__", "__match_args__"),
}
_SET_ON_ENUMS = {"__new__", *(name for name in vars(enum.Flag("_Sample", "A")) if not name.startswith("__"))}
_SET_ON_MEMBERS = {"_value_", "_name_", "_sort_order_", "__objclass__"}
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # addresses of objects in a repr, which differ between processes
_HEAP_TYPE = 1 << 9  # CPython's Py_TPFLAGS_HEAPTYPE: a type created at run time, for example by a class statement


class _WithoutSlots:
    """Has the `__basicsize__` of a class with all state in `vars`. Other classes are larger or have no `__dict__`."""


class ContentHash:
    """A hash of values."""

    def __init__(self, modules: UserModules) -> None:
        self._modules = modules
        self._hash = hashlib.sha256()
        self._seen: dict[int, tuple[int, Any]] = {}  # by address; holding the object keeps the address unique

    def digest(self) -> str:
        return self._hash.hexdigest()[:16]

    def update(self, *parts: bytes | memoryview) -> None:
        for part in parts:
            self._hash.update(len(part).to_bytes(8, "little"))  # otherwise different lists of parts could hash alike
            self._hash.update(part)

    def add_globals(self, module: types.ModuleType) -> None:
        """Hash the variables of a module, except its submodules and the variables that Python sets."""
        for variable, value in vars(module).items():
            if variable not in _SET_BY_PYTHON and not is_submodule(module, variable, value):
                self.update(variable.encode())
                self._add_variable(f"the global {module.__name__}.{variable}", value)

    def _add_variable(self, where: str, value: Any) -> None:
        if type(value) in (list, dict, set) and not value:
            raise UnknownStateError(f"{where} is empty, and may be filled later")
        self.add(where, value)

    def add(self, where: str, value: Any) -> None:
        """Hash a value; if it cannot be hashed, the error identifies it by `where`."""
        torch = sys.modules.get("torch")
        kind = type(value)
        if isinstance(value, np.generic) and not value.dtype.hasobject:
            self.update(kind.__name__.encode(), repr(value.dtype).encode(), value.tobytes())
        elif kind in _SCALARS:
            text = "a path" if kind is str and _is_path(value) else repr(value)
            self.update(kind.__name__.encode(), text.encode())
        elif isinstance(value, _STATELESS) or kind.__module__ == "__future__":
            self.update(kind.__name__.encode())
        elif kind.__module__ == "typing":
            self.update(kind.__name__.encode(), _ADDRESS.sub("", repr(value)).encode())
        elif torch is not None and isinstance(value, torch.device):
            self.update(b"device")  # the device itself differs between hosts that serve the same model
        elif id(value) in self._seen:
            self.update(f"object {self._seen[id(value)][0]}".encode())
        elif isinstance(value, types.ModuleType):
            self._add_module(where, value)
        elif isinstance(value, _NAMED):
            self.update(kind.__name__.encode(), str(value).encode())
        elif isinstance(value, re.Pattern):
            self.update(b"pattern", repr((value.pattern, value.flags)).encode())
        elif isinstance(value, weakref.ReferenceType):
            self.update(b"reference")
            self.add(where, value())
        elif isinstance(value, enum.Enum):
            self.update(str(value.name).encode())
            if isinstance(value, enum.Flag):
                self.add(where, value._value_)  # a combination has no name of its own
            self.add(where, kind)
        elif torch is not None and isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            self.update(str(value).encode())
        else:
            self._seen[id(value)] = len(self._seen), value
            self._add_object(where, value, torch)

    def _add_module(self, where: str, module: types.ModuleType) -> None:
        self.update(b"module", module.__name__.encode())
        self._modules.queue(module)
        if getattr(module, "__file__", None) is None and not self._modules.is_namespace(module):
            top = sys.modules.get(top_name(module.__name__))
            if sys.modules.get(module.__name__) is not module or top is None or self._modules.is_users(top):
                raise UnknownStateError(f"{where} is the module {module.__name__}, which has no file")

    def _add_object(self, where: str, value: Any, torch: Any) -> None:
        self.update(type(value).__name__.encode())
        if isinstance(value, (list, tuple, dict, set, frozenset)):
            self._add_container(where, value)
        elif isinstance(value, np.ufunc):
            self.update(_ufunc_name(where, value).encode())
        elif type(value) is np.ndarray and not value.dtype.hasobject:
            self.update(repr(value.dtype).encode(), str(value.shape).encode(), value.tobytes())
        elif isinstance(value, type):
            self._add_class(where, value)
        elif self._modules.is_library_object(value) or (
            isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, types.ModuleType | type | None)
        ):
            self.update(f"{value.__module__}.{value.__qualname__}".encode())
        elif isinstance(value, _OF_BUILTIN_CLASSES):
            self.update(value.__name__.encode())
            self.add(where, value.__objclass__)
        elif isinstance(value, types.FunctionType):
            self._add_function(where, value)
        elif torch is not None and isinstance(value, torch.Tensor):
            self.update(*_tensor_parts(where, torch, value))
            if attributes := vars(value):
                self.add(f"an attribute of {where}", attributes)
        elif torch is not None and isinstance(value, torch.nn.Module) and not isinstance(value, torch.jit.ScriptModule):
            self._add_torch_module(where, torch, value)
        elif (settings := _transformers_settings(value)) is not None:
            self.add(where, type(value))
            self.add(where, settings)
        else:
            raise UnknownStateError(f"{where} is or holds a {type(value).__module__}.{type(value).__qualname__}")

    def _add_container(self, where: str, value: Any) -> None:
        """Hash the entries of a container, and the attributes that a subclass adds."""
        kind = type(value)
        entries: list[Any]
        if isinstance(value, dict):
            entries = [part for entry in dict.items(value) for part in entry]
        elif isinstance(value, (set, frozenset)):
            if not all(type(entry) in _SCALARS for entry in value):
                raise UnknownStateError(f"{where} is or holds a {kind.__qualname__} of objects, which has no order")
            entries = sorted(value, key=lambda entry: (type(entry).__name__, repr(entry)))
        else:
            entries = list(list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value))
        self.update(str(len(entries)).encode())
        for entry in entries:
            self.add(where, entry)
        if kind in (list, tuple, dict, set, frozenset):
            return
        self.add(where, kind)
        _refuse_slots(where, kind)
        if isinstance(value, collections.defaultdict):
            self.add(where, value.default_factory)
        if attributes := getattr(value, "__dict__", None):
            self.add(where, attributes)

    def _add_function(self, where: str, function: types.FunctionType) -> None:
        by_library = self._modules.is_library(function.__code__.co_filename)
        if by_library:
            self.update(f"{function.__globals__.get('__name__')}".encode())
        else:
            module = self._modules.find(str(function.__globals__.get("__name__")))
            if module is None or vars(module) is not function.__globals__:
                raise UnknownStateError(f"{where} is a function of no module ({function.__code__.co_filename})")
            if os.path.realpath(function.__code__.co_filename) != os.path.realpath(module.__file__ or ""):
                raise UnknownStateError(f"{where} is code that is not in the file of {module.__name__}")
            self._modules.queue(module)
            self.update(_code_text(function.__code__).encode())
        self.update(function.__qualname__.encode(), function.__code__.co_name.encode())
        self.add(where, function.__dict__)
        self.add(where, list(function.__kwdefaults__ or ()))
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._add_variable(f"a default of {function.__qualname__}", value)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            held = f"{name!r}, in the closure of {function.__qualname__},"
            try:
                content = cell.cell_contents
            except ValueError:
                raise UnknownStateError(f"{held} is not set yet") from None
            if by_library and isinstance(content, types.MethodType):
                self.add(held, content.__func__)
                content = content.__self__
            if by_library and self._has_library_state(content):
                self.add(held, type(content))
                self.add(held, vars(content))
            else:
                self._add_variable(held, content)

    def _has_library_state(self, value: Any) -> bool:
        """Return whether an object of an installed class has all its state in `vars`, as `no_grad()` has."""
        kind = type(value)
        return (
            bool(kind.__flags__ & _HEAP_TYPE)
            and kind.__basicsize__ == _WithoutSlots.__basicsize__
            and hasattr(value, "__dict__")
            and not isinstance(value, types.ModuleType | type)
            and self._modules.is_library_object(kind)
        )

    def _add_class(self, where: str, kind: type) -> None:
        self.update(f"{kind.__module__}.{kind.__qualname__}".encode())
        if self._modules.is_library_object(kind) or not kind.__flags__ & _HEAP_TYPE:
            return
        self._modules.queue(self._modules.find(kind.__module__))
        self.add(where, type(kind))
        for base in kind.__bases__:
            self.add(kind.__qualname__, base)
        generated = _SET_ON_CLASSES
        if issubclass(kind, enum.Enum):
            generated = _SET_ON_CLASSES | _SET_ON_ENUMS | set(kind.__members__)
            for name, member in kind.__members__.items():
                self.update(name.encode())
                own = {key: value for key, value in vars(member).items() if key not in _SET_ON_MEMBERS}
                self.add(f"{kind.__qualname__}.{name}", (member._value_, own))
        if "__dataclass_fields__" in vars(kind):
            for field in dataclasses.fields(kind):
                self.update(field.name.encode(), repr((field.init, field.compare, field.kw_only)).encode())
                for default in (field.default, field.default_factory):
                    if default is not dataclasses.MISSING:
                        self.add(f"the default of {kind.__qualname__}.{field.name}", default)
        for name, value in vars(kind).items():
            if name not in generated:
                self.update(name.encode())
                self._add_attribute(f"{kind.__qualname__}.{name}", kind, value)

    def _add_attribute(self, where: str, kind: type, value: Any) -> None:
        if (code := _generated_code(kind, value)) is not None:
            self.update(_code_text(code).encode())
        elif type(value) is property:
            for part in (value.fget, value.fset, value.fdel):
                self.add(where, part)
        elif type(value) in (staticmethod, classmethod):
            self.add(where, type(value))
            self.add(where, value.__func__)
        elif type(value) is functools.cached_property:
            self.add(where, value.func)
        elif isinstance(value, types.MemberDescriptorType) or (
            issubclass(kind, tuple) and type(value) is type(_SamplePair.left)
        ):
            self.update(b"field")  # a slot, or a field of a named tuple
        else:
            self.add(where, value)

    def _add_torch_module(self, where: str, torch: Any, model: Any) -> None:
        plain = vars(torch.nn.Module())
        _refuse_slots(where, type(model))
        self.add(where, type(model))
        for name, value in vars(model).items():
            held = f"{name!r} of {where}"
            if name.endswith("_hooks") and value:
                raise UnknownStateError(f"{held} are code that EDL does not know")
            if name == "_modules":
                for child, part in value.items():
                    self.update(child.encode())
                    self.add(f"{where}.{child}", part)
            elif name in ("_parameters", "_buffers", "training") or name not in plain:
                self.update(name.encode())
                self.add(held, value)


def _transformers_settings(value: Any) -> dict[str, Any] | None:
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(value, (transformers.PretrainedConfig, transformers.GenerationConfig)):
        return None
    return _without_origin(value.to_dict())


def _without_origin(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration without its origin and the release that loaded it; both may differ between hosts."""
    return {
        name: _without_origin(part) if isinstance(part, dict) else part
        for name, part in settings.items()
        if name not in ("_name_or_path", "transformers_version")
    }


def _refuse_slots(where: str, kind: type) -> None:
    """Raise if a class has slots, because then `vars` does not show all attributes."""
    if kind.__flags__ & _HEAP_TYPE and any(vars(base).get("__slots__") for base in kind.__mro__):
        raise UnknownStateError(f"{where} is or holds a {kind.__module__}.{kind.__qualname__}, which has slots")


class _SamplePair(NamedTuple):
    left: int


def _generated_code(kind: type, value: Any) -> types.CodeType | None:
    """Return a method's code if a dataclass or named tuple generated it from the class's fields, else None."""
    value = value.__func__ if isinstance(value, staticmethod) else value  # `__new__` is a staticmethod
    if not isinstance(value, types.FunctionType) or not value.__name__.startswith("__"):
        return None
    if value.__code__.co_filename in (dataclasses.__file__, reprlib.__file__):
        value = getattr(value, "__wrapped__", value)  # the `__repr__` of a dataclass
    made = "__dataclass_fields__" in vars(kind) or (issubclass(kind, tuple) and "_fields" in vars(kind))
    return value.__code__ if made and value.__code__.co_filename == "<string>" else None


def _code_text(code: types.CodeType) -> str:
    """Return a string that tells apart functions with the same name in one source file, by line and bytecode."""
    constants = [_constant_text(constant) for constant in code.co_consts]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return repr((code.co_name, code.co_firstlineno, code.co_flags, code.co_code, names, constants))


def _constant_text(constant: Any) -> str:
    if isinstance(constant, types.CodeType):
        return _code_text(constant)
    if isinstance(constant, (tuple, frozenset)):
        texts = map(_constant_text, constant)
        return repr(sorted(texts) if isinstance(constant, frozenset) else list(texts))  # a set's order is random
    return repr(constant)


def _ufunc_name(where: str, function: np.ufunc) -> str:
    for name, module in {"numpy": np, **sys.modules}.items():  # numpy first, so that other imports do not matter
        if is_library(getattr(module, "__file__", None) or "") and vars(module).get(function.__name__) is function:
            return f"{name}.{function.__name__}"
    raise UnknownStateError(
        f"{where} is a numpy.ufunc that no installed module has under the name {function.__name__!r}"
    )


def _tensor_parts(where: str, torch: Any, tensor: Any) -> Iterable[bytes | memoryview]:
    try:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            raise TypeError(f"not a plain tensor but a {type(tensor).__qualname__}, {tensor.layout}")
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        # As bytes, since numpy has no bfloat16. `as_strided`, since a tensor of one element may have any stride.
        flat = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data
        return f"{tensor.dtype} {list(tensor.shape)}".encode(), flat
    except Exception as exc:  # quantized, nested and meta tensors raise different errors
        raise UnknownStateError(f"{where} is a tensor that cannot be read ({exc})") from exc


def _is_path(text: str) -> bool:
    """Return whether a text is an existing path, which may differ on other hosts that serve the same model."""
    try:
        return Path(text).is_absolute() and Path(text).exists() and text.strip("/") != ""  # every host has the root
    except (OSError, ValueError):  # too long for a path, or contains a zero byte
        return False
