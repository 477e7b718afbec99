"""Computes how many requests to keep in flight at a teacher, from measured latencies.

The rule is TCP Vegas's (Brakmo and Peterson, 1995), with requests in the place of packets. With `base` the latency of a
request that found the teacher idle, w requests in flight that take `latency` each have w · (1 - base/latency) waiting
in a queue. A single waiting request keeps a teacher busy; more only make a lost teacher dearer. Where service takes
less than a few milliseconds, the queue may hold that much time instead of a single request, since scheduling is as
slow.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

__all__ = ["Window"]

QUEUE_S = 0.010
"""Seconds of work that may wait at a teacher, if that is more than one request."""
MOST_QUEUED = 4.0
"""Requests that may wait at a teacher for that reason."""
MOST_QUEUED_QUICK = 12.0
"""The same where service takes less than `QUICK_S`. It is higher there, since the job queue sends up to half a window
as one message (`edl.distill.engine.job_queue`), which must be worth its cost. Where service takes longer, deeper
windows only push warm memory out of the caches."""
QUICK_S = 0.001
"""Service time below which a message costs more than the request that it brings, on one host."""
PROBE_EVERY_S = 10.0
"""How long a measured base is trusted before one request is sent alone to measure it again."""
_KEPT = 32
"""Latencies of which the median is taken: few enough to follow a change within a window, enough for quartiles."""


@dataclass
class Window:
    """Window of a teacher.

    Attributes:
        limit: most requests in flight.
        size: requests to keep in flight.
        probing: wait until the teacher is idle, then send a single request.
        base_s: latency of a request that found the teacher idle.
        median_s: median latency of the last answers, None before the first.
        usual_s: a latency that three in four of the last answers stayed below, None before the third.
        service_s: latency divided by the requests in flight, averaged: what a further request adds; 0 at first.
    """

    limit: int = 32
    size: int = 1
    probing: bool = True
    base_s: float = float("inf")
    median_s: float | None = None
    usual_s: float | None = None
    service_s: float = 0.0
    _probed_at: float = 0.0
    _since_change: int = 0
    _latencies: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    @property
    def allowed(self) -> int:
        """Requests that may be in flight now."""
        return 1 if self.probing else self.size

    def record_latency(self, latency_s: float, in_flight: int, now: float) -> None:
        """Take in the latency of an answer.

        Args:
            latency_s: from sending to the answer.
            in_flight: requests at this teacher when it was sent, itself included.
            now: seconds on any clock that does not go back.
        """
        self._latencies.append(latency_s)
        ordered = sorted(self._latencies)
        self.median_s = ordered[len(ordered) // 2]
        self.usual_s = ordered[int(0.75 * (len(ordered) - 1))] if len(ordered) > 2 else None
        service_s = latency_s / in_flight
        self.service_s += (service_s - self.service_s) * (0.1 if self.service_s else 1.0)
        if in_flight == 1 and self.probing:
            self.base_s = latency_s
            self.probing = False
            self._probed_at = now
        self.base_s = min(self.base_s, latency_s)
        self._since_change += 1
        if not self.probing and now - self._probed_at > PROBE_EVERY_S:
            self.probing = True
        if self._since_change >= self.size and in_flight >= self.size:
            self._adjust()

    def _adjust(self) -> None:
        recent = list(self._latencies)[-max(self.size, 4) :]
        latency_s = statistics.median(recent)
        queued = self.size * (1 - self.base_s / latency_s) if latency_s > 0 else 0.0
        service_s = latency_s / self.size
        most = MOST_QUEUED_QUICK if service_s < QUICK_S else MOST_QUEUED
        worth = min(max(1.0, QUEUE_S / service_s), most) if service_s > 0 else 1.0
        self._since_change = 0
        if queued < 0.8 * worth:
            self.size = min(self.size + 1, self.limit)
        elif queued > 1.8 * worth:
            self.size = max(self.size - 1, 1)

    def record_overload(self) -> None:
        """Halve the window: the teacher refused a request for want of room."""
        self.size = max(self.size // 2, 1)
        self._since_change = 0

    def reset(self) -> None:
        """Forget what was measured: the teacher was away."""
        self.size = 1
        self.probing = True
        self.base_s = float("inf")
        self._since_change = 0
        self.median_s = self.usual_s = None
        self.service_s = 0.0
        self._latencies.clear()
