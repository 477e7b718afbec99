"""Values that go into and out of the dispatcher: failures of requests, and actions that follow."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from edl.quoting import shown

__all__ = ["Action", "Deliver", "RequestFailure", "FailureKind", "GiveUp", "Send"]


class FailureKind(enum.Enum):
    """What went wrong with one request."""

    LOST = "lost"  # the connection broke: nothing is said about the request
    OVERLOADED = "overloaded"  # the teacher's queue is full
    TIMEOUT = "timeout"  # no answer within the request's deadline
    ERROR = "error"  # the teacher failed to compute it
    REJECTED = "rejected"  # the teacher says that the request is invalid
    BAD_OUTPUT = "bad output"  # an answer that cannot be used


@dataclass(frozen=True)
class RequestFailure:
    """One failed request. `retry_after_s` is the teacher's own hint, 0 without one.

    Whatever the teacher wrote, `message` is one line of printable text, and not long.
    """

    kind: FailureKind
    message: str
    retry_after_s: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", shown(self.message))


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
    failures: tuple[tuple[str, RequestFailure], ...]


@dataclass(frozen=True)
class Deliver:
    """Action: the attempt's answer is the one to deliver for `task`."""

    task: int
    teacher: str


Action: TypeAlias = Send | GiveUp | Deliver
