"""The dispatcher's knowledge of a teacher: whether it can take a request now, and how long the answer would take.

`Window` chooses the number of requests in flight by the rule of TCP Vegas (Brakmo and Peterson, 1995). If `base` is the
latency of a request to an idle teacher, and w requests in flight take `latency` each, then w · (1 - base/latency) of
these requests wait in the teacher's queue. One waiting request is enough to keep a teacher busy; if more wait, more are
lost with the teacher. If a request takes less than a few milliseconds, several may wait, because scheduling takes just
as long as the request.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from edl.distill.dispatch.actions import NO_LIMITS, Limits, Send

QUEUE_S = 0.010  # seconds of work that may wait at a teacher, if this allows more than one request
MOST_QUEUED = 4.0  # most requests that `QUEUE_S` may allow to wait at a teacher
MOST_QUEUED_QUICK = 12.0
"""Replaces `MOST_QUEUED` if a request takes less than `QUICK_S`, because a wake-up then costs more than the request.
For slower requests, a window of this size would only evict warm memory from the CPU's caches."""
QUICK_S = 0.001  # service time below which, on one host, a message costs more than the request in it
PROBE_EVERY_S = 10.0  # how long a measured base is used before a request is sent alone to measure it again
_KEPT = 32  # latencies kept for the median: few enough to follow changes quickly, and enough for quartiles


@dataclass
class Window:
    """The number of requests that a teacher may have in flight, and the measurements that determine it."""

    limit: int = 32  # largest number of requests in flight
    size: int = 1  # requests to keep in flight
    probing: bool = True  # wait until the teacher is idle, then send a single request
    base_s: float = float("inf")  # latency of a request that found the teacher idle
    median_s: float | None = None  # median latency of the last answers; None before the first
    usual_s: float | None = None  # upper quartile of the last latencies; None before the third answer
    service_s: float = 0.0  # average of latency divided by requests in flight; 0 at first
    _probed_at: float = 0.0
    _since_change: int = 0
    _latencies: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    @property
    def allowed(self) -> int:
        return 1 if self.probing else self.size

    def record_latency(self, latency_s: float, in_flight: int, now: float) -> None:
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
        """Halve the window, because the teacher had no room for a request."""
        self.size = max(self.size // 2, 1)
        self._since_change = 0


@dataclass
class TeacherState:
    """State of a teacher; only the dispatcher writes it."""

    window: Window  # how many requests it may have in flight
    live: bool = True  # connected, and known to serve the right model
    draining: bool = False  # accepts no new requests
    closed_until: float = 0.0  # gets no requests before this time, in seconds
    no_room_until: float = 0.0  # like `closed_until`, but for lack of room only; the teacher still counts as live
    why: str = ""  # why it is closed, as text
    limits: Limits = NO_LIMITS  # the largest request that it accepts
    in_flight: set[Send] = field(default_factory=set)
    last_progress_at: float = 0.0  # when it last answered, or got work while idle
    failures: int = 0  # failures in a row
    opened: int = 0  # how often in a row it was closed because of failures
    refusals_without_hint: int = 0  # how often in a row it had no room and gave no retry hint
    half_open: bool = False  # gets only one request at a time until one succeeds, as in a circuit breaker

    def is_usable(self, now: float) -> bool:
        """Return whether the teacher can take work, now or once it has answered some of its requests."""
        return self.live and not self.draining and now >= self.closed_until

    def serves(self, now: float) -> bool:
        """Return whether the teacher is usable, or paused only because it has no room."""
        return self.live and not self.draining and (now >= self.closed_until or self.no_room_until >= self.closed_until)

    def has_room(self, now: float) -> bool:
        allowed = 1 if self.half_open else self.window.allowed
        return self.is_usable(now) and len(self.in_flight) < allowed

    def expected_s(self, now: float) -> float:
        """Return the expected seconds until a request sent now is answered; 0 for a teacher not yet measured.

        If the teacher has been silent for more than 1.1 times its usual latency, the length of the silence is added, so
        that new work goes to other teachers.
        """
        if self.window.median_s is None:
            return 0.0
        expected = max(self.window.base_s, self.window.service_s * (len(self.in_flight) + 1))
        silent_s = now - self.last_progress_at if self.in_flight else 0.0
        usual_s = self.window.usual_s or self.window.median_s
        return expected + silent_s if silent_s > 1.1 * usual_s else expected
