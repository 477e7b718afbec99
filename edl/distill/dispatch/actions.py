"""The dispatcher's inputs and outputs: failures of requests, and the actions to take."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from edl.quoting import shown


class FailureKind(enum.Enum):
    """Kinds of failed requests."""

    LOST = "lost"  # the connection broke, which says nothing about the request
    OVERLOADED = "overloaded"  # the teacher's queue is full
    TIMEOUT = "timeout"  # no answer within the request's deadline
    ERROR = "error"  # the teacher failed to compute it
    REJECTED = "rejected"  # the teacher says that the request is invalid
    BAD_OUTPUT = "bad output"  # an answer that cannot be used


@dataclass(frozen=True)
class RequestFailure:
    """A failed request.

    `message` is a single printable line of limited length, whatever text the teacher sent.
    """

    kind: FailureKind  # decides how the dispatcher reacts
    message: str  # for logs and errors
    retry_after_s: float = 0.0  # seconds after which the teacher asks to be retried; 0 without a hint

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", shown(self.message))


@dataclass(frozen=True)
class Send:
    """Action: send task `task` to `teacher`, and report how attempt `attempt` ends."""

    attempt: int  # number of the attempt
    task: int  # number of the task
    teacher: str  # the teacher's id
    timeout_s: float  # seconds until the attempt fails with TIMEOUT
    extra: bool  # whether it is a hedge: a second attempt while the first is still pending


@dataclass(frozen=True)
class GiveUp:
    """Action: fail task `task`."""

    task: int  # number of the task
    failures: tuple[tuple[str, RequestFailure], ...]  # (teacher, failure) in order of arrival


@dataclass(frozen=True)
class Deliver:
    """Action: deliver the attempt's answer as the answer to `task`."""

    task: int
    teacher: str


Action: TypeAlias = Send | GiveUp | Deliver
