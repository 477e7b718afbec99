"""The Deployment, or the like, that a pool scales in place of pods of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from edl.errors import InvalidObjectError
from edl.kube.resource_types import ResourceType
from edl.master.kube.operator.reconciling.kube_api import KubeApi
from edl.master.kube.resources import ScaleTargetRef

__all__ = ["ScaleTarget", "find_scale_target"]

_PLURALS: Final = {"Deployment": "deployments", "StatefulSet": "statefulsets", "ReplicaSet": "replicasets"}
"""Of kinds that are scaled; of other kinds the plural is taken to be the kind with an s, as most CRDs have it."""


@dataclass(frozen=True)
class ScaleTarget:
    """A scale target as it is.

    Attributes:
        type: of the target.
        name: of the target.
        replicas: that it is to have.
        ready: that it has; `/scale` does not say how many of them are ready.
    """

    type: ResourceType
    name: str
    replicas: int
    ready: int


def find_scale_target(api: KubeApi, target: ScaleTargetRef, namespace: str) -> ScaleTarget | None:
    """Read a pool's scale target; None if it is not there.

    Args:
        api: calls of the API server.
        target: as the pool names it.
        namespace: of the pool.

    Raises:
        InvalidObjectError: its kind cannot be scaled.
        KubernetesError: the API server does not answer.
    """
    group, _, version = target.api_version.rpartition("/")
    kind = ResourceType(group, version, _PLURALS.get(target.kind, f"{target.kind.lower()}s"), target.kind)
    scale = api.read_scale(kind, target.name, namespace)
    if scale is None:
        return None
    replicas, there = (scale.get("spec") or {}).get("replicas", 0), (scale.get("status") or {}).get("replicas", 0)
    if not all(isinstance(count, int) and count >= 0 for count in (replicas, there)):
        raise InvalidObjectError(f"{target.kind} {target.name}: its /scale says {replicas!r} and {there!r} replicas")
    return ScaleTarget(kind, target.name, replicas, there)
