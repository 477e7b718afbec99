"""What a reader asks of its thread beside reports: a position to be written, a position to go back to."""

from __future__ import annotations

from edl.errors import EDLError
from edl.master.client.shard_session import ShardSession

__all__ = ["MarkRequest", "ResumeRequest"]


class MarkRequest:
    """A position to be journalled; `session` and `number` name it afterwards.

    Args:
        consumed: units of open shards, by the ids of their leases.
    """

    def __init__(self, consumed: dict[int, int]) -> None:
        self.consumed = consumed
        self.session = ""
        self.number = 0
        self.answered = False
        self.failure: EDLError | None = None


class ResumeRequest:
    """A position to go on from.

    Args:
        holder: that wrote it.
        session: likewise.
        mark: its number.
    """

    def __init__(self, holder: str, session: str, mark: int) -> None:
        self.holder = holder
        self.session = session
        self.mark = mark
        self.answered = False
        self.failure: EDLError | None = None
        self.retry_until: float | None = None
        self.opened: ShardSession | None = None
