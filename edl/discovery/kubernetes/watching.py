"""Following objects of a namespace for a watcher: what `BlockingWatch` asks, answered by a `KubeWatch`."""

from __future__ import annotations

from collections.abc import Mapping

from edl.discovery.kubernetes.api import KubernetesApi
from edl.errors import ClosedError, DiscoveryError
from edl.kube.objects import Object
from edl.kube.resource_types import CONFIG_MAPS
from edl.kube.watch import KubeWatch, ObjectKey

__all__ = ["ConfigMapWatch"]

_LENGTH_S = 60.0
"""After which a request of the watch ends and another goes on. A silent server is noticed some seconds later."""


class ConfigMapWatch:
    """Follows the ConfigMaps with certain labels."""

    def __init__(self, api: KubernetesApi, label_selector: str) -> None:
        self._target = api.target
        self._closed = False
        self._watch = KubeWatch(api.client, CONFIG_MAPS, label_selector=label_selector, length_s=_LENGTH_S)

    def await_change(self, version: int | None, wait_s: float) -> tuple[int, Mapping[ObjectKey, Object]]:
        """Wait for a version beyond `version` (None: for any answer), and return it with all objects.

        Raises:
            DiscoveryError: the API server is away.
            ClosedError: this was closed.
        """
        known = 0 if version is None and not self._watch.listed and not self._watch.stale else version
        if known is not None:
            self._watch.wait_changed(known, wait_s)
        if self._closed:
            raise ClosedError("the watch is closed")
        found, stale = self._watch.version, self._watch.stale
        if stale:
            raise DiscoveryError(stale)
        if not self._watch.listed:
            raise DiscoveryError(f"{self._target}: the API server does not answer yet")
        return found, self._watch.objects

    def close(self) -> None:
        """Follow no more; a wait under way ends."""
        self._closed = True
        self._watch.close()
