"""Reads the state from a Store and a registry; during an outage, the last known state remains."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlsplit

import edl
from edl.dashboard.state.cluster import ClusterView
from edl.dashboard.state.history import (
    FROM_ENDED,
    FROM_LEDGER,
    History,
    job_point,
    points_of_ledger,
    read_kept,
    service_point,
    thin,
)
from edl.dashboard.state.jobs import LAST_EVENTS, JobReader, job_status, sort_jobs
from edl.dashboard.state.records import read_fields
from edl.dashboard.state.schema import (
    DashboardState,
    EventRow,
    JobPoint,
    JobStatus,
    ServicePoint,
    ServiceStatus,
    WantedCount,
)
from edl.dashboard.state.services import LAST_MERGED, ServiceReader, find_changes, merge_events
from edl.discovery.registry import Registry
from edl.discovery.store import Store
from edl.discovery.urls import open_registry, open_store
from edl.errors import DiscoveryError, EDLError
from edl.quoting import shown
from edl.settings import Credentials

MAX_JOBS: Final = 100
"""Maximum number of jobs on the page, running jobs first. A Store keeps a job's ledger until the name is reused."""
_SAMPLE_S: Final = 2.0
"""Time between two points of a history: a chart shows no finer detail."""
_GAP_S: Final = 10.0
"""After this long without a read, points from the job's ledger fill the gap in its history."""
_AWAY_S: Final = 30.0
"""After this long without a read, the figures for that time are read from the store's process."""
_ROUNDING_S: Final = 0.01
"""Smaller differences between times of a job's end are rounding errors."""
_TIMEOUT_S: Final = 3.0
"""Timeout of a request to the Store: a read of the state sends a few requests, and should end before a user gives
up."""


