"""Whether a worker hangs, and which rank is slow: decisions from readings of boards, without a clock.

A hang is the absence of steps, so only workers that report steps can be watched: one that never did is left alone.
Evaluation between two steps is also an absence of steps. Three things tell it from a hang: the script says so, with a
limit (phase BUSY); the kernel sees the worker's process work (`process_activity`), which gives it a longer limit; and
another rank of the job does so, for which this one waits.

In synchronous training every rank's step takes as long as the slowest one's, so durations of steps name nobody. What
tells a straggler is its *own* time: what is left of a step without the wait in the gradients' synchronisation. The rank
that all wait for waits least itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from edl.collective.worker_status import Phase, Reading

__all__ = [
    "HangLimits",
    "ProgressLimit",
    "StragglerChange",
    "StragglerSettings",
    "StragglerDetector",
    "hang",
    "is_working",
    "own_step_s",
    "progress",
]

_ENOUGH_STEPS: Final = 3
_LATER_S: Final = 60.0
"""So much longer than any limit of the rank that hangs may others wait for it: the cause is to be named, not they."""


@dataclass(frozen=True)
class HangLimits:
    """How long a worker may go without a sign of progress.

    Attributes:
        floor_s: between two steps at least; also what evaluation between two steps may take.
        factor: times the median of recent steps, if that is longer.
        first_step_s: for the first steps of a world, which compile, open files and connect.
        start_s: from the fork to the first step or load, for a script that has reported steps before.
        load_s: for reading a checkpoint.
        begin_s: from the fork to the first line of the script; a fork that takes longer waits for something that its
            parent's other threads had, and another process takes its place.
        save_s: for copying the state. Ranks that wait to agree on that with another one, which perhaps evaluates or
            makes a long step, may do so for longer than that one may take.
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
        since_s: the last sign, in `time.monotonic()`.
        limit_s: after which a worker that does not work counts as hanging.
        what: it does without one, in words.
        of: what the limit follows from, in words.
        declared: the script itself has set the limit.
    """

    since_s: float
    limit_s: float
    what: str
    of: str = ""
    declared: bool = False

    def suspect(self, now_s: float) -> bool:
        """Return whether half of the limit has passed: from then on the worker's process is looked at."""
        return not self.declared and now_s - self.since_s > self.limit_s / 2


def progress(reading: Reading, limits: HangLimits, *, forked_s: float = 0.0) -> ProgressLimit | None:
    """Read from a board how long a worker may go on as it does; None if it is not watched.

    Args:
        forked_s: when this worker was; a step from before was finished by another one on the same page.
    """
    if reading.phase in (Phase.PAUSE, Phase.EXIT):
        return None  # these wait for others, and have limits of their own
    if reading.phase is Phase.BUSY:
        what = f"busy with {reading.busy_with}"
        return ProgressLimit(reading.phase_since, reading.busy_limit_s, what, "that the script has set", declared=True)
    if reading.phase in (Phase.TRAIN, Phase.ROLLBACK):
        # A copy between two steps ends a phase: what counts is the time since the last sign of either.
        since_s = max(reading.step_at, reading.phase_since)
        what = f"no step after step {reading.step}"
        if reading.step < 0 or reading.step_at < forked_s or len(reading.durations_s) < _ENOUGH_STEPS:
            return ProgressLimit(since_s, max(limits.first_step_s, limits.floor_s), what, "for the first steps")
        usual_s = statistics.median(reading.durations_s)
        return ProgressLimit(since_s, _step_limit_s(reading, limits), what, f"where a step takes {usual_s:.3g} s")
    if reading.phase is Phase.START and reading.step < 0:
        return None  # perhaps a script that reports nothing at all
    limit_s = {
        Phase.START: limits.start_s,
        Phase.LOAD: limits.load_s,
        Phase.SAVE: limits.save_s,
        Phase.AGREE: max(limits.save_s, limits.first_step_s, _step_limit_s(reading, limits)) + _LATER_S,
    }[reading.phase]
    return ProgressLimit(reading.phase_since, limit_s, f"in phase {reading.phase.name}")


