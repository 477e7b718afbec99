"""The sign of life that an agent gives its workers: it says that the job is still this node's to go on with.

An agent that was stopped for a while may have lost its place in the job without knowing it. Its threads go on in any
order, so the sign is not given again before the records have been looked at.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

__all__ = ["Heartbeat"]

_BEAT_EVERY_S = 0.2


class Heartbeat:
    """A thread that beats from now until `close`, as long as it may. It beats on while the agent waits for the store.

    Args:
        stopped_s: after this long without a turn of its thread this process counts as having been stopped.
        beat: gives the sign.
        touch: called as often, also when the sign may not be given.
        wake: called when this process was stopped, so that the records are looked at.
    """

    def __init__(
        self, stopped_s: float, beat: Callable[[], object], touch: Callable[[], object], wake: Callable[[], object]
    ) -> None:
        self._stopped_s = max(stopped_s, 2 * _BEAT_EVERY_S)
        self._beat, self._touch, self._wake = beat, touch, wake
        self._allowed = (-math.inf, -math.inf)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="edl-heartbeat", daemon=True)
        self._thread.start()

    def allow_beats(self, asked_at: float, until: float) -> None:
        """The job's records, asked for at `asked_at`, have the workers go on; `until` then if it is the last word."""
        self._allowed = asked_at, until

    def close(self) -> None:
        """Stop."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        resumed_at = last = time.monotonic()
        while not self._closing.wait(_BEAT_EVERY_S):
            now = time.monotonic()
            if now - last > self._stopped_s:
                resumed_at = now
                self._wake()
            last = now
            self._touch()
            asked_at, until = self._allowed
            if asked_at >= resumed_at and now < until:
                self._beat()
