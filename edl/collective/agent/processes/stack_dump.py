"""Dumps a worker's stacks on request. The worker sets up a signal handler; the agent sends a signal and reads a file.

`faulthandler` writes from within the signal handler, without the interpreter's lock, so a worker answers even if it
hangs in native code or holds that lock. A stopped process (SIGSTOP) runs no handler, and a process in an
uninterruptible system call runs the handler only after the call. So neither can show its stacks.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

_SIGNAL: Final = signal.SIGUSR2
_POLL_S: Final = 0.01  # between two looks at the file: a dump of some threads takes a few milliseconds
_QUIET_S: Final = 0.05  # a dump that has not grown for this long is complete; `faulthandler` writes no end
_MAX_NBYTES: Final = 200_000  # most bytes of a dump that are read: some hundred threads
_DESCRIPTOR: Final = 200  # lowest to use: above what scripts count on, below the usual limit of open files (256)

_armed: IO[bytes] | None = None


def arm_stack_dump(path: Path) -> None:
    """Make this process write the stacks of all its threads to a file when it gets SIGUSR2."""
    global _armed
    with path.open("ab", buffering=0) as file:
        # Not the lowest free descriptor. So the script's own files get the same numbers as under torchrun, and if a
        # script closes all descriptors that it knows of, as daemons do, the dump goes to no other file.
        number = fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, _DESCRIPTOR)
    before, _armed = _armed, os.fdopen(number, "ab", buffering=0)
    faulthandler.register(_SIGNAL, file=_armed, all_threads=True, chain=False)
    if before is not None:
        before.close()


def dump_stacks(workers: Sequence[tuple[int, Path]], timeout_s: float = 2.0) -> list[str]:
    """Return the stacks of workers (pid, path given to `arm_stack_dump`), or why there are none, within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    asked = [_ask(pid, path) for pid, path in workers]
    return [
        answer if isinstance(answer, str) else _collect(pid, path, answer, deadline)
        for (pid, path), answer in zip(workers, asked, strict=True)
    ]


def _ask(pid: int, path: Path) -> int | str:
    """Send the signal. Returns where in the file the answer will begin, or why nothing was sent."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        if not int(_field(status, "SigCgt"), 16) >> (_SIGNAL - 1) & 1:
            return f"process {pid} has ended, or has no handler yet for SIGUSR2 (which would end it): it shows no stack"
        size = path.stat().st_size if path.exists() else 0
        os.kill(pid, _SIGNAL)
    except (FileNotFoundError, ProcessLookupError):
        return f"process {pid} has ended: it has no stack"
    return size


def _collect(pid: int, path: Path, begin: int, deadline: float) -> str:
    """Return what is written after `begin` once nothing more is added, or at the deadline; or why there is nothing."""
    size = begin
    quiet_since = time.monotonic()
    while (now := time.monotonic()) < deadline:
        newest = path.stat().st_size if path.exists() else 0
        if newest != size:
            size, quiet_since = newest, now
        elif size > begin and now - quiet_since > _QUIET_S:
            break
        time.sleep(_POLL_S)
    if size == begin:
        return f"process {pid} did not show its stack: {_excuse(pid)}"
    with path.open("rb") as file:
        file.seek(begin)
        return file.read(_MAX_NBYTES).decode(errors="replace").strip()


def _excuse(pid: int) -> str:
    try:
        state = _field(Path(f"/proc/{pid}/status").read_text(), "State")
    except FileNotFoundError:
        return "it has ended"
    return f"it is in state {state!r}; if it runs or sleeps, the script may use SIGUSR2 itself"


def _field(status: str, name: str) -> str:
    found = re.search(rf"^{name}:\s*(.*)$", status, re.MULTILINE)
    return found[1] if found else "0"
