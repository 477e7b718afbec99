"""A job at one moment: combines what its agents wrote into the Store into one summary, which everyone reads.

::

    jobs/JOB/world                  which nodes train together (edl.collective.job_records), written by all agents
    jobs/JOB/ledger/NODE/BEGAN      one life of a node's agent: all of its time, rewritten about once a second
    jobs/JOB/left-out/HOST          a host that the job excludes (edl.collective.job_records)
    jobs/JOB/events/NODE/BEGAN      what recently happened to that agent or was seen by it

None of these keys has a lease: they stay when the agents are gone, until `delete_ledgers`. BEGAN is when that life
began, so an agent that comes back does not overwrite what it wrote before.

Synchronous training is as fast as its slowest rank. So at each moment the job is charged like the node that trained
least at that moment, among the nodes that run workers. If none does, the node with the most idle time decides; if no
agent is alive, the job is DOWN. A node that waits to join costs the job nothing, but its workers' seconds count in
`worker_goodput`. Nodes are aligned by their wall clocks: an error of a second moves a node's row by a second, and at
each restart moves at most a second between the job's categories.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from urllib.parse import quote

from edl.collective.goodput.ledger import (
    Event,
    Ledger,
    NodeRecord,
    Span,
    TimeCategory,
    apportion,
    decode_events,
    decode_record,
    encode_events,
    encode_record,
    limit_spans,
    span_of,
    sum_amounts,
)
from edl.collective.job_records import Exclusion, World, prefix
from edl.discovery.store import Store
from edl.errors import ProtocolError, SettingsError

__all__ = [
    "JobLedger",
    "JobPart",
    "JobRecord",
    "LedgerWriter",
    "NodeRow",
    "Summary",
    "as_dict",
    "decode_part",
    "delete_ledgers",
    "find_causes",
    "join_ledgers",
    "join_parts",
    "last_step_before",
    "list_jobs",
    "read_job",
    "summarize",
]

MAX_EVENTS: Final = 300  # per life of an agent: less than 120 KB of ASCII JSON, rewritten with every event
SILENT_S: Final = 5.0
"""An agent that wrote nothing for this long counts as gone.

It writes about once a second, and may miss a few writes.
"""
_EXPLAINED: Final = frozenset({"generation", "restart", "faulty"})
"""Kinds of events whose text is the reason."""
_LEADING: Final = frozenset({"kill", "exit", "hang", "leave", "faulty", "restart", "error"})
"""Kinds of events that lead to another generation."""

JobPart: TypeAlias = "World | NodeRecord | tuple[Event, ...] | Exclusion | None"
"""The content of one entry of a job."""


class LedgerWriter:
    """Writes an agent's ledger and events. Every method is a single put, and raises what `Store.put` does.

    The next put includes what could not be written before, so a caller may ignore a `DiscoveryError`.
    """

    def __init__(self, store: Store, job: str, ledger: Ledger) -> None:
        self._store = store
        self._ledger = ledger
        life = f"{quote(ledger.node, safe='')}/{ledger.record().began_us}"
        self._ledger_key = f"{_prefix(job)}ledger/{life}"
        self._events_key = f"{_prefix(job)}events/{life}"
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)

    def write_record(self, record: NodeRecord | None = None) -> None:
        """Put the ledger as it was last observed, or `record`. This is the agent's sign of life."""
        self._store.put(self._ledger_key, encode_record(record or self._ledger.record()))

    def record_event(self, kind: str, text: str, generation: int = -1, node: str = "") -> None:
        """Put an event that happens now, to `node` or by default to this node; see `Event`."""
        self._events.append(Event(round(time.time() * 1e6), node or self._ledger.node, kind, text, generation))
        self._store.put(self._events_key, encode_events(self._events))


@dataclass(frozen=True)
class JobRecord:
    """Everything that the Store has of a job.

    Attributes:
        job: Name of the job.
        world: Its world; None if no agent has written one yet.
        nodes: All lives of its agents, in the order in which they began.
        events: Its events, oldest first.
        exclusions: Hosts that it excludes, in the order in which their GPUs failed.
    """

    job: str
    world: World | None
    nodes: tuple[NodeRecord, ...]
    events: tuple[Event, ...]
    exclusions: tuple[Exclusion, ...] = ()


def read_job(store: Store, job: str) -> JobRecord:
    """Read what the Store has of a job.

    Raises:
        SettingsError: The Store has no such job; the message lists the jobs that it has.
        ProtocolError: This version cannot read what the Store has.
    """
    found = store.list(_prefix(job))
    if not found:
        known = ", ".join(list_jobs(store)) or "none at all"
        raise SettingsError(f"there is no job {job!r} in this store; there is {known}")
    return join_parts(job, [decode_part(entry.key, entry.value) for entry in found])


