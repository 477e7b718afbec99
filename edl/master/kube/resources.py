"""`ElasticJob` and `TeacherPool` as frozen dataclasses, read from what the API server has, with reasons why not.

The API server checks most of it by the schema of the CRD. It is checked again, and what is wrong is collected and not
raised, since a cluster may have an older CRD, or one whose validation was taken out. Elsewhere: pods,
decisions, and calls of the API.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Literal

from edl.kube.objects import parse_time
from edl.kube.resource_types import ELASTIC_JOBS, TEACHER_POOLS, ResourceType
from edl.quoting import shown

_MOST_COUNT: Final = 2**31 - 1
"""Of format `int32`."""


@dataclass(frozen=True)
class SpecProblem:
    """Why a resource cannot be worked on.

    Attributes:
        message: names the value and the remedy.
    """

    reason: str
    message: str


class FieldReader:
    """Reads fields of an object, and collects what is wrong with them.

    Args:
        value: of the object; anything but an object is a problem.
        path: by which messages name it, such as `spec`.
        problems: to which what is wrong is added; None for a list of its own.
    """

    def __init__(self, value: object, path: str, problems: list[SpecProblem] | None = None) -> None:
        self.path = path
        self.problems: list[SpecProblem] = [] if problems is None else problems
        self._fields: Mapping[str, Any] = {}
        if isinstance(value, Mapping):
            self._fields = value
        else:
            self.refuse("InvalidField", "", value, "must be an object")

    def refuse(self, reason: str, name: str, value: object, what: str) -> None:
        """Add a problem."""
        where = f"{self.path}.{name}" if name else self.path
        given = "missing" if value is None else shown(repr(value))
        self.problems.append(SpecProblem(reason, f"{where} is {given}: {what}"))

    def has(self, name: str) -> bool:
        """Whether a field is there, and not null."""
        return self._fields.get(name) is not None

    def open_object(self, name: str) -> FieldReader:
        """Return a reader of an object within this object; a missing object is an empty one."""
        value = self._fields.get(name)
        return FieldReader({} if value is None else value, f"{self.path}.{name}", self.problems)

    def read_object(self, name: str) -> dict[str, Any]:
        """Return an object as it is; a missing object is an empty one."""
        value = self._fields.get(name)
        if value is None:
            return {}
        if isinstance(value, dict):
            return value
        self.refuse("InvalidField", name, value, "must be an object")
        return {}

    def read_object_list(self, name: str) -> list[FieldReader]:
        """Return readers of a list of objects; empty where it is missing."""
        value = self._fields.get(name)
        if value is None:
            return []
        if isinstance(value, list):
            path = f"{self.path}.{name}"
            return [FieldReader(part, f"{path}[{number}]", self.problems) for number, part in enumerate(value)]
        self.refuse("InvalidField", name, value, "must be a list of objects")
        return []

    def read_text(self, name: str, default: str = "") -> str:
        """Return a text."""
        value = self._fields.get(name)
        if value is None:
            return default
        if isinstance(value, str):
            return value
        self.refuse("InvalidField", name, value, "must be a string")
        return default

    def read_choice(self, name: str, default: str, choices: Sequence[str]) -> str:
        """Return a text that is one of a few."""
        value = self.read_text(name, default)
        if value in choices:
            return value
        self.refuse("InvalidField", name, value, f"must be {' or '.join(choices)}")
        return default

    def read_flag(self, name: str, default: bool = False) -> bool:
        """Return a truth value."""
        value = self._fields.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        self.refuse("InvalidField", name, value, "must be true or false")
        return default

    def read_count(self, name: str, default: int, least: int = 0, most: int = _MOST_COUNT) -> int:
        """Return a whole number."""
        found = self.read_optional_count(name, least, most)
        return default if found is None else found

    def read_optional_count(self, name: str, least: int = 0, most: int = _MOST_COUNT) -> int | None:
        """Return a whole number; None where it is missing, or is none."""
        value = self._fields.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            bounds = f"{least} or more" if most == _MOST_COUNT else f"{least} to {most}"
            self.refuse("InvalidField", name, value, f"must be a whole number, {bounds}")
            return None
        return value

    def read_texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts; empty where it is missing."""
        value = self._fields.get(name)
        if value is None:
            return ()
        if isinstance(value, list) and all(isinstance(part, str) for part in value):
            return tuple(value)
        self.refuse("InvalidField", name, value, 'must be a list of strings; put numbers into quotes, such as "0.1"')
        return ()

    def read_time_s(self, name: str) -> float | None:
        """Return a time of the API (RFC 3339) as seconds since 1970; None where it is missing."""
        value = self._fields.get(name)
        if value is None:
            return None
        try:
            return parse_time(str(value))
        except (ValueError, OverflowError):
            self.refuse("InvalidField", name, value, "must be a time such as 2026-01-31T12:00:00Z")
            return None


