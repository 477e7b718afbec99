"""`Dispatcher`, a plain state machine: it takes events, each with its time, and returns actions.

A task waits in a heap until a teacher has room for it. If the task has failed on every teacher that could get it soon,
it waits for teachers that are still connecting, and then for a pause that grows with each failure. The dispatcher gives
up a task that no teacher can answer. If an attempt is late, `_hedge` makes a second attempt at a different teacher,
within a budget.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from edl.distill.dispatch.actions import NO_LIMITS, Action, Deliver, FailureKind, GiveUp, Limits, RequestFailure, Send
from edl.distill.dispatch.teacher_state import TeacherState, Window
from edl.distill.options import Policy

_STARVING_S = 1.0  # how long the awaited task must have been pending before its hedge may exceed the budget
_MIN_FULL_PAUSE_S = 0.01  # shortest pause of a full teacher, whatever it hints; 100 refusals per second cost little
_FULL_PAUSE_S = 0.05  # first pause of a full teacher without a hint: a few batches; doubles until there is room
_MAX_FULL_PAUSE_S = 2.0  # longest such pause, which a person hardly notices
_MAX_HEDGE_TOKENS = 4.0  # hedges that may be saved up: enough for a burst, too few to double a teacher's load
_HEDGE_EARNINGS = 0.9
"""Each request adds this multiple of `hedge_budget` to the number of hedges that may be sent. It is below 1, so that
extra requests stay within the budget per thousand requests even if all saved hedges are used at once."""


_BLAMELESS = (FailureKind.LOST, FailureKind.OVERLOADED)  # not caused by the task


@dataclass
class _Task:
    rows: int
    nbytes: int
    longest: int
    attempts: set[Send] = field(default_factory=set)
    failures: list[tuple[str, RequestFailure]] = field(default_factory=list)
    lost: int = 0
    first_failed_at: float = 0.0
    again_at: float = 0.0  # when a task that failed everywhere may be sent to the same teachers again
    no_room_at: dict[str, int] = field(default_factory=dict)
    """How often each teacher had no room for the task. The teachers with the most refusals are asked last; otherwise
    the task could be sent back and forth between them forever while another teacher has room."""

    def failed_at(self, teacher: str) -> bool:
        return any(name == teacher for name, _ in self.failures)

    def fits(self, state: TeacherState) -> bool:
        return state.limits.accepts(self.rows, self.nbytes, self.longest)


class Dispatcher:
    """The state of all open tasks and known teachers. Not thread-safe. `now` is in seconds of any monotonic clock."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self.teachers: dict[str, TeacherState] = {}  # state by teacher id; read only
        self.resent = self.hedged = 0  # tasks sent again after a failure, and extra attempts for late tasks
        self.pauses: Counter[FailureKind] = Counter()  # how often a teacher was paused, by its last failure
        self.full = True  # whether no teacher could take more at the last event
        self.last = math.inf  # number of the last task that may be sent; see `send_until`
        self._tasks: dict[int, _Task] = {}
        self._attempts: dict[Send, None] = {}  # in the order of sending
        self._waiting: list[int] = []  # heap: the oldest task is sent first, so a resent one overtakes
        self._hedge_tokens = 0.0
        self._awaited_task = -1
        self._connecting: set[str] = set()
        self._again_at = math.inf  # when the first task that failed everywhere may be sent again
        self._changed = False  # whether teachers joined or left since waiting tasks were last placed

    # Events

    def add_task(self, task: int, now: float, rows: int = 0, nbytes: int = 0, longest: int = 0) -> list[Action]:
        """Add a task; `longest` is the number of rows in its longest sequence, 0 if its rows are not sequences."""
        self._tasks[task] = _Task(rows, nbytes, longest)
        heapq.heappush(self._waiting, task)
        return self._assign(now)

    def drop_task(self, task: int) -> list[Send]:
        """Forget a task; return its pending attempts. The caller should cancel these and need not report their end."""
        gone = self._tasks.pop(task, None)
        attempts = sorted(gone.attempts, key=lambda attempt: attempt.sent_at) if gone is not None else []
        for attempt in attempts:
            self._end(attempt)
        return attempts

    def send_until(self, last: float) -> list[Send]:
        """From now on, send only tasks up to number `last`; later tasks wait, even if they have already been sent.

        Returns the pending attempts at the tasks that now wait. The caller should cancel these and need not report
        their end.
        """
        self.last = last
        recalled = [attempt for attempt in self._attempts if attempt.task > last]
        for attempt in recalled:
            self._end(attempt)
            if attempt.task in self._tasks:
                heapq.heappush(self._waiting, attempt.task)
        return recalled

    def teacher_connecting(self, teacher: str) -> None:
        """Record that the first attempt to connect to a teacher has begun; tasks that failed elsewhere wait for it."""
        self._connecting.add(teacher)

    def teacher_unreachable(self, teacher: str, now: float) -> list[Action]:
        """Record that the first attempt to connect failed. More attempts follow, but tasks no longer wait for them."""
        self._connecting.discard(teacher)
        self._changed = True
        return self._assign(now)

    def teacher_up(self, teacher: str, now: float, limits: Limits = NO_LIMITS, max_in_flight: int = 0) -> list[Action]:
        """Record that a teacher is connected, for the first time or again, with the limits that it announces.

        If `max_in_flight` is 0, the policy's window applies.
        """
        self._connecting.discard(teacher)
        state = self.teachers.get(teacher) or TeacherState(Window())
        if not state.live:  # measurements from before its absence no longer hold
            state = replace(state, window=Window(), closed_until=0.0, failures=0, half_open=False, why="")
        state.live = True
        state.draining = False
        state.window.limit = min(self.policy.window, max_in_flight or self.policy.window)
        state.window.size = min(state.window.size, state.window.limit)
        state.limits = limits
        self.teachers[teacher] = state
        self._changed = True
        return self._assign(now)

    def teacher_draining(self, teacher: str) -> None:
        self._connecting.discard(teacher)
        self._changed = True
        if teacher in self.teachers:
            self.teachers[teacher].draining = True

    def teacher_down(self, teacher: str) -> None:
        """Record that a teacher's connection broke. The caller reports the failed attempts separately."""
        self._changed = True
        if teacher in self.teachers:
            self.teachers[teacher].live = False

    def teacher_removed(self, teacher: str) -> None:
        self._connecting.discard(teacher)
        self._changed = True
        self.teachers.pop(teacher, None)

    def set_aside(self, teacher: str, kind: FailureKind, why: str, now: float) -> None:
        """Give a teacher no work for `Policy.aside_s`."""
        state = self.teachers.get(teacher)
        if state is not None:
            self.pauses[kind] += 1
            state.closed_until = max(state.closed_until, now + self.policy.aside_s)
            state.no_room_until = 0.0
            state.why = why

    def attempt_answered(self, attempt: Send, now: float) -> list[Action]:
        """Handle a valid answer; the actions include a `Deliver` if it is the first answer to its task."""
        if not self._end(attempt):
            return []
        actions: list[Action] = []
        state = self.teachers.get(attempt.teacher)
        if state is not None:
            state.failures = state.opened = state.refusals_without_hint = 0
            state.half_open = False
            state.why = ""
            state.last_progress_at = now
            state.window.record_latency(now - attempt.sent_at, attempt.in_flight, now)
        task = self._tasks.pop(attempt.task, None)
        if task is not None:
            # The task is removed, so a second answer cannot deliver it again. Attempts at other teachers stay in
            # flight, so that these teachers count as busy, and their answers are dropped.
            for name, failure in task.failures:
                if failure.kind is FailureKind.REJECTED:
                    why = f"refused a request that {attempt.teacher} accepted: {failure.message}"
                    self.set_aside(name, failure.kind, why, now)
            actions.append(Deliver(attempt.task, attempt.teacher))
        return actions + self._assign(now)

    def attempt_failed(self, attempt: Send, failure: RequestFailure, now: float) -> list[Action]:
        if not self._end(attempt):
            return []
        actions: list[Action] = []
        state = self.teachers.get(attempt.teacher)
        if state is not None:
            state.last_progress_at = now
            self._record_teacher_failure(state, attempt.teacher, failure, now)
        task = self._tasks.get(attempt.task)
        if task is not None:
            counts = failure.kind not in _BLAMELESS
            task.lost += failure.kind is FailureKind.LOST
            deadly = task.lost > self.policy.task_losses
            if counts or deadly:
                task.first_failed_at = task.first_failed_at if task.failures else now
                task.failures.append((attempt.teacher, failure))
                again = len(task.failures) - len({name for name, _ in task.failures})
                task.again_at = now + _doubled(self.policy.open_min_s, again, self.policy.open_max_s)
            elif failure.kind is FailureKind.OVERLOADED:
                task.no_room_at[attempt.teacher] = task.no_room_at.get(attempt.teacher, 0) + 1
            if not task.attempts:  # otherwise another teacher has it too, and may answer
                if deadly or (counts and self._is_hopeless(task, now)):
                    actions.append(self._give_up(attempt.task))
                else:
                    self.resent += 1
                    heapq.heappush(self._waiting, attempt.task)
        return actions + self._assign(now)

    def tick(self, now: float) -> list[Action]:
        return self._assign(now)

    def set_awaited(self, task: int, now: float) -> list[Action]:
        self._awaited_task = task
        return self._assign(now)

    # Queries

    def next_event(self, now: float) -> float | None:
        """Return when to call `tick` next, in seconds; None if no event is due."""
        if self._changed:
            return now
        times = [state.closed_until for state in self.teachers.values() if state.live and not state.draining]
        if self.policy.hedge_budget > 0:
            times.extend(map(self._late_at, self._attempts))
            head = self._head()
            if head is not None:
                times.extend((self._starving_at(head), self._idle_due(head)))
        due = min((due for due in times if due > now), default=math.inf)
        due = min(due, max(self._again_at, now))
        return due if due < math.inf else None

    def count_serving(self, now: float) -> int:
        return sum(state.serves(now) for state in list(self.teachers.values()))

    def oversized(self, now: float) -> tuple[int, int]:
        """Return the largest number of rows, and the longest sequence, in waiting tasks that no usable teacher accepts.

        Each number is 0 if there is no such task. The second is also 0 if at least one usable teacher accepts sequences
        of that length.
        """
        usable = [state for state in self.teachers.values() if state.is_usable(now)]
        if not usable or any(state.limits == NO_LIMITS for state in usable):
            return 0, 0
        waiting = [self._tasks[number] for number in self._waiting if number in self._tasks]
        found = [task for task in waiting if not task.attempts and not any(map(task.fits, usable))]
        takes = max(state.limits.longest_sequence for state in usable)
        longest = max((task.longest for task in found if task.longest > takes), default=0)
        return max((task.rows for task in found), default=0), longest

    @property
    def limits(self) -> Limits:
        """The largest request that all known teachers accept, and the longest sequence that any of them accepts.

        Lost teachers count too.
        """
        all_limits = [state.limits for state in self.teachers.values()]
        longest = max((limits.longest_sequence for limits in all_limits), default=math.inf)
        return Limits(
            min((limits.max_rows for limits in all_limits if limits.max_rows), default=0),
            min((limits.max_nbytes for limits in all_limits if limits.max_nbytes), default=0),
            int(longest) if longest < math.inf else 0,
        )

    @property
    def capacity(self) -> int:
        return sum(state.window.size for state in self.teachers.values() if state.live and not state.draining)

    # Decisions

    def _end(self, attempt: Send) -> bool:
        if attempt not in self._attempts:
            return False
        del self._attempts[attempt]
        if attempt.teacher in self.teachers:
            self.teachers[attempt.teacher].in_flight.discard(attempt)
        if attempt.task in self._tasks:
            self._tasks[attempt.task].attempts.discard(attempt)
        return True

    def _record_teacher_failure(self, state: TeacherState, teacher: str, failure: RequestFailure, now: float) -> None:
        if failure.kind is FailureKind.OVERLOADED:
            state.window.record_overload()
            self.pauses[failure.kind] += now >= state.closed_until
            if failure.retry_after_s > 0:
                pause_s = max(failure.retry_after_s, _MIN_FULL_PAUSE_S)
            elif now >= state.closed_until:
                pause_s = _doubled(_FULL_PAUSE_S, state.refusals_without_hint, _MAX_FULL_PAUSE_S)
                state.refusals_without_hint += 1
            else:
                pause_s = 0.0  # if several requests are refused at once, only the first counts
            if now + pause_s >= state.closed_until:
                state.closed_until = state.no_room_until = now + pause_s
            state.why = failure.message
            return
        if failure.kind is FailureKind.BAD_OUTPUT:
            self.set_aside(teacher, failure.kind, failure.message, now)
            return
        if failure.kind is FailureKind.REJECTED:
            return  # decided once another teacher has seen the same request
        if now < state.closed_until or (failure.kind is FailureKind.LOST and not state.live):
            return  # already counted: when a connection breaks, all its pending requests fail
        state.failures += 1
        if state.failures >= self.policy.failures_to_open or state.half_open:
            state.closed_until = now + _doubled(self.policy.open_min_s, state.opened, self.policy.open_max_s)
            state.opened += 1
            state.failures = 0
            state.half_open = True
            state.why = failure.message
            self.pauses[failure.kind] += 1

    def _give_up(self, number: int) -> GiveUp:
        return GiveUp(number, tuple(self._tasks.pop(number).failures))

    def _awaits_teachers_until(self, task: _Task) -> float:
        """Return the time until which a failed task waits for teachers that are still connecting."""
        return task.first_failed_at + self.policy.coming_s if self._connecting else -math.inf

    def _is_hopeless(self, task: _Task, now: float) -> bool:
        if now < self._awaits_teachers_until(task):
            return False
        if len(task.failures) >= self.policy.task_failures:
            return True
        rejected = {name for name, failure in task.failures if failure.kind is FailureKind.REJECTED}
        if not rejected:
            return False
        there = self._reachable_soon(task, now)
        return len(rejected) >= 2 or (bool(there) and rejected.issuperset(there))

    def _assign(self, now: float) -> list[Action]:
        """Give work to teachers that have room: first waiting tasks, then hedges of late tasks."""
        self._changed = False
        free = [(name, state) for name, state in self.teachers.items() if state.has_room(now)]
        actions, free = self._place_waiting(free, now)
        self.full = not free
        if free and self._attempts and self.policy.hedge_budget > 0:
            actions.extend(self._hedge(free, now))
        return actions

    def _place_waiting(
        self, free: list[tuple[str, TeacherState]], now: float
    ) -> tuple[list[Action], list[tuple[str, TeacherState]]]:
        actions: list[Action] = []
        put_back: list[int] = []
        self._again_at = math.inf
        while free and self._waiting and self._waiting[0] <= self.last:
            number = heapq.heappop(self._waiting)
            task = self._tasks.get(number)
            if task is None or task.attempts:
                continue
            choice = self._choose(free, task, now)
            if choice is None and self._failed_everywhere(task, now):
                if self._is_hopeless(task, now):  # because the teacher it waited for did not connect
                    actions.append(self._give_up(number))
                    continue
                again_at = max(self._awaits_teachers_until(task), task.again_at)
                if now < again_at:
                    self._again_at = min(self._again_at, again_at)
                else:
                    choice = self._choose(free, task, now, again=True)
            if choice is None:
                put_back.append(number)
                continue
            actions.append(self._send(number, task, choice, now, extra=False))
            if not self.teachers[choice].has_room(now):
                free = [(name, state) for name, state in free if name != choice]
        for number in put_back:
            heapq.heappush(self._waiting, number)
        return actions, free

    def _failed_everywhere(self, task: _Task, now: float) -> bool:
        if not task.failures:
            return False
        reachable = self._reachable_soon(task, now)
        return bool(reachable) and all(task.failed_at(name) for name in reachable)

    def _reachable_soon(self, task: _Task, now: float) -> list[str]:
        """Return the teachers that a failed task may be sent to while it waits for connections.

        After the wait for connections, teachers that only refused the task for lack of room are excluded: they may
        still get the task, but the task does not wait for them.
        """
        soon = now + self.policy.coming_s
        there = [
            name
            for name, state in self.teachers.items()
            if state.live and not state.draining and task.fits(state) and state.closed_until <= soon
        ]
        if not task.no_room_at or not task.failures or now < task.first_failed_at + self.policy.coming_s:
            return there
        return [name for name in there if task.failed_at(name) or name not in task.no_room_at]

    def _choose(
        self, free: list[tuple[str, TeacherState]], task: _Task, now: float, *, again: bool = False
    ) -> str | None:
        """Return the free teacher expected to answer a task soonest.

        With `again`, a teacher that failed on the task may be chosen, but never one that rejected the task.
        """
        excluded = {name for name, failure in task.failures if not again or failure.kind is FailureKind.REJECTED}
        fit = [(name, state) for name, state in free if name not in excluded and task.fits(state)]
        if not fit:
            return None
        if task.no_room_at:
            least = min(task.no_room_at.get(name, 0) for name, _ in fit)
            fit = [(name, state) for name, state in fit if task.no_room_at.get(name, 0) == least]
        return min(fit, key=lambda entry: (entry[1].expected_s(now), len(entry[1].in_flight), entry[0]))[0]

    def _send(self, number: int, task: _Task, teacher: str, now: float, *, extra: bool) -> Send:
        state = self.teachers[teacher]
        attempt = Send(number, teacher, extra, now, len(state.in_flight) + 1)
        if not state.in_flight:
            state.last_progress_at = now
        state.in_flight.add(attempt)
        task.attempts.add(attempt)
        self._attempts[attempt] = None
        if extra:
            self.hedged += 1
            self._hedge_tokens -= 1
        else:
            self._hedge_tokens = min(self._hedge_tokens + _HEDGE_EARNINGS * self.policy.hedge_budget, _MAX_HEDGE_TOKENS)
        return attempt

    # Hedging

    def _hedge(self, free: list[tuple[str, TeacherState]], now: float) -> Iterator[Send]:
        """Send late tasks to a second teacher; if no work waits, also the awaited task to a faster idle teacher."""
        old = now - self.policy.hedge_min_s
        late = {
            attempt
            for attempt in itertools.takewhile(lambda attempt: attempt.sent_at <= old, self._attempts)
            if self._late_at(attempt) <= now
        }
        head = self._head()
        if head is not None and self._idle_due(head) <= now:
            late.add(head)
        for attempt in sorted(late, key=lambda attempt: attempt.task):
            # Only a task that has blocked the training loop too long may exceed the budget.
            if self._hedge_tokens < 1 and not (attempt is head and self._starving_at(attempt) <= now):
                continue
            task = self._tasks[attempt.task]
            others = [entry for entry in free if entry[0] != attempt.teacher and entry[1].has_room(now)]
            choice = self._choose(others, task, now)
            if choice is not None:
                yield self._send(attempt.task, task, choice, now, extra=True)

    def _late_at(self, attempt: Send) -> float:
        """Return when an attempt becomes late; infinity if its task has other attempts."""
        task = self._tasks.get(attempt.task)
        if task is None or len(task.attempts) != 1:
            return math.inf
        return attempt.sent_at + self._late_s(attempt.teacher)

    def _late_s(self, teacher: str) -> float:
        """Return the seconds after which an attempt at a teacher counts as late; infinity if unknown."""
        state = self.teachers.get(teacher)
        if state is None:
            return self.policy.hedge_min_s
        median, usual = state.window.median_s, state.window.usual_s
        if median is None or usual is None:
            medians = [s.window.median_s for s in self.teachers.values() if s.window.median_s is not None]
            median = usual = max(medians, default=math.inf)
        return max(self.policy.hedge_after * median, 1.2 * usual, self.policy.hedge_min_s)

    def _head(self) -> Send | None:
        """Return the attempt at the task that the training loop waits for, if there is exactly one."""
        task = self._tasks.get(self._awaited_task)
        return next(iter(task.attempts)) if task is not None and len(task.attempts) == 1 else None

    def _starving_at(self, head: Send) -> float:
        """Return when the hedging budget stops applying to the task that the training loop waits for."""
        return head.sent_at + max(4 * self._late_s(head.teacher), _STARVING_S)

    def _idle_due(self, head: Send) -> float:
        """Return when to send the awaited task to an idle teacher as well; infinity for never."""
        waiting = (self._tasks[number] for number in self._waiting if number <= self.last and number in self._tasks)
        if self._hedge_tokens <= _MAX_HEDGE_TOKENS / 2 or any(not task.attempts for task in waiting):
            return math.inf
        task = self._tasks[head.task]
        idle = [
            state.window.median_s
            for name, state in self.teachers.items()
            if name != head.teacher and state.live and not state.in_flight and state.window.median_s is not None
            if task.fits(state)
        ]
        if not idle:
            return math.inf
        gain_s = max(1.5 * min(idle), self.policy.hedge_min_s)
        here = self.teachers.get(head.teacher)
        median = here.window.median_s if here is not None else None
        if median is None or median > gain_s:
            return head.sent_at
        return head.sent_at + median + gain_s


def _doubled(first_s: float, times: int, longest_s: float) -> float:
    # The pause of a teacher missing overnight doubles over a thousand times, which would overflow a float.
    return float(min(first_s * 2 ** min(times, 64), longest_s))
