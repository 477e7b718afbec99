"""Reads jobs in a Store: their ledgers and their masters' reports."""

from __future__ import annotations

import operator
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from edl.collective.goodput import JobPart, JobSummary, decode_part, read_job, summarize
from edl.collective.job_records import GAVE_UP, prefix
from edl.dashboard.state.records import decode_master, read_fields
from edl.dashboard.state.schema import JobStatus, MasterStatus, UnreadableRecord, WantedCount
from edl.discovery.store import Entry, Store
from edl.errors import ProtocolError, SettingsError
from edl.load_reporting import read_wanted

MASTERS: Final = "master_reports/"
"""Key prefix of masters' reports."""
LAST_EVENTS: Final = 50
"""Maximum number of events in a job's entry; the merged list has 100."""
_STATES: Final = {"leading": "running", "done": "done", "stopped": "down", "silent": "down"}
"""State of a job that has only a master, by the master's state."""
_MAX_REASON: Final = 300
"""Maximum length of the reason why a record is unreadable; the reason may quote the record."""


class JobReader:
    """Reads the jobs of a Store repeatedly, and decodes only changed records. Not thread-safe."""

    def __init__(self, store: Store, job: str | None = None) -> None:
        self._store = store
        self._job = job
        self._decoded: dict[str, tuple[bytes, JobPart | ProtocolError]] = {}
        self._ended: dict[str, tuple[list[JobPart], JobSummary]] = {}

    def read(self, now_s: float) -> tuple[dict[str, JobSummary], dict[str, MasterStatus], list[UnreadableRecord]]:
        """Return the jobs by name, the masters' reports by job, and unreadable records."""
        unreadable: list[UnreadableRecord] = []
        entries = self._store.list(prefix(self._job) if self._job else "jobs/")
        reports = self._store.list(f"{MASTERS}{self._job or ''}")
        masters = {}
        for entry in reports:
            job = entry.key.removeprefix(MASTERS)
            if self._job in (None, job):
                try:
                    masters[job] = decode_master(entry.value, job, now_s)
                except ProtocolError as exc:
                    unreadable.append(_unreadable(entry.key, exc))
        return self._summarize(entries, now_s, unreadable), masters, unreadable

    def _summarize(
        self, entries: Iterable[Entry], now_s: float, unreadable: list[UnreadableRecord]
    ) -> dict[str, JobSummary]:
        parts: dict[str, list[JobPart]] = defaultdict(list)
        decoded = {}
        for entry in entries:
            if entry.key.count("/") < 2:
                unreadable.append(UnreadableRecord(entry.key, "not a key of a job's record"))
                continue
            found = self._decoded.get(entry.key)
            if found is None or found[0] != entry.value:
                found = (entry.value, _decode(entry))
            decoded[entry.key] = found
            job = entry.key.split("/")[1]
            if isinstance(found[1], ProtocolError):
                parts[job].extend(())  # the job is shown, with its readable records
                unreadable.append(_unreadable(entry.key, found[1]))
            else:
                parts[job].append(found[1])
        self._decoded = decoded
        now_us = round(now_s * 1e6)
        summaries = {job: self._summary(job, found, now_us) for job, found in parts.items()}
        self._ended = {
            job: (parts[job], summary) for job, summary in summaries.items() if summary.state in ("done", "failed")
        }
        return summaries

    def _summary(self, job: str, parts: list[JobPart], now_us: int) -> JobSummary:
        """Summarize a job. For an unchanged job that has ended, only update how long its nodes have been silent."""
        before = self._ended.get(job)
        if before is None or len(before[0]) != len(parts) or any(map(operator.is_not, before[0], parts)):
            return summarize(job, parts, now_us)
        nodes = (replace(row, silent_s=max(0.0, (now_us - row.record.until_us) / 1e6)) for row in before[1].nodes)
        return replace(before[1], nodes=tuple(nodes))


def job_status(
    job: str, summary: JobSummary | None, master: MasterStatus | None, wanted: WantedCount | None, last_events: int
) -> JobStatus:
    """Return a job's status for the page, without its history."""
    fields = vars(summary or summarize(job, (), 0)).copy()
    fields["events"] = fields["events"][max(0, len(fields["events"]) - last_events) :]
    if summary is None and master is not None:
        fields["state"] = _STATES.get(master.state, "unknown")
    return JobStatus(**fields, master=master, wanted_workers=wanted, master_only=summary is None)


def read_job_status(store: Store, job: str, last_events: int) -> JobStatus:
    """Read a job for `edl status`; SettingsError if there is none, ProtocolError if another version of EDL wrote it."""
    now_s = time.time()
    summary = None
    try:
        summary = read_job(store, job, now_s)
    except SettingsError:
        report = store.get(f"{MASTERS}{job}") if "/" not in job and job else None
        if report is None:
            masters = [entry.key.removeprefix(MASTERS) for entry in store.list(MASTERS)]
            summary = read_job(store, job, now_s, masters)  # raises, and names these jobs too
    else:
        report = store.get(f"{MASTERS}{job}")
    master = decode_master(report.value, job, now_s) if report is not None else None
    wanted = read_wanted(store, "workers", job)
    count = read_fields(WantedCount, wanted) if wanted is not None else None
    return job_status(job, summary, master, count, last_events)


def read_all_jobs(reader: JobReader) -> tuple[list[JobStatus], list[UnreadableRecord]]:
    """Read all jobs for `edl status`, without events. A job with an unreadable record is not among them."""
    summaries, masters, unreadable = reader.read(time.time())
    names = {*summaries, *masters}.difference(record.key.split("/")[1] for record in unreadable)
    jobs = sort_jobs(job_status(job, summaries.get(job), masters.get(job), None, 0) for job in names)
    return jobs, unreadable


def sort_jobs(jobs: Iterable[JobStatus]) -> list[JobStatus]:
    """Return running jobs first, then ended jobs, latest first, then jobs whose agents gave up."""

    def rank(job: JobStatus) -> tuple[int, float, str]:
        order = {"done": 1, "failed": 1, GAVE_UP: 2}.get(job.state, 0)
        return order, -(job.began + job.elapsed_s), job.job

    return sorted(jobs, key=rank)


def _decode(entry: Entry) -> JobPart | ProtocolError:
    try:
        return decode_part(entry.key, entry.value)
    except ProtocolError as exc:
        return exc


def _unreadable(key: str, exc: ProtocolError) -> UnreadableRecord:
    return UnreadableRecord(key, str(exc)[:_MAX_REASON])
