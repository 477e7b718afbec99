"""What the dispatcher knows of a teacher: whether it can be given a request now, and how long that would take."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from edl.distill.dispatch.window import Window

__all__ = ["TeacherState"]


@dataclass
class TeacherState:
    """What the dispatcher knows of a teacher; read it, do not write it.

    Attributes:
        window: how many requests it may have in flight.
        live: connected, and known to serve the right model.
        draining: takes no new requests.
        closed_until: no requests before this time, in seconds.
        no_room_until: the same where it has said that it has no room; it is live meanwhile.
        why: why it is closed, in words for a person.
        max_rows: most rows in a request, 0 if any number.
        max_nbytes: most bytes of tensors in a request, 0 if any number.
        max_sequence: most rows of a sequence, 0 if any number.
        in_flight: numbers of its attempts.
        last_progress_at: when it last answered, or began with something to do.
        failures: failures in a row.
        opened: how often in a row it was closed for its failures.
        refusals_without_hint: how often in a row it had no room, without a hint when to come again.
        half_open: whether it gets a single request until it has answered well (a circuit breaker's half-open state).
    """

    window: Window
    live: bool = True
    draining: bool = False
    closed_until: float = 0.0
    no_room_until: float = 0.0
    why: str = ""
    max_rows: int = 0
    max_nbytes: int = 0
    max_sequence: int = 0
    in_flight: set[int] = field(default_factory=set)
    last_progress_at: float = 0.0
    failures: int = 0
    opened: int = 0
    refusals_without_hint: int = 0
    half_open: bool = False

    def is_usable(self, now: float) -> bool:
        """Return whether it may be given work, now or when answers of its own have made room."""
        return self.live and not self.draining and now >= self.closed_until

    def serves(self, now: float) -> bool:
        """Return whether it is usable, or is left alone for no other reason than that it has no room."""
        return self.live and not self.draining and (now >= self.closed_until or self.no_room_until >= self.closed_until)

    def accepts(self, rows: float, nbytes: float, longest: float = 0) -> bool:
        """Return whether it takes a request of so many rows and bytes, whose longest sequence has `longest` rows."""
        return (
            (not self.max_rows or rows <= self.max_rows)
            and (not self.max_nbytes or nbytes <= self.max_nbytes)
            and (not self.max_sequence or longest <= self.max_sequence)
        )

    @property
    def longest_sequence(self) -> float:
        """Rows of the longest sequence that fits a request."""
        return min((limit for limit in (self.max_rows, self.max_sequence) if limit), default=math.inf)

    def has_room(self, now: float) -> bool:
        """Return whether it may be given a request now."""
        allowed = 1 if self.half_open else self.window.allowed
        return self.is_usable(now) and len(self.in_flight) < allowed

    def expected_s(self, now: float) -> float:
        """Return the expected seconds to an answer for a request sent now; 0 for a teacher not yet measured.

        The silence of a teacher that has been silent for over 1.1 times its usual latency is added, so that new work
        goes elsewhere: there it would have to be hedged, too.
        """
        if self.window.median_s is None:
            return 0.0
        expected = max(self.window.base_s, self.window.service_s * (len(self.in_flight) + 1))
        silent_s = now - self.last_progress_at if self.in_flight else 0.0
        usual_s = self.window.usual_s or self.window.median_s
        return expected + silent_s if silent_s > 1.1 * usual_s else expected
