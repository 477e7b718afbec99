"""What a process does, in numbers that depend little on the machine: copies, system calls, wake-ups, instructions.

Each is counted where the machine lets us, and is missing where it does not:

- copies by a library put in front of the C library (`_copies.c`, compiled by `cc` when it is wanted);
- system calls by the kernel's tracepoint, instructions by the processor: perf_event_open(2), which needs root or
  `kernel.perf_event_paranoid` of -1 or 1, and a processor whose counters a virtual machine may see;
- instructions otherwise by valgrind's callgrind, some fifty times slower, so that timers run out more often;
- context switches from /proc.
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
    """What makes a process count its copies in `folder`; empty where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return {}
    library = folder / "copies.so"
    command = [compiler, "-O2", "-shared", "-fPIC", "-fno-builtin", "-o", str(library), str(_SOURCE), "-ldl"]
    if subprocess.run(command, check=False, stderr=sys.stderr).returncode:
        return {}
    return {"LD_PRELOAD": str(library), COPIES: str(folder)}


def under_callgrind(command: list[str], folder: Path) -> tuple[list[str], dict[str, str]] | None:
    """A command, and its environment, whose instructions `Counters` counts; None where there is no valgrind."""
    if shutil.which("valgrind") is None or shutil.which("callgrind_control") is None:
        return None
    flags = ["--tool=callgrind", "--trace-children=yes", "--trace-children-skip=*callgrind_control*,*vgdb*"]
    return ["valgrind", *flags, f"--callgrind-out-file={folder}/%p", *command], {CALLGRIND: str(folder)}


def has_instructions() -> bool:
    """Whether the processor's own count of instructions can be had."""
    with contextlib.suppress(OSError):
        os.close(_opened(_HARDWARE, _INSTRUCTIONS, os.getpid(), _EXCLUDE_KERNEL | _EXCLUDE_HV))
        return True
    return False


class Counters:
    """Counts what one process does from now until `close`: all of its threads, those included that it starts.

    Args:
        pid: of a process that was started with the environment of `copies_environment` or `under_callgrind`, or
            without, if those counts are not wanted.
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
        """What was counted, by name; a name is missing where it could not be."""
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
    """Voluntary ones: each is a wait that somebody ends. How often a thread is interrupted depends on the load."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        found = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", (thread / "status").read_text(), re.MULTILINE)
        return int(found.group(1)) if found is not None else 0
    return 0


def _control(what: str, pid: int) -> None:
    subprocess.run(["callgrind_control", what, str(pid)], check=True, stdout=subprocess.DEVNULL)


def _last_total(folder: Path, pid: int) -> int:
    """Instructions of the newest of the files that callgrind has written for this process."""
    newest = max(folder.glob(f"{pid}.*"), key=lambda path: int(path.suffix[1:]))
    for line in reversed(newest.read_text(errors="replace").splitlines()):
        if line.startswith("totals: "):
            return int(line.split()[1])
    raise RuntimeError(f"{newest} has no line with totals")
