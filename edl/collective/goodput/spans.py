"""Where a job's time goes: exclusive categories whose seconds sum, without rest, to the time that passed.

All amounts are whole microseconds, so that sums are equal and not only close. A `Span` is a stretch of a node's (or the
job's) time with the amounts of the categories in it; how long it is *is* the sum of its amounts, so that nothing can be
counted twice or left out. Spans follow one another without gaps. Neighbours alike are merged (run-length), and when
there are too many spans the older half is rolled up in pairs: that costs detail of when, and nothing of how much.

`goodput` is train / elapsed: the part of the wall-clock time since the job began that went into steps which were
finished once and never lost. Availability, which is often published in its place, is the part of the time in which
the job was up; a job that starts again and again, repeats what it lost, or waits in saves is available all the time.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = [
    "MAX_SPANS",
    "Span",
    "TimeCategory",
    "append",
    "apportion",
    "limit_spans",
    "goodput",
    "merge_alike",
    "span_of",
    "sum_amounts",
]

MAX_SPANS: Final = 600
"""About as many as a picture of a timeline has columns to tell apart; as JSON below 40 KB."""


class TimeCategory(enum.IntEnum):
    """What a moment was used for: a single category."""

    TRAIN = 0
    """Steps that count: forward, backward, the wait for other ranks' gradients, the data, evaluation between steps."""
    SAVE = 1
    """The training loop is blocked by a copy of its state."""
    LOAD = 2
    """What comes before the first step of an agent or a worker: imports, process group, model, reading a checkpoint."""
    ROLLBACK = 3
    """Work that was lost: steps done again, and the part of a step that a restart interrupted."""
    RENDEZVOUS = 4
    """Agents agree on the next world; workers that paused for it."""
    IDLE = 5
    """An agent is alive and nothing moves: a hang until it is noticed, a worker that ended before the others."""
    DOWN = 6
    """No agent of the job is alive. A node by itself is never down: it is absent."""


@dataclass(frozen=True)
class Span:
    """A stretch of time.

    Attributes:
        amounts: microseconds by `TimeCategory`, in their order.
        workers: the most that the node (or the job) had in it.
        running: whether workers ran; False while an agent waited without any.
    """

    amounts: tuple[int, ...]
    workers: int = 0
    running: bool = False

    @property
    def length_us(self) -> int:
        """How long it lasted, in microseconds."""
        return sum(self.amounts)

    @property
    def main(self) -> TimeCategory:
        """What most of it was used for."""
        return TimeCategory(max(TimeCategory, key=lambda state: (self.amounts[state], -state)))

    def __add__(self, later: Span) -> Span:
        """Join two spans."""
        amounts = tuple(mine + theirs for mine, theirs in zip(self.amounts, later.amounts, strict=True))
        return Span(amounts, max(self.workers, later.workers), self.running or later.running)

    def alike(self, other: Span) -> bool:
        """Return whether the two may be joined without a loss that a person would see.

        Args:
            other: the span before or after.
        """
        return (self.main, self.workers, self.running) == (other.main, other.workers, other.running)


def span_of(category: TimeCategory, length_us: int, workers: int = 0, running: bool = False) -> Span:
    """Make a span of a single category.

    Args:
        category: of all of its time.
        length_us: how long it lasts, in microseconds.
        workers: that the node had in it.
        running: whether workers ran.
    """
    return Span(tuple(length_us if found is category else 0 for found in TimeCategory), workers, running)


def apportion(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Split `total` in proportion to `weights` into whole numbers whose sum is `total`.

    The largest remainders get what rounding down left over (Hamilton's method).

    Args:
        total: to split, from 0 on.
        weights: from 0 on, some of them above.
    """
    whole = sum(weights)
    exact = [total * (weight / whole) for weight in weights]
    parts = [min(int(part), total) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda index: (parts[index] - exact[index], index))
    rest = total - sum(parts)
    while rest:  # more than one round only where floats of huge totals are off by more than the number of parts
        for index in by_remainder:
            change = (rest > 0) - (rest < 0)
            if weights[index] > 0 and parts[index] + change >= 0:
                parts[index] += change
                rest -= change
    return tuple(parts)


def append(spans: list[Span], span: Span) -> None:
    """Append a span, joined with the last span where they are alike.

    Args:
        spans: to append to.
        span: nothing is appended if it has no length.
    """
    if not span.length_us:
        return
    if spans and spans[-1].alike(span):
        spans[-1] += span
    else:
        spans.append(span)


def merge_alike(spans: Iterable[Span]) -> list[Span]:
    """Join neighbours alike, and leave out empty spans.

    Joining parts first, in any grouping, gives the same.

    Args:
        spans: that follow one another.
    """
    done: list[Span] = []
    for span in spans:
        append(done, span)
    return done


def limit_spans(spans: Iterable[Span], limit: int = MAX_SPANS) -> list[Span]:
    """Describe the same time in fewer spans: while there are too many, the older half is joined in pairs.

    Args:
        spans: that follow one another.
        limit: the most spans to return.
    """
    done = merge_alike(spans)
    while len(done) > limit:
        old = done[: max(2, len(done) // 2)]
        pairs = [sum(old[at + 1 : at + 2], old[at]) for at in range(0, len(old), 2)]
        done = merge_alike(pairs + done[len(old) :])
    return done


def sum_amounts(spans: Iterable[Span]) -> dict[TimeCategory, int]:
    """Sum up microseconds by category.

    Args:
        spans: in any order.
    """
    sums = [0] * len(TimeCategory)
    for span in spans:
        for state in TimeCategory:
            sums[state] += span.amounts[state]
    return {state: sums[state] for state in TimeCategory}


def goodput(amounts: dict[TimeCategory, int]) -> float | None:
    """Return the time in TRAIN by the elapsed time, from 0 to 1; None where no time has passed.

    Args:
        amounts: microseconds by category.
    """
    elapsed = sum(amounts.values())
    return amounts[TimeCategory.TRAIN] / elapsed if elapsed else None
