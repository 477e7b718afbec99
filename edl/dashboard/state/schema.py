"""The state behind the page, `/api/state`, `edl status --json` and the metrics, as dataclasses.

Wall clocks are seconds since 1970, durations seconds, shares from 0 to 1; None means unknown. `as_json` makes the JSON,
with the same names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

from edl.collective.goodput import JobSummary
from edl.load_reporting import StudentRate


@dataclass(frozen=True)
class KubernetesCondition:
    """A condition of a resource, with the time of its last transition."""

    type: str
    status: str
    reason: str
    message: str
    since: float | None


@dataclass(frozen=True)
class KubernetesMemberEnd:
    """How the last process of a member ended; `message` is the end of its traceback, or what else it left."""

    cause: str
    exit_code: int | None
    message: str
    time: float | None
    node: str


@dataclass(frozen=True)
class KubernetesMember:
    """A member of a job or pool: a worker, a teacher or a master, in whichever pod it is.

    Attributes:
        pod: Its present pod; empty without.
        state: "ready", "running", "starting", "unscheduled", "ending", "succeeded", "failed"; "waiting" without a pod,
            "unknown" if pods were not asked for.
        detail: Why it is so.
        attempt: How many pods it has had before.
        failures: How often it failed, by cause.
        memory_factor: Factor on the template's memory, after it ran out of it.
        not_before: Time before which it gets no new pod.
    """

    name: str
    pod: str
    state: str
    detail: str
    node: str
    attempt: int | None
    failures: Mapping[str, int]
    memory_factor: float | None
    not_before: float | None
    last_end: KubernetesMemberEnd | None


@dataclass(frozen=True)
class KubernetesWorkload:
    """An ElasticJob or a TeacherPool.

    Attributes:
        kind: "job" or "pool".
        phase: "Pending", "Running", "Suspended", "Succeeded", "Failed" or "Deleting"; "Rejected" if its spec cannot be
            used and no member works; empty if no operator has looked at it.
        job_id: The Store's name of the job; of a pool, its service.
        store: URL of the Store, without secrets.
        ready: Members that work.
        replicas: Members that have a pod.
        wanted: Members that there should be.
        scaling: "auto" or "external".
        progress: Percentage.
        remaining_s: Estimated time until it is done.
        message: Why it is in its phase.
        borrowed: Teachers beyond the minimum, on what others leave idle.
        queue: Queue of Kueue.
        members: Members by role and index.
    """

    kind: str
    namespace: str
    name: str
    phase: str
    job_id: str
    store: str
    ready: int | None
    replicas: int | None
    wanted: int | None
    min_replicas: int | None
    max_replicas: int | None
    scaling: str
    suspended: bool
    progress: int | None
    remaining_s: float | None
    created: float | None
    started: float | None
    ended: float | None
    message: str
    borrowed: int | None
    queue: str
    conditions: tuple[KubernetesCondition, ...]
    members: tuple[KubernetesMember, ...]

    def condition(self, kind: str) -> KubernetesCondition | None:
        """Return a condition; None without one."""
        return next((item for item in self.conditions if item.type == kind), None)


@dataclass(frozen=True)
class KubernetesStatus:
    """The jobs and pools of some namespaces, or (without a name) of all.

    Attributes:
        stale: Why the figures are old: the API server does not answer, or refuses; empty if they are not.
        looked: Time of the last look that found everything.
        jobs: Running jobs first, then those that ended last.
        more_jobs: How many jobs ended before those, and are left out.
    """

    namespaces: tuple[str, ...]
    stale: str = ""
    looked: float | None = None
    jobs: tuple[KubernetesWorkload, ...] = ()
    pools: tuple[KubernetesWorkload, ...] = ()
    more_jobs: int = 0


_OLD_S: Final = 60.0
"""Age from which a wanted count is old: masters that decide write it every 10 s. The page has the same bound."""


@dataclass(frozen=True)
class WantedDecision:
    """From `time` on, another count was wanted."""

    time: float | None
    count: int | None
    reason: str


@dataclass(frozen=True)
class WantedCount:
    """How many teachers or workers there should be.

    Attributes:
        now: How many there are.
        since: Time since which this count is wanted.
        time: Time of the record; if it is older than a minute, no master decides at present.
        decisions: The last ones, oldest first.
    """

    count: int | None
    now: int | None
    reason: str
    since: float | None
    time: float | None = None
    decisions: tuple[WantedDecision, ...] = ()

    def age_s(self, now_s: float) -> float | None:
        """Return how long ago it was written; None if that is unknown."""
        return None if self.time is None else max(0.0, now_s - self.time)

    def is_old(self, now_s: float) -> bool:
        """Return whether no master decides at present."""
        return (self.age_s(now_s) or 0.0) > _OLD_S


@dataclass(frozen=True)
class ShardFailure:
    """A failure of a shard: which reader had its lease, and its reason, or that the lease expired."""

    holder: str
    reason: str
    time: float | None


@dataclass(frozen=True)
class PoisonedShard:
    """A shard, of units `start` to `stop` - 1, that failed too often and is left alone until it is put back."""

    shard: int | None
    epoch: int | None
    start: int | None
    stop: int | None
    failures: tuple[ShardFailure, ...]


@dataclass(frozen=True)
class ShardHolder:
    """A reader of shards: the shards that it has now, what it has done, and the time since its last word."""

    holder: str
    leases: int | None
    units_done: int | None
    units_per_s: float | None
    seen_s: float | None


@dataclass(frozen=True)
class DatasetStatus:
    """A dataset of a master.

    Attributes:
        kind: "range", "lines", "parquet", ...
        epoch: The present epoch, from 0.
        epochs: How many there will be.
        units: Units of an epoch.
        shards: Counts by state: "todo" and "doing" in this epoch, "done" and "poisoned" in all epochs until now.
        finished: Whether nothing is left to do.
        ended: Whether the number of units is final; that of a growing source is not.
        units_done: Units done in all epochs.
        eta_s: Time until the dataset is done at this rate.
        poisoned: The first of the poisoned shards.
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
    """An event of a job, a master or a service in the merged list.

    Attributes:
        kind: A word.
        text: What happened.
        cause: Why.
        decision: Whether EDL decided it: a wanted count, a host left out, a poisoned shard.
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
    """The last report of a job's master.

    Attributes:
        state: "leading", "done" or "stopped"; "silent" if the report of a leading master is old.
        term: How many masters the job has had.
        journal: Where progress is kept.
        commands: How many commands are journalled.
        time: Time of the report.
        datasets: Those with poisoned shards first, otherwise by name.
        events: The last ones, oldest first.
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
        t: Time.
        seconds: Time since the job began, by category: the difference of two points says where the time between them
            went.
        goodput: Goodput since the job began.
        samples_per_s, steps_per_s: Rates at that moment; None for times before the dashboard looked.
        world_size: Ranks.
        units_per_s: Rate of all datasets of its master.
        look: The look of the dashboard that added the point; not in the JSON.
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
        state: "ready", "draining", "lapsed" if its lease ran out, or what its load record says.
        rows_per_s: Rows computed lately.
        queue_rows: Rows that wait.
        compute_share: Share of its workers' time that computes.
        students: Ids of the students that ask it.
        rows: Rows computed since it began.
        compute_s: Time spent computing since it began.
        workers: Batches that it computes at the same time.
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
class ServicePoint:
    """A service at time `t` of its history: all its live teachers, and the mean of its students' waiting shares.

    `look` is the number of the look that added the point; it is not in the JSON.
    """

    t: float
    rows_per_s: float | None = None
    teachers: int | None = None
    wanted: int | None = None
    wait_share: float | None = None
    look: int = 0


