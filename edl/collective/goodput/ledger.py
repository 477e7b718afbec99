"""Where a node's time goes: counters in whole microseconds, fed by its agent from the workers' status pages.

A status page counts the seconds of a phase exactly, so 20 ms are charged even though the agent looks once a second. If
a node has several workers, the one that trained least counts, since the others wait for it. Time in TRAIN is charged to
steps that finish:

- A step that had been finished before its worker was replaced, and is now repeated, counts as ROLLBACK.
- If the agent goes back to the rendezvous in the middle of a step, that step is lost. As much time as a step usually
  takes was work (ROLLBACK); the rest was waiting for a rank that hung or was gone (IDLE).

A `Span` is a stretch of time with a counter for every category, and lasts as long as their sum, so nothing can be
counted twice or left out. Spans follow one another without gaps. Neighbours with the same main category are merged. If
there are too many, the older half is merged in pairs, which loses detail about when, but not about how much.
"""

from __future__ import annotations

import enum
import json
import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from edl.collective.worker_status import Phase, WorkerStatus
from edl.errors import ProtocolError

__all__ = [
    "MAX_SPANS",
    "AgentState",
    "Event",
    "Ledger",
    "NodeRecord",
    "ProgressMark",
    "Span",
    "TimeCategory",
    "append_span",
    "apportion",
    "decode_events",
    "decode_record",
    "encode_events",
    "encode_record",
    "limit_spans",
    "span_of",
    "sum_amounts",
]

MAX_SPANS: Final = 600
"""About as many as a picture of a timeline has columns to distinguish; less than 40 KB as JSON."""
_MICRO: Final = 1_000_000  # microseconds per second
_MAX_MARKS: Final = 300  # enough for a line in a picture; less than 15 KB as JSON
_RATE_OVER_S: Final = 15.0  # several steps of most jobs; with more, a change shows late
_VERSION: Final = 1  # of the JSON; any other version is refused
_MAX_TEXT: Final = 300  # characters of an event: a line or two; 300 events stay below 120 KB in ASCII


class TimeCategory(enum.IntEnum):
    """The use of a moment; exactly one category applies."""

    TRAIN = 0
    """Steps that count: forward, backward, waiting for other ranks' gradients, data, evaluation between steps."""
    SAVE = 1
    """The training loop is blocked by a copy of its state."""
    LOAD = 2
    """Everything before the first step of an agent or worker: imports, process group, model, reading a checkpoint."""
    ROLLBACK = 3
    """Work that was lost: steps done again, and the part of a step that a restart interrupted."""
    RENDEZVOUS = 4
    """Agents agree on the next world, or workers are paused for it."""
    IDLE = 5
    """An agent is alive but nothing moves: a hang until it is noticed, a worker that ended before the others."""
    DOWN = 6
    """No agent of the job is alive. A single node is never down, only absent."""


class AgentState(enum.Enum):
    """The current activity of an agent."""

    STARTING = "starting"
    """It imports what workers will need and has not joined yet."""
    RENDEZVOUS = "rendezvous"
    """It waits for others or agrees with them on the next world; its workers, if any, are being replaced."""
    RUNNING = "running"
    """It has workers, whose status pages say more."""
    IDLE = "idle"
    """It has no workers and needs none: they ended, or this node is in reserve."""


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
_WITHOUT_WORKERS: Final = {
    AgentState.STARTING: TimeCategory.LOAD,
    AgentState.RENDEZVOUS: TimeCategory.RENDEZVOUS,
    AgentState.RUNNING: TimeCategory.LOAD,
    AgentState.IDLE: TimeCategory.IDLE,
}