SCALING: Final = ("auto", "external")
MOST_MEMBERS: Final = 1000
"""Members of one resource. The status remembers each of them, and etcd takes 1.5 MB of an object; a plan takes memory
and time of the operator, which other resources wait for."""
_LONGEST_NAME: Final = 63
"""A label's value has at most 63 characters, and members carry the owner's name as a label."""
_DNS_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class MemberOwner:
    """A resource that owns members.

    Attributes:
        namespace: that it is in, as its members are.
        uid: of the resource; another resource of the same name has another.
        generation: of what was read: the API server counts changes of `spec`.
        created_s: when it was made, in seconds since 1970.
        min_replicas: members that it starts with, and is not shrunk below.
        replicas: what `/scale` wrote; None where nothing did, or the CRD's default, which is no more than any minimum.
            Where `scaling` is `auto` it decides nothing.
        scaling: who moves the number of members: EDL, or `/scale` alone.
        suspend: it has no members for now.
        grace_period_s: seconds that a member has to end.
        template: of its pods, as it was given.
        status: that was written last, as it was read.
    """

    resource_type: ClassVar[ResourceType] = ELASTIC_JOBS

    name: str
    namespace: str
    uid: str
    generation: int
    created_s: float
    min_replicas: int
    max_replicas: int
    deleting: bool = False
    replicas: int | None = None
    scaling: Literal["auto", "external"] = "auto"
    suspend: bool = False
    store: str = ""
    priority_class_name: str = ""
    queue: str = ""
    grace_period_s: int = 30
    template: Mapping[str, Any] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Its name in work queues and logs, as `kubectl` takes it: `elasticjobs/NAMESPACE/NAME`."""
        return f"{self.resource_type.plural}/{self.namespace}/{self.name}"


OwnerFields = dict[str, Any]
"""Arguments of `MemberOwner` that `read_owner` found."""


def read_owner(
    resource: Mapping[str, Any], spec: FieldReader, *, default_store: str, default_min: int, default_grace_period_s: int
) -> OwnerFields:
    """Read what all owners have."""
    metadata = FieldReader(resource.get("metadata"), "metadata", spec.problems)
    name = metadata.read_text("name")
    if len(name) > _LONGEST_NAME or not _DNS_NAME.fullmatch(name):
        metadata.refuse(
            "InvalidName",
            "name",
            name,
            f"choose a DNS name of at most {_LONGEST_NAME} characters: pods carry it as label",
        )
    least = spec.read_count("minReplicas", default_min, most=MOST_MEMBERS)
    most = spec.read_count("maxReplicas", max(least, 1), 1, MOST_MEMBERS)
    if least > most:
        spec.refuse(
            "MinAboveMax",
            "minReplicas",
            least,
            f"above spec.maxReplicas, {most}: lower it, or raise that",
        )
    replicas = spec.read_optional_count("replicas")
    if replicas == default_min:  # the CRD's default, without which `/scale` would be an error; counts as the minimum
        replicas = None
    return {
        "name": name,
        "namespace": metadata.read_text("namespace"),
        "uid": metadata.read_text("uid"),
        "generation": metadata.read_count("generation", 0),
        "created_s": metadata.read_time_s("creationTimestamp") or 0.0,
        "deleting": metadata.has("deletionTimestamp"),
        "min_replicas": least,
        "max_replicas": most,
        "replicas": replicas,
        "scaling": spec.read_choice("scaling", "auto", SCALING),
        "suspend": spec.read_flag("suspend"),
        "store": _lower_scheme(spec.read_text("store", default_store)),
        "priority_class_name": spec.read_text("priorityClassName"),
        "queue": spec.read_text("queue"),
        "grace_period_s": spec.read_count("gracePeriodSeconds", default_grace_period_s),
        "template": spec.read_object("template"),
        "status": resource.get("status") if isinstance(resource.get("status"), dict) else {},
    }


def check_template(spec: FieldReader, arguments: str) -> None:
    """Add what is wrong with the template of pods."""
    if not spec.has("template"):
        spec.refuse("NoTemplate", "template", None, "give a pod template whose first container has the image")
        return
    pod = spec.open_object("template").open_object("spec")
    containers = pod.read_object_list("containers")
    if not containers:
        pod.refuse("NoContainer", "containers", None, "give a container, with name and image: the member runs in it")
        return
    names = [container.read_text("name") for container in containers]
    member = containers[names.index("edl") if "edl" in names else 0]
    for container, name in zip(containers, names, strict=True):
        if not name or names.count(name) > 1:
            container.refuse("InvalidContainer", "name", name, "give each container a name of its own")
        if not container.read_text("image"):
            container.refuse("InvalidContainer", "image", None, "name the image that the container is made from")
    if member.has("args"):
        args = member.read_texts("args")
        member.refuse("ArgsInTemplate", "args", list(args), f"they are the operator's: write them to spec.{arguments}")


def _lower_scheme(url: str) -> str:
    """Return a URL whose scheme is spelled as the code compares it; `urlsplit` takes any case."""
    scheme, colon, rest = url.partition(":")
    return f"{scheme.lower()}{colon}{rest}"


_UID_CHARS: Final = 8
"""Characters of a UID in a job's id: 16**8 values, enough to tell jobs of one name apart that follow one another."""