def is_working(found: ProgressLimit, now_s: float, active_s: float | None) -> bool:
    """Return whether a worker was seen to work within the last half of its limit.

    Args:
        active_s: when its process was last seen to, None for never.
    """
    return not found.declared and active_s is not None and now_s - active_s <= found.limit_s / 2


def hang(
    found: ProgressLimit, now_s: float, limits: HangLimits, active_s: float | None = None, awaited_s: float = 0.0
) -> str | None:
    """Return why a worker is taken to hang, None if it is not.

    Args:
        found: its `progress`.
        now_s: of `time.monotonic()`, as the times on the board.
        active_s: when its process was last seen to work, None for never.
        awaited_s: until when another rank was known to, for which this one may have waited.
    """
    limit_s, since_s, seen = found.limit_s, found.since_s, ""
    if is_working(found, now_s, active_s):
        limit_s, seen = limit_s * limits.working_factor, " for a process that works"
    elif not found.declared:
        since_s = max(since_s, awaited_s)
    if now_s - since_s <= limit_s:
        return None
    of = f" {found.of}" if found.of else ""
    return f"{found.what} for {now_s - since_s:.1f} s; the limit is {limit_s:.3g} s{of}{seen}"


def _step_limit_s(reading: Reading, limits: HangLimits) -> float:
    """Seconds that a step may take which is not one of the first."""
    return max(limits.floor_s, limits.factor * statistics.median(reading.durations_s or (0.0,)))


def own_step_s(before: Reading, after: Reading, waited_s: float) -> float | None:
    """Seconds that a rank itself took for a step, on average between two readings of its board; None without a step.

    Args:
        waited_s: that it spent in the synchronisation of gradients meanwhile.
    """
    steps = after.step - before.step
    if steps <= 0 or after.generation != before.generation:
        return None
    trained_s = sum(after.totals_s[phase] - before.totals_s[phase] for phase in (Phase.TRAIN, Phase.ROLLBACK))
    return max(0.0, trained_s - waited_s) / steps


@dataclass(frozen=True)
class StragglerSettings:
    """Who is called a straggler.

    Attributes:
        factor: its own time of a step is so many times the median of the others',
        least_s: and so many seconds longer,
        windows: in so many windows in a row. As many below `clear_factor` clear it.
    """

    factor: float = 1.5
    clear_factor: float = 1.2
    least_s: float = 0.005
    windows: int = 5


@dataclass(frozen=True)
class StragglerChange:
    """A rank was named, or is one no more."""

    rank: int
    what: Literal["named", "cleared"]
    own_s: float
    others_s: float

    def __str__(self) -> str:
        times = f"{self.own_s:.3g} s of its own a step, the others {self.others_s:.3g} s"
        return f"rank {self.rank} is {'slow' if self.what == 'named' else 'no longer slow'}: {times}"


@dataclass
class StragglerDetector:
    """Names ranks that are slow persistently. Feed it one window after another; begin anew with each world."""

    rules: StragglerSettings = field(default_factory=StragglerSettings)
    named: set[int] = field(default_factory=set)
    _counts: dict[int, int] = field(default_factory=dict)

    def observe(self, own_s: Mapping[int, float]) -> list[StragglerChange]:
        """What follows from one window.

        Args:
            own_s: by rank, seconds of its own a step in this window; ranks without one are left out.
        """
        changes = []
        for rank, mine_s in sorted(own_s.items()):
            others = [theirs_s for other, theirs_s in own_s.items() if other != rank]
            if not others:
                continue
            others_s = statistics.median(others)
            self._counts[rank] = self._counts.get(rank, 0) + 1 if self._deviates(rank, mine_s, others_s) else 0
            if self._counts[rank] >= self.rules.windows:
                self._counts[rank] = 0
                self.named ^= {rank}
                what: Literal["named", "cleared"] = "named" if rank in self.named else "cleared"
                changes.append(StragglerChange(rank, what, mine_s, others_s))
        return changes

    def _deviates(self, rank: int, mine_s: float, others_s: float) -> bool:
        """Whether this window speaks for a change."""
        if rank in self.named:
            return mine_s < max(self.rules.clear_factor * others_s, others_s + self.rules.least_s)
        return mine_s > self.rules.factor * others_s and mine_s > others_s + self.rules.least_s
