"""Writes what the leading master reports into the Store, where `edl status`, the page and late workers read it."""

from __future__ import annotations

import json
import logging
from typing import Any, Final

from edl.background import BackgroundLoop
from edl.backoff import Backoff
from edl.discovery import Store
from edl.discovery.common.resource import Resource
from edl.errors import ClosedError, DiscoveryError
from edl.master.naming import report_key
from edl.master.server.report import encode

__all__ = ["ReportWriter"]

logger = logging.getLogger(__name__)

_IDLE_S: Final = 3600.0
"""How long the thread waits unless it is woken: it always is."""
_RETRY_S: Final = (0.5, 5.0)
"""The first and the longest wait before a Store that is away is written again."""
_CLOSE_S: Final = 2.0
"""What the last report gets to reach the Store."""


class ReportWriter(Resource):
    """Writes the newest report; older ones that were not written yet are left out. A Store that is away is no error.

    Args:
        store: not closed here.
        job: whose master reports.
        anew: write over a report of a later term, which another journal gave.
    """

    def __init__(self, store: Store, job: str, *, anew: bool = False) -> None:
        super().__init__()
        self._store = store
        self._anew = anew
        self._key = report_key(job)
        self._newest: dict[str, Any] | None = None
        self._ending = False
        self._away = False
        self._backoff = Backoff(*_RETRY_S, jitter=0.5)
        self._thread = BackgroundLoop("edl-master-report", self._write)

    def write(self, report: dict[str, Any]) -> None:
        """Have a report written soon. Waits for nothing."""
        self._newest = report
        self._thread.wake()

    def _halt(self) -> None:
        self._ending = True
        self._thread.wake()
        self._thread.wait_ended(_CLOSE_S)
        self._thread.close(_CLOSE_S)

    def _write(self) -> float | None:
        report, self._newest = self._newest, None
        if report is not None:
            try:
                self._put(report)
            except ClosedError:
                return None
            except DiscoveryError as exc:
                if not self._away:
                    logger.warning("the Store does not take this master's report, and the job goes on: %s", exc)
                self._away = True
                if self._ending:
                    return None
                if self._newest is None:
                    self._newest = report
                return self._backoff.next_wait_s()
            self._away = False
            self._backoff.reset()
        if self._newest is not None:
            return 0.0
        return None if self._ending else _IDLE_S

    def _put(self, report: dict[str, Any]) -> None:
        entry = self._store.get(self._key)
        if entry is not None and _term(entry.value) > report["term"] and not self._anew:
            return  # another master has led since
        self._anew = False
        self._store.compare_and_set(self._key, encode(report), None if entry is None else entry.version)


def _term(value: bytes) -> int:
    try:
        return int(json.loads(value)["term"])
    except (ValueError, TypeError, KeyError):
        return 0
