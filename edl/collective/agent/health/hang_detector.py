"""Find the worker of a node that hangs, from its status page and what the kernel counts for its process.

The limits are `hang_limits.HangLimits`; here is what is remembered from look to look: when a process was last seen to
work, and until when another rank was, for which the others wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from edl.collective.agent.health.hang_limits import HangLimits, describe_hang, find_progress_limit, is_working
from edl.collective.agent.health.process_activity import ActivityMonitor
from edl.collective.worker_status import Phase, WorkerStatus

__all__ = ["HangDetector"]

_BUSY_S: Final = 1.0
"""So long does a worker have to be busy before other nodes are told: a change costs a write to the store. With less,
every short evaluation would; with more, ranks that wait with a short limit could be taken to hang."""


class HangDetector:
    """Watches the workers of one generation on one node.

    Args:
        limits: how long workers may go without a sign of progress.
        activity: measures their processes.
    """

    def __init__(self, limits: HangLimits, activity: ActivityMonitor | None = None) -> None:
        self._limits = limits
        self._activity = activity or ActivityMonitor()
        self._forked_s = 0.0
        self._awaited_s = 0.0
        self.busy = False
        """Whether a worker here does something long, so that ranks that wait for it do not hang."""
        self.others_busy = False
        """Whether a worker of another node does."""

    def begin_generation(self, forked_s: float) -> None:
        """Watch the workers of a new generation.

        Args:
            forked_s: when they were forked (`time.monotonic()`).
        """
        self._forked_s = forked_s
        self._awaited_s = forked_s
        self.busy = False
        self._activity.clear()

    def find_hung(self, workers: Mapping[int, tuple[int, WorkerStatus]], now_s: float) -> tuple[int, str] | None:
        """Find a worker that hangs.

        Args:
            workers: process id and status, by local rank.
            now_s: the time now (`time.monotonic()`).

        Returns:
            The local rank, and why it is taken to hang; None if no worker does.
        """
        waiting: list[tuple[int, str]] = []
        hung: list[tuple[int, str]] = []
        busy = False
        for local_rank, (pid, status) in workers.items():
            found = find_progress_limit(status, self._limits, forked_s=self._forked_s)
            if found is None or not found.is_suspect(now_s):
                self._activity.forget(pid)
            if found is None:
                continue
            active_s = self._activity.last_active(pid, found.limit_s, now_s) if found.is_suspect(now_s) else None
            works = is_working(found, now_s, active_s)
            why = describe_hang(found, now_s, self._limits, active_s, self._awaited_s)
            if why is not None:
                (hung if works or found.declared else waiting).append((local_rank, why))
            elif works or (status.phase is Phase.BUSY and now_s - found.since_s > _BUSY_S):
                busy = True
        self.busy = busy
        if busy or self.others_busy:
            self._awaited_s = now_s  # a rank that waits for a rank that works does not hang
            waiting.clear()
        return next(iter(hung + waiting), None)
