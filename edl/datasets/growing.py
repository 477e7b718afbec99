"""Follows sources without an end: a growing text file, a folder that gets files, or your `Source`.

A data set that grows is opened with an empty index. The program that created the data set runs a `Follower`, which
reports the source's growth to the master: the number of units, and the next part of the index. Readers fetch this part
when they need it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from edl.background import BackgroundLoop
from edl.backoff import Backoff
from edl.datasets.dataset import MOST_INDEX_NBYTES, Dataset
from edl.datasets.files import StorageError, absolute, list_files
from edl.errors import ClosedError, ConflictError, EDLError, SettingsError, SourceError, TemporaryError
from edl.settings import is_above_zero

logger = logging.getLogger(__name__)

_RETRY_S: Final = (1.0, 30.0)  # first and longest wait for an unreachable master, after the client's own wait
_CLOSE_S: Final = 10.0  # how long `close` waits for a running check: reading some hundred megabytes takes a second


@dataclass(frozen=True)
class FollowSettings:
    """How a source is followed.

    Attributes:
        poll_s: Seconds between two checks of the source.
        settle_s: Seconds without a change after which a file in a folder counts; before that, a program might still be
            writing to the file.
        end_after_s: Seconds without growth after which the source counts as ended; None for never.
        end_marker: Path or URL of a file; when this file exists, the source has ended. Empty for no such file.

    Raises:
        SettingsError: A value cannot be used.
    """

    poll_s: float = 1.0
    settle_s: float = 5.0
    end_after_s: float | None = None
    end_marker: str = ""

    def __post_init__(self) -> None:
        for name in ("poll_s", "settle_s", "end_after_s"):
            value = getattr(self, name)
            if (value is not None or name != "end_after_s") and not (is_above_zero(value) and math.isfinite(value)):
                raise SettingsError(f"{name}={value!r}: must be a number of seconds above 0")


class Follower:
    """Follows a source that grows, in its own thread. A data set may have only one follower at a time.

    A follower continues where the master's index ends, so you may kill it and start another follower. It waits while
    the master or the storage is unreachable. Any other error ends the follower, and is stored in `error`.

    Args:
        client: A `MasterClient`.
        name: Name of the data set, which must exist.
        dataset: The data set, as returned by `open_dataset` or `load_dataset`. No other code may use it while it is
            followed.
        settings: How to follow the source; None for the defaults.
        clock: Function that returns seconds, and whose value never decreases. Tests pass their own clock.

    Attributes:
        error: The error that ended the follower; None if there was no error.

    Raises:
        SettingsError: The data set does not grow.
    """

    def __init__(
        self,
        client: Any,
        name: str,
        dataset: Dataset,
        settings: FollowSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not dataset.grows:
            raise SettingsError(f"data set {name} does not grow: open growing data as 'follow:PATH'")
        self.error: EDLError | None = None
        self._client = client
        self._name = name
        self._dataset = dataset
        self._settings = settings or FollowSettings()
        self._clock = clock
        self._finishing = False
        self._begun = False
        self._units = self._published = self._index_nbytes = 0
        self._grown_s = 0.0
        self._refused = False
        self._backoff = Backoff(*_RETRY_S)
        self._loop: BackgroundLoop | None = None

    def start(self) -> None:
        """Start following, in the background."""
        if self._loop is None:
            self._loop = BackgroundLoop("edl-follower", self._step)

    def finish(self) -> None:
        """End the source with its current units. Returns at once; see `wait_ended`."""
        self._finishing = True
        if self._loop is not None:
            self._loop.wake()

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait until the master knows that the source has ended, or the follower has failed.

        Args:
            timeout_s: Seconds to wait.

        Returns:
            Whether the follower has ended, because the source ended or `close` was called.

        Raises:
            EDLError: The error that ended the follower.
        """
        ended = self._loop is not None and self._loop.wait_ended(timeout_s)
        if self.error is not None:
            raise self.error
        return ended

    def close(self) -> None:
        """Stop following. This does not end the source: another follower can continue."""
        if self._loop is not None:
            self._loop.close(_CLOSE_S)

    def follow_once(self) -> bool:
        """Check the source once, and report its growth to the master.

        Returns:
            Whether the source has ended and the master knows this.

        Raises:
            SourceError: The source has changed.
            StorageError: The storage is unreachable.
            TemporaryError: The master is unreachable.
            ConflictError: Another follower has ended the data set, or is following it at the same time.
        """
        if not self._begun:
            self._begin()
        self._begun = False  # after an error, ask the master again for its state
        finishing, marker = self._finishing, self._settings.end_marker
        end = self._look(final=finishing) or finishing or (marker != "" and bool(list_files(absolute(marker))))
        quiet_s = self._clock() - self._grown_s
        if not end and self._settings.end_after_s is not None:
            end = quiet_s >= self._settings.end_after_s
        if end and not finishing:  # new units, and those that looked unfinished
            self._look(final=True)
        spec = self._dataset.spec
        if end or 0 < spec.flush_s <= quiet_s:
            self._publish(self._units)
        else:
            self._publish(self._units // spec.shard_size * spec.shard_size)
        if end:
            self._client.end_dataset(self._name)
        self._begun = True
        return end

    def _begin(self) -> None:
        spec = self._client.describe_dataset(self._name)
        if spec is None:
            raise SettingsError(f"the master has no data set {self._name}: create it before following it")
        self._dataset.update(spec)
        self._index_nbytes = len(spec.index)
        self._units = self._published = spec.units
        self._grown_s = self._clock()

    def _look(self, *, final: bool) -> bool:
        now_s = self._clock()
        units, ended = self._dataset._look(now_s, self._settings.settle_s, final=final)
        if units > self._units:
            self._grown_s = now_s
        self._units = units
        return ended

    def _publish(self, units: int) -> None:
        if units <= self._published:
            return
        index = self._dataset._next_part(self._published, units)
        self._index_nbytes += len(index)
        if self._index_nbytes > MOST_INDEX_NBYTES:
            raise SourceError(
                f"the index of {self._name} would exceed {MOST_INDEX_NBYTES >> 20} MiB: end the data set, and "
                f"follow the source's next part under a different name, with larger shards"
            )
        self._client.extend_dataset(self._name, units, index, self._published)
        self._published = units

    def _step(self) -> float | None:
        try:
            if self.follow_once():
                return None
        except (TemporaryError, StorageError) as exc:
            wait_s = self._backoff.next_wait_s()
            logger.warning("data set %s: cannot follow its source, retrying in %.0f s: %s", self._name, wait_s, exc)
            return wait_s
        except EDLError as exc:
            if isinstance(exc, ConflictError) and not self._refused:
                self._refused = True  # another follower added a part: continue where it ends
                logger.warning("data set %s: checking the source again: %s", self._name, exc)
                return self._settings.poll_s
            if not isinstance(exc, ClosedError):
                logger.error("data set %s is no longer followed: %s", self._name, exc)
            self.error = exc
            return None
        self._refused = False
        self._backoff.reset()
        return self._settings.poll_s
