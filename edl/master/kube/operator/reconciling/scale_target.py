"""The Deployment, or the like, that a pool scales in place of pods of its own."""

from __future__ import annotations

from typing import Final

from edl.errors import InvalidObjectError
from edl.kube.client import KubeClient
from edl.kube.resource_types import ResourceType
from edl.master.kube.observation import ScaleTarget
from edl.master.kube.resources import TeacherPool

__all__ = ["find_scale_target"]

SCALED_BY: Final = "edl.io/scaled-by"
"""Annotation by which whoever may edit an object gives the moving of its `/scale` to a pool, whose name it has. Without
it, anybody who may create a pool could scale what is not theirs, by the operator's right."""
_PLURALS: Final = {"Deployment": "deployments", "StatefulSet": "statefulsets", "ReplicaSet": "replicasets"}
"""Of kinds that are scaled; of other kinds the plural is taken to be the kind with an s, as most CRDs have it."""


def find_scale_target(api: KubeClient, pool: TeacherPool) -> ScaleTarget | None:
    """Read what a pool is to scale; None if it is not there.

    Raises:
        InvalidObjectError: its kind cannot be scaled, or it is not for this pool to scale.
        KubernetesError: the API server does not answer.
    """
    target, namespace = pool.scale_target_ref, pool.namespace
    assert target is not None
    group, _, version = target.api_version.rpartition("/")
    kind = ResourceType(group, version, _PLURALS.get(target.kind, f"{target.kind.lower()}s"), target.kind)
    found = api.get(kind, target.name, namespace)
    if found is None:
        return None
    metadata = found["metadata"]
    if (metadata.get("labels") or {}).get("app.kubernetes.io/name") == "edl":
        raise InvalidObjectError(f"{target.kind} {target.name} is a part of EDL itself, which no pool scales")
    if (metadata.get("annotations") or {}).get(SCALED_BY) != pool.name:
        raise InvalidObjectError(
            f"{target.kind} {target.name} does not let pool {pool.name} scale it: whoever may edit it annotates it with"
            f" {SCALED_BY}={pool.name}"
        )
    scale = api.read_scale(kind, target.name, namespace)
    if scale is None:
        return None
    replicas, there = (scale.get("spec") or {}).get("replicas", 0), (scale.get("status") or {}).get("replicas", 0)
    if not all(isinstance(count, int) and count >= 0 for count in (replicas, there)):
        raise InvalidObjectError(f"{target.kind} {target.name}: its /scale says {replicas!r} and {there!r} replicas")
    return ScaleTarget(kind, target.name, replicas, there)
