"""What a forked process has inherited and a new process would not have: random numbers, names and caches."""

from __future__ import annotations

import ctypes
import importlib
import os
import random
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = ["limit_threads", "renew_state", "show_command_line", "undo_side_effects"]

_ARG_START: Final = 47
"""Field of `/proc/self/stat`, counted from 0: https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html"""


def renew_state() -> None:
    """Give this process, just forked, what a new process has and all forks of a parent would share."""
    _seed_generators()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    importlib.invalidate_caches()  # a folder may have come since
    main_thread = threading.main_thread()
    if hasattr(main_thread, "_set_native_id"):  # Python renews it by itself since 3.13 only
        main_thread._set_native_id()


def limit_threads(environ: Mapping[str, str]) -> None:
    """Have torch, where it is imported already, use as many threads as if it were imported now.

    Args:
        environ: may say how many, by OMP_NUM_THREADS.
    """
    torch = sys.modules.get("torch")
    number = environ.get("OMP_NUM_THREADS", "")
    if torch is not None and number.isdecimal() and int(number):
        torch.set_num_threads(int(number))


def _seed_generators() -> None:
    """Seed global generators, which in all forks of a parent would go on with the same numbers."""
    random.seed()
    modules = sys.modules
    if "numpy" in modules:
        modules["numpy"].random.seed()
    if "torch" in modules:
        modules["torch"].default_generator.seed()
    if "paddle" in modules:
        modules["paddle"].framework.core.default_cpu_generator().seed()


def show_command_line(arguments: Sequence[str]) -> None:
    """Have `ps` show other arguments of this process than it was started with.

    The bytes are replaced where the kernel reads them, which is how setproctitle(3) works. Nothing happens where they
    are not as expected, or the new arguments are longer.

    Args:
        arguments: what is to follow the interpreter's name.
    """
    before = Path("/proc/self/cmdline").read_bytes()
    begin = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[_ARG_START - 2])
    name, separator, rest = before.partition(b"\0")
    wanted = b"".join(os.fsencode(argument) + b"\0" for argument in arguments)
    if not begin or len(wanted) > len(rest) or ctypes.string_at(begin, len(before)) != before:
        return
    ctypes.memmove(begin + len(name + separator), wanted.ljust(len(rest), b"\0"), len(rest))


@contextmanager
def undo_side_effects() -> Iterator[None]:
    """Leave the environment, the filters of warnings and the folder for temporary files as they were before the block.

    For imports that a script would make later: meanwhile it may have set what they depend on.
    """
    environ = dict(os.environ)
    folder = tempfile.tempdir
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for name in os.environ.keys() - environ.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in environ.items() if os.environ.get(name) != value})
        tempfile.tempdir = folder
