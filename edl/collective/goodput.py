"""Summarizes how a job spent its time: exclusive categories that add up to the total time, goodput, and events.

Goodput is train / elapsed: the share of the wall-clock time since the job began that was spent on steps whose result
was kept, without repetitions. Every node's agent accounts for its time (`agent.status_publisher`) in the Store::

    jobs/JOB/world                  which nodes train together (edl.collective.job_records), written by all agents
    jobs/JOB/ledger/NODE/BEGAN      one life of a node's agent: all of its time, rewritten about once a second
    jobs/JOB/left-out/HOST          a host that the job excludes (edl.collective.job_records)
    jobs/JOB/events/NODE/BEGAN      recent events that concern that agent or that it saw

At each moment, the job's time is charged like that of the node that trained least among the nodes that run workers,
because synchronous training is as fast as its slowest rank. If no node runs workers, the node with the most idle time
decides. If no agent is alive, the job is DOWN. A node that waits to join lowers only `worker_goodput`.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from edl.collective.job_records import GAVE_UP, Exclusion, World, prefix
from edl.discovery.store import Store
from edl.errors import ProtocolError, SettingsError
from edl.quoting import did_you_mean, listed

MAX_SPANS: Final = 600  # about as many as a picture's columns can show; less than 40 KB as JSON
SILENT_S: Final = 5.0  # an agent, which writes once a second, that wrote nothing for this long counts as gone
_GIVEN_UP_S: Final = 86400.0  # silence after which a job that is down counts as given up
_VERSION: Final = 1  # of the JSON; any other version is refused
_MAX_TEXT: Final = 300  # characters of an event: a line or two; 300 events stay below 120 KB in ASCII
_EXPLAINED: Final = frozenset({"generation", "restart", "faulty"})  # kinds of events whose text is the reason
_LEADING: Final = frozenset({"kill", "exit", "hang", "leave", "faulty", "restart", "error"})  # to another generation
_T = TypeVar("_T", int, float, str)


class TimeCategory(enum.IntEnum):
    """What a moment was spent on: exactly one of these."""

    TRAIN = 0  # steps that count, with waits for other ranks and data, and evaluations between steps
    SAVE = 1  # the training loop is blocked by a copy of its state
    LOAD = 2  # before the first step of an agent or worker: imports, process group, model, reading a checkpoint
    ROLLBACK = 3  # work that was lost: steps done again, and the part of a step that a restart interrupted
    RENDEZVOUS = 4  # agents agree on the next world, or workers are paused for it
    IDLE = 5  # an agent is alive but nothing moves: an unnoticed hang, a worker that ended before the others
    DOWN = 6  # no agent of the job is alive; a single node is never down, only absent


_NAMES: Final = tuple(category.name.lower() for category in TimeCategory)

# --- What a node's agent writes ---


@dataclass(frozen=True)
class Span:
    """A stretch of time with a counter for every category; its length is the counters' sum. Spans are contiguous."""

    amounts: tuple[int, ...]  # microseconds by `TimeCategory`, in its order
    workers: int = 0  # largest number of workers that the node (or the job) had in that time
    running: bool = False  # whether workers ran; False while an agent waited without any

    @property
    def length_us(self) -> int:
        return sum(self.amounts)

    @property
    def main(self) -> TimeCategory:
        return TimeCategory(max(TimeCategory, key=lambda category: (self.amounts[category], -category)))

    def __add__(self, later: Span) -> Span:
        amounts = tuple(mine + theirs for mine, theirs in zip(self.amounts, later.amounts, strict=True))
        return Span(amounts, max(self.workers, later.workers), self.running or later.running)


def span_of(category: TimeCategory, length_us: int, workers: int = 0, running: bool = False) -> Span:
    return Span(tuple(length_us if found is category else 0 for found in TimeCategory), workers, running)


def append_span(spans: list[Span], span: Span) -> None:
    """Append a span, or merge it with the last one if `main`, `workers` and `running` agree. Drops empty spans."""
    if not span.length_us:
        return
    last = spans[-1] if spans else None
    if last and (last.main, last.workers, last.running) == (span.main, span.workers, span.running):
        spans[-1] = last + span
    else:
        spans.append(span)


