"""What the dispatcher and those around it tell each other: failures, policy, actions. Values only."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from edl.quoting import shown

__all__ = ["Action", "Answer", "Failure", "FailureKind", "GiveUp", "Policy", "Send"]


class FailureKind(enum.Enum):
    """What went wrong with one request."""

    LOST = "lost"  # the connection broke: nothing is said about the request
    OVERLOADED = "overloaded"  # the teacher's queue is full
    TIMEOUT = "timeout"  # no answer within the request's deadline
    ERROR = "error"  # the teacher failed to compute it
    REJECTED = "rejected"  # the teacher says that the request is invalid
    BAD_OUTPUT = "bad output"  # an answer that cannot be used


@dataclass(frozen=True)
class Failure:
    """One failed request. `retry_after_s` is the teacher's own hint, 0 without one.

    Whatever the teacher wrote, `message` is one line of printable text, and not long.
    """

    kind: FailureKind
    message: str
    retry_after_s: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", shown(self.message))


@dataclass(frozen=True)
class Policy:
    """What the dispatcher may do. Durations in seconds.

    Attributes:
        window: most requests in flight at one teacher.
        hedge_after: a request older than this many median latencies of its teacher is sent elsewhere too.
        hedge_budget: extra requests by hedging, as a share of all; 0 turns hedging off. Only a request that the
            training loop stands still for, and that is late for a second and more, goes beyond it.
        hedge_min_s: no request younger than this is hedged.
        request_timeout_s: a request without an answer after this is sent elsewhere.
        failures_to_open: so many failures in a row take a teacher out for a while.
        open_min_s, open_max_s: for how long; doubled with each time until an answer is good. A task that failed at
            all live teachers waits as long before one of them is asked again.
        coming_s: a task that failed waits so long, from its first failure, for teachers that are being connected to,
            before it is sent again where it failed, or given up.
        aside_s: how long a teacher with unusable outputs is left out.
        task_failures: a task that failed so often, at one teacher or several, is given up.
        task_losses: so is one whose teacher was lost more often than this: it may be what kills them.
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


@dataclass(frozen=True)
class Send:
    """Action: send task `task` to `teacher`, and report how attempt `attempt` ends."""

    attempt: int
    task: int
    teacher: str
    timeout_s: float
    extra: bool  # a hedge


@dataclass(frozen=True)
class GiveUp:
    """Action: fail task `task`; `failures` are (teacher, failure) in order."""

    task: int
    failures: tuple[tuple[str, Failure], ...]


@dataclass(frozen=True)
class Answer:
    """Action: the attempt's answer is the one to deliver for `task`."""

    task: int
    teacher: str


Action: TypeAlias = Send | GiveUp | Answer
