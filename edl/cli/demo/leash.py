"""Runs `edl` so that it dies with the process that started it, even if that one is killed.

`python -m edl.cli.demo.leash serve ...` is `edl serve ...` on a leash: Linux sends SIGKILL when the parent's thread
that started it ends (prctl(2), PR_SET_PDEATHSIG). Elsewhere it is just `edl serve ...`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from edl.cli import main

_PR_SET_PDEATHSIG = 1


def put_on_leash(parent: int) -> None:
    """Die with `parent`, a process id, which may have died before this is called."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


if __name__ == "__main__":
    put_on_leash(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
