"""Who restarts, and how: one table from the cause of an end and its count to what is to be done.

The rules of the table, in the order of its rows' columns: what costs least comes first (a restart in place keeps the
pod, its node and its state in memory), what helps a cause comes at once (more memory, another node), and whatever
failed so often in a row gets an end, except where the cluster took the place: that is nobody's fault and may go on for
days.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from edl.master.scaling.terminations import TerminationCause

__all__ = ["RELAUNCH_TABLE", "RelaunchAction", "RelaunchDecision", "RelaunchRule", "decide_relaunch"]

_MEMORY_STEP: Final = 1.5
"""More memory by this factor each time: three steps are 3.4 times the request, beyond which it is a leak rather than an
estimate; with 2, the third step would be 8 times, which few nodes have."""
_FIRST_DELAY_S: Final = 10.0  # of a second new pod; doubled each time, as the kubelet's CrashLoopBackOff
_MAX_DELAY_S: Final = 300.0  # where the kubelet's CrashLoopBackOff ends as well


class RelaunchAction(Enum):
    """What is done about a worker that ended."""

    NOTHING = "nothing"
    """It did what it had to."""
    RESTART_IN_PLACE = "restart in place"
    """In the same pod: its agent starts another process from the state in memory."""
    NEW_POD = "new process or pod"
    """Another pod, or on a bare machine another agent process; where does not matter."""
    MORE_MEMORY = "new pod with more memory"
    ELSEWHERE = "new pod on another node"
    STOP = "stop with the error"
    """The job ends, and shows the user's error."""


@dataclass(frozen=True)
class RelaunchRule:
    """An action, and how many times in a row it is tried.

    Attributes:
        action: what is done.
        times: in a row; None for without end.
    """

    action: RelaunchAction
    times: int | None = None


@dataclass(frozen=True)
class RelaunchDecision:
    """What is to be done about a worker that ended.

    Attributes:
        action: what is to be done.
        memory_factor: the new pod's memory by what the job asked for at first.
        delay_s: how long to wait before, in seconds.
        reason: why, in a line for a person.
    """

    action: RelaunchAction
    memory_factor: float
    delay_s: float
    reason: str


_AT_ONCE: Final = RelaunchAction.RESTART_IN_PLACE
_NEW: Final = RelaunchAction.NEW_POD
_ELSEWHERE: Final = RelaunchAction.ELSEWHERE

RELAUNCH_TABLE: Final[Mapping[TerminationCause, tuple[RelaunchRule, ...]]] = {
    TerminationCause.SUCCEEDED: (RelaunchRule(RelaunchAction.NOTHING),),
    TerminationCause.USER_ERROR: (),
    TerminationCause.OUT_OF_MEMORY: (RelaunchRule(RelaunchAction.MORE_MEMORY, 3),),
    TerminationCause.KILLED: (RelaunchRule(_AT_ONCE, 2), RelaunchRule(_NEW, 3), RelaunchRule(_ELSEWHERE, 2)),
    TerminationCause.CRASHED: (RelaunchRule(_AT_ONCE, 2), RelaunchRule(_ELSEWHERE, 1)),
    TerminationCause.PEER_LOST: (RelaunchRule(_AT_ONCE, 10),),
    TerminationCause.PREEMPTED: (RelaunchRule(_NEW),),
    TerminationCause.EVICTED: (RelaunchRule(_ELSEWHERE, 10),),
    TerminationCause.NODE_LOST: (RelaunchRule(_ELSEWHERE),),
    TerminationCause.HARDWARE: (RelaunchRule(_ELSEWHERE, 10),),
    TerminationCause.UNCLEAR_FAULT: (RelaunchRule(_AT_ONCE, 1), RelaunchRule(_ELSEWHERE, 1)),
    TerminationCause.LAUNCH_FAILED: (RelaunchRule(_NEW, 3),),
    TerminationCause.QUORUM_MISSED: (RelaunchRule(_NEW),),
    TerminationCause.NOT_STORED: (RelaunchRule(_AT_ONCE, 3),),
    TerminationCause.UNKNOWN: (RelaunchRule(_NEW, 3),),
}
"""What is tried, in this order, before the job stops. Ten times is what `edl run` gives restarts without progress."""


def decide_relaunch(
    cause: TerminationCause, count: int, table: Mapping[TerminationCause, tuple[RelaunchRule, ...]] = RELAUNCH_TABLE
) -> RelaunchDecision:
    """Return what is to be done about a worker that ended.

    Args:
        cause: why it ended.
        count: how many times in a row it ended so without progress between, this one included: 1 or more.
        table: what is tried for each cause before the job stops.

    Raises:
        ValueError: `count` is below 1.
    """
    if count < 1:
        raise ValueError(f"a worker that ended has ended at least once, not {count} times")
    left = count
    for rule in table[cause]:
        if rule.times is None or left <= rule.times:
            return _apply(rule.action, cause, count, left)
        left -= rule.times
    times = "" if count == 1 else f" {count} times in a row"
    return RelaunchDecision(RelaunchAction.STOP, 1.0, 0.0, f"{cause.value}{times}: this does not pass by itself")


def _apply(action: RelaunchAction, cause: TerminationCause, count: int, turn: int) -> RelaunchDecision:
    """Return the decision for the `turn`-th time in a row that `action` is taken, from 1."""
    reason = f"{cause.value}, {count} in a row: {action.value}"
    if action is RelaunchAction.MORE_MEMORY:
        return RelaunchDecision(action, _MEMORY_STEP**turn, 0.0, reason)
    if action is RelaunchAction.NEW_POD and turn > 1:
        doublings = min(turn - 2, 16)  # far beyond the longest delay, and small enough for a float
        return RelaunchDecision(action, 1.0, min(_MAX_DELAY_S, _FIRST_DELAY_S * 2**doublings), reason)
    return RelaunchDecision(action, 1.0, 0.0, reason)
