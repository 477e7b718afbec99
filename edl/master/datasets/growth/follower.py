"""Tells the master of what has come, until the source has ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from edl.background import BackgroundLoop
from edl.backoff import Backoff
from edl.errors import ClosedError, ConflictError, EDLError, SettingsError, SourceError, TemporaryError
from edl.master.datasets.growth.decision import FollowDecision, FollowSettings, FollowState, Observation, decide
from edl.master.datasets.growth.watching import GrowingDataset, SourceWatcher
from edl.master.datasets.index import MOST_NBYTES
from edl.master.datasets.storage import StorageError, open_storage
from edl.protocol.master import DatasetSpec

__all__ = ["Follower", "GrowthClient"]

logger = logging.getLogger(__name__)

_RETRY_S: Final = (1.0, 30.0)
"""The first and the longest wait for a master that is away, which the client has waited for already."""
_CLOSE_S: Final = 10.0
"""How long `close` waits for a look under way: reading some hundred megabytes takes a second."""


class GrowthClient(Protocol):
    """What a follower needs of a `MasterClient`."""

    def describe_dataset(self, name: str) -> DatasetSpec | None:
        """Return the data set's specification, with units and index as they are now."""

    def extend_dataset(self, name: str, units: int, index: bytes, known: int | None) -> Any:
        """Tell the master how many units there are in all, what the index gets, and up to where it must go now."""

    def end_dataset(self, name: str) -> Any:
        """Tell the master that no more will come."""


class Follower:
    """Follows a source that grows, in a thread of its own. A data set has a single follower at a time.

    It goes on where the master's index ends, so a follower may be killed and another started. A master or storage that
    is away is waited for; any other error ends it, and stands in `error`.

    Args:
        client: of the master.
        name: of the data set, which is created already.
        dataset: as `open_dataset` or `load_dataset` made it.
        settings: None for the defaults.
        clock: Returns seconds, and never goes back. Tests pass their own.

    Attributes:
        error: what ended the follower, None while nothing has.

    Raises:
        SettingsError: the data set has an end.
    """

    def __init__(
        self,
        client: GrowthClient,
        name: str,
        dataset: Any,
        settings: FollowSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(dataset, GrowingDataset):
            raise SettingsError(f"{name} does not grow; a data set that does is opened as 'follow:PATH'")
        self.error: EDLError | None = None
        self._client = client
        self._name = name
        self._dataset = dataset
        self._settings = settings or FollowSettings()
        self._clock = clock
        self._finishing = False
        self._watcher: SourceWatcher | None = None
        self._state = FollowState(0, 0, 0.0)
        self._index_nbytes = 0
        self._refused = False
        self._backoff = Backoff(*_RETRY_S)
        self._loop: BackgroundLoop | None = None

    def start(self) -> None:
        """Follow, in the background."""
        if self._loop is None:
            self._loop = BackgroundLoop("edl-follower", self._step)

    def finish(self) -> None:
        """Take what is there as all there is: the source has ended. Returns at once; see `wait_ended`."""
        self._finishing = True
        if self._loop is not None:
            self._loop.wake()

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait until the master knows that the source has ended, or the follower has failed.

        Args:
            timeout_s: how long to wait, in seconds.

        Returns:
            Whether it is so.

        Raises:
            EDLError: that ended the follower.
        """
        ended = self._loop is not None and self._loop.wait_ended(timeout_s)
        if self.error is not None:
            raise self.error
        return ended

    def close(self) -> None:
        """Stop following. The source has not ended by that: another follower may go on."""
        if self._loop is not None:
            self._loop.close(_CLOSE_S)

    def follow_once(self) -> bool:
        """Look at the source once, and tell the master what has come.

        Returns:
            Whether the source has ended, and the master knows.

        Raises:
            SourceError: the source is not what it was.
            StorageError: the storage is away.
            TemporaryError: the master is away.
            ConflictError: another has ended the data set, or follows it as well.
        """
        watcher = self._watcher or self._begin()
        self._watcher = None  # after an error, what the master knows is asked anew
        finishing = self._finishing
        units, ended = watcher.look(final=finishing)
        ended = finishing or ended or self._is_marked()
        state, decision = self._decide(units, ended=ended)
        if decision.end and not finishing:  # what came since, and what looked unfinished
            units, _ = watcher.look(final=True)
            state, decision = self._decide(units, ended=True)
        if decision.publish > self._state.published:
            self._publish(watcher, decision.publish)
        if decision.end:
            self._client.end_dataset(self._name)
        self._state = state
        self._watcher = watcher
        return decision.end

    def _begin(self) -> SourceWatcher:
        spec = self._client.describe_dataset(self._name)
        if spec is None:
            raise SettingsError(f"the master has no data set {self._name}: create it before it is followed")
        self._dataset.update(spec)
        self._index_nbytes = len(spec.index)
        known = self._dataset.known_units()
        self._state = FollowState(known, known, self._clock())
        return self._dataset.watch_source(self._settings.settle_s, self._clock)

    def _decide(self, units: int, *, ended: bool) -> tuple[FollowState, FollowDecision]:
        seen = Observation(self._clock(), units, ended)
        spec = self._dataset.spec
        return decide(self._state, seen, self._settings, shard_size=spec.shard_size, flush_s=spec.flush_s)

    def _publish(self, watcher: SourceWatcher, units: int) -> None:
        index = watcher.cut_index(units)
        self._index_nbytes += len(index)
        if self._index_nbytes > MOST_NBYTES:
            raise SourceError(
                f"the index of {self._name} would have more than {MOST_NBYTES >> 20} MiB: end the data set, and follow "
                f"the source's next part under another name, with larger shards"
            )
        self._client.extend_dataset(self._name, units, index, self._state.published if watcher.exclusive else None)

    def _is_marked(self) -> bool:
        marker = self._settings.end_marker
        return bool(marker) and bool(open_storage(marker).list_files(marker))

    def _step(self) -> float | None:
        try:
            if self.follow_once():
                return None
        except (TemporaryError, StorageError) as exc:
            wait_s = self._backoff.next_wait_s()
            logger.warning("data set %s: not followed for %.0f s: %s", self._name, wait_s, exc)
            return wait_s
        except EDLError as exc:
            if isinstance(exc, ConflictError) and not self._refused:
                self._refused = True  # by another follower's part: this one goes on where that has ended
                logger.warning("data set %s: looked at anew: %s", self._name, exc)
                return self._settings.poll_s
            if not isinstance(exc, ClosedError):
                logger.error("data set %s is followed no more: %s", self._name, exc)
            self.error = exc
            return None
        self._refused = False
        self._backoff.reset()
        return self._settings.poll_s
