"""Values that go into and out of the dispatcher: failures of requests, and actions that follow."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from edl.quoting import shown

__all__ = ["Action", "Deliver", "RequestFailure", "FailureKind", "GiveUp", "Send"]


class FailureKind(enum.Enum):
    """Kinds of failed requests."""

    LOST = "lost"  # the connection broke: nothing is said about the request
    OVERLOADED = "overloaded"  # the teacher's queue is full
    TIMEOUT = "timeout"  # no answer within the request's deadline
    ERROR = "error"  # the teacher failed to compute it
    REJECTED = "rejected"  # the teacher says that the request is invalid
    BAD_OUTPUT = "bad output"  # an answer that cannot be used


@dataclass(frozen=True)
class RequestFailure:
    """Describe a failed request. Values only.

    `message` is a single printable line of limited length, whatever text the teacher sent.
    """

    kind: FailureKind  # decides what the dispatcher does about it
    message: str  # for logs and errors
    retry_after_s: float = 0.0  # seconds after which the teacher asks to be tried again; 0 without such a hint

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", shown(self.message))


@dataclass(frozen=True)
class Send:
    """Action: send task `task` to `teacher`, and report how attempt `attempt` ends."""

    attempt: int  # number of the attempt
    task: int  # number of the task
    teacher: str  # the teacher's id
    timeout_s: float  # seconds until the attempt fails with TIMEOUT
    extra: bool  # a hedge


@dataclass(frozen=True)
class GiveUp:
    """Action: fail task `task`."""

    task: int  # number of the task
    failures: tuple[tuple[str, RequestFailure], ...]  # (teacher, failure) in the order in which they came


@dataclass(frozen=True)
class Deliver:
    """Action: deliver the attempt's answer as the answer to `task`."""

    task: int
    teacher: str


Action: TypeAlias = Send | GiveUp | Deliver
