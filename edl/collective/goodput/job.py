"""The nodes' ledgers joined to the job's.

Synchronous training is as fast as its slowest rank, so at each moment the job is charged what the node that trained
least at that moment is charged, among the nodes that run workers. Where none does, the node with the most idle time
decides; where no agent is alive, the job is DOWN. A node that waits to join costs the job nothing, but its workers'
seconds count in `worker_goodput`.

Nodes are joined by their wall clocks, which must agree to within what is to be seen: an error of a second moves a
node's row by a second, and moves no more than a second between the job's states at each restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from edl.collective.goodput.node import NodeRecord
from edl.collective.goodput.spans import Span, TimeCategory, apportion, goodput, limit_spans, span_of, sum_amounts

__all__ = ["JobLedger", "join_ledgers"]


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
        return goodput(self.amounts)

    @property
    def worker_goodput(self) -> float | None:
        """The part of its workers' seconds that trained: nodes that wait outside, or for slower nodes, lower it."""
        return self.trained_us / self.present_us if self.present_us else None


def join_ledgers(records: Iterable[NodeRecord], until_us: int = 0) -> JobLedger:
    """Join the nodes' ledgers.

    Args:
        records: of all lives of all nodes, in any order.
        until_us: wall clock at which the job's time ends, in microseconds; the last sign of life if that is later.

    Returns:
        The job's time, charged to categories.
    """
    records = [record for record in records if record.spans]
    if not records:
        return JobLedger(0, (), sum_amounts(()), 0.0, 0.0)
    began_us = min(record.began_us for record in records)
    until_us = max(until_us, *(record.until_us for record in records))
    spans: list[Span] = []
    trained_us = present_us = 0.0
    for length_us, present in _moments(records, until_us):
        spans.append(_charged(length_us, present))
        for span, share in present:
            trained_us += length_us * span.workers * share[TimeCategory.TRAIN]
            present_us += length_us * span.workers
    return JobLedger(began_us, tuple(limit_spans(spans)), sum_amounts(spans), trained_us, present_us)


def _charged(length_us: int, present: Sequence[tuple[Span, list[float]]]) -> Span:
    """Return what the job is charged for a time in which `present` are the nodes' spans."""
    if not present:
        return span_of(TimeCategory.DOWN, length_us)
    running = [pair for pair in present if pair[0].running]
    if running:
        slowest = min(running, key=lambda pair: pair[1][TimeCategory.TRAIN])
        workers = sum(span.workers for span, _ in running)
        return Span(apportion(length_us, slowest[1]), workers, running=True)
    waiting = max(present, key=lambda pair: pair[1][TimeCategory.IDLE])
    return Span(apportion(length_us, waiting[1]))


def _moments(records: Sequence[NodeRecord], until_us: int) -> Iterator[tuple[int, list[tuple[Span, list[float]]]]]:
    """Yield stretches of time in which no node goes to its next span, with the nodes' spans."""
    changes: list[tuple[int, int, Span | None]] = []
    for row, record in enumerate(records):
        start_us = record.began_us
        for span in record.spans:
            if span.length_us:
                changes.append((start_us, row, span))
            start_us += span.length_us
        changes.append((start_us, row, None))
    changes.append((until_us, -1, None))
    changes.sort(key=lambda change: change[0])
    now_us = changes[0][0]
    current: dict[int, tuple[Span, list[float]]] = {}
    for at_us, row, span_or_end in changes:
        if at_us > now_us:
            yield at_us - now_us, list(current.values())
            now_us = at_us
        if span_or_end is None:
            current.pop(row, None)
        else:
            length_us = span_or_end.length_us
            current[row] = (span_or_end, [amount / length_us for amount in span_or_end.amounts])
