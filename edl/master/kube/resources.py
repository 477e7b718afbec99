"""Parses `ElasticJob` and `TeacherPool` objects into frozen dataclasses, or returns all reasons why they are refused.

Types and ranges are checked here although the CRD's schema also checks them: `edl submit` can show the messages from
here before it writes anything, and a cluster may have an older CRD.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Literal, TypeVar
from urllib.parse import urlsplit

from edl.discovery.store_url import find_mistake, identify_store
from edl.kube.objects import parse_quantity, read_time
from edl.kube.resource_types import ELASTIC_JOBS, TEACHER_POOLS, ResourceType
from edl.quoting import did_you_mean, quote, shown

T = TypeVar("T")

_MOST_COUNT: Final = 2**31 - 1
_EXPECTED: Final[Mapping[type, str]] = {
    str: "must be a string",
    bool: "must be true or false",
    dict: "must be an object",
}


@dataclass(frozen=True)
class SpecProblem:
    """Why a resource is refused; `message` states the value and the remedy."""

    reason: str
    message: str


class FieldReader:
    """Reads fields of an object, and collects their problems. `path` denotes the object in messages, such as `spec`."""

    def __init__(self, value: object, path: str, problems: list[SpecProblem] | None = None) -> None:
        self.path = path
        self.problems: list[SpecProblem] = [] if problems is None else problems
        self._fields: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
        self._known: set[str] = set()
        if not isinstance(value, Mapping):
            self.refuse("InvalidField", "", value, _EXPECTED[dict])

    def refuse(self, reason: str, name: str, value: object, what: str) -> None:
        """Add a problem with a field; an empty name means the object itself."""
        where = f"{self.path}.{name}" if name else self.path
        given = "missing" if value is None else shown(repr(value))
        self.problems.append(SpecProblem(reason, f"{where} is {given}: {what}"))

    def refuse_unknown(self) -> None:
        """Add a problem for each field that was not read: an API server drops such a field without an error."""
        for name in (name for name in self._fields if name not in self._known):
            plain = str(name).replace("_", "").replace("-", "")
            hint = did_you_mean(plain, self._known) or f"; known fields: {', '.join(sorted(self._known))}"
            text = f"{quote(f'{self.path}.{name}')} is an unknown field, and would be dropped{hint}"
            self.problems.append(SpecProblem("InvalidField", text))

    def _get(self, name: str) -> Any:
        self._known.add(name)
        return self._fields.get(name)

    def has(self, name: str) -> bool:
        return self._get(name) is not None

    def read(self, name: str, default: T) -> T:
        """Return a field of the default's type; the default if it is missing or invalid."""
        value = self._get(name)
        if value is None or type(value) is type(default):
            return default if value is None else value
        self.refuse("InvalidField", name, value, _EXPECTED[type(default)])
        return default

    def read_count(self, name: str, default: T, least: int = 0, most: int = _MOST_COUNT) -> int | T:
        """Return a whole number; the default if it is missing or invalid."""
        value = self._get(name)
        if value is None or (type(value) is int and least <= value <= most):
            return default if value is None else value
        bounds = f"{least} or more" if most == _MOST_COUNT else f"{least} to {most}"
        self.refuse("InvalidField", name, value, f"must be a whole number, {bounds}")
        return default

    def read_texts(self, name: str) -> tuple[str, ...]:
        """Return a list of strings; empty if it is missing or invalid."""
        value = self._get(name) or []
        if isinstance(value, list) and all(isinstance(part, str) for part in value):
            return tuple(value)
        self.refuse("InvalidField", name, value, 'must be a list of strings; put numbers into quotes, such as "0.1"')
        return ()

    def check_quantities(self) -> None:
        """Add a problem for each field that is not a quantity."""
        for name, value in self._fields.items():
            try:
                parse_quantity(0 if value is None else value)
            except ValueError:
                self.refuse("InvalidField", name, value, "must be a quantity, such as 2, 500m or 16Gi")

    def open(self, name: str) -> FieldReader:
        """Return a reader of a nested object; a missing object counts as empty."""
        value = self._get(name)
        return FieldReader({} if value is None else value, f"{self.path}.{name}", self.problems)

    def open_list(self, name: str) -> list[FieldReader]:
        """Return readers of a list of objects; empty if it is missing or invalid."""
        value = self._get(name) or []
        if isinstance(value, list):
            path = f"{self.path}.{name}"
            return [FieldReader(part, f"{path}[{number}]", self.problems) for number, part in enumerate(value)]
        self.refuse("InvalidField", name, value, "must be a list of objects")
        return []


