"""Imports modules before workers are forked, except modules that would not work in a fork.

Some modules must be imported by every worker itself. Such a module starts a thread or a pool of OpenMP threads (a fork
does not have these threads, and would wait for them forever), opens a connection, uses CUDA, or reads its rank from the
environment. Whether a module does any of this is known only after it has been imported. So the code here imports the
module and checks the process, partly with a test fork. If the module is unfit, the process is discarded, and another
one starts without that module. What native code does, or what a module does after its import, is not detected.

A module may be imported ahead of time only if that changes nothing. A statement may change what an import does if it
sets an environment variable or `sys.path`, for example. Imports after the first such statement are left to the worker.
Imports before that statement happen ahead of time if the program certainly makes them, and makes them from
site-packages. The program's own modules are only read, not imported: they may change between two starts, and often draw
random numbers or check their rank.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_IMPORT_TORCH: Final = ("edl.collective", "edl.distill.torch", "edl.distill.paddle")  # they import the framework
_HARMLESS_MODULES: Final = {
    "argparse", "collections", "copy", "dataclasses", "datetime", "enum", "glob", "itertools", "json", "math",
    "pathlib", "platform", "re", "string", "textwrap", "time", "typing", "uuid", "warnings",
}  # fmt: skip
"""Modules whose functions never change what a later import does. `logging` and `random` are not among them, because
some packages draw a random number when imported, or check whether the root logger has handlers."""
_HARMLESS_CALLS: Final = {
    "logging.getLogger", "os.cpu_count", "os.environ.get", "os.getcwd", "os.getenv", "os.getpid", "os.makedirs",
    "socket.gethostname",
}  # fmt: skip
_HARMLESS_BUILTINS: Final = {
    "abs", "all", "any", "bool", "bytes", "dict", "enumerate", "float", "frozenset", "int", "isinstance", "len", "list",
    "max", "min", "open", "print", "range", "repr", "round", "set", "sorted", "str", "sum", "tuple", "zip",
}  # fmt: skip
_HARMLESS_DECORATORS: Final = {
    "staticmethod", "classmethod", "property", "dataclass", "dataclasses.dataclass", "functools.cache",
    "functools.wraps", "abstractmethod", "abc.abstractmethod", "overload", "typing.overload", "torch.no_grad",
}  # fmt: skip

_VARIABLE: Final = re.compile("[A-Z][A-Z0-9_]+")
_MOST_FILES: Final = 500  # files of a program that are read, in two seconds; PYTHONPATH may name thousands
_MOST_NESTED: Final = 100  # files that import each other in a chain: a file takes some of Python's 1,000 nested calls


@dataclass(frozen=True)
class ProgramImports:
    """The imports of a program that may happen ahead of time."""

    modules: tuple[tuple[str, str], ...] = ()  # pairs of a module and a name in it (or ""), in the program's order
    framework: bool = True  # whether the first of the roots may be imported
    obstacle: str = ""  # the statement because of which `missed` is left to the workers, such as "train.py, line 3"
    missed: tuple[str, ...] = ()  # packages that the program imports after that statement
    variables: frozenset[str] = frozenset()  # strings of the program that may name environment variables


def scan_imports(program: Sequence[Path], folders: Sequence[Path], roots: Sequence[str]) -> ProgramImports:
    """Read a program's source to find the modules that it imports before it does anything else.

    `program` lists the files that run, in order. Modules that the program imports from `folders` are its own and are
    read as well. Imports of the packages in `roots`, with the framework first, may happen ahead of time even if they
    are conditional.
    """
    scan = _Scan(program, folders, roots)
    for path in program:
        scan.read(path)
    framework, loads_framework = roots[0], (roots[0], *_IMPORT_TORCH)
    if any(f"{module}.".startswith(tuple(f"{name}." for name in loads_framework)) for module, _ in scan.found):
        allowed = True
    elif scan.imports_later(framework):
        allowed = not scan.obstacle
        scan.missed[:0] = [framework] if scan.obstacle else []
    else:  # none of the program's own files imports the framework; if other packages do, they may do it at any point
        allowed = scan.foreign or not scan.obstacle
    missed = tuple(dict.fromkeys(scan.missed))
    return ProgramImports(tuple(scan.found), allowed, scan.obstacle if missed else "", missed, scan.variables())


def sources_of(name: str, folders: Iterable[Path]) -> list[Path]:
    """Return the files that `import NAME` runs, in that order, or none if the module is not in these folders."""
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
    """Reads statements in the order in which they run. Imports after one that may affect imports are `missed`."""

    program: Sequence[Path]
    folders: Sequence[Path]
    roots: Sequence[str]
    found: list[tuple[str, str]] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    obstacle: str = ""
    foreign: bool = False
    _seen: set[Path] = field(default_factory=set)
    _trees: list[ast.Module] = field(default_factory=list)
    _nested: int = 0

    def read(self, path: Path) -> None:
        if path in self._seen:
            return
        if len(self._seen) == _MOST_FILES or self._nested == _MOST_NESTED:
            self.obstacle = self.obstacle or f"{path.name}, after {len(self._seen)} other files"
            return
        self._seen.add(path)
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            return  # the worker raises it, where the user sees it
        self._trees.append(tree)
        self._nested += 1
        self._run(tree.body, path, set(_HARMLESS_BUILTINS))
        self._nested -= 1

    def imports_later(self, root: str) -> bool:
        nodes = (node for tree in self._trees for node in ast.walk(tree))
        return any(
            name.split(".")[0] == root or name.startswith(_IMPORT_TORCH)
            for node in nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name, _ in _names(node)
        )

    def variables(self) -> frozenset[str]:
        """Return all strings in the files read so far that may name an environment variable."""
        nodes = (node for tree in self._trees for node in ast.walk(tree))
        strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        return frozenset(filter(_VARIABLE.fullmatch, strings))

    def _run(self, body: Sequence[ast.stmt], path: Path, safe: set[str], *, surely: bool = True) -> None:
        """Read statements. Calls of the names in `safe` have no effect. With `surely`, all of the statements run."""
        for node in body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node, path, surely=surely)
                safe |= _safe_names(node)
            elif isinstance(node, ast.If):
                test = ast.unparse(node.test)
                if "TYPE_CHECKING" in test or ("__name__" in test and path not in self.program):
                    self._run(node.orelse, path, safe, surely=surely)
                    continue
                if not _is_pure(node.test, safe):
                    self._record_obstacle(node, path)
                self._run([*node.body, *node.orelse], path, safe, surely=False)
            elif isinstance(node, ast.Try):
                self._run(node.body, path, safe, surely=surely)
                for handler in node.handlers:
                    self._run(handler.body, path, safe, surely=False)
                self._run([*node.orelse, *node.finalbody], path, safe, surely=surely)
            elif not _is_harmless(node, safe):
                self._record_obstacle(node, path)
            elif isinstance(node, ast.Assign):
                known = {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)} <= safe | {"__file__"}
                names = {target.id for target in node.targets if isinstance(target, ast.Name)}
                safe.update(names) if known else safe.difference_update(names)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                safe.discard(node.name)

    def _record_obstacle(self, node: ast.stmt, path: Path) -> None:
        if not self.obstacle:
            decorators: list[ast.expr] = getattr(node, "decorator_list", [])
            line = min([node.lineno, *(decorator.lineno for decorator in decorators)])
            self.obstacle = f"{path.name}, line {line}"

    def _import(self, node: ast.Import | ast.ImportFrom, path: Path, *, surely: bool) -> None:
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1] if node.level <= len(path.parents) else path.parent
            names = [node.module] if node.module else [alias.name for alias in node.names]
            for name in names:
                self._read_own(sources_of(name, [folder]))
            return
        for module, name in _names(node):
            root = module.split(".")[0]
            own = sources_of(module, self.folders)
            if own and not _is_loaded(root, own[0]) and not _is_package_file(own[0]):
                self._read_own(own)
                if name:
                    self._read_own(sources_of(f"{module}.{name}", self.folders))
                continue
            foreign = root not in self.roots and root not in sys.stdlib_module_names
            if foreign and not self.obstacle:
                self.foreign = True
            if root in self.roots or (foreign and surely and _is_installed(root)):
                if not self.obstacle:
                    self.found.append((module, name))
                elif root != "edl":
                    self.missed.append(root)

    def _read_own(self, paths: Iterable[Path]) -> None:
        for path in paths:
            self.read(path)


def _is_loaded(root: str, path: Path) -> bool:
    """Return whether this process imported `root` from `path`, as it did EDL from a folder in PYTHONPATH."""
    loaded = getattr(sys.modules.get(root), "__file__", None)
    return loaded is not None and Path(loaded).resolve() == path.resolve()


def _is_installed(root: str) -> bool:
    """Return whether a package is in site-packages. A package under development may change between two starts."""
    with contextlib.suppress(ValueError):  # a module without a specification
        found = importlib.util.find_spec(root)
        return found is not None and _is_package_file(found.origin or "")
    return False


def _is_package_file(path: str | Path) -> bool:
    """Return whether a file is in `site-packages` or `dist-packages`, even if the folder is in PYTHONPATH."""
    return "-packages" in str(path)


def _names(node: ast.Import | ast.ImportFrom) -> list[tuple[str, str]]:
    """Return the pairs of module and name that a statement imports; none for relative imports."""
    if isinstance(node, ast.Import):
        return [(alias.name, "") for alias in node.names]
    if node.level or not node.module:
        return []
    return [(node.module, "" if alias.name == "*" else alias.name) for alias in node.names]


def _safe_names(node: ast.Import | ast.ImportFrom) -> set[str]:
    """Return the names that an import binds to modules without effects, or to objects from such modules."""
    if isinstance(node, ast.ImportFrom):
        if node.level or (node.module or "").split(".")[0] not in _HARMLESS_MODULES:
            return set()
        return {alias.asname or alias.name for alias in node.names}
    return {
        alias.asname or alias.name.split(".")[0]
        for alias in node.names
        if alias.name.split(".")[0] in _HARMLESS_MODULES
    }


def _is_harmless(node: ast.stmt, safe: set[str]) -> bool:
    """Return whether a statement changes nothing that an import may depend on."""
    if isinstance(node, ast.Pass | ast.Global | ast.Nonlocal):
        return True
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        defaults = [*node.args.defaults, *(default for default in node.args.kw_defaults if default is not None)]
        return _decorators_harmless(node.decorator_list) and all(_is_pure(default, safe) for default in defaults)
    if isinstance(node, ast.ClassDef):
        bases = [*node.bases, *(keyword.value for keyword in node.keywords)]
        return (
            _decorators_harmless(node.decorator_list)
            and all(_is_pure(base, safe) for base in bases)
            and all(_is_harmless(statement, safe) for statement in node.body)
        )
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Name) for target in node.targets) and _is_pure(node.value, safe)
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and (node.value is None or _is_pure(node.value, safe))
    if isinstance(node, ast.Assert):
        return _is_pure(node.test, safe)
    return isinstance(node, ast.Expr) and _is_pure(node.value, safe)


def _decorators_harmless(decorators: Iterable[ast.expr]) -> bool:
    names = [ast.unparse(node.func if isinstance(node, ast.Call) else node) for node in decorators]
    return all(name in _HARMLESS_DECORATORS for name in names)


def _is_pure(expression: ast.expr, safe: set[str]) -> bool:
    """Return whether evaluating an expression calls nothing that could have an effect."""
    for node in ast.walk(expression):
        if isinstance(node, ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr):
            return False
        if isinstance(node, ast.Call) and not _is_safe_call(node.func, safe):
            return False
    return True


def _is_safe_call(function: ast.expr, safe: set[str]) -> bool:
    """Return whether a function has no effects, or is a method of an object that such a function returned."""
    if isinstance(function, ast.Call):
        return _is_safe_call(function.func, safe)
    name = ast.unparse(function)
    if name in _HARMLESS_CALLS or name.startswith("os.path."):
        return True
    if isinstance(function, ast.Attribute | ast.Subscript):
        return _is_safe_call(function.value, safe)
    return isinstance(function, ast.Constant | ast.JoinedStr) or name in safe


_OF_A_WORKER: Final = {
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE",
    "EDL_GENERATION", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_CURRENT_ENDPOINT",
}  # fmt: skip
_FIX_THEIR_RANK: Final = {"lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics"}  # known to be unfit
_TEST_FORK_S: Final = 10.0  # for a sum, which takes milliseconds; with less, a busy machine's fork would count as unfit
_TEST_FORK_POLL_S: Final = 0.001  # between two checks of whether that fork has ended
_PARALLEL_ELEMENTS: Final = 1 << 18  # of the test sum: torch uses threads from 32,768 on (`at::internal::GRAIN_SIZE`)
_CUDA: Final = 2  # exit code of the test fork if it cannot use CUDA; any but 0
_UNKNOWN: Final = 3  # exit code of the test fork if the test itself failed; any but 0 and `_CUDA`


@dataclass
class PreloadResult:
    """The modules that workers cannot inherit in a fork, and the modules that could not be imported."""

    unfit: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


def preload_modules(modules: Iterable[tuple[str, str]], without: Collection[str]) -> PreloadResult:
    """Import pairs (module, name in the module or ""), except `without`, and find modules that a fork cannot use."""
    done = PreloadResult()
    for module, name in dict.fromkeys(modules):
        root = module.split(".")[0]
        if root in _FIX_THEIR_RANK:
            if (text := f"{root} fixes its rank when it is imported") not in done.failed:
                done.failed.append(text)
        elif module not in done.unfit and module not in without:
            _import(module, name, done)
    return done


def find_fork_hazard() -> str:
    """Fork this process as a test. Returns why forks are unusable, or "" if the fork can compute and use CUDA."""
    pid = os.fork()
    if pid == 0:
        code = _UNKNOWN
        try:
            poisoned = _is_cuda_poisoned()
            if "torch" in sys.modules and not poisoned:
                sys.modules["torch"].ones(_PARALLEL_ELEMENTS).add_(1)
            code = _CUDA if poisoned else 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + _TEST_FORK_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return "uses CUDA" if os.waitstatus_to_exitcode(status) == _CUDA else ""
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "starts a pool of threads (OpenMP's, perhaps), for which a fork would wait forever"
        time.sleep(_TEST_FORK_POLL_S)


def _is_cuda_poisoned() -> bool:
    """Return whether this process cannot use CUDA because its parent used the driver, for example in `is_available`."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    is_in_bad_fork = getattr(torch._C, "_cuda_isInBadFork", None)  # missing in a build without CUDA
    return bool(torch.cuda.is_initialized() or (is_in_bad_fork is not None and is_in_bad_fork()))


