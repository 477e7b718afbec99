"""The end of this process together with another process, so that no teacher outlives the process that started it."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time

from edl.errors import SettingsError

__all__ = ["terminate_with_parent"]

_POLL_S = 0.25  # without pidfd; a port that is used again by a test is free this soon


def terminate_with_parent(pid: int) -> None:
    """Send this process SIGTERM when process `pid` ends, however it ends.

    This process moves to a process group of its own. When the group's last tie to its session goes with the other
    process, the kernel sends its *stopped* members SIGHUP and SIGCONT (setpgid(2), POSIX "orphaned process group"), so
    that a process paused by SIGSTOP, whose threads cannot notice anything, goes as well.

    Args:
        pid: of the other process.

    Raises:
        SettingsError: there is no such process.
    """
    try:
        watched = _open(pid)
    except ProcessLookupError as exc:
        raise SettingsError(f"--exit-with {pid}: there is no such process") from exc
    if os.getpgrp() != os.getpid() and os.getsid(0) != os.getpid():
        os.setpgid(0, 0)
    threading.Thread(target=_wait, args=(pid, watched), name="edl-leash", daemon=True).start()


def _open(pid: int) -> int | None:
    if sys.platform == "linux":
        try:
            return os.pidfd_open(pid)
        except ProcessLookupError:
            raise
        except OSError:
            pass  # a kernel or sandbox without it
    try:
        os.kill(pid, 0)
    except PermissionError:
        pass  # somebody else's, but there
    return None


def _wait(pid: int, watched: int | None) -> None:
    if watched is not None:
        select.select([watched], [], [])
    else:
        try:
            while True:
                os.kill(pid, 0)
                time.sleep(_POLL_S)
        except ProcessLookupError:
            pass
    os.kill(os.getpid(), signal.SIGTERM)
