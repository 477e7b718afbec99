"""Log lines about a model that keeps failing, without filling the disk with them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

__all__ = ["Complaints"]

_EVERY_S = 10.0


class Complaints:
    """Logs the first fault of a kind in full, and then one line in ten seconds with how many there were since.

    Args:
        log: where to.
        clock: seconds, monotonic.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._said: dict[str, tuple[float, int]] = {}  # kind -> when a line was written, faults since

    def add(self, kind: str, message: str, exc: BaseException | None = None) -> None:
        """A fault of `kind`; `exc` gives the stack."""
        now = self._clock()
        if kind not in self._said:
            self._said[kind] = (now, 0)
            self._log.error("%s", message, exc_info=exc)
            return
        written_at, since = self._said[kind]
        since += 1
        if now - written_at < _EVERY_S:
            self._said[kind] = (written_at, since)
            return
        self._said[kind] = (now, 0)
        self._log.error("%s (%d faults of this kind in %.0f s)", message, since, now - written_at)
