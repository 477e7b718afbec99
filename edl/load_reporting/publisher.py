"""`LoadPublisher`: the thread that writes a process's load records. Nothing waits for it."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from edl.background import BackgroundLoop
from edl.backoff import Backoff
from edl.discovery import Store, open_store
from edl.discovery.store import Lease
from edl.errors import ClosedError, ConflictError, DiscoveryError, LeaseLostError, SettingsError
from edl.load_reporting.records import VERSION, RecordKind, record_key
from edl.quoting import shown
from edl.settings import LoadSettings

logger = logging.getLogger(__name__)

_STORE_TIMEOUT_S = 2.0  # a slower request is retried later, and must not delay the end of the process
_CLOSE_TIMEOUT_S = 1.0  # for records to be removed; otherwise they expire with their lease
_LONGEST_TEXT = 512  # characters, as in a registry's ids
_LAST_RETRY_S = 60.0  # while the Store is unreachable: a thousand students then make 17 attempts a second

Counters: TypeAlias = Mapping[str, float | None]
"""Cumulative figures by name; None for a figure that is not known."""


@dataclass(frozen=True)
class LoadSource:
    """Where a record's figures come from.

    Attributes:
        service: Service that the figures belong to.
        kind: "students" or "teachers".
        read: Returns the counters. Called in the publisher's thread, about every two seconds.
        describe: Returns the record's other fields; called in the same way.
    """

    service: str
    kind: RecordKind
    read: Callable[[], Counters]
    describe: Callable[[], Mapping[str, Any]]


class LoadPublisher:
    """Writes a process's records to a Store, until the publisher is closed.

    The first record is written after one interval, so a process that ends sooner publishes nothing. Unchanged records
    are not rewritten; the lease shows that the process is alive. If the Store does not answer or refuses a record, that
    is logged once, and publishing is retried at growing intervals. A forked child of the process publishes nothing.

    Args:
        url: URL of the Store.
        sources: The source of each record's figures.
        settings: How often records are written, and how many seconds they cover.
    """

    def __init__(self, url: str, sources: Sequence[LoadSource], settings: LoadSettings) -> None:
        self._url = url
        self._settings = settings
        self._pid = os.getpid()
        self._host = re.sub(r"[^A-Za-z0-9.-]+", "-", socket.gethostname()).strip("-.")[:100] or "host"
        self._begun = time.monotonic()
        self._records = [
            _Record(source, f"{self._host}-{self._pid}-{os.urandom(4).hex()}", settings.window_s) for source in sources
        ]
        self._backoff = Backoff(settings.interval_s, max(_LAST_RETRY_S, settings.interval_s), jitter=0.5)
        self._store: Store | None = None
        self._lease: Lease | None = None
        self._first = True
        self._closing = False
        self._loop: BackgroundLoop | None = None
        try:
            self._loop = BackgroundLoop("edl-load", self._step)
        except RuntimeError as exc:  # the process may be out of threads, and the caller needs the last one more
            logger.warning("load is not published: %s", exc)

    def publish_soon(self) -> None:
        """Write changed records now rather than after the interval. Returns at once."""
        if self._loop is not None and os.getpid() == self._pid:
            self._loop.wake()

    def begin_close(self) -> None:
        """Start removing the records, and return at once."""
        self._closing = True
        self.publish_soon()

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Remove the records. May be called twice, and by signal handlers; does nothing in a forked child.

        Args:
            timeout_s: Seconds to wait; if the Store does not answer, records expire with their lease.
        """
        self.begin_close()
        if self._loop is not None and os.getpid() == self._pid:
            self._loop.wait_ended(timeout_s)

    def _step(self) -> float | None:
        if self._closing:
            self._withdraw()
            return None
        try:
            bodies = [record.sample(time.monotonic() - self._begun) for record in self._records]
            if self._first:  # the sample to compare the next one with
                self._first = False
                return self._settings.interval_s
            self._write(bodies)
        except (DiscoveryError, LeaseLostError, ConflictError, SettingsError) as exc:
            # Also SettingsError: a folder that cannot be created may be fixed while the process runs.
            if not self._backoff.failures:
                logger.warning("load is not published; retrying: %s", exc)
            return self._backoff.next_wait_s()
        except ClosedError:  # the object being counted is closed, or its process ends
            self._withdraw()
            return None
        if self._backoff.failures:
            logger.info("load is published again")
            self._backoff.reset()
        return self._settings.interval_s

    def _write(self, bodies: Sequence[Mapping[str, Any]]) -> None:
        if self._store is None:
            self._store = open_store(self._url, timeout_s=_STORE_TIMEOUT_S)
        if self._lease is None or self._lease.lost:
            lost, self._lease = self._lease, self._store.lease(self._settings.ttl_s)
            if lost is not None:  # the Store may keep it a little longer, and the records belong to it until then
                lost.close()
            for record in self._records:
                record.written = None  # it expired with the previous lease
        for record, body in zip(self._records, bodies, strict=True):
            marks = _without_times(body)
            if marks != record.written and not self._closing:
                text = {"v": VERSION, "id": record.publisher, "host": self._host, "pid": self._pid, **body}
                key = record_key(record.source.service, record.source.kind, record.publisher)
                self._store.put(key, json.dumps(text, allow_nan=False).encode(), self._lease)
                record.written = marks

    def _withdraw(self) -> None:
        store = self._store
        self._store = None
        self._lease = None
        if store is not None:
            store.close()  # which ends the lease, and so removes the records


class _Record:
    """A record, the fields that were last written, and samples of its counters from the last few seconds."""

    def __init__(self, source: LoadSource, publisher: str, window_s: float) -> None:
        self.source = source
        self.publisher = publisher
        self.written: Mapping[str, Any] | None = None
        self._window_s = window_s
        self._samples: deque[tuple[float, Counters]] = deque()

    def sample(self, t: float) -> Mapping[str, Any]:
        """Read the counters; return the record's fields.

        The record also contains earlier counters for comparison: the newest sample that is at least `window_s` old, or
        else the oldest sample. A counter that falls was reset (Triton was restarted behind `edl register`): earlier
        samples are dropped.
        """
        counters, samples = dict(self.source.read()), self._samples
        if samples and _has_restarted(samples[-1][1], counters):
            samples.clear()
        samples.append((t, counters))
        while len(samples) > 2 and samples[1][0] <= t - self._window_s:
            samples.popleft()
        since_t, since = samples[0]
        times = {"t": round(t, 3), "since": {"t": round(since_t, 3), **_rounded(since)}}
        words = {name: _printable(value) for name, value in self.source.describe().items()}
        return {**words, **_rounded(counters), **times}


def _has_restarted(before: Counters, after: Counters) -> bool:
    for name, value in after.items():
        earlier = before.get(name)
        if (value is None) != (earlier is None):
            return True
        if value is not None and earlier is not None and value < earlier:
            return True
    return False


def _rounded(counters: Counters) -> dict[str, float | None]:
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in counters.items()}


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return shown(value, _LONGEST_TEXT)
    return [_printable(part) for part in value] if isinstance(value, list) else value


def _without_times(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a record whose change is worth a rewrite: everything but the times.

    There is one exception: the first sample gives no rate, so the second sample is written even if its counters are
    equal.
    """
    since = {name: value for name, value in body["since"].items() if name != "t"}
    comparable = body["since"]["t"] < body["t"]
    return {**{name: value for name, value in body.items() if name != "t"}, "since": since, "comparable": comparable}
