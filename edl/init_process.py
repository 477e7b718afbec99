"""Process 1 of a container, which has duties that no program of EDL's shall know of.

Linux ignores a signal to process 1 that has no handler, so that SIGTERM to a program that is still importing is lost,
and a pod takes all of its grace period to end. And every process whose parent has died becomes a child of process 1:
what a killed worker leaves behind (the workers of a `DataLoader`, say) stays as a zombie until process 1 waits for it.

A container whose image starts `tini` or another init needs none of this, nor a pod with `shareProcessNamespace`: EDL is
not process 1 there.
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
"""Signals that a fault of this process raises; blocked, they would end it without a trace."""


def run_init() -> int | None:
    """Fork, if this is process 1: the child goes on, and this process is its init.

    Init hands signals on to the child and waits for the processes whose parents have died. Call this before there are
    threads.

    Returns:
        None in the child, and where this is not process 1. In process 1 the exit code of the child, which has ended,
        128 and the signal's number if a signal ended it: to be exited with at once.
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
        elif received.si_code <= 0:  # a process sent it; Ctrl-C of a terminal reaches the child without this process
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, received.si_signo)


def _reap() -> Iterator[tuple[int, int]]:
    """Yield process id and wait status of the children that have ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status
