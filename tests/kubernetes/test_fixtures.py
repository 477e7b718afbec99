"""The fixtures themselves: a pod of this project runs as a user without rights, on each node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.cluster.api import Cluster

VERSION = 'import os, edl, numpy, grpc; print(f"edl {edl.__version__} as {os.getuid()}")'


def test_pod_runs_project(cluster: Cluster, namespace: str, pod_template: Callable[..., dict[str, Any]]) -> None:
    for node in cluster.nodes():
        template = pod_template(["python", "-c", VERSION], node=node)
        cluster.run_pod(namespace, f"hello-{node}", template)
    for node in cluster.nodes():
        name = f"hello-{node}"
        cluster.wait(f"the end of {name}", lambda: cluster.pod_phase(namespace, name) == "Succeeded", namespace)  # noqa: B023
        assert "edl 0.1.0 as 65532" in cluster.kubectl("-n", namespace, "logs", name)


def test_gpus_are_advertised(cluster: Cluster, gpus: Callable[[str, int], None], namespace: str) -> None:
    node = cluster.nodes()[0]
    gpus(node, 3)
    found = cluster.ask(f"/api/v1/nodes/{node}")["status"]["allocatable"]["nvidia.com/gpu"]
    assert found == "3"