def _import(module: str, name: str, done: PreloadResult) -> None:
    threads, sockets, tasks = set(threading.enumerate()), _sockets(), _tasks()
    failure: BaseException | None = None
    with watched_environ(_OF_A_WORKER) as looked_up:
        try:
            imported = importlib.import_module(module)
            if name and not hasattr(imported, name):
                importlib.import_module(f"{module}.{name}")
        except BaseException as exc:  # noqa: BLE001 - the worker raises it again, where the user sees it
            failure = exc
    ours = module.split(".")[0] in ("torch", "edl")
    if looked_up and not ours:
        done.unfit[module] = f"reads {', '.join(sorted(looked_up))}"
    elif failure is not None:
        done.failed.append(f"importing {module} ahead of time failed ({type(failure).__name__}: {failure})")
    elif any(thread.is_alive() for thread in set(threading.enumerate()) - threads) or _has_new_threads(tasks):
        done.unfit[module] = "starts a thread"
    elif _sockets() - sockets:
        done.unfit[module] = "opens a connection"
    elif not ours and (hazard := find_fork_hazard()):
        done.unfit[module] = hazard


class _WatchedEnviron(os._Environ):  # type: ignore[type-arg]
    """`os.environ` that records lookups: `get`, `in`, `os.getenv` and copies."""

    watched: Collection[str]
    looked_up: set[str]

    def __getitem__(self, key: str) -> str:
        if key in self.watched:
            self.looked_up.add(key)
        return str(super().__getitem__(key))


