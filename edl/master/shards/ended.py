"""Why sessions and leases ended, for those who report late; and what happened, for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from edl.errors import LeaseLostError
from edl.master.shards.dataset import DatasetShards, ShardLease
from edl.master.shards.ranges import ShardKey

__all__ = ["BookEvent", "EndedLeaseRecord", "EndedRecords"]

K = TypeVar("K")
V = TypeVar("V")

_MOST: Final = 1024
"""Of either kind: reports that come late come within minutes. All are part of each snapshot, some 100 KB."""


@dataclass(frozen=True)
class BookEvent:
    """Something that people want to know.

    Attributes:
        kind: `ended`, `poisoned`, `restored`, `resumed`, `retried` or `session_ended`.
        dataset: of which it is.
        text: what happened, in words.
        cause: why, in words.
    """

    kind: str
    dataset: str
    text: str
    cause: str


@dataclass(frozen=True, slots=True)
class EndedLeaseRecord:
    """A lease that ended without a report.

    Attributes:
        dataset: of which it was.
        key: the epoch and shard.
        reason: why it ended.
    """

    dataset: str
    key: ShardKey
    reason: str


class EndedRecords:
    """Sessions and leases that ended lately.

    Attributes:
        sessions: why each ended, by id; the oldest first.
        leases: those that ended without a report, by id; the oldest first.
    """

    def __init__(self) -> None:
        self.sessions: dict[str, str] = {}
        self.leases: dict[int, EndedLeaseRecord] = {}

    def add_session(self, session: str, words: str) -> None:
        """Remember why a session ended."""
        _add(self.sessions, session, words)

    def add_lease(self, lease: ShardLease, reason: str) -> None:
        """Remember why a lease ended."""
        record = EndedLeaseRecord(lease.session.dataset.name, (lease.epoch, lease.shard), reason)
        _add(self.leases, lease.id, record)

    def check_session(self, session: str) -> None:
        """Raise LeaseLostError if a session has ended."""
        if session in self.sessions:
            raise LeaseLostError(self.sessions[session])

    def why(self, lease_id: int, last_lease: int, sets: Mapping[str, DatasetShards]) -> str:
        """Return why a report of a lease is refused that there is not.

        Args:
            lease_id: of the report.
            last_lease: the largest id that was given.
            sets: the data sets, which know who has the shard now.
        """
        record = self.leases.get(lease_id)
        if record is None:
            return "it was reported before, or ended long ago" if 0 < lease_id <= last_lease else "it was never given"
        dataset = sets.get(record.dataset)
        if dataset is not None and record.key in dataset.poisoned:
            return f"{record.reason}; the shard is poisoned"
        if dataset is not None and record.key in dataset.returned:
            return f"{record.reason}; the shard waits for another holder"
        holder = dataset.given_again.get(record.key) if dataset is not None else None
        return f"{record.reason}; the shard was given to {holder}" if holder else record.reason


def _add(records: dict[K, V], key: K, value: V) -> None:
    records.pop(key, None)
    records[key] = value
    if len(records) > _MOST:
        del records[next(iter(records))]
