"""When a pool may try to grow again: the back-off after a teacher that found no room, or was preempted.

It stands in `status.lastProbe`, so that an operator that is started anew does not probe at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from edl.kube.objects import format_time, parse_time
from edl.master.kube.members import MemberPod

__all__ = ["ProbeBackoff", "back_off"]

_MOST_S: Final = 300.0
"""Between two probes: what is idle is borrowed within 5 minutes, at 12 pods an hour while nothing is."""


@dataclass(frozen=True)
class ProbeBackoff:
    """The last time that a pool found no room.

    Attributes:
        at_s: when its probe was removed, or a teacher preempted, Unix time.
        wait_s: how long nothing is tried after it, in seconds.
    """

    at_s: float
    wait_s: float

    @classmethod
    def read(cls, status: Mapping[str, Any]) -> ProbeBackoff | None:
        """Read `status.lastProbe`; None where there is none, or none that EDL wrote."""
        written = status.get("lastProbe")
        if not isinstance(written, Mapping):
            return None
        wait_s = written.get("backoffSeconds")
        try:
            at_s = parse_time(written["at"])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return None
        if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 < wait_s < math.inf:
            return None
        return cls(at_s, min(_MOST_S, float(wait_s)))

    def format(self) -> dict[str, Any]:
        """Return it as `status.lastProbe` has it."""
        return {"at": format_time(self.at_s), "backoffSeconds": math.ceil(self.wait_s)}

    def left_s(self, now_s: float) -> float:
        """Return how many seconds nothing is to be tried yet, 0 if it may be.

        A clock that was set back does not make it longer than the whole.
        """
        return max(0.0, min(self.wait_s, self.at_s + self.wait_s - now_s))

    def is_over(self, pods: Iterable[MemberPod]) -> bool:
        """Return whether a teacher that came after it has found room, so that the next may follow at once."""
        return any(pod.created_s > self.at_s for pod in pods)


def back_off(before: ProbeBackoff | None, first_s: float, now_s: float) -> ProbeBackoff:
    """Return the back-off after a probe that found no room: twice the one before, up to 300 s."""
    wait_s = first_s if before is None else max(first_s, 2 * before.wait_s)
    return ProbeBackoff(now_s, min(_MOST_S, wait_s))
