"""Stories need a store that this machine and the pods reach, and a namespace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.api import Cluster
from tests.cluster.machine import KubeMachine
from tests.kubernetes.scenarios.scene import Scene, consul_url, start_consul


@pytest.fixture
def scene(cluster: Cluster, namespace: str) -> Scene:
    """Resources in the test's namespace."""
    return Scene(cluster, namespace)


@pytest.fixture
def consul_store(machine: KubeMachine, tmp_path: Path) -> Iterator[str]:
    """URL of a real Consul, for this machine and for pods."""
    assert machine.running
    agent = start_consul(tmp_path / "consul")
    try:
        yield consul_url(agent)
    finally:
        agent.stop()


@pytest.fixture(params=["consul", "kubernetes"])
def store(request: pytest.FixtureRequest, namespace: str) -> str:
    """URL of a Consul, or of the namespace itself: a test runs with each."""
    if request.param == "kubernetes":
        return f"kubernetes://{namespace}"
    return str(request.getfixturevalue("consul_store"))
