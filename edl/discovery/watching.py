"""Watches: a thread follows a backend and leaves the newest state in a slot, where `get` picks it up.

A backend says how to follow it by a `Follower`; everything else (the thread, retries, what a reader sees meanwhile) is
the same for all of them.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable
from typing import ClassVar, Final, Generic, TypeVar

from edl.background import BackgroundLoop
from edl.backoff import Backoff
from edl.discovery.resource import Resource
from edl.errors import ClosedError, DiscoveryError
from edl.notifier import Notifier

__all__ = ["FollowedWatch", "Follower", "LatestValue", "query_wait_s"]

QUERY_S = 10.0
"""How long a server may hold a blocking query. If it hangs, a watch notices after this and a request's timeout."""
_FIRST_RETRY_S: Final = 0.2
_LAST_RETRY_S: Final = 1.0
"""Waits after the first failure and after many: a restarted server is found within a second, at one request each."""

T = TypeVar("T")
S = TypeVar("S")


class LatestValue(Generic[T]):
    """A slot for the newest value only: a slow reader skips values, and never holds up the writer.

    A signal handler may call `put` and `close`, also in the middle of `take`.
    """

    def __init__(self) -> None:
        self._changed = Notifier()
        self._value: T | None = None
        self._taken: T | None = None
        self._closed = False

    def put(self, value: T) -> None:
        """Make `value` the newest."""
        self._value = value
        self._changed.notify()

    def take(self, timeout_s: float | None = None) -> T | None:
        """Wait for a value that differs from the one taken last; None after `timeout_s`, or when the slot is closed."""
        self._changed.wait_for(lambda: self._closed or self._is_new(self._value), timeout_s)
        value = self._value
        if self._closed or not self._is_new(value):
            return None
        self._taken = value
        return value

    def close(self) -> None:
        """End every wait, now and later."""
        self._closed = True
        self._changed.notify()

    def _is_new(self, value: T | None) -> bool:
        return value is not None and value != self._taken


class Follower(abc.ABC, Generic[T]):
    """Follows something in a backend, over a connection of its own; one thread calls `next`.

    Attributes:
        pause_s: how long the watch waits between two calls, so that one query reads several quick changes together.
    """

    pause_s: ClassVar[float] = 0.0

    @abc.abstractmethod
    def next(self, wait_s: float | None) -> T:
        """Return the state: at once the first time and after an error, then when it may have changed.

        Args:
            wait_s: return after that many seconds in any case; None for whatever suits the backend.

        Raises:
            DiscoveryError: the backend does not answer.
            ClosedError: this was closed.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """End a call of `next` that is under way, and release the connection."""


def query_wait_s(wait_s: float | None) -> float:
    """Return how long a blocking query should be held, given what `Follower.next` was asked for."""
    return round(QUERY_S if wait_s is None else min(QUERY_S, wait_s), 3)


class FollowedWatch(Resource, Generic[T, S]):
    """Fills a `LatestValue` with what a reader is to see.

    Args:
        follower: closed with this watch.
        answered: turns a state into what the reader sees.
        failed: turns the reason of a failure into what the reader sees.
        recheck_at: the monotonic time at which `answered` must be called again even without a change; None for never.
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
        self._newest: LatestValue[S] = LatestValue()
        self._own(BackgroundLoop("edl-watch", self._step, follower.close))

    def get(self, timeout_s: float | None = None) -> S | None:
        """See `StoreWatch.get` and `Watch.get`."""
        if not self._closed:
            self._check()
        return self._newest.take(timeout_s)

    def _halt(self) -> None:
        self._newest.close()

    def _step(self) -> float | None:
        recheck_at = self._recheck_at()
        wait_s = None if recheck_at is None else max(0.1, recheck_at - time.monotonic())
        try:
            found = self._follower.next(wait_s)
        except ClosedError:
            return None
        except DiscoveryError as exc:
            if self._closed:
                return None
            self._newest.put(self._failed(str(exc)))
            return self._backoff.next_wait_s()
        self._backoff.reset()
        self._newest.put(self._answered(found))
        return self._follower.pause_s
