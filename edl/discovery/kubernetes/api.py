"""The cluster's API behind a boundary: another thread makes the main thread's calls, and errors are discovery's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from edl.discovery.common.call_thread import CallThread
from edl.discovery.common.resource import Resource
from edl.discovery.kubernetes.target import KubernetesTarget
from edl.errors import (
    AccessDeniedError,
    ConflictError,
    DiscoveryError,
    InvalidObjectError,
    KubernetesError,
    QuotaExceededError,
)
from edl.kube.client import KubeClient
from edl.kube.objects import Object
from edl.kube.resource_types import ResourceType

__all__ = ["KubernetesApi"]

R = TypeVar("R")


class KubernetesApi(Resource):
    """What discovery asks of a namespace.

    All methods raise DiscoveryError where the API server is away or refuses, with what to do about it, and
    ConflictError where an object is not as was expected.

    A signal handler may close a store in the middle of any call of the main thread. urllib3 holds locks there, which
    the threads to be closed need: so another thread makes the main thread's calls.

    Args:
        target: which cluster and namespace.

    Attributes:
        client: for background threads that follow objects.
        pod: the pod that owns this process's objects, so that they go with it; None outside of this namespace.

    Raises:
        SettingsError: no cluster is configured.
    """

    def __init__(self, target: KubernetesTarget) -> None:
        super().__init__()
        self.target = target
        self.client = KubeClient(target.settings)
        # Of an owner in another namespace or cluster the garbage collector finds nothing, and deletes what it owns.
        own = self.client.pod_namespace == self.client.namespace
        self.pod = target.pod if own else None
        self._calls = self._own(CallThread("edl-kubernetes"))
        self._own(self.client)

    def get(self, kind: ResourceType, name: str) -> Object | None:
        """Read an object; None where there is none."""
        return self._run(lambda: self.client.get(kind, name))

    def list(self, kind: ResourceType, label_selector: str, *, metadata_only: bool = False) -> list[Object]:
        """Read all objects with these labels, as they were at a moment."""
        return self._run(
            lambda: self.client.list(kind, label_selector=label_selector, metadata_only=metadata_only).items
        )

    def create(self, kind: ResourceType, obj: Mapping[str, Any]) -> Object:
        """Make an object; ConflictError where there is one of its name."""
        return self._run(lambda: self.client.create(kind, obj))

    def patch(self, kind: ResourceType, name: str, patch: Mapping[str, Any]) -> Object | None:
        """Change fields; None where there is no such object, ConflictError where its version is another."""
        try:
            return self._run(lambda: self.client.patch(kind, name, patch))
        except ConflictError as exc:
            if "resourceVersion" in patch.get("metadata", {}):
                raise
            raise DiscoveryError(str(exc)) from exc  # others write it faster than the server can merge

    def delete(self, kind: ResourceType, name: str, *, uid: str = "", resource_version: str = "") -> bool:
        """Delete an object; False where there is none, ConflictError where it is another or of another version."""
        return self._run(lambda: self.client.delete(kind, name, uid=uid, resource_version=resource_version))

    def _run(self, function: Callable[[], R]) -> R:
        with _translated():
            return self._calls.run(function)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (KubernetesError, AccessDeniedError, InvalidObjectError, QuotaExceededError) as exc:
        raise DiscoveryError(str(exc)) from exc
