"""Handles the duties of process 1 in a container, separately from EDL's programs.

Linux ignores signals without a handler in process 1, so a SIGTERM to a program that is still importing is lost, and a
pod uses its whole grace period to end. Also, every process whose parent has died becomes a child of process 1: children
of a killed worker (such as a `DataLoader`'s workers) remain zombies until process 1 waits for them.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

_SYNCHRONOUS = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGTRAP,
    signal.SIGABRT,
}
"""Signals raised by faults of this process itself; if they were blocked, they would end the process without a
traceback."""


def run_init() -> int | None:
    """Fork if this is process 1: the child continues, and this process becomes the init process.

    Init forwards signals to the child and reaps processes whose parents have died. Call this before starting threads.
    Returns None in the child, and if this is not process 1. In process 1, the function returns after the child has
    ended, with the child's exit code (128 plus the signal's number if a signal ended the child): exit immediately with
    this code.
    """
    if os.getpid() != 1:
        return None
    handled = signal.valid_signals() - _SYNCHRONOUS
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, handled)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return None
    while True:
        received = signal.sigwaitinfo(handled)
        if received.si_signo == signal.SIGCHLD:
            for pid, status in _reap():
                if pid == child:
                    code = os.waitstatus_to_exitcode(status)
                    return code if code >= 0 else 128 - code
        elif received.si_code <= 0:  # sent by a process; a terminal's Ctrl-C reaches the child directly
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, received.si_signo)


def _reap() -> Iterator[tuple[int, int]]:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status