@dataclass(frozen=True)
class Span:
    """A stretch of time.

    Attributes:
        amounts: Microseconds by `TimeCategory`, in its order.
        workers: Largest number of workers that the node (or the job) had in it.
        running: Whether workers ran; False while an agent waited without any.
    """

    amounts: tuple[int, ...]
    workers: int = 0
    running: bool = False

    @property
    def length_us(self) -> int:
        """Its length in microseconds."""
        return sum(self.amounts)

    @property
    def main(self) -> TimeCategory:
        """The category that took most of it."""
        return TimeCategory(max(TimeCategory, key=lambda category: (self.amounts[category], -category)))

    def __add__(self, later: Span) -> Span:
        """Join two spans."""
        amounts = tuple(mine + theirs for mine, theirs in zip(self.amounts, later.amounts, strict=True))
        return Span(amounts, max(self.workers, later.workers), self.running or later.running)


def span_of(category: TimeCategory, length_us: int, workers: int = 0, running: bool = False) -> Span:
    """Return a span of a single category."""
    return Span(tuple(length_us if found is category else 0 for found in TimeCategory), workers, running)


def append_span(spans: list[Span], span: Span) -> None:
    """Append a span, or merge it with the last one if a person would see no difference. Empty spans are dropped."""
    if not span.length_us:
        return
    last = spans[-1] if spans else None
    if last and (last.main, last.workers, last.running) == (span.main, span.workers, span.running):
        spans[-1] = last + span
    else:
        spans.append(span)


