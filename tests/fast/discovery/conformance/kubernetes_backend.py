"""A namespace of a real cluster as the conformance tests see it, behind a proxy of this process's own."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tests.fast.discovery.conformance.backends import Backend
from tests.tcp_proxy import TcpProxy

if TYPE_CHECKING:
    from tests.cluster.api import Cluster


class KubernetesBackend(Backend):
    """A namespace.

    Args:
        cluster: to ask past EDL.
        namespace: which exists.
        proxy: between EDL and the API server.
        kubeconfig: that leads to the proxy.
    """

    name = "kubernetes"

    def __init__(self, cluster: Cluster, namespace: str, proxy: TcpProxy, kubeconfig: Path) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.proxy = proxy
        self.kubeconfig = kubeconfig
        self.url = f"kubernetes://{namespace}?kubeconfig={kubeconfig}"
        self.config_maps = f"/api/v1/namespaces/{namespace}/configmaps"
        self.leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"

    def plant(self, service: str, name: str, fields: Mapping[str, Any]) -> Callable[[], None]:
        text = fields["raw"] if "raw" in fields else json.dumps({"address": "127.0.0.1", "port": 9000, **fields})
        claim = secrets.token_hex(8)
        lease = self.cluster.ask(
            self.leases,
            "POST",
            {
                "metadata": {"name": f"edl-lease-{claim}", "labels": {"edl.io/discovery": "lease"}},
                "spec": {"leaseDurationSeconds": 3600},
            },
        )
        self.cluster.ask(
            self.config_maps,
            "POST",
            {
                "metadata": {
                    "name": f"edl-instance-{claim}",
                    "labels": {
                        "edl.io/discovery": "instance",
                        "edl.io/service": service,
                        "edl.io/lease": f"edl-lease-{claim}",
                    },
                    "annotations": {"edl.io/service": service, "edl.io/lease-uid": lease["metadata"]["uid"]},
                },
                "data": {"id": name, "instance": text},
            },
        )

        def remove() -> None:
            self.cluster.ask(f"{self.config_maps}/edl-instance-{claim}", "DELETE")
            self.cluster.ask(f"{self.leases}/edl-lease-{claim}", "DELETE")

        return remove

    def break_it(self) -> None:
        self.proxy.refuse()

    def mend_it(self) -> None:
        query = {"labelSelector": "app.kubernetes.io/managed-by=edl"}
        for path in (self.leases, self.config_maps):
            self.cluster.ask(path, "DELETE", query=query)
        self.proxy.restore()


@contextlib.contextmanager
def open_kubernetes_backend(
    cluster: Cluster, folder: Path, user: Mapping[str, Any] | None = None
) -> Iterator[KubernetesBackend]:
    """Make a namespace and a proxy; `user` is whom EDL is, the administrator if None."""
    namespace = f"edl-test-{secrets.token_hex(4)}"
    config = json.loads(cluster.kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "json"))
    found = config["clusters"][0]["cluster"]
    server = urlsplit(found["server"])
    assert server.hostname is not None
    proxy = TcpProxy(server.hostname, server.port or 443)
    found.setdefault("tls-server-name", server.hostname)
    found["server"] = f"https://127.0.0.1:{proxy.port}"
    if user is not None:
        config["users"][0]["user"] = dict(user)
    path = folder / "kubeconfig.json"
    path.write_text(json.dumps(config))
    cluster.ask("/api/v1/namespaces", "POST", {"metadata": {"name": namespace}})
    try:
        yield KubernetesBackend(cluster, namespace, proxy, path)
    finally:
        proxy.close()
        cluster.ask(f"/api/v1/namespaces/{namespace}", "DELETE")
