"""The pipe through which an agent tells a worker, which goes on in its process, of the next generation.

An announcement is the whole environment that a new worker would get, as a line of JSON, with an empty line before it:
what is left of an announcement that was given up in the middle then damages no other. The agent writes, and
`edl.collective.inprocess.control_pipe` reads; what does not belong here: what follows from an announcement.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

__all__ = ["EnvironmentDecoder", "send_environments"]

logger = logging.getLogger(__name__)

_SEND_TIMEOUT_S: Final = 0.5
"""For workers to read announcements that are longer than a pipe holds (64 KiB, or 4 KiB where a user has many pipes). A
thread of theirs reads at once. The agent does nothing else meanwhile, and a worker has 2 s to go on."""


def send_environments(environs: Mapping[Path, Mapping[str, str]], timeout_s: float = _SEND_TIMEOUT_S) -> set[Path]:
    """Announce the next generation to workers.

    Args:
        environs: the workers' environments, by the paths of their pipes.
        timeout_s: how long all of them may take to read, in seconds.

    Returns:
        The pipes of workers that have the whole environment. The others do not listen, or not quickly enough: they are
        to be replaced.
    """
    sent: set[Path] = set()
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        poller = select.poll()
        unsent: dict[int, tuple[Path, bytes]] = {}
        for path, environ in environs.items():
            with contextlib.suppress(OSError):  # ENXIO: no worker has it open
                pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                stack.callback(os.close, pipe)
                poller.register(pipe, select.POLLOUT)
                unsent[pipe] = path, b"\n" + json.dumps(dict(environ)).encode() + b"\n"
        while unsent:
            for pipe, _ in poller.poll(1000 * max(0.0, deadline - time.monotonic())):
                path, data = unsent.pop(pipe)
                left = _write_some(pipe, data)
                if left:
                    unsent[pipe] = path, left
                    continue
                poller.unregister(pipe)
                if left is not None:
                    sent.add(path)
            if time.monotonic() >= deadline:
                break
    return sent


def _write_some(pipe: int, data: bytes) -> bytes | None:
    """Write what there is room for. Returns what is left; None if no worker reads any more."""
    try:
        return data[os.write(pipe, data) :]
    except BlockingIOError:
        return data
    except OSError:
        return None


class EnvironmentDecoder:
    """Puts environments together from what is read of a pipe, piece by piece."""

    def __init__(self) -> None:
        self._partial_line = b""

    def feed_bytes(self, data: bytes) -> list[dict[str, str]]:
        """Return the environments that `data` completes; a part of a line, which is no environment, is left out."""
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        environs = []
        for line in filter(None, lines):
            try:
                environs.append(dict(json.loads(line)))
            except (ValueError, TypeError):
                logger.warning("an announcement of %d bytes is incomplete, and left out", len(line))
        return environs
