"""Between the records of the book and the messages of its snapshots."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from edl.master.shards.cursors import StreamCursor, make_cursor
from edl.master.shards.dataset import DatasetShards, FailureRecord, ReaderSession, ShardLease
from edl.master.shards.history import MARKS_KEPT, ReaderHistory, ReaderMark
from edl.master.shards.ranges import Bounds, UnitRange
from edl.protocol import master

__all__ = ["dataset_message", "make_dataset", "shard_messages", "take_shards"]


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
        shards=shard_messages(dataset, ()),
        sessions=[_session_message(session) for session in dataset.sessions.values()],
        histories=[_history_message(history) for history in dataset.histories.values()],
        given_again=[
            master.GivenAgain(epoch=epoch, shard=shard, holder=holder)
            for (epoch, shard), holder in dataset.given_again.items()
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
    take_shards(dataset, message.shards)
    for session_message in message.sessions:
        session = _make_session(session_message, dataset)
        dataset.sessions[session.id] = session
        dataset.leased += len(session.leases)
    for history in message.histories:
        dataset.histories[history.session] = _make_history(history)
    for again in message.given_again:
        dataset.given_again[again.epoch, again.shard] = again.holder
    return dataset


def shard_messages(dataset: DatasetShards, more: Iterable[UnitRange]) -> list[master.ShardState]:
    """Return the shards that are neither untouched, nor leased, nor done, sorted.

    Args:
        dataset: of the shards.
        more: ranges that count as returned as well.
    """
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
        of(part[:2]).returned.extend(part[2:])
    for key, parts in dataset.poisoned.items():
        of(key).poisoned.extend(_flat(parts))
    for key, failures in dataset.failures.items():
        of(key).failures.extend(
            master.FailureState(holder=failure.holder, reason=failure.reason, time_ms=failure.time_ms)
            for failure in failures
        )
    return [shards[key] for key in sorted(shards)]


def take_shards(dataset: DatasetShards, messages: Iterable[master.ShardState]) -> None:
    """Put shards that were neither untouched nor done into a data set."""
    for message in messages:
        key = (message.epoch, message.shard)
        for start, stop in _pairs(message.returned):
            dataset.returned.add(key, start, stop, late=message.late, passed=message.passed)
        if message.poisoned:
            dataset.poisoned[key] = _pairs(message.poisoned)
        if message.failures:
            dataset.failures[key] = [
                FailureRecord(failure.holder, failure.reason, failure.time_ms) for failure in message.failures
            ]


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


def _history_message(history: ReaderHistory) -> master.HistoryState:
    return master.HistoryState(
        session=history.session,
        holder=history.holder,
        marks=[
            master.MarkState(
                session=mark.session,
                mark=mark.number,
                consumed=_range_messages(mark.consumed),
                open=_range_messages(mark.open),
            )
            for mark in history.marks
        ],
        pending=_range_messages(history.pending),
    )


def _make_history(message: master.HistoryState) -> ReaderHistory:
    marks = [
        ReaderMark(mark.session, mark.mark, _make_ranges(mark.consumed), _make_ranges(mark.open))
        for mark in message.marks
    ]
    return ReaderHistory(
        message.session, message.holder, deque(marks, maxlen=MARKS_KEPT), _make_ranges(message.pending)
    )


def _range_messages(parts: Iterable[UnitRange]) -> list[master.ShardRange]:
    return [master.ShardRange(epoch=epoch, shard=shard, start=start, stop=stop) for epoch, shard, start, stop in parts]


def _make_ranges(messages: Iterable[master.ShardRange]) -> list[UnitRange]:
    return [UnitRange(message.epoch, message.shard, message.start, message.stop) for message in messages]


def _flat(parts: Iterable[Bounds]) -> list[int]:
    return [bound for part in parts for bound in part]


def _pairs(bounds: Iterable[int]) -> list[Bounds]:
    numbers = list(bounds)
    return list(zip(numbers[::2], numbers[1::2], strict=True))
