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
    """Seconds that a rank itself took for a step, on average between two of its statuses; None without a step.

    Args:
        waited_s: that it spent in the synchronisation of gradients meanwhile.
    """
    steps = after.step - before.step
    if steps <= 0 or after.generation != before.generation:
        return None
    trained_s = sum(after.totals_s[phase] - before.totals_s[phase] for phase in (Phase.TRAIN, Phase.ROLLBACK))
    return max(0.0, trained_s - waited_s) / steps


class StepTimes:
    """What each rank of one node takes for a step, from one window to the next."""

    def __init__(self) -> None:
        self._before: dict[int, WorkerStatus] = {}

    def measure_window(self, statuses: Mapping[int, WorkerStatus]) -> dict[int, float]:
        """Seconds of its own a step, by rank, since the last window; without ranks that made no step or are new."""
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
    """One node's times, for the Store."""
    return json.dumps({"generation": generation, "own_s": {str(rank): own_s[rank] for rank in own_s}}).encode()


def compare_step_times(
    entries: Iterable[Entry], generation: int, stragglers: StragglerDetector
) -> list[StragglerChange]:
    """What follows from all nodes' times of `generation`; entries that are something else are left out."""
    own: dict[int, float] = {}
    for entry in entries:
        try:
            told = json.loads(entry.value)
            if told["generation"] == generation:
                own |= {int(rank): float(seconds) for rank, seconds in told["own_s"].items()}
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return stragglers.observe_window(own)


def share_step_times(
    store: Store, job: str, node: str, generation: int, own_s: Mapping[int, float], stragglers: StragglerDetector | None
) -> list[StragglerChange]:
    """Tell of this node's ranks and, with `stragglers`, compare those of all nodes.

    Raises:
        DiscoveryError: the store does not answer.
    """
    folder = prefix(job) + "steps/"
    store.put(folder + node, encode_step_times(generation, own_s))
    return [] if stragglers is None else compare_step_times(store.list(folder), generation, stragglers)
