"""Modules imported before workers are forked, where a fork does not break them.

Some modules each worker must import by itself: one that starts a thread or a pool of OpenMP threads (a fork has none of
them, and waits for them for ever), opens a connection (all forks would write to the same), uses CUDA, or reads its rank
from the environment. What a module does is only known once it has been imported; so it is imported, and found out,
also by a fork made for that purpose. The process is then thrown away, and another one does without.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

__all__ = ["PreloadResult", "find_fork_hazard", "preload_modules", "watched_environ"]

_OF_A_WORKER: Final = {
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE",
    "EDL_GENERATION", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_CURRENT_ENDPOINT",
}  # fmt: skip
_TEST_FORK_S: Final = 10.0
"""For a fork to compute a sum: milliseconds, unless it waits for threads that only its parent has."""
_PARALLEL_ELEMENTS: Final = 1 << 18
"""Of a sum: torch splits it among threads from 32,768 (`at::internal::GRAIN_SIZE`) on."""


@dataclass
class PreloadResult:
    """Say which modules workers cannot have from a fork, and which could not be imported.

    Attributes:
        unfit: module -> why each worker must import it by itself.
        failed: what could not be imported, in words.
    """

    unfit: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


def preload_modules(modules: Iterable[tuple[str, str]], without: Collection[str]) -> PreloadResult:
    """Import modules, and find out whether a fork may have them.

    Args:
        modules: (module, name in it or ""). A name that is not there is the worker's to complain of.
        without: modules that workers must import by themselves.
    """
    done = PreloadResult()
    for module, name in dict.fromkeys(modules):
        if module not in done.unfit and module not in without:
            _import(module, name, done)
    return done


def find_fork_hazard() -> str:
    """Why a fork of this process, as it is now, is of no use; empty if it can compute in parallel and use CUDA.

    Found out by a fork. Its end is waited for, for ten seconds at most.
    """
    pid = os.fork()
    if pid == 0:
        code = _UNKNOWN
        try:
            code = _CUDA if _is_cuda_poisoned() else _compute_in_parallel()
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
            return "starts a pool of threads (OpenMP's, perhaps), for which a fork would wait for ever"
        time.sleep(0.001)


_CUDA, _UNKNOWN = 2, 3


def _is_cuda_poisoned() -> bool:
    """Whether this process is a fork of one that has touched CUDA's driver, in which CUDA cannot be used any more.

    `torch.cuda.is_initialized` does not tell: `is_available` and `device_count` touch the driver as well.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    is_in_bad_fork = getattr(torch._C, "_cuda_isInBadFork", None)  # missing in a build without CUDA
    return bool(torch.cuda.is_initialized() or (is_in_bad_fork is not None and is_in_bad_fork()))


def _compute_in_parallel() -> int:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.ones(_PARALLEL_ELEMENTS).add_(1)
    return 0


def _import(module: str, name: str, done: PreloadResult) -> None:
    threads, sockets, tasks = set(threading.enumerate()), _sockets(), _tasks()
    failure: BaseException | None = None
    with watched_environ(_OF_A_WORKER) as asked:
        try:
            imported = importlib.import_module(module)
            if name and not hasattr(imported, name):
                importlib.import_module(f"{module}.{name}")
        except BaseException as exc:  # noqa: BLE001 - whatever it is, the worker will raise it again, and be heard
            failure = exc
    ours = module.split(".")[0] in ("torch", "edl")
    if asked and not ours:
        done.unfit[module] = f"reads {', '.join(sorted(asked))}"
    elif failure is not None:
        done.failed.append(f"importing {module} ahead of time failed ({type(failure).__name__}: {failure})")
    elif any(thread.is_alive() for thread in set(threading.enumerate()) - threads) or _has_new_threads(tasks):
        done.unfit[module] = "starts a thread"
    elif _sockets() - sockets:
        done.unfit[module] = "opens a connection"
    elif not ours and (hazard := find_fork_hazard()):
        done.unfit[module] = hazard


class _Watched(os._Environ):  # type: ignore[type-arg]
    watched: Collection[str]
    asked: set[str]

    def __getitem__(self, key: str) -> str:
        if key in self.watched:
            self.asked.add(key)
        return str(super().__getitem__(key))


@contextmanager
def watched_environ(names: Collection[str]) -> Iterator[set[str]]:
    """Collect which of `names` are looked up in `os.environ` in the block, whether they are there or not."""
    asked: set[str] = set()
    plain = os.environ.__class__
    os.environ.__class__ = _Watched
    os.environ.watched, os.environ.asked = names, asked  # type: ignore[attr-defined]
    try:
        yield asked
    finally:
        os.environ.__class__ = plain


def _tasks() -> set[str]:
    """Threads of this process, those of native code included (Linux)."""
    return {path.name for path in Path("/proc/self/task").iterdir()}


def _has_new_threads(before: set[str]) -> bool:
    """Whether threads are there that were not before.

    OpenBLAS starts some when it is loaded, ends them before a fork and starts them again behind it (`pthread_atfork`):
    a fork ends them, so threads that are there after one are others'.
    """
    if not _tasks() - before:
        return False
    pid = os.fork()
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
            continue  # it was the folder's own
        if target.startswith("socket:"):
            found.add(target)
    return found
