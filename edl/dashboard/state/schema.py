"""The state behind the page, `/api/state`, `edl status --json` and the metrics, as dataclasses.

Times are seconds since 1970, durations are seconds, shares are from 0 to 1; None means unknown. `as_json` returns JSON
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
    """How a member's last process ended; `message` is the end of its traceback, or else its last message."""

    cause: str
    exit_code: int | None
    message: str
    time: float | None
    node: str


@dataclass(frozen=True)
class KubernetesMember:
    """A member of a job or pool: a worker, a teacher or a master, across its pods.

    Attributes:
        pod: Its current pod; empty for none.
        state: "ready", "running", "starting", "unscheduled", "ending", "succeeded", "failed"; "waiting" without a pod,
            "unknown" if pods were not read.
        detail: Reason for the state.
        attempt: Number of its previous pods.
        failures: Number of failures, by cause.
        memory_factor: Factor by which the template's memory is multiplied after the member ran out of memory.
        not_before: Time before which the member gets no new pod.
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
        phase: "Pending", "Running", "Rejected", "Suspended", "Succeeded", "Failed" or "Deleting"; empty if no operator
            has handled it.
        job_id: Name of the job in the Store; for a pool, its service.
        store: URL of the Store, without secrets.
        ready: Number of working members.
        replicas: Number of members with a pod.
        wanted: Number of members wanted.
        scaling: "auto" or "external".
        progress: Percentage.
        remaining_s: Estimated time until the job is done.
        message: Reason for the phase.
        borrowed: Number of teachers beyond the minimum, which run on idle resources.
        queue: Kueue queue.
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
        """Return the condition of the given type; None if there is none."""
        return next((item for item in self.conditions if item.type == kind), None)


@dataclass(frozen=True)
class KubernetesStatus:
    """The jobs and pools in some namespaces, or in all namespaces if none is named.

    Attributes:
        stale: Why the figures are old: the API server does not respond, or refuses the requests; empty if they are
            current.
        looked: Time of the last complete read.
        jobs: Running jobs first, then ended jobs, latest first.
        more_jobs: Number of earlier ended jobs, which are left out.
    """

    namespaces: tuple[str, ...]
    stale: str = ""
    looked: float | None = None
    jobs: tuple[KubernetesWorkload, ...] = ()
    pools: tuple[KubernetesWorkload, ...] = ()
    more_jobs: int = 0


_OLD_S: Final = 60.0
"""Age after which a wanted count is old: masters write the count every 10 s. The page uses the same limit."""


@dataclass(frozen=True)
class WantedDecision:
    """A change of the wanted count at `time`."""

    time: float | None
    count: int | None
    reason: str


@dataclass(frozen=True)
class WantedCount:
    """The wanted number of teachers or workers.

    Attributes:
        now: The number that existed when the record was written.
        since: Time since which this count is wanted.
        time: Time of the record; if it is older than a minute, no master is deciding.
        decisions: The last decisions, oldest first.
    """

    count: int | None
    now: int | None
    reason: str
    since: float | None
    time: float | None = None
    decisions: tuple[WantedDecision, ...] = ()

    def is_old(self, now_s: float) -> bool:
        """Return whether the record is so old that no master is deciding."""
        return self.time is not None and now_s - self.time > _OLD_S


@dataclass(frozen=True)
class ShardFailure:
    """A failure of a shard: the reader that held its lease, and the reason, such as an expired lease."""

    holder: str
    reason: str
    time: float | None


@dataclass(frozen=True)
class PoisonedShard:
    """A shard (units `start` to `stop` - 1) that failed too often and is skipped until it is put back."""

    shard: int | None
    epoch: int | None
    start: int | None
    stop: int | None
    failures: tuple[ShardFailure, ...]


@dataclass(frozen=True)
class ShardHolder:
    """A reader of shards: its current leases, its units done, and the time since its last message."""

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
        epoch: The current epoch, counted from 0.
        epochs: Total number of epochs.
        units: Units per epoch.
        shards: Counts by state: "todo" and "doing" in this epoch, "done" and "poisoned" in all epochs so far.
        finished: Whether nothing is left to do.
        ended: Whether the number of units is final; for a growing source it is not.
        units_done: Units done in all epochs.
        eta_s: Time until the dataset is done at the current rate.
        poisoned: The first poisoned shards.
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
        kind: The kind of event, one word.
        text: What happened.
        cause: Why it happened.
        decision: Whether the event is a decision of EDL: a wanted count, an excluded host, or a poisoned shard.
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
        term: Number of masters that the job has had.
        journal: Where progress is stored.
        commands: Number of commands in the journal.
        time: Time of the report.
        datasets: Data sets, those with poisoned shards first, then by name.
        events: The last events, oldest first.
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
    """A point in a job's history.

    Attributes:
        t: Time.
        seconds: Time since the job began, by category: the difference between two points shows how the time between
            them was spent.
        goodput: Goodput since the job began.
        samples_per_s, steps_per_s: Rates at that moment; None for times before the dashboard read the job.
        world_size: Number of ranks.
        units_per_s: Rate over all datasets of the job's master.
        look: Number of the dashboard's read that added the point; not in the JSON.
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
    """A job: its summary with only the last events, and fields added by the dashboard.

    Attributes:
        history: Points, oldest first.
        master: Its master's report; None if there is no master.
        wanted_workers: The wanted number of workers; None if unknown.
        master_only: Whether the job has no `edl run`: only its master's report is known.
    """

    history: tuple[JobPoint, ...] = ()
    master: MasterStatus | None = None
    wanted_workers: WantedCount | None = None
    master_only: bool = False


@dataclass(frozen=True)
class TeacherStatus:
    """A teacher of a service.

    Attributes:
        state: "ready", "draining", "lapsed" if its lease expired, or the state in its load record.
        rows_per_s: Recent rows computed per second.
        queue_rows: Rows in its queue.
        compute_share: Share of its workers' time spent computing.
        students: Ids of its students.
        rows: Rows computed since it started.
        compute_s: Time spent computing since it started.
        workers: Number of batches that it computes concurrently.
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
    """A service's history at time `t`: totals over live teachers, and its students' mean share of time spent waiting.

    `look` is the number of the read that added the point; it is not in the JSON.
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
    """A record that is left out: its key in the Store or its instance in the registry, and the reason."""

    key: str
    reason: str


@dataclass(frozen=True)
class DashboardState:
    """The whole state of the page.

    Attributes:
        time: Time of this state.
        store: URL of the Store, without secrets.
        version: Version of EDL.
        stale: Why the figures are old: the Store or the registry does not respond; empty if they are current.
        looked: Time of the last complete read; None before the first.
        job: The only job shown; None for all.
        jobs: Running jobs first, then ended jobs, latest first.
        more_jobs: Number of earlier ended jobs, which are left out.
        services: Services by name.
        events: Events of all jobs and services, newest last.
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
    """Convert dataclasses for `json.dumps`. NaN and infinite numbers become None, since JSON has neither.

    Args:
        value: A dataclass of this module, or a part of it. Fields with metadata `"json": False` are left out.
        after_look: Histories contain only points added after the read with this number; -1 for all.

    Returns:
        Dicts, lists, strings, numbers, booleans and None.
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