def decode_part(key: str, value: bytes) -> JobPart:
    """Read an entry of a job, whose `key` starts at `jobs/`.

    Returns None for entries that are not part of a `JobRecord`.

    Raises:
        ProtocolError: This version cannot read the entry.
    """
    _, _, part = key.split("/", 2) if key.count("/") > 1 else ("", "", "")
    if part == "world":
        return World.decode(value)
    if part.startswith("ledger/"):
        return decode_record(value, key)
    if part.startswith("events/"):
        return tuple(decode_events(value, key))
    return Exclusion.decode(value) if part.startswith("left-out/") else None


def join_parts(job: str, parts: Iterable[JobPart]) -> JobRecord:
    """Combine what `decode_part` returned for a job's entries."""
    world: World | None = None
    nodes: list[NodeRecord] = []
    events: list[Event] = []
    exclusions: list[Exclusion] = []
    for part in parts:
        if isinstance(part, World):
            world = part
        elif isinstance(part, NodeRecord):
            nodes.append(part)
        elif isinstance(part, Exclusion):
            exclusions.append(part)
        elif part is not None:
            events += part
    nodes.sort(key=lambda record: (record.began_us, record.node))
    events.sort(key=lambda event: event.at_us)
    exclusions.sort(key=lambda exclusion: exclusion.at_s)
    return JobRecord(job, world, tuple(nodes), tuple(events), tuple(exclusions))


def last_step_before(store: Store, job: str, generation: int) -> int:
    """Return the last step that any node of a job finished before a generation; -1 for none.

    Other nodes may already work in that generation; their steps in it do not count.

    Raises:
        DiscoveryError: The store does not answer.
    """
    highest = -1
    for entry in store.list(f"{_prefix(job)}ledger/"):
        with contextlib.suppress(ProtocolError):  # `edl status` reports it
            record = decode_record(entry.value, entry.key)
            highest = max(highest, record.reached, record.step if record.generation < generation else -1)
    return highest


def list_jobs(store: Store) -> list[str]:
    """Return the names of all jobs that have an entry in the Store."""
    return sorted({entry.key.split("/")[1] for entry in store.list("jobs/")})


def delete_ledgers(store: Store, job: str) -> None:
    """Delete a job's ledgers and events, so that a job can start over under the same name."""
    for part in ("ledger/", "events/"):
        for entry in store.list(_prefix(job) + part):
            store.delete(entry.key)


def _prefix(job: str) -> str:
    if not job or "/" in job or not job.isprintable() or job in (".", ".."):
        raise SettingsError(f"job {job!r:.80}: a name has at least one printable character, and no '/'")
    return prefix(job)


# --- Combining the nodes' ledgers ---


@dataclass(frozen=True)
class JobLedger:
    """A job's time since its first agent started.

    Attributes:
        began_us: Wall clock in microseconds since 1970; 0 for a job without a ledger.
        spans: The time since then; `workers` is the number that ran, over all nodes.
        amounts: Microseconds per category; their sum is the elapsed time.
        trained_us: Microseconds that workers spent in TRAIN, added up.
        present_us: Microseconds of workers whose agent was alive, added up.
    """

    began_us: int
    spans: tuple[Span, ...]
    amounts: dict[TimeCategory, int]
    trained_us: float
    present_us: float

    @property
    def elapsed_us(self) -> int:
        """Elapsed microseconds."""
        return sum(self.amounts.values())

    @property
    def goodput(self) -> float | None:
        """Time in TRAIN divided by the elapsed time of the whole job, from 0 to 1; None if no time has passed."""
        return _goodput(self.amounts)

    @property
    def worker_goodput(self) -> float | None:
        """Share of its workers' seconds that trained. Nodes that wait to join, or for slower nodes, lower it."""
        return self.trained_us / self.present_us if self.present_us else None


def join_ledgers(records: Iterable[NodeRecord], until_us: int = 0) -> JobLedger:
    """Combine the ledgers of all lives of all nodes, in any order.

    The job's time ends at the wall clock `until_us` (microseconds), or at the last sign of life if that is later.
    """
    records = [record for record in records if record.spans]
    if not records:
        return JobLedger(0, (), sum_amounts(()), 0.0, 0.0)
    spans: list[Span] = []
    trained_us = present_us = 0.0
    for length_us, present in _moments(records, until_us):
        spans.append(_charged(length_us, present))
        for span in present:
            trained_us += length_us * span.workers * _share(span, TimeCategory.TRAIN)
            present_us += length_us * span.workers
    began_us = min(record.began_us for record in records)
    return JobLedger(began_us, tuple(limit_spans(spans)), sum_amounts(spans), trained_us, present_us)


