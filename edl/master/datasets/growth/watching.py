"""What a follower looks at: a source that grows, and the index of what has come."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import ClassVar

from edl.master.datasets.dataset import Dataset

__all__ = ["GrowingDataset", "SourceWatcher"]


class SourceWatcher(abc.ABC):
    """Looks at a source, from where the data set's index ends. Used by a single thread.

    Attributes:
        exclusive: whether two watchers may find the same in another order, so that their indexes do not fit together.
    """

    exclusive: ClassVar[bool] = False

    @abc.abstractmethod
    def look(self, *, final: bool) -> tuple[int, bool]:
        """Look what is there.

        Args:
            final: nothing more will come: what looks unfinished, such as a line without its end, is there as well.

        Returns:
            How many units there are in all, and whether the source says that no more will come.

        Raises:
            SourceError: the source is not what it was: it has shrunk, or was replaced.
        """

    @abc.abstractmethod
    def cut_index(self, units: int) -> bytes:
        """Return what the index gets.

        Args:
            units: up to which it then goes: all that `look` has counted, or all of them that fill shards.
        """


class GrowingDataset(Dataset):
    """A data set that gets more units."""

    @property
    def units(self) -> None:
        """None: it has no end that would be known."""
        return None

    @abc.abstractmethod
    def watch_source(self, settle_s: float, clock: Callable[[], float]) -> SourceWatcher:
        """Return a watcher that goes on where the index ends.

        Args:
            settle_s: see `FollowSettings`.
            clock: Returns seconds, and never goes back.

        Raises:
            SourceError: what is indexed is not there as it was.
        """

    def known_units(self) -> int:
        """Return up to which unit the data set is indexed."""
        return self._known_units()