def limit_spans(spans: Iterable[Span]) -> list[Span]:
    """Cover the same period with at most `MAX_SPANS` spans: while there are more, merge the older half in pairs."""
    rest = list(spans)
    while True:
        done: list[Span] = []
        for span in rest:
            append_span(done, span)
        if len(done) <= MAX_SPANS:
            return done
        old = done[: len(done) // 2]
        rest = [sum(old[at + 1 : at + 2], old[at]) for at in range(0, len(old), 2)] + done[len(old) :]


def apportion(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Split `total` into whole numbers that add up to it, in proportion to `weights`, of which one must be above 0."""
    whole, left, parts = sum(weights), total, []
    for weight in weights:
        parts.append(min(left, round(total * (weight / whole))))
        left -= parts[-1]
    parts[max(range(len(weights)), key=weights.__getitem__)] += left  # the rest after rounding down
    return tuple(parts)


class ProgressMark(NamedTuple):
    """A node's progress `at_us` microseconds after its ledger began: last finished step (or -1), and samples."""

    at_us: int
    step: int
    samples: int


@dataclass(frozen=True)
class NodeRecord:
    """The record of one life of a node's agent, for other processes to read."""

    node: str  # name of the agent
    began_us: int  # wall clock at which the ledger began, in microseconds since 1970
    workers: int  # number of workers that it has or wants
    spans: tuple[Span, ...] = ()  # all the time from then until the last observation
    marks: tuple[ProgressMark, ...] = ()  # progress over time, oldest first, thinned out as marks accumulate
    generation: int = -1  # generation of the workers' world; -1 before the first
    step: int = -1  # the last finished step; -1 for none
    steps_per_s: float = 0.0  # steps per second over the last 15 seconds; 0 if nothing moved
    samples_per_s: float = 0.0  # samples per second over the last 15 seconds; 0 if nothing moved
    ended: bool = False  # whether the agent ended its ledger. If not, it is alive or was killed.
    reached: int = -1  # the last step that the job is known to have finished before `generation`; -1 for none
    replicated_us: int = 0  # wall clock of the newest state of this node that another node has a replica of; 0 for none

    @property
    def samples_known(self) -> bool:
        return self.samples_per_s > 0 or any(mark.samples > 0 for mark in self.marks)

    @property
    def until_us(self) -> int:
        return self.began_us + sum(span.length_us for span in self.spans)

    def encode(self) -> bytes:
        """Return the record as JSON, which is below 60 KB with `MAX_SPANS` spans and 300 marks."""
        spans = [[span.workers, int(span.running), *span.amounts] for span in self.spans]
        values = {**vars(self), "version": _VERSION, "states": list(_NAMES), "spans": spans}
        values |= {name: round(values[name], 4) for name in ("steps_per_s", "samples_per_s")}
        return json.dumps(values, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> NodeRecord:
        """Read a record that `encode` wrote. Raises ValueError, KeyError or TypeError if the record is wrong."""
        values = _versioned(data)
        return cls(
            node=_checked(values["node"], str),
            began_us=_checked(values["began_us"], int),
            workers=_checked(values["workers"], int),
            spans=tuple(_decode_span(*row) for row in values["spans"]),
            marks=tuple(
                ProgressMark(_checked(at_us, int), _checked(step, int, -1), _checked(samples, int))
                for at_us, step, samples in values["marks"]
            ),
            generation=_checked(values["generation"], int, -1),
            step=_checked(values["step"], int, -1),
            steps_per_s=_checked(float(values["steps_per_s"]), float),
            samples_per_s=_checked(float(values["samples_per_s"]), float),
            ended=values["ended"] is True,
            reached=_checked(values.get("reached", -1), int, -1),
            replicated_us=_checked(values.get("replicated_us", 0), int),
        )


@dataclass(frozen=True)
class Event:
    """Something that happened to a job."""

    at: float  # wall clock in seconds since 1970
    node: str  # the node that it happened to, or that saw it
    kind: str  # "join", "leave", "kill", "exit", "hang", "faulty", "restart", "generation", "error", or another
    text: str = ""  # what happened, in a few words
    generation: int = -1  # generation of the world in which it happened; -1 before the first
    cause: str = ""  # in a summary, what led to the event, in words; empty if unknown


def encode_events(events: Iterable[Event]) -> bytes:
    rows = [[round(one.at * 1e6), one.node, one.kind, one.text[:_MAX_TEXT], one.generation] for one in events]
    return json.dumps({"version": _VERSION, "events": rows}, separators=(",", ":")).encode()


JobPart: TypeAlias = "World | NodeRecord | tuple[Event, ...] | Exclusion | None"  # one entry; None: not in a summary


def decode_part(key: str, value: bytes) -> JobPart:
    """Decode an entry from a job's records. Its `key` starts with `jobs/`."""
    _, _, part = key.split("/", 2) if key.count("/") > 1 else ("", "", "")
    if part == "world":
        return World.decode(value)
    if part.startswith("left-out/"):
        return Exclusion.decode(value)
    try:
        if part.startswith("ledger/"):
            return NodeRecord.decode(value)
        if part.startswith("events/"):
            return tuple(
                Event(
                    _checked(at_us, int) / 1e6,
                    *(_checked(node, str), _checked(kind, str), _checked(text, str)),
                    _checked(generation, int, -1),
                )
                for at_us, node, kind, text, generation in _versioned(value)["events"]
            )
    except (KeyError, TypeError, ValueError, RecursionError) as exc:
        raise ProtocolError(f"{key} is not a record of this version of EDL: {exc!r}") from exc
    return None


def _versioned(data: bytes) -> dict[str, Any]:
    values = json.loads(data)
    if not isinstance(values, dict) or "version" not in values:
        raise ValueError("it has no version")
    if values["version"] != _VERSION:
        raise ValueError(f"version {values['version']!r:.20} instead of {_VERSION}: use the job's version of EDL")
    return values


def _decode_span(workers: Any, running: Any, *amounts: Any) -> Span:
    if len(amounts) != len(TimeCategory):
        raise ValueError(f"{len(amounts)} categories instead of {len(TimeCategory)}")
    return Span(tuple(_checked(amount, int) for amount in amounts), _checked(workers, int), bool(running))


def _checked(value: Any, kind: type[_T], least: int = 0) -> _T:
    """Return a value if it has this type. A number must also be finite and not below `least`."""
    if type(value) is not kind or not (isinstance(value, str) or least <= value < 2**53):
        raise ValueError(f"{value!r:.40} instead of {kind.__name__}{'' if kind is str else f' from {least}'}")
    checked: _T = value
    return checked


# --- The summary ---


@dataclass(frozen=True)
class NodeStatus:
    """One life of a node in a job."""

    node: str  # name of the agent
    ranks: list[int] | None  # ranks of its workers in the current world; None if it is not a member
    workers: int  # number of workers that it has or wants
    state: str  # category of its last span; "left" if its agent or the job has ended, "lost" if it fell silent
    silent_s: float  # seconds since its last sign of life
    began: float  # wall clock in seconds; with `node` the key of this life
    generation: int  # generation of its workers' world; -1 before the first
    step: int  # the last finished step; -1 for none
    steps_per_s: float  # steps per second over the last 15 seconds
    samples_per_s: float | None  # samples per second over the last 15 seconds; None if samples were never reported
    goodput: float | None  # goodput of this node's own time; None if no time has passed
    replica_age_s: float | None  # age in seconds of the newest state that another node has a replica of, or None
    seconds: Mapping[str, float]  # seconds of this node by category
    record: NodeRecord = field(metadata={"json": False})  # what its agent wrote; not in the JSON

    @property
    def gone(self) -> bool:
        return self.state in ("left", "lost")


@dataclass(frozen=True, kw_only=True)
class JobSummary:
    """A job at one moment. `edl status --json` and the dashboard's page use the same field names."""

    job: str  # name of the job
    # "forming", "running", "done" or "failed"; "down" if it has not ended but no agent gave a recent sign of life;
    # "gave up" if its last node gave up, or no agent ran for a day; "unknown" without a world
    state: str
    message: str  # why the current world was made; for a job that failed, the traceback
    generation: int  # generation of the current world; -1 before the first
    world_size: int  # number of ranks
    step: int  # the last finished step; -1 if the script reports none, so that all of its time looks like "load"
    steps_per_s: float  # steps per second of the slowest member over the last 15 seconds
    samples_per_s: float | None  # samples per second of all members over the last 15 seconds; None if never reported
    began: float  # wall clock at which its first agent began, in seconds since 1970; 0 for a job without a ledger
    elapsed_s: float  # seconds since then, until now or until the job ended
    seconds: Mapping[str, float]  # seconds by `TimeCategory`, in lower case; their sum is `elapsed_s`
    goodput: float | None  # train / elapsed, from 0 to 1; None if no step was reported
    worker_goodput: float | None  # share of its workers' seconds that trained; None if no step was reported
    nodes: tuple[NodeStatus, ...]  # members by rank, then other live nodes, then those that are gone, the latest first
    left_out: tuple[Exclusion, ...]  # hosts that the job excludes because a GPU of theirs failed, in that order
    events: tuple[Event, ...]  # what happened, oldest first
    spans: tuple[Span, ...] = field(metadata={"json": False})  # the time since `began`; `workers` is over all nodes


def read_job(store: Store, job: str, now_s: float | None = None, others: Iterable[str] = ()) -> JobSummary:
    """Read a job's records from the Store, and return its summary at the wall clock `now_s`, by default now.

    Raises:
        SettingsError: The Store has no such job.
        ProtocolError: This version cannot read the Store's records.
    """
    if not job or "/" in job or not job.isprintable() or job in (".", ".."):
        raise SettingsError(f"job {job!r:.80}: invalid name; a name is printable, not empty, and has no '/'")
    found = store.list(prefix(job))
    if not found:
        known = sorted({*others, *(entry.key.split("/")[1] for entry in store.list("jobs/"))})
        near = did_you_mean(job, known) or f"; there is {listed(known) or 'none at all'}"
        raise SettingsError(f"there is no job {job!r} in this store{near}")
    now_us = round((time.time() if now_s is None else now_s) * 1e6)
    return summarize(job, [decode_part(entry.key, entry.value) for entry in found], now_us)


def last_step_before(store: Store, job: str, generation: int) -> int:
    """Return the last step that any node of a job finished before a generation; -1 for none."""
    highest = -1
    for entry in store.list(f"{prefix(job)}ledger/"):
        with contextlib.suppress(ProtocolError):  # `edl status` reports it
            record = decode_part(entry.key, entry.value)
            assert isinstance(record, NodeRecord)
            highest = max(highest, record.reached, record.step if record.generation < generation else -1)
    return highest


def summarize(job: str, parts: Iterable[JobPart], now_us: int) -> JobSummary:
    """Summarize a job's records at wall clock `now_us`. A silent job that has not ended is down until now."""
    parts = list(parts)
    world = next((part for part in parts if isinstance(part, World)), None)
    records = [part for part in parts if isinstance(part, NodeRecord)]
    records.sort(key=lambda record: (record.began_us, record.node))
    ended = world is not None and world.ended
    last_us = max((record.until_us for record in records), default=now_us) if ended else now_us
    nodes = sorted((_node_status(record, world, now_us, last_us) for record in records), key=_place)
    alive = [node for node in nodes if not node.gone]
    members = [node for node in alive if node.ranks is not None]
    step = max((node.step for node in nodes), default=-1)
    samples_known = any(record.samples_known for record in records)
    events = _with_causes(event for part in parts if isinstance(part, tuple) for event in part)
    state = world.state.value if world is not None else "unknown"
    if not (alive or ended):
        gave_up = bool(events) and events[-1].text.startswith(GAVE_UP)
        silent_s = min((node.silent_s for node in nodes), default=0.0)
        state = GAVE_UP if gave_up or silent_s > _GIVEN_UP_S else "down"
    # Within SILENT_S of now, the last put is current; if it is older, no agent was alive since then.
    spans, worker_goodput = _join(records, 0 if alive or ended else now_us)
    seconds = _seconds(spans)
    elapsed_s = sum(span.length_us for span in spans) / 1e6
    known = step >= 0 and elapsed_s > 0
    return JobSummary(
        job=job,
        state=state,
        message=world.message if world is not None else "",
        generation=world.generation if world is not None else max((node.generation for node in alive), default=-1),
        world_size=world.size if world is not None else 0,
        step=step,
        steps_per_s=min((node.steps_per_s for node in members), default=0.0),
        samples_per_s=sum((node.record.samples_per_s for node in members), 0.0) if samples_known else None,
        began=min((record.began_us for record in records if record.spans), default=0) / 1e6,
        elapsed_s=elapsed_s,
        seconds=seconds,
        goodput=seconds["train"] / elapsed_s if known else None,
        worker_goodput=worker_goodput if known else None,
        nodes=tuple(nodes),
        left_out=tuple(sorted((part for part in parts if isinstance(part, Exclusion)), key=lambda host: host.at_s)),
        events=events,
        spans=tuple(limit_spans(spans)),
    )


def _node_status(record: NodeRecord, world: World | None, now_us: int, last_us: int) -> NodeStatus:
    """Return the status of one life of a node; `last_us` is when the job ended, or now."""
    state = _NAMES[record.spans[-1].main] if record.spans else "rendezvous"
    if (last_us - record.until_us) / 1e6 > SILENT_S and not record.ended:
        state = "lost"
    elif record.ended or (world is not None and world.ended):
        state = "left"
    members = world.nodes if world is not None else ()
    since_us = record.until_us if state in ("left", "lost") else now_us
    seconds = _seconds(record.spans)
    elapsed_s = sum(seconds.values())
    return NodeStatus(
        node=record.node,
        ranks=next((list(member.ranks) for member in members if member.id == record.node), None),
        workers=record.workers,
        state=state,
        silent_s=max(0.0, (now_us - record.until_us) / 1e6),
        began=record.began_us / 1e6,
        generation=record.generation,
        step=record.step,
        steps_per_s=record.steps_per_s,
        samples_per_s=record.samples_per_s if record.samples_known else None,
        goodput=seconds["train"] / elapsed_s if elapsed_s else None,
        replica_age_s=max(0.0, (since_us - record.replicated_us) / 1e6) if record.replicated_us else None,
        seconds=seconds,
        record=record,
    )


def _place(node: NodeStatus) -> tuple[int, float]:
    if node.ranks is not None:
        return (0, min(node.ranks, default=0))
    return (2, -node.record.until_us) if node.gone else (1, node.began)


def _join(records: Iterable[NodeRecord], until_us: int) -> tuple[list[Span], float | None]:
    """Combine all ledgers into the job's spans, up to `until_us` or a later sign of life, and `worker_goodput`."""
    changes: list[tuple[int, int, Span | None]] = []  # at a wall clock, a life enters its next span, or ends
    for life, record in enumerate(records):
        at_us = record.began_us
        for span in record.spans:
            changes.append((at_us, life, span))
            at_us += span.length_us
        if record.spans:
            changes.append((at_us, life, None))
    changes.sort(key=lambda change: change[0])
    if changes and until_us > changes[-1][0]:
        changes.append((until_us, -1, None))
    spans: list[Span] = []
    trained_us = present_us = 0.0
    current: dict[int, Span] = {}
    for (at_us, life, entered), (next_us, _, _) in itertools.pairwise(changes):
        if entered is None:
            current.pop(life, None)
        else:
            current[life] = entered
        length_us = next_us - at_us
        if length_us:
            spans.append(_charge(length_us, current.values()))
            trained_us += sum(length_us * span.workers * _share(span, TimeCategory.TRAIN) for span in current.values())
            present_us += sum(length_us * span.workers for span in current.values())
    return spans, trained_us / present_us if present_us else None


def _charge(length_us: int, present: Iterable[Span]) -> Span:
    """Return the span that the job is charged for `length_us`, during which its nodes are in the spans `present`."""
    running = [span for span in present if span.running]
    if running:
        slowest = min(running, key=lambda span: _share(span, TimeCategory.TRAIN))
        return Span(apportion(length_us, slowest.amounts), sum(span.workers for span in running), running=True)
    waiting = max(present, key=lambda span: _share(span, TimeCategory.IDLE), default=span_of(TimeCategory.DOWN, 1))
    return Span(apportion(length_us, waiting.amounts))


def _share(span: Span, category: TimeCategory) -> float:
    return span.amounts[category] / span.length_us


def _seconds(spans: Sequence[Span]) -> dict[str, float]:
    return {name: sum(span.amounts[at] for span in spans) / 1e6 for at, name in enumerate(_NAMES)}


def _with_causes(events: Iterable[Event]) -> tuple[Event, ...]:
    """Sort events, and add each event's cause: from its text, with details from an event of the previous generation."""
    found = []
    leading: dict[int, Event] = {}  # by generation: the last event in it that leads to another generation
    for event in sorted(events, key=lambda event: event.at):
        cause = event.text if event.kind in _EXPLAINED else ""
        before = leading.get(event.generation - 1)
        if event.kind == "generation" and before is not None and before.text not in cause:
            cause = f"{cause} ({before.kind} at {before.node}: {before.text})"
        if event.kind in _LEADING:
            leading[event.generation] = event
        found.append(replace(event, cause=cause))
    return tuple(found)