class StateReader:
    """Reads the state repeatedly; `looks` counts the reads. Not thread-safe.

    Opens the Store and the registry at the first read; if that fails, retries at later reads.

    Args:
        url: URL of the Store, and of the registry unless `registry_url` is given.
        registry_url: URL where teachers register; None for `url`.
        job: The only job to show; None for all.
        credentials: Credentials for `open_store`.
        cluster: The cluster whose jobs and pools to show; None for none. The cluster's connections are closed with the
            reader.
    """

    def __init__(
        self,
        url: str,
        *,
        registry_url: str | None = None,
        job: str | None = None,
        credentials: Credentials | None = None,
        cluster: ClusterView | None = None,
    ) -> None:
        self._cluster = cluster
        self._url = url
        self._registry_url = registry_url or url
        self._job = job
        self._credentials = credentials
        self._store: Store | None = None
        self._registry: Registry | None = None
        self._readers: tuple[JobReader, ServiceReader] | None = None
        self._job_histories: dict[str, History[JobPoint]] = {}
        self._service_histories: dict[str, History[ServicePoint]] = {}
        self._changes: deque[EventRow] = deque(maxlen=LAST_MERGED)
        self._last = DashboardState(time.time(), shown_url(url), edl.__version__, job=job)
        self.looks = 0

    def open(self) -> None:
        """Open Store and registry if they are reachable; raise SettingsError for an unusable URL."""
        with contextlib.suppress(DiscoveryError):  # the next read retries, and reports it
            self._open()

    def read(self) -> DashboardState:
        """Return the current state or, in an outage of the Store or registry, the last known state with `stale` set."""
        now_s = time.time()
        self.looks += 1
        kubernetes = self._cluster.latest() if self._cluster is not None else None
        try:
            store, job_reader, service_reader = self._open()
            summaries, masters, unreadable = job_reader.read(now_s)
            services, wanted, rejected = service_reader.read(now_s)
        except EDLError as exc:
            stale = f"last known state: {shown(exc)}"
            self._last = replace(self._last, time=time.time(), stale=stale, kubernetes=kubernetes)
            return self._last
        counts = {name: read_fields(WantedCount, count) for (kind, name), count in wanted.items() if kind == "workers"}
        jobs = sort_jobs(
            job_status(name, summaries.get(name), masters.get(name), counts.get(name), LAST_EVENTS)
            for name in summaries.keys() | masters.keys()
        )
        if self._job is not None:
            services = [service for service in services if _serves(service, self._job)] or services
        kept: dict[str, list[Any]] = {}
        if now_s - (self._last.looked or 0.0) > _AWAY_S:
            names = {f"jobs/{job.job}" for job in jobs[:MAX_JOBS]} | {f"services/{one.service}" for one in services}
            kept = read_kept(store, names, self.looks)
        sampled = [self._with_history(job, kept.get(f"jobs/{job.job}", []), now_s) for job in jobs[:MAX_JOBS]]
        followed = [self._service_with_history(one, kept.get(f"services/{one.service}", []), now_s) for one in services]
        self._job_histories = {job.job: self._job_histories[job.job] for job in sampled}
        self._service_histories = {one.service: self._service_histories[one.service] for one in followed}
        if self._last.looked is not None:
            self._changes += find_changes(self._last.services, followed, now_s)
        self._last = DashboardState(
            time=time.time(),
            store=shown_url(self._url),
            version=edl.__version__,
            looked=now_s,
            job=self._job,
            jobs=tuple(sampled),
            more_jobs=max(0, len(jobs) - MAX_JOBS),
            services=tuple(followed),
            events=merge_events(sampled, followed, self._changes),
            unreadable=(*unreadable, *rejected),
            kubernetes=kubernetes,
        )
        return self._last

    def close(self) -> None:
        """Close the Store and the registry."""
        for opened in (self._registry, self._store, self._cluster):
            if opened is not None:
                opened.close()

    def _open(self) -> tuple[Store, JobReader, ServiceReader]:
        if self._store is None:
            self._store = open_store(self._url, timeout_s=_TIMEOUT_S, credentials=self._credentials)
        if self._readers is None:
            self._registry = open_registry(self._registry_url, timeout_s=_TIMEOUT_S, credentials=self._credentials)
            self._readers = JobReader(self._store, self._job), ServiceReader(self._store, self._registry)
        return self._store, *self._readers

    def _with_history(self, job: JobStatus, kept: list[JobPoint], now_s: float) -> JobStatus:
        history = self._job_histories.setdefault(job.job, History())
        if history.points and history.points[0].t < job.began:
            history = self._job_histories[job.job] = History()  # a new job of the same name has started
        ended = job.state in ("done", "failed")
        most = FROM_ENDED if ended else FROM_LEDGER
        kept = [point for point in kept if max(history.last_t, job.began) < point.t <= now_s]
        if kept:
            history.extend(points_of_ledger(job, history.last_t, kept[0].t, self.looks, most))
            history.extend(thin(kept, most))
        behind_s = min(now_s, job.began + job.elapsed_s) - history.last_t
        if not job.master_only and behind_s > (_ROUNDING_S if ended else _GAP_S):
            history.extend(points_of_ledger(job, history.last_t, now_s, self.looks, most))
        if not ended and now_s - history.last_t >= _SAMPLE_S:
            history.append(job_point(job, now_s, self.looks))
        return replace(job, history=history.points)

    def _service_with_history(self, service: ServiceStatus, kept: list[ServicePoint], now_s: float) -> ServiceStatus:
        history = self._service_histories.setdefault(service.service, History())
        history.extend(point for point in kept if point.t <= now_s)
        if now_s - history.last_t >= _SAMPLE_S:
            history.append(service_point(service, now_s, self.looks))
        return replace(service, history=history.points)


def shown_url(url: str) -> str:
    """Return a Store's URL for display, without user name, password and query."""
    parts = urlsplit(url)
    return shown(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/{parts.path.lstrip('/')}".rstrip("/"))


def _serves(service: ServiceStatus, job: str) -> bool:
    return any(student.job == job for student in service.students)
