"""`KubeApi`: the calls of the API server that the operator makes, which are those that RBAC has to allow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from edl.kube.objects import Object, ObjectList
from edl.kube.resource_types import ResourceType

__all__ = ["KubeApi"]


class KubeApi(Protocol):
    """A part of `edl.kube.KubeClient`, whose documentation says what each call means and raises."""

    def get(self, kind: ResourceType, name: str, namespace: str | None = None) -> Object | None:
        """Read an object."""

    def list(
        self, kind: ResourceType, namespace: str | None = None, *, label_selector: str = "", field_selector: str = ""
    ) -> ObjectList:
        """Read all objects of a kind."""

    def create(self, kind: ResourceType, obj: Mapping[str, Any], namespace: str | None = None) -> Object:
        """Make an object."""

    def apply(self, kind: ResourceType, obj: Mapping[str, Any], namespace: str | None = None) -> Object:
        """Make an object, or change its fields to these."""

    def patch(
        self,
        kind: ResourceType,
        name: str,
        patch: Mapping[str, Any],
        namespace: str | None = None,
        *,
        subresource: str = "",
    ) -> Object | None:
        """Change fields of an object."""

    def delete(
        self,
        kind: ResourceType,
        name: str,
        namespace: str | None = None,
        *,
        uid: str = "",
        grace_period_s: int | None = None,
    ) -> bool:
        """Delete an object."""

    def read_scale(self, kind: ResourceType, name: str, namespace: str | None = None) -> Object | None:
        """Read how many replicas are wanted and there."""

    def write_scale(self, kind: ResourceType, name: str, replicas: int, namespace: str | None = None) -> Object | None:
        """Change how many replicas are wanted."""

    def has_resource(self, group: str, version: str, plural: str) -> bool:
        """Whether the server has a kind."""
