"""Decides which request goes to which teacher, when it is sent to another one, and when it is given up. No I/O.

`Dispatcher` is a plain state machine. It takes events with their time and returns actions, which `edl.distill.engine`
carries out. It knows tasks by number and teachers by name, and nothing about tensors or networks.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from edl.distill.dispatch.actions import Action, Deliver, FailureKind, GiveUp, RequestFailure, Send
from edl.distill.dispatch.teacher_state import TeacherState, Window
from edl.distill.options import Policy

_STARVING_S = 1.0
"""Seconds that the training loop may stand still before a hedge beyond the budget is allowed; people notice this
long."""
_MIN_FULL_PAUSE_S = 0.01
"""Shortest pause of a full teacher, whatever it hints; a hundred refusals a second cost little."""
_FULL_PAUSE_S = 0.05
"""First pause of a full teacher that gives no usable hint: the time of a few batches. It doubles until there is
room."""
_MAX_FULL_PAUSE_S = 2.0
"""Longest such pause, which a person hardly notices."""
_MAX_HEDGE_TOKENS = 4.0
"""How many hedges may be saved up: enough for a burst of stragglers, and too few to double a teacher's load."""
_HEDGE_EARNINGS = 0.9
"""Share of the hedging budget that each request earns. It is below 1 so that even with all hedges saved up, extra
requests stay below the budget in any thousand."""


@dataclass
class _Attempt:
    task: int
    teacher: str
    sent_at: float
    in_flight: int
    extra: bool


@dataclass
class _Task:
    rows: int = 0
    nbytes: int = 0
    longest: int = 0
    attempts: set[int] = field(default_factory=set)
    failures: list[tuple[str, RequestFailure]] = field(default_factory=list)
    lost: int = 0
    first_failed_at: float = 0.0
    again_at: float = 0.0
    """When it may be sent again to a teacher where it failed, if it failed everywhere, because errors may be
    temporary."""
    no_room_at: dict[str, int] = field(default_factory=dict)
    """How often each teacher had no room for it. These teachers are asked last; otherwise it could bounce between them
    for ever while another teacher has room."""

    def failed_at(self, teacher: str) -> bool:
        return any(name == teacher for name, _ in self.failures)