MOST_MEMBERS: Final = 1000  # the status has a record of each, and etcd limits objects to 1.5 MB
_LONGEST_NAME: Final = 63  # characters of a label's value: members carry the owner's name as a label
_DNS_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class MemberOwner:
    """A resource that owns members.

    Attributes:
        created_s: Unix time of its creation.
        min_replicas: number of members that the resource starts with, and below which it never shrinks.
        replicas: the value from `/scale`, which is ignored if `scaling` is `auto`; None if it is unset or is the
            default.
        scaling: `auto` if EDL decides the number of members, `external` if only `/scale` does.
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
        """The resource's name in work queues and logs, such as `elasticjobs/NAMESPACE/NAME`."""
        return f"{self.resource_type.plural}/{self.namespace}/{self.name}"


def _read_owner(
    resource: Mapping[str, Any], spec: FieldReader, *, default_store: str, default_min: int, default_grace_period_s: int
) -> dict[str, Any]:
    """Read an owner's fields; of its metadata only the name is checked, because the API server sets the rest."""
    found = resource.get("metadata")
    metadata: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    name = str(metadata.get("name") or "")
    if len(name) > _LONGEST_NAME or not _DNS_NAME.fullmatch(name):
        what = f"choose a DNS name of at most {_LONGEST_NAME} characters: pods carry it as a label"
        FieldReader({}, "metadata", spec.problems).refuse("InvalidName", "name", name, what)
    least = spec.read_count("minReplicas", default_min, most=MOST_MEMBERS)
    most = spec.read_count("maxReplicas", max(least, 1), 1, MOST_MEMBERS)
    if least > most:
        spec.refuse(
            "MinAboveMax",
            "minReplicas",
            least,
            f"above spec.maxReplicas ({most}): lower this field, or raise spec.maxReplicas",
        )
    replicas = spec.read_count("replicas", None)
    if replicas == default_min:  # the CRD's default, without which `/scale` would fail; counts as the minimum
        replicas = None
    scaling = spec.read("scaling", "auto")
    if scaling not in ("auto", "external"):
        spec.refuse("InvalidField", "scaling", scaling, "must be auto or external")
    scheme, colon, rest = spec.read("store", default_store).partition(":")
    status = resource.get("status")
    return {
        "name": name,
        "namespace": str(metadata.get("namespace") or ""),
        "uid": str(metadata.get("uid") or ""),
        "generation": metadata.get("generation") or 0,
        "created_s": read_time(metadata.get("creationTimestamp")) or 0.0,
        "deleting": metadata.get("deletionTimestamp") is not None,
        "min_replicas": least,
        "max_replicas": most,
        "replicas": replicas,
        "scaling": scaling,
        "suspend": spec.read("suspend", False),
        "store": f"{scheme.lower()}{colon}{rest}",  # as the code compares it; `urlsplit` accepts any case
        "priority_class_name": spec.read("priorityClassName", ""),
        "queue": spec.read("queue", ""),
        "grace_period_s": spec.read_count("gracePeriodSeconds", default_grace_period_s),
        "template": spec.read("template", dict[str, Any]()),
        "status": status if isinstance(status, dict) else {},
    }


_STORES: Final = "name a server that all pods reach, such as edl://edl-store.edl:29400, consul://HOST or etcd://HOST"


