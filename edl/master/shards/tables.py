"""The tables of a book of shards: what can be asked of them, and they as bytes."""

from __future__ import annotations

from typing import Any, Final

from edl.errors import SettingsError
from edl.master.shards import progress, status
from edl.master.shards.dataset import DatasetShards, ReaderSession, SessionInfo, ShardLease
from edl.master.shards.ended import EndedLeaseRecord, EndedRecords
from edl.master.shards.envelope import open_envelope, seal
from edl.master.shards.states import dataset_message, make_dataset
from edl.protocol import master
from edl.quoting import shown

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

    def datasets(self) -> list[str]:
        """Return the names of the data sets, in the order of their creation."""
        return list(self.sets)

    def sessions(self) -> list[str]:
        """Return the ids of the live sessions."""
        return list(self.readers)

    def session(self, session: str) -> SessionInfo | None:
        """Return a live session; None if there is no such session, or it has ended."""
        found = self.readers.get(session)
        if found is None:
            return None
        spec = found.dataset.spec
        leases = tuple(found.leases)
        return SessionInfo(
            *(found.dataset.name, found.holder, leases, found.last_request),
            *(spec.lease_s, spec.session_s, found.units_done),
        )

    def describe(self, dataset: str) -> master.DatasetReply:
        """Return a data set's specification and size; SettingsError if it is unknown."""
        return self._dataset(dataset).describe()

    def status(self, dataset: str) -> dict[str, Any]:
        """Return what people want to know of a data set, fit for JSON; SettingsError if it is unknown."""
        return status.dataset_status(self._dataset(dataset))

    def is_finished(self, dataset: str) -> bool:
        """Whether nothing is left: neither to give, nor leased, nor reported and not covered by a mark."""
        found = self._dataset(dataset)
        return found.is_finished and not found.provisional_units

    def poisoned(self, dataset: str) -> int:
        """Return how many shards were given up."""
        return len(self._dataset(dataset).poisoned)

    def progress(self, dataset: str) -> bytes:
        """Return the progress of a data set, for `RestoreProgress`; what readers hold is to do in it."""
        return progress.encode_progress(self._dataset(dataset))

    def _dataset(self, name: str) -> DatasetShards:
        found = self.sets.get(name)
        if found is None:
            raise SettingsError(f"data set {shown(name, 100)!r} is not known: create it first")
        return found

    def snapshot(self) -> bytes:
        """Return the whole state; equal states give equal bytes."""
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
        """Take over what `snapshot` returned; these tables are empty until now.

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
