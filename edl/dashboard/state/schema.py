"""The state behind the page, `/api/state`, `edl status --json` and the metrics, as dataclasses.

Wall clocks are seconds since 1970, durations seconds, shares from 0 to 1; None is for what is not known. `as_json`
makes the JSON, in which the names are the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Final

from edl.collective.goodput import JobSummary
from edl.dashboard.state.cluster.schema import KubernetesStatus

__all__ = [
    "DashboardState",
    "DatasetStatus",
    "EventRow",
    "JobPoint",
    "JobStatus",
    "MasterStatus",
    "PoisonedShard",
    "ServicePoint",
    "ServiceStatus",
    "ShardFailure",
    "ShardHolder",
    "StudentStatus",
    "TeacherStatus",
    "UnreadableRecord",
    "WantedCount",
    "WantedDecision",
    "as_json",
]

_OLD_S: Final = 60.0
"""Of a wanted count: masters that decide write it every 10 s. The page has the same bound."""


@dataclass(frozen=True)
class WantedDecision:
    """A moment at which another count was wanted.

    Attributes:
        time: wall clock.
        count: wanted from then on.
        reason: why, in words.
    """

    time: float | None
    count: int | None
    reason: str


@dataclass(frozen=True)
class WantedCount:
    """How many teachers or workers there should be.

    Attributes:
        count: wanted.
        now: that there are.
        reason: why, in words.
        since: wall clock since which so many are wanted.
        time: wall clock at which it was written; older than a minute, no master decides any more.
        decisions: the last ones, oldest first.
    """

    count: int | None
    now: int | None
    reason: str
    since: float | None
    time: float | None = None
    decisions: tuple[WantedDecision, ...] = ()

    def age_s(self, now_s: float) -> float | None:
        """Return how long ago it was written; None where that is not known.

        Args:
            now_s: wall clock.
        """
        return None if self.time is None else max(0.0, now_s - self.time)

    def is_old(self, now_s: float) -> bool:
        """Return whether no master decides at present.

        Args:
            now_s: wall clock.
        """
        return (self.age_s(now_s) or 0.0) > _OLD_S


@dataclass(frozen=True)
class ShardFailure:
    """A failure of a shard.

    Attributes:
        holder: that had its lease.
        reason: in the holder's words, or that the lease expired.
        time: wall clock.
    """

    holder: str
    reason: str
    time: float | None


@dataclass(frozen=True)
class PoisonedShard:
    """A shard that failed too often, and is left alone until it is put back.

    Attributes:
        shard: its number.
        epoch: in which it failed, from 0.
        start: the first unit.
        stop: the unit after the last.
        failures: oldest first.
    """

    shard: int | None
    epoch: int | None
    start: int | None
    stop: int | None
    failures: tuple[ShardFailure, ...]


@dataclass(frozen=True)
class ShardHolder:
    """A reader of shards.

    Attributes:
        holder: its name.
        leases: shards that it has now.
        units_done: that it reported.
        units_per_s: lately.
        seen_s: since its last word.
    """

    holder: str
    leases: int | None
    units_done: int | None
    units_per_s: float | None
    seen_s: float | None


@dataclass(frozen=True)
class DatasetStatus:
    """A dataset of a master.

    Attributes:
        name: of the dataset.
        kind: "range", "lines", "parquet", ...
        epoch: the present one, from 0.
        epochs: how many there will be.
        units: of an epoch; None where that is not known yet.
        shards: by state: "todo" and "doing" of this epoch, "done" and "poisoned" of all epochs until now.
        finished: nothing is left to do.
        ended: no more units will come, as they may from a source that grows.
        units_done: in all epochs.
        units_per_s: lately.
        eta_s: until this dataset is done, at that rate.
        poisoned: the first of the poisoned shards.
        holders: who reads it.
    """

    name: str
    kind: str
    epoch: int | None
    epochs: int | None
    units: int | None
    shards: Mapping[str, int]
    finished: bool
    ended: bool
    units_done: float | None
    units_per_s: float | None
    eta_s: float | None
    poisoned: tuple[PoisonedShard, ...]
    holders: tuple[ShardHolder, ...]


@dataclass(frozen=True)
class EventRow:
    """An event of a job, a master or a service, as the merged list has it.

    Attributes:
        time: wall clock.
        kind: a word.
        text: what happened.
        cause: why, in words; empty where that is not known.
        job: of which job, None for none.
        service: of which service, None for none.
        node: of which node, None for none.
        decision: EDL decided it: a wanted count, a host left out, a poisoned shard.
    """

    time: float
    kind: str
    text: str
    cause: str = ""
    job: str | None = None
    service: str | None = None
    node: str | None = None
    decision: bool = False


@dataclass(frozen=True)
class MasterStatus:
    """What a job's master reported last.

    Attributes:
        job: its name.
        state: "leading", "done" or "stopped"; "silent" where a report of a master that leads is old.
        endpoint: where it answers.
        term: how many masters the job has had.
        journal: where it keeps what it answers, in words.
        commands: that are journalled.
        time: wall clock of the report.
        age_s: of the report.
        datasets: with poisoned shards first, otherwise by name.
        events: the last ones, oldest first.
    """

    job: str
    state: str
    endpoint: str
    term: int | None
    journal: str
    commands: int | None
    time: float | None
    age_s: float | None
    datasets: tuple[DatasetStatus, ...]
    events: tuple[EventRow, ...]


@dataclass(frozen=True)
class JobPoint:
    """A job at a moment of its history.

    Attributes:
        t: wall clock.
        seconds: since the job began, by category: the difference of two points says where the time between them went.
        goodput: since the job began.
        samples_per_s: at that moment; None of times before the dashboard looked.
        steps_per_s: at that moment.
        world_size: ranks.
        units_per_s: of all datasets of its master.
        look: the look of the dashboard that added the point; not in the JSON.
    """

    t: float
    seconds: Mapping[str, float]
    goodput: float | None = None
    samples_per_s: float | None = None
    steps_per_s: float | None = None
    world_size: int | None = None
    units_per_s: float | None = None
    look: int = 0


@dataclass(frozen=True, kw_only=True)
class JobStatus(JobSummary):
    """A job: its summary, whose events are only the last ones, and what the dashboard adds.

    Attributes:
        history: Oldest first.
        master: What its master reported; None without one.
        wanted_workers: How many workers there should be; None if nothing says so.
        master_only: Whether no `edl run` takes part: all that is known is what the master reports.
    """

    history: tuple[JobPoint, ...] = ()
    master: MasterStatus | None = None
    wanted_workers: WantedCount | None = None
    master_only: bool = False


@dataclass(frozen=True)
class TeacherStatus:
    """A teacher of a service.

    Attributes:
        id: of the instance.
        endpoint: where it answers.
        model: that it serves.
        version: of the model.
        state: "ready", "draining", "lapsed" where its lease ran out, or what its load record says.
        rows_per_s: computed lately.
        queue_rows: that wait.
        compute_share: the part of its workers' time that computes.
        students: ids of those that said they ask it.
        rows: computed since it began.
        compute_s: spent computing since it began.
        workers: that compute side by side.
    """

    id: str
    endpoint: str
    model: str
    version: str
    state: str
    rows_per_s: float | None = None
    queue_rows: int | None = None
    compute_share: float | None = None
    students: tuple[str, ...] = ()
    rows: float | None = None
    compute_s: float | None = None
    workers: int | None = None


@dataclass(frozen=True)
class StudentStatus:
    """A student of a service.

    Attributes:
        id: of the reader.
        job: that it belongs to, empty for none.
        rows_per_s: asked lately.
        wait_share: the part of its time that it waits for labels.
        teachers: ids of those that it asks.
        rows: asked since it began.
        wait_s: waited since it began.
    """

    id: str
    job: str
    rows_per_s: float | None = None
    wait_share: float | None = None
    teachers: tuple[str, ...] = ()
    rows: float | None = None
    wait_s: float | None = None


@dataclass(frozen=True)
class ServicePoint:
    """A service at a moment of its history.

    Attributes:
        t: wall clock.
        rows_per_s: of all teachers.
        teachers: that are live.
        wanted: teachers.
        wait_share: the mean of the students' shares.
        look: the look of the dashboard that added the point; not in the JSON.
    """

    t: float
    rows_per_s: float | None = None
    teachers: int | None = None
    wanted: int | None = None
    wait_share: float | None = None
    look: int = 0


@dataclass(frozen=True)
class ServiceStatus:
    """A service: its teachers and students.

    Attributes:
        service: its name.
        teachers: by id; lapsed ones last.
        students: by id.
        wanted: how many teachers there should be, None where nothing says so.
        history: oldest first.
    """

    service: str
    teachers: tuple[TeacherStatus, ...]
    students: tuple[StudentStatus, ...]
    wanted: WantedCount | None = None
    history: tuple[ServicePoint, ...] = ()


@dataclass(frozen=True)
class UnreadableRecord:
    """A record that is left out.

    Attributes:
        key: in the Store, or the instance in the registry.
        reason: what is wrong with it.
    """

    key: str
    reason: str


@dataclass(frozen=True)
class DashboardState:
    """All that the page shows.

    Attributes:
        time: wall clock of this state.
        store: its URL, without secrets.
        stale: empty, or why the figures are old: the Store or the registry does not answer.
        looked: wall clock of the last look that found everything, None before the first.
        job: the only job shown, on the page of its master; None for all.
        version: of EDL.
        jobs: those that run first, then those that ended last.
        more_jobs: that ended before those, and are left out.
        services: by name.
        events: of all of them, newest last.
        unreadable: records that are left out.
        kubernetes: jobs and pools of a cluster; None where none is shown.
    """

    time: float
    store: str
    version: str
    stale: str = ""
    looked: float | None = None
    job: str | None = None
    jobs: tuple[JobStatus, ...] = ()
    more_jobs: int = 0
    services: tuple[ServiceStatus, ...] = ()
    events: tuple[EventRow, ...] = ()
    unreadable: tuple[UnreadableRecord, ...] = field(default=())
    kubernetes: KubernetesStatus | None = None


def as_json(value: Any, after_look: int = -1) -> Any:
    """Return dataclasses as what `json.dumps` takes: NaN and infinite numbers are None, as JSON has neither.

    Args:
        value: a dataclass of this module, or a part of it. Fields whose metadata say `"json": False` are left out.
        after_look: histories hold the points that looks after this one have added; -1 for all.
    """
    if isinstance(value, (JobPoint, ServicePoint)):
        return {
            name: as_json(item)
            for name, item in vars(value).items()
            if name != "look" and (item is not None or name == "goodput")
        }
    if is_dataclass(value):
        shown = (item.name for item in fields(value) if item.metadata.get("json", True))
        return {name: as_json(getattr(value, name), after_look) for name in shown}
    if isinstance(value, (list, tuple)):
        return [
            as_json(item, after_look)
            for item in value
            if not isinstance(item, (JobPoint, ServicePoint)) or item.look > after_look
        ]
    if isinstance(value, Mapping):
        return {str(name): as_json(item, after_look) for name, item in value.items()}
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value
