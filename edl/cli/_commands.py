"""Which commands there are, found out without importing them.

A command is a module `cmd_NAME` of `edl.cli`, `edl.cli.http` or `edl.cli.kube` with `main(argv)`, or an entry point
NAME of the group `edl.commands` in any installed package. Its summary is the first line of its module's docstring, read
from the source: some commands import torch, and `edl --help` should not.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import entry_points
from pathlib import Path

from edl.errors import SettingsError

__all__ = ["Command", "explain_missing", "find", "nearest"]

GROUP = "edl.commands"

# The order in which somebody new meets them; others follow by name.
_ORDER = (
    *("demo", "serve", "register", "proxy", "teachers", "store", "label", "master", "run", "status", "report"),
    *("dashboard", "bench", "submit", "jobs", "logs", "scale", "suspend", "resume", "delete", "operator"),
)

_PACKAGES = ("edl.cli", "edl.cli.http", "edl.cli.kube")

_PROVIDERS = {
    "aiohttp": ("aiohttp", "dashboard"),
    "fsspec": ("fsspec", "collective"),
    "grpc_health": ("grpcio-health-checking", "serving"),
    "kubernetes": ("kubernetes", "kubernetes"),
    "matplotlib": ("matplotlib", "demo"),
    "paddle": ("paddlepaddle", "paddle"),
    "plotext": ("plotext", "demo"),
    "sklearn": ("scikit-learn", "demo"),
    "tomli": ("tomli", "serving"),
    "torch": ("torch", "torch"),
    "yaml": ("pyyaml", "kubernetes"),
}
"""A module -> the package that has it, and the extra of EDL that installs it, with whatever else is needed."""


@dataclass(frozen=True)
class Command:
    """A command. `target` is `package.module:function`."""

    name: str
    target: str

    def load(self) -> Callable[[Sequence[str]], int | None]:
        """Import the command's function."""
        module, _, function = self.target.partition(":")
        found = getattr(importlib.import_module(module), function or "main", None)
        if not callable(found):
            raise SettingsError(f"the package that offers this command has no function {self.target}")
        command: Callable[[Sequence[str]], int | None] = found
        return command

    def summary(self) -> str:
        """Return what the command does, in a line; where it comes from if its source cannot be read."""
        spec = _locate(self.target.partition(":")[0])
        try:
            source = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
            docstring = ast.get_docstring(ast.parse(source)) or ""
        except (OSError, SyntaxError, ValueError):
            docstring = ""
        first = docstring.partition("\n")[0].strip()
        text = re.sub(r"^`{0,2}edl [\w -]+`{0,2} ?[:,-] *", "", first).rstrip(".")
        return text[:1].upper() + text[1:] or f"({self.target})"


def _locate(module: str) -> ModuleSpec | None:
    """Where a module's source is. `importlib.util.find_spec` would import the packages around it."""
    path = None
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for index in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: index + 1]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec


def find() -> dict[str, Command]:
    """All commands by name, in the order in which to list them. EDL's own cannot be replaced."""
    found = {entry.name: Command(entry.name, entry.value) for entry in entry_points(group=GROUP)}
    for package in _PACKAGES:
        for info in pkgutil.iter_modules(importlib.import_module(package).__path__):
            if info.name.startswith("cmd_"):
                name = info.name.removeprefix("cmd_").replace("_", "-")
                found[name] = Command(name, f"{package}.{info.name}:main")
    return {name: found[name] for name in sorted(found, key=_rank)}


def _rank(name: str) -> tuple[int, str]:
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the command that `name` was probably meant to be, if any comes near."""
    close = difflib.get_close_matches(name.lower(), list(names), n=1, cutoff=0.6)
    return close[0] if close else None


def explain_missing(exc: ModuleNotFoundError) -> str | None:
    """Return what to install for a missing module; None for a module of EDL's own, which is a bug to be seen whole."""
    missing = (exc.name or "").partition(".")[0]
    if missing in ("", "edl", "edl_serving"):
        return None
    if missing not in _PROVIDERS:
        return f"the Python package {missing!r} is not installed: install it"
    package, extra = _PROVIDERS[missing]
    return f"the Python package {missing!r} is not installed: pip install {package}, or EDL with its extra [{extra}]"
