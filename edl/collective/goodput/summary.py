"""A job at a moment: its nodes, what they do, where the time went, what happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from edl.collective.goodput.causes import find_causes
from edl.collective.goodput.codec import Event
from edl.collective.goodput.job import JobLedger, join_ledgers
from edl.collective.goodput.node import NodeRecord
from edl.collective.goodput.records import JobRecord
from edl.collective.goodput.spans import TimeCategory, goodput, sum_amounts
from edl.collective.job_records import Exclusion, World

__all__ = ["NodeRow", "Summary", "as_dict", "summarize"]

SILENT_S: Final = 5.0
"""An agent that wrote nothing for so long is taken for gone. It writes about once a second, and may miss a few."""


@dataclass(frozen=True)
class NodeRow:
    """A life of a node.

    Attributes:
        ranks: of its workers in the present world, None where it is not a member.
        node: the agent's name.
        record: its ledger.
        state: "train", "load", ... of its last second; "left" if its agent ended the ledger, "lost" if it fell silent.
        silent_s: seconds since its last sign of life.
        goodput: of this node's own time; None where no time has passed.
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
        exclusions: hosts that the job leaves out, since a GPU of theirs failed.
        nodes: the present members by rank, then others that live, then nodes that are gone, the last first.
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
    """Sum up what the Store has of a job.

    Args:
        record: of the job.
        now_us: wall clock, in microseconds. A job that runs and is silent has been down until now; a job that ended has
            ended with its last sign of life.

    Returns:
        The job at that moment.
    """
    world = record.world
    ended = world is not None and world.ended
    last_us = max((node.until_us for node in record.nodes), default=now_us) if ended else now_us
    rows = [_row(node, world, now_us, last_us) for node in record.nodes]
    rows.sort(key=_order)
    alive = [row.record for row in rows if row.state not in ("left", "lost")]
    members = [row.record for row in rows if row.ranks is not None and row.record in alive]
    # Within SILENT_S the last put is as good as now; beyond, nobody was there.
    ledger = join_ledgers(record.nodes, 0 if alive or ended else now_us)
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
        ledger=ledger,
        nodes=tuple(rows),
        events=record.events,
        exclusions=record.exclusions,
    )


def as_dict(summary: Summary, last_events: int) -> dict[str, Any]:
    """Return a summary for programs: times in seconds, wall clocks in seconds since 1970, goodput from 0 to 1.

    Args:
        summary: of a job.
        last_events: how many of the newest events to return.
    """
    ledger = summary.ledger
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
            {**_event_as_dict(event), "cause": cause}
            for event, cause in _last(list(zip(summary.events, find_causes(summary.events), strict=True)), last_events)
        ],
    }


def _row(record: NodeRecord, world: World | None, now_us: int, last_us: int) -> NodeRow:
    """Make the row of a life; `last_us` is when the job ended, or now."""
    state = record.spans[-1].main.name.lower() if record.spans else TimeCategory.RENDEZVOUS.name.lower()
    if (last_us - record.until_us) / 1e6 > SILENT_S and not record.ended:
        state = "lost"
    elif record.ended or (world is not None and world.ended):
        state = "left"
    ranks = None
    for member in world.nodes if world is not None else ():
        if member.id == record.node:
            ranks = range(member.first_rank, member.first_rank + member.local_world_size)
    silent_s = max(0.0, (now_us - record.until_us) / 1e6)
    since_us = record.until_us if state in ("left", "lost") else now_us
    age_s = max(0.0, (since_us - record.replicated_us) / 1e6) if record.replicated_us else None
    return NodeRow(record.node, ranks, state, silent_s, goodput(sum_amounts(record.spans)), record, age_s)


def _order(row: NodeRow) -> tuple[int, float]:
    if row.ranks is not None:
        return (0, row.ranks.start)
    gone = row.state in ("left", "lost")
    return (2, -row.record.until_us) if gone else (1, row.record.began_us)


def _seconds(amounts: dict[TimeCategory, int]) -> dict[str, float]:
    return {state.name.lower(): amounts[state] / 1e6 for state in TimeCategory}


def _last(events: Sequence[tuple[Event, str]], count: int) -> Sequence[tuple[Event, str]]:
    return events[max(0, len(events) - count) :]


def _row_as_dict(row: NodeRow) -> dict[str, Any]:
    return {
        "node": row.node,
        "ranks": list(row.ranks) if row.ranks is not None else None,
        "workers": row.record.workers,
        "state": row.state,
        "silent_s": row.silent_s,
        "began": row.record.began_us / 1e6,
        "generation": row.record.generation,
        "step": row.record.step,
        "steps_per_s": row.record.steps_per_s,
        "samples_per_s": row.record.samples_per_s if row.record.samples_known else None,
        "goodput": row.goodput,
        "replica_age_s": row.replica_age_s,
        "seconds": _seconds(sum_amounts(row.record.spans)),
    }


def _event_as_dict(event: Event) -> dict[str, Any]:
    return {
        "at": event.at_us / 1e6,
        "node": event.node,
        "kind": event.kind,
        "text": event.text,
        "generation": event.generation,
        "time": event.at_us / 1e6,
    }
