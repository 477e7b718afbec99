"""The progress of a data set as bytes, which a user keeps beside a checkpoint of another kind, and back."""

from __future__ import annotations

from typing import Final

from edl.errors import ConflictError, ProtocolError
from edl.master.shards.cursors import StreamCursor, UnitCursor, make_cursor
from edl.master.shards.dataset import DatasetShards
from edl.master.shards.envelope import open_envelope, seal
from edl.master.shards.ranges import UnitRange
from edl.master.shards.specification import is_same_spec
from edl.master.shards.states import shard_messages, take_shards
from edl.protocol import master

__all__ = ["decode_progress", "encode_progress"]

_MAGIC: Final = b"EDL progress\0"


def encode_progress(dataset: DatasetShards) -> bytes:
    """Return what is done of a data set; what readers have, and what no mark covers, is not."""
    open_parts = [
        UnitRange(lease.epoch, lease.shard, lease.marked, lease.stop)
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
        shards=shard_messages(dataset, open_parts + provisional),
    )
    return seal(_MAGIC, state)


def decode_progress(dataset: DatasetShards, data: bytes) -> DatasetShards:
    """Return a data set as it was when `encode_progress` looked, without readers.

    Args:
        dataset: as it is now; not changed. A source without an end is as large as it is now.
        data: its progress.

    Raises:
        ProtocolError: the bytes are something else, or damaged.
        ConflictError: they are of a data set with another specification, or of a source that has not grown as far here.
    """
    state = open_envelope(_MAGIC, "progress of a data set", data, master.ProgressState)
    if not is_same_spec(state.spec, dataset.spec):
        raise ConflictError(f"data set {dataset.name}: the progress is of a data set with another specification")
    now = dataset.cursor
    if isinstance(now, StreamCursor):
        if state.position > now.units:
            raise ConflictError(
                f"data set {dataset.name} has {now.units} units until now, and the progress is at {state.position}: its"
                " index is to reach as far first"
            )
        cursor = make_cursor(dataset.spec, now.units, now.ended, now.flushed, state.epoch, state.position)
    else:
        cursor = make_cursor(dataset.spec, state.units, False, 0, state.epoch, state.position)
    _check(dataset, cursor, state)
    restored = DatasetShards(dataset.name, dataset.spec, cursor, index=list(dataset.index))
    restored.units_done = state.units_done
    take_shards(restored, state.shards)
    return restored


def _check(dataset: DatasetShards, cursor: UnitCursor, state: master.ProgressState) -> None:
    """Raise ProtocolError for progress with a right checksum that no data set can have."""
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
        raise ProtocolError(f"data set {dataset.name}: progress that it cannot have")