def limit_spans(spans: Iterable[Span]) -> list[Span]:
    """Describe the same time in at most `MAX_SPANS` spans."""
    rest = list(spans)
    while True:
        done: list[Span] = []
        for span in rest:
            append_span(done, span)
        if len(done) <= MAX_SPANS:
            return done
        old = done[: len(done) // 2]
        rest = [sum(old[at + 1 : at + 2], old[at]) for at in range(0, len(old), 2)] + done[len(old) :]


def sum_amounts(spans: Iterable[Span]) -> dict[TimeCategory, int]:
    """Return the spans' microseconds by category."""
    rows = [span.amounts for span in spans]
    return {category: sum(row[category] for row in rows) for category in TimeCategory}


def apportion(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Split `total` into whole numbers in proportion to `weights`, which must not all be 0. Their sum is `total`."""
    whole, left, parts = sum(weights), total, []
    for weight in weights:
        parts.append(min(left, round(total * (weight / whole))))
        left -= parts[-1]
    parts[max(range(len(weights)), key=weights.__getitem__)] += left  # the rest after rounding down
    return tuple(parts)


@dataclass(frozen=True)
class Event:
    """Something that happened to a job.

    Attributes:
        at_us: Wall clock in microseconds since 1970.
        node: The node that it happened to, or that saw it.
        kind: "join", "leave", "kill", "exit", "hang", "faulty", "restart", "generation" or "error"; any other kind is
            shown as it is.
        text: What happened, in a few words.
        generation: Generation of the world in which it happened; -1 before the first.
    """

    at_us: int
    node: str
    kind: str
    text: str = ""
    generation: int = -1


@dataclass(frozen=True)
class ProgressMark:
    """The progress of a node at one moment.

    Attributes:
        at_us: Microseconds since its ledger began.
        step: The last finished step; -1 for none.
        samples: Number of samples processed until then.
    """

    at_us: int
    step: int
    samples: int


@dataclass(frozen=True)
class NodeRecord:
    """The record of one life of a node's agent, for others to read.

    Attributes:
        node: Name of the agent.
        began_us: Wall clock at which the ledger began, in microseconds since 1970.
        workers: Number of workers that it has or wants.
        spans: All the time from then until the last observation.
        marks: Progress over time, oldest first, thinned out as marks accumulate.
        generation: Generation of the workers' world; -1 before the first.
        step: The last finished step; -1 for none.
        steps_per_s: Steps per second over the last 15 seconds; 0 if nothing moved.
        samples_per_s: Samples per second over the last 15 seconds; 0 if nothing moved.
        ended: Whether the agent ended its ledger. If not, it is alive or was killed.
        reached: The last step that the job is known to have finished before `generation`; -1 for none.
        replicated_us: Wall clock of the newest state of this node that another node has a replica of; 0 for none.
    """

    node: str
    began_us: int
    workers: int
    spans: tuple[Span, ...] = ()
    marks: tuple[ProgressMark, ...] = ()
    generation: int = -1
    step: int = -1
    steps_per_s: float = 0.0
    samples_per_s: float = 0.0
    ended: bool = False
    reached: int = -1
    replicated_us: int = 0

    @property
    def samples_known(self) -> bool:
        """Whether its workers ever reported samples. A script may report steps alone."""
        return self.samples_per_s > 0 or any(mark.samples > 0 for mark in self.marks)

    @property
    def until_us(self) -> int:
        """Wall clock of the last sign of life."""
        return self.began_us + sum(span.length_us for span in self.spans)


class _RankProgress:
    """The progress of a local rank across all the processes that had this rank."""

    def __init__(self, status: WorkerStatus) -> None:
        self.last = status
        self._highest = status.step

    def repeated_part(self, status: WorkerStatus, highest: int) -> float | None:
        """Return the share of the steps finished since the last call that had been finished before, from 0 to 1.

        `highest` is the last step that the job had finished before the current generation. None if no step was
        finished.
        """
        before = self.last
        self.last = status
        self._highest = max(self._highest, highest)
        if status.step_at == before.step_at:
            return None
        went_on = (status.pid, status.first) == (before.pid, before.first) and status.step > before.step
        # The page shows the previous process's step until the new process finishes its first.
        done = min(before.step if went_on else status.first - 1, status.step - 1)
        again = min(max(self._highest - done, 0), status.step - done)
        self._highest = max(self._highest, status.step)
        return again / (status.step - done)


class Ledger:
    """A node's time from `now_s` on.

    Args:
        node: Name of the agent, the same when it comes back.
        workers: Number of workers that it has or wants.
        now_s: `time.monotonic()`, the clock of the status pages.
        wall_s: `time.time()` at the same moment, to combine this ledger with other nodes'.
    """

    def __init__(self, node: str, workers: int, now_s: float, wall_s: float) -> None:
        self.node = node
        self._began_us = round(wall_s * _MICRO)
        self._base_s = now_s
        self._at_us = 0
        self._workers = workers
        self._agent_state = AgentState.STARTING
        self._rank_progress: list[_RankProgress] = []
        self._spans: list[Span] = []
        self._open_us = 0  # of the time charged to TRAIN, the part that belongs to an unfinished step
        self._highest = -1
        self._reached = -1
        self._usual_step_s = 0.0
        self._marks: list[ProgressMark] = []
        self._mark_every_us = 0
        self._recent: deque[ProgressMark] = deque()
        self._ended = False

    def observe(
        self, now_s: float, agent_state: AgentState, statuses: Sequence[WorkerStatus], highest: int = -1
    ) -> None:
        """Charge the time since the last observation, and record what the agent does from now on.

        Call it about once a second and whenever `agent_state` changes. A clock that stands still or goes back charges
        nothing.

        Args:
            now_s: The time now (`time.monotonic()`).
            agent_state: What the agent does from now on.
            statuses: Statuses of all local ranks, in their order; empty if there are none.
            highest: The last step that any node of the job finished before the workers' generation, if the agent knows
                it.
        """
        length_us = max(0, round((now_s - self._base_s) * _MICRO) - self._at_us)
        self._at_us += length_us
        self._highest = max(self._highest, highest)
        self._reached = max(self._reached, highest)
        if len(statuses) == len(self._rank_progress):
            befores = [worker.last for worker in self._rank_progress]
        else:
            befores = list(statuses)
            self._rank_progress = [_RankProgress(status) for status in statuses]
        if any(now.generation != before.generation for now, before in zip(statuses, befores, strict=True)):
            self._lose_open_step()
            self._reached = self._highest
        repeats = [
            progress.repeated_part(status, self._reached)
            for progress, status in zip(self._rank_progress, statuses, strict=True)
        ]
        if self._agent_state is not AgentState.RUNNING or not statuses:
            self._charge(span_of(_WITHOUT_WORKERS[self._agent_state], length_us))
        else:
            shares = [_amounts(length_us, *pair) for pair in zip(befores, statuses, strict=True)]
            slowest = min(range(len(shares)), key=lambda index: shares[index][TimeCategory.TRAIN])
            self._train(Span(shares[slowest]), statuses[slowest], repeats[slowest], now_s)
        if agent_state is AgentState.RENDEZVOUS:
            self._lose_open_step()
        self._mark_progress(statuses)
        self._agent_state = agent_state
        if len(self._spans) > MAX_SPANS:
            self._spans = limit_spans(self._spans)

    def end(self, now_s: float) -> None:
        """Charge the time until now and end the ledger, because the agent leaves on purpose."""
        self.observe(now_s, AgentState.IDLE, [worker.last for worker in self._rank_progress])
        self._ended = True

    def record(self) -> NodeRecord:
        """Return the record until the last observation."""
        newest = [worker.last for worker in self._rank_progress]
        steps_per_s, samples_per_s = self._rates()
        return NodeRecord(
            node=self.node,
            began_us=self._began_us,
            workers=self._workers,
            spans=tuple(self._spans),
            marks=tuple(self._marks),
            generation=max((status.generation for status in newest), default=-1),
            step=min((status.step for status in newest), default=-1),
            reached=self._reached,
            steps_per_s=steps_per_s,
            samples_per_s=samples_per_s,
            ended=self._ended,
        )

    def _charge(self, span: Span) -> None:
        append_span(self._spans, Span(span.amounts, self._workers, self._agent_state is AgentState.RUNNING))

    def _train(self, span: Span, status: WorkerStatus, repeated: float | None, now_s: float) -> None:
        """Charge an interval with workers, and move what turned out to be repeated work to ROLLBACK."""
        self._charge(span)
        whole_us = self._open_us + span.amounts[TimeCategory.TRAIN]
        open_us = 0
        if _CATEGORY_OF_PHASE[status.phase] is TimeCategory.TRAIN:
            open_us = round((now_s - max(status.step_at, status.phase_since)) * _MICRO)
        self._open_us = min(max(open_us, 0), whole_us)
        if repeated is None:
            return
        # A worker that itself knows that it repeats steps has charged them to ROLLBACK.
        known_us = span.amounts[TimeCategory.ROLLBACK]
        self._move(round((whole_us - self._open_us + known_us) * repeated) - known_us, TimeCategory.ROLLBACK)
        if status.durations_s:
            self._usual_step_s = statistics.median(status.durations_s)

    def _lose_open_step(self) -> None:
        usual_us = round(self._usual_step_s * _MICRO)
        work_us = min(self._open_us, usual_us) if usual_us else self._open_us
        self._move(self._open_us - work_us, TimeCategory.IDLE)
        self._move(work_us, TimeCategory.ROLLBACK)
        self._open_us = 0

    def _move(self, amount_us: int, category: TimeCategory) -> None:
        """Move the newest `amount_us` of TRAIN to `category`, at about the same place in time."""
        later: list[Span] = []
        while amount_us > 0 and self._spans:
            span = self._spans.pop()
            moved_us = min(amount_us, span.amounts[TimeCategory.TRAIN])
            amount_us -= moved_us
            kept = (span.amounts[TimeCategory.TRAIN] - moved_us, *span.amounts[1:])
            later += [span_of(category, moved_us, span.workers, span.running), Span(kept, span.workers, span.running)]
        for span in reversed(later):
            append_span(self._spans, span)

    def _mark_progress(self, statuses: Sequence[WorkerStatus]) -> None:
        """Store the node's progress: thinned out for the picture, closely for the rates."""
        if not statuses:
            return
        step = min(status.step for status in statuses)
        mark = ProgressMark(self._at_us, step, sum(status.samples for status in statuses))
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
        """Return steps and samples per second over the last seconds."""
        if not self._recent:
            return 0.0, 0.0
        first, last = self._recent[0], self._recent[-1]
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


# --- Encoding as JSON, for the Store. Everything read from there is checked ---


def encode_record(record: NodeRecord) -> bytes:
    """Return a node's record as JSON: below 60 KB with `MAX_SPANS` spans and 300 marks."""
    fields = {
        **vars(record),
        "version": _VERSION,
        "states": [category.name.lower() for category in TimeCategory],
        "spans": [[span.workers, int(span.running), *span.amounts] for span in record.spans],
        "marks": [[mark.at_us, mark.step, mark.samples] for mark in record.marks],
        "steps_per_s": round(record.steps_per_s, 4),
        "samples_per_s": round(record.samples_per_s, 4),
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def decode_record(data: bytes, where: str) -> NodeRecord:
    """Read a record that `encode_record` wrote.

    Raises:
        ProtocolError: The data is something else or has another version. The message begins with `where`.
    """
    fields = _fields(data, where)
    try:
        return NodeRecord(
            node=_text(fields["node"]),
            began_us=_whole(fields["began_us"]),
            workers=_whole(fields["workers"]),
            spans=tuple(_span(*row) for row in fields["spans"]),
            marks=tuple(
                ProgressMark(_whole(at), _whole(step, -1), _whole(samples)) for at, step, samples in fields["marks"]
            ),
            generation=_whole(fields["generation"], -1),
            step=_whole(fields["step"], -1),
            reached=_whole(fields.get("reached", -1), -1),
            steps_per_s=_rate(fields["steps_per_s"]),
            samples_per_s=_rate(fields["samples_per_s"]),
            ended=fields["ended"] is True,
            replicated_us=_whole(fields.get("replicated_us", 0)),
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise ProtocolError(f"{where} is not a ledger: {exc!r}") from exc


def encode_events(events: Sequence[Event]) -> bytes:
    """Return an agent's events, oldest first, as JSON."""
    rows = [[event.at_us, event.node, event.kind, event.text[:_MAX_TEXT], event.generation] for event in events]
    return json.dumps({"version": _VERSION, "events": rows}, separators=(",", ":")).encode()


def decode_events(data: bytes, where: str) -> list[Event]:
    """Read events that `encode_events` wrote.

    Raises:
        ProtocolError: The data is something else or has another version. The message begins with `where`.
    """
    rows = _fields(data, where).get("events")
    try:
        return [
            Event(_whole(at_us), _text(node), _text(kind), _text(text), _whole(generation, -1))
            for at_us, node, kind, text, generation in rows or ()
        ]
    except (TypeError, ValueError) as exc:
        raise ProtocolError(f"{where} is not a list of events: {exc!r}") from exc


def _fields(data: bytes, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError(f"{where} is not JSON: {exc}") from exc
    if not isinstance(fields, dict) or "version" not in fields:
        raise ProtocolError(f"{where} has no version: nothing of EDL wrote it")
    if fields["version"] != _VERSION:
        raise ProtocolError(
            f"{where} has version {fields['version']!r:.20}; this edl reads version {_VERSION}: use the job's edl"
        )
    return fields


def _span(workers: Any, running: Any, *amounts: Any) -> Span:
    if len(amounts) != len(TimeCategory):
        raise ValueError(f"{len(amounts)} states in place of {len(TimeCategory)}")
    return Span(tuple(_whole(amount) for amount in amounts), _whole(workers), bool(running))


def _whole(value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**53:
        raise ValueError(f"{value!r:.40} is not a whole number from {least}")
    return value


def _rate(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r:.40} is not a number from 0")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is not text")
    return value
