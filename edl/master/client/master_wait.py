"""How long a caller waits for a master that is away, and what the log says of it."""

from __future__ import annotations

import logging
import time
from typing import Final

from edl.backoff import Backoff
from edl.errors import NoMasterError

__all__ = ["MasterWait"]

logger = logging.getLogger(__name__)

_RETRY_S: Final = (0.1, 1.0)
"""The first and the longest wait: a master that was started again answers after half a second."""
_QUIET_S: Final = 1.0
"""A master that is away for less, as one that is just being started, is not spoken of."""


class MasterWait:
    """Knows since when a master is away. Not thread-safe, but for reading.

    Args:
        job: its name, for the log.
        timeout_s: how long callers wait, for the log.
    """

    def __init__(self, job: str, timeout_s: float) -> None:
        self._job = job
        self._timeout_s = timeout_s
        self._backoff = Backoff(*_RETRY_S, jitter=0.5)
        self.away_since: float | None = None
        """In seconds of `time.monotonic()`; None while the master answers."""
        self.reason = ""
        self._logged = False

    def failed(self, exc: NoMasterError) -> float:
        """Note that it did not answer; return the seconds until the next attempt."""
        self.reason = str(exc)
        if self.away_since is None:
            self.away_since = time.monotonic()
            logger.warning("no master of job %r answers (%s): waiting for up to %g s", self._job, exc, self._timeout_s)
        return self._backoff.next_wait_s()

    def answered(self) -> None:
        """Note that it answers."""
        if self.away_since is not None:
            away_s = time.monotonic() - self.away_since
            if self._logged:
                logger.info("the master of job %r answers, after %.1f s", self._job, away_s)
            self.away_since = None
            self._logged = False
        self._backoff.reset()

    def error(self) -> NoMasterError:
        """Return what a caller gets that has waited for long enough."""
        return NoMasterError(
            f"no master of job {self._job!r} answered within {self._timeout_s:g} s ({self.reason}): start one with "
            f"`edl master {self._job}`, with the same store"
        )
