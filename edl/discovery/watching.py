"""Watches: a thread follows a backend and keeps the newest state, which `get` returns.

A backend implements a `Follower`; the thread, its retries and the behaviour during an outage are common to all.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Iterator
from typing import ClassVar, Final, Generic, TypeVar

from typing_extensions import override

from edl.background import BackgroundLoop
from edl.backoff import Backoff
from edl.errors import ClosedError, DiscoveryError
from edl.notifier import Notifier
from edl.resource import Resource

QUERY_S = 10.0
"""How long a server may hold a blocking query. If the server hangs, a watch notices this after the query's time plus a
request's timeout."""
_FIRST_RETRY_S: Final = 0.2
_LAST_RETRY_S: Final = 1.0
"""Longest wait after a failure (`_FIRST_RETRY_S` is the first): a watch finds a restarted server within a second, and
sends one request per wait."""

T = TypeVar("T")
S = TypeVar("S")


class Snapshots(Resource, abc.ABC, Generic[S]):
    """Snapshots of a changing state, until this object is closed."""

    @abc.abstractmethod
    def get(self, timeout_s: float | None = None) -> S | None:
        """Wait for a snapshot that differs from the last one returned.

        Args:
            timeout_s: Seconds to wait; 0 returns at once, None waits as long as it takes.

        Returns:
            The newest snapshot; None if `timeout_s` passed without a change, or if the watch was closed, either alone
            or together with its store or registry.
        """

    def __iter__(self) -> Iterator[S]:
        """Yield snapshots, waiting for each, until the watch is closed."""
        while (snapshot := self.get()) is not None:
            yield snapshot


class Follower(abc.ABC, Generic[T]):
    """Follows a state in a backend, over its own connection; one thread calls `next`."""

    pause_s: ClassVar[float] = 0.0
    """Seconds that the watch waits between two calls, so that one query covers several quick changes."""

    @abc.abstractmethod
    def next(self, wait_s: float | None) -> T:
        """Return the state: at once on the first call and after an error, otherwise when the state may have changed.

        Args:
            wait_s: Seconds after which to return in any case; None to let the backend choose.

        Raises:
            DiscoveryError: The backend does not answer.
            ClosedError: The follower was closed.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """End a pending call of `next`, and release the connection."""


def query_wait_s(wait_s: float | None) -> float:
    """Return how long a blocking query should be held, given the argument of `Follower.next`."""
    return round(QUERY_S if wait_s is None else min(QUERY_S, wait_s), 3)


class FollowedWatch(Snapshots[S], Generic[T, S]):
    """Keeps only the newest snapshot: a slow reader skips snapshots, and never delays the thread that follows.

    `answered` turns a state into a snapshot; `failed` turns the reason for a failure into a snapshot. `recheck_at`
    returns the monotonic time at which `answered` must be called again even without a change. The follower is closed
    with this watch.
    """

    def __init__(
        self,
        follower: Follower[T],
        answered: Callable[[T], S],
        failed: Callable[[str], S],
        recheck_at: Callable[[], float | None] = lambda: None,
    ) -> None:
        super().__init__()
        self._follower = follower
        self._answered = answered
        self._failed = failed
        self._recheck_at = recheck_at
        self._backoff = Backoff(_FIRST_RETRY_S, _LAST_RETRY_S, jitter=0.5)
        self._changed = Notifier()
        self._newest: S | None = None
        self._taken: S | None = None
        self._own(BackgroundLoop("edl-watch", self._step, follower.close))

    @override
    def get(self, timeout_s: float | None = None) -> S | None:
        if not self._closed:
            self._check()
        self._changed.wait_for(lambda: self._closed or self._is_news(self._newest), timeout_s)
        newest = self._newest
        if self._closed or not self._is_news(newest):
            return None
        self._taken = newest
        return newest

    def _is_news(self, snapshot: S | None) -> bool:
        return snapshot is not None and snapshot != self._taken

    def _halt(self) -> None:
        self._changed.notify()

    def _step(self) -> float | None:
        recheck_at = self._recheck_at()
        wait_s = None if recheck_at is None else max(0.1, recheck_at - time.monotonic())
        try:
            self._newest = self._answered(self._follower.next(wait_s))
            pause_s = self._follower.pause_s
            self._backoff.reset()
        except ClosedError:
            return None
        except DiscoveryError as exc:
            if self._closed:
                return None
            self._newest = self._failed(str(exc))
            pause_s = self._backoff.next_wait_s()
        self._changed.notify()
        return pause_s
