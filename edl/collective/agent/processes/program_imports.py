"""Which modules of the framework a program imports before it does anything else: found by reading, not by running.

A module may be imported ahead of time only if that changes nothing. A program that sets a variable of the environment,
`sys.path` or anything else first, and imports torch then, means torch to be imported then. So what stands behind the
first statement that may have an effect is left to the worker, as under torchrun.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

__all__ = ["ProgramImports", "scan_imports", "sources_of"]

_IMPORT_TORCH: Final = ("edl.collective", "edl.distill.torch", "edl.distill.paddle")
"""Modules of EDL that import the framework themselves."""
_HARMLESS_CALLS: Final = {
    "warnings.filterwarnings", "warnings.simplefilter", "logging.getLogger", "TypeVar", "typing.TypeVar",
    "NewType", "typing.NewType",
}  # fmt: skip
_HARMLESS_DECORATORS: Final = {
    "staticmethod", "classmethod", "property", "dataclass", "dataclasses.dataclass", "functools.cache",
    "functools.wraps", "abstractmethod", "abc.abstractmethod", "overload", "typing.overload", "torch.no_grad",
}  # fmt: skip

_VARIABLE: Final = re.compile("[A-Z][A-Z0-9_]+")


@dataclass(frozen=True)
class ProgramImports:
    """What may be imported ahead of time.

    Attributes:
        modules: (module, name in it or "") of the given roots, in the program's order.
        framework: whether the first of the roots may be imported.
        obstacle: the statement behind which the program imports the first root, such as "train.py, line 3"; empty if
            there is none, or if it never imports it.
        variables: what is written in the program, as a string, and may be the name of a variable of the environment.
    """

    modules: tuple[tuple[str, str], ...] = ()
    framework: bool = True
    obstacle: str = ""
    variables: frozenset[str] = frozenset()


def scan_imports(program: Sequence[Path], folders: Sequence[Path], roots: Sequence[str]) -> ProgramImports:
    """Find by reading a program which modules it imports before it does anything else.

    Args:
        program: the files that run, in order: a script, or a package's `__init__.py` and the module in it.
        folders: where the program's own modules are; they are read as well where it imports them.
        roots: top-level packages that may be imported ahead of time, the framework first.
    """
    scan = _Scan(folders, roots)
    for path in program:
        scan.read(path)
    framework, variables = roots[0], scan.variables()
    if any(module.split(".")[0] == framework or module.startswith(_IMPORT_TORCH) for module, _ in scan.found):
        return ProgramImports(tuple(scan.found), True, "", variables)
    if scan.imports_later(framework):
        return ProgramImports(tuple(scan.found), not scan.obstacle, scan.obstacle, variables)
    # Nothing of its own imports the framework; what others wrote does, if anything, and wherever it likes.
    return ProgramImports(tuple(scan.found), scan.foreign or not scan.obstacle, "", variables)


def sources_of(name: str, folders: Iterable[Path]) -> list[Path]:
    """Find the files that `import NAME` runs; nothing is imported.

    Args:
        name: the module's, with dots.
        folders: where to look for it, in order.

    Returns:
        The files in the order in which they run; none if the module is elsewhere.
    """
    parts = name.split(".")
    for folder in folders:
        found = []
        for depth in range(1, len(parts) + 1):
            path = folder.joinpath(*parts[:depth])
            candidates = [path / "__init__.py", path.with_name(path.name + ".py")]
            found += [candidate for candidate in candidates if candidate.is_file()][:1]
        if found:
            return found
    return []


@dataclass
class _Scan:
    """Reads statements in the order in which they run, until one may have an effect."""

    folders: Sequence[Path]
    roots: Sequence[str]
    found: list[tuple[str, str]] = field(default_factory=list)
    obstacle: str = ""
    foreign: bool = False
    _seen: set[Path] = field(default_factory=set)
    _trees: list[ast.Module] = field(default_factory=list)

    def read(self, path: Path) -> None:
        if path in self._seen:
            return
        self._seen.add(path)
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            return  # the worker will raise it, where its user sees it
        self._trees.append(tree)
        self._run(tree.body, path)

    def imports_later(self, root: str) -> bool:
        """Return whether any file that was read imports `root`, anywhere in it."""
        nodes = (node for tree in self._trees for node in ast.walk(tree))
        return any(
            name.split(".")[0] == root or name.startswith(_IMPORT_TORCH)
            for node in nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name, _ in _names(node)
        )

    def variables(self) -> frozenset[str]:
        """Collect all strings in the files that were read that may name a variable of the environment."""
        nodes = (node for tree in self._trees for node in ast.walk(tree))
        strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        return frozenset(filter(_VARIABLE.fullmatch, strings))

    def _run(self, body: Sequence[ast.stmt], path: Path) -> None:
        for node in body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node, path)
            elif isinstance(node, ast.If):
                if "TYPE_CHECKING" in ast.unparse(node.test):
                    self._run(node.orelse, path)
                else:
                    if not _is_pure(node.test):
                        self._record_obstacle(node, path)
                    self._run([*node.body, *node.orelse], path)
            elif isinstance(node, ast.Try):
                handlers = [statement for handler in node.handlers for statement in handler.body]
                self._run([*node.body, *handlers, *node.orelse, *node.finalbody], path)
            elif not _is_harmless(node):
                self._record_obstacle(node, path)

    def _record_obstacle(self, node: ast.stmt, path: Path) -> None:
        if not self.obstacle:
            decorators: list[ast.expr] = getattr(node, "decorator_list", [])
            line = min([node.lineno, *(decorator.lineno for decorator in decorators)])
            self.obstacle = f"{path.name}, line {line}"

    def _import(self, node: ast.Import | ast.ImportFrom, path: Path) -> None:
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1] if node.level <= len(path.parents) else path.parent
            names = [node.module] if node.module else [alias.name for alias in node.names]
            for name in names:
                self._read_own(sources_of(name, [folder]))
            return
        for module, name in _names(node):
            root = module.split(".")[0]
            own = sources_of(module, self.folders)
            if own and not _is_loaded(root, own[0]):
                self._read_own(own)
                if name:
                    self._read_own(sources_of(f"{module}.{name}", self.folders))
            elif root in self.roots:
                if not self.obstacle:
                    self.found.append((module, name))
            elif root not in sys.stdlib_module_names and not self.obstacle:
                self.foreign = True

    def _read_own(self, paths: Iterable[Path]) -> None:
        for path in paths:
            self.read(path)


def _is_loaded(root: str, path: Path) -> bool:
    """Return whether this process has imported `root` from `path`: EDL itself, where PYTHONPATH names its folder."""
    loaded = getattr(sys.modules.get(root), "__file__", None)
    return loaded is not None and Path(loaded).resolve() == path.resolve()


def _names(node: ast.Import | ast.ImportFrom) -> list[tuple[str, str]]:
    """Return pairs of a module and a name in it that a statement imports; none for relative imports."""
    if isinstance(node, ast.Import):
        return [(alias.name, "") for alias in node.names]
    if node.level or not node.module:
        return []
    return [(node.module, "" if alias.name == "*" else alias.name) for alias in node.names]


def _is_harmless(node: ast.stmt) -> bool:
    """Return whether a statement has no effect beyond the names that it binds."""
    if isinstance(node, ast.Pass | ast.Global | ast.Nonlocal):
        return True
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        defaults = [*node.args.defaults, *(default for default in node.args.kw_defaults if default is not None)]
        return _decorators_harmless(node.decorator_list) and all(map(_is_pure, defaults))
    if isinstance(node, ast.ClassDef):
        bases = [*node.bases, *(keyword.value for keyword in node.keywords)]
        return (
            _decorators_harmless(node.decorator_list)
            and all(map(_is_pure, bases))
            and all(map(_is_harmless, node.body))
        )
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Name) for target in node.targets) and _is_pure(node.value)
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and (node.value is None or _is_pure(node.value))
    return isinstance(node, ast.Expr) and _is_pure(node.value)


def _decorators_harmless(decorators: Iterable[ast.expr]) -> bool:
    names = [ast.unparse(node.func if isinstance(node, ast.Call) else node) for node in decorators]
    return all(name in _HARMLESS_DECORATORS for name in names)


def _is_pure(expression: ast.expr) -> bool:
    """Return whether evaluating an expression calls nothing that could have an effect."""
    for node in ast.walk(expression):
        if isinstance(node, ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr):
            return False
        if isinstance(node, ast.Call) and ast.unparse(node.func) not in _HARMLESS_CALLS:
            return False
    return True
