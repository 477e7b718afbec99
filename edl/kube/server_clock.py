"""`ServerClock`: the API server's time, by the `Date` of its answers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Final

__all__ = ["ServerClock"]

logger = logging.getLogger(__name__)

_DATE_S: Final = 1.0
"""A `Date` has whole seconds."""
_SLOWEST_S: Final = 5.0
"""An answer that took longer tells too little."""
_DRIFT: Final = 1e-3
"""Seconds a second by which two clocks may move apart: a clock that NTP corrects is slewed by half of that."""
_WARNED_S: Final = 5.0
"""From here on a clock that is wrong is worth a line of log."""


class ServerClock:
    """Tells the time by the clock that the timestamps of objects are from. Thread-safe.

    An answer is dated between the moments at which its request was sent and its head was there: so each answer bounds
    by how much the clocks differ (as in Marzullo's algorithm), and bounds that agree are combined. Where the clocks may
    be equal, they count as equal; else the least difference does that all answers allow.

    Args:
        clock: this machine's time, in seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._bounds: tuple[float, float, float] | None = None
        self._warned = False

    def read(self) -> float:
        """Return the API server's time, in seconds since 1970; this machine's before the first answer."""
        with self._lock:
            return self._clock() + self._skew_s()

    def begin(self) -> float:
        """Return the moment at which a request is sent, for `note`."""
        return self._clock()

    def note(self, date: str, sent_s: float) -> None:
        """Take an answer's date, as soon as its head is there.

        Args:
            date: the header; empty if there is none.
            sent_s: when the request was sent, as `begin` had it.
        """
        now_s = self._clock()
        if not date or not 0.0 <= now_s - sent_s <= _SLOWEST_S:
            return
        try:
            dated_s = parsedate_to_datetime(date).timestamp()
        except (ValueError, OverflowError, IndexError, TypeError):
            return
        low, high = dated_s - now_s, dated_s + _DATE_S - sent_s
        with self._lock:
            if self._bounds is not None:
                noted_s, before_low, before_high = self._bounds
                slack_s = _DRIFT * abs(now_s - noted_s)
                both = max(low, before_low - slack_s), min(high, before_high + slack_s)
                if both[0] <= both[1]:  # else a clock was set, or another server has answered
                    low, high = both
            self._bounds = now_s, low, high
            skew_s = self._skew_s()
            warns = abs(skew_s) >= _WARNED_S and not self._warned
            self._warned = self._warned or warns
        if warns:
            side = "behind" if skew_s > 0 else "ahead of"
            logger.warning("this machine's clock is %.0f s %s the API server's, whose counts", abs(skew_s), side)

    def _skew_s(self) -> float:
        if self._bounds is None:
            return 0.0
        _, low, high = self._bounds
        return min(max(0.0, low), high)
