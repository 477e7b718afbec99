"""Workers that neither work nor end: stopped, late in the next generation, never begun. Those that hang: `health`."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path

from edl.collective.agent.health.process_activity import read_queued_s
from edl.collective.agent.processes.regroup_timer import RegroupTimer
from edl.collective.worker_status import WorkerStatus

__all__ = ["StuckWorkers"]

_STOPPED_S = 1.0
"""How long a worker may be stopped: a debugger stops and continues a process within it, and all ranks wait for it."""


class StuckWorkers:
    """Finds such workers of a node. Its methods are called several times a second, with process ids by local rank.

    Args:
        regroup_s: how long a worker may take to come to the next generation in its process, in seconds.
    """

    def __init__(self, regroup_s: float) -> None:
        self._stopped_since: dict[int, float] = {}
        self._regroup_timer = RegroupTimer(regroup_s)
        self._generation = -1

    def expect_generation(self, generation: int, ranks: Collection[int], statuses: Mapping[int, WorkerStatus]) -> None:
        """Wait for workers that were told of a generation.

        Args:
            generation: which they shall come to.
            ranks: their local ranks.
            statuses: what all workers' status pages say, by local rank.
        """
        self._record_arrivals(statuses)
        self._generation = generation
        self._regroup_timer.expect_ranks(ranks, time.monotonic())

    def clear_stopped(self) -> None:
        """Forget since when workers are stopped: others will run."""
        self._stopped_since.clear()

    def find_stopped(self, running: Mapping[int, int]) -> list[int]:
        """Find workers that have been stopped (SIGSTOP) for a while, and hold up all others. Returns local ranks."""
        now = time.monotonic()
        found = []
        for local_rank, pid in running.items():
            if not _is_stopped(pid):
                self._stopped_since.pop(pid, None)
            elif now - self._stopped_since.setdefault(pid, now) > _STOPPED_S:
                found.append(local_rank)
        return found

    def find_late(self, running: Mapping[int, int], statuses: Mapping[int, WorkerStatus]) -> list[int]:
        """Find workers that were told of a generation and have not come to it in time. Returns local ranks."""
        self._record_arrivals(statuses)
        return self._regroup_timer.find_late(time.monotonic(), lambda rank: read_queued_s(running.get(rank, 0)))

    def _record_arrivals(self, statuses: Mapping[int, WorkerStatus]) -> None:
        for rank in self._regroup_timer.awaited_ranks:
            if statuses[rank].generation == self._generation:
                self._regroup_timer.record_arrival(rank)


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    except (OSError, IndexError):
        return False
