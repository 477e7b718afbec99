"""How long a worker may go without a sign of progress: decisions from its status page, without a clock.

A hang is the absence of steps, so only workers that report steps can be watched: a worker that never reported any is
left alone. Evaluation between two steps is also an absence of steps. Three things tell it from a hang: the script
declares it, with a limit (phase BUSY); the kernel sees the worker's process work (`process_activity`), which gives it a
longer limit; and another rank of the job works, for which this rank waits.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Final

from edl.collective.worker_status import Phase, WorkerStatus

__all__ = ["HangLimits", "ProgressLimit", "describe_hang", "find_progress_limit", "is_working"]

_ENOUGH_STEPS: Final = 3
"""So many steps have to be measured before their median counts: the first two still compile and open files."""
_LATER_S: Final = 60.0
"""So much longer than any limit of the rank that hangs may others wait for it, so that the cause is named, not they:
more than the time between two looks of an agent whose machine is busy."""


@dataclass(frozen=True)
class HangLimits:
    """How long a worker may go without a sign of progress. Times are in seconds.

    Attributes:
        floor_s: between two steps at least; also what evaluation between two steps may take.
        factor: times the median of recent steps, if that is longer.
        first_step_s: for the first steps of a world, which compile, open files and connect.
        start_s: from the fork to the first step or load, for a script that has reported steps before.
        load_s: for reading a checkpoint.
        begin_s: from the fork to the first line of the script; a fork that takes longer waits for something that its
            parent's other threads had, and another process takes its place.
        save_s: for copying the state. Ranks that wait to agree on that with a rank that perhaps evaluates or makes a
            long step may do so for longer than that rank may take.
        working_factor: by how much all of these limits are longer for a worker whose process was seen to work within
            the last half of the limit. Not for ever: a loop without an end works, too.
    """

    floor_s: float = 300.0
    factor: float = 20.0
    first_step_s: float = 900.0
    start_s: float = 900.0
    load_s: float = 1800.0
    begin_s: float = 30.0
    save_s: float = 900.0
    working_factor: float = 10.0


@dataclass(frozen=True)
class ProgressLimit:
    """How long a worker has gone without a sign of progress, and how long it may.

    Attributes:
        since_s: when the last sign was given (`time.monotonic()`).
        limit_s: after so many seconds a worker that does not work counts as hanging.
        what: the worker does without a sign, in words.
        of: what the limit follows from, in words.
        declared: the script itself has set the limit.
    """

    since_s: float
    limit_s: float
    what: str
    of: str = ""
    declared: bool = False

    def is_suspect(self, now_s: float) -> bool:
        """Return whether half of the limit has passed at `now_s`: from then on the worker's process is measured."""
        return not self.declared and now_s - self.since_s > self.limit_s / 2


def find_progress_limit(status: WorkerStatus, limits: HangLimits, *, forked_s: float = 0.0) -> ProgressLimit | None:
    """Find how long a worker may go on as it does.

    Args:
        status: the worker's.
        limits: how long workers may go without a sign of progress.
        forked_s: when this worker was forked (`time.monotonic()`); a step from before was another worker's, with the
            same page.

    Returns:
        The limit; None if the worker is not watched.
    """
    if status.phase in (Phase.PAUSE, Phase.EXIT):
        return None  # these wait for others, and have limits of their own
    if status.phase is Phase.BUSY:
        what = f"busy with {status.busy_with}"
        return ProgressLimit(status.phase_since, status.busy_limit_s, what, "that the script has set", declared=True)
    if status.phase in (Phase.TRAIN, Phase.ROLLBACK):
        # A copy between two steps ends a phase: what counts is the time since the last sign of either.
        since_s = max(status.step_at, status.phase_since)
        what = f"no step after step {status.step}"
        if status.step < 0 or status.step_at < forked_s or len(status.durations_s) < _ENOUGH_STEPS:
            return ProgressLimit(since_s, max(limits.first_step_s, limits.floor_s), what, "for the first steps")
        usual_s = statistics.median(status.durations_s)
        return ProgressLimit(since_s, _step_limit_s(status, limits), what, f"where a step takes {usual_s:.3g} s")
    if status.phase is Phase.START and status.step < 0:
        return None  # perhaps a script that reports nothing at all
    limit_s = {
        Phase.START: limits.start_s,
        Phase.LOAD: limits.load_s,
        Phase.SAVE: limits.save_s,
        Phase.AGREE: max(limits.save_s, limits.first_step_s, _step_limit_s(status, limits)) + _LATER_S,
    }[status.phase]
    return ProgressLimit(status.phase_since, limit_s, f"in phase {status.phase.name}")


def is_working(found: ProgressLimit, now_s: float, active_s: float | None) -> bool:
    """Return whether a worker was seen to work within the last half of its limit.

    Args:
        found: the worker's `find_progress_limit`.
        now_s: the time now (`time.monotonic()`).
        active_s: when its process was last seen to work (`time.monotonic()`), None for never.
    """
    return not found.declared and active_s is not None and now_s - active_s <= found.limit_s / 2


def describe_hang(
    found: ProgressLimit, now_s: float, limits: HangLimits, active_s: float | None = None, awaited_s: float = 0.0
) -> str | None:
    """Return why a worker is taken to hang, None if it is not.

    Args:
        found: the worker's `find_progress_limit`.
        now_s: the time now (`time.monotonic()`).
        limits: how long workers may go without a sign of progress.
        active_s: when its process was last seen to work, None for never.
        awaited_s: until when another rank was known to work, for which this rank may have waited.
    """
    limit_s = found.limit_s
    since_s = found.since_s
    seen = ""
    if is_working(found, now_s, active_s):
        limit_s *= limits.working_factor
        seen = " for a process that works"
    elif not found.declared:
        since_s = max(since_s, awaited_s)
    if now_s - since_s <= limit_s:
        return None
    of = f" {found.of}" if found.of else ""
    return f"{found.what} for {now_s - since_s:.1f} s; the limit is {limit_s:.3g} s{of}{seen}"


def _step_limit_s(status: WorkerStatus, limits: HangLimits) -> float:
    """Return how many seconds a step may take, after the first steps."""
    return max(limits.floor_s, limits.factor * statistics.median(status.durations_s or (0.0,)))