@contextmanager
def watched_environ(names: Collection[str]) -> Iterator[set[str]]:
    """Collect the variables in `names` that are looked up in `os.environ` in the block."""
    looked_up: set[str] = set()
    plain = os.environ.__class__
    os.environ.__class__ = _WatchedEnviron  # the object itself stays, because modules hold it
    os.environ.watched = names  # type: ignore[attr-defined]
    os.environ.looked_up = looked_up  # type: ignore[attr-defined]
    try:
        yield looked_up
    finally:
        os.environ.__class__ = plain


def _tasks() -> set[str]:
    """Return the ids of this process's threads, including threads of native code (Linux)."""
    return {path.name for path in Path("/proc/self/task").iterdir()}


def _has_new_threads(before: set[str]) -> bool:
    """Return whether this process has threads that are not in `before` and that stay when it forks."""
    if not _tasks() - before:
        return False
    pid = os.fork()  # before which OpenBLAS ends its own threads
    if pid == 0:
        os._exit(0)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    return bool(_tasks() - before)


def _sockets() -> set[str]:
    found = set()
    for file in Path("/proc/self/fd").iterdir():
        try:
            target = str(file.readlink())
        except OSError:
            continue  # it was the descriptor of this folder
        if target.startswith("socket:"):
            found.add(target)
    return found
