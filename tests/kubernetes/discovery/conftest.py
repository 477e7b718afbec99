"""The fixtures of the conformance suite, over a namespace of the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.fast.discovery.conformance.backends import KubernetesBackend, open_kubernetes_backend
from tests.fast.discovery.conformance.fixtures import folder, member, registry, service, store

if TYPE_CHECKING:
    from tests.cluster.api import Cluster

__all__ = ["folder", "member", "registry", "service", "store"]


@pytest.fixture(scope="session")
def namespace_backend(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesBackend]:
    """The same for all tests."""
    with open_kubernetes_backend(cluster, tmp_path_factory.mktemp("kubernetes")) as backend:
        yield backend


@pytest.fixture
def backend(namespace_backend: KubernetesBackend) -> KubernetesBackend:
    return namespace_backend
