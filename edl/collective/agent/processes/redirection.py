"""Where a worker's output goes."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping

__all__ = ["redirect_output"]


def redirect_output(environ: Mapping[str, str]) -> None:
    """Send this process's output, and its children's, to files.

    Args:
        environ: `EDL_STDOUT` and `EDL_STDERR` name the files, where they are set.
    """
    for name, stream, descriptor in (("EDL_STDOUT", sys.stdout, 1), ("EDL_STDERR", sys.stderr, 2)):
        path = environ.get(name)
        if path:
            stream.flush()
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(file, descriptor)
            os.close(file)
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=False)  # as where the process had found a file
