"""Which ranges of rows a labeller has open, and how far each of them is. No I/O: a lock and a few queues."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from edl.protocol.tensors import Array

__all__ = ["RowShard", "ShardTracker"]


@dataclass(frozen=True, eq=False)
class RowShard:
    """A range of rows to be labelled. Two objects are two shards, whatever their rows.

    Attributes:
        start: position of the first row in the data set.
        stop: position behind the last row.
        lease: of whoever handed it out.
    """

    start: int
    stop: int
    lease: object = None


@dataclass(frozen=True, eq=False)
class _Part:
    """Rows of a shard that go into a batch."""

    shard: RowShard
    index: Array


class ShardTracker:
    """Parts of shards on their way: waiting, handed to the loader, answered. Thread-safe.

    The thread that loads calls `begin` and `hand_out`, the thread that takes answers `take` and `fail`, and the thread
    that writes labels to disk `pop_answered` and `begin`. Answers come in the order in which parts were handed out.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[_Part] = deque()
        self._handed_out: deque[_Part] = deque()
        self._left: dict[RowShard, int] = {}  # parts that have no answer
        self._answered: list[RowShard] = []

    @property
    def idle(self) -> bool:
        """Whether no part waits for anything."""
        return not self._waiting and not self._handed_out

    @property
    def has_waiting(self) -> bool:
        """Whether there are parts to be handed out."""
        return bool(self._waiting)

    @property
    def has_answered(self) -> bool:
        """Whether there are shards of which all parts are answered."""
        return bool(self._answered)

    @property
    def shards(self) -> set[RowShard]:
        """The shards that are being labelled, and those of which all parts are answered."""
        with self._lock:
            return {*self._left, *self._answered}

    def begin(self, shard: RowShard, parts: Sequence[Array]) -> None:
        """Add a shard, in parts; without any it counts as answered."""
        with self._lock:
            if not parts:
                self._answered.append(shard)
                return
            self._left[shard] = len(parts)
            self._waiting.extend(_Part(shard, part) for part in parts)

    def hand_out(self) -> Array | None:
        """Return the next part to be loaded, None if none waits."""
        with self._lock:
            if not self._waiting:
                return None
            part = self._waiting.popleft()
            self._handed_out.append(part)
            return part.index

    def take(self) -> RowShard | None:
        """Note that the part handed out first is answered; return its shard if that was the last of it."""
        with self._lock:
            shard = self._handed_out.popleft().shard
            self._left[shard] -= 1
            if self._left[shard]:
                return None
            del self._left[shard]
            self._answered.append(shard)
            return shard

    def fail(self, *, waiting: bool = False) -> RowShard | None:
        """Drop the shard of the part handed out first, which failed; the parts of others are handed out again.

        Args:
            waiting: Whether to drop the shard in work even if none of its parts is handed out at this moment.

        Returns:
            The shard; None if there is none.
        """
        with self._lock:
            if not self._handed_out and not (waiting and self._left):
                return None
            failed = self._handed_out[0].shard if self._handed_out else next(iter(self._left))
            self._left.pop(failed)
            again = [part for part in (*self._handed_out, *self._waiting) if part.shard is not failed]
            self._handed_out.clear()
            self._waiting = deque(again)
            return failed

    def pop_answered(self) -> list[RowShard]:
        """Return the shards of which all parts were answered since the last call."""
        with self._lock:
            answered, self._answered = self._answered, []
            return answered
