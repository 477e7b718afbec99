"""What is known of the jobs and pools of a cluster.

Wall clocks are seconds since 1970; None is for what is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["KubernetesCondition", "KubernetesMember", "KubernetesStatus", "KubernetesWorkload", "KubernetesMemberEnd"]


@dataclass(frozen=True)
class KubernetesCondition:
    """A condition of a resource.

    Attributes:
        type: "Accepted", "Running", ...
        status: "True", "False" or "Unknown".
        reason: a word.
        message: in words.
        since: wall clock of its last transition.
    """

    type: str
    status: str
    reason: str
    message: str
    since: float | None


@dataclass(frozen=True)
class KubernetesMemberEnd:
    """How the last process of a member ended.

    Attributes:
        cause: "user_error", "out_of_memory", "node_lost", ...
        exit_code: None where it left none.
        message: the end of its traceback, or what else it left.
        time: wall clock.
        node: on which it ran.
    """

    cause: str
    exit_code: int | None
    message: str
    time: float | None
    node: str


@dataclass(frozen=True)
class KubernetesMember:
    """A member of a job or pool: a worker, a teacher or a master, whichever pod it is in.

    Attributes:
        name: such as "worker-0".
        pod: its present pod; empty without.
        state: "ready", "running", "starting", "unscheduled", "ending", "succeeded", "failed"; "waiting" where it has
            no pod, "unknown" where pods were not asked for.
        detail: why it is so, in words.
        node: that its pod is on.
        attempt: the number in its pod's name, from 0: how many pods it has had before.
        failures: how often it failed, by cause.
        memory_factor: of the memory in the template that it gets, after it ran out of it; None where nothing says.
        not_before: wall clock before which it gets no new pod.
        last_end: how its last pod ended.
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
        namespace: that it is in.
        name: of the resource.
        phase: "Pending", "Running", "Suspended", "Succeeded" or "Failed"; "Rejected" where its spec cannot be,
            no member works and the operator goes on by no spec before; "Deleting"; empty where no operator has taken
            it up.
        job_id: what the Store calls the job; of a pool its service.
        store: URL of the Store, without secrets; empty where nothing says.
        ready: members that work.
        replicas: members that have a pod.
        wanted: members that there should be.
        min_replicas: of its spec.
        max_replicas: of its spec.
        scaling: "auto" or "external".
        suspended: by its spec.
        progress: percentage.
        remaining_s: until it is done, estimated.
        created: wall clock.
        started: wall clock.
        ended: wall clock.
        message: why it is in its phase.
        borrowed: teachers beyond the least, on what others leave idle.
        queue: that it waits in (Kueue); empty for none.
        conditions: in the operator's order.
        members: by role and index.
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
        """Return a condition; None where it is not there.

        Args:
            kind: its type.
        """
        return next((item for item in self.conditions if item.type == kind), None)


@dataclass(frozen=True)
class KubernetesStatus:
    """The jobs and pools of some namespaces, or of all.

    Attributes:
        namespaces: in which was looked; empty for all.
        stale: empty, or why the figures are old: the API server does not answer, or refuses.
        looked: wall clock of the last look that found everything, None before the first.
        jobs: those that go on first, then those that ended last.
        pools: by namespace and name.
        more_jobs: that ended before those, and are left out.
    """

    namespaces: tuple[str, ...]
    stale: str = ""
    looked: float | None = None
    jobs: tuple[KubernetesWorkload, ...] = ()
    pools: tuple[KubernetesWorkload, ...] = ()
    more_jobs: int = 0
