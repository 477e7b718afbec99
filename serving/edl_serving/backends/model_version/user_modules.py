"""Which modules are the user's, and which of them a model depends on."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import types
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edl_serving.backends.source import top_name
from edl_serving.backends.target import in_package, is_library

__all__ = ["UnknownStateError", "UserModules", "is_submodule"]

_OWN_PACKAGES = ("edl", "edl_serving")


class UnknownStateError(Exception):
    """A model holds something that cannot be hashed; the message names it."""


class UserModules:
    """The user's modules that a model depends on, in the order in which they were found.

    Args:
        named: the module that the user named; its package is the user's even where it is installed.
    """

    def __init__(self, named: types.ModuleType) -> None:
        self._named = named
        self._package = top_name(named.__name__)
        self._found: dict[str, types.ModuleType] = {}
        self._unread: deque[types.ModuleType] = deque()
        self._whole: set[str] = set()  # names of packages whose submodules are queued

    def queue(self, module: types.ModuleType | None, *, submodules: bool = True) -> None:
        """Have `drain` yield a module of the user's, with the packages around it; leave out installed modules.

        Args:
            module: None for a module that is not loaded.
            submodules: queue a package's modules as well, which code that holds the package may use by name. What is
                only around a module leads to nothing but its own variables.

        Raises:
            UnknownStateError: another module has the same name.
        """
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
        """Yield the queued modules, also those that are queued meanwhile, once."""
        while self._unread:
            yield self._unread.popleft()

    def find(self, name: str) -> types.ModuleType | None:
        """Return the module of that name; a file that the user named may have the name of another module."""
        return self._found.get(name) or sys.modules.get(name)

    def read_source(self, module: types.ModuleType) -> bytes:
        """Return a module's source, and queue the modules that it imports.

        Raises:
            UnknownStateError: it has no source, or its functions set variables or import the user's modules later.
        """
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
        """Return whether a module is the user's, and not installed."""
        file = getattr(module, "__file__", None)
        return module is self._named or (file is not None and not self.is_library(file))

    def is_namespace(self, module: types.ModuleType) -> bool:
        """Return whether a module is a package of the user's without `__init__.py`."""
        folders = list(getattr(module, "__path__", ()))
        if getattr(module, "__file__", None) is not None:
            return False
        return any(not self.is_library(f"{folder}{os.sep}") for folder in folders)

    def is_library(self, file: str) -> bool:
        """Return whether a file of code is installed."""
        if file.startswith("<"):
            return file.startswith("<frozen ")  # other such names are those of `exec`
        if any(in_package(file, name) for name in _OWN_PACKAGES):
            return file != self._named.__file__
        return is_library(file) and not in_package(file, self._package)

    def is_library_object(self, value: Any) -> bool:
        """Return whether a value is what an installed module has under the value's own name, such as `numpy.dot`."""
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
        """Return whether `name` is a module of the user's that is there and not loaded."""
        package = name.rpartition(".")[0]
        if package and package not in sys.modules:
            return self._may_be_loaded_later(package)
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return False
        return spec is not None and spec.has_location and not self.is_library(spec.origin or "")


def is_submodule(module: types.ModuleType, variable: str, value: Any) -> bool:
    """Return whether a variable of a package holds the package's own module of that name."""
    return isinstance(value, types.ModuleType) and value.__name__ == f"{module.__name__}.{variable}"


def _imported_names(node: ast.AST, package: str | None) -> list[str]:
    """Return the modules that an import statement may name."""
    if isinstance(node, ast.Import):  # without `as`, the name of the package around it is what is bound
        bound = [top_name(alias.name) for alias in node.names if not alias.asname]
        return [*(alias.name for alias in node.names), *bound]
    if not isinstance(node, ast.ImportFrom):
        return []
    try:
        base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
    except ImportError:
        return []
    return [base, *(f"{base}.{alias.name}" for alias in node.names)]