@dataclass(frozen=True)
class ServiceStatus:
    """A service: its teachers, lapsed ones last, and its students, by id; `history` is oldest first."""

    service: str
    teachers: tuple[TeacherStatus, ...]
    students: tuple[StudentRate, ...]
    wanted: WantedCount | None = None
    history: tuple[ServicePoint, ...] = ()


@dataclass(frozen=True)
class UnreadableRecord:
    """A record that is left out: its key in the Store, or its instance in the registry, and what is wrong with it."""

    key: str
    reason: str


@dataclass(frozen=True)
class DashboardState:
    """All that the page shows.

    Attributes:
        time: Time of this state.
        store: URL of the Store, without secrets.
        version: Version of EDL.
        stale: Why the figures are old: the Store or the registry does not answer; empty if they are not.
        looked: Time of the last look that found everything; None before the first.
        job: The only job shown, on the page of its master; None for all.
        jobs: Running jobs first, then those that ended last.
        more_jobs: How many jobs ended before those, and are left out.
        services: Services by name.
        events: Events of all of them, newest last.
        unreadable: Records that are left out.
        kubernetes: Jobs and pools of a cluster; None if none is shown.
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
    unreadable: tuple[UnreadableRecord, ...] = ()
    kubernetes: KubernetesStatus | None = None


def as_json(value: Any, after_look: int = -1) -> Any:
    """Return dataclasses as what `json.dumps` takes: NaN and infinite numbers are None, as JSON has neither.

    Args:
        value: A dataclass of this module, or a part of it. Fields whose metadata say `"json": False` are left out.
        after_look: Histories have the points that looks after this one added; -1 for all.
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
