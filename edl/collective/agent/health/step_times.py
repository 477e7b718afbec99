"""The time that ranks themselves take for a step: measured by every agent, compared by the agent of the first node.

Keys: `jobs/JOB/steps/NODE`, without a lease, replaced every window. A rank's own time is the step without the wait for
others. `ElasticTrainer` measures it on CPU; on a GPU backward returns before it is done, so nothing is measured there,
and no rank is named.

What does not belong here: who is a straggler (`edl.collective.agent.health.stragglers`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from edl.collective.agent.health.stragglers import StragglerChange, StragglerDetector
from edl.collective.job_records import prefix
from edl.collective.worker_status import Phase, WorkerStatus
from edl.discovery.store import Entry, Store

__all__ = ["StepTimes", "compare_step_times", "encode_step_times", "own_step_s", "share_step_times"]


def own_step_s(before: WorkerStatus, after: WorkerStatus, waited_s: float) -> float | None:
    """Return how many seconds a rank itself took for a step, on average between two of its statuses.

    Args:
        before: the earlier status.
        after: the later status.
        waited_s: how many seconds the rank spent in the synchronisation of gradients meanwhile.

    Returns:
        Seconds a step; None if it made none.
    """
    steps = after.step - before.step
    if steps <= 0 or after.generation != before.generation:
        return None
    trained_s = sum(after.totals_s[phase] - before.totals_s[phase] for phase in (Phase.TRAIN, Phase.ROLLBACK))
    return max(0.0, trained_s - waited_s) / steps


class StepTimes:
    """Measures what the ranks of a node take for a step, window after window."""

    def __init__(self) -> None:
        self._before: dict[int, WorkerStatus] = {}

    def measure_window(self, statuses: Mapping[int, WorkerStatus]) -> dict[int, float]:
        """End a window, and begin the next.

        Args:
            statuses: of the workers now, by rank.

        Returns:
            Own seconds a step since the last window, by rank; ranks that made no step or are new are left out.
        """
        own = {}
        for rank, after in statuses.items():
            before = self._before.get(rank)
            if before is not None and before.pid == after.pid and after.waited_s > before.waited_s:
                seconds = own_step_s(before, after, after.waited_s - before.waited_s)
                if seconds is not None:
                    own[rank] = seconds
        self._before = dict(statuses)
        return own


def encode_step_times(generation: int, own_s: Mapping[int, float]) -> bytes:
    """Return a node's record for the Store, as JSON.

    Args:
        generation: that the ranks belong to.
        own_s: own seconds a step, by rank.
    """
    return json.dumps({"generation": generation, "own_s": {str(rank): own_s[rank] for rank in own_s}}).encode()


def compare_step_times(
    entries: Iterable[Entry], generation: int, stragglers: StragglerDetector
) -> list[StragglerChange]:
    """Compare the times of all nodes.

    Args:
        entries: of the Store; entries that are something else, or of another generation, are left out.
        generation: that the ranks belong to.
        stragglers: compares them.

    Returns:
        The ranks that became stragglers, or are none any more.
    """
    own: dict[int, float] = {}
    for entry in entries:
        try:
            record = json.loads(entry.value)
            if record["generation"] == generation:
                own |= {int(rank): float(seconds) for rank, seconds in record["own_s"].items()}
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return stragglers.observe_window(own)


def share_step_times(
    store: Store, job: str, node: str, generation: int, own_s: Mapping[int, float], stragglers: StragglerDetector | None
) -> list[StragglerChange]:
    """Write the times of this node's ranks into the Store, and compare them with the others'.

    Args:
        store: shared by all nodes.
        job: its name.
        node: this node's id.
        generation: that the ranks belong to.
        own_s: own seconds a step, by rank.
        stragglers: compares the times of all nodes; None on a node that does not.

    Returns:
        The ranks that became stragglers, or are none any more.

    Raises:
        DiscoveryError: the store does not answer.
    """
    folder = prefix(job) + "steps/"
    store.put(folder + node, encode_step_times(generation, own_s))
    return [] if stragglers is None else compare_step_times(store.list(folder), generation, stragglers)
