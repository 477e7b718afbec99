"""A job at a moment: what its agents wrote into the Store, joined to one summary that all who look at a job read.

::

    jobs/JOB/world                  which nodes train together (edl.collective.job_records), written by all agents
    jobs/JOB/ledger/NODE/BEGAN      a life of a node's agent: all of its time, rewritten about once a second
    jobs/JOB/left-out/HOST          a host that the job leaves out (edl.collective.job_records)
    jobs/JOB/events/NODE/BEGAN      what happened to it or was seen by it lately

None of it has a lease: it stays when the agents are gone, until `delete_ledgers`. BEGAN is when that life began, so
that an agent which comes back writes beside what it wrote before.

Synchronous training is as fast as its slowest rank, so at each moment the job is charged what the node that trained
least at that moment is charged, among the nodes that run workers. Where none does, the node with the most idle time
decides; where no agent is alive, the job is DOWN. A node that waits to join costs the job nothing, but its workers'
seconds count in `worker_goodput`. Nodes are joined by their wall clocks: an error of a second moves a node's row by a
second, and no more than a second between the job's categories at each restart.
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

MAX_EVENTS: Final = 300  # of a life of an agent: as JSON below 120 KB in ASCII, written again with every event
SILENT_S: Final = 5.0
"""An agent that wrote nothing for so long is taken for gone. It writes about once a second, and may miss a few."""
_EXPLAINED: Final = frozenset({"generation", "restart", "faulty"})
"""Kinds of events whose text is the reason."""
_LEADING: Final = frozenset({"kill", "exit", "hang", "leave", "faulty", "restart", "error"})
"""Kinds of events that lead to another generation."""

JobPart: TypeAlias = "World | NodeRecord | tuple[Event, ...] | Exclusion | None"
"""What an entry of a job holds."""


class LedgerWriter:
    """Writes an agent's ledger and events. All methods are single puts and raise what `Store.put` does.

    What could not be written is in the next put, so a caller may ignore a `DiscoveryError`.
    """

    def __init__(self, store: Store, job: str, ledger: Ledger) -> None:
        self._store = store
        self._ledger = ledger
        life = f"{quote(ledger.node, safe='')}/{ledger.record().began_us}"
        self._ledger_key = f"{_prefix(job)}ledger/{life}"
        self._events_key = f"{_prefix(job)}events/{life}"
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)

    def write_record(self, record: NodeRecord | None = None) -> None:
        """Put the ledger as it was last observed, or `record` of it: the agent's sign of life."""
        self._store.put(self._ledger_key, encode_record(record or self._ledger.record()))

    def record_event(self, kind: str, text: str, generation: int = -1, node: str = "") -> None:
        """Put an event that happens now, to this node if `node` is empty; see `Event`."""
        self._events.append(Event(round(time.time() * 1e6), node or self._ledger.node, kind, text, generation))
        self._store.put(self._events_key, encode_events(self._events))


@dataclass(frozen=True)
class JobRecord:
    """All that the Store has of a job.

    Attributes:
        job: its name.
        world: None where no agent has written it yet.
        nodes: all lives of its agents, in the order in which they began.
        events: oldest first.
        exclusions: hosts that it leaves out, in the order in which their GPUs failed.
    """

    job: str
    world: World | None
    nodes: tuple[NodeRecord, ...]
    events: tuple[Event, ...]
    exclusions: tuple[Exclusion, ...] = ()


def read_job(store: Store, job: str) -> JobRecord:
    """Read what the Store has of a job.

    Raises:
        SettingsError: it has nothing; the message names the jobs that it has.
        ProtocolError: what it has cannot be read by this version.
    """
    found = store.list(_prefix(job))
    if not found:
        known = ", ".join(list_jobs(store)) or "none at all"
        raise SettingsError(f"there is no job {job!r} in this store; there is {known}")
    return join_parts(job, [decode_part(entry.key, entry.value) for entry in found])


def decode_part(key: str, value: bytes) -> JobPart:
    """Read an entry of a job, by its key from `jobs/` on. Returns None for what says nothing about where time went.

    Raises:
        ProtocolError: it cannot be read by this version.
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
    """Join what `decode_part` returned for a job's entries."""
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
    """Return the last step that any node of a job ever finished before a generation, -1 for none.

    Other nodes may be at work in that generation already, and their steps in it do not count.

    Raises:
        DiscoveryError: the store does not answer.
    """
    highest = -1
    for entry in store.list(f"{_prefix(job)}ledger/"):
        with contextlib.suppress(ProtocolError):  # `edl status` reports it
            record = decode_record(entry.value, entry.key)
            highest = max(highest, record.reached, record.step if record.generation < generation else -1)
    return highest


