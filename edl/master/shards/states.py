"""The state as messages: snapshots of the book, and the progress of a data set, which users keep beside a checkpoint.

Both are bytes that others keep and that are read again, perhaps by another version of EDL: they begin with what they
are and its format, and end with a checksum.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from edl.errors import ConflictError, ProtocolError
from edl.master.shards.dataset_shards import (
    MARKS_KEPT,
    DatasetShards,
    ReaderHistory,
    ReaderSession,
    ShardLease,
    is_same_spec,
)
from edl.master.shards.units import Bounds, StreamCursor, UnitCursor, make_cursor
from edl.protocol import master

__all__ = ["dataset_message", "decode_progress", "encode_progress", "make_dataset", "open_envelope", "seal"]

M = TypeVar("M", bound=Message)

_FORMAT: Final = 1
"""Format of what is inside. Another version of EDL may refuse it, but never misreads it."""
_CHECKSUM_NBYTES: Final = 4  # a CRC-32
_PROGRESS: Final = b"EDL progress\0"


# --- Bytes that others keep. ---


def seal(magic: bytes, message: Message) -> bytes:
    """Return a message as bytes that begin with `magic`, which says what they are."""
    body = magic + bytes([_FORMAT]) + message.SerializeToString(deterministic=True)
    return body + zlib.crc32(body).to_bytes(_CHECKSUM_NBYTES, "big")


def open_envelope(magic: bytes, what: str, data: bytes, kind: type[M]) -> M:
    """Return the message of type `kind` in bytes that `seal` made; else ProtocolError, in which `what` names them."""
    if data[: len(magic)] != magic:
        raise ProtocolError(f"{len(data):,} bytes are not a {what}")
    body, checksum = data[:-_CHECKSUM_NBYTES], data[-_CHECKSUM_NBYTES:]
    if zlib.crc32(body).to_bytes(_CHECKSUM_NBYTES, "big") != checksum:
        raise ProtocolError(f"{what} of {len(data):,} bytes is damaged: its checksum does not match")
    found = body[len(magic)]
    if found != _FORMAT:
        raise ProtocolError(f"{what} of format {found}; this version of EDL reads {_FORMAT}")
    try:
        return kind.FromString(body[len(magic) + 1 :])
    except DecodeError as exc:
        raise ProtocolError(f"{what} cannot be read: {exc}") from exc


# --- A data set with its readers. ---


def dataset_message(dataset: DatasetShards) -> master.DatasetState:
    """Return a data set with its readers."""
    cursor = dataset.cursor
    message = master.DatasetState(
        dataset=dataset.name,
        spec=dataset.spec,
        index=dataset.index,
        units=cursor.units,
        epoch=cursor.epoch,
        position=cursor.position,
        units_done=dataset.units_done,
        shards=_shard_messages(dataset, ()),
        sessions=[_session_message(session) for session in dataset.sessions.values()],
        histories=[
            master.HistoryState(
                session=history.session, holder=history.holder, marks=history.marks, pending=history.pending
            )
            for history in dataset.histories.values()
        ],
    )
    if isinstance(cursor, StreamCursor):
        message.ended = cursor.ended
        message.flushed = cursor.flushed
    return message


def make_dataset(message: master.DatasetState) -> DatasetShards:
    """Return the data set of a message, with its readers."""
    cursor = make_cursor(
        *(message.spec, message.units, message.ended, message.flushed, message.epoch, message.position)
    )
    dataset = DatasetShards(message.dataset, message.spec, cursor, index=list(message.index))
    dataset.units_done = message.units_done
    _take_shards(dataset, message.shards)
    for session_message in message.sessions:
        session = _make_session(session_message, dataset)
        dataset.sessions[session.id] = session
        dataset.leased += len(session.leases)
    for history in message.histories:
        marks = deque(history.marks, maxlen=MARKS_KEPT)
        dataset.histories[history.session] = ReaderHistory(
            history.session, history.holder, marks, list(history.pending)
        )
    return dataset


def _shard_messages(dataset: DatasetShards, more: Iterable[master.ShardRange]) -> list[master.ShardState]:
    """Return the shards that are neither untouched, nor leased, nor done, sorted; `more` ranges count as returned."""
    shards: dict[tuple[int, int], master.ShardState] = {}

    def of(key: tuple[int, int]) -> master.ShardState:
        if key not in shards:
            shards[key] = master.ShardState(epoch=key[0], shard=key[1])
        return shards[key]

    for key, parts, late, passed in dataset.returned:
        state = of(key)
        state.returned.extend(_flat(parts))
        state.late = late
        state.passed = passed
    for part in more:
        of((part.epoch, part.shard)).returned.extend((part.start, part.stop))
    for key, parts in dataset.poisoned.items():
        of(key).poisoned.extend(_flat(parts))
    for key, failures in dataset.failures.items():
        of(key).failures.extend(failures)
    return [shards[key] for key in sorted(shards)]


def _take_shards(dataset: DatasetShards, messages: Iterable[master.ShardState]) -> None:
    """Put shards that were neither untouched nor done into a data set."""
    for message in messages:
        key = (message.epoch, message.shard)
        for start, stop in _pairs(message.returned):
            dataset.returned.add(key, start, stop, late=message.late, passed=message.passed)
        if message.poisoned:
            dataset.poisoned[key] = _pairs(message.poisoned)
        if message.failures:
            dataset.failures[key] = list(message.failures)


def _session_message(session: ReaderSession) -> master.SessionState:
    message = master.SessionState(
        session=session.id,
        holder=session.holder,
        last_request=session.last_request,
        reply=session.reply,
        leases=[master.LeaseState(lease=lease.message(), marked=lease.marked) for lease in session.leases.values()],
        units_done=session.units_done,
    )
    if session.resume is not None:
        message.resume.CopyFrom(session.resume[0])
        message.resume_reply.CopyFrom(session.resume[1])
    return message


def _make_session(message: master.SessionState, dataset: DatasetShards) -> ReaderSession:
    session = ReaderSession(message.session, message.holder, dataset, message.last_request)
    session.units_done = message.units_done
    if message.HasField("reply"):
        session.reply = message.reply
    if message.HasField("resume"):
        session.resume = (message.resume, message.resume_reply)
    for state in message.leases:
        lease = state.lease
        session.leases[lease.id] = ShardLease(
            *(lease.id, lease.term, session, lease.epoch, lease.shard, lease.start, lease.stop, state.marked)
        )
    return session


def _flat(parts: Iterable[Bounds]) -> list[int]:
    return [bound for part in parts for bound in part]


def _pairs(bounds: Iterable[int]) -> list[Bounds]:
    numbers = list(bounds)
    return list(zip(numbers[::2], numbers[1::2], strict=True))


# --- The progress of a data set. ---


def encode_progress(dataset: DatasetShards) -> bytes:
    """Return what is done of a data set. What readers have, and what no mark covers, is not."""
    open_parts = [
        lease.part(lease.marked, lease.stop)
        for session in dataset.sessions.values()
        for lease in session.leases.values()
        if lease.marked < lease.stop
    ]
    provisional = [
        part
        for session in dataset.sessions
        if session in dataset.histories
        for part in dataset.histories[session].pending
    ]
    cursor = dataset.cursor
    state = master.ProgressState(
        spec=dataset.spec,
        units=cursor.units,
        epoch=cursor.epoch,
        position=cursor.position,
        units_done=dataset.units_done - sum(part.stop - part.start for part in provisional),
        shards=_shard_messages(dataset, open_parts + provisional),
    )
    return seal(_PROGRESS, state)


def decode_progress(dataset: DatasetShards, data: bytes) -> DatasetShards:
    """Return a data set as it was when `encode_progress` looked, without readers; a growing source is as large as now.

    Raises:
        ProtocolError: The bytes are something else, or damaged.
        ConflictError: They are of another specification, or of a source that has not grown that far here.
    """
    state = open_envelope(_PROGRESS, "progress of a data set", data, master.ProgressState)
    if not is_same_spec(state.spec, dataset.spec):
        raise ConflictError(f"data set {dataset.name}: the progress is of a data set with another specification")
    now = dataset.cursor
    if isinstance(now, StreamCursor):
        if state.position > now.units:
            raise ConflictError(
                f"data set {dataset.name} has {now.units} units so far, and the progress is at {state.position}: extend"
                " its index first"
            )
        cursor = make_cursor(dataset.spec, now.units, now.ended, now.flushed, state.epoch, state.position)
    else:
        cursor = make_cursor(dataset.spec, state.units, False, 0, state.epoch, state.position)
    _check(dataset, cursor, state)
    restored = DatasetShards(dataset.name, dataset.spec, cursor, index=list(dataset.index))
    restored.units_done = state.units_done
    _take_shards(restored, state.shards)
    return restored


def _check(dataset: DatasetShards, cursor: UnitCursor, state: master.ProgressState) -> None:
    """Raise ProtocolError for progress with a matching checksum that this data set cannot have."""
    size = dataset.spec.shard_size
    possible = state.units_done >= 0 and cursor.is_possible
    if not isinstance(cursor, StreamCursor):
        possible = possible and state.units == dataset.spec.units
    for shard in state.shards:
        low, high = shard.shard * size, min((shard.shard + 1) * size, cursor.units)
        possible = possible and 0 <= shard.epoch <= cursor.epoch and 0 <= low < high
        for bounds in (shard.returned, shard.poisoned):
            pairs = list(zip(bounds[::2], bounds[1::2], strict=False))
            possible = possible and len(bounds) % 2 == 0 and all(low <= a < b <= high for a, b in pairs)
    if not possible:
        raise ProtocolError(f"data set {dataset.name}: impossible progress")