def find_store_problem(store: str, own: str) -> SpecProblem | None:
    """Return why pods cannot meet in `store`; None if they can. `own` is the operator's store.

    Each pod would have its own `sqlite:` file, and train alone. Only the operator's own store may be such a file, for a
    test on one machine.
    """
    if not store:
        return SpecProblem("NoStore", "spec.store is missing: name a store, or start the operator with --store")
    scheme, _, rest = store.partition("?")[0].partition("//")
    named = shown(repr(f"{scheme}//{rest.rpartition('@')[2]}" if rest else scheme))  # without what may be a token
    if mistake := find_mistake(store):
        return SpecProblem("InvalidField", f"spec.store is {named}: {mistake}: {_STORES}")
    if urlsplit(store).scheme == "sqlite" and identify_store(store) != identify_store(own):
        reason = f"spec.store is {named}: a file, which pods cannot share: each pod would have its own"
        return SpecProblem("StoreNotShared", f"{reason}: omit it to use the operator's own store, or {_STORES}")
    return None


def _check_template(spec: FieldReader, arguments: str, strict: bool) -> None:
    """Check what EDL needs of a template; with `strict`, also quantities, which otherwise the API server refuses."""
    if not spec.has("template"):
        spec.refuse("NoTemplate", "template", None, "add a pod template whose first container has the image")
        return
    pod = spec.open("template").open("spec")
    containers = pod.open_list("containers")
    if not containers:
        pod.refuse("NoContainer", "containers", None, "add a container with a name and an image: the member runs in it")
        return
    names = [container.read("name", "") for container in containers]
    member = containers[names.index("edl") if "edl" in names else 0]
    for container, name in zip(containers, names, strict=True):
        if not name or names.count(name) > 1:
            container.refuse("InvalidContainer", "name", name, "give each container a unique name")
        if not container.read("image", ""):
            container.refuse("InvalidContainer", "image", None, "set the container's image")
        if strict:
            resources = container.open("resources")
            for amounts in (resources.open("limits"), resources.open("requests")):
                amounts.check_quantities()
    if member.has("args"):
        args = list(member.read_texts("args"))
        member.refuse(
            "ArgsInTemplate", "args", args, f"the operator sets this field: write arguments to spec.{arguments} instead"
        )


_UID_CHARS: Final = 8  # of a UID in a job's id: enough to distinguish successive jobs of the same name


