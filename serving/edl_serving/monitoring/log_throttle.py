"""Log lines about a model that keeps failing, at a limited rate."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

__all__ = ["LogThrottle"]

_EVERY_S = 10.0  # 9,000 lines a day at most, while a person who watches sees that it goes on


class LogThrottle:
    """Logs the first fault of a kind in full, and then a line in ten seconds with how many there were since.

    Args:
        log: the logger that lines go to.
        clock: seconds, monotonic.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._logged: dict[str, tuple[float, int]] = {}  # kind -> when a line was written, faults since

    def log_error(self, kind: str, message: str, exc: BaseException | None = None) -> None:
        """Log a fault, or count it.

        Args:
            kind: faults of the same kind share a rate.
            message: of the line.
            exc: whose stack is logged with the first fault of the kind.
        """
        now = self._clock()
        if kind not in self._logged:
            self._logged[kind] = (now, 0)
            self._log.error("%s", message, exc_info=exc)
            return
        written_at, since = self._logged[kind]
        since += 1
        if now - written_at < _EVERY_S:
            self._logged[kind] = (written_at, since)
            return
        self._logged[kind] = (now, 0)
        self._log.error("%s (%d faults of this kind in %.0f s)", message, since, now - written_at)
