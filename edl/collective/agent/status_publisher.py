"""Records how an agent spends its time, in the Store, for `edl status`, `edl report` and the dashboard.

If a node has several workers, the worker that trained least counts, since the other workers wait for that worker. Time
in TRAIN is charged to steps that finish. If a step was finished before its worker was replaced, and is then repeated,
the repetition counts as ROLLBACK. If the agent returns to the rendezvous in the middle of a step, the time since the
step began is split: up to the usual duration of a step counts as lost work (ROLLBACK), and the rest as waiting for a
rank that hung or was gone (IDLE).
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final
from urllib.parse import quote

from edl.background import BackgroundLoop
from edl.collective.agent.worker_group import WorkerGroup
from edl.collective.goodput import (
    MAX_SPANS,
    Event,
    NodeRecord,
    ProgressMark,
    Span,
    TimeCategory,
    append_span,
    apportion,
    encode_events,
    last_step_before,
    limit_spans,
    span_of,
)
from edl.collective.job_records import prefix
from edl.collective.worker_status import Phase, WorkerStatus
from edl.discovery.store import Store
from edl.errors import ClosedError, DiscoveryError

logger = logging.getLogger(__name__)

_WRITE_EVERY_S = 1.0  # `edl status --watch` shows each second; more often would load a store of hundreds of nodes
_QUERY_S: Final = 3.0  # to wait for the answer which steps were finished before; an election may delay it
MAX_EVENTS: Final = 300  # per life of an agent: less than 120 KB of ASCII JSON, rewritten with every event
_MAX_MARKS: Final = 300  # enough for a line in a picture; less than 15 KB as JSON
_RATE_OVER_S: Final = 15.0  # several steps of most jobs; with more, a change shows late
_MICRO: Final = 1_000_000  # microseconds per second

_CATEGORY_OF_PHASE: Final = {
    Phase.START: TimeCategory.LOAD,
    Phase.LOAD: TimeCategory.LOAD,
    Phase.TRAIN: TimeCategory.TRAIN,
    Phase.SAVE: TimeCategory.SAVE,
    Phase.ROLLBACK: TimeCategory.ROLLBACK,
    Phase.PAUSE: TimeCategory.RENDEZVOUS,
    Phase.EXIT: TimeCategory.IDLE,
    Phase.AGREE: TimeCategory.TRAIN,
    Phase.BUSY: TimeCategory.TRAIN,
}


class Ledger:
    """Accounts for a node's time after `now_s` (`time.monotonic()`, as on status pages) or `wall_s` (`time.time()`)."""

    def __init__(self, node: str, workers: int, now_s: float, wall_s: float) -> None:
        self.node = node
        self.began_us = round(wall_s * _MICRO)
        self._base_s = now_s
        self._at_us = 0
        self._workers = workers
        self._doing = TimeCategory.LOAD
        self._statuses: list[WorkerStatus] = []
        self._spans: list[Span] = []
        self._open_us = 0
        self._highest = -1
        self._reached = -1
        self._usual_step_s = 0.0
        self._marks: list[ProgressMark] = []
        self._mark_every_us = 0
        self._recent: deque[ProgressMark] = deque()

    def observe(self, now_s: float, doing: TimeCategory, statuses: Sequence[WorkerStatus], reached: int = -1) -> None:
        """Charge the time since the last observation. `reached` is the last step of any node before this generation."""
        length_us = max(0, round((now_s - self._base_s) * _MICRO) - self._at_us)
        self._at_us += length_us
        self._reached = max(self._reached, reached)
        befores = self._statuses if len(self._statuses) == len(statuses) else statuses
        self._statuses = list(statuses)
        pairs = list(zip(befores, statuses, strict=True))
        if any(after.generation != before.generation for before, after in pairs):
            self._end_open_step(lost=True)
            self._reached = max(self._reached, self._highest)
        if self._doing is TimeCategory.TRAIN and statuses:
            amounts = [_amounts(length_us, before, after) for before, after in pairs]
            slowest = min(range(len(pairs)), key=lambda index: amounts[index][TimeCategory.TRAIN])
            self._charge_workers(amounts[slowest], *pairs[slowest], now_s)
        else:
            category = TimeCategory.LOAD if self._doing is TimeCategory.TRAIN else self._doing
            self._charge(span_of(category, length_us).amounts)
        if doing is not TimeCategory.TRAIN:
            self._end_open_step(lost=doing is TimeCategory.RENDEZVOUS)
        self._mark_progress()
        self._doing = doing
        if len(self._spans) > MAX_SPANS:
            self._spans = limit_spans(self._spans)

    def record(self, *, ended: bool = False, replicated_us: int = 0) -> NodeRecord:
        open_step = span_of(TimeCategory.TRAIN, self._open_us, self._workers, running=True)
        steps_per_s, samples_per_s = self._rates()
        return NodeRecord(
            node=self.node,
            began_us=self.began_us,
            workers=self._workers,
            spans=tuple(limit_spans([*self._spans, open_step])),
            marks=tuple(self._marks),
            generation=max((status.generation for status in self._statuses), default=-1),
            step=min((status.step for status in self._statuses), default=-1),
            reached=self._reached,
            steps_per_s=steps_per_s,
            samples_per_s=samples_per_s,
            ended=ended,
            replicated_us=replicated_us,
        )

    def _charge(self, amounts: tuple[int, ...]) -> None:
        append_span(self._spans, Span(amounts, self._workers, self._doing is TimeCategory.TRAIN))

    def _charge_workers(
        self, amounts: tuple[int, ...], before: WorkerStatus, after: WorkerStatus, now_s: float
    ) -> None:
        """Charge the time that a worker spent between two statuses, except the time of an unfinished step."""
        whole_us = self._open_us + amounts[TimeCategory.TRAIN]
        open_us = 0
        if _CATEGORY_OF_PHASE[after.phase] is TimeCategory.TRAIN:
            open_us = round((now_s - max(after.step_at, after.phase_since)) * _MICRO)
        self._open_us = min(max(open_us, 0), whole_us)
        done_us = whole_us - self._open_us
        again_us = 0
        finished = after.finished - before.finished
        if finished > 0:
            repeated = min(max(self._reached - (after.step - finished), 0), finished)
            # A worker that itself knows that it repeats steps has charged them to ROLLBACK.
            known_us = amounts[TimeCategory.ROLLBACK]
            again_us = min(max(round((done_us + known_us) * repeated / finished) - known_us, 0), done_us)
            if after.durations_s:
                self._usual_step_s = statistics.median(after.durations_s)
        charged = list(amounts)
        charged[TimeCategory.TRAIN] = done_us - again_us
        charged[TimeCategory.ROLLBACK] += again_us
        self._charge(tuple(charged))

    def _end_open_step(self, *, lost: bool) -> None:
        usual_us = round(self._usual_step_s * _MICRO)
        work_us = min(self._open_us, usual_us) if usual_us and lost else self._open_us
        work = TimeCategory.ROLLBACK if lost else TimeCategory.TRAIN
        for category, amount in ((work, work_us), (TimeCategory.IDLE, self._open_us - work_us)):
            append_span(self._spans, span_of(category, amount, self._workers, running=True))
        self._open_us = 0

    def _mark_progress(self) -> None:
        """Store the node's progress: at wide intervals for the chart, at short intervals for the rates."""
        if not self._statuses:
            return
        step = min(status.step for status in self._statuses)
        mark = ProgressMark(self._at_us, step, sum(status.samples for status in self._statuses))
        self._highest = max(self._highest, step)
        self._recent.append(mark)
        while self._recent[0].at_us < self._at_us - _RATE_OVER_S * _MICRO:
            self._recent.popleft()
        if self._marks and mark.at_us - self._marks[-1].at_us < self._mark_every_us:
            return
        self._marks.append(mark)
        if len(self._marks) > _MAX_MARKS:
            del self._marks[1::2]
            self._mark_every_us = max(2 * self._mark_every_us, self._at_us // _MAX_MARKS)

    def _rates(self) -> tuple[float, float]:
        first, last = (self._recent[0], self._recent[-1]) if self._recent else (ProgressMark(0, 0, 0),) * 2
        passed_s = (last.at_us - first.at_us) / _MICRO
        if passed_s <= 0:
            return 0.0, 0.0
        return max(last.step - first.step, 0) / passed_s, max(last.samples - first.samples, 0) / passed_s


def _amounts(length_us: int, before: WorkerStatus, after: WorkerStatus) -> tuple[int, ...]:
    """Return how `length_us` between two statuses of a worker was spent, in microseconds by category."""
    spent = [0.0] * len(TimeCategory)
    for phase, category in _CATEGORY_OF_PHASE.items():
        spent[category] += max(0.0, after.totals_s[phase] - before.totals_s[phase])
    # If the sum is not the time that passed, a page was replaced, or read while its writer changed phases.
    if not 0.9 * length_us - 5_000 <= sum(spent) * _MICRO <= 1.1 * length_us + 5_000 or sum(spent) <= 0:
        return span_of(_CATEGORY_OF_PHASE[after.phase], length_us).amounts
    return apportion(length_us, spent)


class StatusPublisher:
    """Keeps an agent's ledger up to date. Used from the agent's thread only. Only `close` waits for the store."""

    def __init__(self, store: Store, job: str, node: str, workers: int) -> None:
        self._store = store
        self._job = job
        self._worker_group: WorkerGroup | None = None
        self._ledger = Ledger(node, workers, time.monotonic(), time.time())
        self._doing = TimeCategory.RENDEZVOUS
        self._handed_at = 0.0
        self._replicated_us = 0
        self._generation = -1
        self._finished_before = -1
        self._queried_generation: int | None = None
        self._queried_at = 0.0
        self._lock = threading.Lock()
        self._record: NodeRecord | None = None
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._written: tuple[Event, ...] = ()
        self._closing = False
        self._loop = BackgroundLoop("edl-status", self._publish)

    def follow_workers(self, worker_group: WorkerGroup) -> None:
        """From now on, charge time based on these workers' status pages. Without workers, `close` writes no record."""
        self._worker_group = worker_group

    def charge_time(self, doing: TimeCategory, replicated_us: int = 0) -> None:
        """Charge the time until now, and from now on charge to `doing`. `replicated_us` is as in `NodeRecord`."""
        assert self._worker_group is not None, "follow_workers is called first"
        self._replicated_us = replicated_us
        now = time.monotonic()
        self._query_new_generation(self._worker_group.generation, now)
        waits = self._queried_generation is not None and now - self._queried_at < _QUERY_S
        due = not waits and now - self._handed_at >= _WRITE_EVERY_S
        if not due and doing is self._doing:
            return
        self._doing = doing
        self._observe_workers(self._worker_group, now)
        if due:
            self._handed_at = now
            self._hand_over(self._ledger.record(replicated_us=replicated_us))

    def record_event(self, kind: str, text: str, generation: int = -1) -> None:
        event = Event(time.time(), self._ledger.node, kind, text, generation)
        with self._lock:
            self._events.append(event)
        self._loop.wake()

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is not yet written, and the workers' last status. Waits for at most `timeout_s` seconds."""
        if self._worker_group is not None:
            self._observe_workers(self._worker_group, time.monotonic())
            self._hand_over(self._ledger.record(ended=True, replicated_us=self._replicated_us))
        self._closing = True
        self._loop.wake()
        self._loop.wait_ended(timeout_s)

    def _observe_workers(self, worker_group: WorkerGroup, now: float) -> None:
        self._ledger.observe(now, self._doing, worker_group.read_statuses(), self._finished_before)

    def _query_new_generation(self, generation: int, now: float) -> None:
        """If this node missed the generation before `generation`, ask which steps were finished before `generation`."""
        before = self._generation
        self._generation = generation
        if generation in (before, before + 1):
            return
        with self._lock:
            self._queried_generation = generation
        self._queried_at = now
        self._loop.wake()

    def _hand_over(self, record: NodeRecord) -> None:
        with self._lock:
            self._record = record
        self._loop.wake()

    def _publish(self) -> float | None:
        closing = self._closing  # read first: then this round writes everything that there will be
        with self._lock:
            queried = self._queried_generation
            record, self._record = self._record, None
            events = tuple(self._events)
        if queried is not None:
            self._query_finished_steps(queried)
        life = f"{quote(self._ledger.node, safe='')}/{self._ledger.began_us}"
        with contextlib.suppress(DiscoveryError, ClosedError):
            if events != self._written:
                self._store.put(f"{prefix(self._job)}events/{life}", encode_events(events))
                self._written = events
            if record is not None:
                self._store.put(f"{prefix(self._job)}ledger/{life}", record.encode())
        return None if closing else _WRITE_EVERY_S

    def _query_finished_steps(self, generation: int) -> None:
        """Ask the store which steps were finished before a generation; without an answer, the next round asks again."""
        with contextlib.suppress(DiscoveryError, ClosedError):
            self._finished_before = last_step_before(self._store, self._job, generation)
            with self._lock:
                if self._queried_generation == generation:
                    self._queried_generation = None
