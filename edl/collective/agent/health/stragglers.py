"""Naming the rank that the others wait for: every agent tells of its own ranks, the first node's compares them.

Keys: `jobs/JOB/steps/NODE`, without a lease, replaced every window. What a rank itself took for a step is the step
without the wait for others. `ElasticTrainer` measures that on CPU; on a GPU backward returns before it is done, so
nothing is measured there, and nobody is named.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from edl.collective.agent.health.worker_watch import StragglerChange, StragglerDetector, own_step_s
from edl.collective.job_records import prefix
from edl.collective.worker_status import Reading
from edl.discovery.store import Entry, Store

__all__ = ["StepTimes", "compare", "encode", "share"]


class StepTimes:
    """What each rank of one node takes for a step, from one window to the next."""

    def __init__(self) -> None:
        self._before: dict[int, Reading] = {}

    def window(self, readings: Mapping[int, Reading]) -> dict[int, float]:
        """Seconds of its own a step, by rank, since the last window; without ranks that made no step or are new."""
        own = {}
        for rank, after in readings.items():
            before = self._before.get(rank)
            if before is not None and before.pid == after.pid and after.waited_s > before.waited_s:
                seconds = own_step_s(before, after, after.waited_s - before.waited_s)
                if seconds is not None:
                    own[rank] = seconds
        self._before = dict(readings)
        return own


def encode(generation: int, own_s: Mapping[int, float]) -> bytes:
    """One node's times, for the Store."""
    return json.dumps({"generation": generation, "own_s": {str(rank): own_s[rank] for rank in own_s}}).encode()


def compare(entries: Iterable[Entry], generation: int, stragglers: StragglerDetector) -> list[StragglerChange]:
    """What follows from all nodes' times of `generation`; entries that are something else are left out."""
    own: dict[int, float] = {}
    for entry in entries:
        try:
            told = json.loads(entry.value)
            if told["generation"] == generation:
                own |= {int(rank): float(seconds) for rank, seconds in told["own_s"].items()}
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return stragglers.observe(own)


def share(
    store: Store, job: str, node: str, generation: int, own_s: Mapping[int, float], stragglers: StragglerDetector | None
) -> list[StragglerChange]:
    """Tell of this node's ranks and, with `stragglers`, compare those of all nodes.

    Raises:
        DiscoveryError: the store does not answer.
    """
    folder = prefix(job) + "steps/"
    store.put(folder + node, encode(generation, own_s))
    return [] if stragglers is None else compare(store.list(folder), generation, stragglers)
