"""The whole book as bytes, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from edl.master.shards.ended import EndedLeaseRecord
from edl.master.shards.envelope import open_envelope, seal
from edl.master.shards.states import dataset_message, make_dataset
from edl.protocol import master

if TYPE_CHECKING:
    from edl.master.shards.book import ShardBook

__all__ = ["decode_book", "encode_book"]

_MAGIC: Final = b"EDL book\0"


def encode_book(book: ShardBook) -> bytes:
    """Return a book as bytes; equal books give equal bytes."""
    message = master.BookState(
        term=book.term,
        last_lease=book.last_lease,
        datasets=[dataset_message(dataset) for dataset in book.sets.values()],
        ended_sessions=[
            master.EndedSession(session=session, reason=reason) for session, reason in book.ended.sessions.items()
        ],
        ended_leases=[
            master.EndedLease(
                id=lease_id, dataset=record.dataset, epoch=record.key[0], shard=record.key[1], reason=record.reason
            )
            for lease_id, record in book.ended.leases.items()
        ],
    )
    return seal(_MAGIC, message)


def decode_book(book: ShardBook, data: bytes) -> None:
    """Fill an empty book with what `encode_book` wrote.

    Args:
        book: that nothing was done with.
        data: of a snapshot.

    Raises:
        ProtocolError: the bytes are something else, or damaged.
    """
    message = open_envelope(_MAGIC, "snapshot of a book of shards", data, master.BookState)
    book.term = message.term
    book.last_lease = message.last_lease
    for state in message.datasets:
        dataset = book.sets[state.dataset] = make_dataset(state)
        for session in dataset.sessions.values():
            book.readers[session.id] = session
            book.leases.update(session.leases)
    for ended in message.ended_sessions:
        book.ended.sessions[ended.session] = ended.reason
    for lease in message.ended_leases:
        record = EndedLeaseRecord(lease.dataset, (lease.epoch, lease.shard), lease.reason)
        book.ended.leases[lease.id] = record
