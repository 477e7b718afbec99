"""`TeacherPool`: teachers that borrow what is idle."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from edl.kube.resource_types import TEACHER_POOLS, ResourceType
from edl.master.kube.resources.fields import FieldReader, SpecProblem
from edl.master.kube.resources.member_owner import MemberOwner, check_template, read_owner

__all__ = ["ScaleTargetRef", "TeacherPool", "parse_teacher_pool"]

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
        service: that they register as.
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
    """Read a `TeacherPool`.

    Returns:
        The pool; or, if it cannot be worked on, why not, first what to mend first.
    """
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