@dataclass(frozen=True)
class MasterSpec:
    """The job's master, a pod of its own.

    Attributes:
        args: what follows `edl master JOB` in its command line.
    """

    enabled: bool = False
    args: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ElasticJob(MemberOwner):
    """A training job of 1 to many workers.

    Attributes:
        run: what follows `edl run` in a worker's command line: options, the script, and its own arguments.
        checkpoint: URL where the job's state is stored; empty for none.
        active_deadline_s: seconds after its start when it fails; None for never.
        ttl_seconds_after_finished: seconds after its end when it is deleted; None for never.
        ignored_edits: what the spec says otherwise than the run that goes on has it, and what to do; empty for nothing.
    """

    resource_type: ClassVar[ResourceType] = ELASTIC_JOBS

    run: tuple[str, ...]
    checkpoint: str = ""
    active_deadline_s: int | None = None
    ttl_seconds_after_finished: int | None = None
    master: MasterSpec = field(default_factory=MasterSpec)
    ignored_edits: str = ""

    @property
    def job_id(self) -> str:
        """What `edl status` and the store call the job: two jobs of one name that follow one another are not one."""
        return f"{self.name}-{self.uid[:_UID_CHARS]}"

    @property
    def started(self) -> bool:
        """Whether a run of it goes on, as its status says; none does while it is suspended."""
        return bool(self.status.get("startTime"))

    def pin_run(self) -> ElasticJob:
        """Return the job with the store and the checkpoint that its run began with, as its status has them.

        Workers that meet in another store would be a second world of the same job, and write to the same checkpoint.
        """
        store, checkpoint = self.status.get("store"), self.status.get("checkpoint")
        store = store if isinstance(store, str) and store else self.store
        checkpoint = checkpoint if isinstance(checkpoint, str) else self.checkpoint
        edits = []
        if self.store != store:
            edits.append(f"store {shown(self.store or 'none')} in place of {shown(store)}")
        if self.checkpoint != checkpoint:
            edits.append(f"checkpoint {shown(self.checkpoint or 'none')} in place of {shown(checkpoint or 'none')}")
        if not edits:
            return self
        text = f"not taken while pods of the job run: {', '.join(edits)}; suspend the job, and resume it without pods"
        return replace(self, store=store, checkpoint=checkpoint, ignored_edits=text)