def _moments(records: Sequence[NodeRecord], until_us: int) -> Iterator[tuple[int, list[Span]]]:
    """Yield stretches of time in which no node moves to its next span: their length, and the nodes' spans."""
    changes: list[tuple[int, int, Span | None]] = [(until_us, -1, None)] if until_us else []
    for row, record in enumerate(records):
        start_us = record.began_us
        for span in record.spans:
            if span.length_us:
                changes.append((start_us, row, span))
            start_us += span.length_us
        changes.append((start_us, row, None))
    changes.sort(key=lambda change: change[0])
    now_us = min(record.began_us for record in records)
    current: dict[int, Span] = {}
    for at_us, row, span_or_end in changes:
        if at_us > now_us:
            yield at_us - now_us, list(current.values())
            now_us = at_us
        if span_or_end is None:
            current.pop(row, None)
        else:
            current[row] = span_or_end


def _charged(length_us: int, present: Sequence[Span]) -> Span:
    """Return what the job is charged for a time in which `present` are the nodes' spans."""
    if not present:
        return span_of(TimeCategory.DOWN, length_us)
    running = [span for span in present if span.running]
    if running:
        slowest = min(running, key=lambda span: _share(span, TimeCategory.TRAIN))
        return Span(apportion(length_us, slowest.amounts), sum(span.workers for span in running), running=True)
    return Span(apportion(length_us, max(present, key=lambda span: _share(span, TimeCategory.IDLE)).amounts))


def _share(span: Span, category: TimeCategory) -> float:
    return span.amounts[category] / span.length_us


def _goodput(amounts: dict[TimeCategory, int]) -> float | None:
    elapsed = sum(amounts.values())
    return amounts[TimeCategory.TRAIN] / elapsed if elapsed else None


# --- The summary ---


@dataclass(frozen=True)
class NodeRow:
    """One life of a node.

    Attributes:
        node: Name of the agent.
        ranks: Ranks of its workers in the current world; None if it is not a member.
        state: Category of its last span: "train", "load", ...; "left" if its agent ended the ledger or the job has
            ended, "lost" if it fell silent.
        silent_s: Seconds since its last sign of life.
        goodput: Goodput of this node's own time; None if no time has passed.
        record: Its ledger.
        replica_age_s: Age in seconds of the newest state that another node has a replica of; None if there is none.
    """

    node: str
    ranks: range | None
    state: str
    silent_s: float
    goodput: float | None
    record: NodeRecord
    replica_age_s: float | None = None


@dataclass(frozen=True)
class Summary:
    """A job at one moment.

    Attributes:
        state: "forming", "running", "done" or "failed"; "down" if it has not ended but no agent gave a recent sign of
            life; "unknown" without a world.
        steps_known: Whether any step was reported. If not, the script uses nothing of EDL that reports steps, and all
            of its time looks like LOAD.
        nodes: The current members by rank, then other live nodes, then nodes that are gone, the latest first.
        exclusions: Hosts that the job excludes because a GPU of theirs failed.
    """

    job: str
    state: str
    message: str
    generation: int
    step: int
    steps_per_s: float
    samples_per_s: float
    steps_known: bool
    world_size: int
    ledger: JobLedger
    nodes: tuple[NodeRow, ...]
    events: tuple[Event, ...]
    exclusions: tuple[Exclusion, ...] = ()

    @property
    def samples_known(self) -> bool:
        """Whether any of its nodes ever reported samples."""
        return any(row.record.samples_known for row in self.nodes)


def summarize(record: JobRecord, now_us: int) -> Summary:
    """Summarize what the Store has of a job, at the wall clock `now_us` in microseconds.

    A job that has not ended and is silent has been down until now. A job that ended did so at its last sign of life.
    """
    world = record.world
    ended = world is not None and world.ended
    last_us = max((node.until_us for node in record.nodes), default=now_us) if ended else now_us
    rows = sorted((_row(node, world, now_us, last_us) for node in record.nodes), key=_order)
    alive = [row.record for row in rows if row.state not in ("left", "lost")]
    members = [row.record for row in rows if row.ranks is not None and row.record in alive]
    state = world.state.value if world is not None else "unknown"
    return Summary(
        job=record.job,
        state="down" if not alive and not ended else state,
        message=world.message if world is not None else "",
        generation=world.generation if world is not None else max((node.generation for node in alive), default=-1),
        step=max((node.step for node in record.nodes), default=-1),
        steps_per_s=min((node.steps_per_s for node in members), default=0.0),
        samples_per_s=sum(node.samples_per_s for node in members),
        steps_known=any(node.step >= 0 for node in record.nodes),
        world_size=world.size if world is not None else 0,
        # Within SILENT_S of now, the last put is current; if it is older, no agent was alive since then.
        ledger=join_ledgers(record.nodes, 0 if alive or ended else now_us),
        nodes=tuple(rows),
        events=record.events,
        exclusions=record.exclusions,
    )


