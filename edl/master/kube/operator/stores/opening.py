"""Opens stores of resources: those in Kubernetes, in the cluster whose resources they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Final
from urllib.parse import urlsplit

from edl.discovery import Store, open_store
from edl.kube.settings import KubeSettings

__all__ = ["open_cluster_store"]

_TIMEOUT_S: Final = 5.0
"""Of a request, as `open_store` has it."""


def open_cluster_store(url: str, kube: KubeSettings) -> Store:
    """Open a store as the members of a cluster see it: `kubernetes://NAMESPACE` is in that cluster.

    `open_store` would take the cluster of the current context, which need not be the operator's.

    Args:
        url: of the store. With a context or kubeconfig of its own, it names another cluster.
        kube: which cluster, and as whom.

    Raises:
        SettingsError: the URL cannot be used.
        DiscoveryError: the store cannot be opened just now.
    """
    parts = urlsplit(url)
    if parts.scheme != "kubernetes" or parts.query:
        return open_store(url)
    from edl.discovery.kubernetes.store import KubernetesStore
    from edl.discovery.kubernetes.target import KubernetesTarget

    target = KubernetesTarget.of(parts, _TIMEOUT_S)
    settings = replace(kube, namespace=target.settings.namespace, timeout_s=target.settings.timeout_s)
    return KubernetesStore(replace(target, settings=settings))
