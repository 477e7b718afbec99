"""The end of this process together with another process, so that no teacher outlives the process that started it."""

from __future__ import annotations

import functools
import os
import select
import signal
import sys

from edl.background import BackgroundLoop
from edl.errors import SettingsError

_POLL_S = 0.25  # without pidfd; a port that is used again by a test is free this soon


def terminate_with_parent(pid: int) -> None:
    """Send this process SIGTERM when process `pid` ends, however it ends.

    This process moves to a process group of its own. When the group's last tie to its session goes with the other
    process, the kernel sends its *stopped* members SIGHUP and SIGCONT (setpgid(2), POSIX "orphaned process group"), so
    that a process paused by SIGSTOP, whose threads cannot notice anything, goes as well.
    """
    try:
        watched = _open(pid)
    except ProcessLookupError as exc:
        raise SettingsError(f"--exit-with {pid}: there is no such process") from exc
    if os.getpgrp() != os.getpid() and os.getsid(0) != os.getpid():
        os.setpgid(0, 0)
    BackgroundLoop("edl-parent-watch", functools.partial(_terminate_if_gone, pid, watched))


def _open(pid: int) -> int | None:
    if sys.platform == "linux":
        try:
            return os.pidfd_open(pid)
        except ProcessLookupError:
            raise
        except OSError:
            pass  # a kernel or sandbox without it
    if not _is_alive(pid):
        raise ProcessLookupError
    return None


def _terminate_if_gone(pid: int, watched: int | None) -> float | None:
    """Send SIGTERM if the process has ended; return the seconds to wait before the next look, None for no more."""
    if watched is not None:
        select.select([watched], [], [])
    elif _is_alive(pid):
        return _POLL_S
    os.kill(os.getpid(), signal.SIGTERM)
    return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's, but there
    return True
