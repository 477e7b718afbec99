"""Following a server that keeps a question waiting until there is something new, and has peace till then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from edl.background import BackgroundLoop
from edl.backoff import Backoff
from edl.discovery.common.latest_value import LatestValue
from edl.discovery.common.resource import Resource
from edl.errors import ClosedError, DiscoveryError

__all__ = ["BlockingWatch", "WatchSource"]

WAIT_S = 10.0
"""How long the server waits for a change. A server that hangs is noticed this much, and a request's timeout, later."""
PAUSE_S = 0.05
"""Between two queries: changes that come in quick succession are read together."""
FIRST_RETRY_S, LAST_RETRY_S = 0.2, 2.0
"""Waits after the first failure and after many: a server that restarts is found within 2 s, at one request each."""

T = TypeVar("T")
S = TypeVar("S")


class WatchSource(Protocol):
    """What a watch asks: a connection, mostly."""

    def close(self) -> None:
        """End a query that is under way, and answer no other."""


class BlockingWatch(Resource, Generic[T, S]):
    """Fills a `LatestValue` with what a watcher is to see.

    Args:
        client: a connection of this watch's own; closing it must end a query that is under way.
        query: asks for what is newer than an index (None: for what there is), waiting some seconds for it; returns
            the new index with it.
        answered, failed: turn the answer, or the reason why there is none, into what the watcher sees.
        recheck_at: when `answered` wants to be called again without a change; None for never.
    """

    def __init__(
        self,
        client: WatchSource,
        query: Callable[[int | None, float], tuple[int, T]],
        answered: Callable[[T], S],
        failed: Callable[[str], S],
        recheck_at: Callable[[], float | None] = lambda: None,
    ) -> None:
        super().__init__()
        self._query = query
        self._answered = answered
        self._failed = failed
        self._recheck_at = recheck_at
        self._index: int | None = None
        self._backoff = Backoff(FIRST_RETRY_S, LAST_RETRY_S, jitter=0.5)
        self._own(client)
        self._newest: LatestValue[S] = LatestValue()
        self._own(BackgroundLoop("edl-watch", self._follow, client.close))

    def take(self, timeout_s: float | None) -> S | None:
        """See `Watch.get`."""
        if not self._closed:
            self._check()
        return self._newest.take(timeout_s)

    def _halt(self) -> None:
        self._newest.close()

    def _follow(self) -> float | None:
        recheck_at = self._recheck_at()
        wait_s = WAIT_S if recheck_at is None else min(WAIT_S, max(0.1, recheck_at - time.monotonic()))
        try:
            index, found = self._query(self._index, round(wait_s, 3))
        except ClosedError:
            return None
        except DiscoveryError as exc:
            if self._closed:
                return None
            self._newest.put(self._failed(str(exc)))
            self._index = None
            return self._backoff.next_wait_s()
        self._backoff.reset()
        # An index that goes back comes from a server that has lost its memory; one below 1 would not block.
        self._index = None if self._index is not None and index < self._index else max(1, index)
        self._newest.put(self._answered(found))
        return PAUSE_S
