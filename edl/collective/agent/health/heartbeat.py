"""The sign of life that an agent gives its workers: it says that the job is still this node's to go on with.

An agent that was stopped for a while may have lost its place in the job without knowing it. Its threads go on in any
order, so the sign is not given again before the records have been looked at.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from edl.background import BackgroundLoop

__all__ = ["Heartbeat"]

_INTERVAL_S: Final = 0.2
"""Between two beats: several fit into a lease (1.5 s unless set otherwise), so a beat that is late stops no worker."""


class Heartbeat:
    """Beats from now until `close`, as long as it may; also while the agent waits for the store.

    Args:
        stopped_s: after that many seconds without a turn of its thread this process counts as having been stopped.
        beat: gives the sign, which is of the moment it is called with (`time.monotonic()`): a process that is stopped
            in the middle of a turn gives an old one when it goes on.
        touch: called as often, also when the sign may not be given.
        wake: called when this process was stopped, so that the records are looked at.
        clock: `time.monotonic`.
    """

    def __init__(
        self,
        stopped_s: float,
        beat: Callable[[float], object],
        touch: Callable[[], object],
        wake: Callable[[], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stopped_s = max(stopped_s, 2 * _INTERVAL_S)
        self._beat = beat
        self._touch = touch
        self._wake = wake
        self._clock = clock
        self._allowed = (-math.inf, -math.inf)
        self._resumed_at = clock()
        self._turn_at = self._resumed_at
        self._loop = BackgroundLoop("edl-heartbeat", self._turn)

    def allow_beats(self, asked_at: float, until: float) -> None:
        """Allow beats, since the job's records have the workers go on.

        Args:
            asked_at: when the records were asked for (`time.monotonic()`).
            until: when beats end if nothing more is heard of the records (`time.monotonic()`).
        """
        self._allowed = asked_at, until

    def close(self) -> None:
        """End the beats."""
        self._loop.close()

    def _turn(self) -> float:
        now = self._clock()
        if now - self._turn_at > self._stopped_s:
            self._resumed_at = now
            self._wake()
        self._turn_at = now
        self._touch()
        asked_at, until = self._allowed
        if asked_at >= self._resumed_at and now < until:
            self._beat(now)
        return _INTERVAL_S
