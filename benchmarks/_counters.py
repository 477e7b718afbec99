"""Counts a process's copies, system calls, wake-ups and instructions, which depend little on the machine.

Each figure is missing if the machine does not allow counting it:

- copies are counted by a library put in front of the C library (`_copies.c`, compiled with `cc` when needed);
- system calls are counted by the kernel's tracepoint and instructions by the processor, with perf_event_open(2). It
  needs root or a `kernel.perf_event_paranoid` of -1 or 1, and counters that a virtual machine can read;
- otherwise valgrind's callgrind counts instructions, which is about fifty times slower, so timers expire more often;
- context switches come from /proc.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

__all__ = ["CALLGRIND", "COPIES", "Counters", "copies_environment", "has_instructions", "under_callgrind"]

COPIES = "EDL_BENCH_COPIES"
CALLGRIND = "EDL_BENCH_CALLGRIND"

_SOURCE = Path(__file__).with_name("_copies.c")
_COPIED_KEYS = ("copied", "copies", "sent", "received")
_TRACING = Path("/sys/kernel/tracing/events/raw_syscalls/sys_enter/id")
_HARDWARE, _TRACEPOINT = 0, 2  # perf_type_id
_INSTRUCTIONS = 1  # perf_hw_id
_INHERIT, _EXCLUDE_KERNEL, _EXCLUDE_HV = 1 << 1, 1 << 5, 1 << 6  # bits of perf_event_attr
_ATTR_NBYTES = 136  # PERF_ATTR_SIZE_VER8, the newest; the kernel takes a longer one if the rest is zero
_CLOSE_ON_EXEC = 8
_CALLS = {"x86_64": 298, "aarch64": 241}  # perf_event_open's number


def copies_environment(folder: Path) -> dict[str, str]:
    """Return the environment in which a process counts its copies in `folder`; empty if there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return {}
    library = folder / "copies.so"
    command = [compiler, "-O2", "-shared", "-fPIC", "-fno-builtin", "-o", str(library), str(_SOURCE), "-ldl"]
    if subprocess.run(command, check=False, stderr=sys.stderr).returncode:
        return {}
    return {"LD_PRELOAD": str(library), COPIES: str(folder)}


def under_callgrind(command: list[str], folder: Path) -> tuple[list[str], dict[str, str]] | None:
    """Return a command and its environment for which `Counters` counts instructions; None without valgrind."""
    if shutil.which("valgrind") is None or shutil.which("callgrind_control") is None:
        return None
    flags = ["--tool=callgrind", "--trace-children=yes", "--trace-children-skip=*callgrind_control*,*vgdb*"]
    return ["valgrind", *flags, f"--callgrind-out-file={folder}/%p", *command], {CALLGRIND: str(folder)}


def has_instructions() -> bool:
    """Return whether the processor's own instruction counter can be read."""
    with contextlib.suppress(OSError):
        os.close(_opened(_HARDWARE, _INSTRUCTIONS, os.getpid(), _EXCLUDE_KERNEL | _EXCLUDE_HV))
        return True
    return False


class Counters:
    """Counts what all threads of a process do from now until `close`, including threads that it starts later.

    Args:
        pid: Id of a process. To count copies or instructions under callgrind, it must have been started with the
            environment from `copies_environment` or `under_callgrind`.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._events: dict[str, list[int]] = {}
        with contextlib.suppress(OSError):
            self._open("syscalls", _TRACEPOINT, int(_TRACING.read_text()), 0)
        with contextlib.suppress(OSError):
            self._open("instructions", _HARDWARE, _INSTRUCTIONS, _EXCLUDE_KERNEL | _EXCLUDE_HV)
        if CALLGRIND in os.environ:
            _control("-z", pid)
        self._begin = self._read()

    def close(self) -> dict[str, float]:
        """Return the counts by name, without those that could not be counted."""
        ended = self._read()
        found: dict[str, float] = {name: count - self._begin[name] for name, count in ended.items()}
        for files in self._events.values():
            for file in files:
                os.close(file)
        if CALLGRIND in os.environ:
            _control("-d", self._pid)
            found["instructions"] = _last_total(Path(os.environ[CALLGRIND]), self._pid)
        return found

    def _open(self, name: str, kind: int, config: int, flags: int) -> None:
        files = self._events.setdefault(name, [])
        try:
            for thread in Path(f"/proc/{self._pid}/task").iterdir():
                files.append(_opened(kind, config, int(thread.name), flags | _INHERIT))
        except OSError:
            for file in self._events.pop(name):
                os.close(file)
            raise

    def _read(self) -> dict[str, int]:
        found = {
            name: sum(struct.unpack("<Q", os.read(file, 8))[0] for file in files)
            for name, files in self._events.items()
        }
        found["switches"] = sum(_switches(thread) for thread in Path(f"/proc/{self._pid}/task").iterdir())
        path = Path(os.environ.get(COPIES, "")) / str(self._pid)
        if COPIES in os.environ and path.exists():
            found.update(zip(_COPIED_KEYS, struct.unpack("<4Q", path.read_bytes()), strict=True))
        return found


def _opened(kind: int, config: int, thread: int, flags: int) -> int:
    number = _CALLS.get(os.uname().machine)
    if number is None:
        raise OSError(f"the number of perf_event_open on {os.uname().machine} is not known here")
    fields = struct.pack("<IIQQQQQ", kind, _ATTR_NBYTES, config, 0, 0, 0, flags)
    libc = ctypes.CDLL(None, use_errno=True)
    attributes = ctypes.create_string_buffer(fields.ljust(_ATTR_NBYTES, b"\0"), _ATTR_NBYTES)
    file: int = libc.syscall(number, attributes, thread, -1, -1, _CLOSE_ON_EXEC)
    if file < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return file


def _switches(thread: Path) -> int:
    """Return the number of voluntary context switches. Involuntary ones would depend on the load of the machine."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        found = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", (thread / "status").read_text(), re.MULTILINE)
        return int(found.group(1)) if found is not None else 0
    return 0


def _control(what: str, pid: int) -> None:
    subprocess.run(["callgrind_control", what, str(pid)], check=True, stdout=subprocess.DEVNULL)


def _last_total(folder: Path, pid: int) -> int:
    """Return the instructions in the newest file that callgrind has written for this process."""
    newest = max(folder.glob(f"{pid}.*"), key=lambda path: int(path.suffix[1:]))
    for line in reversed(newest.read_text(errors="replace").splitlines()):
        if line.startswith("totals: "):
            return int(line.split()[1])
    raise RuntimeError(f"{newest} has no line with totals")
