"""The guard against processes that a model forked: no code of the server's may run in them."""

from __future__ import annotations

import os
import sys
import traceback

__all__ = ["exit_if_forked"]


def exit_if_forked(pid: int) -> None:
    """End this process at once if it is not the server's: a child whose work left the model.

    It has the server's sockets and none of its other threads. It would go on as a worker that is never stopped, and
    exit handlers would tear down what is the parent's.

    Args:
        pid: of the server.
    """
    if os.getpid() == pid:
        return
    exc = sys.exc_info()[1]
    code = exc.code if isinstance(exc, SystemExit) else 1
    if exc is not None and not isinstance(exc, SystemExit):
        os.write(2, "".join(traceback.format_exception(exc)).encode(errors="replace"))
    os._exit(code if isinstance(code, int) else int(code is not None))
