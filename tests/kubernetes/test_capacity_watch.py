"""What is idle in a real cluster, and what a service account without `edl-capacity` is told."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edl.kube.client import KubeClient
from edl.kube.settings import KubeSettings
from edl.master.kube.capacity.watch import CapacityWatch
from tests.cluster.api import Cluster
from tests.cluster.operator_process import ACCOUNT, install_account, remove_account


def count(watch: CapacityWatch, template: dict[str, Any]) -> int | None:
    capacity = watch.current()
    return None if capacity is None else capacity.count_fitting(template)


def test_idle_gpus_are_followed(
    cluster: Cluster, namespace: str, gpus: Callable[[str, int], None], pod_template: Callable[..., dict[str, Any]]
) -> None:
    first, second = cluster.nodes()[:2]
    changes = threading.Event()
    template = pod_template(["sleep", "1000"], gpus=1)
    template["spec"]["terminationGracePeriodSeconds"] = 0
    with contextlib.closing(CapacityWatch(cluster.client, changes.set)) as watch:
        assert watch.wait_known(30)
        assert count(watch, template) == 0
        gpus(first, 2)
        gpus(second, 1)
        cluster.wait("three are idle", lambda: count(watch, template) == 3)
        assert changes.is_set()
        cluster.run_pod(namespace, "holder", template)
        cluster.wait("two are idle", lambda: count(watch, template) == 2, namespace)
        cluster.ask(f"/api/v1/namespaces/{namespace}/pods/holder", "DELETE")
        cluster.wait("three again", lambda: count(watch, template) == 3, namespace)


def test_not_allowed_is_not_idle(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    """Without the role nothing is known, which is no zero; with it, a while later, all is."""
    install_account(cluster, namespace, capacity=False)
    cluster.write_account_kubeconfig(namespace, ACCOUNT, tmp_path / "account.json")
    settings = KubeSettings(kubeconfig=str(tmp_path / "account.json"), namespace=namespace)
    with KubeClient(settings) as client, contextlib.closing(CapacityWatch(client)) as watch:
        cluster.wait("the reason", lambda: "nodes" in watch.reason or "pods" in watch.reason)
        assert watch.current() is None
        try:
            install_account(cluster, namespace, capacity=True)
            cluster.wait("what is idle", lambda: watch.current() is not None, timeout_s=60)
            assert watch.reason == ""
        finally:
            remove_account(cluster, namespace)