@dataclass(frozen=True)
class MasterSpec:
    """The job's master, in a separate pod; `args` follow `edl master JOB` in its command line."""

    enabled: bool = False
    args: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ElasticJob(MemberOwner):
    """A training job of 1 to many workers.

    Attributes:
        run: arguments after `edl run` in a worker's command line: options, the script, and the script's arguments.
        ignored_edits: edits of the spec that the present run ignores, and the remedy; empty for none.
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
        """The job's id in `edl status` and the store; successive jobs of the same name have different ids."""
        return f"{self.name}-{self.uid[:_UID_CHARS]}"

    @property
    def started(self) -> bool:
        """Whether the job's status says that a run has started; a suspended job has no run."""
        return bool(self.status.get("startTime"))

    def pin_run(self, problem: SpecProblem | None = None) -> ElasticJob:
        """Return the job with the store and checkpoint with which its run started, as its status records them.

        Workers that meet in a different store would form a second group, which writes to the same checkpoint. `problem`
        is why the store in the spec could not be used for a later run either.
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
        remedy = "suspend the job, and resume it when it has no pods"
        if problem is not None and self.store and self.store != store:
            remedy = problem.message
        text = f"not applied while pods of the job run: {', '.join(edits)}; {remedy}"
        return replace(self, store=store, checkpoint=checkpoint, ignored_edits=text)


def parse_elastic_job(
    resource: Mapping[str, Any], default_store: str = "", *, strict: bool = False
) -> ElasticJob | tuple[SpecProblem, ...]:
    """Parse an ElasticJob; return it, or the reasons why it is refused, the most important first.

    With `strict`, unknown fields and amounts that are not quantities are problems. An operator ignores unknown fields,
    which a newer version may have written, and the API server tells it about wrong amounts.
    """
    spec = FieldReader(resource.get("spec"), "spec")
    common = _read_owner(resource, spec, default_store=default_store, default_min=1, default_grace_period_s=30)
    run = spec.read_texts("run")
    if not run:
        spec.refuse("EmptyRun", "run", list(run), 'set arguments of `edl run`, such as ["train.py", "--lr", "0.1"]')
    if common["min_replicas"] < 1:
        spec.refuse("InvalidField", "minReplicas", common["min_replicas"], "a job needs 1 worker or more")
    problem = find_store_problem(common["store"], default_store)
    if problem is not None and not (common["status"].get("startTime") and common["status"].get("store")):
        spec.problems.append(problem)
    master = spec.open("master")
    _check_template(spec, "run", strict)
    job = ElasticJob(
        **common,
        run=run,
        checkpoint=spec.read("checkpoint", ""),
        active_deadline_s=spec.read_count("activeDeadlineSeconds", None, 1),
        ttl_seconds_after_finished=spec.read_count("ttlSecondsAfterFinished", None),
        master=MasterSpec(master.read("enabled", False), master.read_texts("args")),
    )
    if strict:
        spec.refuse_unknown()
        master.refuse_unknown()
    return tuple(spec.problems) or (job.pin_run(problem) if job.started else job)


@dataclass(frozen=True)
class ScaleTargetRef:
    """The object that a pool scales instead of its own pods; only its `/scale` is changed."""

    api_version: str
    kind: str
    name: str


@dataclass(frozen=True, kw_only=True)
class TeacherPool(MemberOwner):
    """Teachers of a service.

    Attributes:
        serve: arguments after `edl serve` in a teacher's command line.
        probe_s: seconds that a pending teacher above the minimum may wait for a node.
    """

    resource_type: ClassVar[ResourceType] = TEACHER_POOLS

    service: str
    serve: tuple[str, ...] = ()
    priority_class_name: str = "edl-teacher"
    grace_period_s: int = 10
    probe_s: int = 20
    scale_target_ref: ScaleTargetRef | None = None


def parse_teacher_pool(
    resource: Mapping[str, Any], default_store: str = "", *, strict: bool = False
) -> TeacherPool | tuple[SpecProblem, ...]:
    """Parse a TeacherPool in the same way as `parse_elastic_job` parses a job."""
    spec = FieldReader(resource.get("spec"), "spec")
    common = _read_owner(resource, spec, default_store=default_store, default_min=0, default_grace_period_s=10)
    common["priority_class_name"] = common["priority_class_name"] or "edl-teacher"
    serve = spec.read_texts("serve")
    target = None
    if spec.has("scaleTargetRef"):
        target = _read_target(spec, strict)
        for name in ("template", "serve"):
            if spec.has(name):
                what = f"spec.scaleTargetRef selects existing pods: remove spec.{name} or spec.scaleTargetRef"
                spec.problems.append(SpecProblem("TemplateBesideTarget", what))
    else:
        if not serve:
            spec.refuse("EmptyServe", "serve", list(serve), 'set arguments of `edl serve`, such as ["model.py:load"]')
        _check_template(spec, "serve", strict)
    if problem := find_store_problem(common["store"], default_store):
        spec.problems.append(problem)
    pool = TeacherPool(
        **common,
        service=spec.read("service", "") or common["name"],
        serve=serve,
        probe_s=spec.read_count("probeSeconds", 20, 1),
        scale_target_ref=target,
    )
    if strict:
        spec.refuse_unknown()
    return tuple(spec.problems) or pool


def _read_target(spec: FieldReader, strict: bool) -> ScaleTargetRef:
    """Read `scaleTargetRef`; `KubeClient` refuses names that would lead to a different path of the API."""
    target = spec.open("scaleTargetRef")
    values = {name: target.read(name, "") for name in ("apiVersion", "kind", "name")}
    for name, example in zip(values, ("apps/v1", "Deployment", "triton"), strict=True):
        if not values[name]:
            target.refuse("InvalidScaleTarget", name, None, f"set it, for example to {example}")
    if strict:
        target.refuse_unknown()
    return ScaleTargetRef(*values.values())