def _row(record: NodeRecord, world: World | None, now_us: int, last_us: int) -> NodeRow:
    """Make the row of one life; `last_us` is when the job ended, or now."""
    state = record.spans[-1].main.name.lower() if record.spans else TimeCategory.RENDEZVOUS.name.lower()
    if (last_us - record.until_us) / 1e6 > SILENT_S and not record.ended:
        state = "lost"
    elif record.ended or (world is not None and world.ended):
        state = "left"
    members = world.nodes if world is not None else ()
    ranks = next((member.ranks for member in members if member.id == record.node), None)
    silent_s = max(0.0, (now_us - record.until_us) / 1e6)
    since_us = record.until_us if state in ("left", "lost") else now_us
    age_s = max(0.0, (since_us - record.replicated_us) / 1e6) if record.replicated_us else None
    return NodeRow(record.node, ranks, state, silent_s, _goodput(sum_amounts(record.spans)), record, age_s)


def _order(row: NodeRow) -> tuple[int, float]:
    if row.ranks is not None:
        return (0, row.ranks.start)
    gone = row.state in ("left", "lost")
    return (2, -row.record.until_us) if gone else (1, row.record.began_us)


def find_causes(events: Sequence[Event]) -> list[str]:
    """Return the cause of every event of a job as text, "" where none is known.

    A new generation and a restart state their reason in their text; an earlier event may add to it.
    """
    causes = []
    leading: dict[int, Event] = {}  # by generation: the last event in it that leads to another generation
    for event in events:
        cause = event.text if event.kind in _EXPLAINED else ""
        before = leading.get(event.generation - 1)
        if event.kind == "generation" and before is not None and before.text not in cause:
            cause = f"{cause} ({before.kind} at {before.node}: {before.text})"
        if event.kind in _LEADING:
            leading[event.generation] = event
        causes.append(cause)
    return causes


def as_dict(summary: Summary, last_events: int) -> dict[str, Any]:
    """Return a summary for programs: times in seconds, wall clocks in seconds since 1970, goodput from 0 to 1.

    Only the newest `last_events` events are included.
    """
    ledger = summary.ledger
    events = list(zip(summary.events, find_causes(summary.events), strict=True))
    return {
        "job": summary.job,
        "state": summary.state,
        "message": summary.message,
        "generation": summary.generation,
        "world_size": summary.world_size,
        "step": summary.step,
        "steps_per_s": summary.steps_per_s,
        "samples_per_s": summary.samples_per_s if summary.samples_known else None,
        "began": ledger.began_us / 1e6,
        "elapsed_s": ledger.elapsed_us / 1e6,
        "seconds": _seconds(ledger.amounts),
        "goodput": ledger.goodput if summary.steps_known else None,
        "worker_goodput": ledger.worker_goodput if summary.steps_known else None,
        "nodes": [_row_as_dict(row) for row in summary.nodes],
        "left_out": [
            {"node": host.node, "reason": host.reason, "clear": host.clear, "step": host.step, "at": host.at_s}
            for host in summary.exclusions
        ],
        "events": [
            {
                "at": event.at_us / 1e6,
                "node": event.node,
                "kind": event.kind,
                "text": event.text,
                "generation": event.generation,
                "time": event.at_us / 1e6,
                "cause": cause,
            }
            for event, cause in events[max(0, len(events) - last_events) :]
        ],
    }


def _row_as_dict(row: NodeRow) -> dict[str, Any]:
    record = row.record
    return {
        "node": row.node,
        "ranks": list(row.ranks) if row.ranks is not None else None,
        "workers": record.workers,
        "state": row.state,
        "silent_s": row.silent_s,
        "began": record.began_us / 1e6,
        "generation": record.generation,
        "step": record.step,
        "steps_per_s": record.steps_per_s,
        "samples_per_s": record.samples_per_s if record.samples_known else None,
        "goodput": row.goodput,
        "replica_age_s": row.replica_age_s,
        "seconds": _seconds(sum_amounts(record.spans)),
    }


def _seconds(amounts: dict[TimeCategory, int]) -> dict[str, float]:
    return {category.name.lower(): amounts[category] / 1e6 for category in TimeCategory}
