"""A namespace in this machine's cluster, with GPUs, a store, and an operator."""

from __future__ import annotations

import contextlib
import functools
import secrets
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster import pods
from tests.cluster.api import Cluster
from tests.cluster.locks import exclusive_lock, shared_lock
from tests.cluster.machine import KubeMachine
from tests.cluster.operator_process import OperatorFactory
from tests.kubernetes.scenarios.scene import Scene, open_consul
from tests.plugins_kubernetes import delete_namespace, install_resources, takes_pods, wait_for_deletion

__all__ = ["Stage", "open_stage"]


@dataclass(frozen=True)
class Stage:
    """A namespace that is deleted afterwards.

    Attributes:
        scene: Resources in the namespace.
        operator: Starts operators for the namespace.
        store: URL of a Consul server that pods and this machine can reach.
        pod_template: Makes pods that run this project; see `tests.cluster.pods.pod_template`.
        folder: Folder for files.
    """

    scene: Scene
    operator: OperatorFactory
    store: str
    pod_template: Callable[..., dict[str, Any]]
    folder: Path


@contextlib.contextmanager
def open_stage(gpus_per_node: int = 0) -> Iterator[Stage]:
    """Start the cluster if it is not running, and make a namespace, which has all the GPUs to itself."""
    machine = KubeMachine()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edl-kube-benchmark-")))
        folder.chmod(0o755)
        with exclusive_lock("up"):
            machine.up()
            stack.enter_context(shared_lock("use"))
            image = machine.load_image(pods.make_root(folder / "image"))
            machine.write_kubeconfig(folder / "kubeconfig.json")
            cluster = Cluster(folder / "kubeconfig.json", machine, image)
            stack.callback(cluster.close)
            install_resources(cluster)
        stack.enter_context(shared_lock("nodes"))
        stack.enter_context(exclusive_lock("gpus"))
        for node in cluster.nodes() if gpus_per_node else ():
            stack.callback(machine.set_gpus, node, 0)
            machine.set_gpus(node, gpus_per_node)
        namespace = f"edl-bench-{secrets.token_hex(4)}"
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        cluster.ask("/api/v1/namespaces", "POST", body)
        stack.callback(wait_for_deletion, cluster, namespace)
        stack.callback(delete_namespace, cluster, namespace)
        cluster.wait("the namespace's service account and its token", lambda: takes_pods(cluster, namespace))
        store = stack.enter_context(open_consul(folder / "consul"))
        operator = stack.enter_context(contextlib.closing(OperatorFactory(cluster, namespace, folder)))
        pod_template = functools.partial(pods.pod_template, image)
        scene = Scene(cluster, namespace, operator, pod_template)
        yield Stage(scene, operator, store, pod_template, folder)