def parse_elastic_job(resource: Mapping[str, Any], default_store: str = "") -> ElasticJob | tuple[SpecProblem, ...]:
    """Return the job of a resource; or, if it cannot be worked on, why not, first what to mend first."""
    spec = FieldReader(resource.get("spec"), "spec")
    common = read_owner(resource, spec, default_store=default_store, default_min=1, default_grace_period_s=30)
    run = spec.read_texts("run")
    if not run:
        spec.refuse("EmptyRun", "run", list(run), 'write what follows `edl run`, such as ["train.py", "--lr", "0.1"]')
    if common["min_replicas"] < 1:
        spec.refuse("InvalidField", "minReplicas", common["min_replicas"], "a job needs 1 worker or more")
    if not common["store"] and not (common["status"].get("startTime") and common["status"].get("store")):
        spec.refuse("NoStore", "store", None, "name the job's store, or start the operator with --store")
    master = spec.open_object("master")
    check_template(spec, "run")
    job = ElasticJob(
        **common,
        run=run,
        checkpoint=spec.read_text("checkpoint"),
        active_deadline_s=spec.read_optional_count("activeDeadlineSeconds", 1),
        ttl_seconds_after_finished=spec.read_optional_count("ttlSecondsAfterFinished"),
        master=MasterSpec(master.read_flag("enabled"), master.read_texts("args")),
    )
    return tuple(spec.problems) or (job.pin_run() if job.started else job)


_TARGET_FIELDS: Final = {
    "apiVersion": (re.compile(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?v[0-9][a-z0-9]*"), "apps/v1"),
    "kind": (re.compile(r"[A-Za-z][A-Za-z0-9]*"), "Deployment"),
    "name": (re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?"), "triton"),
}
"""What each may be, since they become parts of a path of the API server; and an example. The CRD has the same."""


@dataclass(frozen=True)
class ScaleTargetRef:
    """What a pool scales in place of pods of its own; only its `/scale` is touched.

    Attributes:
        api_version: of the target, such as `apps/v1`.
        kind: of the target, such as `Deployment`.
        name: of the target, in the pool's namespace.
    """

    api_version: str
    kind: str
    name: str


@dataclass(frozen=True, kw_only=True)
class TeacherPool(MemberOwner):
    """Teachers of a service.

    Attributes:
        serve: what follows `edl serve` in a teacher's command line.
        probe_s: seconds that a pending teacher is left to be scheduled, where it is not known what is idle.
        scale_target_ref: what is scaled in place of pods of the pool; None for pods of its own.
    """

    resource_type: ClassVar[ResourceType] = TEACHER_POOLS

    service: str
    serve: tuple[str, ...] = ()
    priority_class_name: str = "edl-teacher"
    grace_period_s: int = 10
    probe_s: int = 20
    scale_target_ref: ScaleTargetRef | None = None


def parse_teacher_pool(resource: Mapping[str, Any], default_store: str = "") -> TeacherPool | tuple[SpecProblem, ...]:
    """Return the pool of a resource; or, if it cannot be worked on, why not, first what to mend first."""
    spec = FieldReader(resource.get("spec"), "spec")
    common = read_owner(resource, spec, default_store=default_store, default_min=0, default_grace_period_s=10)
    common["priority_class_name"] = common["priority_class_name"] or "edl-teacher"
    serve = spec.read_texts("serve")
    target = None
    if spec.has("scaleTargetRef"):
        target = _read_target(spec)
        for name in ("template", "serve"):
            if spec.has(name):
                spec.refuse(
                    "TemplateBesideTarget", name, None, "spec.scaleTargetRef names pods that exist: remove either"
                )
    else:
        if not serve:
            spec.refuse("EmptyServe", "serve", list(serve), 'write what follows `edl serve`, such as ["model.py:load"]')
        check_template(spec, "serve")
    if not common["store"]:
        spec.refuse("NoStore", "store", None, "name the pool's store, or start the operator with --store")
    pool = TeacherPool(
        **common,
        service=spec.read_text("service") or common["name"],
        serve=serve,
        probe_s=spec.read_count("probeSeconds", 20, 1),
        scale_target_ref=target,
    )
    return tuple(spec.problems) or pool


def _read_target(spec: FieldReader) -> ScaleTargetRef:
    target = spec.open_object("scaleTargetRef")
    for name, (pattern, example) in _TARGET_FIELDS.items():
        value = target.read_text(name)
        if not pattern.fullmatch(value):
            target.refuse("InvalidScaleTarget", name, value or None, f"name it, such as {example}")
    return ScaleTargetRef(target.read_text("apiVersion"), target.read_text("kind"), target.read_text("name"))
