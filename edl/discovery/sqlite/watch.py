"""Following the file: a look at its change counter ten times a second, and a read when there is something to see."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from edl.background import BackgroundLoop
from edl.discovery.common.latest_value import LatestValue
from edl.discovery.common.resource import Resource
from edl.discovery.sqlite.file import SqliteFile
from edl.errors import DiscoveryError

__all__ = ["POLL_S", "SqliteWatch"]

POLL_S = 0.1
"""Every process's delay in seeing a change is at most this; a look costs microseconds."""
RETRY_S = 0.5
"""Wait after a failed look: what fails is a full disk or a file that others removed, and each attempt opens it anew."""

T = TypeVar("T")
S = TypeVar("S")


class SqliteWatch(Resource, Generic[T, S]):
    """Fills a `LatestValue` with what a watcher is to see.

    Args:
        read: reads the present state in a transaction; returns it, and the monotonic time at which the first of the
            leases it saw expires.
        answered, failed: turn the state, or the reason why there is none, into what the watcher sees.
        recheck_at: when `answered` wants to be called again without a change; None for never.
    """

    def __init__(
        self,
        path: str,
        timeout_s: float,
        read: Callable[[sqlite3.Connection], tuple[T, float]],
        answered: Callable[[T], S],
        failed: Callable[[str], S],
        recheck_at: Callable[[], float | None] = lambda: None,
    ) -> None:
        super().__init__()
        self._read = read
        self._answered = answered
        self._failed = failed
        self._recheck_at = recheck_at
        self._seen: tuple[int, int, int] | None = None
        self._revision = -1
        self._expires = 0.0
        self.newest: LatestValue[S] = LatestValue()
        self._file = self._own(SqliteFile(path, timeout_s, lazy=True))
        self._own(BackgroundLoop("edl-sqlite-watch", self._poll))

    def take(self, timeout_s: float | None) -> S | None:
        """See `Watch.get`."""
        if not self._closed:
            self._check()
        return self.newest.take(timeout_s)

    def _halt(self) -> None:
        self.newest.close()

    def _poll(self) -> float:
        try:
            due = min(self._expires, self._recheck_at() or self._expires)
            seen = self._file.data_version()
            if self._seen is not None and seen[0] != self._seen[0]:
                self.newest.put(self._failed(f"discovery file {self._file.path} was removed or replaced"))
                due = 0.0
            if seen != self._seen or time.monotonic() >= due:
                self._look(force=time.monotonic() >= due)
                self._seen = seen
        except DiscoveryError as exc:
            self._seen = None
            self._expires = 0.0
            self.newest.put(self._failed(str(exc)))
            return RETRY_S
        return POLL_S

    def _look(self, force: bool) -> None:
        with self._file.read() as connection:
            revision = connection.execute("SELECT revision FROM state").fetchone()[0]
            if revision == self._revision and not force:
                return
            state, self._expires = self._read(connection)
            self._revision = revision
        self.newest.put(self._answered(state))
