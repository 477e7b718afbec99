"""What other threads read of a service's engine: replaced as a whole, so that no reader sees half of a change."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ServiceLimits"]


@dataclass(frozen=True)
class ServiceLimits:
    """What the live teachers of a service want and take, as of a moment.

    Attributes:
        capacity: requests that all of them together want in flight, as of some milliseconds ago.
        gather_limit: jobs that are better sent together, where all of them are quick and on this host; else 0.
        max_rows: rows that every one of them takes in a request, as of when the last teacher came or left; 0 without a
            limit.
        max_nbytes: bytes of tensors likewise.
        max_sequence: rows of the longest sequence that one of them takes, since longer sequences are sent to teachers
            that take them; 0 without a limit.
    """

    capacity: int = 0
    gather_limit: int = 0
    max_rows: int = 0
    max_nbytes: int = 0
    max_sequence: int = 0
