"""Finds the rows that no teacher takes, by halves, and labels all others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edl.datasets.rows import Batch, IndexedData
from edl.distill.cache import SoftLabelCache
from edl.distill.labelling.data_set import batch_cutter
from edl.distill.labelling.plan import LabelPlan
from edl.distill.pipeline.label_cache import CacheConfig
from edl.distill.pipeline.request import LabelRequest
from edl.distill.pipeline.session import LabelSession
from edl.errors import BadOutputError, EDLError, RejectedError, SourceError
from edl.protocol.tensors import Array

__all__ = ["OF_THE_ROWS", "BadRows", "find_bad_rows", "label_singly", "loaded"]

OF_THE_ROWS = (RejectedError, BadOutputError, SourceError)
"""Errors that a row has wherever it is labelled. All others are a worker's own."""

_MOST = 8
"""Rows of a shard that are named: a person looks at the first few, and of a shard that is bad as a whole not every row
is to be tried."""
_LONGEST_S = 20.0
"""For how long rows are tried before the rest is left: a teacher that fails slowly must not stop a worker for hours."""
_PAUSE_S = 0.05
"""How long a teacher that failed is left alone: here it is the row that is at fault."""
_NEVER = 1 << 30
"""Failures in a row that take a teacher out: more than there are rows to be tried."""


@dataclass(frozen=True)
class BadRows:
    """What came of trying rows.

    Attributes:
        why: why a row failed, by its position.
        untried: rows that were neither labelled nor found bad.
        labelled: rows that were labelled.
    """

    why: dict[int, str]
    untried: int
    labelled: int

    def words(self, data: IndexedData) -> str:
        """Return which samples are bad, and why the first of them is; empty if nothing is known."""
        if not self.why:
            return ""
        ids = ", ".join(map(repr, data.ids_of(np.array(sorted(self.why)))))
        more = f", perhaps others of {self.untried} that were not tried" if self.untried else ""
        return f"sample{'s' if len(self.why) > 1 else ''} {ids}{more}: {self.why[min(self.why)]}"


def find_bad_rows(
    parts: Sequence[Array], attempt: Callable[[Array], str], go_on: Callable[[int], bool] = lambda _: True
) -> BadRows:
    """Try rows together, and those that fail together by halves, down to the row.

    Args:
        parts: positions of rows, as many at a time as may be tried together.
        attempt: labels the rows at some positions; returns why that failed, empty if it did not.
        go_on: whether to go on, by the number of bad rows found so far.
    """
    why_bad: dict[int, str] = {}
    labelled = 0
    waiting = [part for part in reversed(parts) if len(part)]
    while waiting and go_on(len(why_bad)):
        part = waiting.pop()
        why = attempt(part)
        if not why:
            labelled += len(part)
        elif len(part) == 1:
            why_bad[int(part[0])] = why
        else:
            half = len(part) // 2
            waiting += [part[half:], part[:half]]
    return BadRows(why_bad, sum(map(len, waiting)), labelled)


def label_singly(
    data: IndexedData, plan: LabelPlan, cache: SoftLabelCache, parts: Sequence[Array], stopped: Callable[[], bool]
) -> BadRows:
    """Label rows of which some are bad. Gives up after a few bad rows, or some seconds.

    Uses connections of its own: a teacher that fails for a bad row is not at fault, and is asked on.

    Args:
        data: of the rows.
        plan: what to ask for.
        cache: where to keep the labels.
        parts: positions of rows, in batches.
        stopped: whether to give up at once.
    """
    policy = replace(
        plan.options.policy, failures_to_open=_NEVER, open_min_s=_PAUSE_S, aside_s=_PAUSE_S, task_failures=2
    )
    options, cache_config = replace(plan.options, policy=policy), CacheConfig(cache, plan.dataset)
    session = LabelSession(LabelRequest(plan.output_spec, [plan.teachers], options, cache_config))

    def attempt(part: Array) -> str:
        epoch = session.start(loaded(data, [part]), batch_cutter(data, session.labeller.services))
        try:
            for item in epoch:
                epoch.taken(item)
        except OF_THE_ROWS as exc:
            return str(exc)
        finally:
            epoch.close()
            epoch.join(plan.options.source_timeout_s)
        return ""

    def go_on(found: int) -> bool:
        return found < _MOST and time.monotonic() < deadline and not stopped()

    deadline = time.monotonic() + _LONGEST_S
    try:
        return find_bad_rows(parts, attempt, go_on)
    finally:
        session.close()


def loaded(data: IndexedData, parts: Iterator[Array] | Sequence[Array]) -> Iterator[Batch]:
    """Yield batches of a data set, one for each part: a part that got none would be waited for for ever.

    Raises:
        SourceError: its code has raised an error, or yields too few.
    """
    taken = 0

    def counted() -> Iterator[Array]:
        nonlocal taken
        for part in parts:
            taken += 1
            yield part

    loaded_parts = 0
    try:
        for batch in data.load(counted()):
            loaded_parts += 1
            yield batch
        if loaded_parts < taken:
            raise SourceError(f"the data set yields {loaded_parts} batches for {taken} parts: a StopIteration?")
    except EDLError:
        raise
    except Exception as exc:
        words = str(exc).strip().rpartition("\n")[2]  # of a worker process's traceback
        raise SourceError(f"a sample cannot be loaded: {type(exc).__name__}: {words}") from exc
