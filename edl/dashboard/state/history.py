"""The history of jobs and services: the points of charts.

Points come from three bounded sources: reads by the page's own process; a job's ledger, which records how the time was
spent while no page was served; and figures for the last hours, which a store's process keeps (`StoreSampler`,
`read_kept`).
"""

from __future__ import annotations

import bisect
import logging
import math
import time
from collections.abc import Collection, Iterable
from typing import Any, Final, Generic, Protocol, TypeVar

from edl.collective.goodput import JobSummary, TimeCategory
from edl.collective.job_records import GAVE_UP
from edl.dashboard.state.jobs import JobReader, job_status
from edl.dashboard.state.schema import JobPoint, JobStatus, ServicePoint, ServiceStatus
from edl.dashboard.state.services import ServiceReader
from edl.discovery.registry import KeyRegistry
from edl.discovery.store import Store
from edl.errors import DiscoveryError

logger = logging.getLogger(__name__)

MAX_POINTS: Final = 600
"""Enough for 20 minutes with a point every 2 s, or for days with sparser points; less than 120 KB of JSON per job."""
FROM_LEDGER: Final = 300
"""Maximum number of points from the ledger of a running job: the other half is for new points."""
FROM_ENDED: Final = 100
"""Maximum number of points of an ended job: enough for a chart, in 20 KB of JSON. There may be many ended jobs."""


class _Point(Protocol):
    @property
    def t(self) -> float: ...


P = TypeVar("P", bound=_Point)


class History(Generic[P]):
    """Points in ascending order of time, at most `limit`, which is at least 4."""

    def __init__(self, limit: int = MAX_POINTS) -> None:
        self._limit = limit
        self._points: list[P] = []

    @property
    def points(self) -> tuple[P, ...]:
        """All points, oldest first."""
        return tuple(self._points)

    @property
    def last_t(self) -> float:
        """The time of the newest point; 0 if there are none."""
        return self._points[-1].t if self._points else 0.0

    def append(self, point: P) -> None:
        """Append a point only if it is newer than the last one: the clock may have been set back."""
        if self._points and point.t <= self._points[-1].t:
            return
        self._points.append(point)
        if len(self._points) > self._limit:
            half = self._limit // 2
            self._points[:half] = self._points[:half:2]

    def extend(self, points: Iterable[P]) -> None:
        """Append points, oldest first."""
        for point in points:
            self.append(point)


def points_of_ledger(
    summary: JobSummary, after_t: float, until_t: float, look: int, most: int = FROM_LEDGER
) -> list[JobPoint]:
    """Return at most `most` points of a job's past, after `after_t` and up to `until_t`.

    The job's spans record how the time was spent while no dashboard was running, so a page that is opened late shows
    the whole job. `until_t` is needed because a node's clock may be ahead of this machine's.
    """
    points = []
    sums = [0] * len(TimeCategory)
    for span in summary.spans:
        sums = [amount + more for amount, more in zip(sums, span.amounts, strict=True)]
        seconds = {state.name.lower(): sums[state] / 1e6 for state in TimeCategory}
        goodput = sums[TimeCategory.TRAIN] / sum(sums) if summary.step >= 0 else None
        points.append(JobPoint(summary.began + sum(sums) / 1e6, seconds, goodput, world_size=span.workers, look=look))
    times = [point.t for point in points]
    points = points[bisect.bisect_right(times, after_t) : bisect.bisect_right(times, until_t)]
    return thin(points, most)


def thin(points: list[P], most: int) -> list[P]:
    """Return at most `most` points, including the newest."""
    step = -(-len(points) // most)
    return points[::-1][::step][::-1] if step > 1 else points


def job_point(job: JobStatus, now_s: float, look: int) -> JobPoint:
    """Return the job's current point."""
    rates = [dataset.units_per_s for dataset in job.master.datasets] if job.master is not None else []
    known = [rate for rate in rates if rate is not None]
    return JobPoint(
        t=now_s,
        seconds=job.seconds,
        goodput=job.goodput,
        samples_per_s=job.samples_per_s,
        steps_per_s=job.steps_per_s,
        world_size=job.world_size,
        units_per_s=sum(known) if known else None,
        look=look,
    )


def service_point(service: ServiceStatus, now_s: float, look: int) -> ServicePoint:
    """Return the service's current point."""
    rates = [teacher.rows_per_s for teacher in service.teachers if teacher.rows_per_s is not None]
    waits = [student.wait_share for student in service.students if student.wait_share is not None]
    return ServicePoint(
        t=now_s,
        rows_per_s=sum(rates) if rates else None,
        teachers=sum(teacher.state in ("ready", "draining") for teacher in service.teachers),
        wanted=service.wanted.count if service.wanted is not None and not service.wanted.is_old(now_s) else None,
        wait_share=sum(waits) / len(waits) if waits else None,
        look=look,
    )


# --- Figures kept by the store's process ---

_JOB_FIELDS: Final = ("goodput", "samples_per_s", "steps_per_s", "world_size", "units_per_s")
_SERVICE_FIELDS: Final = ("rows_per_s", "teachers", "wanted", "wait_share")


class StoreSampler:
    """Returns the current point of each running job and each service, for `edl store`. Not thread-safe."""

    def __init__(self) -> None:
        self._readers: tuple[JobReader, ServiceReader] | None = None

    def __call__(self, store: Store) -> dict[str, dict[str, float | None]]:
        """Read the store, which must be the same store at each call; DiscoveryError if it cannot be read."""
        if self._readers is None:
            self._readers = JobReader(store), ServiceReader(store, KeyRegistry(store))
        now_s = time.time()
        summaries, masters, _ = self._readers[0].read(now_s)
        services, _, _ = self._readers[1].read(now_s)
        found: dict[str, dict[str, float | None]] = {}
        for name in summaries.keys() | masters.keys():
            job = job_status(name, summaries.get(name), masters.get(name), None, 0)
            if job.state not in ("done", "failed", GAVE_UP):
                point = job_point(job, now_s, 0)
                found[f"jobs/{name}"] = {**point.seconds, **{field: getattr(point, field) for field in _JOB_FIELDS}}
        for service in services:
            total = service_point(service, now_s, 0)
            found[f"services/{service.service}"] = {field: getattr(total, field) for field in _SERVICE_FIELDS}
        return found


def read_kept(store: Store, names: Collection[str], look: int) -> dict[str, list[Any]]:
    """Return the points that the store's process keeps for the named series, "jobs/JOB" and "services/SERVICE"."""
    found: dict[str, list[Any]] = {}
    try:
        for name, rows in store.series():
            if name in names:
                read = _read_job_point if name.startswith("jobs/") else _read_service_point
                known = ({key: _plain(value) for key, value in row.items() if math.isfinite(value)} for row in rows)
                found[name] = thin([read(row, look) for row in known if "t" in row], MAX_POINTS)
    except DiscoveryError as exc:
        logger.info("cannot read the store's figures of the last hours: %s", exc)
    return found


def _plain(value: float) -> float:
    return int(value) if value.is_integer() else value


def _read_job_point(row: dict[str, float], look: int) -> JobPoint:
    figures = {field: row.pop(field, None) for field in _JOB_FIELDS}
    return JobPoint(t=row.pop("t"), seconds=row, look=look, **figures)  # type: ignore[arg-type]


def _read_service_point(row: dict[str, float], look: int) -> ServicePoint:
    figures = {field: row.get(field) for field in _SERVICE_FIELDS}
    return ServicePoint(t=row["t"], look=look, **figures)  # type: ignore[arg-type]
