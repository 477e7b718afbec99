"""What `ElasticJob` and `TeacherPool` have in common: both own members, and both are scaled alike."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal

from edl.kube.resource_types import ELASTIC_JOBS, ResourceType
from edl.master.kube.resources.fields import FieldReader

__all__ = ["MOST_MEMBERS", "MemberOwner", "OwnerFields", "check_template", "read_owner"]

SCALING: Final = ("auto", "external")
MOST_MEMBERS: Final = 1000
"""Of one resource. The status remembers each of them, and etcd takes 1.5 MB of an object; what is planned at once takes
memory and time of the operator, which others wait for."""
_LONGEST_NAME: Final = 63
"""A label's value has at most 63 characters, and members carry the owner's name as a label."""
_DNS_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class MemberOwner:
    """A resource that owns members.

    Attributes:
        name: of the resource.
        namespace: that it is in, as its members are.
        uid: of the resource; another resource of the same name has another.
        resource_version: of what was read.
        generation: of what was read: the API server counts changes of `spec`.
        created_s: when it was made, in seconds since 1970.
        deleting: it is being deleted.
        labels: of the resource.
        annotations: of the resource.
        min_replicas: members that it starts with, and is not shrunk below.
        max_replicas: members that it may have.
        replicas: what `/scale` wrote; None where nothing did, or the CRD's default, which is no more than any minimum.
            Where `scaling` is `auto` it decides nothing.
        scaling: who moves the number of members: EDL, or `/scale` alone.
        suspend: it has no members for now.
        store: URL of discovery.
        priority_class_name: of its members.
        queue: of Kueue; empty for none.
        grace_period_s: seconds that a member has to end.
        template: of its pods, as it was given.
        status: that was written last, as it was read.
    """

    resource_type: ClassVar[ResourceType] = ELASTIC_JOBS

    name: str
    namespace: str
    uid: str
    resource_version: str
    generation: int
    created_s: float
    min_replicas: int
    max_replicas: int
    deleting: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
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
        "resource_version": metadata.read_text("resourceVersion"),
        "generation": metadata.read_count("generation", 0),
        "created_s": metadata.read_time_s("creationTimestamp") or 0.0,
        "deleting": metadata.has("deletionTimestamp"),
        "labels": _read_words(metadata, "labels"),
        "annotations": _read_words(metadata, "annotations"),
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


def _read_words(metadata: FieldReader, name: str) -> Mapping[str, str]:
    return {str(key): str(value) for key, value in metadata.read_object(name).items()}


def _lower_scheme(url: str) -> str:
    """Return a URL whose scheme is spelled as the code compares it; `urlsplit` takes any case."""
    scheme, colon, rest = url.partition(":")
    return f"{scheme.lower()}{colon}{rest}"
