"""What a script imports, imported before workers are forked, where that changes nothing.

Some modules must be imported by each worker itself: one that starts a thread (a fork has none), opens a connection (all
forks would write to the same), uses CUDA, or reads its rank from the environment. What a module does is only known
once it has been imported; so it is imported, and found out. The process is then thrown away, and another one does
without.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Imported", "import_ahead", "imports_of"]

_OF_A_WORKER = {
    "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "EDL_GENERATION", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_CURRENT_ENDPOINT",
}  # fmt: skip


@dataclass
class Imported:
    """What came of it.

    Attributes:
        unfit: module -> why each worker must import it by itself.
        failed: what could not be imported and will be for certain, in words.
    """

    unfit: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


def imports_of(source: str) -> Iterator[tuple[str, bool]]:
    """The modules that a Python program imports at its top level, and whether it cannot do without.

    Blocks of `if`, `with` and `try` are looked into; it may do without what it imports in a `try`, or `if` something is
    so. Relative imports, and what is imported `if TYPE_CHECKING`, are left out.

    Raises:
        SyntaxError: it is no Python program.
        ValueError: the same, if it has null bytes.
    """
    pending: list[tuple[ast.stmt, bool]] = [(node, True) for node in ast.parse(source).body]
    while pending:
        node, needed = pending.pop(0)
        if isinstance(node, ast.Import):
            yield from ((alias.name, needed) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, needed
        elif isinstance(node, ast.If):
            body = [] if "TYPE_CHECKING" in ast.unparse(node.test) else node.body
            pending += [(one, needed and _is_main(node)) for one in (*body, *node.orelse)]
        elif isinstance(node, ast.Try):
            pending += [(one, False) for one in (*node.body, *node.orelse)]
            pending += [(one, needed) for one in node.finalbody]
        elif isinstance(node, ast.With):
            pending += [(one, needed) for one in node.body]


def _is_main(node: ast.If) -> bool:
    """Whether it is `if __name__ == "__main__"`, which it always is in a worker."""
    return ast.unparse(node.test) == "__name__ == '__main__'"


def import_ahead(program: Path, folder: Path, without: Collection[str]) -> Imported:
    """Import what `program` imports.

    Args:
        program: a Python file.
        folder: where the program's own modules are.
        without: modules that workers must import by themselves. What these import is imported in their place, if
            they are the program's own.
    """
    done = Imported()
    seen: set[str] = set()
    pending = [program]
    while pending:
        for name, needed in _listed(pending.pop(0)):
            if name in seen:
                continue
            seen.add(name)
            if any(name == one or name.startswith(one + ".") for one in without):
                pending += _own_source(folder, name)
            else:
                _import(name, needed, done)
    return done


def _listed(path: Path) -> list[tuple[str, bool]]:
    try:
        return list(imports_of(path.read_text()))
    except (OSError, SyntaxError, ValueError):
        return []  # the worker will say it


def _own_source(folder: Path, name: str) -> list[Path]:
    path = folder.joinpath(*name.split("."))
    return [found for found in (path.with_suffix(".py"), path / "__init__.py") if found.is_file()]


def _import(name: str, needed: bool, done: Imported) -> None:
    threads, sockets = set(threading.enumerate()), _sockets()
    failure: BaseException | None = None
    with _watched_environ() as asked:
        try:
            importlib.import_module(name)
        except BaseException as exc:  # noqa: BLE001 - whatever it is, the worker will raise it again, and be heard
            failure = exc
    if asked and not name.startswith(("torch.", "edl.")):
        done.unfit[name] = f"reads {', '.join(sorted(asked))}"
    elif failure is not None:
        if needed:  # else nobody may ever miss it, and a worker that does will raise this again, and be heard
            done.failed.append(f"importing {name} ahead of time failed ({type(failure).__name__}: {failure})")
    elif _uses_cuda():
        done.unfit[name] = "uses CUDA"
    elif any(thread.is_alive() for thread in set(threading.enumerate()) - threads):
        done.unfit[name] = "starts a thread"
    elif _sockets() - sockets:
        done.unfit[name] = "opens a connection"


class _Watched(os._Environ):  # type: ignore[type-arg]
    asked: set[str]

    def __getitem__(self, key: str) -> str:
        if key in _OF_A_WORKER:
            self.asked.add(key)
        return str(super().__getitem__(key))


@contextmanager
def _watched_environ() -> Iterator[set[str]]:
    """The names of a worker's own variables that are asked for in the block."""
    asked: set[str] = set()
    plain = os.environ.__class__
    os.environ.__class__ = _Watched
    os.environ.asked = asked  # type: ignore[attr-defined]
    try:
        yield asked
    finally:
        os.environ.__class__ = plain


def _uses_cuda() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _sockets() -> set[str]:
    found = set()
    for file in Path("/proc/self/fd").iterdir():
        try:
            target = str(file.readlink())
        except OSError:
            continue  # it was the folder's own
        if target.startswith("socket:"):
            found.add(target)
    return found
