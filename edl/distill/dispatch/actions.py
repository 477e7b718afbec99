"""The dispatcher's inputs and outputs: failed requests, limits on requests, and the actions to take."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from edl.quoting import shown


class FailureKind(enum.Enum):
    """Kinds of failed requests."""

    LOST = "lost"  # the connection broke, which says nothing about the request
    OVERLOADED = "overloaded"  # the teacher's queue is full
    TIMEOUT = "timeout"  # no answer within the request's deadline
    ERROR = "error"  # the teacher failed to compute it
    REJECTED = "rejected"  # the teacher declared the request invalid
    BAD_OUTPUT = "bad output"  # an answer that cannot be used


@dataclass(frozen=True)
class RequestFailure:
    """A failed request."""

    kind: FailureKind  # decides how the dispatcher reacts
    message: str  # for logs and errors: one printable line of limited length, whatever the teacher sent
    retry_after_s: float = 0.0  # seconds after which the teacher asks for a retry; 0 without a hint

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", shown(self.message))


class Limits(NamedTuple):
    """The largest request that a teacher accepts; 0 for no limit."""

    max_rows: int = 0
    max_nbytes: int = 0  # bytes of tensors
    max_sequence: int = 0  # rows of a sequence

    def accepts(self, rows: float, nbytes: float, longest: float) -> bool:
        """Return whether a request of this size, with `longest` rows in its longest sequence, is accepted."""
        return (
            (not self.max_rows or rows <= self.max_rows)
            and (not self.max_nbytes or nbytes <= self.max_nbytes)
            and (not self.max_sequence or longest <= self.max_sequence)
        )

    @property
    def longest_sequence(self) -> float:
        """Number of rows in the longest sequence that fits in a request."""
        return min((limit for limit in (self.max_rows, self.max_sequence) if limit), default=math.inf)


NO_LIMITS = Limits()


@dataclass(eq=False)
class Send:
    """Action: send task `task` to `teacher`. The object identifies the attempt until the attempt's end is reported."""

    task: int
    teacher: str
    extra: bool  # whether it is a hedge: a second attempt while the first is still pending
    sent_at: float
    in_flight: int  # attempts at the teacher, including this one


@dataclass(frozen=True)
class GiveUp:
    """Action: fail task `task`."""

    task: int
    failures: tuple[tuple[str, RequestFailure], ...]  # (teacher, failure) in order of arrival


@dataclass(frozen=True)
class Deliver:
    """Action: deliver the attempt's answer as the answer to `task`."""

    task: int
    teacher: str


Action: TypeAlias = Send | GiveUp | Deliver
