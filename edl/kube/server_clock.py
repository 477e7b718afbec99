"""`ServerClock`: the API server's time, by the `Date` of its answers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Final

logger = logging.getLogger(__name__)

_DATE_S: Final = 1.0
"""A `Date` has whole seconds."""
_SLOWEST_S: Final = 5.0
"""An answer that took longer tells too little."""
_DRIFT: Final = 1e-3
"""Seconds a second by which two clocks may move apart: a clock that NTP corrects is slewed by half of that."""
_AGREEING: Final = 3
"""Answers that must agree before they count: a single one may be a proxy's, or of a server whose clock is just set."""
_AGREEMENT_S: Final = 2.0
"""Over so long they must agree. A `Date` that stands still agrees with itself for its own second only."""
_LARGEST_SKEW_S: Final = 86400.0
"""Nothing that works has a clock so wrong: certificates and tokens of that day would not be valid."""
_LONGEST_HALT_S: Final = 60.0
"""For so long the time may stand still; a clock that is put back further is followed, or nothing would come due."""
_LONGEST_DOUBT_S: Final = 10.0
"""After so long without answers that agree, this machine's clock is all that there is."""
_WARNED_S: Final = 5.0
"""From here on a clock that is wrong is worth a line of log."""


@dataclass(frozen=True)
class _Agreement:
    """What answers that agree with one another say.

    Attributes:
        low_s: the API server's clock is ahead of the monotonic clock by at least that.
        high_s: and by at most that.
        first_s: when the first of them was there, by the monotonic clock.
        last_s: when the last one was.
        span_s: from the first one's arrival to the last request.
    """

    low_s: float
    high_s: float
    first_s: float
    last_s: float
    span_s: float = 0.0
    count: int = 1

    @property
    def counts(self) -> bool:
        """Whether they are enough, over time."""
        return self.count >= _AGREEING and self.span_s >= _AGREEMENT_S

    def bounds_at(self, now_s: float) -> tuple[float, float]:
        """Return the bounds at another moment: they widen as clocks drift."""
        slack_s = _DRIFT * abs(now_s - self.last_s)
        return self.low_s - slack_s, self.high_s + slack_s

    def join(self, low_s: float, high_s: float, sent_s: float, now_s: float) -> _Agreement | None:
        """Return this with one more answer; None where that does not agree."""
        before_low, before_high = self.bounds_at(now_s)
        low_s, high_s = max(low_s, before_low), min(high_s, before_high)
        if low_s > high_s:
            return None
        span_s = max(self.span_s, sent_s - self.first_s)
        return replace(self, low_s=low_s, high_s=high_s, last_s=now_s, span_s=span_s, count=self.count + 1)


class ServerClock:
    """Tells the time by the clock that the timestamps of objects are from. Thread-safe.

    An answer is dated between the moments at which its request was sent and its head was there: so each answer bounds
    by how much the clocks differ (as in Marzullo's algorithm), and bounds that agree are combined. This machine's clock
    counts as long as all answers allow it; else the nearest time does that they allow.

    What ends or deletes a job goes by this time, so an answer alone changes nothing: several must agree, over seconds,
    with one another and with the monotonic clock, and the difference must be below a day. Answers that contradict what
    counts replace it in the same way. Until then, this machine's clock counts.

    Args:
        clock: this machine's time, in seconds since 1970.
        monotonic: seconds of a clock that is never set.
    """

    def __init__(self, clock: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._agreed: _Agreement | None = None
        self._candidate: _Agreement | None = None
        self._latest_s = 0.0
        self._warned: set[str] = set()
        self._contradicted_s: float | None = None

    def read(self) -> float:
        """Return the API server's time, in seconds since 1970; this machine's where the answers do not say.

        Where it would be put back, by up to a minute, it stands still for that long.
        """
        with self._lock:
            now_s = self._clock() + (0.0 if self._agreed is None else self._skew_s(self._agreed))
            if not self._latest_s - _LONGEST_HALT_S <= now_s <= self._latest_s:
                self._latest_s = now_s
            return self._latest_s

    def is_doubtful(self) -> bool:
        """Whether answers have contradicted this machine's clock for less than ten seconds, and none count yet."""
        with self._lock:
            since_s = self._contradicted_s
            return self._agreed is None and since_s is not None and self._monotonic() - since_s < _LONGEST_DOUBT_S

    def begin(self) -> float:
        """Return the moment at which a request is sent, for `note`."""
        return self._monotonic()

    def note(self, date: str, sent_s: float) -> None:
        """Take the header `Date` of an answer that is surely the API server's own; `sent_s` is what `begin` had."""
        now_s = self._monotonic()
        dated_s = _parse_date(date)
        if dated_s is None or not 0.0 <= now_s - sent_s <= _SLOWEST_S:
            return
        with self._lock:
            skew_s = dated_s - self._clock()
            if abs(skew_s) > _LARGEST_SKEW_S:
                self._warn("refused", "an answer's Date is %.0f s off this machine's clock: it does not count", skew_s)
                return
            low_s, high_s = dated_s - now_s, dated_s + _DATE_S - sent_s
            if self._agreed is not None:
                joined = self._agreed.join(low_s, high_s, sent_s, now_s)
                if joined is not None:
                    self._agreed = joined
                    self._candidate = None
                    return
            if self._candidate is not None:
                self._candidate = self._candidate.join(low_s, high_s, sent_s, now_s)
            if self._candidate is None:
                self._candidate = _Agreement(low_s, high_s, first_s=now_s, last_s=now_s)
            if self._contradicted_s is None and abs(self._skew_s(self._candidate)) >= _WARNED_S:
                self._contradicted_s = now_s
            if self._candidate.counts:
                self._replace(self._candidate)

    def _replace(self, agreement: _Agreement) -> None:
        before_s = None if self._agreed is None else self._skew_s(self._agreed)
        self._agreed = agreement
        self._candidate = None
        skew_s = self._skew_s(agreement)
        if before_s is not None:
            logger.info("the API server's clock was set by %.0f s, or another API server answers", skew_s - before_s)
        if abs(skew_s) >= _WARNED_S:
            side = "behind" if skew_s > 0 else "ahead of"
            self._warn(side, f"this machine's clock is %.0f s {side} the API server's, whose counts", abs(skew_s))

    def _warn(self, what: str, words: str, seconds: float) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning(words, seconds)

    def _skew_s(self, agreement: _Agreement) -> float:
        """Return how much to add to this machine's time."""
        now_s, here_s = self._monotonic(), self._clock()
        low_s, high_s = agreement.bounds_at(now_s)
        return min(max(0.0, low_s + now_s - here_s), high_s + now_s - here_s)


def _parse_date(date: str) -> float | None:
    """Return a `Date` in seconds since 1970; None for anything else, and where its zone is not known."""
    try:
        parsed = parsedate_to_datetime(date) if date else None
        return None if parsed is None or parsed.tzinfo is None else parsed.timestamp()
    except (ValueError, OverflowError, IndexError, TypeError):
        return None