class Dispatcher:
    """Keeps the state of all open tasks and known teachers. Not thread-safe.

    Methods take the time `now` in seconds, from any monotonic clock.

    Args:
        policy: Limits and deadlines; None for the defaults of `Policy`.

    Attributes:
        resent: Number of tasks that were sent again after a failure.
        hedged: Number of extra attempts for late tasks.
    """

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self.teachers: dict[str, TeacherState] = {}  # state by teacher id; read only
        self.sent = self.resent = self.hedged = 0  # attempts so far
        # how often a teacher was paused, by the kind of its last failure
        self.pauses: Counter[FailureKind] = Counter()
        self.full = True  # whether no teacher could take more at the last event
        # whether every teacher that could take more had enough to do until its next answer, at the last event
        self.last = math.inf  # number of the last task that may be sent; see `send_until`
        self._tasks: dict[int, _Task] = {}
        self._attempts: dict[int, _Attempt] = {}
        self._waiting: list[int] = []  # heap: the oldest task goes first, so a resent one overtakes
        self._numbers = itertools.count()
        self._hedge_tokens = 0.0
        self._awaited_task: int | None = None
        self._connecting: set[str] = set()
        self._parked: list[int] = []  # tasks that failed at all teachers that can be reached; tried again later
        self._parked_until = math.inf
        self._changed = False  # whether teachers came or went since waiting tasks were last placed

    # Events

    def add_task(self, task: int, now: float, rows: int = 0, nbytes: int = 0, longest: int = 0) -> list[Action]:
        """Add a task; `longest` is the number of rows in its longest sequence, 0 if its rows are not sequences."""
        self._tasks[task] = _Task(rows, nbytes, longest)
        heapq.heappush(self._waiting, task)
        return self._assign(now)

    def drop_task(self, task: int) -> list[int]:
        """Forget a task.

        Returns:
            The pending attempts, which the caller should cancel and need not report.
        """
        gone = self._tasks.pop(task, None)
        if gone is None:
            return []
        attempts = sorted(gone.attempts)
        for number in attempts:
            self._end(number)
        return attempts

    def send_until(self, last: float) -> list[int]:
        """Send only tasks up to the number `last` from now on; other pending tasks wait as if they were not sent yet.

        Returns:
            The pending attempts of those tasks, which the caller should cancel and need not report.
        """
        self.last = last
        recalled = [number for number, attempt in self._attempts.items() if attempt.task > last]
        for number in recalled:
            attempt = self._end(number)
            if attempt is not None and attempt.task in self._tasks:
                heapq.heappush(self._waiting, attempt.task)
        return recalled

    def teacher_connecting(self, teacher: str) -> None:
        """Note that a first connection to a teacher is being made; tasks that failed elsewhere wait for it."""
        self._connecting.add(teacher)

    def teacher_unreachable(self, teacher: str, now: float) -> list[Action]:
        """Note that a first attempt to connect failed. It is repeated, but tasks no longer wait for the teacher."""
        self._connecting.discard(teacher)
        self._changed = True
        return self._assign(now)

    def teacher_up(
        self,
        teacher: str,
        now: float,
        max_rows: int = 0,
        max_nbytes: int = 0,
        max_in_flight: int = 0,
        max_sequence: int = 0,
    ) -> list[Action]:
        """Note that a teacher is connected, for the first time or again.

        The limits are those that the teacher announces, or 0 for none. Without `max_in_flight`, the policy's applies.
        """
        self._connecting.discard(teacher)
        state = self.teachers.setdefault(teacher, TeacherState(Window(self.policy.window)))
        if not state.live:
            state.window.reset()
            state.closed_until = 0.0
            state.failures = 0
            state.half_open = False
            state.why = ""
        state.live = True
        state.draining = False
        state.window.limit = min(self.policy.window, max_in_flight or self.policy.window)
        state.window.size = min(state.window.size, state.window.limit)
        state.max_rows = max_rows
        state.max_nbytes = max_nbytes
        state.max_sequence = max_sequence
        self._changed = True
        return self._assign(now)

    def teacher_draining(self, teacher: str) -> None:
        """Note that a teacher finishes its requests and accepts no new ones."""
        self._connecting.discard(teacher)
        self._changed = True
        if teacher in self.teachers:
            self.teachers[teacher].draining = True

    def teacher_down(self, teacher: str) -> None:
        """Note that a teacher's connection broke. Its attempts are reported as failed separately."""
        self._changed = True
        if teacher in self.teachers:
            self.teachers[teacher].live = False

    def teacher_removed(self, teacher: str) -> None:
        """Forget a teacher that left for good."""
        self._connecting.discard(teacher)
        self._changed = True
        state = self.teachers.pop(teacher, None)
        if state is not None:
            state.live = False

    def set_aside(self, teacher: str, kind: FailureKind, why: str, now: float) -> None:
        """Give a teacher no work for `Policy.aside_s`."""
        state = self.teachers.get(teacher)
        if state is not None:
            self.pauses[kind] += 1
            state.closed_until = max(state.closed_until, now + self.policy.aside_s)
            state.no_room_until = 0.0
            state.why = why

    def attempt_answered(self, attempt: int, now: float) -> list[Action]:
        """Handle a good answer.

        Returns:
            The actions to take, with a `Deliver` if this is the first answer to its task.
        """
        ended = self._end(attempt)
        if ended is None:
            return []
        actions: list[Action] = []
        state = self.teachers.get(ended.teacher)
        if state is not None:
            state.failures = state.opened = state.refusals_without_hint = 0
            state.half_open = False
            state.why = ""
            state.last_progress_at = now
            state.window.record_latency(now - ended.sent_at, ended.in_flight, now)
        task = self._tasks.pop(ended.task, None)
        if task is not None:
            # The task is removed, so a second answer cannot deliver it again. Attempts at other teachers stay in
            # flight, so that these teachers count as busy, and their answers are dropped.
            for name, failure in task.failures:
                if failure.kind is FailureKind.REJECTED:
                    self.set_aside(name, failure.kind, f"refused what {ended.teacher} accepted: {failure.message}", now)
            actions.append(Deliver(ended.task, ended.teacher))
        return actions + self._assign(now)

    def attempt_failed(self, attempt: int, failure: RequestFailure, now: float) -> list[Action]:
        """Handle a failed attempt: send its task elsewhere or give it up, and pause its teacher if necessary."""
        ended = self._end(attempt)
        if ended is None:
            return []
        actions: list[Action] = []
        state = self.teachers.get(ended.teacher)
        if state is not None:
            state.last_progress_at = now
            self._record_teacher_failure(state, ended.teacher, failure, now)
        task = self._tasks.get(ended.task)
        if task is not None:
            task.lost += failure.kind is FailureKind.LOST
            if failure.kind not in (FailureKind.LOST, FailureKind.OVERLOADED) or task.lost > self.policy.task_losses:
                task.first_failed_at = task.first_failed_at if task.failures else now
                task.failures.append((ended.teacher, failure))
                again = len(task.failures) - len({name for name, _ in task.failures})
                task.again_at = now + _doubled(self.policy.open_min_s, again, self.policy.open_max_s)
            elif failure.kind is FailureKind.OVERLOADED:
                task.no_room_at[ended.teacher] = task.no_room_at.get(ended.teacher, 0) + 1
            if not task.attempts:  # otherwise another teacher has it too, and may answer
                # A failure that says nothing about the task does not count against it.
                counts = failure.kind not in (FailureKind.LOST, FailureKind.OVERLOADED)
                if task.lost > self.policy.task_losses or (counts and self._is_hopeless(task, now)):
                    actions.append(self._give_up(ended.task))
                else:
                    self.resent += 1
                    heapq.heappush(self._waiting, ended.task)
        return actions + self._assign(now)

    def tick(self, now: float) -> list[Action]:
        """Hedge late tasks, and use teachers whose pause has ended."""
        return self._assign(now)

    def set_awaited(self, task: int, now: float) -> list[Action]:
        """Note that the training loop now waits for `task`."""
        self._awaited_task = task
        return self._assign(now)

    # Questions

    def next_event(self, now: float) -> float | None:
        """Return when `tick` should be called next, in seconds; None if no event is due."""
        if self._changed:
            return now
        states = (state for state in self.teachers.values() if state.live and not state.draining)
        times = [state.closed_until for state in states if state.closed_until > now]
        if self._parked_until < math.inf:
            times.append(self._parked_until)
        if self.policy.hedge_budget > 0:
            dues = map(self._late_at, self._attempts.values())
            times.extend(due for due in dues if now < due < math.inf)
            times.extend(due for due in self._head_times() if due > now)
        return min(times, default=None)

    def count_serving(self, now: float) -> int:
        """Count the teachers that can take work, now or when they have room."""
        return sum(state.serves(now) for state in list(self.teachers.values()))

    def oversized_rows(self, now: float) -> int:
        """Return the rows of the largest waiting task that no usable teacher accepts; 0 if there is none."""
        return max((task.rows for task in self._oversized(now)), default=0)

    def oversized_sequence(self, now: float) -> int:
        """Return the rows of such a task's longest sequence, if it is too long for all usable teachers; else 0."""
        usable = [state for state in list(self.teachers.values()) if state.is_usable(now)]
        takes = max((state.longest_sequence for state in usable), default=math.inf)
        return max((task.longest for task in self._oversized(now) if task.longest > takes), default=0)

    def _oversized(self, now: float) -> list[_Task]:
        usable = [state for state in list(self.teachers.values()) if state.is_usable(now)]
        if not usable or any(state.accepts(math.inf, math.inf, math.inf) for state in usable):
            return []
        waiting = (self._tasks[task] for task in (*self._waiting, *self._parked) if task in self._tasks)
        return [
            task
            for task in waiting
            if not task.attempts and not any(state.accepts(task.rows, task.nbytes, task.longest) for state in usable)
        ]

    @property
    def max_rows(self) -> int:
        """Rows that every known teacher accepts in a request, including lost teachers; 0 for any number."""
        return min((state.max_rows for state in self.teachers.values() if state.max_rows), default=0)

    @property
    def max_nbytes(self) -> int:
        """Bytes that every known teacher accepts in a request, including lost teachers; 0 for any number."""
        return min((state.max_nbytes for state in self.teachers.values() if state.max_nbytes), default=0)

    @property
    def max_sequence(self) -> int:
        """Rows of the longest sequence that some known teacher accepts, including lost teachers; 0 for any number."""
        longest = max((state.longest_sequence for state in self.teachers.values()), default=math.inf)
        return int(longest) if longest < math.inf else 0

    def _has_unassigned(self) -> bool:
        waiting = (task for task in self._waiting if task in self._tasks and task <= self.last)
        return any(not self._tasks[task].attempts for task in waiting)

    @property
    def capacity(self) -> int:
        """Requests that all live teachers together want in flight."""
        states = list(self.teachers.values())  # may be read from another thread
        return sum(state.window.size for state in states if state.live and not state.draining)

    # Decisions

    def _end(self, attempt: int) -> _Attempt | None:
        ended = self._attempts.pop(attempt, None)
        if ended is not None:
            if ended.teacher in self.teachers:
                self.teachers[ended.teacher].in_flight.discard(attempt)
            if ended.task in self._tasks:
                self._tasks[ended.task].attempts.discard(attempt)
        return ended

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
                pause_s = 0.0  # of requests refused together, only the first counts
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
            return  # counted already: when a connection breaks, all its pending requests fail
        state.failures += 1
        if state.failures >= self.policy.failures_to_open or state.half_open:
            pause = _doubled(self.policy.open_min_s, state.opened, self.policy.open_max_s)
            state.opened += 1
            state.failures = 0
            state.half_open = True
            self.pauses[failure.kind] += 1
            state.closed_until = now + pause
            state.why = failure.message

    def _give_up(self, number: int) -> GiveUp:
        return GiveUp(number, tuple(self._tasks.pop(number).failures))

    def _awaits_teachers_until(self, task: _Task) -> float:
        """Return until when a failed task waits for teachers that are still connecting."""
        return task.first_failed_at + self.policy.coming_s if self._connecting else -math.inf

    def _is_hopeless(self, task: _Task, now: float) -> bool:
        """Return whether a failed task should not be sent again, to any teacher."""
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
        self._requeue_parked(now)
        actions, free = self._place_waiting(now)
        self.full = not free
        if free and self._attempts and self.policy.hedge_budget > 0:
            actions.extend(self._hedge(free, now))
        return actions

    def _requeue_parked(self, now: float) -> None:
        """Queue parked tasks again if their time has come or teachers have come or gone."""
        if self._parked and (self._changed or now >= self._parked_until):
            for number in self._parked:
                heapq.heappush(self._waiting, number)
            self._parked = []
            self._parked_until = math.inf
        self._changed = False

    def _place_waiting(self, now: float) -> tuple[list[Action], list[tuple[str, TeacherState]]]:
        """Send waiting tasks, oldest first, to teachers that have room."""
        actions: list[Action] = []
        put_back: list[int] = []
        free = [(name, state) for name, state in self.teachers.items() if state.has_room(now)]
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
                if self._park(number, task, now):
                    continue
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
        """Return whether a task has failed at all teachers that it could soon be sent to."""
        if not task.failures:
            return False
        reachable = self._reachable_soon(task, now)
        return bool(reachable) and all(task.failed_at(name) for name in reachable)

    def _park(self, number: int, task: _Task, now: float) -> bool:
        """Park a task that failed everywhere until it may be sent again; return False if that is now."""
        again_at = max(self._awaits_teachers_until(task), task.again_at)
        if now >= again_at:
            return False
        self._parked.append(number)
        self._parked_until = min(self._parked_until, again_at)
        return True

    def _reachable_soon(self, task: _Task, now: float) -> list[str]:
        """Return the teachers that a failed task may be sent to within the time that it waits for connections.

        After that time, teachers that never had room for it are left out. They still get it if they become free, but
        the task does not wait for them.
        """
        soon = now + self.policy.coming_s
        there = [
            name
            for name, state in self.teachers.items()
            if state.live
            and not state.draining
            and state.accepts(task.rows, task.nbytes, task.longest)
            and state.closed_until <= soon
        ]
        if not task.no_room_at or not task.failures or now < task.first_failed_at + self.policy.coming_s:
            return there
        return [name for name in there if task.failed_at(name) or name not in task.no_room_at]

    def _choose(
        self, free: list[tuple[str, TeacherState]], task: _Task, now: float, *, again: bool = False
    ) -> str | None:
        """Return the free teacher that should answer a task soonest.

        A teacher that failed at the task is chosen only with `again`, and one that refused it never.
        """
        fit = [
            (name, state)
            for name, state in free
            if state.accepts(task.rows, task.nbytes, task.longest) and (again or not task.failed_at(name))
        ]
        if again:
            refused = {name for name, failure in task.failures if failure.kind is FailureKind.REJECTED}
            fit = [(name, state) for name, state in fit if name not in refused]
        if not fit:
            return None
        if task.no_room_at:
            least = min(task.no_room_at.get(name, 0) for name, _ in fit)
            fit = [(name, state) for name, state in fit if task.no_room_at.get(name, 0) == least]
        return min(fit, key=lambda entry: (entry[1].expected_s(now), len(entry[1].in_flight), entry[0]))[0]

    def _send(self, number: int, task: _Task, teacher: str, now: float, *, extra: bool) -> Send:
        state = self.teachers[teacher]
        attempt = next(self._numbers)
        if not state.in_flight:
            state.last_progress_at = now
        state.in_flight.add(attempt)
        task.attempts.add(attempt)
        self._attempts[attempt] = _Attempt(number, teacher, now, len(state.in_flight), extra)
        self.sent += 1
        if extra:
            self.hedged += 1
            self._hedge_tokens -= 1
        else:
            self._hedge_tokens = min(self._hedge_tokens + _HEDGE_EARNINGS * self.policy.hedge_budget, _MAX_HEDGE_TOKENS)
        return Send(attempt, number, teacher, self.policy.request_timeout_s, extra)

    def _late_at(self, attempt: _Attempt) -> float:
        """Return when an attempt becomes late; infinity if its task has other attempts."""
        task = self._tasks.get(attempt.task)
        if task is None or len(task.attempts) != 1:
            return math.inf
        late_s = self._late_s(self.teachers.get(attempt.teacher))
        return math.inf if late_s is None else attempt.sent_at + late_s

    def _late_s(self, state: TeacherState | None) -> float | None:
        if state is None:
            return self.policy.hedge_min_s
        median, usual = state.window.median_s, state.window.usual_s
        if median is None or usual is None:
            medians = [s.window.median_s for s in self.teachers.values() if s.window.median_s is not None]
            if not medians:
                return None
            median = usual = max(medians)
        return max(self.policy.hedge_after * median, 1.2 * usual, self.policy.hedge_min_s)

    def _hedge(self, free: list[tuple[str, TeacherState]], now: float) -> Iterator[Send]:
        """Send late tasks to a second teacher as well.

        If no other work waits, so is the awaited task if an idle teacher would answer it sooner.
        """
        old = now - self.policy.hedge_min_s  # attempts are ordered by time of sending
        candidates = itertools.takewhile(lambda entry: entry[1].sent_at <= old, self._attempts.items())
        late = [(attempt.task, number) for number, attempt in candidates if self._late_at(attempt) <= now]
        head_due = self._head_due() if self._hedge_tokens > _MAX_HEDGE_TOKENS / 2 else None
        if head_due is not None and head_due <= now and self._awaited_task is not None:
            late.extend((self._awaited_task, number) for number in self._tasks[self._awaited_task].attempts)
        for number, attempt in sorted(set(late)):
            if self._hedge_tokens < 1 and not self._starving(number, attempt, now):
                continue
            task, here = self._tasks[number], self._attempts[attempt].teacher
            choice = self._choose([entry for entry in free if entry[0] != here and entry[1].has_room(now)], task, now)
            if choice is not None and len(task.attempts) == 1:
                yield self._send(number, task, choice, now, extra=True)

    def _head_times(self) -> Iterator[float]:
        head = self._tasks.get(self._awaited_task) if self._awaited_task is not None else None
        if head is not None and len(head.attempts) == 1:
            sent = self._attempts[next(iter(head.attempts))]
            late_s = self._late_s(self.teachers.get(sent.teacher))
            if late_s is not None:
                yield sent.sent_at + max(4 * late_s, _STARVING_S)
            head_due = self._head_due() if self._hedge_tokens > _MAX_HEDGE_TOKENS / 2 else None
            if head_due is not None:
                yield head_due

    def _starving(self, number: int, attempt: int, now: float) -> bool:
        """Return whether the training loop has waited for this task so long that the hedging budget is ignored."""
        sent = self._attempts[attempt]
        late_s = self._late_s(self.teachers.get(sent.teacher))
        return (
            number == self._awaited_task and late_s is not None and now >= sent.sent_at + max(4 * late_s, _STARVING_S)
        )

    def _head_due(self) -> float | None:
        """Return when to ask an idle teacher, too, for the task that the training loop waits for; None for never."""
        head = self._tasks.get(self._awaited_task) if self._awaited_task is not None else None
        if head is None or len(head.attempts) != 1 or self._has_unassigned():
            return None
        attempt = self._attempts[next(iter(head.attempts))]
        here = self.teachers.get(attempt.teacher)
        idle = [
            state.window.median_s
            for name, state in self.teachers.items()
            if name != attempt.teacher and state.live and not state.in_flight and state.window.median_s is not None
            if state.accepts(head.rows, head.nbytes, head.longest)
        ]
        if not idle:
            return None
        gain_s = max(1.5 * min(idle), self.policy.hedge_min_s)
        median = here.window.median_s if here is not None else None
        if median is None or median > gain_s:
            return attempt.sent_at
        return attempt.sent_at + median + gain_s


def _doubled(first_s: float, times: int, longest_s: float) -> float:
    # A teacher that is away overnight is doubled more than a thousand times, which would overflow a float.
    return float(min(first_s * 2 ** min(times, 64), longest_s))