def list_jobs(store: Store) -> list[str]:
    """Return the names of all jobs that the Store has anything of."""
    return sorted({entry.key.split("/")[1] for entry in store.list("jobs/")})


def delete_ledgers(store: Store, job: str) -> None:
    """Delete a job's ledgers and events, for a job that begins again under the same name."""
    for part in ("ledger/", "events/"):
        for entry in store.list(_prefix(job) + part):
            store.delete(entry.key)


def _prefix(job: str) -> str:
    if not job or "/" in job or not job.isprintable() or job in (".", ".."):
        raise SettingsError(f"job {job!r:.80}: a name has at least one printable character, and no '/'")
    return prefix(job)


# --- The nodes' ledgers, joined to the job's. ---


@dataclass(frozen=True)
class JobLedger:
    """A job's time from its first agent's first moment on.

    Attributes:
        began_us: wall clock, microseconds since 1970; 0 for a job without a ledger.
        spans: the time since then; `workers` are all that ran, over all nodes.
        amounts: microseconds in every category; their sum is the elapsed time.
        trained_us: microseconds of workers in TRAIN.
        present_us: microseconds of workers whose agent was alive.
    """

    began_us: int
    spans: tuple[Span, ...]
    amounts: dict[TimeCategory, int]
    trained_us: float
    present_us: float

    @property
    def elapsed_us(self) -> int:
        """Microseconds that have passed."""
        return sum(self.amounts.values())

    @property
    def goodput(self) -> float | None:
        """Time in TRAIN by elapsed time of the whole job, from 0 to 1; None where no time has passed."""
        return _goodput(self.amounts)

    @property
    def worker_goodput(self) -> float | None:
        """The part of its workers' seconds that trained: nodes that wait outside, or for slower nodes, lower it."""
        return self.trained_us / self.present_us if self.present_us else None


def join_ledgers(records: Iterable[NodeRecord], until_us: int = 0) -> JobLedger:
    """Join the ledgers of all lives of all nodes, in any order.

    The job's time ends at the wall clock `until_us`, or at the last sign of life if that is later.
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
    """Yield stretches of time in which no node goes to its next span, with the nodes' spans."""
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


# --- The summary. ---


@dataclass(frozen=True)
class NodeRow:
    """A life of a node.

    Attributes:
        node: the agent's name.
        ranks: of its workers in the present world, None where it is not a member.
        state: "train", "load", ... of its last second; "left" if its agent ended the ledger, "lost" if it fell silent.
        silent_s: seconds since its last sign of life.
        goodput: of this node's own time; None where no time has passed.
        record: its ledger.
        replica_age_s: how old, in seconds, the newest state is of which another node has a replica; None for none.
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
    """A job at a moment.

    Attributes:
        state: "forming", "running", "done" or "failed"; "down" where it runs but no agent gave a sign of life lately;
            "unknown" without a world.
        steps_known: whether any step was reported. If not, the script uses nothing of EDL that reports steps, and all
            of its time looks like LOAD.
        nodes: the present members by rank, then others that live, then nodes that are gone, the last first.
        exclusions: hosts that the job leaves out, since a GPU of theirs failed.
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
    """Sum up what the Store has of a job, at the wall clock `now_us` in microseconds.

    A job that runs and is silent has been down until now; a job that ended has ended with its last sign of life.
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
        # Within SILENT_S the last put is as good as now; beyond, nobody was there.
        ledger=join_ledgers(record.nodes, 0 if alive or ended else now_us),
        nodes=tuple(rows),
        events=record.events,
        exclusions=record.exclusions,
    )


def _row(record: NodeRecord, world: World | None, now_us: int, last_us: int) -> NodeRow:
    """Make the row of a life; `last_us` is when the job ended, or now."""
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
    """Return the cause of every event of a job, in words; empty where none is known.

    A new generation, and a restart, say why in their text; an event before may say more.
    """
    causes = []
    leading: dict[int, Event] = {}  # by generation: the last event in it that leads to another
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

    Of the events it has the newest `last_events`.
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
