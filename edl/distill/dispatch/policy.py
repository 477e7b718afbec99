"""`Policy`: limits and deadlines that the dispatcher keeps."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Policy"]


@dataclass(frozen=True)
class Policy:
    """Limits and deadlines of the dispatcher. Durations in seconds.

    Attributes:
        window: most requests in flight at a teacher.
        hedge_after: a request older than this many median latencies of its teacher is sent to a second teacher.
        hedge_budget: extra requests by hedging, as a share of all; 0 turns hedging off. Only a request that the
            training loop stands still for, and that is late for a second and more, goes beyond it.
        hedge_min_s: no request younger than this is hedged.
        request_timeout_s: a request without an answer after this is sent elsewhere.
        failures_to_open: so many failures in a row take a teacher out for a while.
        open_min_s: for how long a teacher is taken out, the first time. A task that failed at all live teachers waits
            as long before a teacher that failed is asked again.
        open_max_s: the longest such time; it doubles until an answer is good.
        coming_s: a task that failed waits so long, from its first failure, for teachers that are being connected to,
            before it is sent again where it failed, or given up.
        aside_s: how long a teacher with unusable outputs is left out.
        task_failures: a task that failed so often, at whichever teachers, is given up.
        task_losses: so is a task whose teacher was lost more often than this: the task may be what kills them.
    """

    window: int = 32
    hedge_after: float = 2.0
    hedge_budget: float = 0.05
    hedge_min_s: float = 0.02
    request_timeout_s: float = 60.0
    failures_to_open: int = 3
    open_min_s: float = 0.5
    open_max_s: float = 30.0
    coming_s: float = 5.0
    aside_s: float = 30.0
    task_failures: int = 3
    task_losses: int = 20
