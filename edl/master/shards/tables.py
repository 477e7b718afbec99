"""The tables of a book of shards, and these as bytes."""

from __future__ import annotations

from typing import Final

from edl.master.shards.dataset import DatasetShards, ReaderSession, ShardLease
from edl.master.shards.ended import EndedLeaseRecord, EndedRecords
from edl.master.shards.envelope import open_envelope, seal
from edl.master.shards.states import dataset_message, make_dataset
from edl.protocol import master

__all__ = ["BookTables"]

_MAGIC: Final = b"EDL book\0"


class BookTables:
    """All that a book of shards knows.

    Attributes:
        term: of the present master; 0 before the first.
        last_lease: the largest id of a lease until now.
        sets: data sets by name.
        readers: live sessions by id.
        leases: all that there are, by id.
        ended: why sessions and leases ended.
    """

    def __init__(self) -> None:
        self.term = 0
        self.last_lease = 0
        self.sets: dict[str, DatasetShards] = {}
        self.readers: dict[str, ReaderSession] = {}
        self.leases: dict[int, ShardLease] = {}
        self.ended = EndedRecords()

    def encode(self) -> bytes:
        """Return everything as bytes; equal tables give equal bytes."""
        message = master.BookState(
            term=self.term,
            last_lease=self.last_lease,
            datasets=[dataset_message(dataset) for dataset in self.sets.values()],
            ended_sessions=[
                master.EndedSession(session=session, reason=reason) for session, reason in self.ended.sessions.items()
            ],
            ended_leases=[
                master.EndedLease(
                    id=lease_id, dataset=record.dataset, epoch=record.key[0], shard=record.key[1], reason=record.reason
                )
                for lease_id, record in self.ended.leases.items()
            ],
        )
        return seal(_MAGIC, message)

    def fill(self, data: bytes) -> None:
        """Take over what `encode` wrote; these tables are empty until now.

        Raises:
            ProtocolError: the bytes are something else, or damaged.
        """
        message = open_envelope(_MAGIC, "snapshot of a book of shards", data, master.BookState)
        self.term = message.term
        self.last_lease = message.last_lease
        for state in message.datasets:
            dataset = self.sets[state.dataset] = make_dataset(state)
            for session in dataset.sessions.values():
                self.readers[session.id] = session
                self.leases.update(session.leases)
        for ended in message.ended_sessions:
            self.ended.sessions[ended.session] = ended.reason
        for lease in message.ended_leases:
            record = EndedLeaseRecord(lease.dataset, (lease.epoch, lease.shard), lease.reason)
            self.ended.leases[lease.id] = record
